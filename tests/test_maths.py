"""The row maths on plain numbers (`arithmetic`): gradients of numbers of a row against float64."""

from dataclasses import replace
from itertools import product

import arithmetic
import numpy as np
import pytest
from arithmetic import Number, class_of, close, row

from cute_softmax.kernels.common import online
from cute_softmax.plan import Prologue

INF = np.inf
ROWS = {
    "plain": lambda n, r: r.normal(size=n) * 3,
    "far from 0": lambda n, r: r.normal(size=n) * 3 + 1000,
    "peaked": lambda n, r: np.where(np.arange(n) == 1, 30.0, r.normal(size=n)),
    "with -inf": lambda n, r: np.where(np.arange(n) % 3 == 2, -INF, r.normal(size=n)),
    "a thread of -inf": lambda n, r: np.where(np.arange(n) // 4 % 3 == 1, -INF, r.normal(size=n)),
}


@pytest.fixture(autouse=True)
def plain_numbers(monkeypatch):
    arithmetic.install(monkeypatch)


def example(kind: str, n: int) -> np.ndarray:
    return ROWS[kind](n, np.random.default_rng(n)).astype(np.float32)


def logs_of(scores: np.ndarray) -> np.ndarray:
    top = scores.max()
    return scores - top - np.log(np.exp(scores - top).sum())


def times(p: np.ndarray, logs: np.ndarray) -> np.ndarray:
    return np.where(p == 0, 0.0, p * np.where(p == 0, 0.0, logs))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("staging", ["direct", "shared"])
@pytest.mark.parametrize("scale", [None, 0.7, -0.5])
def test_the_gradient_of_an_entropy(kind, precise, staging, scale):
    """With that of a chosen element and of the logsumexp; exact where a probability is nearly 1."""
    if scale is not None and scale < 0 and "-inf" in kind:
        pytest.skip("times a negative number these are +inf")
    for n in (1, 5, 33):
        x, target = example(kind, n), min(1, n - 1)
        logs = logs_of(x.astype(np.float64) * (scale or 1.0))
        p = np.exp(logs)
        entropy = -times(p, logs).sum()
        of_found, of_lse, of_entropy = 1.5, 0.25, -0.5
        numbers = dict(
            alpha=of_lse - of_found,
            found=logs[target],
            more=of_lse,
            down=-of_entropy,
            entropy=entropy,
            index=target,
        )
        asked = Prologue(
            scale="number" if scale else "", alpha="groups", target="found", more=True, entropy=True
        )
        numbers |= {"scale": scale} if scale else {}
        found, _, at_target = row(
            class_of("softmax", asked, precise=precise), [x], numbers, target, staging=staging
        )
        right = p * (of_lse - of_found) - of_entropy * times(p, logs + entropy)
        assert close(found, right)
        right_at = -np.expm1(logs[target]) * of_found + of_lse * p[target]
        right_at -= of_entropy * times(p, logs + entropy)[target]
        assert close(at_target, right_at)
        alone, _, _ = row(
            class_of("softmax", Prologue(scale=asked.scale, entropy=True), precise=precise),
            [x], {k: v for k, v in numbers.items() if k != "alpha"}, staging=staging,
        )  # fmt: skip
        assert close(alone, -of_entropy * times(p, logs + entropy))


def scores_of(
    x: np.ndarray, scale: float | None, softcap: float | None
) -> tuple[np.ndarray, np.ndarray | float]:
    """(scores, their derivatives) in float64."""
    s = x.astype(np.float64) * (scale or 1.0)
    if softcap is None:
        return s, scale or 1.0
    capped = softcap * np.tanh(s / softcap)
    return capped, (1 - (capped / softcap) ** 2) * (scale or 1.0)


ASKED = {
    "plain": {},
    "smoothing": {"smoothing": 0.1},
    "all of it": {"smoothing": 1.0},
    "softcap": {"softcap": 5.0},
    "softcap and scale": {"softcap": 5.0, "scale": -0.3},
    "everything": {"smoothing": 0.2, "softcap": 20.0, "scale": 0.7, "squares": 0.01},
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("staging", ["direct", "shared"])
@pytest.mark.parametrize("asked", ASKED)
def test_a_loss_and_its_gradient(kind, keep, staging, asked):
    numbers = dict(ASKED[asked])
    scale, softcap, smoothing, squares = (
        numbers.get(n) for n in ("scale", "softcap", "smoothing", "squares")
    )
    if (scale or 1) < 0 and "-inf" in kind:
        pytest.skip("times a negative number these are +inf")
    prologue = Prologue(
        scale="number" if scale else "", softcap=softcap is not None, alpha="groups", target="loss",
        even=smoothing is not None, squares=squares is not None,
    )  # fmt: skip
    keep = keep and softcap is None and staging == "direct"  # slots are memory
    share, z = smoothing or 0.0, squares or 0.0
    for n in (1, 5, 33):
        x, target = example(kind, n), min(1, n - 1)
        scores, slope = scores_of(x, scale, softcap)
        logs, lse = logs_of(scores), np.log(np.exp(scores - scores.max()).sum()) + scores.max()
        found, groups, at_target = row(
            class_of("softmax", prologue, keep=keep), [x], {**numbers, "alpha": 2.0, "index": target}, target,
            staging=staging,
        )  # fmt: skip
        with np.errstate(invalid="ignore"):
            loss = -(1 - share) * logs[target] - (share * logs.mean() if share else 0.0) + z * lse**2
        assert close(groups[0], loss)
        gradient = np.exp(logs) * (1 + 2 * z * lse) - share / n
        # Relative to what a squared logsumexp of 1000 multiplies.
        assert close(found, 2.0 * gradient * slope / (scale or 1.0))
        right = gradient[target] - (1 - share)
        right = np.expm1(logs[target]) + share - share / n if not z else right
        assert close(at_target, 2.0 * right * np.broadcast_to(slope, (n,))[target] / (scale or 1.0))
        alone = replace(prologue, alpha="")
        _, groups, _ = row(
            class_of("logsumexp", alone), [x], {**numbers, "index": target}, target, staging=staging
        )
        assert close(groups[0], loss)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("staging", ["direct", "async"])
@pytest.mark.parametrize("asked", ["smoothing", "softcap and scale", "everything"])
def test_numbers_of_a_row(kind, staging, asked):
    """What recomputing keeps: maximum, logarithm of the sum, what was chosen, and the mean of all logarithms."""
    numbers = {k: v for k, v in ASKED[asked].items() if k in ("scale", "softcap")}
    scale, softcap = numbers.get("scale"), numbers.get("softcap")
    if (scale or 1) < 0 and "-inf" in kind:
        pytest.skip("times a negative number these are +inf")
    prologue = Prologue(
        scale="number" if scale else "", softcap=softcap is not None, even="smoothing" in ASKED[asked]
    )
    for n in (1, 5, 33):
        x, target = example(kind, n), min(1, n - 1)
        logs = logs_of(scores_of(x, scale, softcap)[0])
        _, groups, _ = row(class_of("selective", prologue), [x], numbers, target, staging=staging)
        assert close(groups[0], logs[target])
        assert close(groups[1] + groups[2], scores_of(x, scale, softcap)[0][target] - logs[target])
        assert not prologue.even or close(groups[3], logs.mean())


@pytest.mark.parametrize("softcap", [None, 4.0])
def test_the_gradient_of_what_was_recomputed(softcap):
    """Of a smoothed loss: the softmax less a target, a share of each class, and the slope of a cap."""
    prologue = Prologue(softcap=softcap is not None, alpha="groups", target="found", more=True, even=True)
    for kind in ROWS:
        x = example(kind, 33)
        scores, slope = scores_of(x, None, softcap)
        logs = logs_of(scores)
        of_found, of_even = -0.9, -0.1
        more = -of_even + of_even / 33
        numbers = dict(alpha=-of_found - of_even, found=logs[1], more=more, even=of_even / 33, index=1)
        numbers |= {} if softcap is None else {"softcap": softcap}
        found, _, at_target = row(class_of("softmax", prologue), [x], numbers, 1)
        right = np.exp(logs) + of_even / 33
        assert close(found, right * slope)
        assert close(
            at_target, (of_found + np.exp(logs) + of_even / 33)[1] * np.broadcast_to(slope, (33,))[1]
        )


def test_a_cap_near_and_far_from_0():
    for x in (*np.linspace(-90, 90, 3001), 0.0, 1e-6, -1e-6, 1e30, -np.inf):
        with np.errstate(all="ignore"):
            found, near = (online.capped(Number(x), Number(30.0), rough).value for rough in (False, True))
        right = 30.0 * np.tanh(np.float64(np.float32(x)) / 30.0)
        assert abs(found - right) <= 2**-22 * abs(right) and abs(near - right) <= 30 * 2**-21
    assert all(np.isnan(online.capped(Number(np.nan), Number(30.0), rough).value) for rough in (False, True))


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("other", ROWS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_divergence_and_its_gradients(kind, other, scale):
    """Of targets with anything left out; infinite where the input leaves out what the target has."""
    for n, precise in ((1, True), (5, False), (33, True), (33, False)):
        x, target = example(kind, n), np.roll(example(other, n), "-inf" not in other)
        with np.errstate(all="ignore"):
            q, p = (logs_of(a.astype(np.float64) * (scale or 1.0)) for a in (x, target))
            terms = np.where(np.exp(p) == 0, 0.0, np.exp(p) * (p - q))
        asked, numbers = (
            Prologue(scale="number" if scale else "", against="loss"),
            {"scale": scale} if scale else {},
        )
        _, (loss,), _ = row(class_of("logsumexp", asked, precise=precise), [x, target], numbers)
        assert close(loss, terms.sum())
        numbers |= {"alpha": 1.5, "loss": terms.sum()}
        asked = Prologue(scale=asked.scale, alpha="groups", against="input")
        found, _, _ = row(class_of("softmax", asked, precise=precise), [x, target], numbers)
        assert close(found, 1.5 * (np.exp(q) - np.exp(p)))
        if np.isfinite(terms.sum()):
            asked = Prologue(scale=asked.scale, alpha="groups", against="target")
            found, _, _ = row(class_of("softmax", asked, precise=precise), [x, target], numbers)
            assert close(found, 1.5 * (terms - np.exp(p) * terms.sum()))


# (staging and dtypes of two inputs, scale): each staging and each two dtypes with a scale and without.
TWO_INPUTS = [
    (staging, dtypes, (None, 0.3)[(i + j) % 2])
    for i, staging in enumerate([*product(("direct", "shared"), repeat=2), ("async", "async")])
    for j, dtypes in enumerate(product(("fp32", "bf16"), repeat=2))
]


@pytest.mark.parametrize(("staging", "dtypes", "scale"), TWO_INPUTS)
def test_equal_softmaxes_diverge_by_nothing(staging, dtypes, scale, monkeypatch):
    """Nor have they gradients, even by rounding, wherever their logits lie, however they come to the threads, and
    whichever products the compiler joins with sums."""
    monkeypatch.setattr(Number, "joins", np.random.default_rng(0))
    for kind, precise, shift in product(ROWS, (False, True), (0, 1 << 17)):
        x, numbers = example(kind, 65) + np.float32(shift), {"alpha": 1.5, "loss": 0.0}
        numbers |= {"scale": scale} if scale else {}
        for math, against in (("logsumexp", "loss"), ("softmax", "input"), ("softmax", "target")):
            asked = Prologue(
                scale="number" if scale else "", alpha="groups" * (math == "softmax"), against=against
            )
            c = class_of(math, asked, precise=precise, dtypes=dtypes)
            found, groups, _ = row(c, [x, x.copy()], numbers, staging=staging)
            assert (found == 0).all() if asked.alpha else groups == [0.0], (kind, precise, shift, against)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("staging", ["direct", "shared"])
def test_a_cross_entropy_of_probabilities(kind, scale, staging):
    """And of weights that add up to anything; -inf times 0 is NaN, as in torch."""
    for n, precise in ((1, True), (5, False), (33, True), (33, False)):
        x, w = example(kind, n), np.random.default_rng(n + 1).random(n).astype(np.float32)
        logs = logs_of(x.astype(np.float64) * (scale or 1.0))
        asked, numbers = (
            Prologue(scale="number" if scale else "", against="weights"),
            {"scale": scale} if scale else {},
        )
        _, (loss,), _ = row(class_of("logsumexp", asked), [x, w], numbers, staging=staging)
        assert close(loss, -(w * logs).sum())
        asked = Prologue(scale=asked.scale, alpha="groups", against="weights")
        found, _, _ = row(
            class_of("softmax", asked, precise=precise), [x, w], {**numbers, "alpha": 1.5}, staging=staging
        )
        assert close(found, 1.5 * (w.astype(np.float64).sum() * np.exp(logs) - w))
        w[0], x[0] = 0.0, -INF
        _, (loss,), _ = row(class_of("logsumexp", Prologue(against="weights")), [x, w], {}, staging=staging)
        assert np.isnan(loss)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("sink", [-np.inf, -1000.0, -2.0, 0.0, 29.0, 1001.0, 1e30])
@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("how", [{}, {"keep": True}, {"online": False}, {"precise": True, "keep": True}])
def test_a_sink(kind, sink, scale, how):
    """It joins the sum, whatever it is beside the largest score; and has its own logarithm in the softmax."""
    prologue, numbers = Prologue(scale="number" if scale else "", sink=True), {"sink": sink}
    numbers |= {"scale": scale} if scale else {}
    for n, staging in ((1, "direct"), (5, "direct"), (33, "shared"), (33, "direct")):
        x = example(kind, n)
        how = how | ({"keep": False} if staging == "shared" else {})  # slots are memory
        logs = logs_of(np.append(x.astype(np.float64) * (scale or 1.0), sink))
        found, groups, _ = row(class_of("softmax", prologue, **how), [x], numbers, staging=staging)
        # Scores are rounded, by torch as well.
        error = 2e-6 + 2e-7 * abs(scale or 0.0) * np.abs(x[np.isfinite(x)]).max(initial=0.0)
        assert close(found, np.exp(logs[:-1]), error) and close(groups, logs[-1], error)
        how = {k: v for k, v in how.items() if k != "online"}
        found, groups, _ = row(class_of("log_softmax", prologue, **how), [x], numbers, staging=staging)
        assert close(found, logs[:-1], error) and close(groups, logs[-1], error)
        _, groups, _ = row(class_of("logsumexp", prologue), [x], numbers, staging=staging)
        top = max(x.max() * np.float64(scale or 1.0), sink)
        assert close(groups, top - np.max(logs))


@pytest.mark.parametrize("sink", [-np.inf, -3.0, 5.0])
def test_a_sink_alone_in_a_row(sink):
    """Zeros, and -inf as their logarithms, but where the sink is nothing, too."""
    x, prologue = np.full(9, -np.inf, np.float32), Prologue(sink=True)
    none = sink == -np.inf
    found, groups, _ = row(class_of("softmax", prologue), [x], {"sink": sink})
    assert np.isnan(found).all() if none else (found == 0).all()
    assert groups == [-np.inf if none else 0.0]
    found, groups, _ = row(class_of("log_softmax", prologue), [x], {"sink": sink})
    assert np.isnan(found).all() if none else (found == -np.inf).all()
    assert groups == [-np.inf if none else 0.0]
    zeros = Prologue(sink=True, zero=True)
    assert (row(class_of("softmax", zeros), [x], {"sink": sink})[0] == 0).all()
    assert row(class_of("logsumexp", prologue), [x], {"sink": sink})[1] == [sink]


@pytest.mark.parametrize("sink", [np.inf, np.nan])
def test_a_sink_that_is_no_number(sink):
    """Nor is the row; but the logarithm of an infinite sum is infinite, as that of an element."""
    x, prologue = np.zeros(9, np.float32), Prologue(sink=True)
    for name in ("softmax", "log_softmax"):
        found, groups, _ = row(class_of(name, prologue), [x], {"sink": sink})
        assert np.isnan([*found, *groups]).all()
    _, groups, _ = row(class_of("logsumexp", prologue), [x], {"sink": sink})
    assert groups == [sink] or np.isnan([*groups, sink]).all()


@pytest.mark.parametrize("log", [-np.inf, -30.0, -0.5, 0.0])
def test_the_gradient_of_a_sink(log):
    """Less its probability times the sum that the gradient of the scores subtracts."""
    rng = np.random.default_rng(1)
    dy, y = rng.normal(size=33).astype(np.float32), rng.random(33).astype(np.float32)
    asked = Prologue(scale="number", alpha="number", sink=True)
    numbers = {"scale": 3.0, "alpha": 0.5, "sink": log}
    found, groups, _ = row(class_of("softmax_backward", asked), [dy, y], numbers)
    dot = (dy.astype(np.float64) * y).sum()
    assert close(found, 3.0 * y * (dy - 0.5 * dot)) and close(groups, -np.exp(log) * dot)
    y = np.where(np.arange(33) % 4 == 1, -np.inf, np.log(y)).astype(np.float32)
    for mask in (False, True):
        _, groups, _ = row(
            class_of("log_softmax_backward", Prologue(mask=mask, sink=True)), [dy, y], {"sink": log}
        )
        total = np.where(mask & (y == -np.inf), 0.0, dy.astype(np.float64)).sum()
        assert close(groups, -np.exp(log) * total)


def test_precise_exponentials():
    """To an ulp if ex2.approx were exact, and what is too small for a whole part to the last bit of what is left."""
    differences = np.random.default_rng(0).uniform(-104, 3, 3000).astype(np.float32)
    differences = np.concatenate([differences, np.log(2) * np.arange(-150, 4)]).astype(np.float32)
    exact = np.exp(differences.astype(np.float64))
    with np.errstate(under="ignore"):
        found = np.array([online.Precise().of(Number(d)).value for d in differences])
    ulp = np.spacing(np.maximum(exact, np.finfo(np.float32).tiny).astype(np.float32))
    assert (np.abs(found - exact) <= 1.1 * ulp).all()
    special = [online.Precise().of(Number(d)).value for d in (0.0, -0.0, -INF, -1e30, -200.0, np.nan)]
    np.testing.assert_array_equal(special, [1, 1, 0, 0, 0, np.nan])
    assert online.Precise().of(Number(1000.0)).value == INF
