"""Parts of tensors from files of safetensors, byte by byte, against torch's own slices."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nbdist.engine.layout.weights import safetensors_file
from nbdist.engine.layout.weights.safetensors_file import header_of, read_box, stored_in
from nbdist.shared.errors import CheckpointError


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    shapes = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    content = [safetensors_file.bytes_of(t.contiguous()).tobytes() for t in tensors.values()]
    path.write_bytes(header_of(shapes, {"format": "pt"}) + b"".join(content))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(1, 9), min_size=0, max_size=4))
    begins = [draw(st.integers(0, n - 1)) for n in shape]
    sizes = [draw(st.integers(0, n - b)) for n, b in zip(shape, begins, strict=True)]
    return shape, begins, sizes


@given(
    box=boxes(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    target_dtype=st.sampled_from([torch.float32, None]),
    room=st.sampled_from([1, 7, 64, 1 << 20]),
    turned=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_a_box_is_what_a_slice_is(
    tmp_path_factory: pytest.TempPathFactory,
    box: tuple[list[int], list[int], list[int]],
    dtype: torch.dtype,
    target_dtype: torch.dtype | None,
    room: int,
    turned: bool,
) -> None:
    shape, begins, sizes = box
    whole = torch.randint(-100, 100, shape).to(dtype)
    path = tmp_path_factory.getbasetemp() / "box.safetensors"
    write(path, {"before": torch.ones(3), "it": whole})
    target = torch.zeros(sizes, dtype=target_dtype or dtype)
    if turned and len(sizes) == 2:  # not contiguous
        target = torch.zeros(sizes[::-1], dtype=target_dtype or dtype).t()
    with pytest.MonkeyPatch.context() as patch, path.open("rb") as file:
        patch.setattr(safetensors_file, "_READ_BYTES", room)
        read_box(file.fileno(), stored_in(path)["it"], begins, target)
    for dim, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        whole = whole.narrow(dim, begin, size)
    assert torch.equal(target, whole.to(target.dtype))


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"it": torch.ones(100)})
    stored = stored_in(path)["it"]
    os.truncate(path, 200)
    with path.open("rb") as file, pytest.raises(OSError, match="the file ends before"):
        read_box(file.fileno(), stored, [0], torch.zeros(100))


@pytest.mark.parametrize("length", [0, 5, 20, 100])
def test_a_file_that_was_cut_off_is_refused_by_its_name(tmp_path: Path, length: int) -> None:
    path = tmp_path / "a.safetensors"
    write(path, {"it": torch.ones(100)})
    os.truncate(path, length)
    with pytest.raises(CheckpointError, match=r"a\.safetensors is no whole file") as found:
        stored_in(path)
    assert found.value.do == "copy or download it again"


def test_what_safetensors_writes_is_read_and_what_we_write_it_reads(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool]
    tensors = {str(d): torch.randint(0, 2, (5, 3)).to(d) for d in dtypes} | {"": torch.ones(())}
    save_file(tensors, str(tmp_path / "theirs.safetensors"))
    with (tmp_path / "theirs.safetensors").open("rb") as file:
        for name, stored in stored_in(tmp_path / "theirs.safetensors").items():
            target = torch.zeros(stored.shape, dtype=stored.dtype)
            read_box(file.fileno(), stored, [0] * target.ndim, target)
            assert torch.equal(target, tensors[name])
    write(tmp_path / "ours.safetensors", tensors)
    found = load_file(str(tmp_path / "ours.safetensors"))
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
