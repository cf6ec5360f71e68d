"""logsumexp, amax and sum on the device: lengths, values, guard bands around the results, views, autograd, compile."""

import math

import classes
import pytest
import torch
from checking import DEVICE, DTYPES, Guarded, check_reduction, equal_bits, random

from cute_softmax import amax, logsumexp
from cute_softmax import sum as sum_
from cute_softmax.runtime import launch

INF = math.inf
FUNCTIONS = {"logsumexp": logsumexp, "amax": amax, "sum": sum_}
LENGTHS = (
    1, 2, 3, 7, 8, 33, 64, 127, 128, 255, 1000, 1023, 1024, 4096, 8192, 16384, 20000, 32768, 50257, 65536, 100000,
    151936, 200064, 262144, 300001, 1000000,
)  # fmt: skip
names = pytest.mark.parametrize("name", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def guarded(name: str, x: torch.Tensor, dtype: torch.dtype | None = None, stride: int = 1, offset: int = 0):
    """The reduction of the rows of a matrix into elements `stride` apart in a guarded buffer."""
    source = Guarded.of(x)
    result = Guarded(x.shape[:1], dtype or x.dtype, strides=(stride,), offset=offset)
    group = result.tensor.as_strided(x.shape, (stride, 0))
    launch.run(name, (source.tensor, group), (1,))
    result.check()
    source.check(written=False)
    assert equal_bits(source.tensor, x), "the input was changed"
    return result.tensor


def one_length_per_class(name: str, arch: str, dtype: str):
    """(class, a length that leaves the last vector, step or CTA partly empty)."""
    for interval in classes.taken(name, arch, (dtype, dtype)):
        yield interval.row_class, max(interval.first, interval.last - 37)


@names
@dtypes
@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths(columns, dtype, name):
    function = FUNCTIONS[name]
    for rows in (0, 1, 2, 3, 17, 1000) if columns <= 10000 else (0, 1, 9):
        x = random((rows, columns), DTYPES[dtype], seed=columns + rows, scale=3.0)
        y = function(x, 1)
        assert y.shape == (rows,) and y.dtype == x.dtype and y.is_contiguous()
        if not rows:
            continue
        check_reduction(name, y, x)
        assert equal_bits(y, function(x, -1)), "a second call gave other bits"
        assert equal_bits(y, guarded(name, x)), "the result depends on where it is written"
        assert equal_bits(y, guarded(name, x, stride=3, offset=1))


@names
@dtypes
def test_ends_of_every_class(dtype, name, arch):
    for interval in classes.taken(name, arch, (dtype, dtype)):
        for columns in {interval.first, interval.last}:
            x = random((5, columns), DTYPES[dtype], seed=columns, scale=2.0)
            check_reduction(name, guarded(name, x), x)
    x = random((2, interval.last + 1), DTYPES[dtype])
    check_reduction(name, guarded(name, x), x)


@names
@dtypes
@pytest.mark.parametrize("columns", [1, 2, 9, 64, 127, 1000, 1023, 5000, 20000, 50257])
def test_offsets_and_row_strides(columns, dtype, name):
    rows = 5
    x = random((rows, columns), DTYPES[dtype], seed=columns, scale=2.0)
    for offset in range(9):
        for pad in (0, 1, 3, 8):
            source = Guarded.of(x, offset=offset, strides=(columns + pad, 1))
            check_reduction(name, FUNCTIONS[name](source.tensor, 1), x)


@names
@dtypes
@pytest.mark.parametrize("rows", [65536, 131073, 3_000_001])
def test_many_rows(rows, dtype, name):
    for columns in (3, 64, 1000) if rows < 1 << 20 else (7,):
        x = random((rows, columns), DTYPES[dtype], seed=rows)
        check_reduction(name, guarded(name, x), x)


@names
@dtypes
@pytest.mark.parametrize("offset", [0, 3])
def test_infinities_and_nan(dtype, name, offset, arch):
    """-inf in any pattern, +inf and NaN at the ends and in each warp and CTA; the rows around stay right."""
    for c, columns in one_length_per_class(name, arch, dtype):
        share = math.ceil(math.ceil(columns / c.cluster_n) / c.line) * c.line
        at = {0, 1, 7, columns // 2, columns - 2, columns - 1}
        at |= {r * share + d for r in range(c.cluster_n) for d in (-1, 5)}
        at |= {32 * c.vector * w + 1 for w in range(c.warps_per_row)}
        at = sorted({a % columns for a in at})
        x = random((4 * len(at) + 4, columns), DTYPES[dtype], seed=columns)
        for i, column in enumerate(at):
            x[4 * i, column] = INF
            x[4 * i + 1, column] = math.nan
            x[4 * i + 2] = -INF
            x[4 * i + 2, column] = 1.5
            x[4 * i + 3, : column + 1] = -INF
        x[-4], x[-3], x[-2] = -INF, INF, math.nan
        x[-1, :: 1 + columns // 3] = -INF
        source = Guarded.of(x, offset=offset, strides=(columns + offset, 1))
        y = FUNCTIONS[name](source.tensor, 1)
        check_reduction(name, y, x)
        if name != "sum":
            assert (y[0 : 4 * len(at) : 4] == INF).all() and y[-3] == INF and y[-4] == -INF
        assert y[1 : 4 * len(at) : 4].isnan().all()


@dtypes
def test_extreme_numbers(dtype):
    info = torch.finfo(DTYPES[dtype])
    for columns in (2, 9, 64, 1000, 20000, 100000):
        x = random((8, columns), DTYPES[dtype], seed=columns)
        x[0], x[1], x[2] = info.min, info.max, 0
        x[3] = x[3].sign() * info.tiny
        x[4] = info.min
        x[4, columns // 2] = info.max
        x[5] = torch.linspace(-80, 0, columns, device=x.device).to(x.dtype)
        for name in ("logsumexp", "amax"):
            check_reduction(name, FUNCTIONS[name](x, 1), x)
        check_reduction("sum", sum_(x[2:], 1), x[2:])


@dtypes
def test_every_element_counts(dtype, arch):
    """One element that outweighs the row, at each column in turn."""
    for name in FUNCTIONS:
        for _, columns in one_length_per_class(name, arch, dtype):
            for first in {0, max(0, columns // 2 - 256), max(0, columns - 512)}:
                count = min(512, columns - first, max(1, (1 << 26) // columns))
                x = torch.full((count, columns), 0.0, dtype=DTYPES[dtype], device=DEVICE)
                at = torch.arange(count, device=DEVICE)
                x[at, first + at] = 20.0
                y = FUNCTIONS[name](x, 1)
                check_reduction(name, y, x)
                assert (y >= 20).all()


def test_sum_in_another_dtype():
    for columns in (7, 1000, 1023, 50257, 200000):
        for source in (torch.bfloat16, torch.float16):
            x = random((9, columns), source, seed=columns)
            y = sum_(x, 1, dtype=torch.float32)
            assert y.dtype == torch.float32
            check_reduction("sum", y, x)
            check_reduction("sum", guarded("sum", x, torch.float32, stride=2), x)


@names
@dtypes
def test_dimensions_and_views(dtype, name):
    """Several dimensions, all of them, transposed and sliced tensors: shape and strides as torch's."""
    function, torchs = FUNCTIONS[name], getattr(torch, name)
    x = random((4, 6, 10, 130), DTYPES[dtype], seed=4)
    views = [
        (x, 3), (x, (2, 3)), (x, (1, 2, 3)), (x, (0, 1, 2, 3)), (x.permute(3, 0, 1, 2), 0),
        (x.permute(0, 3, 2, 1), (1, 2)), (x[:, :3], 3), (x[:, 1:4, :7, 1:100], 3), (x.permute(2, 1, 0, 3), 3),
        (x[:1].expand(4, 6, 10, 130), 3), (x[0, 0, 0], 0), (x[0, 0, 0, 0], 0), (x[..., :1], 3),
        (x[:3, ::2, 1::3], -1), (x[1:, :, :, 3:], (3,)),
    ]  # fmt: skip
    for view, dim in views:
        for keepdim in (False, True):
            y, expected = function(view, dim, keepdim), torchs(view, dim, keepdim)
            assert (y.shape, y.stride(), y.dtype) == (expected.shape, expected.stride(), expected.dtype)
            check_reduction(name, y, view, dim)
    for dim in (0, 1, (0, 2), (1, 3)):
        check_reduction(name, function(x, dim), x, dim)


@names
def test_empty_and_integers(name):
    function, torchs = FUNCTIONS[name], getattr(torch, name)
    for shape, dim in (((0, 5), 1), ((2, 0, 5), 2)):
        x = torch.empty(shape, device=DEVICE)
        assert function(x, dim).shape == torchs(x, dim).shape
    empty = torch.empty(3, 0, device=DEVICE)
    if name == "amax":
        with pytest.raises(IndexError, match="non-zero size"):
            function(empty, 1)
    else:
        assert function(empty, 1).tolist() == [{"logsumexp": -INF, "sum": 0.0}[name]] * 3
    x = torch.arange(12, device=DEVICE).view(3, 4)
    assert torch.equal(function(x, 1), torchs(x, 1))


@names
@dtypes
def test_gradients(dtype, name):
    """No further from float64 autograd than torch's own."""
    for shape, dim in (((20, 1000), 1), ((5, 20000), 1), ((4, 6, 40), (1, 2))):
        x = random(shape, DTYPES[dtype], seed=shape[1])
        x[0] = x[0].round()  # ties
        gradients = []
        for function, source in (
            (FUNCTIONS[name], x),
            (getattr(torch, name), x),
            (getattr(torch, name), x.double()),
        ):
            leaf = source.detach().clone().requires_grad_()
            y = function(leaf, dim)
            grad = random(y.shape, torch.float32, seed=1).to(x.dtype).to(y.dtype)
            gradients.append(torch.autograd.grad(y, leaf, grad)[0].double())
        ours, torchs, exact = gradients
        ours, torchs = ((g - exact).abs().max().item() for g in (ours, torchs))
        assert ours <= 1.5 * torchs + 2**-20 * exact.abs().max().item(), (shape, ours, torchs)


@names
@dtypes
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(dtype, dynamic, name):
    torch._dynamo.reset()
    function = FUNCTIONS[name]
    compiled = torch.compile(lambda t: function(t * 2, -1) + 0, fullgraph=True, dynamic=dynamic)
    for shape in ((7, 33), (17, 1000), (3, 20, 1000)):
        x = random(shape, DTYPES[dtype]).requires_grad_()
        y, eager = compiled(x), function(x * 2, -1)
        assert equal_bits(y.detach(), eager.detach())
        (dx,) = torch.autograd.grad(y.sum(), x)
        (expected,) = torch.autograd.grad(eager.sum(), x)
        assert torch.allclose(dx, expected, rtol=0.02, atol=1e-6)


def test_operators():
    x = random((6, 40), torch.bfloat16)
    for name in FUNCTIONS:
        operator = getattr(torch.ops.cute_softmax, name).default
        for tensor in (x, x[:, 1:], x.detach().requires_grad_(), x.view(2, 3, 40)[:, :2]):
            torch.library.opcheck(operator, (tensor, [tensor.dim() - 1], False, x.dtype))


def test_autocast():
    x = random((9, 1000), torch.bfloat16)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for name, function in FUNCTIONS.items():
            for tensor in (x, x.float(), x.double()):
                y, torchs = function(tensor, 1), getattr(torch, name)(tensor, 1)
                assert y.dtype == torchs.dtype, name
                if tensor is not x or name != "amax":
                    assert (y - torchs).abs().max() <= 1e-3
        assert sum_(x, 1, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_graphs_and_streams():
    x = random((40, 100000), torch.bfloat16)
    expected = {name: function(x, 1) for name, function in FUNCTIONS.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {name: function(x, 1) for name, function in FUNCTIONS.items()}
    graph.replay()
    torch.cuda.synchronize()
    for name, result in results.items():
        assert equal_bits(result, expected[name])
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        later = {name: function(x, 1) for name, function in FUNCTIONS.items()}
    stream.synchronize()
    assert all(equal_bits(later[name], expected[name]) for name in FUNCTIONS)
