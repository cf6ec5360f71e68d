"""DTensors: where the results of our operators lie, if they reduce no dimension that is sharded.

Each operator tells which placements a call may have, on one dimension of a mesh: all tensors replicated, or sharded
over a dimension of the full tensors that nothing is reduced over. DTensor takes that once a call meets one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from ...runtime.private import constant_when_traced, look_up

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement, Replicate, Shard

Tensor = torch.Tensor
PLAIN = (torch.Tensor, torch.nn.Parameter)
# These broadcast to the input: if one has fewer dimensions, those are not the reduced ones.
BROADCAST = ("bias", "mask", "scale", "sink")


class Option(NamedTuple):
    """Where the results and the tensors of a call lie; None for a tensor that is not given."""

    results: Sequence[Placement]
    tensors: Sequence[Placement | None]


class Rule(NamedTuple):
    """What an operator, ``cute_softmax::<name>``, tells.

    names: of its arguments; places: which of them are tensors. of_call: takes the arguments of a call, its tensors as
    tensors on device "meta", and gives the results likewise, and the options: first that of replicated tensors.
    """

    name: str
    names: Sequence[str]
    places: Sequence[int]
    of_call: Callable[..., tuple[Sequence[Tensor], list[Option]]]

    def found(self, given: Sequence[object]) -> tuple[Sequence[Tensor], list[Option]]:
        """`of_call` for tensors of any kind, or what DTensor has in their place."""
        meta = list(given)
        for i in self.places:
            if i < len(meta) and (t := meta[i]) is not None:
                dtype = getattr(t, "tensor_meta", t).dtype
                meta[i] = torch.empty(t.shape, dtype=dtype, device="meta")
        return self.of_call(*meta)


_untold: list[Rule] = []


def tell(rule: Rule) -> None:
    """Keep a rule for when a call meets a DTensor."""
    _untold.append(rule)


def on_mesh(tensor: object) -> bool:
    """Whether it is a DTensor."""
    if type(tensor) in PLAIN or not (isinstance(tensor, torch.Tensor) and dist.is_available()):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def meet(*arguments: object) -> None:
    """Before a call of an operator: tell DTensor the rules, if it has one among its arguments."""
    if any([on_mesh(t) for t in arguments]):
        _tell_dtensor()


@constant_when_traced  # so that a traced call tells them, too
def _tell_dtensor() -> bool:
    """Tell DTensor, once, the rules that there are.

    What is told is public but experimental, and that a decision depends on more than tensors is private: where torch
    has it no more, calls on DTensors follow the rules by themselves.
    """
    from torch.distributed.tensor import DTensor, experimental

    register_sharding = getattr(experimental, "register_sharding", None)
    known = look_up("distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info")
    while _untold:
        rule = _untold.pop()
        if register_sharding is None or known is None:
            torch.library.register_torch_dispatch(rule.name, DTensor, partial(_on_local, rule))
            continue
        namespace, _, name = rule.name.partition("::")
        overload = getattr(getattr(torch.ops, namespace), name).default
        register_sharding(overload)(partial(_of_dtensor, rule))
        # What dimensions are reduced, and to which dtype, decides as well.
        known[overload].static_argnum = next(i for i in range(len(rule.names)) if i not in rule.places)
    return True


def _of_dtensor(rule: Rule, *arguments: object) -> list[tuple[list, list]]:
    """(placements of the results, of the arguments) that a call may have."""
    count, options = max(len(arguments), rule.places[-1] + 1), rule.found(arguments)[1]
    by_place = [dict(zip(rule.places, option.tensors, strict=True)) for option in options]
    return [
        (list(option.results), [given.get(i) for i in range(count)])
        for option, given in zip(options, by_place, strict=True)
    ]


def _on_local(rule: Rule, _: object, operator: Callable, types: object, given: tuple, named: dict) -> object:
    """A call on DTensors, by public names alone: each dimension of the mesh has the first option with a tensor that is
    there already, but for replicas."""
    from torch.distributed.tensor import DTensor

    tensors = [given[i] if i < len(given) else None for i in rule.places]
    mesh = next(t.device_mesh for t in tensors if on_mesh(t))
    results, (whole, *sharded) = rule.found(given)

    def fits(option: Option, i: int) -> bool:
        there = [(t.placements[i], p) for t, p in zip(tensors, option.tensors, strict=True) if on_mesh(t)]
        return any([p.is_shard() and p == now for now, p in there])

    chosen = [next((o for o in sharded if fits(o, i)), whole) for i in range(mesh.ndim)]
    local = list(given)
    for n, (place, t) in enumerate(zip(rule.places, tensors, strict=True)):
        if on_mesh(t):
            local[place] = t.redistribute(mesh, [option.tensors[n] for option in chosen]).to_local()
    found = operator(*local, **named)
    made = [
        DTensor.from_local(
            t, mesh, [o.results[n] for o in chosen], run_check=False, shape=like.shape, stride=like.stride()
        )
        for n, (t, like) in enumerate(
            zip(found if isinstance(found, tuple) else [found], results, strict=True)
        )
    ]
    return tuple(made) if isinstance(found, tuple) else made[0]


# -- Operators of rows -------------------------------------------------------------------------------------------------


def of_rows(
    broadcast: Sequence[bool], whole: Callable[[tuple], tuple], fake: Callable, *arguments: object
) -> tuple[Sequence[Tensor], list[Option]]:
    """`Rule.of_call` of an operator that takes a full tensor first and reduces the dimensions `dims` of its spec.

    broadcast: which of the tensors broadcast to it. whole: makes (tensors, spec) of the arguments; fake: the results of
    these.
    """
    from torch.distributed.tensor import Replicate

    *tensors, spec = whole(arguments)
    found = fake(*tensors, spec)
    shape, results = tensors[0].shape, found if isinstance(found, tuple) else (found,)
    rank, dims = len(shape), [d % max(len(shape), 1) for d in spec.dims]

    def lies(tensor: Tensor | None, d: int, broadcast: bool = False) -> Replicate | Shard | None:
        at = d - (rank - tensor.dim()) if tensor is not None else 0
        if tensor is not None and tensor.dim() == rank - len(dims) and not broadcast:
            at = d - sum(reduced < d for reduced in dims)  # without the reduced dimensions
        return placed(tensor, at, shape[d])

    # Of a causal mask the position of a row counts.
    causal = getattr(spec, "causal", None) is not None
    kept = [d for d in range(rank) if d not in dims and shape[d] > 1 and not (d == rank - 2 and causal)]
    options = [Option([Replicate()] * len(results), [None if t is None else Replicate() for t in tensors])]
    options += [
        Option(
            [lies(t, d) for t in results], [lies(t, d, b) for t, b in zip(tensors, broadcast, strict=True)]
        )
        for d in kept
    ]
    return results, options


def placed(tensor: Tensor | None, at: int, size: int) -> Replicate | Shard | None:
    """Where a tensor lies if a dimension of the full tensors, of so many elements, is sharded: over its dimension `at`,
    unless it broadcasts there."""
    from torch.distributed.tensor import Replicate, Shard

    if tensor is None:
        return None
    return Shard(at) if 0 <= at < tensor.dim() and tensor.shape[at] == size > 1 else Replicate()
