"""Weights through files, from cells: written by shards, read by another layout in new processes."""

import json

import pytest

from tests.cluster.conftest import Kernel

TRAIN = """
class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
    def forward(self, x):
        for block in self.blocks:
            x = block(x).relu()
        return x
"""
SUM = "print('sum', sum(float(t.double().sum()) for t in layout.state_dict().values()))"


def sum_of(text: str) -> float:
    return float(json.loads(text.partition("sum ")[2].splitlines()[0]))


def test_what_shards_have_saved_new_ranks_read_into_another_layout(notebook: Kernel) -> None:
    saved = notebook.cell(
        TRAIN
        + "layout = nbdist.parallelize(lambda: Own(), 'zero3')\n"
        + "layout.save_pretrained('saved')\n"
        + f"if rank == 0: {SUM}\n"
        + "else: layout.state_dict()"
    )
    assert saved.error is None, saved.error
    assert notebook.run("%dist restart", timeout_s=100).error is None
    read = notebook.cell(
        TRAIN
        + "layout = nbdist.from_pretrained(lambda: Own(), 'ddp', weights='saved')\n"
        + f"if rank == 0: {SUM}\n"
        + "else: layout.state_dict()"
    )
    assert read.error is None, read.error
    assert sum_of(read.text) == pytest.approx(sum_of(saved.text), rel=1e-12)


def test_a_folder_that_is_not_there_is_one_error_of_three_lines(notebook: Kernel) -> None:
    ran = notebook.cell("nbdist.from_pretrained('nowhere', 'ddp')")
    assert ran.error is not None
    assert ran.error[1].count("CheckpointError: There is no folder nowhere.") == 1
    assert "downloads nothing" in ran.error[1]
