"""Short rows of which an index chooses an element: what they are planned as, and what their kernels compute, run on the
CPU by their PTX."""

import checking
import classes
import emulated
import pytest
import short_heads
import simulated
import torch
from compiled import check_compiled, compile_and_read
from families import check_mutants, mutants

import cute_softmax as c
from cute_softmax.plan import MATHS, Prologue, table_of
from cute_softmax.plan.choose import plan_call
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.problem import Operand
from cute_softmax.plan.short import short_class

bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
LIMIT = table_of().chosen[-1].capacity
FEW, MANY = 64 * H200.multiprocessors, 10_000_000
LOSS, VISIT = Prologue(target="loss"), Prologue(alpha="groups", target="loss")


def planned(rows, columns, math="softmax", prologue=VISIT, dtype="bf16"):
    """The plan of contiguous rows, whose alpha is one for all."""
    x, number = Operand(dtype, (columns, 1)), Operand("fp32", (1, 0))
    groups = {"alpha": Operand("fp32", (0, 0)), "index": Operand("int64", (1, 0))}
    full = [x] * bool(MATHS[math, True].outputs)
    names = ["index"] if math.startswith("selective") else ["alpha"] * bool(prologue.alpha) + ["index"]
    results = {"selective": 3, "selective_entropy": 4}.get(math, 1)
    operands = [x, *(groups[name] for name in names), *full, *[number] * results]
    return plan_call(math, (rows, columns), (1,), operands, H200, prologue=prologue)


@pytest.fixture
def launches(monkeypatch, tmp_path):
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    with classes.however_few():
        yield emulated.install(monkeypatch, tmp_path)


def test_what_is_planned():
    for math, prologue in (("softmax", None), ("logsumexp", LOSS), ("selective", Prologue())):
        given = {"math": math} | ({} if prologue is None else {"prologue": prologue})
        assert planned(FEW, 10, **given).movement == planned(MANY, LIMIT + 1, **given).movement == "row"
        # Threads that share a row are filled by one of 64 elements, and keep its numbers.
        for rows, movement in (
            (24 * 64 * H200.multiprocessors, "row"),
            (24 * 64 * H200.multiprocessors + 1, "short"),
        ):
            assert planned(rows, 64, **given).movement == movement
        assert (
            planned(FEW + 1, 10, **given).movement
            == planned(MANY, 64, dtype="fp32", **given).movement
            == "short"
        )
        assert planned(MANY, 65, dtype="fp32", **given).movement == "row"
        for columns in (1, 10, 64, 65, LIMIT):
            made = planned(MANY, columns, **given)
            assert made.movement == "short" and made.columns <= made.kernel.capacity
            assert made.kernel.shared_memory * made.kernel.min_blocks <= H200.architecture.shared_memory
            assert "index" in made.kernel.facts.group_inputs
    plain = [Operand("bf16", (65, 1))] * 2
    assert plan_call("softmax", (MANY, 65), (1,), plain, H200).movement == "row"


@pytest.mark.long
@pytest.mark.parametrize("turn", range(3))
def test_losses(turn, launches):
    """All options, alone and in pairs, with rows that are ignored: right, and nothing else written."""
    for case in short_heads.every_option()[turn::3]:
        results = case.launched()
        case.check(results)
        check_mutants(case.check, case.mutants(results), results, case.name)
        assert launches[-1].plan.movement == case.movement


@pytest.mark.parametrize("columns", short_heads.LENGTHS)
def test_each_length(columns, launches):
    for visit in (True, False):
        case = short_heads.LossCase(columns, bf16 if columns % 3 else fp32, visit, place=columns % 2)
        case.check(case.launched())
    assert {work.plan.movement for work in launches} == {"short"}


@pytest.mark.long
@pytest.mark.parametrize(("columns", "dtype"), [(2, bf16), (12, fp32), (49, fp16), (100, bf16)])
def test_chosen_elements(columns, dtype, launches):
    for case in short_heads.cases(columns, dtype, (columns % 3, 0)):
        case.check(case.launched())
        name = f"{case.math} {case.prologue.name}"
        check_mutants(case.check, mutants(case), case.expected(torch.float64), name)
    expected = {short_heads.movement_of(columns, dtype, held) for held in (False, True)}
    assert {work.plan.movement for work in launches} == expected


def smoothed(x, target):
    loss, lse = c.cross_entropy(x, target, label_smoothing=0.1, return_lse=True, softcap=4.0, dtype=fp32)
    return loss + lse.sin().sum()


def smoothed_right(x, target):
    x = 4.0 * torch.tanh(x / 4.0)
    loss = torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1)
    return loss + torch.logsumexp(x, -1).sin().sum()


def logs(x, target, scale=1.0):
    every = torch.log_softmax(x * scale, -1)
    return every, every.gather(-1, target[:, None])[:, 0]


def entropies(x, target):
    every, _ = logs(x, target)
    return -(every.exp() * every).sum(-1)


# Of heads: ours and torch's operations.
HEADS = {
    "entropy": (lambda x, _: c.entropy(x), entropies),
    "selected": (lambda x, t: c.selective_log_softmax(x, t, scale=0.7), lambda x, t: logs(x, t, 0.7)[1]),
    "both": (
        lambda x, t: sum(c.selective_log_softmax(x, t, return_entropy=True)),
        lambda x, t: logs(x, t)[1] + entropies(x, t),
    ),
    "smoothed": (smoothed, smoothed_right),
    "squares": (
        lambda x, t: c.cross_entropy(x, t, lse_square_scale=0.1, return_lse=True)[0],
        lambda x, t: -logs(x, t)[1].mean() + 0.1 * torch.logsumexp(x, -1).square().mean(),
    ),
}


@pytest.mark.parametrize(
    ("head", "columns"), [(h, n) for i, h in enumerate(HEADS) for n in ((2, 12), (7, 50))[i % 2]]
)
def test_heads(head, columns, launches):
    """Results and gradients, by the kernels of both."""
    x, target = checking.example((70, columns), fp32, columns), torch.arange(70) * 5 % columns
    found = []
    for function, leaf in zip(HEADS[head], (x, x.double()), strict=True):
        y = function(leaf.requires_grad_(), target)
        upstream = torch.linspace(-1.0, 2.0, y.numel()).view(y.shape).to(y)
        found.append((y.detach(), *torch.autograd.grad(y, leaf, upstream)))
    for got, right in zip(*found, strict=True):
        assert torch.allclose(got.double(), right, rtol=2e-6, atol=4e-6)
        assert not torch.allclose(1.001 * got.double(), right, rtol=2e-6, atol=4e-6)
    movements = {work.plan.movement for work in launches if work.math != "mean"}
    assert movements == {"short"}, movements


@pytest.mark.parametrize("columns", [4, 10, 33])
def test_not_a_number(columns, launches):
    """Of rows with NaN, and of those alone; of a row whose target is -inf the loss is infinite."""
    x = checking.example((70, columns), bf16)
    x[3, 0], x[5], x[60, 1] = float("nan"), -float("inf"), -float("inf")
    target = torch.ones(70, dtype=torch.int64)
    exact = torch.nn.functional.cross_entropy(x.double(), target, reduction="none")
    found = c.cross_entropy(x, target, reduction="none", dtype=fp32)
    assert found[60] == float("inf") and torch.allclose(found.double(), exact, equal_nan=True, atol=1e-5)
    assert torch.allclose(c.selective_log_softmax(x, target).double(), -exact, equal_nan=True, rtol=1e-2)
    assert launches[0].plan.movement == launches[-1].plan.movement == "short"


@pytest.mark.parametrize("columns", [2, 10, 33, 100])
def test_an_index_out_of_range_ends_the_kernel(columns, launches, monkeypatch):
    """Of the first row, of one in a warp's midst and of the last one; one that is ignored does not."""
    real = simulated.simulated

    def clamped(name, tensors, *rest):
        return real(name, [t.clamp(0, columns - 1) if t.dtype is torch.int64 else t for t in tensors], *rest)

    monkeypatch.setattr(simulated, "simulated", clamped)
    (chosen, *_) = short_heads.cases(columns, bf16)
    visit, losses, ignoring = (
        short_heads.LossCase(columns, bf16, *how) for how in ((True,), (False,), (True, {"ignore_index": 0}))
    )
    ignoring.check(ignoring.launched())
    for case, index in ((visit, visit.target), (losses, losses.target), (chosen, chosen.index)):
        case.check(case.launched())
        index = index.view(-1)
        for row, wrong in ((index.numel() - 1, columns), (0, -1), (33, 1 << 40)):
            right, index[row] = index[row].item(), wrong
            with pytest.raises(RuntimeError, match="trap in thread"):
                case.launched()
            index[row] = right
    assert {work.plan.movement for work in launches} == {"short"}


@pytest.mark.parametrize(
    ("columns", "dtype"), [(2, "bf16"), (10, "bf16"), (64, "fp32"), (100, "bf16"), (128, "fp16")]
)
def test_compiled(columns, dtype, tmp_path, monkeypatch):
    """In registers: what lies on the stack are the numbers of a message."""
    for math, prologue in (
        ("softmax", VISIT),
        ("logsumexp", LOSS),
        ("selective", Prologue()),
    ):
        made = planned(MANY, columns, math, prologue, dtype)
        assert (
            made.kernel
            == short_class(math, "sm_90a", made.problem.dtypes, columns, prologue=prologue, table=table_of())
            or columns == 2
        )
        check_compiled(made.kernel, compile_and_read(made.kernel, tmp_path, monkeypatch), 112, padding=128)
