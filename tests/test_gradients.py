"""The checks of softmax_matmul's results and gradients fail for what broken kernels would give."""

from dataclasses import replace

import pytest
import torch
from gradients import Gradients, call

from cute_softmax.dispatch.matmul.backward import add_up

CALL = call((2,), 192, 256, 64, device="cpu", scale=0.5)


def test_torch_itself_passes():
    gradients, result, _ = CALL.torch()
    CALL.check(gradients)
    CALL.check_result(result, CALL._exponentials(torch.float32)[1])


@pytest.mark.parametrize("mutant", list(CALL.mutants()), ids=lambda m: m[0])
def test_mutants_fail(mutant):
    _, wrong = mutant
    with pytest.raises(AssertionError, match="is off by"):
        CALL.check(Gradients(*wrong[:2]))


def of_scores(change) -> torch.Tensor:
    """The result of other scores."""
    scores = CALL.scores.clone()
    change(scores)
    return replace(CALL, scores=scores).torch(torch.float64)[1]


RESULTS = {
    "zeros": of_scores(lambda s: s) * 0,
    "uniform": of_scores(lambda s: s.fill_(0)),
    "a tile of columns missing": of_scores(lambda s: s[..., 64:128].fill_(-float("inf"))),
    "the last column missing": of_scores(lambda s: s[..., -1:].fill_(-float("inf"))),
    "the first tile's exponentials not rescaled": of_scores(lambda s: s[..., :64].add_(0.5)),
    "of the next row": of_scores(lambda s: s.copy_(s.roll(1, -2))),
    "one row of the next": of_scores(lambda s: s[0, 7].copy_(s[0, 8])),
    "columns of V exchanged": of_scores(lambda s: s).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
    "twice": of_scores(lambda s: s) * 2,
    "one per cent too much": of_scores(lambda s: s) * 1.01,
}


@pytest.mark.parametrize("name", RESULTS)
def test_wrong_results_fail(name):
    with pytest.raises(AssertionError, match="off by"):
        CALL.check_result(RESULTS[name].to(CALL.values.dtype))


def test_wrong_log_sum_exps_fail():
    result, lse = CALL.torch()[1], CALL._exponentials(torch.float32)[1]
    for wrong in (lse * (1 + 1e-4), lse.roll(1, -1), lse - CALL.scores.float().amax(-1)):
        with pytest.raises(AssertionError, match="log-sum-exps"):
            CALL.check_result(result, wrong)


def test_parts_of_dv_are_rounded_once():
    """As a single product's would be, and not each part before they are added."""
    parts = torch.randn(4, 1 << 16, generator=torch.Generator().manual_seed(0))
    exact, total = parts.double().sum(0), torch.empty(1 << 16, dtype=torch.bfloat16)
    add_up(parts, total)
    half_ulp = torch.finfo(torch.bfloat16).eps / 2 * exact.abs()
    assert ((total.double() - exact).abs() <= half_ulp + 1e-6).all()
