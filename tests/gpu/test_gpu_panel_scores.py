"""Scores in columns and in rows that several CTAs share: against float64, in every movement; nothing else written."""

import math

import pytest
import scored_panels
import torch
from building import build
from checking import DTYPES, Guarded, equal_bits, random
from families import Case, mutants

from cute_softmax import entropy, log_softmax, logsumexp, plan_softmax, softmax, softmax_
from cute_softmax.runtime import launch

INF = math.inf
LONG = (1 << 20) + 8
FUNCTIONS = {"softmax": softmax, "log_softmax": log_softmax}
dtypes = pytest.mark.parametrize("dtype", DTYPES)
names = pytest.mark.parametrize("name", FUNCTIONS)


def device():
    return launch.device_facts(torch.cuda.current_device())


def launched(form: scored_panels.Form) -> Case | None:
    """The checked case of a form; None where no plan has its movement."""
    case = scored_panels.case_of(form)
    tensors, outputs = case.placed()
    made = scored_panels.planned(form, case, tensors, device())
    if made is None:
        return None
    call = launch.call_for(scored_panels.work_of(form, case, tensors), made)
    call.on_device(case.x.get_device(), *(t.data_ptr() for t in tensors), numbers=case.numbers)
    for output in outputs:
        output.check()
    case.check(case.shown([o.tensor for o in outputs]))
    return case


def passing(case: Case) -> list[str]:
    """The mutants of a case that its check does not find, of those that are wrong."""
    found = []
    right = case.expected(torch.float64)
    for what, wrong in mutants(case):
        right = [r.to(w.dtype) for r, w in zip(right, wrong, strict=True)]
        if all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(wrong, right, strict=True)):
            continue
        try:
            case.check(wrong)
            found.append(what)
        except AssertionError:
            pass
    return found


@pytest.fixture(scope="module")
def kernels(built):
    """The kernels of all forms, built together."""
    wanted = []
    for form in scored_panels.forms():
        case = scored_panels.case_of(form)
        if made := scored_panels.planned(form, case, case.placed()[0], device()):
            wanted.append(made.kernel)
    build(wanted)


@pytest.mark.parametrize("name", scored_panels.MATHS)
def test_every_movement(name, kernels):
    found = {form: case for form in scored_panels.forms((name,)) if (case := launched(form)) is not None}
    assert len(found) >= 5
    judged = [
        case for form, case in found.items() if form.beside != "rows"
    ]  # one for a row may change nothing
    for case in judged[:4]:
        assert not passing(case)


def of(name: str, x, dim: int, y, **arguments) -> None:
    """Check a result over any dimension of a matrix."""
    zero = arguments.pop("empty_rows", "nan") == "zero"
    turned = {
        k: v.movedim(dim, -1) if isinstance(v, torch.Tensor) and v.dim() == x.dim() else v
        for k, v in arguments.items()
    }
    Case(name, x.movedim(dim, -1), zero=zero, **turned).check([y.movedim(dim, -1)])


@names
@dtypes
@pytest.mark.parametrize("columns", [LONG, LONG + 1])
def test_long_rows(name, dtype, columns):
    """With a mask for all rows, one element a row, a bias of another alignment, and in place."""
    x = random((4, columns), DTYPES[dtype], seed=1, scale=4.0)
    one = random((1, columns), torch.float32, seed=2) < 0.5
    each = torch.tensor([[True], [False], [True], [True]], device=x.device)
    bias = random((columns + 1,), DTYPES[dtype], seed=3)[1:]
    assert plan_softmax(x, mask=one).movement == "split"
    for arguments in (
        {"mask": one},
        {"mask": one[:, torch.randperm(columns, device=x.device)], "scale": 0.125},
        {"mask": each, "empty_rows": "zero"},
        {"bias": bias, "scale": -2.0},
        {"bias": bias, "mask": one, "scale": random((4, 1), torch.float32, 4), "empty_rows": "zero"},
    ):
        y = FUNCTIONS[name](x, **arguments)
        of(name, x, 1, y, **arguments)
        assert equal_bits(FUNCTIONS[name](x, **arguments), y), "the same bits every time"
        out = Guarded(x.shape, x.dtype)
        FUNCTIONS[name](x, out=out.tensor, **arguments)
        out.check()
        assert equal_bits(out.tensor, y)
    if name == "softmax":
        y = softmax(x, mask=one, scale=3.0)
        again = x.clone()
        assert equal_bits(softmax_(again, mask=one, scale=3.0), y)


@names
@dtypes
@pytest.mark.parametrize("shape", [(300, 4096), (333, 4099), (5000, 72), (40000, 130), (3, 50)])
def test_columns(name, dtype, shape):
    """Masks and biases of every form, and such as lie across the elements."""
    x = random(shape, DTYPES[dtype], seed=5, scale=3.0)
    whole, bias = random(shape, torch.float32, 6) < 0.6, random(shape, DTYPES[dtype], 7)
    whole[:, 1] = False
    for arguments in (
        {"mask": whole},
        {"mask": whole[:, :1], "scale": 0.5},
        {"mask": whole[:1], "empty_rows": "zero"},
        {"mask": whole.mT.contiguous().mT, "empty_rows": "zero"},
        {"bias": bias, "mask": whole[:, 2:3], "scale": -1.5},
        {"bias": bias[:, 3:4].float(), "scale": random((1, shape[1]), torch.float32, 8)},
    ):
        y = FUNCTIONS[name](x, 0, **arguments)
        of(name, x, 0, y, **arguments)
        view = random((shape[0], shape[1] + 3), DTYPES[dtype], seed=9)[:, 1:-2]
        of(name, view, 0, FUNCTIONS[name](view, 0, **arguments), **arguments)


@names
@dtypes
@pytest.mark.parametrize(
    "shape",
    [
        (5, 40000), (20, 1000), (128, 65536), (3000, 5000), (4096, 2056), (4100, 1024), (70000, 264), (300, 4099),
    ],
)  # fmt: skip
def test_one_element_for_all_columns(name, dtype, shape):
    """Of threads that have columns for themselves, of clusters, of chunks, and of columns that begin anywhere; in
    panels whose last threads have no columns."""
    x = random(shape, DTYPES[dtype], seed=31, scale=3.0)
    keep = random((shape[0], 1), torch.float32, 32) < 0.7
    bias = random((shape[0] + 1, 1), DTYPES[dtype], 33)[1:]
    keep[0] = True
    for arguments in ({"mask": keep}, {"bias": bias}, {"mask": keep, "bias": bias.float(), "scale": -0.5}):
        y = FUNCTIONS[name](x, 0, **arguments)
        of(name, x, 0, y, **arguments)
        assert equal_bits(FUNCTIONS[name](x, 0, **arguments), y), "the same bits every time"


@dtypes
@pytest.mark.parametrize("heads", [24, 64, 100, 768])
def test_one_element_for_the_columns_of_a_batch(dtype, heads):
    """As a mask of padding over a sequence has: shared by as many threads as stand side by side in a batch."""
    x = random((60, 333, heads), DTYPES[dtype], seed=34, scale=3.0)
    keep = random((60, 333, 1), torch.float32, 35) < 0.5
    bias = random((60, 333, 1), DTYPES[dtype], 36)
    assert plan_softmax(x, 1, mask=keep).movement == "column"
    for arguments in ({"mask": keep}, {"bias": bias, "scale": 2.0}):
        y = softmax(x, 1, empty_rows="zero", **arguments)
        turned = {k: v.movedim(1, -1) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
        Case("softmax", x.movedim(1, -1), zero=True, **turned).check([y.movedim(1, -1)])


@names
@dtypes
@pytest.mark.parametrize("rows", [23, 64])
@pytest.mark.parametrize("columns", [1 << 20, 900_008])
def test_what_all_rows_share(name, dtype, rows, columns):
    """It stays in shared memory while CTAs take one row after the other."""
    x = random((rows, columns * 2 // DTYPES[dtype].itemsize), DTYPES[dtype], seed=37, scale=4.0)
    keep = random(x.shape[1:], torch.float32, 38) < 0.5
    bias = random(x.shape[1:], DTYPES[dtype], 39)
    assert "resident" in plan_softmax(x, bias=bias).kernel.staging
    for arguments in (
        {"mask": keep},
        {"bias": bias},
        {"bias": bias, "scale": random((rows, 1), torch.float32, 40), "empty_rows": "zero"},
        {"mask": keep, "scale": -0.5},
    ):
        out = Guarded(x.shape, x.dtype)
        FUNCTIONS[name](x, out=out.tensor, **arguments)
        out.check()
        of(name, x, 1, out.tensor, **arguments)
        assert equal_bits(FUNCTIONS[name](x, **arguments), out.tensor), "the same bits every time"
    if name == "softmax":
        y, again = softmax(x, bias=bias), x.clone()
        assert equal_bits(softmax_(again, bias=bias), y)
    deep = x[:22].view(2, 11, -1)
    offset = deep.shape[2] - 6
    y = FUNCTIONS[name](deep, bias=bias, causal=offset)
    Case(name, deep, bias=bias, offset=offset).check([y])


@names
@pytest.mark.parametrize("dim", [0, 1])
@dtypes
def test_special_values(name, dim, dtype):
    """What is masked is nobody's, NaN even; NaN and +inf that count make NaN; a scale of 0 and a large one."""
    shape = (700, 96) if dim == 0 else (3, LONG)
    x = random(shape, DTYPES[dtype], seed=11).movedim(dim, -1)
    mask = (random(shape, torch.float32, seed=12) < 0.7).movedim(dim, -1)
    bias = random(shape, DTYPES[dtype], seed=13).movedim(dim, -1).clone()
    x[0, 5], x[0, 6], mask[0, 5:7] = math.nan, INF, False
    x[1, 9], mask[1, 9] = math.nan, True
    x[2, 11:40] = -INF
    bias[2, 50:60] = -INF
    x, mask, bias = (t.movedim(-1, dim) for t in (x, mask, bias))
    for arguments in (
        {"mask": mask},
        {"mask": mask, "scale": -1.0},
        {"mask": mask, "bias": bias},
        {"mask": mask, "bias": bias, "scale": 64.0},
        {"mask": mask & False, "empty_rows": "zero"},
        {"mask": mask & False},
    ):
        of(name, x, dim, FUNCTIONS[name](x, dim, **arguments), **arguments)
    finite = random(shape, DTYPES[dtype], seed=14)
    for scale in (0.0, -0.0, 1e-30, -300.0):
        of(name, finite, dim, FUNCTIONS[name](finite, dim, scale=scale), scale=scale)


@names
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients(name, dim, dtype):
    """By the kernels; zero where something is masked, in rows of which nothing is left, too."""
    shape = (700, 96) if dim == 0 else (3, LONG)
    x = random(shape, DTYPES[dtype], seed=15)
    mask = random(shape, torch.float32, seed=16) < 0.7
    mask.select(1 - dim, 2).fill_(False)
    for empty in ("nan", "zero"):
        leaf = x.clone().requires_grad_()
        y = FUNCTIONS[name](leaf, dim, mask=mask, scale=0.5, empty_rows=empty)
        dy = random(shape, DTYPES[dtype], seed=17)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert (dx.masked_select(~mask) == 0).all() and dx.isfinite().all()
        rows = [i for i in range(shape[1 - dim]) if i != 2]
        kept = torch.tensor(rows, device=x.device)
        part = [t.detach().index_select(1 - dim, kept).movedim(dim, -1) for t in (dy, y, dx, mask)]
        masked = {"mask": part[3]} if name == "log_softmax" else {}
        Case(f"{name}_backward", part[0], y=part[1], scale=0.5, **masked).check([part[2]])


def test_causal_scores_that_lie_by_columns():
    for shape, order in (((3, 200, 200), (0, 2, 1)), ((4, 96, 120), (1, 2, 0))):
        memory = random([shape[d] for d in order], torch.bfloat16, seed=18)
        x = memory.permute([order.index(d) for d in range(3)])
        assert plan_softmax(x, causal=True).movement == "column"
        for offset in (0, 7, -5):
            Case("softmax", x, offset=offset, zero=True).check([softmax(x, causal=offset, empty_rows="zero")])
    x = random((2, 3, LONG), torch.bfloat16, seed=19)
    Case("softmax", x, offset=LONG - 9).check([softmax(x, causal=LONG - 9)])


def test_numbers_of_rows():
    """logsumexp's gradient and the entropy of columns take one launch each way."""
    x = random((500, 264), torch.float32, seed=20).requires_grad_()
    (dx,) = torch.autograd.grad(logsumexp(x, 0).sum(), x)
    Case("softmax", x.detach().mT).check([dx.mT])
    assert torch.allclose(entropy(x, 0), torch.distributions.Categorical(logits=x.mT).entropy(), atol=1e-5)


def test_many_broadcasts():
    """More modes than kernels have, for the mask alone."""
    x = random((2, 3, 2, 3, 2, 3, 2, 64), torch.bfloat16, seed=21)
    mask = random((2, 1, 2, 1, 2, 1, 2, 64), torch.float32, seed=22) < 0.5
    Case("softmax", x, mask=mask).check([softmax(x, mask=mask)])
