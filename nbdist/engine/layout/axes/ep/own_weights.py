"""Weights of listed experts: each rank keeps a part of every one, and its own experts' whole.

`experts.3.weight` stays a parameter of every rank, as optimizers, clipping and checkpoints know
them: a DTensor that is cut in one dim. A forward brings the parts of an expert together on the rank
that computes it, and its backward takes the gradient apart: both one exchange of all parameters.
"""

# E experts, N ranks of ep, P parameters an expert

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from nbdist.engine.layout.axes.ep import exchange
from nbdist.shared.errors import LayoutError

Place = tuple[nn.Module, str]  # of a parameter


def dim_to_cut(parameter: Tensor, ranks: int) -> int | None:
    """Return in which dim ranks get equal parts of a parameter; None: each keeps the whole."""
    return next((dim for dim, size in enumerate(parameter.shape) if size % ranks == 0), None)


def places_of(expert: nn.Module) -> list[Place]:
    """Return where an expert has its parameters, in its order."""
    return [
        (module, name)
        for module in expert.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None
    ]


class Elsewhere(Tensor):
    """A parameter of an expert where no call of it runs: it has a shape, and no numbers."""

    @classmethod
    def of(cls, parameter: Tensor) -> "Elsewhere":
        """Return it in the place of a parameter."""
        made: Any = parameter.detach().to("meta").as_subclass(cls)
        elsewhere: Elsewhere = made.requires_grad_(parameter.requires_grad)
        return elsewhere

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer what is asked of its shape.

        Raises:
            LayoutError: Numbers are asked.
        """
        if func.__name__ in _OF_SHAPES:
            of_tensors: Any = super().__torch_function__
            return of_tensors(func, types, args, kwargs or {})
        raise LayoutError(
            f"A forward reads the parameters of experts in a list, by {func.__name__}.",
            why="under ep ranks have them within a call of an expert alone",
            do='leave ep out, and use "zero3", which shards any model',
        )


_OF_SHAPES = frozenset(
    {
        *("__get__", "size", "numel", "dim", "stride", "element_size", "requires_grad_"),
        *("is_floating_point", "is_complex", "as_subclass", "untyped_storage"),
    }
)


@contextmanager
def holding(places: Sequence[Place], tensors: Sequence[Any]) -> Iterator[list[Any]]:
    """Have modules find tensors in these places within the block; gives those before."""
    before = [module._parameters[name] for module, name in places]
    try:
        for (module, name), tensor in zip(places, tensors, strict=True):
            module._parameters[name] = tensor
        yield before
    finally:
        for (module, name), tensor in zip(places, before, strict=True):
            module._parameters[name] = tensor


def own(
    parts: list[list[Tensor]], dims: Sequence[int | None], mesh: DeviceMesh
) -> list[list[Tensor]]:
    """Return the whole parameters of this rank's experts. Collective, also its backward.

    Args:
        parts: What this rank has of each expert's parameters: E lists of P.
        dims: In which dim each of the P is cut; None: it is whole.
        mesh: The axis `ep`.
    """
    ranks, first = mesh.size(), mesh.get_local_rank() * (len(parts) // mesh.size())
    mine = [list(of_expert) for of_expert in parts[first:][: len(parts) // ranks]]
    for is_trained in (False, True):
        chosen = [
            i
            for i, dim in enumerate(dims)
            if dim is not None and is_trained == any(e[i].requires_grad for e in parts)
        ]
        if chosen:
            given = [of_expert[i] for of_expert in parts for i in chosen]
            cut = tuple(dims[i] for i in chosen)
            whole = iter(_Own.apply(cut, mesh, *given))  # type: ignore[no-untyped-call]
            for of_expert in mine:
                for i in chosen:
                    of_expert[i] = next(whole)
    return mine


class _Own(torch.autograd.Function):
    """Parts of the parameters of all experts become the whole ones of this rank's experts."""

    @staticmethod
    def forward(
        ctx: Any, dims: tuple[int, ...], mesh: DeviceMesh, *parts: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ranks, group = mesh.size(), mesh.get_group()
        own = len(parts) // ranks
        ctx.dims = dims * (own // len(dims))
        ctx.mesh = mesh
        ctx.like = [torch.empty_like(part, device="meta") for part in parts]
        arrived = exchange.exchanged_evenly(_flat(list(parts)), ranks, group).chunk(ranks)
        sizes = [part.numel() for part in parts[:own]]
        from_ranks = zip(*(one.split(sizes) for one in arrived), strict=True)
        return tuple(
            torch.cat([piece.view(part.shape) for piece in pieces], dim).to(part.dtype)
            for pieces, part, dim in zip(from_ranks, parts, ctx.dims, strict=False)
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        ranks, group, like = ctx.mesh.size(), ctx.mesh.get_group(), ctx.like
        device, wide = ctx.mesh.device_type, like[0].dtype
        # Of each also whether there is one: an expert that none has called gets none, as in one
        # process.
        has = [gradient is not None for gradient in gradients]
        has_any = torch.tensor(has, dtype=wide, device=device)
        cut = [
            [torch.zeros(part.shape, dtype=part.dtype, device=device)] * ranks
            if gradient is None
            else gradient.chunk(ranks, dim)
            for gradient, dim, part in zip(gradients, ctx.dims, like, strict=False)
        ]
        sent = torch.cat([_flat([*pieces, has_any]) for pieces in zip(*cut, strict=True)])
        arrived = exchange.exchanged_evenly(sent, ranks, group).chunk(ranks)
        own = len(gradients)
        sizes = [part.numel() for part in like[:own]]
        pieces = [piece for one in arrived for piece in one.split([*sizes, own])[:-1]]
        had = torch.cat([one[-own:] for one in arrived]).tolist()
        parts = (
            piece.view(part.shape).to(part.dtype) if is_there else None
            for piece, part, is_there in zip(pieces, like, had, strict=True)
        )
        return None, None, *parts


def _flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])
