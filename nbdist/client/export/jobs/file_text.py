"""The text of job files: YAML with a heading of comments, and the line that starts the ranks. Pure.

Ranks are numbered by nodes (`--node-rank`), not by a rendezvous, which would number them in the
order in which nodes arrive: the same job then gives the same losses.
"""

import shlex
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any, Final

import yaml

from nbdist.client.export.jobs.job import Job

PORT: Final = 29500  # torch's own default for rank 0
_WIDTH: Final = 96


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # it ships no types
    """Writes texts of several lines as blocks, as people do."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def comment(sentences: Iterable[str]) -> str:
    """Return lines that begin with `#`; what begins with a space is a command, and not wrapped."""
    lines = []
    for sentence in sentences:
        wrapped = [sentence] if sentence[:1] in ("", " ") else textwrap.wrap(sentence, _WIDTH - 2)
        lines += [f"# {line}".rstrip() for line in wrapped]
    return "\n".join(lines) + "\n"


def yaml_file(heading: Iterable[str], document: Mapping[str, Any]) -> str:
    """Return a YAML file; values that are None, or empty, are left out."""
    text = yaml.dump(
        _without_empty(document), Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True
    )
    return f"{comment(heading)}\n{text}"


def _without_empty(value: Any) -> Any:
    if isinstance(value, Mapping):
        kept = {key: _without_empty(item) for key, item in value.items()}
        return {
            key: item for key, item in kept.items() if item is not None and item not in ({}, [])
        }
    return [_without_empty(item) for item in value] if isinstance(value, list | tuple) else value


def torchrun(job: Job, *, head: str, node: str, port: str = str(PORT), script: str = "") -> str:
    """Return the shell line that starts the ranks of one node.

    Args:
        job: What to start.
        head: The first node's name, as the shell writes it: `"$head"`.
        node: This node's number, likewise.
        port: Of rank 0, likewise.
        script: The script's path there, if not its name alone; as the shell writes it.
    """
    where = (
        f"--nnodes={job.nodes} --node-rank={node} --master-addr={head} --master-port={port}"
        if job.nodes > 1
        else "--standalone"
    )
    words = f"torchrun {where} --nproc-per-node={job.ranks_per_node} {script or job.script}"
    return " ".join([words, *map(shlex.quote, job.arguments)])


def pip_install(job: Job) -> list[str]:
    """Return the shell line that installs the job's packages, in a list; none without packages."""
    return [f"pip install {shlex.join(job.packages)}"] if job.packages else []


def exports(job: Job) -> list[str]:
    """Return shell lines that set the job's variables."""
    return [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
