"""A product as the dispatch knows it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...plan.problem import Operand
from ...runtime import launch
from ..common import arguments
from ..common.spec import Spec
from ..common.state import recorded

HALVES = (torch.bfloat16, torch.float16)
# Of the operator, in its order.
FIELDS = ("scores", "values", "mask", "bias", "scale", "causal", "zero", "stats", "invariant", "sink")
Results = tuple[torch.Tensor, torch.Tensor | None]


class Request(NamedTuple):
    """A checked call: ``softmax(factor * scores + bias, -1) @ values``.

    sink: a score of each row that joins its sum, of size 1 in the last dimension. stats: the rows' log-sum-exps, if
    they are known, with dimensions that broadcast to the rows. spec: of the softmax.
    """

    scores: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor | None
    bias: torch.Tensor | None
    sink: torch.Tensor | None
    stats: torch.Tensor | None
    spec: Spec

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All but the spec."""
        return self.scores, self.values, self.mask, self.bias, self.sink, self.stats

    def read(self) -> tuple[torch.Tensor | None, ...]:
        """Those that a kernel reads: a sink is in the sums, where they are known."""
        return self.tensors() if self.stats is None else self._replace(sink=None).tensors()

    def leaves(self) -> tuple[torch.Tensor | None, ...]:
        """Those that gradients flow to."""
        return self.scores, self.values, self.bias, self.sink

    def batch(self) -> torch.Size:
        """The batch dimensions of the result."""
        batch, others = self.scores.shape[:-2], self.values.shape[:-2]
        return batch if batch == others else torch.broadcast_shapes(batch, others)

    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return *self.batch(), self.scores.shape[-2], self.values.shape[-1]

    def on_kernel(self) -> bool:
        """Whether our kernels serve it; all else is composed."""
        halves = arguments.on_gpu(self.values) and self.values.dtype in HALVES
        return halves and not arguments.negated(*self.tensors())

    def recorded(self) -> bool:
        """Whether autograd records the call."""
        return recorded(*self.leaves())

    def constant(self) -> Request:
        """The same, to which no gradient flows by its stats."""
        return self if self.stats is None else self._replace(stats=self.stats.detach())

    def fields(self) -> tuple:
        """What `request_of` takes."""
        scores, values, mask, bias, sink, stats, spec = self
        return scores, values, mask, bias, spec.factor, spec.causal, spec.zero, stats, spec.invariant, sink


class Upstream(NamedTuple):
    """What the gradients of a request are made from beside it: its results, and their gradients.

    lse: the rows' log-sum-exps, with dimensions that broadcast to the rows; lse_grad: None where they have no gradient.
    """

    result: torch.Tensor
    lse: torch.Tensor
    grad: torch.Tensor
    lse_grad: torch.Tensor | None = None


def request_of(
    scores: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    causal: int | None = None,
    zero: bool = False,
    stats: torch.Tensor | None = None,
    invariant: bool = False,
    sink: torch.Tensor | None = None,
) -> Request:
    """The request of an operator's arguments."""
    return Request(scores, values, mask, bias, sink, stats, spec_of(scores, scale, causal, zero, invariant))


def spec_of(
    scores: torch.Tensor, scale: float, causal: int | None, zero: bool = False, invariant: bool = False
) -> Spec:
    """The softmax of rows of scores.

    causal: column j of row i counts if j <= i + causal, None: all do; zero: what a row without anything that counts
    gives, 0 instead of NaN.
    """
    return Spec(
        (scores.dim() - 1,), scores.dtype, factor=scale, causal=causal, zero=zero, invariant=invariant
    )


def operand_of(tensor: torch.Tensor | None) -> Operand | None:
    """What a plan must know of an operand; masks are read by element, wherever they begin."""
    if tensor is None:
        return None
    found = launch.operand(tensor)
    return found._replace(address=0) if found.dtype == "bool" else found
