"""Cross entropy on the CPU: torch's meaning in float64, what is launched for it, and wrong arguments."""

from __future__ import annotations

import itertools
import math
import operator

import checking
import pytest
import simulated
import torch
from torch.nn import functional

from cute_softmax import cross_entropy, logsumexp, nn
from cute_softmax.plan import mean, rescale
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.mean import plan_mean

SHAPES = ((5,), (4, 5), (3, 5, 2), (2, 5, 2, 3))
REDUCTIONS = ("mean", "sum", "none")


def example(shape, seed=0, dtype=torch.float64):
    return checking.random(shape, dtype, seed=seed, device="cpu")


def rows_of(shape):
    return (*shape[:1], *shape[2:]) if len(shape) > 1 else ()


def targets(shape, kind):
    classes = shape[min(1, len(shape) - 1)]
    if kind == "probabilities":
        return torch.softmax(example(shape, seed=3), min(1, len(shape) - 1))
    return torch.randint(classes, rows_of(shape), generator=torch.Generator().manual_seed(2)).to(kind)


def both(x, target, weight=None, **options):
    """Our loss and torch's, each with its gradient."""
    for function in (cross_entropy, functional.cross_entropy):
        leaf = x.detach().requires_grad_()
        if function is not cross_entropy and target.dtype is torch.int32:
            target = target.long()
        loss = function(leaf, target, weight, **options)
        upstream = torch.randn(loss.shape, dtype=loss.dtype, generator=torch.Generator().manual_seed(4))
        yield loss.detach(), torch.autograd.grad(loss, leaf, upstream)[0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("kind", [torch.int64, torch.int32, "probabilities"])
def test_as_torchs(shape, reduction, smoothing, kind):
    classes = example((5,), seed=1).abs()
    for weight in (None, classes):
        options = {"reduction": reduction, "label_smoothing": smoothing}
        if kind != "probabilities":
            options["ignore_index"] = 2
        for ours, torchs in zip(*both(example(shape), targets(shape, kind), weight, **options), strict=True):
            assert torch.allclose(ours, torchs, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_rows_that_do_not_count(reduction):
    """They have loss 0, whatever their logits are; a mean over none of them is torch's NaN."""
    x, target = example((4, 5)), torch.tensor([1, -100, 4, -100])
    for ours, torchs in zip(*both(x, target, reduction=reduction), strict=True):
        assert torch.equal(ours, torchs) or torch.allclose(ours, torchs, rtol=1e-12)
    x[1] = math.nan
    assert torch.allclose(
        cross_entropy(x, target, reduction=reduction, lse_square_scale=1.0)
        - cross_entropy(x, target, reduction=reduction),
        {
            "mean": logsumexp(x[::2], -1).square().mean(),
            "sum": logsumexp(x[::2], -1).square().sum(),
            "none": torch.where(target < 0, 0, logsumexp(x, -1).square()),
        }[reduction],
    )
    none = torch.full((4,), -100)
    found = cross_entropy(example((4, 5)), none, reduction=reduction)
    assert torch.equal(
        found.isnan(), functional.cross_entropy(example((4, 5)), none, reduction=reduction).isnan()
    )


@pytest.mark.parametrize("weight", [None, torch.rand(200, generator=torch.Generator().manual_seed(0))])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_narrow_targets(dtype, weight, launched):
    """They are indices, not a mask, and -100 is none of uint8."""
    x, target = example((3, 200), dtype=torch.float32), torch.tensor([156, 3, 0])
    for options in ({}, {"label_smoothing": 0.1}, {"reduction": "none", "lse_square_scale": 0.1}):
        right = cross_entropy(x.double(), target, weight, **options)
        assert torch.allclose(cross_entropy(x, target.to(dtype), weight, **options).double(), right)


def test_infinite_logits():
    """As torch has them: a class that cannot be is infinitely wrong as a target, and under smoothing everywhere."""
    x, target = example((3, 5)), torch.tensor([0, 1, 2])
    x[0, 0] = x[1, 3] = -math.inf
    x[2] = -math.inf
    for smoothing in (0.0, 0.1):
        options = {"reduction": "none", "label_smoothing": smoothing}
        ours = cross_entropy(x, target, **options)
        assert torch.allclose(ours, functional.cross_entropy(x, target, **options), equal_nan=True)


@pytest.mark.parametrize("how", ["scale", "z-loss", "lse", "dtype"])
def test_beyond_torchs(how):
    x, target = example((4, 5)).requires_grad_(), torch.tensor([1, 2, 0, 4])
    wide = torch.logsumexp(x, -1)
    plain = functional.cross_entropy(x, target, reduction="none")
    if how == "scale":
        ours = cross_entropy(x, target, reduction="none", scale=0.5)
        expected = functional.cross_entropy(x * 0.5, target, reduction="none")
    elif how == "z-loss":
        ours = cross_entropy(x, target, reduction="none", lse_square_scale=0.3)
        expected = plain + 0.3 * wide.square()
    elif how == "lse":
        loss, lse = cross_entropy(x, target, reduction="none", return_lse=True)
        ours, expected = loss + lse.sin(), plain + wide.sin()
    else:
        ours = cross_entropy(x.bfloat16(), target, dtype=torch.float32)
        assert ours.dtype is torch.float32 and cross_entropy(x.bfloat16(), target).dtype is torch.bfloat16
        assert torch.equal(ours, functional.cross_entropy(x.bfloat16().float(), target).float())
        return
    assert torch.allclose(ours, expected, rtol=1e-12)
    grads = (torch.autograd.grad(loss.square().sum(), x, retain_graph=True)[0] for loss in (ours, expected))
    assert torch.allclose(*grads, rtol=1e-10)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "none", "return_lse": True, "scale": 0.7},
        {"label_smoothing": 0.2, "lse_square_scale": 0.1},
        {"label_smoothing": 0.2, "softcap": 2.0, "scale": 0.7, "reduction": "none", "return_lse": True},
        {"weight": torch.tensor([0.1, 2.0, 1.0, 0.5, 1.5], dtype=torch.float64), "ignore_index": 2},
    ],
    ids=lambda o: ", ".join(o),
)
def test_gradients_and_theirs(options):
    x, target = example((3, 5)).requires_grad_(), torch.tensor([1, 2, 0])
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, target, **options), x)
    assert torch.autograd.gradgradcheck(lambda x: cross_entropy(x, target, **options), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lse_square_scale": 0.1},
        {"return_lse": True},
        {"label_smoothing": 0.1},
        {"softcap": 2.0},
        {"label_smoothing": 0.3, "softcap": 2.0, "scale": 1.5, "lse_square_scale": 0.1},
    ],
    ids=lambda o: ", ".join(o),
)
@pytest.mark.parametrize("refuse", [False, True], ids=["kernels", "composed"])
def test_one_read_forward_and_one_pass_backward(monkeypatch, options, refuse):
    """A kernel each; what autograd keeps beside the logits are numbers of rows. The same where there is none."""
    launches = simulated.install(monkeypatch)
    launches.refuse = refuse
    x, target = example((6, 40), dtype=torch.float32).requires_grad_(), torch.randint(40, (6,))
    for _ in range(2):
        launches.clear()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            found = cross_entropy(x, target, **options, one_visit=False)
        with_lse = options.get("return_lse")
        forward = ["entropy"] if refuse else ["selective"] if with_lse else ["logsumexp", "mean"]
        assert [launch.math for launch in launches] == forward
        assert all(t.numel() <= 3 * 6 for t in kept if t is not x and t.data_ptr() != x.data_ptr())
        loss = found[0] if with_lse else found
        loss.backward()
        assert refuse or [launch.math for launch in launches[len(forward) :]] == ["softmax"]
    scores = capped(x * options.get("scale", 1.0), options.get("softcap"))
    expected = torch.autograd.grad(
        functional.cross_entropy(scores, target, label_smoothing=options.get("label_smoothing", 0.0))
        + (0.1 * torch.logsumexp(scores, -1).square().mean() if "lse_square_scale" in options else 0),
        x,
    )[0]
    assert torch.allclose(x.grad / 2, expected, atol=1e-6)


IGNORING = torch.tensor([3, -100, 39, 0, 39, -100])
ONE_VISIT = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "scale": {"scale": -0.3},
    "z-loss": {"lse_square_scale": 0.1},
    "weight": {"weight": example((40,), seed=5, dtype=torch.float32).abs()},
    "grad_scale": {"grad_scale": 0.25},
    "a tensor of it": {"grad_scale": torch.tensor(128.0)},
    "another ignore_index": {"ignore_index": 39},
    "over the logits": {"inplace_backward": True},
    "smoothing": {"label_smoothing": 0.1},
    "nothing but smoothing": {"label_smoothing": 1.0, "reduction": "sum"},
    "softcap": {"softcap": 3.0, "scale": 2.0},
    "all": {
        "scale": 2.0, "lse_square_scale": 0.2, "grad_scale": 4.0, "ignore_index": 39, "reduction": "sum",
        "label_smoothing": 0.2, "softcap": 5.0,
    },
}  # fmt: skip


def capped(scores, softcap):
    return scores if softcap is None else softcap * torch.tanh(scores / softcap)


def in_float64(wide, target, options):
    """The loss of torch's function, with what it has not."""
    ignored, weight = options.get("ignore_index", -100), options.get("weight")
    scores = capped(wide * options.get("scale", 1.0), options.get("softcap"))
    reduction = options.get("reduction", "mean")
    loss = functional.cross_entropy(
        scores, target, None if weight is None else weight.double(), reduction=reduction, ignore_index=ignored,
        label_smoothing=options.get("label_smoothing", 0.0),
    )  # fmt: skip
    counts = target != ignored
    squares = torch.where(counts, torch.logsumexp(scores, 1).square(), 0)
    if reduction != "none":
        squares = squares.sum() / (counts.sum() if reduction == "mean" else 1)
    return loss + options.get("lse_square_scale", 0) * squares


@pytest.mark.parametrize("options", ONE_VISIT)
@pytest.mark.parametrize("upstream", [1.0, 0.25, 128.0])
def test_one_visit(monkeypatch, options, upstream):
    """One kernel, and the loss and the gradient of torch's function in float64, whatever comes in."""
    options, launches = ONE_VISIT[options], simulated.install(monkeypatch)
    x = example((6, 40), dtype=torch.float32)
    target = IGNORING.clamp(min=0) if options.get("ignore_index") else IGNORING
    leaf = x.clone().requires_grad_()
    if not options.get("inplace_backward"):
        cross_entropy(leaf, target, **options)  # calls that repeat take a shorter way
        launches.clear()
    loss = cross_entropy(leaf, target, **options)
    shared = options.get("reduction") != "sum" and "weight" not in options
    around = [*["share"] * shared, "softmax", "total"]
    assert [launch.math for launch in launches] == around and launches[shared].prologue.target == "loss"
    (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(upstream))
    assert [launch.math for launch in launches[len(around) :]] == ["rescale"]
    assert (grad.data_ptr() == leaf.data_ptr()) == bool(options.get("inplace_backward"))

    wide = x.double().requires_grad_()
    expected = in_float64(wide, target, options)
    assert torch.allclose(loss.double(), expected, rtol=1e-6)
    (right,) = torch.autograd.grad(expected, wide, torch.tensor(upstream, dtype=torch.float64))
    assert torch.allclose(grad.double(), right, rtol=1e-5, atol=1e-6 * upstream)
    for mutant in (grad * 2, grad.roll(1, -1), grad.flip(0)):
        assert not torch.allclose(mutant.double(), right, rtol=1e-5, atol=1e-6 * upstream)


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("layout", ["classes second, time first", "all but the last token"])
def test_one_visit_of_rows_that_do_not_merge(monkeypatch, layout, inplace):
    simulated.install(monkeypatch)
    x, target = example((3, 5, 40), dtype=torch.float32), torch.arange(15).view(3, 5) % 40
    if layout == "all but the last token":
        x = torch.cat([x, x[:, :1]], 1)
        logits = x[:, :-1].movedim(-1, 1)
    else:  # (time, batch, classes) -> (batch, classes, time)
        logits, target = x.permute(1, 2, 0), target.T
    behind, wide = x[:, -1].clone(), logits.double().requires_grad_()
    leaf = logits.detach().requires_grad_()
    for _ in range(1 if inplace else 2):  # calls that repeat take a shorter way
        loss = cross_entropy(leaf, target, inplace_backward=inplace)
        (grad,) = torch.autograd.grad(loss, leaf, torch.tensor(0.5))
        (right,) = torch.autograd.grad(
            functional.cross_entropy(wide, target), wide, torch.tensor(0.5).double()
        )
        assert torch.allclose(grad.double(), right, rtol=1e-5, atol=1e-7)
    if layout == "all but the last token":
        assert torch.equal(x[:, -1], behind)


@pytest.mark.parametrize(
    ("shape", "strides", "launches"),
    [
        ((6, 40), (40, 1), 1),
        ((6, 40), (48, 1), 1),
        ((2, 40), (48, 1), 2),  # few lines, and long ones
        ((2, 3), (48, 1), 1),
        ((5, 3, 7), (7, 35, 1), 1),
        ((5, 3, 7), (24, 8, 1), 1),
        ((5, 3, 7), (30, 8, 1), 5),
        ((2, 3, 4, 5), (1000, 1, 60, 6), 8),
        ((4, 1), (5, 9), 1),
        ((2, 2), (3, 2), 2),
        ((1, 1), (1, 1), 1),
    ],
)
def test_matrices_cover_a_tensor(monkeypatch, shape, strides, launches):
    monkeypatch.setattr(rescale, "FEW", 3)
    monkeypatch.setattr(rescale, "LONG", 4)
    (lines, columns), pitch, begins = rescale.matrices.__wrapped__(shape, strides)
    found = [b + i * pitch + j for b in begins for i in range(lines) for j in range(columns)]
    every = itertools.product(*map(range, shape))
    assert sorted(found) == sorted(sum(map(operator.mul, at, strides)) for at in every)
    assert len(begins) == launches


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("one_visit", [True, False])
def test_more_rows_than_a_cta_adds_up(monkeypatch, one_visit, reduction):
    """CTAs add up slices of them, and a second launch the sums of the slices."""
    launches = simulated.install(monkeypatch)
    monkeypatch.setattr(mean, "ALONE", 5)
    monkeypatch.setattr(mean, "SLICE", 4)
    x = example((6, 40), dtype=torch.float32)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    around = ["total"] * 2 if one_visit or reduction == "sum" else ["mean"] * 2
    before = ["share"] * 2 if one_visit and reduction == "mean" else []
    for _ in range(2):  # calls that repeat take a shorter way
        launches.clear()
        loss = cross_entropy(leaf, IGNORING, reduction=reduction, one_visit=one_visit)
        kernel = "softmax" if one_visit else "logsumexp"
        assert [launch.math for launch in launches] == [*before, kernel, *around]
        expected = in_float64(wide, IGNORING, {"reduction": reduction})
        assert torch.allclose(loss.double(), expected, rtol=1e-6)
        (grad,) = torch.autograd.grad(loss, leaf)
        (right,) = torch.autograd.grad(expected, wide)
        assert torch.allclose(grad.double(), right, rtol=1e-5, atol=1e-6)
    half = cross_entropy(x.bfloat16(), IGNORING, reduction=reduction)
    assert half.dtype is torch.bfloat16 and half.shape == ()


@pytest.mark.parametrize("rows", [0, 1, 16384, 16385, 65536, 10**6 + 1, 2**30 + 1])
def test_slices_cover_all_rows(rows):
    """Each row is in one of them, and none is empty."""
    *slices, whole = plan_mean(rows, -100, "fp32", H200)
    assert len(slices) == (rows > 16384) and whole.ctas == 1
    for plan in slices:
        assert (plan.ctas - 1) * plan.each < rows <= plan.ctas * plan.each and plan.each >= 4096
        assert whole.elements == plan.ctas <= 256


@pytest.mark.parametrize("options", [o for o in ONE_VISIT if o != "over the logits"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(6, 40), (2, 40, 3)], ids=str)
def test_recomputed(monkeypatch, options, reduction, shape):
    """A kernel each way and one for the mean, whatever comes in; as often as it is asked for, and its own gradient."""
    options, launches = (
        ONE_VISIT[options] | {"reduction": reduction, "one_visit": False},
        simulated.install(monkeypatch),
    )
    x = example(shape, dtype=torch.float32).movedim(1, -1).contiguous().movedim(-1, 1)
    target = (IGNORING.clamp(min=0) if options.get("ignore_index") else IGNORING).view(shape[0], *shape[2:])
    wide = x.double().requires_grad_()
    expected = in_float64(wide, target, options)
    upstream = torch.linspace(-1.0, 2.0, expected.numel()).view(expected.shape)
    (right,) = torch.autograd.grad(expected, wide, upstream.double(), create_graph=True)
    direction = example(shape, seed=6)
    (curved,) = torch.autograd.grad((right * direction).sum(), wide)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    for _ in range(2):  # calls that repeat take a shorter way
        launches.clear()
        loss = cross_entropy(leaf, target, **options)
        around = {"mean": "total" if "weight" in options else "mean", "sum": "total"}.get(reduction)
        assert [launch.math for launch in launches] == ["logsumexp", *[around] * bool(around)]
        assert torch.allclose(loss.double(), expected, rtol=1e-6)
        with torch.no_grad():
            assert torch.equal(cross_entropy(leaf, target, **options), loss)
        launches.clear()
        for _ in range(2):
            (grad,) = torch.autograd.grad(loss, leaf, upstream, retain_graph=True)
            assert torch.allclose(grad.double(), right, rtol=1e-5, atol=1e-6)
        assert [launch.math for launch in launches] == ["softmax", "softmax"]
        (again,) = torch.autograd.grad(loss, leaf, upstream, create_graph=True)
        (found,) = torch.autograd.grad((again * direction).sum(), leaf)
        assert torch.allclose(found.double(), curved, rtol=1e-4, atol=1e-5)
    for mutant in (grad * 2, grad.roll(1, 1), grad.flip(0)):
        assert not torch.allclose(mutant.double(), right.detach(), rtol=1e-5, atol=1e-6)
    several = torch.stack([upstream, 2 * upstream])
    (grads,) = torch.autograd.grad(loss, leaf, several, is_grads_batched=True)
    assert torch.allclose(grads, torch.stack([again, 2 * again]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_smoothing_with_a_weight(monkeypatch, reduction):
    """A loss at the target and one against the weights, of two kernels each way; no matrix but gradients."""
    launches = simulated.install(monkeypatch)
    x, weight = example((6, 40), dtype=torch.float32), example((40,), seed=5, dtype=torch.float32).abs()
    options = {"label_smoothing": 0.2, "reduction": reduction}
    for scale in (1.0, 0.5):
        leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
        launches.clear()
        loss = cross_entropy(leaf, IGNORING, weight, scale=scale, **options)
        assert {launch.math for launch in launches} == {"selective", "logsumexp"}
        upstream = torch.linspace(-1.0, 2.0, loss.numel()).view(loss.shape)
        (grad,) = torch.autograd.grad(loss, leaf, upstream)
        assert {launch.math for launch in launches} == {"selective", "logsumexp", "softmax"}
        right = functional.cross_entropy(wide * scale, IGNORING, weight.double(), **options)
        (exact,) = torch.autograd.grad(right, wide, upstream.double())
        assert torch.allclose(loss.double(), right, rtol=1e-5) and torch.allclose(
            grad.double(), exact, atol=1e-6
        )
        assert not torch.allclose(grad.roll(1, 1).double(), exact, atol=1e-6)


def test_a_loss_in_float64_of_kernels(monkeypatch):
    simulated.install(monkeypatch)
    x = example((6, 40), dtype=torch.float32).requires_grad_()
    for one_visit in (True, False):
        for reduction in ("mean", "sum"):
            found = cross_entropy(x, IGNORING, reduction=reduction, dtype=torch.float64, one_visit=one_visit)
            right = functional.cross_entropy(x, IGNORING, reduction=reduction)
            assert found.dtype is torch.float64 and torch.allclose(found.float(), right)


def test_one_visit_has_one_backward_pass(monkeypatch):
    simulated.install(monkeypatch)
    leaf, target = example((6, 40), dtype=torch.float32).requires_grad_(), IGNORING
    loss = cross_entropy(leaf, target)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="one_visit=False"):
        loss.backward()
    with pytest.raises(RuntimeError, match="one_visit=False"):
        torch.autograd.grad(cross_entropy(leaf, target), leaf, create_graph=True)
    loss = cross_entropy(leaf, target, one_visit=False)
    for _ in range(2):
        found = torch.autograd.grad(loss, leaf, retain_graph=True)[0]
        assert torch.allclose(found, leaf.grad, atol=1e-6)


def test_logits_that_were_written_over_are_missed(monkeypatch):
    """Another function that keeps the logits hears of it from autograd."""
    simulated.install(monkeypatch)
    leaf = example((6, 40), dtype=torch.float32).requires_grad_()
    logits = leaf * 1.0
    squares = logits.square().sum()
    cross_entropy(logits, IGNORING, inplace_backward=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reduction": "none"}, "a loss for each row"),
        ({"label_smoothing": 0.1, "weight": torch.ones(40)}, "label smoothing with a weight"),
        ({"return_lse": True}, "return_lse"),
        ({"weight": torch.ones(40), "lse_square_scale": 0.1}, "lse_square_scale with a weight"),
        ({"dim": 2}, "not contiguous"),
    ],
)
@pytest.mark.parametrize("asked", ["one_visit", "inplace_backward"])
def test_what_is_not_served_in_one_visit(monkeypatch, asked, options, words):
    """It says why where it was asked for, and is recomputed where it was not."""
    simulated.install(monkeypatch)
    options = dict(options)
    shape, target = ((6, 40, 1), IGNORING[:, None]) if options.pop("dim", 1) == 2 else ((6, 40), IGNORING)
    leaf = example(shape, dtype=torch.float32)
    leaf = leaf.mT.contiguous().mT if leaf.dim() > 2 else leaf
    leaf = leaf.expand(6, 40, 2).clone(memory_format=torch.contiguous_format) if leaf.dim() > 2 else leaf
    target = target.expand(6, 2) if leaf.dim() > 2 else target
    with pytest.raises(ValueError, match=f"not served in one visit: .*{words}"):
        cross_entropy(leaf.requires_grad_(), target, **options, **{asked: True})
    found = cross_entropy(leaf, target, **options)
    assert (found[0] if type(found) is tuple else found).requires_grad


def test_logits_that_are_one_row_are_not_written_over(monkeypatch):
    simulated.install(monkeypatch)
    leaf = example((1, 40), dtype=torch.float32).requires_grad_()
    windows = example((100,), dtype=torch.float32).requires_grad_().unfold(0, 40, 12)
    for logits in (leaf.expand(6, 40), windows):
        with pytest.raises(ValueError, match="share memory"):
            cross_entropy(logits, IGNORING, inplace_backward=True)


def test_float16_is_recomputed(monkeypatch):
    """Unless it is asked for, with a scale that is known."""
    launches = simulated.install(monkeypatch)
    leaf = example((6, 40)).half().requires_grad_()
    cross_entropy(leaf, IGNORING)
    cross_entropy(leaf, IGNORING, one_visit=True, grad_scale=1024.0)
    maths = [launch.math for launch in launches if launch.math in ("softmax", "logsumexp")]
    assert maths == ["logsumexp", "softmax"]


@pytest.mark.parametrize("refuse", [False, True])
@pytest.mark.parametrize("shape", [(6, 40), (40,), (3, 40, 2)])
def test_probabilities(monkeypatch, shape, refuse):
    """Read beside the logits, once forward and once backward; composed of a kernel where none has it all."""
    launches = simulated.install(monkeypatch)
    launches.refuse = refuse
    x = example(shape, dtype=torch.float32).bfloat16().requires_grad_()
    target = torch.softmax(example(shape, seed=1, dtype=torch.float32), min(1, len(shape) - 1))
    for options in ({}, {"scale": 0.5, "reduction": "sum"}, {"label_smoothing": 0.1}):
        launches.clear()
        found = cross_entropy(x, target, dtype=torch.float32, **options)
        wide = x.detach().double().requires_grad_()
        rest = {name: value for name, value in options.items() if name != "scale"}
        expected = functional.cross_entropy(wide * options.get("scale", 1.0), target.double(), **rest)
        assert torch.allclose(found.double(), expected, rtol=1e-5)
        d, right = (torch.autograd.grad(y, t)[0].double() for y, t in ((found, x), (expected, wide)))
        assert (d - right).abs().max() <= 2.0**-7 * right.abs().max()
        names = [(launch.math, launch.prologue.against) for launch in launches]
        if "label_smoothing" in options or len(shape) == 3:
            assert names[0] == ("log_softmax", "")
        elif not refuse:
            assert names == [("logsumexp", "weights"), ("softmax", "weights")]


def test_a_gradient_of_probabilities(monkeypatch):
    simulated.install(monkeypatch)
    given = example((4, 9), dtype=torch.float32).requires_grad_(), targets((4, 9), "probabilities").float()
    given[1].requires_grad_()
    wide = [t.detach().double().requires_grad_() for t in given]
    ours, torchs = (
        torch.autograd.grad(f(*t), t) for f, t in ((cross_entropy, given), (functional.cross_entropy, wide))
    )
    assert all(torch.allclose(a.double(), b, atol=1e-6) for a, b in zip(ours, torchs, strict=True))
    assert torch.autograd.gradgradcheck(cross_entropy, wide)


X, TARGET = torch.zeros(3, 4), torch.tensor([0, 1, 2])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: cross_entropy([1.0], TARGET), TypeError, "input must be a torch.Tensor"),
        (lambda: cross_entropy(X, [0, 1, 2]), TypeError, "target must be a torch.Tensor"),
        (lambda: cross_entropy(X.long(), TARGET), TypeError, "int64"),
        (lambda: cross_entropy(X, TARGET.bool()), TypeError, "target is torch.bool"),
        (lambda: cross_entropy(X, TARGET[:2]), ValueError, r"target has shape \(2,\)"),
        (lambda: cross_entropy(X, torch.zeros(3, 5)), ValueError, r"target has shape \(3, 5\)"),
        (lambda: cross_entropy(X, TARGET, torch.ones(3)), ValueError, r"weight has shape \(3,\)"),
        (lambda: cross_entropy(X, TARGET, reduction="max"), ValueError, "reduction is 'max'"),
        (lambda: cross_entropy(X, TARGET, label_smoothing=1.5), ValueError, "label_smoothing is 1.5"),
        (lambda: cross_entropy(X, TARGET, scale="2"), TypeError, "scale"),
        (lambda: cross_entropy(X, TARGET, softcap="2"), TypeError, "softcap"),
        (lambda: cross_entropy(X, TARGET, softcap=0), ValueError, "softcap is 0: it must be positive"),
        (lambda: cross_entropy(X, TARGET, softcap=-1.0), ValueError, "softcap is -1.0"),
        (lambda: cross_entropy(X, TARGET, grad_scale="2"), TypeError, "grad_scale"),
        (lambda: cross_entropy(X, TARGET, grad_scale=torch.ones(2)), ValueError, "grad_scale is a number"),
        (
            lambda: cross_entropy(X, TARGET, scale=10**400),
            ValueError,
            "scale is an integer beyond all floats",
        ),
        (lambda: cross_entropy(X, X.to_sparse()), TypeError, "target has layout torch.sparse_coo"),
        (lambda: cross_entropy(X, TARGET, [1.0] * 4), TypeError, "weight must be a torch.Tensor, not list"),
        (lambda: cross_entropy(X, TARGET, ignore_index=1.5), TypeError, "ignore_index must be an int"),
        (lambda: cross_entropy(X, TARGET, ignore_index=1 << 63), ValueError, "more than 64 bits"),
        (lambda: cross_entropy(X, TARGET + 2), IndexError, "from 2 to 4"),
        (lambda: cross_entropy(X, TARGET - 1), IndexError, "from -1 to 1"),
        (lambda: cross_entropy(torch.tensor(1.0), torch.tensor(0)), ValueError, "no dimension of classes"),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_empty_batches():
    for reduction, target in itertools.product(
        REDUCTIONS, (torch.zeros(0, dtype=torch.long), torch.zeros(0, 4))
    ):
        found, expected = (
            f(torch.zeros(0, 4), target, reduction=reduction)
            for f in (cross_entropy, functional.cross_entropy)
        )
        assert torch.equal(found, expected) or (found.isnan() and expected.isnan())


def test_the_module():
    weight = example((5,), seed=1, dtype=torch.float32).abs()
    ours = nn.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=0.1)
    torchs = torch.nn.CrossEntropyLoss(weight, ignore_index=1, label_smoothing=0.1)
    x, target = example((4, 5), dtype=torch.float32), torch.tensor([1, 2, 0, 4])
    assert isinstance(ours, torch.nn.CrossEntropyLoss) and torch.allclose(ours(x, target), torchs(x, target))
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    loaded = nn.CrossEntropyLoss.__new__(nn.CrossEntropyLoss)
    loaded.__setstate__(dict(torchs.__dict__))  # what was pickled as torch's
    assert torch.equal(loaded(x, target), ours(x, target))
    squares = nn.CrossEntropyLoss(lse_square_scale=0.5, scale=2.0, dtype=torch.float64)
    assert squares(x, target).dtype is torch.float64
