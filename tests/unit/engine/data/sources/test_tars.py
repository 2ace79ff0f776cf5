"""WebDataset's tars, against what the `webdataset` package reads from them."""

import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pytest
import webdataset

from nbdist.engine.data import decode, services
from nbdist.engine.data.sources import tars
from nbdist.engine.data.sources.source import Columns
from nbdist.shared.errors import DataError, UsageError


def write(path: Path, files: Mapping[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))


def npy(values: Any) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def png() -> bytes:
    from PIL import Image

    content = io.BytesIO()
    Image.new("RGB", (3, 2), (9, 8, 7)).save(content, "png")
    return content.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tars with all that is decoded, folders, a file without ending, and names of two dots."""
    for shard in range(2):
        files = {"__about__": b"no data", f"in/{shard}-readme": b"no ending"}
        for i in range(shard * 3, shard * 3 + 3):
            stem = f"in/{i:04}"
            files |= {f"{stem}.png": png(), f"{stem}.cls": str(i).encode()}
            files |= {f"{stem}.left.TXT": f"the {i}th".encode(), f"{stem}.json": b'{"a": [1]}'}
            files |= {f"{stem}.npy": npy(np.full((2, 2), i)), f"{stem}.bin": b"\0\1"}
        write(tmp_path / f"train-{shard}.tar", files)
    return tmp_path


def every(source: tars.TarSource) -> list[Columns]:
    """Return all samples, decoded."""
    found = []
    for group in range(len(source.sizes)):
        read = source.read(group)
        rows = zip(*read.values(), strict=True)
        found += [decode.decoded(dict(zip(read, row, strict=True))) for row in rows]
    return found


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample in values that can be compared, without what webdataset adds."""
    return {
        name: np.asarray(value).tolist() if name in ("png", "npy") else value
        for name, value in sample.items()
        if name not in ("__url__", "__local_path__")
    }


def test_samples_are_those_that_webdataset_reads(folder: Path) -> None:
    ours = every(tars.open_tars([f"{folder}/train-{{0..1}}.tar"], None, None))
    theirs = []
    for path in sorted(folder.glob("*.tar")):
        with path.open("rb") as stream:
            opened = {"url": str(path), "stream": stream}
            files = webdataset.tariterators.tar_file_expander([opened])
            theirs += list(webdataset.tariterators.group_by_keys(files))
    handlers = [webdataset.autodecode.imagehandler("pil")]
    decoder = webdataset.autodecode.Decoder(handlers)
    assert [plain(one) for one in ours] == [plain(decoder(one)) for one in theirs]
    assert len(ours) == 6


def test_a_stores_tars_are_read_as_those_of_this_machine(folder: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in sorted(folder.glob("*.tar")):
        store.pipe(f"/tars/{path.name}", path.read_bytes())
    far = tars.open_tars(["memory://tars/train-*.tar"], None, None)
    assert [plain(one) for one in every(far)] == [
        plain(one) for one in every(tars.open_tars([f"{folder}/*.tar"], None, None))
    ]
    store.rm("/tars", recursive=True)


def test_large_tars_are_read_in_parts_that_begin_at_a_sample(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = tars.open_tars([f"{folder}/*.tar"], None, None)
    monkeypatch.setattr(tars, "GROUP_BYTES", 7000)
    parts = tars.open_tars([f"{folder}/*.tar"], None, None)
    assert (list(whole.sizes), list(parts.sizes)) == ([3, 3], [2, 1, 2, 1])
    assert [plain(one) for one in every(parts)] == [plain(one) for one in every(whole)]
    assert parts.fingerprint != whole.fingerprint


def test_headers_are_read_once_a_session_and_again_when_a_tar_has_changed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services.here, "indexes", tmp_path / "indexes")
    path = folder / "train-0.tar"
    tars.open_tars([path], None, None)
    (noted,) = (tmp_path / "indexes").iterdir()
    told = json.loads(noted.read_text())
    told["suffixes"].append("from.the.note")
    noted.write_text(json.dumps(told))
    assert "from.the.note" in tars.open_tars([path], None, None).columns
    write(path, {"1.txt": b"new"})
    assert tars.open_tars([path], None, None).columns == ["__key__", "txt"]


def test_columns_choose_suffixes_and_missing_files_are_none(tmp_path: Path) -> None:
    write(tmp_path / "a.tar", {"1.cls": b"1", "1.txt": b"one", "2.cls": b"2"})
    source = tars.open_tars([tmp_path / "a.tar"], ["txt", "cls"], None)
    assert source.read(0) == {"txt": [b"one", None], "cls": [b"1", b"2"]}
    with pytest.raises(UsageError, match=r"has no jpg.\nDo:  it has cls, txt"):
        tars.open_tars([tmp_path / "a.tar"], ["jpg"], None)


def test_what_is_no_tar_is_cut_short_or_was_written_anew_is_said(tmp_path: Path) -> None:
    (tmp_path / "no.tar").write_bytes(b"x" * 4096)
    with pytest.raises(DataError, match=r"no\.tar is no tar, or is cut short"):
        tars.open_tars([tmp_path / "no.tar"], None, None)
    write(tmp_path / "empty.tar", {"readme": b"no sample"})
    with pytest.raises(DataError, match="has no sample"):
        tars.open_tars([tmp_path / "empty.tar"], None, None)
    write(tmp_path / "a.tar", {"1.bin": b"1" * 4000, "2.bin": b"2" * 4000})
    source = tars.open_tars([tmp_path / "a.tar"], None, None)
    write(tmp_path / "a.tar", {"1.bin": b"1" * 10000})
    with pytest.raises(DataError, match=r"a\.tar, bytes 0 to 9,216"):
        source.read(0)


@pytest.mark.parametrize(
    ("path", "paths"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{08..10}.tar", ["a-08.tar", "a-09.tar", "a-10.tar"]),
        ("{x,y}/{0..1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
    ],
)
def test_braces_stand_for_many_paths(path: str, paths: list[str]) -> None:
    assert tars.braces(path) == paths


def test_batches_are_tensors_where_samples_make_one() -> None:
    samples = [{"cls": i, "npy": np.zeros(2), "txt": str(i), "odd": np.zeros(i)} for i in (1, 2)]
    batch = decode.collate(samples)
    assert batch["cls"].tolist() == [1, 2]
    assert list(batch["npy"].shape) == [2, 2]
    assert batch["txt"] == ["1", "2"]
    assert [len(one) for one in batch["odd"]] == [1, 2]
