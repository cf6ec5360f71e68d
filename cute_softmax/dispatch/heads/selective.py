"""Log-probabilities of chosen elements: the check of an index, and the form of eager calls that repeat."""

from __future__ import annotations

import torch

from ...plan import NotPlanned
from ...runtime import launch
from ..common import forms
from ..common.forms import Forms, Place, guard
from ..common.state import batched, recorder, transformed, unseen, watched
from . import statistics

Tensor = torch.Tensor
known = Forms()


def check_index(index: object, logits: Tensor) -> None:
    """Raise TypeError or ValueError for an index that does not fit, IndexError for one out of range on the CPU."""
    if not isinstance(index, Tensor):
        raise TypeError(f"index must be a torch.Tensor, not {type(index).__name__}")
    if index.dtype.is_floating_point or index.dtype.is_complex or index.dtype is torch.bool:
        raise TypeError(f"index is {index.dtype}: it must have an integer dtype")
    if index.device != logits.device:
        raise ValueError(f"index is on {index.device}, logits on {logits.device}")
    rows = tuple(logits.shape[:-1])
    if not logits.dim() or tuple(index.shape[: len(rows)]) != rows or index.dim() > logits.dim():
        raise ValueError(
            f"index has shape {tuple(index.shape)}, logits {tuple(logits.shape)}: index must have the shape {rows} of "
            "the rows, or one more dimension"
        )
    seen = index.device.type == "cpu" and index.numel() and not torch.compiler.is_compiling()
    if seen and not transformed() and not watched(index):
        low, high = (int(t) for t in index.aminmax())
        if low < 0 or high >= logits.shape[-1]:
            raise IndexError(
                f"index has elements from {low} to {high}: they must lie in 0 to {logits.shape[-1] - 1}"
            )


class Form:
    """All eager calls with one element of each row on tensors of one device, shapes, strides and dtypes: decided once.

    The scale may differ, unless it is 1. Raises NotPlanned where no kernel serves the calls.
    """

    __slots__ = (
        "_call",
        "_gradient",
        "_kept",
        "_matches",
        "_place",
        "_rows",
        "_scaled",
        "_strides",
        "_wants",
    )
    __slots__ += ("_dtype", "_one", "_records")

    def __init__(self, logits: Tensor, index: Tensor, scale: float, entropies: bool, dtype: torch.dtype):
        self._matches, self._place, self._records = guard(logits, index), Place(logits), logits.requires_grad
        self._scaled, self._wants, self._dtype = scale != 1, entropies, dtype
        found = torch.empty(index.shape, dtype=torch.float32, device=logits.device)
        # Kept for gradients: maxima, logarithms of the sums, entropies.
        kept = torch.empty((2 + entropies, *logits.shape[:-1]), dtype=torch.float32, device=logits.device)
        self._one, self._kept = ((tuple(t.shape), t.stride()) for t in (found, kept))
        self._rows = (*logits.shape[:-1], 1)
        name = "selective_entropy" if entropies else "selective"
        self._call = self._bound(name, logits, (index.long(), found, *kept), scale)
        self._strides = torch.empty_like(logits, device="meta").stride()
        self._gradient = None

    def fits(self, logits: Tensor, index: Tensor, scale: float, entropies: bool) -> bool:
        """Whether a call is of this form."""
        return (
            self._wants is entropies
            and type(scale) in (float, int)
            and (scale != 1) is self._scaled
            and self._matches(logits, index)
        )

    def __call__(self, logits: Tensor, index: Tensor, scale: float) -> Tensor | tuple[Tensor, Tensor]:
        """The result of a call of this form, recorded by autograd where it records."""
        index = index.long()
        if self._records and torch.is_grad_enabled():
            return record(logits, index, scale, self)
        return self.results(*self.numbers(logits, index, scale))

    def numbers(self, logits: Tensor, index: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities, what is kept of each row), in float32."""
        address = logits.data_ptr()
        if not self._place.suits((address,)):
            column = index.view(self._rows)
            found, *rows = statistics.found_of(logits, column, (logits.dim() - 1,), scale, self._wants)
            return found.view(index.shape), torch.stack([t.squeeze(-1) for t in rows[: 2 + self._wants]])
        found = forms.empty_strided(*self._one, torch.float32)
        kept = forms.empty_strided(*self._kept, torch.float32)
        first, pitch = kept.data_ptr(), 4 * self._kept[1][0]
        addresses = [first + i * pitch for i in range(2 + self._wants)]
        numbers = (scale,) if self._scaled else ()
        self._call(
            self._place.stream(), address, index.data_ptr(), found.data_ptr(), *addresses, numbers=numbers
        )
        return found, kept

    def results(self, found: Tensor, kept: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """What the function returns."""
        if self._dtype is not torch.float32:
            found = found.to(self._dtype)
        return (found, kept[2].to(self._dtype)) if self._wants else found

    def backward(
        self,
        logits: Tensor,
        index: Tensor,
        found: Tensor,
        kept: Tensor,
        scale: float,
        grad: Tensor | None,
        of_entropy: Tensor | None,
    ) -> Tensor | None:
        """The gradient of the logits."""
        differentiable = torch.is_grad_enabled() or batched(grad, of_entropy)
        if not differentiable and of_entropy is None and grad is not None:
            d = self._at_target(logits, index, found, grad, scale)
            if d is not None:
                return d
        index, found, grad, of_entropy, *rows = (
            None if t is None else t.reshape(self._rows) for t in (index, found, grad, of_entropy, *kept)
        )
        entropies = rows[2] if self._wants else found.new_empty(0)
        function = statistics.formula_backward if differentiable else statistics.backward
        dims = (logits.dim() - 1,)
        return function(
            logits, index, dims, scale, self._wants, found, *rows[:2], entropies, grad, None, of_entropy
        )

    def _at_target(
        self, logits: Tensor, index: Tensor, found: Tensor, grad: Tensor, scale: float
    ) -> Tensor | None:
        """The gradient by one kernel, where there is one, for tensors as the form has them."""
        address = logits.data_ptr()
        if not self._place.suits((address,)):
            return None
        factors = torch.mul(grad.to(torch.float32), -scale).contiguous()
        if self._gradient is None:
            operands = factors, index, found
            try:
                self._gradient = self._bound("softmax", logits, operands, scale, alpha="groups", target=True)
            except NotPlanned:
                self._gradient = ()
        if not self._gradient:
            return None
        d = forms.empty_strided(tuple(logits.shape), self._strides, logits.dtype)
        addresses = address, factors.data_ptr(), index.data_ptr(), found.data_ptr(), d.data_ptr()
        self._gradient(self._place.stream(), *addresses, numbers=(scale,) if self._scaled else ())
        return d

    def _bound(
        self, name: str, logits: Tensor, rows: tuple[Tensor, ...], scale: float, **parts: object
    ) -> launch.Call:
        """The Call on logits and tensors of a number each row; of a gradient, which is written last."""
        operands = [logits, *(t.view(self._rows).expand(logits.shape) for t in rows)]
        operands += [torch.empty_like(logits, device="meta")] * (name == "softmax")
        prologue, _ = statistics.scaled(scale, **parts)
        return launch.call_of(name, operands, (logits.dim() - 1,), aligned=True, prologue=prologue)


class Recorded(torch.autograd.Function):
    """(logits, index, scale, form) -> the results of the form."""

    @staticmethod
    def forward(ctx, logits, index, scale, form):
        found, kept = form.numbers(logits, index, scale)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, index, found, kept)
        ctx.form, ctx.scale = form, scale
        return form.results(found, kept)

    @staticmethod
    def backward(ctx, grad, of_entropy=None):
        if grad is None and of_entropy is None:
            return None, None, None, None
        return ctx.form.backward(*ctx.saved_tensors, ctx.scale, grad, of_entropy), None, None, None


record = recorder(Recorded)


def log_softmax(
    logits: Tensor, index: Tensor, scale: float, entropies: bool, dtype: torch.dtype
) -> Tensor | tuple[Tensor, Tensor]:
    """The log-probabilities, and the entropies if they are wanted: on any device, in any state of torch."""
    form = _new_form(logits, index, scale, entropies, dtype)
    if form is not None:
        known.remember(logits, form)
        return form(logits, index, scale)
    index, several = index.long(), index.dim() == logits.dim()
    column = index if several else index.unsqueeze(-1)
    found, _, _, e = statistics.serve(logits, column, (logits.dim() - 1,), scale, entropies)
    found = (found if several else found.squeeze(-1)).to(dtype)
    return (found, e.squeeze(-1).to(dtype)) if entropies else found


def _new_form(
    logits: Tensor, index: Tensor, scale: float, entropies: bool, dtype: torch.dtype
) -> Form | None:
    """The form of an eager call, if it has one."""
    one = logits.dim() > index.dim() or index.shape[-1] == 1
    if not (one and unseen(logits, index) and statistics.on_kernel(logits)):
        return None
    try:
        return Form(logits, index, scale, entropies, dtype)
    except NotPlanned:
        return None
