"""What drivers of Ray and Spark share: a function that runs the script on each worker. Pure.

Both start one process a rank, with torchrun's variables, and call a function there. The script's
text and those of the modules beside it travel along, so that no folder has to be shared.
"""

from nbdist.client.export.jobs.job import Job

_RUN_SCRIPT = '''
def run_script(job: dict) -> None:
    """Run the script in this process, which is one of its ranks."""
    import os
    import runpy
    import socket
    import sys
    import tempfile
    from pathlib import Path

    import torch.distributed as dist

    os.environ.update(job["environment"])
    if dist.is_initialized():
        # A script makes its own group, with its own settings; rank 0 has a free port for it.
        with socket.socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(port[0])
    with tempfile.TemporaryDirectory() as folder:
        # Files, not only their text: tracebacks and torch.compile read the lines again.
        for name, text in job["files"].items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        script = os.path.join(folder, job["script"])
        sys.path.insert(0, folder)
        sys.argv = [script, *job["arguments"]]
        runpy.run_path(script, run_name="__main__")
'''


def driver(job: Job, *, docstring: str, imports: str, main: str) -> str:
    """Return a driver's text.

    Args:
        job: What it starts.
        docstring: The module's, without quotes.
        imports: Lines that import what `main` needs.
        main: Lines below `if __name__ == "__main__":`, where `job` is what `run_script` takes.
    """
    values = {
        "script": job.script,
        "arguments": list(job.arguments),
        "environment": dict(job.environment),
    }
    indented = "\n".join(f"    {line}".rstrip() for line in main.strip().splitlines())
    return (
        f'"""{docstring.strip()}\n"""\n\n'
        f"{imports.strip()}\n\n"
        "FOLDER = Path(__file__).parent\n"
        f"FILES = {[job.script, *job.modules]!r}\n\n"
        f"{_RUN_SCRIPT}\n\n"
        'if __name__ == "__main__":\n'
        f"    job = {values!r}\n"
        '    job["files"] = {name: (FOLDER / name).read_text(encoding="utf-8") for name in FILES}\n'
        f"{indented}\n"
    )
