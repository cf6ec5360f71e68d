"""Options of cross_entropy in pairs, and a scale for each row, beside float64: results, gradients, launches."""

from __future__ import annotations

import emulated
import pytest
import simulated
import torch
from checking import FLOATS, example
from losses import OPTIONS, exact, given, pairs

from cute_softmax import batch_invariant, cross_entropy, selective_log_softmax

CASES = OPTIONS | pairs()
VISIT = ["share", "softmax", "total"]


def both(x, target, options, upstream=2.5):
    """(the loss, the logsumexps, the gradient) of ours and of torch's operations in float64."""
    leaf = x.clone().requires_grad_()
    found = cross_entropy(leaf, target, **options)
    wide = x.double().requires_grad_()
    right = exact(wide, target, options)
    results = []
    for t, (loss, lse) in ((leaf, found if isinstance(found, tuple) else (found, None)), (wide, right)):
        total = upstream * (loss * torch.linspace(1.0, 2.0, loss.numel()).view(loss.shape).to(loss)).sum()
        if "return_lse" in options:
            total = total + lse.sin().sum()
        (grad,) = torch.autograd.grad(total, t)
        results.append((loss.detach(), None if lse is None else lse.detach(), grad))
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", CASES)
def test_pairs_of_options(options, dtype, launched):
    x = example((6, 40), dtype)
    target, options = given(x, CASES[options])
    if launched is None and "inplace_backward" in options:
        with pytest.raises(ValueError, match="not served in one visit"):
            both(x, target, options)
        return
    eps = torch.finfo(dtype).eps
    for _ in range(2):  # calls that repeat
        (loss, lse, grad), (right, right_lse, right_grad) = both(x, target, options)
        near = {"rtol": 4 * eps, "atol": 8 * eps if dtype is torch.bfloat16 else 4e-6}
        assert torch.allclose(loss.double(), right, **near)
        assert lse is None or torch.allclose(lse.double(), right_lse, rtol=1e-6, atol=1e-6)
        bound = 4 * eps * right_grad.abs().max() + 1e-6
        assert (grad.double() - right_grad).abs().max() <= bound
        for mutant in (torch.zeros_like(grad), grad.roll(1, 1), 1.1 * grad):
            assert (mutant.double() - right_grad).abs().max() > bound
    if launched is not None:
        assert launched


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_scale_of_each_row(dtype, launched):
    """A tensor of float32 numbers that the kernels read, in whatever shape its rows have; 0 is one, too."""
    x, target = example((6, 40), dtype), torch.tensor([3, -100, 39, 0, 39, 7])
    scale = torch.tensor([0.0, 2.0, -0.5, 1.0, 0.1, 3.0])
    for how, maths in (
        ({}, VISIT if dtype is not torch.float16 else ["logsumexp", "mean", "softmax"]),
        ({"one_visit": False}, ["logsumexp", "mean", "softmax"]),
        ({"reduction": "none", "softcap": 2.0, "label_smoothing": 0.1}, ["logsumexp", "softmax"]),
    ):
        for rates in (scale, scale.unsqueeze(-1), scale.double()):
            if launched is not None:
                launched.clear()
            ours, right = both(x, target, how | {"scale": rates.view(6)})
            eps = torch.finfo(dtype).eps
            assert torch.allclose(ours[0].double(), right[0], rtol=4 * eps, atol=4e-6)
            assert (ours[2].double() - right[2]).abs().max() <= 4 * eps * right[2].abs().max() + 1e-6
            found = cross_entropy(x, target, **how, scale=rates)
            assert torch.allclose(found.double(), right[0], rtol=4 * eps, atol=4e-6)
            if launched is not None and dtype is not torch.float64:
                names = [n.math for n in launched if n.math != "rescale"]
                assert names[: len(maths)] == maths
                of_rows = [n.prologue.scale for n in launched if n.math in ("softmax", "logsumexp")]
                assert set(of_rows) == {"groups"}
    one = cross_entropy(x, target, scale=torch.tensor(0.5))
    assert torch.allclose(one, cross_entropy(x, target, scale=0.5))


def test_a_scale_of_each_row_of_images(launched):
    x, target = example((2, 9, 5), torch.float32), torch.arange(10).view(2, 5) % 9
    scale = torch.rand(2, 5).add(0.5)
    leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
    found = cross_entropy(leaf, target, scale=scale)
    right = torch.nn.functional.cross_entropy(wide * scale.double().unsqueeze(1), target)
    assert torch.allclose(found.double(), right)
    grads = torch.autograd.grad(found, leaf)[0].double(), torch.autograd.grad(right, wide)[0]
    assert torch.allclose(*grads, atol=1e-6)


def test_gradients_of_a_scale_of_each_row(launched):
    """Of the scale itself, and twice: of the scaled logits in float32."""
    x, target, scale = (
        example((4, 9), torch.float32),
        torch.tensor([0, 8, -100, 3]),
        torch.rand(4).add(0.5),
    )
    for options in ({}, {"one_visit": False}, {"return_lse": True}, {"label_smoothing": 0.2}):
        given = x.clone().requires_grad_(), scale.clone().requires_grad_()
        wide = [t.double().detach().requires_grad_() for t in given]
        found = cross_entropy(given[0], target, scale=given[1], **options)
        right, lse = exact(wide[0], target, options | {"scale": wide[1]})
        if "return_lse" in options:
            found, right = found[0] + found[1].sum(), right + lse.sum()
        ours, exactly = torch.autograd.grad(found, given), torch.autograd.grad(right, wide)
        for d, e in zip(ours, exactly, strict=True):
            assert torch.allclose(d.double(), e, atol=1e-5) and not torch.allclose(
                2 * d.double(), e, atol=1e-5
            )
    wide = x.double().requires_grad_(), scale.double().requires_grad_()

    def function(x, scale):
        return cross_entropy(x, target, scale=scale, reduction="none", softcap=3.0)

    assert torch.autograd.gradcheck(function, wide) and torch.autograd.gradgradcheck(function, wide)
    leaf = x.clone().requires_grad_()
    loss = cross_entropy(leaf, target, scale=scale, one_visit=False)
    (d,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (dd,) = torch.autograd.grad(d.square().sum(), leaf)
    loss = exact(wide[0], target, {"scale": scale})[0]
    (d,) = torch.autograd.grad(loss, wide[0], create_graph=True)
    assert torch.allclose(dd.double(), torch.autograd.grad(d.square().sum(), wide[0])[0], atol=1e-5)


def test_a_scale_that_was_written_over_is_missed(monkeypatch):
    simulated.install(monkeypatch)
    leaf, scale = example((4, 9), torch.float32).requires_grad_(), torch.ones(4)
    loss = cross_entropy(leaf, torch.arange(4), scale=scale, one_visit=False)
    scale.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_scale_of_each_row_in_transforms(launched):
    x, target, scale = example((4, 9), torch.float32), torch.arange(4), torch.rand(4).add(0.5)

    def function(x, scale):
        return cross_entropy(x, target, scale=scale)

    right = torch.func.grad(lambda x, s: exact(x, target, {"scale": s})[0], (0, 1))(x, scale)
    found = torch.func.grad(function, (0, 1))(x, scale)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, right, strict=True))
    several = torch.func.vmap(function)(torch.stack([x, 2 * x]), torch.stack([scale, scale]))
    assert torch.allclose(several[1], function(2 * x, scale))


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_chosen_log_probabilities_at_a_scale_of_each_row(dtype, several, launched):
    """A kernel each way for one element of each row; of the scaled logits else."""
    x = example((2, 3, 9), dtype)
    index = torch.randint(9, (2, 3, 4) if several else (2, 3), generator=torch.Generator().manual_seed(1))
    keep = index.clone()
    index[0, 0] = -1
    scale, eps = torch.rand(2, 3).add(0.5), torch.finfo(dtype).eps
    for options in ({}, {"softcap": 2.0}, {"return_entropy": True}):
        for tokens in (index.int(), index if several else index.unsqueeze(-1)):
            leaf, wide = x.clone().requires_grad_(), x.double().requires_grad_()
            if launched is not None:
                launched.clear()
            found = selective_log_softmax(
                leaf, tokens, scale=scale, ignore_index=-1, dtype=torch.float32, **options
            )
            scores = wide * scale.double().unsqueeze(-1)
            scores = 2 * torch.tanh(scores / 2) if "softcap" in options else scores
            every = torch.log_softmax(scores, -1)
            at = torch.where(tokens == -1, 0, tokens.long()).view(2, 3, -1)
            right = torch.where(tokens == -1, 0.0, every.gather(-1, at).view(tokens.shape))
            if "return_entropy" in options:
                right_entropy = -(every.exp() * every).sum(-1)
                assert torch.allclose(found[1].double(), right_entropy, atol=1e-5)
                found, right = found[0].sum() + found[1].sum(), right.sum() + right_entropy.sum()
            assert found.dtype is torch.float32 and torch.allclose(
                found.double(), right, rtol=1e-6, atol=4e-6
            )
            upstream = torch.linspace(1.0, 2.0, found.numel()).view(found.shape)
            (ours,) = torch.autograd.grad(found, leaf, upstream)
            (exactly,) = torch.autograd.grad(right, wide, upstream.double())
            bound = 8 * eps * exactly.abs().max() + 1e-6
            assert (ours.double() - exactly).abs().max() <= bound < (ours.roll(1, -1) - exactly).abs().max()
            if (
                launched is not None
                and dtype is not torch.float64
                and not several
                and "return_entropy" not in options
            ):
                assert [n.math for n in launched] == ["logsumexp", "softmax"]
                assert all(n.prologue.scale == "groups" and n.dtypes[0] is dtype for n in launched)
    alone = selective_log_softmax(x, keep, scale=scale)
    assert alone.dtype == dtype and alone.shape == keep.shape
    assert torch.equal(alone, selective_log_softmax(x, keep, scale=scale.unsqueeze(-1)))
    if not several:
        nothing = torch.full_like(keep, -100)
        with pytest.raises(IndexError, match="index has elements from -100"):
            selective_log_softmax(x, nothing, scale=scale)


def test_a_gradient_of_the_temperatures(launched):
    x, index, scale = example((4, 9), torch.float32), torch.tensor([0, 8, 2, 3]), torch.linspace(0.5, 1.5, 4)
    scale.requires_grad_()
    found = selective_log_softmax(x, index, scale=scale)
    right = torch.log_softmax(x * scale.unsqueeze(-1), -1).gather(-1, index[:, None])[:, 0]
    grads = [torch.autograd.grad(y.square().sum(), scale)[0] for y in (found, right)]
    assert torch.allclose(*grads, atol=1e-5) and grads[0].abs().min() > 1e-3


def test_wrong_scales():
    x, target = torch.zeros(3, 4), torch.tensor([0, 1, 2])
    for function in (cross_entropy, selective_log_softmax):
        for scale, error, words in (
            (torch.ones(4), ValueError, r"scale has shape \(4,\).*one number for each row, \(3,\)"),
            (torch.ones(3, 4), ValueError, "one number for each row"),
            (torch.ones(3, dtype=torch.bool), TypeError, "scale is torch.bool"),
            (torch.ones(3, device="meta"), ValueError, "scale is on meta"),
            ("1", TypeError, "scale must be a number or a torch.Tensor, not str"),
        ):
            with pytest.raises(error, match=words):
                function(x, target, scale=scale)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_without_a_gradient_none_is_written(dtype, launches):
    x, target = example((6, 40), dtype), torch.arange(6)
    with torch.no_grad():
        cross_entropy(x.requires_grad_(), target)
    cross_entropy(x.detach(), target, inplace_backward=True, one_visit=True)
    assert [n.math for n in launches] == ["logsumexp", "mean"] * 2


def test_probabilities_are_not_in_one_visit():
    x, target = torch.zeros(3, 4).requires_grad_(), torch.full((3, 4), 0.25)
    for asked in ("one_visit", "inplace_backward"):
        with pytest.raises(ValueError, match="not served in one visit: class probabilities"):
            cross_entropy(x, target, **{asked: True})
        cross_entropy(x.detach(), target, **{asked: True})


# -- The kernels themselves --------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "dtype", "columns"),
    [
        ({}, torch.float32, 300),
        ({"softcap": 4.0, "label_smoothing": 0.1, "lse_square_scale": 0.1}, torch.bfloat16, 9001),
    ],
    ids=["plain", "with all else"],
)
def test_kernels_read_a_scale_of_each_row(options, dtype, columns, monkeypatch, tmp_path):
    launches = emulated.install(monkeypatch, tmp_path)
    x, scale = example((5, columns), dtype), torch.tensor([0.0, -0.7, 1.0, 0.25, 3.0])
    target, eps = torch.tensor([0, columns - 1, -100, 7, 250]), torch.finfo(dtype).eps
    with batch_invariant():
        rows = cross_entropy(x, target, scale=scale, reduction="none", dtype=torch.float32, **options)
        alone = cross_entropy(
            x[3:], target[3:], scale=scale[3:], reduction="none", dtype=torch.float32, **options
        )
    assert torch.equal(rows[3:], alone)
    for how in ({}, {"one_visit": False, "reduction": "none"}):
        ours, right = both(x, target, options | how | {"scale": scale, "dtype": torch.float32})
        assert torch.allclose(ours[0].double(), right[0], rtol=1e-5, atol=1e-5)
        bound = 2 * eps * right[2].abs().max() + 2e-6
        assert (ours[2].double() - right[2]).abs().max() <= bound
        assert (ours[2].roll(1, 1).double() - right[2]).abs().max() > bound
    assert {n.prologue.scale for n in launches if n.math in ("softmax", "logsumexp")} == {"groups"}
