"""A tensor that is copied later is what it was, or is named."""

from collections.abc import Callable

import pytest
import torch

from nbdist.engine.checkpoint.steady import Staged

KEY: tuple[str, tuple[int, ...] | None] = ("model.weight", (0,))
KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "whole words": lambda: torch.rand(64, 64),
    "pieces": lambda: torch.rand(700, 1024),
    "an odd number of bytes": lambda: torch.rand(37).to(torch.bfloat16),
    "a word's half": lambda: torch.rand(11),
    "one number": lambda: torch.tensor(3.0),
    "part of another, between words": lambda: torch.rand(100)[3:96],
    "not one after another": lambda: torch.rand(30, 20).t(),
    "nothing": lambda: torch.rand(0, 3),
}


def left(tensor: torch.Tensor) -> Staged:
    staged = Staged({})
    staged.leave({KEY: tensor})
    return staged


@pytest.mark.parametrize("kind", KINDS)
def test_what_nothing_has_changed_is_copied_and_not_named(kind: str) -> None:
    tensor = KINDS[kind]()
    staged = left(tensor)
    assert staged.copy_rest() == 1
    assert staged.changed() == ""
    assert torch.equal(staged.content[KEY], tensor)
    assert staged.is_as_copied()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "nothing"])
def test_a_change_that_counts_no_version_is_named(kind: str) -> None:
    tensor = KINDS[kind]()
    staged, version = left(tensor), tensor._version
    tensor.data.view(-1)[-1:].mul_(0.5) if tensor.is_contiguous() else tensor.data.mul_(0.5)
    assert tensor._version == version
    staged.copy_rest()
    assert staged.changed() == "model.weight"


def test_memory_of_the_save_before_is_used_again_where_it_fits() -> None:
    room: dict[tuple[str, tuple[int, ...] | None], torch.Tensor] = {}
    for tensor, is_same in ((torch.rand(4), False), (torch.rand(4), True), (torch.rand(5), False)):
        before = room.get(KEY)
        staged = Staged(room)
        staged.leave({KEY: tensor})
        staged.copy_rest()
        assert (room[KEY] is before) is is_same


def test_no_later_save_copies_into_what_was_borrowed() -> None:
    tensor, room = torch.rand(4), {KEY: torch.empty(4)}
    memory = room[KEY]
    waited = Staged(room)
    waited.borrow([(KEY, tensor)])
    waited.copy_rest()
    assert room[KEY] is memory
    later = Staged(room)
    later.copy([(KEY, tensor)])
    before = tensor.clone()
    tensor.zero_()
    assert torch.equal(later.content[KEY], before)


def test_what_is_borrowed_is_the_tensor_itself_unless_its_bytes_lie_apart() -> None:
    whole, apart = torch.rand(4, 5), torch.rand(4, 5).t()
    staged = Staged({})
    staged.borrow([(KEY, whole), (("model.other", None), apart)])
    assert staged.content[KEY] is whole
    copy = staged.content["model.other", None]
    assert torch.equal(copy, apart)
    assert copy.is_contiguous()
