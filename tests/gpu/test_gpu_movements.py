"""One problem in every movement, and CTAs that exchange states in global memory: alone, beside others, captured in
graphs."""

import os
import time
from dataclasses import replace

import calls
import panels
import pytest
import torch
from checking import DTYPES, Guarded, check_backward, check_reduction, check_softmax, equal_bits, random

from cute_softmax import softmax
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.runtime import launch

# How long kernels that exchange run side by side; set it to 60 for a minute.
SECONDS = float(os.environ.get("CUTE_SOFTMAX_TEST_SECONDS", "5"))
dtypes = pytest.mark.parametrize("dtype", DTYPES)
PROBLEMS = [
    ((1500, 40), (0,)), ((1500, 33), (0,)), ((3, 1500, 8), (1,)), ((40, 3, 50, 16), (0, 2)), ((5, 4096), (1,)),
    ((3, 40, 50, 24), (1, 3)), ((1001, 3, 1), (0,)), ((2, 300, 200), (1,)), ((5, 4099), (1,)), ((9, 37), (1,)),
    ((700, 131), (0,)), ((3, 300, 77), (1,)), ((2, 30, 3, 20, 55), (1, 3)),
]  # fmt: skip
problems = pytest.mark.parametrize(("shape", "dims"), PROBLEMS, ids=str)


def guarded(made, inputs, shape, dtype: torch.dtype, **placement) -> torch.Tensor:
    """What a plan writes; AssertionError where it wrote anything around that."""
    out = Guarded(shape, dtype, **placement)
    calls.launched(made, (*inputs, out.tensor))
    torch.cuda.synchronize()
    out.check()
    return out.tensor


def guarded_forward(made, x: torch.Tensor) -> torch.Tensor:
    source = Guarded.of(x)
    out = guarded(made, (source.tensor,), x.shape, x.dtype)
    assert equal_bits(source.tensor, x)
    return out


def every(math: str, tensors, dims, arch: str):
    made = calls.planned(math, tensors, dims)
    yield from panels.movements(made, clusters=ARCHITECTURES[arch].cluster_limit)


def agree(results: list[torch.Tensor]):
    """Rounded from nearly the same numbers: a unit in the last place apart at most, or a few in float32."""
    dtype = results[0].dtype
    step = 2 * torch.finfo(dtype).eps if dtype is not torch.float32 else 4e-6
    first = results[0].double()
    for other in results[1:]:
        assert ((first - other.double()).abs() <= step * first.abs() + torch.finfo(dtype).tiny).all()


@dtypes
@problems
def test_forward(shape, dims, dtype, arch):
    x = random(shape, DTYPES[dtype], seed=1, scale=3.0)
    results = [softmax(x, dims)]
    for name, made in every("softmax", (x, x), dims, arch):
        y = guarded_forward(made, x)
        check_softmax(y, x, dims)
        assert equal_bits(guarded_forward(made, x), y), f"{name}: a second call gave other bits"
        results.append(y)
    agree(results)


@dtypes
def test_rows_and_columns_agree(dtype, arch):
    """The same groups as rows, in panels of rows, and as columns."""
    x = random((40, 1504), DTYPES[dtype], seed=2, scale=3.0)
    turned = x.t().contiguous()
    results = [softmax(x, 1), softmax(turned, 0).t()]
    results += [guarded_forward(made, x) for _, made in every("softmax", (x, x), (1,), arch)]
    results += [guarded_forward(m, turned).t() for _, m in every("softmax", (turned, turned), (0,), arch)]
    agree(results)


@dtypes
@problems
def test_backward(shape, dims, dtype, arch):
    dy, y = random(shape, DTYPES[dtype], seed=1), softmax(random(shape, DTYPES[dtype], seed=2), dims)
    for name, made in every("softmax_backward", (dy, y, y), dims, arch):
        results = [guarded(made, (dy, y), shape, y.dtype) for _ in range(2)]
        check_backward(results[0], dy, y, dims)
        assert equal_bits(*results), f"{name}: a second call gave other bits"


@dtypes
@problems
@pytest.mark.parametrize("name", calls.REDUCTIONS)
def test_reductions(name, shape, dims, dtype, arch):
    x = random(shape, DTYPES[dtype], seed=1)
    kept = [n for d, n in enumerate(shape) if d not in dims]
    for _, movement in every(
        name, (x, spread(torch.empty(kept, device=x.device, dtype=x.dtype), x, dims)), dims, arch
    ):
        check_reduction(name, guarded(movement, (x,), kept, x.dtype), x, dims)


@dtypes
@pytest.mark.parametrize("length", [37, 4099])
@pytest.mark.parametrize(
    ("source", "result"), [((1, 0), (1, 0)), ((3, 1), (3, 9)), ((2, 2), (0, 0)), ((0, 5), (4, 1))]
)
def test_rows_that_begin_anywhere(source, result, length, dtype, arch):
    """(offset, room between rows) of input and output: alike, alike but for whole vectors, different."""
    values = random((5, length), DTYPES[dtype], seed=6, scale=3.0)

    def place(offset: int, room: int) -> dict:
        return {"offset": offset, "strides": (length + room, 1)}

    x = Guarded.of(values, **place(*source))
    out = Guarded(values.shape, values.dtype, **place(*result))
    for _, made in every("softmax", (x.tensor, out.tensor), (1,), arch):
        assert made.kernel.edges
        y = guarded(made, (x.tensor,), values.shape, values.dtype, **place(*result))
        check_softmax(y, values, (1,))


@dtypes
@pytest.mark.parametrize("width", [48, 77, 257])
@pytest.mark.parametrize(
    ("source", "result"),
    [((1, 0), (1, 0)), ((3, 1), (3, 9)), ((2, 3), (0, 1)), ((0, 5), (5, 2)), ((7, 8), (1, 8))],
)
def test_columns_that_begin_anywhere(source, result, width, dtype, arch):
    """(offset, room between memory's rows) of input and output, forward and backward; nothing else is written."""
    values = random((2, 90, width), DTYPES[dtype], seed=7, scale=3.0)
    values[0, :, width // 2] = -float("inf")
    values[1, 7, width - 1] = float("nan")
    gradient = random(values.shape, DTYPES[dtype], seed=8)

    def place(offset: int, room: int) -> dict:
        return {"offset": offset, "strides": (90 * (width + room) + 3, width + room, 1)}

    x = Guarded.of(values, **place(*source))
    out = Guarded(values.shape, values.dtype, **place(*result))
    for _, made in every("softmax", (x.tensor, out.tensor), (1,), arch):
        assert made.kernel.shifted
        y = guarded(made, (x.tensor,), values.shape, values.dtype, **place(*result))
        check_softmax(y, values, (1,))
    y = Guarded.of(softmax(random(values.shape, DTYPES[dtype], seed=9), 1), **place(*result))
    dy = Guarded.of(gradient, **place(*source))
    for _, made in every("softmax_backward", (dy.tensor, y.tensor, out.tensor), (1,), arch):
        assert made.kernel.shifted
        dx = guarded(made, (dy.tensor, y.tensor), values.shape, values.dtype, **place(*result))
        check_backward(dx, gradient, y.tensor, (1,))


@dtypes
@pytest.mark.parametrize(("shape", "dim"), [((700, 20_001), 0), ((5, 300, 3001), 1)])
def test_columns_in_place(shape, dim, dtype):
    """Panels that overlap would write what others still read: none does."""
    x = random(shape, DTYPES[dtype], seed=10, scale=3.0)
    assert launch.call_of("softmax", (x, torch.empty_like(x)), (dim,)).plan.kernel.shifted
    both = x.clone()
    assert softmax(both, dim, out=both) is both
    check_softmax(both, x, (dim,))


def spread(result: torch.Tensor, x: torch.Tensor, dims) -> torch.Tensor:
    """A result with one element per group as the kernel addresses it: strides 0 in the reduced dimensions."""
    for d in sorted(dims):
        result = result.unsqueeze(d)
    return result.expand(x.shape)


@dtypes
@problems
def test_infinities_in_every_movement(shape, dims, dtype, arch):
    x = random(shape, DTYPES[dtype], seed=4)
    flat = x.flatten()
    flat[torch.rand(flat.shape, device=x.device) < 0.5] = -float("inf")
    flat[:: 7 * shape[-1] + 3] = float("inf")
    flat[3 :: 11 * shape[-1] + 5] = float("nan")
    for part in (x, torch.full_like(x, -float("inf"))):
        for _, made in every("softmax", (x, x), dims, arch):
            check_softmax(guarded_forward(made, part), part, dims)


def exchanges(x, dims, arch):
    for name, made in every("softmax", (x, x), dims, arch):
        if made.kernel.exchange:
            yield name, made


@dtypes
@problems
@pytest.mark.parametrize("patience", [0, 1, 300, 3000])
def test_parts_that_are_given_up(patience, shape, dims, dtype, arch):
    """No CTA waits: the last one finishes all parts, and the bits are the same."""
    x = random(shape, DTYPES[dtype], seed=1, scale=3.0)
    for name, made in exchanges(x, dims, arch):
        wanted = guarded_forward(made, x)
        check_softmax(wanted, x, dims)
        for _ in range(5):
            y = guarded_forward(replace(made, patience=patience), x)
            assert equal_bits(y, wanted), f"{name}: parts that others finish have other bits"
        if not made.kernel.overlap:
            in_place = x.clone()
            calls.launched(replace(made, patience=patience), (in_place, in_place))
            assert equal_bits(in_place, wanted), f"{name}: in place"


@dtypes
def test_backward_of_parts_that_are_given_up(dtype, arch):
    for shape, dims in PROBLEMS:
        dy, y = random(shape, DTYPES[dtype], seed=1), softmax(random(shape, DTYPES[dtype], seed=2), dims)
        for _, made in every("softmax_backward", (dy, y, y), dims, arch):
            if made.kernel.exchange:
                out = torch.empty_like(y)
                calls.launched(replace(made, patience=0), (dy, y, out))
                check_backward(out, dy, y, dims)


@pytest.mark.parametrize("patience", [0, 20_000, 1_000_000])
def test_many_streams_beside_a_busy_gpu(patience, arch):
    """Eight streams of kernels that exchange, most of them larger than the GPU, beside products of matrices."""
    busy, factor = torch.cuda.Stream(), random((4096, 4096), torch.bfloat16, scale=0.01)
    jobs = []
    for i in range(8):
        shape, dims = ((40_000, 64), (0,)) if i % 2 else ((300_000 + i, 8), (0,))
        x = random(shape, torch.bfloat16, seed=i, scale=3.0)
        made = calls.planned("softmax", (x, x), dims)
        if not made.kernel.exchange:
            made = panels.forced(made, panels.SMALL["streaming"][0], 100, across=min(made.kernel.across, 16))
        made = replace(made, patience=patience)
        first = torch.empty_like(x)
        calls.launched(made, (x, first))
        check_softmax(first, x, dims)
        jobs.append((torch.cuda.Stream(), made, x, first, torch.empty_like(x)))
    torch.cuda.synchronize()
    end, rounds = time.monotonic() + SECONDS / 3, 0
    while time.monotonic() < end:
        with torch.cuda.stream(busy):
            for _ in range(8):
                torch.mm(factor, factor)
        for stream, made, x, _, out in jobs:
            with torch.cuda.stream(stream):
                for _ in range(4):
                    calls.launched(made, (x, out))
        torch.cuda.synchronize()
        rounds += 1
        for _, made, _, first, out in jobs:
            assert equal_bits(out, first), f"round {rounds}: {made.kernel.name}"
            out.zero_()
    assert rounds > 0


def test_graph_capture_and_replay(arch):
    """Scratch memory is zeroed in the graph: every replay exchanges anew."""
    x = random((40_000, 64), torch.bfloat16, seed=1)
    found = [
        ("planned", calls.planned("softmax", (x, x), (0,))),
        *exchanges(x[:1500].contiguous(), (0,), arch),
    ]
    for name, made in found:
        values = x[: made.length].contiguous()
        wanted, out = torch.empty_like(values), torch.empty_like(values)
        calls.launched(made, (values, wanted))
        check_softmax(wanted, values, 0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            calls.launched(made, (values, out))
        for _ in range(5):
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert equal_bits(out, wanted), name
        values.copy_(values.flip(0))
        graph.replay()
        check_softmax(out, values, 0)
