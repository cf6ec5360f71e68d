"""What the tests share: the float64 oracle, the bounds that a result must keep, and guarded buffers.

The oracle is float64 on the very input. What a result may differ by:

- forward, float32: `FACTOR` times the largest relative error of `torch.softmax` on the same input. A few
  elements can be lucky, so the bound is never below the rounding of ``x - max`` itself, ``2**-24 * |x -
  max|``, plus two roundings more.
- forward, 16 bits: half a unit in the last place (the rounding of the result) plus `SLACK` of the value.
- backward: ``dx = y * (dy - sum(dy * y))`` cancels, so the unit of its errors is ``|y| * (|dy| + sum |dy *
  y|)``. float32 keeps `FACTOR` times torch's own largest error in this unit (never below four roundings);
  16 bits add half a unit in the last place.
- amax is exact. logsumexp has the unit ``2**-24 * (1 + |result| + |max|)``, sum ``2**-24 * sum |x|``: float32
  keeps `FACTOR` times torch's own largest error in this unit (never below four), 16 bits add half a unit in the last
  place.
- What is smaller than `TINY`, the least normal float32, may become zero.
- Where the oracle says NaN the result is NaN, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

DEVICE = "cuda"
# 1.6 is the most that was seen in 2,500 random calls: float32 rows of small spread that several warps share, whose
# exponentials are corrected by one more, that of the difference of two maxima.
FACTOR = 2.0
ROUNDING = 2.0**-24  # of float32, relative
# exp2 of a rounded exponent of up to 126 is off by 126 * 1.5 roundings * ln 2; the rest: sums, a product.
SLACK = 2.0**-16
TINY = 2.0**-126
CHUNK = 1 << 25  # elements that are compared at a time: about 2 GB of float64 intermediates
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A NaN of bfloat16, float16 and float32 that no arithmetic produces; a truth that is not 1.
POISON = {1: 0xA5, 2: 0x7FA5, 4: 0x7FA5A5A5}
GUARD = 512  # elements before and after a guarded tensor


def softmax64(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The oracle of the forward pass."""
    return torch.softmax(x.double(), dim)


def softmax_backward64(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The oracle of the backward pass over the last dimension, from the `y` that it is given."""
    dy, y = dy.double(), y.double()
    return y * (dy - (dy * y).sum(-1, keepdim=True))


def half_ulp(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Half the distance between neighbouring numbers of `dtype` around a float64 value."""
    info = torch.finfo(dtype)
    exponential_of_two = (value.view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return exponential_of_two.clamp_(min=info.tiny).mul_(info.eps / 2)


def _rows(tensor: torch.Tensor, dim: int | Sequence[int]) -> torch.Tensor:
    """(groups, length of a group): the reduced dimensions last."""
    dims = [d % tensor.dim() for d in ((dim,) if isinstance(dim, int) else dim)]
    moved = tensor.movedim(dims, list(range(-len(dims), 0)))
    length = math.prod(tensor.shape[d] for d in dims)
    return moved.reshape(tensor.numel() // max(length, 1), length)


def _chunks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, CHUNK // max(columns, 1))
    return (slice(i, i + step) for i in range(0, rows, step))


def _fail(what: str, first_row: int, got: torch.Tensor, expected: torch.Tensor, excess: torch.Tensor):
    """Raise AssertionError that shows the worst element."""
    worst = int(excess.argmax())
    row, column = divmod(worst, got.shape[1])
    raise AssertionError(
        f"{what}: {int((excess > 0).sum())} of {excess.numel()} elements are wrong; the worst is row "
        f"{first_row + row}, column {column} of {got.shape[1]}: {got[row, column].item()!r} instead of "
        f"{expected[row, column].item()!r}"
    )


def _compare(
    what: str, first_row: int, got: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor
) -> float:
    """The largest error over what is allowed; AssertionError if that is more than 1, or NaN is not where it should."""
    wrong = got.isnan() != exact.isnan()
    if wrong.any():
        _fail(f"{what} (NaN)", first_row, got, exact, wrong.double())
    error = (got.double() - exact).abs_().div_(allowed)
    over = torch.where(got.double() == exact, 0.0, error).nan_to_num_(0.0, posinf=math.inf)
    largest = over.max().item()
    if not largest <= 1:
        _fail(f"{what}, {largest:.3g} times the bound", first_row, got, exact, (over - 1).clamp_(min=0))
    return largest


def _relative(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """|result - exact| beyond TINY, relative to exact; NaN counts as 0."""
    error = ((result.double() - exact).abs() - TINY).clamp_(min=0) / exact.abs()
    return error.nan_to_num_(0.0, posinf=math.inf)


def check_softmax(
    y: torch.Tensor, x: torch.Tensor, dim: int | Sequence[int] = -1, factor: float = 1.0
) -> float:
    """Raise AssertionError unless `y` is the softmax of `x` within `factor` times the bound of its dtype.

    Returns the largest error over that: relative to it, so at most 1.
    """
    assert y.shape == x.shape, f"shape {tuple(y.shape)}, expected {tuple(x.shape)}"
    if y.numel() == 0:
        return 0.0
    if y.dim() == 0:
        x, y = x[None], y[None]
    x, y, what, worst = _rows(x, dim), _rows(y, dim), f"softmax {x.dtype} -> {y.dtype}", 0.0
    bound = factor * _forward_bound(x) if y.dtype is torch.float32 else 0.0
    for part in _chunks(*y.shape):
        exact = softmax64(x[part])
        if y.dtype is torch.float32:
            allowed = bound * exact + TINY
        else:
            allowed = factor * (half_ulp(exact, y.dtype) + SLACK * exact + TINY)
        worst = max(worst, _compare(what, part.start, y[part], exact, allowed))
    return worst


def _forward_bound(x: torch.Tensor) -> float:
    """The largest relative error that a float32 result may have."""
    torchs = spread = 0.0
    for part in _chunks(*x.shape):
        exact = softmax64(x[part])
        torchs = max(torchs, _relative(torch.softmax(x[part], -1, torch.float32), exact).max().item())
        wide = x[part].double()
        below = wide.amax(-1, keepdim=True) - wide
        spread = max(spread, torch.where(below < 88, below, 0).max().item())
    assert math.isfinite(torchs), "torch's own result is no measure here"
    return max(FACTOR * torchs, ROUNDING * (2 + spread))


def check_backward(
    dx: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dim: int | Sequence[int] = -1
) -> float:
    """Raise AssertionError unless `dx` is the gradient of softmax for upstream `dy` and result `y`.

    Returns the largest error over the bound, at most 1.
    """
    assert dx.shape == y.shape, f"shape {tuple(dx.shape)}, expected {tuple(y.shape)}"
    if dx.numel() == 0:
        return 0.0
    dx, dy, y = (_rows(t, dim) for t in (dx, dy, y))
    what, worst = f"softmax backward {dy.dtype}, {y.dtype} -> {dx.dtype}", 0.0
    parts = [*_chunks(*dx.shape)]
    torchs = 0.0
    for part in parts:
        exact, unit = softmax_backward64(dy[part], y[part]), _unit(dy[part], y[part])
        reference = torch._softmax_backward_data(dy[part].float(), y[part].float(), -1, torch.float32)
        torchs = max(torchs, _error_in_units(reference, exact, unit).nan_to_num(0.0, posinf=0.0).max().item())
    bound = max(FACTOR * torchs, 4 * ROUNDING)
    for part in parts:
        exact = softmax_backward64(dy[part], y[part])
        allowed = bound * _unit(dy[part], y[part]) + TINY
        if dx.dtype is not torch.float32:
            allowed += half_ulp(exact, dx.dtype)
        worst = max(worst, _compare(what, part.start, dx[part], exact, allowed))
    return worst


def _unit(dy: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    dy, y = dy.double().abs(), y.double().abs()
    return y * (dy + (dy * y).sum(-1, keepdim=True))


def _error_in_units(result: torch.Tensor, exact: torch.Tensor, unit: torch.Tensor) -> torch.Tensor:
    return ((result.double() - exact).abs_() - TINY).clamp_(min=0) / unit


def reduction64(name: str, x: torch.Tensor, dim: int | Sequence[int] = -1) -> torch.Tensor:
    """The oracle of a reduction ("logsumexp", "amax" or "sum"), without the reduced dimensions."""
    return getattr(torch, name)(x.double(), dim)


def check_reduction(name: str, result: torch.Tensor, x: torch.Tensor, dim: int | Sequence[int] = -1) -> float:
    """Raise AssertionError unless `result` is the reduction of `x`, which is not empty, within its bound.

    Returns the largest error over the bound, at most 1.
    """
    x = x if x.dim() else x[None]
    rows, got = _rows(x, dim), result.reshape(-1, 1)
    assert len(got) == len(rows), f"{len(got)} results, expected {len(rows)}"
    what, worst = f"{name} {x.dtype} -> {result.dtype}", 0.0
    for part in _chunks(*rows.shape):
        values, exact = rows[part], reduction64(name, rows[part])[:, None]
        rounded = exact.to(result.dtype).double()
        exact = torch.where(rounded.isinf(), rounded, exact)
        allowed = torch.zeros_like(exact)
        if name != "amax":
            largest = values.double().amax(-1, keepdim=True).abs()
            unit = values.double().abs().sum(-1, keepdim=True) if name == "sum" else 1 + exact.abs() + largest
            unit = ROUNDING * unit + TINY
            torchs = getattr(torch, name)(values.float(), -1, keepdim=True).double() - exact
            bound = FACTOR * (torchs.abs() / unit).nan_to_num(0.0, posinf=0.0).max().item()
            allowed = max(bound, 4) * unit
        if result.dtype is not torch.float32 and name != "amax":
            allowed += half_ulp(exact, result.dtype) + SLACK * (name == "logsumexp")
        allowed = allowed.masked_fill_(exact.isinf(), 0)
        worst = max(worst, _compare(what, part.start, got[part], exact, allowed))
    return worst


def reduction_mutants(name: str, result: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong reductions over the last dimension of a matrix, each as some broken kernel would give it."""
    yield "zeros", torch.zeros_like(result)
    yield "rows swapped", result.flip(0)
    if name == "amax":
        yield "the smallest", x.amin(-1)
        yield "the largest is lost", x.topk(2, -1)[0][:, 1]
        yield "of absolute values", -x.abs().amax(-1) * 2
        return
    yield "wrong scale", (result.double() * 1.02).to(result.dtype)
    if result.dtype is torch.float32:
        for first, count in ((0, 1), (x.shape[1] - 1, 1), (32, 32)):
            if first + count <= x.shape[1]:
                left = torch.cat([x[:, :first], x[:, first + count :]], 1)
                yield f"{count} columns missing from {first}", reduction64(name, left).float()
    if name == "logsumexp":
        yield "base 2", (torch.logsumexp(x.double() * math.log(2), -1) / math.log(2)).to(result.dtype)
        yield "no maximum added", (result.double() - x.double().amax(-1)).to(result.dtype)


def ranked(x: torch.Tensor) -> torch.Tensor:
    """The indices of elements along the last dimension from the largest on, of equal ones the first one first; NaN
    before numbers: torch's sorts differ in NaN with a sign, and in -0."""
    none = x.isnan()
    numbers = torch.where(none | (x == 0), 0.0, x.double())
    order = torch.sort(numbers, dim=-1, descending=True, stable=True).indices
    none = none.gather(-1, order).to(torch.uint8)
    return order.gather(-1, torch.sort(none, dim=-1, descending=True, stable=True).indices)


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits, NaN included."""
    integer = _INTEGERS[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))
    )


class Guarded:
    """A tensor in the midst of a poisoned buffer, with its own elements poisoned too.

    strides: in elements, contiguous if None; 0 for equal values in one place. offset: elements past a 512-byte
    boundary. `check` raises AssertionError where a byte around the tensor, or between its rows, was written. As the
    poison is a NaN, a kernel that reads around a guarded *input* gives NaN.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        device: str | torch.device | None = None,
    ):
        shape = tuple(shape)
        if strides is None:
            strides = torch.empty(shape, device="meta").stride()
        # What is expanded (stride 0) is written once.
        narrow = tuple(n if s else min(n, 1) for n, s in zip(shape, strides, strict=True))
        self.placement = (narrow, tuple(strides), GUARD + offset)
        span = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
        size = torch.empty((), dtype=dtype).element_size()
        self.poison = POISON[size]
        self.bits = torch.full(
            (GUARD + offset + span + GUARD,), self.poison, dtype=_INTEGERS[size], device=device or DEVICE
        )
        self.tensor = self.bits.view(dtype).as_strided(shape, *self.placement[1:])

    @classmethod
    def of(cls, values: torch.Tensor, dtype: torch.dtype | None = None, **placement) -> Guarded:
        """A guarded copy of `values`."""
        made = cls(values.shape, dtype or values.dtype, device=values.device, **placement)
        narrow = tuple(slice(0, n) for n in made.placement[0])
        made.tensor[narrow].copy_(values[narrow])
        return made

    def check(self, written: bool = True):
        """The surroundings are intact and, if `written`, every element of the tensor was written."""
        outside = torch.ones(self.bits.shape, dtype=torch.bool, device=self.bits.device)
        outside.as_strided(*self.placement).fill_(False)
        touched = outside & (self.bits != self.poison)
        if touched.any():
            first = int(touched.nonzero()[0]) - self.placement[2]
            raise AssertionError(
                f"{int(touched.sum())} elements outside the tensor {self.placement[:2]} written, the first "
                f"at {first} elements from its beginning"
            )
        if written:
            left = self.bits.as_strided(*self.placement) == self.poison
            if left.any():
                raise AssertionError(
                    f"{int(left.sum())} of {left.numel()} elements were not written, the first at "
                    f"{tuple(left.nonzero()[0].tolist())}"
                )


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, scale: float = 1.0, device=None):
    """Random normal numbers of float32, times `scale`, rounded to `dtype`; made on the device."""
    device = device or DEVICE
    generator = torch.Generator(device=device).manual_seed(seed)
    return (torch.randn(tuple(shape), generator=generator, device=device) * scale).to(dtype)


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def example(shape: Sequence[int], dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """`random` on the CPU."""
    return random(shape, dtype, seed, device="cpu")


def mutants(y: torch.Tensor, x: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Wrong results over the last dimension, each as some broken kernel would give it."""
    n = y.shape[-1]
    exact = softmax64(x)
    yield "zeros", torch.zeros_like(y)
    yield "uniform row", torch.full_like(y, 1 / n)
    yield "off by one column", y.roll(1, -1)
    yield "last column not written", torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)
    for width in (32, 256):
        if n > 2 * width:
            slice_sum = exact[..., width : 2 * width].sum(-1, keepdim=True)
            yield f"{width} columns missing from the sum", (exact / (1 - slice_sum)).to(y.dtype)
            without = y.clone()
            without[..., width : 2 * width] = 0
            yield f"{width} columns of zeros", without
    yield "wrong scale", (exact * (1.02 if y.dtype is not torch.float32 else 1 + 2e-5)).to(y.dtype)
    yield "rows swapped", y.flip(0)
    yield "base 2 instead of e", torch.softmax(x.double() * math.log(2), -1).to(y.dtype)
