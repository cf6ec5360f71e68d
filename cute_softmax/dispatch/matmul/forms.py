"""The forms of products: eager calls that repeat."""

from __future__ import annotations

import torch

from ...runtime import launch
from ...runtime.invariance import inside
from ..common import forms
from ..common.forms import Forms, Place, guard
from ..common.state import unseen
from .calls import record, serve
from .kernels import addresses_of, forward
from .request import Request, Results

known = Forms()


class Form:
    """All eager calls on tensors of one device, shapes, strides, dtypes and offsets from 16 bytes whose other arguments
    are equal: decided once.

    options: the arguments that are no tensors, as the caller gave them.
    """

    __slots__ = ("_absent", "_calls", "_matches", "_offsets", "_options", "_place", "_records", "_shape")
    __slots__ += ("_spec", "_strides", "_types")

    def __init__(self, request: Request, options: tuple):
        self._absent = [t is None for t in request.tensors()[2:]]
        self._matches = guard(*[t for t in request.tensors() if t is not None])
        self._options, self._types = options, [*map(type, options)]
        self._place, self._spec = Place(request.values), request.spec
        self._records = any(t is not None and t.requires_grad for t in request.leaves())
        self._shape = request.shape()
        self._strides = torch.empty(self._shape, device="meta").stride()
        self._offsets = [address & 15 for address in addresses_of(request.read())]
        self._calls: dict[bool, launch.Call] = {}  # by whether log-sum-exps are written

    def fits(self, *call: object) -> bool:
        """Whether a call is of this form: the tensors of a request, and the options."""
        *tensors, options = call
        given = [t for t in tensors if t is not None]
        return (
            options == self._options
            and self._spec.invariant is inside()
            and [t is None for t in tensors[2:]] == self._absent
            and [*map(type, options)] == self._types  # 1 and True are equal
            and self._matches(*given)
        )

    def __call__(self, tensors: tuple[torch.Tensor | None, ...], return_lse: bool) -> Results:
        """(the result, log-sum-exps or None) of a call of this form, recorded by autograd where it records."""
        request = Request(*tensors, self._spec)
        if request.stats is not None:
            request = request.constant()
        if self._records and torch.is_grad_enabled():
            return record(*request, self)
        return self.run(request, return_lse)

    def run(self, request: Request, return_lse: bool) -> Results:
        """`forward` for tensors of this form."""
        writes_lse = return_lse and request.stats is None
        call, lse = self._calls.get(writes_lse), None
        addresses = addresses_of(request.read())
        if [address & 15 for address in addresses] != self._offsets or not self._place.current():
            return forward(request, return_lse)
        if call is None:
            return forward(request, return_lse, self._calls)
        known = [] if request.stats is None else [addresses.pop()]
        result = forms.empty_strided(self._shape, self._strides, request.values.dtype)
        addresses.append(result.data_ptr())
        if writes_lse:
            lse = torch.empty(self._shape[:-1], dtype=torch.float32, device=result.device)
            addresses.append(lse.data_ptr())
        if call.plan.kernel.split:
            parts = forms.empty_strided((call.plan.parts_bytes,), (1,), torch.uint8)
            addresses.append(parts.data_ptr())
        call(self._place.stream(), *addresses, *known)
        return result, lse


def first(request: Request, return_lse: bool, options: tuple) -> Results:
    """The results of a call that is the first of its form, or has none. options: see `Form`."""
    if request.on_kernel() and unseen(*request.tensors()):
        form = Form(request, options)
        known.remember(request.scores, form)
        return form(request.tensors(), return_lse)
    return serve(request, return_lse)
