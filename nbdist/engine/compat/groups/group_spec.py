"""With what a process group was made. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """With what a group was made, so that a replacement rank can make it too.

    Attributes:
        backend: As `new_group` took it: `gloo`, or `cpu:gloo,cuda:nccl`.
        timeout_s: Longest wait inside one collective.
        description: torch's `group_desc`, such as `mesh_dp`.
        tag: The user's, or an empty text.
    """

    backend: str
    timeout_s: float
    description: str
    tag: str = ""
