"""The row maths on plain numbers (`arithmetic`): gradients of numbers of a row against float64."""

import arithmetic
import numpy as np
import pytest
from arithmetic import class_of, close, row

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
