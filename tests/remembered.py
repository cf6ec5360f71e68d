"""The forms of eager calls that a process remembers."""

from __future__ import annotations

from cute_softmax.acceleration.operators import OPERATORS
from cute_softmax.api import softmax
from cute_softmax.dispatch.common.forms import Forms
from cute_softmax.dispatch.heads import divergence, largest
from cute_softmax.dispatch.heads import loss as losses
from cute_softmax.dispatch.heads.calls import HEADS
from cute_softmax.dispatch.matmul import backward as of_products_back
from cute_softmax.dispatch.matmul import forms as products
from cute_softmax.dispatch.matmul import kernels as of_products
from cute_softmax.dispatch.sharded import kernels as of_shards
from cute_softmax.dispatch.topk import forms as choices
from cute_softmax.dispatch.topk import kernels as few
from cute_softmax.runtime import launch


def all_forms() -> list[Forms]:
    """Of all functions that have some."""
    return [
        softmax._softmaxes,
        softmax._log_softmaxes,
        *softmax._of_scores.values(),
        *(head.known for head in HEADS),
        losses.known,
        products.known,
        choices.known,
        *(operator.known for operator in OPERATORS),
        largest.known,
        divergence.known,
    ]


def forget_forms() -> None:
    """As if nothing had been called."""
    for forms in all_forms():
        forms.clear()


def forget_calls() -> None:
    """Neither a form nor a Call."""
    forget_forms()
    remembering = [module._call for module in (launch, largest, few, of_products, of_shards)]
    for function in (*remembering, losses._calls, of_products_back._bound):
        clear = getattr(function, "cache_clear", None)  # simulated ones are not remembered
        if clear:
            clear()


def fresh_forms(monkeypatch) -> None:
    """As if nothing had been called, until the test ends."""
    monkeypatch.setattr(softmax, "_softmaxes", Forms())
    monkeypatch.setattr(softmax, "_log_softmaxes", Forms())
    monkeypatch.setattr(softmax, "_of_scores", {"softmax": Forms(), "log_softmax": Forms()})
    for head in HEADS:
        monkeypatch.setattr(head, "known", Forms())
    monkeypatch.setattr(losses, "known", Forms())
    monkeypatch.setattr(products, "known", Forms())
    monkeypatch.setattr(choices, "known", Forms())
    for module in (largest, divergence):
        monkeypatch.setattr(module, "known", Forms())
