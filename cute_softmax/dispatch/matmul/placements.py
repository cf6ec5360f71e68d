"""DTensors: where the operands of products and their gradients lie, if their columns are not sharded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..common.placements import Option, Rule, placed, tell

Tensor = torch.Tensor
ROWS = ("lse", "lse_grad", "stats")  # numbers of rows
TENSORS = ("scores", "values", "mask", "bias", "sink", "output", "grad", *ROWS)


def tell_products(name: str, names: Sequence[str], fake: Callable, results: Callable) -> None:
    """Tell where the results of an operator ``cute_softmax::<name>`` lie.

    names: of its arguments. fake: takes them and gives the results. results: takes the arguments by name and says which
    of them each result is like, as a gradient is; "" where it is empty.
    """
    places = [i for i, n in enumerate(names) if n in TENSORS]
    tell(Rule(f"cute_softmax::{name}", names, places, partial(_of_call, names, places, fake, results)))


def _of_call(
    names: Sequence[str], places: Sequence[int], fake: Callable, results: Callable, *arguments: object
):
    """`Rule.of_call`: a dimension of the batch may be sharded, and the rows, unless a diagonal counts them."""
    from torch.distributed.tensor import Partial, Replicate

    given = dict(zip(names, arguments, strict=False))
    found, like = fake(*arguments), results(given)
    found = found if isinstance(found, tuple) else (found,)
    tensors = {names[i]: given.get(names[i]) for i in places}
    batches = [t.shape[:-2] for n in ("scores", "values") if (t := given.get(n)) is not None]
    full = *torch.broadcast_shapes(*batches), given["scores"].shape[-2]
    rows = len(full) - 1

    def lies(name: str, tensor: Tensor | None, d: int):
        if tensor is None:
            return None
        last = name not in ROWS  # whether there is a dimension behind the rows
        apart = name == "values" and d == rows
        return placed(tensor, -1 if apart else d - (rows + 1 + last - tensor.dim()), full[d])

    def result(name: str, tensor: Tensor, d: int):
        at = lies(name, tensor, d) if name else Replicate()
        return Partial() if name and at == Replicate() else at  # what broadcasts has a sum as its gradient

    options = [
        Option([Replicate()] * len(found), [None if t is None else Replicate() for t in tensors.values()])
    ]
    options += [
        Option(
            [result(n, t, d) for n, t in zip(like, found, strict=True)],
            [lies(n, t, d) for n, t in tensors.items()],
        )
        for d in range(rows + (given["causal"] is None))
        if full[d] > 1
    ]
    return found, options
