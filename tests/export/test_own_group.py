"""Scripts whose cells, functions and modules make the process group, or end it, under torchrun."""

from pathlib import Path

from nbdist.client.export.cells import NotebookCell
from nbdist.client.export.export import ExportRequest, export
from nbdist.client.notebook.arguments import parse_dist, parse_distributed
from tests.export.torchrun import torchrun

MODULE = "from torch.distributed import init_process_group\ndef setup():\n    init_process_group()"
CELLS = [
    '%%distributed\nimport torch.distributed as d\nd.init_process_group("gloo", rank=rank)',
    "%%distributed\ndef begin():\n    dist.init_process_group()\nbegin()",
    "%%distributed\nfrom own_setup import setup\nsetup()",
    "%%distributed\nx = torch.ones(1)\ndist.all_reduce(x)\nif rank == 0: print('sum', x.item())",
    "%%distributed\ndist.destroy_process_group()",
]


def test_a_script_has_one_group_whoever_makes_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "own_setup.py").write_text(MODULE)
    cells = [NotebookCell(number, source) for number, source in enumerate(CELLS, 1)]
    request = ExportRequest(tmp_path / "train.py")
    made = export(request, cells, parse_dist, parse_distributed, folder=tmp_path)
    assert made.script.modules == ("own_setup.py",)
    ran = torchrun(tmp_path / "train.py", 2)
    assert ran.returncode == 0, ran.stderr
    assert "sum 2.0" in ran.stdout
