"""Each block of code in the documentation runs as it stands, on two ranks, or says what it needs.

A block of Python is a cell: of the notebook where it begins with a magic, starts ranks itself or
asks what takes none, else of the ranks. Where it needs what a test has not, the line above says so
in a comment that readers do not see: `<!-- needs: Slurm -->`. What a fragment takes as given is in
`GIVEN`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.conftest import LONGEST_S, ROOT, Kernel

_BLOCK = re.compile(
    r"(?:^ *<!-- needs: (?P<needs>[^\n]+) -->\n\s*)?"
    r"^ *```(?P<language>\w*)\n(?P<code>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)
_COMMAND = re.compile(r"^(?:%|>>> )", re.MULTILINE)  # of a block that is called text
_STARTS = re.compile(r"^%dist start|nbdist\.start\(", re.MULTILINE)
_WITHOUT_RANKS = re.compile(r"nbdist\.(?:estimate|advise|dry)\(")
# What pages take as given: names that a reader's notebook has, and nothing of nbdist's.
NAMES = """
from torch.nn import functional as F
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    def forward(self, x):
        return self.layers(x)
_x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
dataset = torch.utils.data.TensorDataset(_x, _x[:, :4].argmax(1))
validation_loss = 0.5
model = Net()
"""
TRAIN = """
def train(model=model, epochs=1):
    opt = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = nbdist.loader(dataset, global_batch=32)
    for _ in range(epochs):
        for x, y in loader:
            F.cross_entropy(model(x), y).backward()
            opt.step(); opt.zero_grad()
"""
LOADER = "train = nbdist.loader(dataset, global_batch=64)"
GIVEN = {
    "checkpoints.md": LOADER,
    "export.md": "print(rank)",
    "faults.md": LOADER,
    "jobs.md": "print(rank)",
    "layouts.md": """
layout = nbdist.parallelize(model, "zero2")
x, y = _x[:4].clone().requires_grad_(), _x[:4, :4].argmax(1)
""",
    "notebooks-as-tests.md": 'nbdist.parallelize(model, "ddp")'
    + TRAIN.replace("epochs=1", "epochs=9"),
    "profiling.md": 'nbdist.parallelize(model, "ddp")' + TRAIN,
    "scaling.md": 'nbdist.parallelize(model, "ddp")' + TRAIN + "train()",
    "weights.md": """
config, GPT = None, lambda config: Net()
nbdist.parallelize(lambda: Net(), "ddp").save_pretrained("gpt")
x = _x[:4]
""",
}


@dataclass(frozen=True, slots=True)
class Block:
    """One block of a page, with the line it begins in."""

    line: int
    language: str
    needs: str
    code: str

    @property
    def is_of_notebook(self) -> bool:
        of_notebook = _STARTS.search(self.code) or _WITHOUT_RANKS.search(self.code)
        return self.code.startswith("%") or of_notebook is not None


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        yield Block(line, found["language"], found["needs"] or "", found["code"])


def runs(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and not block.needs]


# Those that export come first: a script has all cells that the kernel has run.
PAGES = sorted(
    [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")],
    key=lambda page: ("%dist export" not in page.read_text(), page),
)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel of its own: every `%dist start` starts two ranks on CPUs there."""
    folder = tmp_path_factory.mktemp("reader")
    kernel = Kernel(folder, NBDIST_TEST_RANKS="2", NBDIST_STATIC="1")
    kernel.run("%load_ext nbdist")
    yield kernel
    kernel.close()


def ready(kernel: Kernel, page: Path) -> None:
    """Have two ranks with what the page takes as given: those that come first take nothing."""
    if (
        "Out: [2.0, 2.0]"
        not in kernel.cell("_t = torch.ones(2); dist.all_reduce(_t); _t.tolist()").text
    ):
        kernel.run("%dist stop")
        assert kernel.run("%dist start").error is None
    if page.name not in ("README.md", "index.md"):
        assert kernel.cell(NAMES + GIVEN.get(page.name, ""), "--no-track").error is None


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if runs(page)], ids=_name)
def test_a_page_runs_as_it_stands(reader: Kernel, page: Path) -> None:
    for made in reader.folder.glob("*.*"):  # by the page before, such as its script
        if made.is_file():
            made.unlink()
    is_ready = False
    for block in runs(page):
        if _STARTS.search(block.code):
            reader.run("%dist stop")
            is_ready = False
        elif not is_ready:
            ready(reader, page)
            is_ready = True
        code = block.code if block.is_of_notebook else "%%distributed\n" + block.code
        # What takes no ranks imports torch in a process of its own, and prints at its end.
        bound_s = 4 * LONGEST_S if _WITHOUT_RANKS.search(code) else LONGEST_S
        ran = reader.run(code, timeout_s=bound_s)
        assert ran.error is None, f"{page.name}:{block.line}\n{ran.error[2]}"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_a_block_runs_or_says_what_it_needs_or_is_text(page: Path) -> None:
    assert page.read_text().count("```") == 2 * len(list(blocks(page)))
    for block in blocks(page):
        is_output = block.language == "text" and not _COMMAND.search(block.code)
        assert block.needs or block.language == "python" or is_output, f"line {block.line}"
