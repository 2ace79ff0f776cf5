"""C++ methods without a binding are called on the object that is meant, or not at all."""

from typing import Any

import torch.distributed as dist

from nbdist.engine.compat.groups import torch_backends


def test_a_groups_address_is_the_one_that_torch_gives_it() -> None:
    group: Any = dist.ProcessGroup(dist.HashStore(), 0, 1)
    assert torch_backends._address_of(group, torch_backends._GROUP) == group._id()


def test_an_object_of_another_class_has_no_address() -> None:
    assert torch_backends._address_of(dist.HashStore(), torch_backends._WORK) is None


def test_a_group_whose_backends_are_released_has_forgotten_its_store() -> None:
    assert torch_backends.can_release()
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    torch_backends.release_backends(group)
    assert group.get_group_store() is None
