"""`%dist retry` after data that could not be read: the loop goes on where it stopped."""

from pathlib import Path

import pytest

from nbdist import RankError, Session

pa = pytest.importorskip("pyarrow")
import pyarrow.parquet as pq  # noqa: E402

MAKE = """
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
nbdist.parallelize(model, "ddp")
opt = torch.optim.SGD(model.parameters(), lr=0.001)
train = nbdist.loader({folder!r}, global_batch=16, interleave=2, seed=3)
seen = []
"""
LOOP = """
for batch in train:
    model(batch["id"][:, None] / 4000.0).pow(2).mean().backward()
    opt.step(); opt.zero_grad()
    seen += batch["id"].tolist()
train.epoch
"""


def test_a_retry_goes_on_with_the_batch_whose_file_was_cut_short_once_it_is_whole(
    session: Session, tmp_path: Path
) -> None:
    for n in range(2):
        table = pa.table({"id": list(range(400 * n, 400 * n + 400))})
        pq.write_table(table, tmp_path / f"{n}.parquet", row_group_size=40)
    session.run(MAKE.format(folder=str(tmp_path)))
    broken = tmp_path / "1.parquet"
    whole = broken.read_bytes()
    broken.write_bytes(whole[:-1500])  # the footer, and the last row groups
    with pytest.raises(RankError) as failed:
        session.run(LOOP, track=False)
    text = str(failed.value)
    assert "DataError" in text
    assert "1.parquet, row group" in text
    assert "fix the cell" not in text
    assert text.rstrip().splitlines()[-1].endswith("then %dist retry")
    broken.write_bytes(whole)
    assert session.retry().value_list == [1, 1]
    seen = session.run("seen").value_list
    assert sorted(seen[0] + seen[1]) == list(range(800))
    assert session.run("nbdist.coverage().epochs[-1].is_exact").value_list == [True, True]
