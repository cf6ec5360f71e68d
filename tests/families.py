"""The softmax family with prologues: float64 oracles, bounds and guarded calls.

What a result may differ by, besides half a unit in the last place of a 16-bit one: `FACTOR` times the largest error of
torch's own float32 operations on the same scores, in the unit of the result (see `unit`), and never less than `FLOOR`
roundings, as many more as the scores are large: each score is rounded, by torch as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from checking import FACTOR, ROUNDING, SLACK, TINY, Guarded, half_ulp

from cute_softmax.plan import Prologue
from cute_softmax.runtime import launch

FLOOR = 4
Number = float | torch.Tensor | None


@dataclass
class Case:
    """A call over the last dimension. scale, alpha: a number, or a tensor with size 1 there; bias, mask: broadcast as
    torch does; offset: of a causal mask over the last two dimensions, None without; dtype: of the result.

    sink: a score more, with size 1 there; for gradients the logarithm of its share.

    For gradients x is dy and `y` the result that it is for; alpha is the forward's. index: of one element of each row:
    that of a selective math, or the target of a softmax with alpha.
    """

    math: str
    x: torch.Tensor
    y: torch.Tensor | None = None
    scale: Number = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    offset: int | None = None
    alpha: Number = None
    zero: bool = False
    index: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    place: tuple[int, int] = (0, 0)  # where tensors lie: elements past a boundary, elements between rows
    turned: bool = False  # whether matrices lie column by column
    sink: torch.Tensor | None = None

    @property
    def gradient(self) -> bool:
        return self.math.endswith("_backward")

    @property
    def prologue(self) -> Prologue:
        def form(value: Number) -> str:
            return "" if value is None else "groups" if isinstance(value, torch.Tensor) else "number"

        return Prologue(
            scale=form(self.scale), bias=self.bias is not None, mask=self.mask is not None,
            causal=self.offset is not None, alpha=form(self.alpha), zero=self.zero, target=self.target,
            sink=self.sink is not None,
        )  # fmt: skip

    @property
    def target(self) -> str:
        return "found" if self.math == "softmax" and self.index is not None else ""

    @property
    def results(self) -> int:
        """How many numbers of each row there are, 0 for a full result."""
        return {"logsumexp": 1, "entropy": 3, "selective": 3, "selective_entropy": 4}.get(self.math, 0)

    def shown(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results as `expected` has them, from tensors of the call's shape: those of a row once."""
        full = not self.results
        return [*outputs[:full], *[t[..., 0] for t in outputs[full:]]]

    @property
    def numbers(self) -> list[float]:
        alpha = 1 / self.alpha if self.gradient and isinstance(self.alpha, float) else self.alpha
        found = [n for n in (self.scale, alpha) if isinstance(n, (int, float))]
        return found + [self.offset] * (self.offset is not None)

    @property
    def groups(self) -> list[torch.Tensor]:
        alpha = self.alpha
        if self.gradient and isinstance(alpha, torch.Tensor):
            alpha = alpha.float().reciprocal()
        found = [n for n in (self.scale, alpha) if isinstance(n, torch.Tensor)]
        if self.target:
            logs = torch.log_softmax(self.scores(torch.float64), -1)
            found += [self.index, logs.gather(-1, self.index).float()]
        elif self.index is not None:
            found.insert(0, self.index)
        found += [] if self.sink is None else [self.sink]
        return [n.expand(self.x.shape) for n in found]

    @property
    def query(self) -> int | None:
        return None if self.offset is None else self.x.dim() - 2

    def counts(self) -> torch.Tensor:
        """Which elements count, of x's shape."""
        kept = torch.ones((), dtype=torch.bool, device=self.x.device).expand(self.x.shape)
        if self.mask is not None:
            kept = kept & self.mask
        if self.offset is not None:
            rows, columns = (torch.arange(n, device=self.x.device) for n in self.x.shape[-2:])
            kept = kept & (columns <= rows[:, None] + self.offset)
        return kept

    def scores(self, dtype: torch.dtype) -> torch.Tensor:
        """The scores, in a float type throughout."""
        s = self.x.to(dtype)
        if self.scale is not None:
            scale = (
                self.scale
                if isinstance(self.scale, torch.Tensor)
                else torch.tensor(self.scale, device=s.device)
            )
            s = s * scale.float().to(dtype)  # what the kernel gets is a float32
        if self.bias is not None:
            s = s + self.bias.to(dtype)
        return s.masked_fill(~self.counts(), -math.inf)

    def expected(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The results, computed in a float type throughout: the oracle in float64, torch's own in float32."""
        alpha = 1 if self.alpha is None else self.alpha
        alpha = alpha.to(dtype) if isinstance(alpha, torch.Tensor) else alpha
        if self.gradient:
            return [self._gradient(dtype, alpha), *self._of_sink(dtype)]
        s = self.scores(dtype)
        if self.sink is not None:
            return self._beside_sink(s, alpha)
        empty = (s == -math.inf).all(-1, keepdim=True) & self.zero
        if self.math == "softmax":
            y = torch.softmax(s, -1).masked_fill(empty, 0)
            if self.target:
                y = y.scatter_add(-1, self.index, -torch.ones_like(self.index, dtype=dtype))
            return [y * alpha]
        logs = torch.log_softmax(s, -1)
        if self.math == "log_softmax":
            return [logs.masked_fill(empty, -math.inf)]
        if self.math == "logsumexp":
            return [torch.logsumexp(s, -1)]
        top = s.amax(-1, keepdim=True)
        log = (s - torch.where(top == -math.inf, 0.0, top)).exp().sum(-1, keepdim=True).log()
        terms = torch.where(logs == -math.inf, 0, logs.exp() * logs)
        found = [top, log.masked_fill(empty, 0), -terms.sum(-1, keepdim=True).masked_fill(empty, 0)]
        if self.index is not None:
            found.insert(0, s.gather(-1, self.index) - top - log)
        return [t[..., 0] for t in found[: self.results]]

    def _beside_sink(self, s: torch.Tensor, alpha: float | torch.Tensor) -> list[torch.Tensor]:
        """`expected` of scores with a sink: of a row with nothing in it only where the sink is nothing, too."""
        sink = self.sink.to(s.dtype).expand(*s.shape[:-1], 1)
        whole = torch.cat([s, sink], -1)
        if self.math == "logsumexp":
            return [torch.logsumexp(whole, -1)]
        logs = torch.log_softmax(whole, -1)
        empty = (whole == -math.inf).all(-1, keepdim=True)
        own = logs[..., -1].masked_fill(sink[..., 0] == -math.inf, -math.inf)
        if self.math == "log_softmax":
            return [logs[..., :-1].masked_fill(empty & self.zero, -math.inf), own]
        return [torch.softmax(whole, -1)[..., :-1].masked_fill(empty & self.zero, 0) * alpha, own]

    def _of_sink(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The gradient of the sink, if there is one."""
        if self.sink is None:
            return []
        dy, y, log = (t.to(dtype) for t in (self.x, self.y, self.sink))
        if self.math == "log_softmax_backward":
            masked = self.mask is not None or self.offset is not None
            terms = dy.masked_fill(masked & (y == -math.inf), 0)
        else:
            terms = (dy * y) if self.offset is None else (dy * y).masked_fill(~self.counts(), 0)
        found = -log.exp() * terms.sum(-1, keepdim=True)
        return [found.masked_fill(log == -math.inf, 0).expand(*dy.shape[:-1], 1)[..., 0]]

    def _gradient(self, dtype: torch.dtype, alpha: float | torch.Tensor) -> torch.Tensor:
        dy, y = self.x.to(dtype), self.y.to(dtype)
        scale = (
            self.scale
            if isinstance(self.scale, torch.Tensor)
            else torch.tensor(1.0 if self.scale is None else self.scale)
        )
        scale = scale.float().to(device=dy.device, dtype=dtype)
        if self.math == "softmax_backward":
            dx = scale * (y * (dy - (dy * y).sum(-1, keepdim=True) / alpha))
            return dx if self.offset is None else dx.masked_fill(~self.counts(), 0)
        masked = (self.mask is not None or self.offset is not None) & (y == -math.inf)
        dy = dy.masked_fill(masked, 0)
        return scale * (dy - y.exp() * dy.sum(-1, keepdim=True))

    def unit(self, exact: torch.Tensor, i: int = 0) -> torch.Tensor:
        """What errors of result i are measured in: its size where they are relative, and the scale of what cancels."""
        if i == 1 and self.gradient:  # the sink's
            share, y = self.sink.double().exp()[..., 0], self.y.double()
            terms = self.x.double() * (y if self.math == "softmax_backward" else 1.0)
            return share * (1 + self.sink.double().nan_to_num(neginf=0.0)[..., 0].abs()) * terms.abs().sum(-1)
        if self.math == "softmax" and i == 0:
            return exact.abs()
        if self.gradient:
            scale, alpha = (
                1.0 if n is None else n.double().abs() if isinstance(n, torch.Tensor) else abs(n)
                for n in (self.scale, self.alpha)
            )
            dy, y = self.x.double().abs(), self.y.double()
            if self.math == "softmax_backward":
                return scale * y.abs() * (dy + (dy * y.abs()).sum(-1, keepdim=True) / alpha)
            masked = (self.mask is not None or self.offset is not None) & (y == -math.inf)
            dy = dy.masked_fill(masked, 0)
            return scale * (dy + y.exp() * dy.sum(-1, keepdim=True))
        return 1 + exact.abs()

    def spread(self) -> float:
        """How large scores are, and how far apart: what their rounding to float32 is worth, in roundings."""
        if self.gradient:
            return 0.0
        s = self.scores(torch.float64)
        s = s[s.isfinite()].abs()
        return 2 * s.max().item() if s.numel() else 0.0

    def check(self, results: list[torch.Tensor]) -> float:
        """Raise AssertionError unless the results are within their bounds. Returns the largest error over the bound."""
        worst = 0.0
        for i, (got, exact, torchs) in enumerate(
            zip(results, self.expected(torch.float64), self.expected(torch.float32), strict=True)
        ):
            what = f"{self.math} {i} of {self.x.dtype} -> {got.dtype}, {self.prologue.name}, {tuple(self.x.shape)}"
            assert got.shape == exact.shape, what
            rounded = exact.to(got.dtype).double()
            exact = torch.where(rounded.isinf(), rounded, exact)
            wrong = got.isnan() != exact.isnan()
            assert not wrong.any(), f"{what}: {int(wrong.sum())} of {wrong.numel()} differ in being NaN"
            unit = self.unit(exact, i)
            own = ((torchs.double() - exact).abs() - TINY).clamp_(min=0) / unit
            own = own.nan_to_num_(0.0, posinf=0.0).max().item()
            bound = max(FACTOR * own, (FLOOR + self.spread()) * ROUNDING)
            allowed = bound * unit + TINY
            if got.dtype is not torch.float32:
                allowed += half_ulp(exact, got.dtype) + SLACK * exact.abs()
            allowed = allowed.masked_fill_(exact.isinf(), 0)
            over = (got.double() - exact).abs_() / allowed
            over = torch.where(got.double() == exact, 0.0, over).nan_to_num_(0.0, posinf=math.inf)
            largest = over.max().item() if over.numel() else 0.0
            if not largest <= 1:
                at = int(over.argmax())
                raise AssertionError(
                    f"{what}: {largest:.3g} times the bound at {at}, {got.flatten()[at].item()!r} instead of "
                    f"{exact.flatten()[at].item()!r}; {int((over > 1).sum())} of {over.numel()} elements"
                )
            worst = max(worst, largest)
        return worst

    def placed(self) -> tuple[list[torch.Tensor], list[Guarded]]:
        """The tensors of the call as `launch.run` takes them, and the guarded outputs among them."""
        shape, (offset, pad) = self.x.shape, self.place
        dtype = self.dtype or self.x.dtype
        lines = [math.prod(shape[d + 1 : -1]) * (shape[-1] + pad) for d in range(len(shape) - 1)] + [1]
        if self.turned:
            lines = [1, shape[0] + pad]
        groups = [math.prod(shape[d + 1 : -1]) for d in range(len(shape) - 1)] + [0]
        inputs = [self.x] + ([self.y] if self.gradient else [])
        tensors = [Guarded.of(t, strides=lines, offset=offset).tensor for t in inputs]
        if not self.gradient:
            tensors += [t.expand(shape) for t in (self.bias, self.mask) if t is not None]
        tensors += self.groups
        layouts = [groups] * self.results or [lines]
        outputs = [Guarded(shape, dtype, strides=strides, offset=offset) for strides in layouts]
        if self.sink is not None and not self.results:
            outputs.append(Guarded(shape, torch.float32, strides=groups, offset=offset))
        return tensors + [o.tensor for o in outputs], outputs

    def kernel(self):
        """The Plan class that serves it. Raises NotPlanned if none does."""
        tensors, _ = self.placed()
        work = launch.Work(
            self.math, tuple(tensors), (self.x.dim() - 1,), prologue=self.prologue, query=self.query
        )
        return work.plan(launch.device_facts(self.x.get_device())).kernel

    @property
    def movement(self) -> str:
        return self.kernel().movement

    def launched(self) -> list[torch.Tensor]:
        """The results of a launch; nothing else was written."""
        tensors, outputs = self.placed()
        before = [t.clone() for t in tensors[: -len(outputs)]]
        launch.run(
            self.math,
            tensors,
            (self.x.dim() - 1,),
            prologue=self.prologue,
            numbers=self.numbers,
            query=self.query,
        )
        for output in outputs:
            output.check()
        for t, b in zip(tensors, before, strict=False):
            assert torch.equal(t.reshape(-1).nan_to_num(), b.reshape(-1).nan_to_num()), "an input was changed"
        return self.shown([o.tensor for o in outputs])


def check_mutants(
    check: Callable[[list[torch.Tensor]], None],
    wrong: Iterable[tuple[str, list[torch.Tensor]]],
    right: Sequence[torch.Tensor],
    name: str,
):
    """Each of some wrong results fails the check, but for those that have the values of the right ones."""
    for what, results in wrong:
        near = zip(results, right, strict=True)
        if not all(torch.equal(w.nan_to_num(), r.to(w.dtype).nan_to_num()) for w, r in near):
            with pytest.raises(AssertionError):
                check(results)
                pytest.fail(f"{name}: {what} passes")


def mutants(case: Case) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """Wrong results of a case, each as some broken kernel would give it."""
    dtype = case.dtype or case.x.dtype

    def of(changed: Case) -> list[torch.Tensor]:
        found = changed.expected(torch.float64)
        count = max(case.results, 1)
        return [r.to(dtype) for r in found[:count]] + [r.float() for r in found[count:]]

    right = of(case)
    yield "zeros", [torch.zeros_like(r) for r in right]
    yield "rows swapped", [r.flip(-2 if r.dim() == case.x.dim() else -1) for r in right]
    if case.offset is not None:
        yield "the diagonal one to the right", of(replace(case, offset=case.offset + 1))
        yield "the diagonal one to the left", of(replace(case, offset=case.offset - 1))
    if case.mask is not None and not case.gradient:
        yield "the mask inverted", of(replace(case, mask=~case.mask))
        yield "the mask off by one", of(replace(case, mask=case.mask.roll(1, -1)))
    if case.sink is not None and case.gradient:
        yield "another row's sink", of(replace(case, sink=case.sink.roll(1, -2)))
    elif case.sink is not None:
        yield "no sink", of(replace(case, sink=torch.full_like(case.sink, -math.inf)))
        yield "another row's sink", of(replace(case, sink=case.sink.roll(1, -2)))
        yield "a sink twice", of(replace(case, sink=case.sink + math.log(2)))
    if case.bias is not None:
        yield "no bias", of(replace(case, bias=None))
    if isinstance(case.scale, torch.Tensor):
        yield "another row's scale", of(replace(case, scale=case.scale.roll(1, -2)))
    elif case.scale is not None:
        yield "no scale", of(replace(case, scale=None))
    if case.alpha is not None and not case.target:
        yield "no alpha", of(replace(case, alpha=None))
    if case.index is not None:
        yield "another element", of(replace(case, index=(case.index + 1) % case.x.shape[-1]))
