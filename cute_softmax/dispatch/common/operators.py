"""Functions in every state of torch: an autograd function and a torch.library operator that follow the same rules.

A function takes tensors, None for one that is not given, and last its spec: a frozen dataclass of all else, with the
reduced dimensions as `dims`, if it has a choice. Its operator takes the same in the order of a schema, the spec field
by field.
"""

from __future__ import annotations

from ast import literal_eval
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from .placements import BROADCAST, Rule, meet, of_rows, tell
from .state import Ways, recorder

# By the names that operators have for them, as torch's do.
FIELDS = {"dim": "dims", "input_dtype": "dtype"}


class Function(torch.autograd.Function):
    """What a function of tensors and a spec computes, keeps and differentiates, written once.

    A subclass has `forward`, `setup_context` and `backward`, and `jvp` where forward mode comes to it.
    full: how many of the first tensors have all dimensions; the others broadcast to them.
    """

    full = 1

    @classmethod
    def vmap(cls, info, in_dims, *arguments):
        return cls.over_batch(cls.apply, info, in_dims, arguments)

    @classmethod
    def over_batch(cls, function: Callable, info, in_dims: tuple, arguments: tuple) -> tuple:
        """The vmap rule of the function, or of its operator."""
        return over_batch(function, info, in_dims, arguments, cls.full)


def needed(ctx, count: int) -> list[bool]:
    """Whether gradients of the first `count` tensors are wanted, in a function's rules or its operator's."""
    needs = ctx.needs_input_grad
    places = getattr(ctx, "places", range(count))[:count]
    return [place < len(needs) and needs[place] for place in places]  # a caller may leave out the last ones


def ways_of(function: type[Function], direct: Callable, operator: Callable) -> Ways:
    """The ways of calls that a function records and transforms."""
    return Ways(direct, recorder(function), function.apply, operator)


def operator_of(
    name: str,
    schema: str,
    function: type[Function],
    spec: Callable[..., object],
    fake: Callable,
    like: int | None = None,
) -> Callable:
    """Register `function` as the operator ``cute_softmax::<name>``, and return that for calls like the function's.

    schema: tensors, and fields of a spec by their names or those of `FIELDS`; spec(**fields) makes one.
    fake: takes what the function does, and returns new tensors of its results' shapes, strides and dtypes.
    like: which tensor's memory format the first result has; results are contiguous else.
    """
    types, given_names, defaults = zip(*_arguments(schema), strict=True)
    names = [FIELDS.get(n, n) for n in given_names]
    places = [i for i, t in enumerate(types) if "Tensor" in t]
    rank = {place: i for i, place in enumerate(places)}
    others = [(i, name) for i, name in enumerate(names) if i not in rank]

    def whole(given: tuple) -> tuple:
        """A call of the operator as one of the function; what is at its default may be missing."""
        values = *given, *defaults[len(given) :]
        fields = {name: values[i] for i, name in others}
        if "dims" in fields:
            fields["dims"] = tuple(fields["dims"])
        return *[values[i] for i in places], spec(**fields)

    def by_operator(*given):
        meet(*given)
        fields = given[-1]
        return operator(
            *[
                given[rank[i]] if i in rank else list(fields.dims) if n == "dims" else getattr(fields, n)
                for i, n in enumerate(names)
            ]
        )

    qualified = f"cute_softmax::{name}"

    @torch.library.custom_op(qualified, mutates_args=(), schema=schema)
    def operator(*given):
        call = whole(given)
        found = function.forward(*call)
        results = list(found) if type(found) is tuple else [found]
        first = results[0].contiguous() if like is None else _laid_out(results[0], call[like])
        results = first, *[t.contiguous() for t in results[1:]]
        return results if type(found) is tuple else first

    def setup_context(ctx, inputs, output):
        ctx.places = places
        function.setup_context(ctx, whole(inputs), output)

    def backward(ctx, *grads):
        gradients = dict(zip(places, function.backward(ctx, *grads), strict=False))
        return tuple(gradients.get(i) for i in range(len(names)))

    def vmap(info, in_dims, *given):
        dims = [in_dims[i] if i < len(in_dims) else None for i in places]
        return function.over_batch(by_operator, info, (*dims, None), whole(given))

    operator.register_fake(lambda *given: fake(*whole(given)))
    operator.register_autograd(backward, setup_context=setup_context)
    operator.register_vmap(vmap)
    if "dims" in names:
        broadcast = [names[i] in BROADCAST for i in places]
        tell(Rule(qualified, given_names, places, partial(of_rows, broadcast, whole, fake)))
    return by_operator


def _arguments(schema: str) -> Iterator[tuple[str, str, object]]:
    """(type, name, default value or None) of each argument."""
    for argument in schema[1 : schema.index(") -> ")].split(", "):
        declared, _, default = argument.partition("=")
        yield *declared.split(), literal_eval(default or "None")


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A new tensor in the strides that `empty_like` gives."""
    if tensor.stride() == like.stride():
        return tensor
    strides = torch.empty_like(like, device="meta").stride()  # takes no memory
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def over_batch(function: Callable, info, in_dims: tuple, arguments: tuple, full: int) -> tuple:
    """A vmap rule: `function` of tensors with the batch in front, and where its results have it.

    Dimensions of a spec count from the front, so they move by one.
    """
    *tensors, spec = arguments
    rank, made = tensors[0].dim() - (in_dims[0] is not None), []
    for i, (t, d) in enumerate(zip(tensors, in_dims, strict=False)):
        if t is not None:
            if d is not None:
                t = t.movedim(d, 0)
                t = t[(slice(None), *[None] * (rank + 1 - t.dim()))]
            elif i < full:
                t = t.expand(info.batch_size, *t.shape)
            if rank == 0:  # a row of one element
                t = t.unsqueeze(-1)
        made.append(t)
    found = function(*made, replace(spec, dims=tuple(d + 1 for d in spec.dims)))
    if isinstance(found, torch.Tensor):
        return (found.reshape(info.batch_size) if rank == 0 else found), 0
    # An empty tensor stands for what was not asked for, and has no batch.
    whole = [None if t.shape == (0,) else 0 for t in found]
    if rank == 0:
        found = [t if d is None else t.reshape(info.batch_size) for t, d in zip(found, whole, strict=True)]
    return tuple(found), tuple(whole)
