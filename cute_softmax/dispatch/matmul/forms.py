"""The forms of products: eager calls that repeat."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter

import torch

from ...runtime import launch
from ...runtime.invariance import inside
from ..common.forms import Forms, Place, guard, launching
from ..common.state import unseen
from .calls import record, serve
from .kernels import addresses_of, forward
from .request import Request, Results

Tensor = torch.Tensor
known = Forms()


class Form:
    """All eager calls on tensors of one device, shapes, strides, dtypes and offsets from 16 bytes whose other arguments
    are equal: decided once.

    options: the arguments that are no tensors, as the caller gave them, and the types of those that others equal.
    """

    __slots__ = ("_absent", "_launchers", "_matches", "_options", "_read", "_records", "_spec", "follower")

    def __init__(self, request: Request, options: tuple):
        self._absent = tuple([t is None for t in request.tensors()[2:]])
        self._matches = guard(*[t for t in request.tensors() if t is not None])
        self._options, self._spec = options, request.spec
        self._records = any(t is not None and t.requires_grad for t in request.leaves())
        self._read = itemgetter(*[i for i, t in enumerate(request.read()) if t is not None])
        self._launchers: dict[bool, Callable] = {}  # by whether log-sum-exps are returned

    def fits(
        self,
        scores: Tensor,
        values: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        sink: Tensor | None,
        stats: Tensor | None,
        options: tuple,
    ) -> bool:
        """Whether a call is of this form: the tensors of a request, and the options."""
        return (
            options == self._options
            and self._spec.invariant is inside()
            and (mask is None, bias is None, sink is None, stats is None) == self._absent
            and self._matches(scores, values, *[t for t in (mask, bias, sink, stats) if t is not None])
        )

    def __call__(self, tensors: tuple[Tensor | None, ...], return_lse: bool) -> Results:
        """(the result, log-sum-exps or None) of a call of this form, recorded by autograd where it records."""
        if self._records and torch.is_grad_enabled():
            return record(*Request(*tensors, self._spec).constant(), self)
        return self.run(tensors, return_lse)

    def run(self, tensors: tuple[Tensor | None, ...], return_lse: bool) -> Results:
        """`forward` for tensors of this form."""
        run = self._launchers.get(return_lse)
        if run is None:
            return self._first(Request(*tensors, self._spec), return_lse)
        found = run(*self._read(tensors))
        return found if type(found) is tuple else (found, None)

    def _first(self, request: Request, return_lse: bool) -> Results:
        """`forward`, and where operands are read as they lie, a launcher for later calls."""
        calls: list[launch.Call] = []
        found = forward(request, return_lse, calls)
        if calls:
            self._launchers[return_lse] = self._launcher(calls[0], request, return_lse)
        return found

    def _launcher(self, call: launch.Call, request: Request, return_lse: bool) -> Callable:
        shape, dtype, known = request.shape(), request.values.dtype, request.stats is not None
        places, spec = [i for i, t in enumerate(request.read()) if t is not None], self._spec
        dense = [(shape, dtype), *[(shape[:-1], torch.float32)] * (return_lse and not known)]
        dense += [((call.plan.parts_bytes,), torch.uint8)] * call.plan.kernel.split
        results = [(shape, torch.empty(shape, device="meta").stride(), dtype) for shape, dtype in dense]

        def anywhere(*given: Tensor) -> Tensor | Results:
            tensors = dict(zip(places, given, strict=True))
            request = Request(*[tensors.get(i) for i in range(6)], spec)
            result, lse = forward(request, return_lse)
            return result if lse is None else (result, lse)

        addresses = [f"a{i}" for i in range(len(places) - known)] + [f"b{i}" for i in range(len(results))]
        addresses += [f"a{len(places) - 1}"] * known
        offsets = [address & 15 for address in addresses_of(request.read())]
        here, hidden = Place(request.values), call.plan.kernel.split
        return launching(call, here, anywhere, results, offsets, addresses, hidden)


def first(request: Request, return_lse: bool, options: tuple) -> Results:
    """The results of a call that is the first of its form, or has none. options: see `Form`."""
    if request.on_kernel() and unseen(*request.tensors()):
        form = Form(request, options)
        known.remember(request.scores, form)
        return form(request.tensors(), return_lse)
    return serve(request, return_lse)
