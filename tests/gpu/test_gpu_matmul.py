"""softmax(S) @ V against float64. The unit of an error is what the row's exponentials and values can add up to.

A result may be off by `FACTOR` times the root mean square error of torch's softmax in float32, product in float32 and
rounding to the same dtype, and no element by more than `MOST` of its unit: the exponentials' own rounding, and that of
the result.
"""

import math
import sys
from dataclasses import replace

import classes
import pytest
import torch
from checking import DTYPES
from remembered import forget_calls

from cute_softmax import softmax_matmul
from cute_softmax.dispatch.common.formulas import compose
from cute_softmax.dispatch.matmul.request import spec_of

FACTOR = 2.0
HALVES = ("bf16", "fp16")
EPSILON = {"bf16": 2.0**-8, "fp16": 2.0**-11}
MOST = 2.0
dtypes = pytest.mark.parametrize("dtype", HALVES)


@pytest.fixture(autouse=True, params=["wgmma", "mma"])
def instruction(request, monkeypatch):
    """Every test with what the GPU has: mma.sync runs wherever wgmma does. Calls that are remembered do not ask."""
    module = sys.modules["cute_softmax.dispatch.matmul.kernels"]
    if request.param == "wgmma" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is sm_90's")
    monkeypatch.setattr(module, "instruction_of", lambda architecture: request.param)
    forget_calls()
    yield request.param
    forget_calls()


def tensors(batch, rows, columns, depth, dtype, *, seed=0, spread=1.0, scores=None, shared=None):
    """(scores, values) of normal numbers; scores: another dtype for them; shared: another batch for values."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    s = (normal(*batch, rows, columns) * spread).to(DTYPES[scores or dtype])
    return s, normal(*(batch if shared is None else shared), columns, depth).to(DTYPES[dtype])


def diagonal(causal=False, **_):
    """The offset of the diagonal, or None."""
    return None if causal is False else 0 if causal is True else causal


def softmax_of(s, *, scale=1.0, mask=None, bias=None, causal=False, empty_rows="nan", sink=None, **_):
    """(the scores that count, and the sink's; their softmax) in the dtype of s."""
    bias = None if bias is None else bias.to(s.dtype)
    x = compose(s, bias, mask, None, spec_of(s, scale, diagonal(causal)))
    if sink is not None:
        x = torch.cat([x, sink.to(x.dtype).expand(*x.shape[:-1], 1)], -1)
    p = torch.softmax(x, -1)[..., : s.shape[-1]]
    return x, p.masked_fill((x == -math.inf).all(-1, keepdim=True), 0.0) if empty_rows == "zero" else p


def oracle(s, v, **options):
    """(softmax in float64 @ V, its log-sum-exps, per element what |P| @ |V| is)."""
    x, p = softmax_of(s.double(), **options)
    return p @ v.double(), torch.logsumexp(x, -1), p @ v.double().abs()


def check(s, v, **options):
    """Compare a call with the oracle, its log-sum-exps too; the result."""
    out, lse = softmax_matmul(s, v, return_lse=True, **options)
    right, right_lse, unit = oracle(s, v, **options)
    assert out.shape == right.shape and out.dtype == v.dtype
    assert torch.equal(out.isnan(), right.isnan())
    _, p = softmax_of(s.float(), **options)
    torchs = (p @ v.float()).to(v.dtype).double() - right
    error = (out.double() - right).nan_to_num()
    eps = torch.finfo(v.dtype).eps
    floor = eps / 4 * unit.nan_to_num().square().mean().sqrt() * min(1.0, 4 / math.sqrt(s.shape[-1]))
    assert error.square().mean().sqrt() <= FACTOR * torchs.nan_to_num().square().mean().sqrt() + floor
    assert (error.abs() <= MOST * eps * unit.nan_to_num() + 1e-7).all()
    right_lse = right_lse.expand(lse.shape)
    finite = right_lse.isfinite()
    assert torch.equal(lse.isfinite(), finite) or not right_lse.isnan().any()
    gap = (lse.double() - right_lse)[finite].abs()
    assert (gap <= 1e-5 + 2.0**-18 * right_lse[finite].abs()).all()
    assert torch.equal(softmax_matmul(s, v, **options).nan_to_num(), out.nan_to_num())
    return out


@dtypes
@pytest.mark.parametrize(
    ("batch", "rows", "columns", "depth"),
    [
        ((1,), 256, 64, 64),
        ((2,), 300, 1000, 128),
        ((3,), 64, 72, 64),
        ((2, 2), 130, 4096, 128),
        ((), 17, 200, 256),
        ((3,), 1, 8, 128),
        ((2,), 513, 1, 40),
        ((1,), 257, 2048, 100),
        ((2,), 100, 520, 512),
        ((5,), 96, 130, 320),
    ],
)
def test_shapes(dtype, batch, rows, columns, depth):
    check(*tensors(batch, rows, columns, depth, dtype))


@pytest.mark.parametrize("columns", [1, 2, 3, 7, 33, 127, 1023])
@pytest.mark.parametrize("depth", [1, 7, 65])
def test_odd(columns, depth):
    check(*tensors((2,), 70, columns, depth, "bf16"))


@dtypes
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_few_rows(dtype, rows):
    """Columns are cut into parts."""
    check(*tensors((3,), rows, 20000, 128, dtype, spread=3.0))


@pytest.mark.parametrize("depth", [7, 66, 128, 320])
@pytest.mark.parametrize(("rows", "columns"), [(1, 40000), (300, 8200), (1024, 16384)])
def test_parts(rows, columns, depth):
    """Of few rows and of many; nothing counts in some parts, whose reference is no score."""
    s, v = tensors((1,), rows, columns, depth, "bf16")
    s[0, 0] -= 200
    s[0, 0, : columns // 2] = -math.inf
    check(s, v)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "scores"),
    [
        (256, 128, 2296, "bf16"),
        (128, 128, 2296, "bf16"),
        (128, 320, 2304, "bf16"),
        (128, 66, 2303, "bf16"),
        (128, 64, 2300, "fp32"),
    ],
)
def test_pairs(rows, depth, columns, scores, instruction, monkeypatch):
    """Halves of the columns that a pair of CTAs merges with tiles of so many rows, whatever a plan would choose."""
    if instruction == "mma":
        pytest.skip("pairs are wgmma's")
    monkeypatch.setattr(
        sys.modules["cute_softmax.plan.matmul"],
        "merging",
        lambda c, parts, device: [replace(c, cluster=2)] if parts == 2 and c.rows == rows else [],
    )
    s, v = tensors((3,), 300, columns, depth, "bf16", spread=3.0, scores=scores)
    for row, first in enumerate(range(0, columns, 100)):
        s[0, row] -= 200
        s[0, row, first:] = -math.inf
        s[1, row, :first] = -math.inf
        s[1, 64 + row, first] = math.nan if row % 2 else math.inf
    check(s, v)
    check_merged(s, v)


def check_merged(s, v):
    """The same bits every time, and what is added up where the log-sum-exps are given."""
    first = softmax_matmul(s, v)
    assert all(torch.equal(softmax_matmul(s, v).nan_to_num(), first.nan_to_num()) for _ in range(10))
    stats = torch.logsumexp(s.float() * 0.5, -1)
    right, _, unit = oracle(s, v, scale=0.5, empty_rows="zero")
    error = softmax_matmul(s, v, scale=0.5, empty_rows="zero", stats=stats).double() - right
    assert (error.nan_to_num().abs() <= MOST * 2.0**-7 * unit.nan_to_num() + 1e-7).all()


@pytest.mark.parametrize(("cluster", "mergers"), [(1, 0), (1, 1), (1, 16), (2, 0), (4, 0), (8, 0)])
@pytest.mark.parametrize(
    ("batch", "rows", "depth", "columns", "scores"),
    [
        (3, 64, 128, 1400, "bf16"),
        (1, 1, 64, 1370, "bf16"),
        (2, 300, 256, 1032, "bf16"),
        (200, 33, 192, 1032, "bf16"),
        (3, 130, 66, 1367, "bf16"),
        (2, 40, 320, 1500, "fp32"),
    ],
)
def test_turns(batch, rows, depth, columns, scores, cluster, mergers, instruction):
    """Warpgroups that take turns and merge in clusters of so many CTAs, whatever a plan would choose."""
    if instruction == "mma":
        pytest.skip("clusters are wgmma's")
    if cluster > 1 and batch * math.ceil(rows / 64) * math.ceil(depth / 128) * cluster > 120:
        pytest.skip("clusters are planned where all run at once")
    s, v = tensors((batch,), rows, columns, depth, "bf16", spread=3.0, scores=scores)
    for row, first in zip(range(rows), range(0, columns, 100), strict=False):
        s[0, row] -= 200
        s[0, row, first:] = -math.inf
        if batch > 1:
            s[1, row, :first] = -math.inf
    with classes.products(lambda c: (c.alternate, c.cluster, c.mergers) == (True, cluster, mergers)):
        check(s, v)
        check(s, v, causal=columns - rows - 150, scale=0.5, empty_rows="zero")
        check_merged(s, v)


@dtypes
@pytest.mark.parametrize("spread", [0.0, 1e-3, 8.0, 40.0])
def test_spreads(dtype, spread):
    """Rising and falling maxima: references move, sums are rescaled."""
    s, v = tensors((2,), 200, 3000, 128, dtype, spread=spread)
    check(s, v)
    ramp = torch.linspace(-spread, spread, 3000, device="cuda").to(s.dtype)
    check(s + ramp, v)
    check(s - ramp, v)


@dtypes
@pytest.mark.parametrize("scale", [0.125, -1.5, 0.0, 30.0])
def test_scale(dtype, scale):
    s, v = tensors((2,), 200, 500, 128, dtype)
    check(s, v, scale=scale)


@dtypes
@pytest.mark.parametrize("causal", [True, 0, 5, -3, -1000])
@pytest.mark.parametrize(("rows", "columns"), [(700, 1000), (1000, 300), (33, 400)])
def test_causal(dtype, causal, rows, columns):
    s, v = tensors((2,), rows, columns, 128, dtype)
    check(s, v, causal=causal)
    check(s, v, causal=causal, empty_rows="zero", scale=0.5)


@dtypes
@pytest.mark.parametrize("sink", [(1,), (3, 1, 1), (2, 3, 1, 1), (2, 3, 200, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"scale": -0.5, "causal": -7}, {"mask": True, "empty_rows": "zero"}, {"bias": True, "causal": 60}],
)
def test_sinks(dtype, sink, options):
    """Of one number, a head, a matrix and a row, as large as the sum and far from it; rows with nothing else are 0."""
    s, v = tensors((2, 3), 200, 1000, 64, dtype)
    options = dict(options)
    if "mask" in options:
        options["mask"] = torch.rand(200, 1000, device="cuda") < 0.5
        options["mask"][3] = False
    if "bias" in options:
        options["bias"] = torch.randn(200, 1000, device="cuda")
    for size, kind in (
        (7.0, torch.float32),
        (-80.0, torch.float32),
        (60.0, DTYPES[dtype]),
        (-math.inf, torch.float32),
    ):
        out = check(s, v, sink=(torch.randn(sink, device="cuda") + size).to(kind), **options)
        if "mask" in options or options.get("causal") == -7:
            assert size == -math.inf or (out[..., 3, :] == 0).all()


@pytest.mark.parametrize(
    ("batch", "rows", "columns", "depth"), [(1, 3, 40000, 128), (1, 300, 8200, 64), (2, 1024, 16384, 128)]
)
def test_sinks_of_parts(batch, rows, columns, depth):
    """They join where the parts of a row, or the halves of a pair of CTAs, meet."""
    s, v = tensors((batch,), rows, columns, depth, "bf16")
    check(s, v, sink=torch.randn(batch, rows, 1, device="cuda") + 10)
    check(s.float(), v, sink=torch.randn(rows, 1, device="cuda") + 10, scale=0.5, causal=columns - rows)


def test_sinks_that_are_no_numbers():
    s, v = tensors((1,), 70, 200, 64, "bf16")
    sink = torch.zeros(70, 1, device="cuda")
    sink[5], sink[6] = math.nan, math.inf
    out = softmax_matmul(s, v, sink=sink)
    assert out[0, 5:7].isnan().all() and not out[0, 7:].isnan().any()
    s[0, 9] = -math.inf
    assert (softmax_matmul(s, v, sink=sink)[0, 9] == 0).all()


@dtypes
def test_masks_and_bias(dtype):
    s, v = tensors((2, 3), 200, 333, 128, dtype)
    mask = torch.rand(2, 1, 1, 333, device="cuda") > 0.3
    check(s, v, mask=mask)
    full = torch.rand(2, 3, 200, 333, device="cuda") > 0.9
    full[0, 0, 5] = False
    check(s, v, mask=full)
    check(s, v, mask=full, empty_rows="zero")
    for bias in (torch.randn(3, 200, 333, device="cuda"), torch.randn(333, device="cuda", dtype=s.dtype)):
        check(s, v, bias=bias, scale=0.7)
        check(s, v, bias=bias, mask=mask, causal=100)
    few = tensors((2, 3), 9, 333, 64, dtype)
    check(*few, mask=mask, bias=torch.randn(3, 1, 333, device="cuda"))


@dtypes
def test_float32_scores(dtype):
    for rows, spread in ((200, 1.0), (5, 1.0), (200, 1e6)):
        s, v = tensors((2,), rows, 700, 128, dtype, scores="fp32", spread=spread)
        check(s, v)
        check(s, v, causal=True, scale=2.0)


@dtypes
def test_values_of_rows(dtype):
    """-inf in any pattern, NaN, +inf, the largest numbers."""
    s, v = tensors((1,), 300, 700, 128, dtype)
    s[0, 0, :] = -math.inf
    s[0, 1, 64:] = -math.inf
    s[0, 2, :640] = -math.inf
    s[0, 3, 5] = math.nan
    s[0, 4, 699] = math.inf
    s[0, 5, :] = -math.inf
    s[0, 5, 333] = 1.0
    s[0, 6, :] = torch.finfo(s.dtype).min
    s[0, 7, 10] = torch.finfo(s.dtype).max
    s[0, 8, :] = torch.finfo(s.dtype).max
    s[0, 64 + 9, 100:300] = -math.inf
    check(s, v)
    check(s, v, empty_rows="zero")


def test_views():
    """Strides, offsets, transposed batches, values shared by heads, broadcast scores."""
    s, v = tensors((2, 4), 150, 264, 128, "bf16")
    check(s.transpose(0, 1), v.transpose(0, 1))
    check(s[..., 8:], v[..., 8:, :])
    check(s[..., 3:], v[..., 3:, 1:])
    check(s[:, ::2, ::3], v[:, 1::2])
    check(s, v[:, :1])
    check(s, v[0, 0])
    check(s[:1], v)
    check(s.mT.contiguous().mT, v.mT.contiguous().mT)


def test_poisoned():
    """Not one byte besides the result is written, and all of it is."""
    s, v = tensors((3,), 70, 200, 72, "bf16")
    for depth in (72, 65):
        expected = softmax_matmul(s, v[..., :depth])
        held = [torch.full_like(expected, math.nan) for _ in range(4)]
        del held
        again = softmax_matmul(s, v[..., :depth])
        assert torch.equal(again, expected) and not again.isnan().any()


def test_mutants():
    """What the bounds must tell: a dropped tile, a missed rescale, uniform rows, zeros."""
    s, v = tensors((1,), 128, 1024, 128, "bf16", spread=2.0)
    right, _, unit = oracle(s, v)
    eps = torch.finfo(v.dtype).eps
    dropped = s.clone()
    dropped[..., 512:576] = -math.inf
    late = s.clone()
    late[..., :64] += 1.0  # as if the first tile's sum had not been rescaled
    for mutant in (dropped, late, torch.zeros_like(s)):
        wrong = softmax_matmul(mutant, v).double()
        assert ((wrong - right).abs() > MOST * eps * unit).any()
    assert (right.abs() > MOST * eps * unit).any()


def test_random():
    """Random forms."""
    generator = torch.Generator().manual_seed(5)

    def pick(*options):
        return options[int(torch.randint(len(options), (1,), generator=generator))]

    for seed in range(60):
        rows, columns = pick(1, 5, 64, 65, 129, 300, 700), pick(1, 8, 63, 64, 65, 200, 777, 2000)
        batch = pick((), (1,), (3,), (2, 3))
        s, v = tensors(batch, rows, columns, pick(8, 33, 64, 128, 130), pick(*HALVES), seed=seed)
        check(s, v, scale=pick(1.0, 0.3), causal=pick(False, True, columns - rows))


@dtypes
def test_gradient(dtype):
    s, v = tensors((2, 2), 70, 130, 64, dtype)
    s.requires_grad_(), v.requires_grad_()
    out, lse = softmax_matmul(s, v, scale=0.5, causal=True, return_lse=True)
    grad, grad_lse = torch.randn_like(out), torch.randn_like(lse)
    torch.autograd.backward([out, lse], [grad, grad_lse])
    s64, v64 = (t.detach().double().requires_grad_() for t in (s, v))
    right, right_lse, _ = oracle(s64, v64, scale=0.5, causal=True)
    torch.autograd.backward([right, right_lse], [grad.double(), grad_lse.double()])
    for mine, theirs in ((s.grad, s64.grad), (v.grad, v64.grad)):
        assert (mine.double() - theirs).norm() <= 8 * EPSILON[dtype] * theirs.norm()


def test_compiled():
    """One graph under torch.compile, and the operator's own checks."""
    s, v = tensors((2,), 70, 136, 64, "bf16")
    compiled = torch.compile(lambda s, v: softmax_matmul(s, v, scale=0.5) * 2, fullgraph=True)
    assert torch.equal(compiled(s, v), softmax_matmul(s, v, scale=0.5) * 2)
    arguments = (s.requires_grad_(), v.requires_grad_(), None, None, 0.5, None, False)
    torch.library.opcheck(torch.ops.cute_softmax.softmax_matmul.default, arguments)


def test_graph_and_streams():
    s, v = tensors((2,), 16, 30000, 128, "bf16")
    expected = softmax_matmul(s, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = softmax_matmul(s, v)
    for _ in range(3):
        out.zero_()
        graph.replay()
        assert torch.equal(out, expected)
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for stream in streams * 4:
        with torch.cuda.stream(stream):
            results.append(softmax_matmul(s, v))
    torch.cuda.synchronize()
    assert all(torch.equal(r, expected) for r in results)


def test_empty():
    for rows, columns, depth in ((0, 5, 4), (5, 0, 4), (5, 4, 0)):
        s, v = tensors((2,), rows, columns, depth, "bf16")
        out = softmax_matmul(s, v, empty_rows="zero")
        assert out.shape == (2, rows, depth) and not out.isnan().any()
