"""Statistics of parts of rows: merged, they are those of the rows, however these were cut."""

import itertools

import pytest
import torch
from checking import FLOATS, example

from cute_softmax import Statistics, batch_invariant, merge_statistics, partial_statistics

INF, NAN = float("inf"), float("nan")
CUTS = ([9], [4, 5], [1, 1, 7], [3, 0, 6], [1] * 9)


def exact(x, scale=1.0):
    """(maximum, logsumexp, entropy) in float64, differentiable."""
    s = x.double() * scale
    log_p = torch.log_softmax(s, -1)
    p = log_p.exp()
    return s.amax(-1), torch.logsumexp(s, -1), -(p * torch.where(p == 0, 0.0, log_p)).sum(-1)


def merged(x, cut, **options):
    return merge_statistics([partial_statistics(part, **options) for part in x.split(cut, -1)])


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS)
def test_merged_parts_are_the_rows(cut, dtype, launched):
    x = example((4, 9), dtype)
    x[1, 2:5], x[2, :4] = -INF, -300.0
    for scale in (1.0, 0.5, 60.0):
        top, lse, entropy = exact(x, scale)
        found = merged(x, cut, scale=scale, weighted=True)
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        assert {t.dtype for t in found} == {wide} and found.max.shape == (4,)
        near = {"rtol": 1e-6, "atol": 4e-6}
        assert torch.allclose(found.max.double(), top, **near)
        assert torch.allclose(found.logsumexp.double(), lse, **near)
        assert torch.allclose(found.entropy.double(), entropy, **near)
        without = merged(x, cut, scale=scale)
        assert without.weighted is None and torch.equal(without.max, found.max)
        assert torch.allclose(without.sum, found.sum, rtol=1e-6)
    if launched is not None and dtype != torch.float64:
        assert len(launched) == 6 * sum(n > 0 for n in cut) and {n.math for n in launched} == {"entropy"}


def test_however_they_are_merged():
    """In twos, and parts of parts: of numbers whose sums are exact to the bit."""
    x = torch.tensor([[0.0, 0.0, -INF, 0.0, 0.0, 0.0, -INF, -INF]])
    parts = [partial_statistics(part, weighted=True) for part in x.split(2, -1)]
    whole = partial_statistics(x, weighted=True)
    for order in itertools.permutations(parts):
        a, b, c, d = order
        for found in (
            merge_statistics(order),
            merge_statistics([merge_statistics([a, b]), merge_statistics([c, d])]),
        ):
            assert all(torch.equal(f, w) for f, w in zip(found, whole, strict=True))


def test_gradients_flow_through_the_parts():
    x = example((3, 9), torch.float64).requires_grad_()

    def both(x):
        found = merged(x, [4, 3, 2], scale=0.7, weighted=True)
        return found.logsumexp, found.entropy

    assert torch.autograd.gradcheck(both, x)
    for ours, right in zip(both(x), exact(x, 0.7)[1:], strict=True):
        (a,), (b,) = (torch.autograd.grad(y.sum(), x, retain_graph=True) for y in (ours, right))
        assert torch.allclose(a, b)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_part_of_nothing_has_no_gradient(weighted, launched):
    """That of masked logits, of which a row has more in other parts: 0, not NaN; in all states of a call."""
    x = example((3, 9), torch.float32)
    x[0, :4] = x[1, 4:7] = -INF

    def numbers(x):
        found = merged(x, [4, 3, 2], scale=0.7, weighted=weighted)
        return found.entropy if weighted else found.logsumexp

    right = torch.func.grad(lambda x: exact(x, 0.7)[1 + weighted].sum())(x)
    right = right.masked_fill(x == -INF, 0.0)
    leaf = x.clone().requires_grad_()
    (d,) = torch.autograd.grad(numbers(leaf).sum(), leaf, create_graph=True)
    (dd,) = torch.autograd.grad(d.square().sum(), leaf)
    assert torch.allclose(d, right, atol=1e-6) and dd.isfinite().all()
    assert torch.allclose(torch.func.grad(lambda x: numbers(x).sum())(x), right, atol=1e-6)
    tangent = torch.func.jvp(numbers, (x,), (torch.ones_like(x),))[1]
    assert torch.allclose(tangent, right.sum(-1), atol=1e-6)


def test_parts_within_batch_invariant(launches):
    with batch_invariant():
        partial_statistics(example((3, 9), torch.float32))
    assert launches[-1].invariant


def test_a_loss_whose_logits_come_chunk_by_chunk(launches):
    """Cross entropy and entropy of a linear layer, without all its logits."""
    hidden, weight = example((6, 5), torch.float32).requires_grad_(), example((20, 5), torch.float32, seed=1)
    tokens = torch.tensor([0, 19, 3, 7, 8, 12])
    parts = [partial_statistics(hidden @ chunk.T, weighted=True) for chunk in weight.split(7)]
    whole = merge_statistics(parts)
    loss = (whole.logsumexp - (hidden * weight[tokens]).sum(-1)).mean() - 0.1 * whole.entropy.mean()
    (found,) = torch.autograd.grad(loss, hidden)
    logits = hidden @ weight.T
    entropy = torch.special.entr(torch.softmax(logits, -1)).sum(-1)
    right = torch.nn.functional.cross_entropy(logits, tokens) - 0.1 * entropy.mean()
    assert torch.allclose(loss, right) and torch.allclose(
        found, torch.autograd.grad(right, hidden)[0], atol=1e-6
    )


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_no_number(cut, launched):
    x = torch.zeros(3, 9)
    x[0], x[1, 4], x[2, :8] = -INF, NAN, -INF
    found = merged(x, cut, weighted=True)
    assert found.logsumexp[0] == -INF and found.sum[0] == 0 and found.max[0] == -INF
    assert found.logsumexp[1].isnan() and found.entropy[1].isnan()
    assert found.logsumexp[2] == 0 and found.entropy[2] == 0


def test_other_dimensions_and_none(launched):
    x = example((3, 4, 5), torch.float32)
    for dim in (0, (0, 2), -2):
        assert torch.allclose(partial_statistics(x, dim).logsumexp, torch.logsumexp(x, dim), atol=1e-6)
    assert partial_statistics(torch.tensor(2.0)).logsumexp == 2
    nothing = partial_statistics(torch.empty(2, 0), weighted=True)
    assert nothing.max.tolist() == [-INF] * 2 and not nothing.sum.any() and not nothing.weighted.any()


def test_errors():
    part = partial_statistics(torch.zeros(2, 3))
    for error, said, call in (
        (TypeError, "logits must be a torch.Tensor", lambda: partial_statistics([0.0])),
        (TypeError, "needs a floating-point tensor", lambda: partial_statistics(torch.zeros(3).long())),
        (TypeError, "scale must be a number", lambda: partial_statistics(torch.zeros(3), scale="1")),
        (ValueError, "parts is empty", lambda: merge_statistics([])),
        (TypeError, "parts has int, Tensor", lambda: merge_statistics([part, 1, part.max])),
        (
            ValueError,
            "of the same rows",
            lambda: merge_statistics([part, partial_statistics(torch.zeros(3, 3))]),
        ),
        (ValueError, "weighted=True", lambda: part.entropy),
    ):
        with pytest.raises(error, match=said):
            call()
    assert torch.equal(merge_statistics(p for p in [part, part]).max, part.max)
    assert (
        merge_statistics([part, Statistics(*partial_statistics(torch.zeros(2, 3), weighted=True))]).weighted
        is None
    )
