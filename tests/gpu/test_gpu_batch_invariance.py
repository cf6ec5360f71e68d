"""Looks for two rows that are equal and whose results are not, within `batch_invariant`.

Every test compares bits. That they can differ is the matter of the last ones: without the mode they do.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from building import build
from checking import DEVICE, DTYPES, Guarded, equal_bits, random
from remembered import forget_calls
from test_batch_invariance_plan import FEW, ROWS, planned

import cute_softmax as c
from cute_softmax.plan.order import order_of
from cute_softmax.runtime import launch

LENGTHS = (7, 33, 1000, 1001, 9000, 32000, 50257)
LONG = (151936, (1 << 20) + 8)
VIEWS = (33, 1000, 1001)
NAMES = ("bf16", "fp32")


def index_of(x: torch.Tensor) -> torch.Tensor:
    """An element of each row, which its values decide: of a row that is copied elsewhere the same."""
    return x.argmax(-1)


def with_gradient(function):
    def both(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y = function(x)
        (d,) = torch.autograd.grad(y, x, torch.ones_like(y) if y.dim() < x.dim() else x.detach())
        return y.detach(), d

    return both


def ulp(x: torch.Tensor) -> torch.Tensor:
    """The distance to the next float32 number."""
    return (torch.nextafter(x.abs(), torch.full_like(x, torch.inf)) - x.abs()).double()


def short_of(x: torch.Tensor) -> torch.Tensor:
    """Rows that a router may have."""
    return x if x.shape[1] <= 1024 else x[:, :1000].contiguous()


# Of (rows, N): results with one entry for each row.
FUNCTIONS = {
    "softmax": with_gradient(c.softmax),
    "softmax to float32": lambda x: (c.softmax(x, dtype=torch.float32),),
    "softmax in two passes": lambda x: (c.softmax(x, online=False),),
    "softmax of scores": lambda x: (c.softmax(x, scale=0.3, mask=x > -1, empty_rows="zero"),),
    "softmax with a sink": lambda x: (c.softmax(x, sink=x.amax(-1, keepdim=True) / 2),),
    "log_softmax": with_gradient(c.log_softmax),
    "logsumexp": with_gradient(lambda x: c.logsumexp(x, -1)),
    "sum": lambda x: (c.sum(x, -1),),
    "amax": lambda x: (c.amax(x, -1),),
    "entropy": with_gradient(c.entropy),
    "selective_log_softmax": with_gradient(lambda x: c.selective_log_softmax(x, index_of(x))),
    "cross_entropy": with_gradient(lambda x: c.cross_entropy(x, index_of(x), reduction="none")),
    "kl_div": with_gradient(lambda x: c.kl_div(x, x.detach().flip(-1), reduction="none")),
    "topk_softmax": with_gradient(lambda x: c.topk_softmax(short_of(x), 5)[0].sum(-1)),
    "topk_log_softmax": lambda x: tuple(c.topk_log_softmax(x, 5, index_of(x))),
}
functions = pytest.mark.parametrize("function", FUNCTIONS)
dtypes = pytest.mark.parametrize("dtype", NAMES)


@pytest.fixture(scope="module", autouse=True)
def built_ahead():
    """The classes of these tests, built side by side: what the calls ask for when no kernel runs."""
    if not torch.cuda.is_available():
        return
    found = {}

    def noted(kernel):
        found[kernel] = None
        return lambda *arguments: None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "function_of", noted)
        forget_calls()
        for name, dtype, columns in itertools.product(FUNCTIONS, NAMES, LENGTHS):
            x = rows_of(3, columns, dtype)
            for offset in (0, 1, 2, 4) if columns in VIEWS else (0,):
                run(name, Guarded.of(x, offset=offset).tensor)
    forget_calls()
    build(found)


def run(name: str, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with c.batch_invariant():
        return FUNCTIONS[name](x)


def same(found: tuple, expected: tuple, rows: object = slice(None)) -> bool:
    return all(equal_bits(a, b[rows]) for a, b in zip(found, expected, strict=True))


def rows_of(rows: int, columns: int, dtype: str, seed: int = 0) -> torch.Tensor:
    return random((rows, columns), DTYPES[dtype], seed=seed + columns, scale=2.0)


@functions
@dtypes
def test_equal_rows_at_every_position(function, dtype):
    """Rows of an odd number of elements begin anywhere in their tensor."""
    for columns in (7, 33, 1001, 50257):
        x = rows_of(1, columns, dtype).expand(40, columns).contiguous()
        found = run(function, x)
        assert all(equal_bits(t, t[:1].expand(t.shape).contiguous()) for t in found), columns


@functions
@dtypes
def test_any_number_of_rows(function, dtype):
    for columns in LENGTHS:
        x = rows_of(130, columns, dtype)
        whole = run(function, x)
        for k in (*range(1, 65), 115, 116, 130) if columns in (33, 32000) else (1, 2, 3, 7, 8, 57, 64):
            assert same(run(function, x[:k].clone()), whole, slice(k)), (columns, k)


@functions
def test_very_many_rows(function):
    x = rows_of(65536, 1001, "bf16")
    whole = run(function, x)
    for rows in (*map(slice, (1, 65, 100, 1000, 4096, 65535)), slice(65535, 65536), slice(4001, 8192)):
        assert same(run(function, x[rows].clone()), whole, rows)


@functions
@dtypes
def test_a_needle_in_any_company(function, dtype):
    """Whatever the other rows hold: nothing, NaN, infinities, numbers of any size."""
    for columns, rows in itertools.product((1000, 1001, 32000), (5, 77)):
        needle = rows_of(1, columns, dtype)
        expected = run(function, needle)
        companies = [rows_of(rows, columns, dtype, seed) * factor for seed, factor in ((1, 1), (2, 1e4))]
        companies += [torch.full_like(companies[0], x) for x in (float("nan"), float("-inf"), 0.0)]
        for place, company in enumerate(companies):
            company[place % rows] = needle
            found = run(function, company)
            assert same(tuple(t[place % rows : place % rows + 1] for t in found), expected), (columns, place)


@functions
@dtypes
def test_views(function, dtype):
    """Offsets, pitches, gaps, transposed storage."""
    for columns in VIEWS:
        x = rows_of(6, columns, dtype)
        expected = run(function, x)
        for offset, pitch in itertools.product(range(0, 9), (0, 1, 3, 8)):
            view = Guarded.of(x, strides=(columns + pitch, 1), offset=offset).tensor
            assert same(run(function, view), expected), (columns, offset, pitch)
        apart = torch.stack((x, -x), -1)[..., 0]
        for view in (x.mT.contiguous().mT, apart, x.flip(0)[torch.arange(5, -1, -1)]):
            assert same(run(function, view), expected), (columns, view.stride())


@dtypes
def test_dimensions(dtype):
    """Rows are rows, whichever dimension they lie along."""
    x = rows_of(30, 1001, dtype)
    with c.batch_invariant():
        for f in (c.softmax, c.log_softmax, lambda x, d: c.logsumexp(x, d, keepdim=True)):
            expected = f(x, -1)
            assert equal_bits(f(x.mT, 0).mT.contiguous(), expected)
            assert equal_bits(f(x.mT.contiguous(), 0).mT.contiguous(), expected)
            cube = x.view(5, 6, 7, 143)
            assert equal_bits(f(cube, (2, 3)).reshape(expected.shape), expected)
            turned = cube.permute(2, 0, 3, 1).contiguous()  # (7, 5, 143, 6)
            assert equal_bits(f(turned, (0, 2)).permute(1, 3, 0, 2).reshape(expected.shape), expected)


@dtypes
def test_where_the_result_is_written(dtype):
    for columns in (1000, 1001, 32000):
        x = rows_of(9, columns, dtype)
        with c.batch_invariant():
            expected = c.softmax(x)
            assert equal_bits(c.softmax_(x.clone()), expected)
            for offset, strides in itertools.product((0, 1, 5), ((columns, 1), (columns + 3, 1), (1, 9))):
                out = Guarded(x.shape, x.dtype, strides=strides, offset=offset)
                c.softmax(x, out=out.tensor)
                out.check()
                assert equal_bits(out.tensor.contiguous(), expected), (columns, offset, strides)


@pytest.mark.parametrize("columns", LONG)
def test_long_rows(columns):
    x = rows_of(70, columns, "bf16")
    for function in ("softmax", "log_softmax", "logsumexp", "sum"):
        whole = run(function, x)
        for k in (1, 2, 8, 64):
            assert same(run(function, x[:k].clone()), whole, slice(k)), (function, k)
        equal = x[:1].expand(9, columns).contiguous()
        assert all(equal_bits(t, t[:1].expand(t.shape).contiguous()) for t in run(function, equal))


@dtypes
def test_logarithms_agree(dtype):
    """log_softmax, the log-probabilities of chosen elements and logsumexp, of one sum."""
    for columns in LENGTHS:
        x = rows_of(33, columns, dtype)
        index = torch.randint(columns, (33,), device=DEVICE)
        with c.batch_invariant():
            logs, found = c.log_softmax(x), c.selective_log_softmax(x, index)
            several = c.selective_log_softmax(x, index[:, None].repeat(1, 3))
            losses = c.cross_entropy(x, index, reduction="none")
        chosen = logs.gather(-1, index[:, None])
        assert equal_bits(found[:, None], chosen) and equal_bits(several, chosen.expand(33, 3).contiguous())
        assert equal_bits((-losses).to(x.dtype), found)
        with c.batch_invariant():
            wide = c.log_softmax(x, dtype=torch.float32)
            _, lse = c.cross_entropy(x, index, reduction="none", return_lse=True)
        # An ulp of the logsumexp, beside the rounding of the difference.
        error = (x.double() - lse.double()[:, None] - wide.double()).abs()
        assert (error <= ulp(lse)[:, None] + ulp(wide) / 2).all()


def test_products():
    for columns, depth in ((1000, 64), (4097, 128)):
        s = random((3, 130, columns), torch.bfloat16, seed=1)
        v = random((3, columns, depth), torch.bfloat16, seed=2)

        def both(s, v):
            s = s.detach().requires_grad_()
            y, lse = c.softmax_matmul(s, v, return_lse=True)
            return y.detach(), lse.detach(), torch.autograd.grad(y, s, torch.ones_like(y))[0]

        with c.batch_invariant():
            whole = both(s, v)
            for batch, rows in itertools.product((1, 2), (1, 5, 64, 65, 130)):
                part = both(s[:batch, :rows].clone(), v[:batch].clone())
                for a, b in zip(part, whole, strict=True):
                    assert equal_bits(a, b[:batch, :rows].contiguous()), (columns, batch, rows)
            last = both(s[2:, 77:78].clone(), v[2:].clone())
            assert all(equal_bits(a, b[2:, 77:78].contiguous()) for a, b in zip(last, whole, strict=True))


def test_streams_and_graphs():
    x, small = rows_of(64, 32000, "bf16"), rows_of(64, 32000, "bf16")[:3].clone()
    with c.batch_invariant():
        expected = c.softmax(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            assert equal_bits(c.softmax(small), expected[:3])
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = c.softmax(small)
    graph.replay()
    assert equal_bits(y, expected[:3])


@pytest.mark.parametrize("columns", [1000, 1001, 9000, 32000])
@pytest.mark.parametrize("math", ["softmax", "log_softmax", "logsumexp", "sum"])
def test_every_plan_of_a_length(math, columns):
    """Outside the mode: all that the planner can choose, not a sample; equal orders give equal bits."""
    index = torch.cuda.current_device()
    device, dtype = launch.device_facts(index), torch.bfloat16
    row, bits, plans = rows_of(1, columns, "bf16"), {}, {}
    full = math in ("softmax", "log_softmax")
    places = [(rows, columns, 0) for rows in ROWS if rows <= 116]
    places += list(itertools.product(FEW, (columns + 1, columns + 8), range(8)))
    for rows, pitch, offset in places:
        plan = planned(math, (rows, columns), device=device, invariant=False, full=(pitch, 1), offset=offset)
        plans.setdefault((plan.kernel, plan.problem.offsets, pitch), (plan, rows, pitch, offset))
    build(plan.kernel for plan, *_ in plans.values())
    for plan, rows, pitch, offset in plans.values():
        x = Guarded.of(row.expand(rows, columns), strides=(pitch, 1), offset=offset).tensor
        if full:
            y = Guarded(x.shape, dtype, strides=(pitch, 1), offset=offset).tensor
        else:
            y = torch.empty(rows, 1, dtype=torch.float32, device=DEVICE).expand(x.shape)
        work = launch.Work(math, (x, y), (1,))
        launch.call_for(work, plan).on_device(index, x.data_ptr(), y.data_ptr())
        found = y if full else y[:, 0].unsqueeze(1)
        order = order_of(plan)
        for i in range(rows):
            head = order.head
            if head is None:
                start = plan.problem.offsets[plan.kernel.facts.reference]
                head = min(
                    -(start + plan.row_start(plan.kernel.facts.reference, i)) % plan.kernel.vector, columns
                )
            bits.setdefault(order._replace(head=head), set()).add(
                found[i].cpu().contiguous().view(torch.uint8).numpy().tobytes()
            )
    assert all(len(found) == 1 for found in bits.values())


PROGRAM = """
import sys
sys.path[:0] = {folders!r}
from test_gpu_batch_invariance import digests
print(*digests({rows}))
"""


def digests(rows: int) -> list[str]:
    """Of the first row's results, in a tensor of so many."""
    found = []
    for name, dtype in itertools.product(sorted(FUNCTIONS), NAMES):
        for t in run(name, rows_of(64, 1001, dtype)[:rows].clone()):
            found.append(
                hashlib.sha256(t[:1].cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            )
    return found


def test_two_processes():
    here = Path(__file__).resolve().parent
    environment = os.environ | {"CUTE_SOFTMAX_BATCH_INVARIANT": "1"}
    program = PROGRAM.format(folders=[str(here), str(here.parent)], rows=5)
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == digests(64)


def test_bits_differ_without_the_mode():
    """Few rows have configurations of their own, and odd rows begin on a vector only now and then."""
    few, odd = rows_of(64, 32000, "bf16"), rows_of(9, 1001, "fp32").repeat(2, 1)
    assert not equal_bits(
        c.softmax(few[:3].clone(), dtype=torch.float32), c.softmax(few, dtype=torch.float32)[:3]
    )
    y = c.softmax(odd)
    assert not equal_bits(y[:9], y[9:])
