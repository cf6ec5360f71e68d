"""Other libraries on these kernels: TRL, transformers and FlashInfer, each with one call.

A `patch_...` function replaces names in a library, or in one model, and returns a `Patch`, which restores them when
`undo` is called or a `with` block ends. Before that call nothing of these libraries is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import Any

import torch

from . import sampling
from .acceleration import accelerate
from .api.cross_entropy import cross_entropy
from .api.selective import entropy
from .api.selective import selective_log_softmax as _selective

__all__ = ["Patch", "causal_lm_loss", "patch_flashinfer", "patch_transformers", "patch_trl"]


class Patch:
    """The changes made by a `patch_...` function: a context manager that undoes them."""

    def __init__(self) -> None:
        self._changes = ExitStack()

    def undo(self) -> None:
        """Undo all changes. May be called more than once."""
        self._changes.close()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def selective_log_softmax(
    logits: torch.Tensor,
    index: torch.Tensor,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """`trl.trainer.utils.selective_log_softmax` on our kernels: no matrix of log-probabilities, forward or backward.

    Args:
        logits: (..., N), a floating-point tensor.
        index: (...) or (..., K), which elements; where the mask is 0 it may hold anything.
        temperature: A number above 0 by which the logits are divided.
        row_mask: In the shape of the index; log-probabilities where it is 0 are 0, without a gradient.

    Returns:
        The log-probabilities, in the shape of the index and the dtype of the logits.

    Raises:
        ValueError: For a temperature that is not above 0, and as `selective_log_softmax`.
    """
    index = index if row_mask is None else index.masked_fill(row_mask == 0, 0)
    found = _selective(logits, index, scale=_scale(temperature))
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


def selective_log_softmax_and_entropy(
    logits: torch.Tensor,
    index: torch.Tensor,
    entropy_requires_grad: bool = True,
    temperature: float = 1.0,
    row_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`trl.trainer.utils.selective_log_softmax_and_entropy` by ours: both from one read of the logits.

    Args:
        logits: (..., N), a floating-point tensor.
        index: (...), which elements; where the mask is 0 it may hold anything.
        entropy_requires_grad: Whether the entropies are differentiated.
        temperature: A number above 0 by which the logits are divided.
        row_mask: In the shape of the index; both results are 0 where it is 0.

    Returns:
        The log-probabilities and the entropies in nats, in the shape of the index and the dtype of the logits.

    Raises:
        ValueError: For a temperature that is not above 0, and as `selective_log_softmax`.
    """
    index = index if row_mask is None else index.masked_fill(row_mask == 0, 0)
    logp, entropies = _selective(logits, index, scale=_scale(temperature), return_entropy=True)
    entropies = entropies if entropy_requires_grad else entropies.detach()
    if row_mask is None:
        return logp, entropies
    return logp.masked_fill(row_mask == 0, 0.0), entropies.masked_fill(row_mask == 0, 0.0)


def entropy_from_logits(logits: torch.Tensor, chunk_size: int = 128) -> torch.Tensor:
    """`trl.trainer.utils.entropy_from_logits` by ours.

    Args:
        logits: (..., N), a floating-point tensor.
        chunk_size: Not needed: no matrix is written.

    Returns:
        The entropies in nats, (...).
    """
    return entropy(logits)


def patch_trl() -> Patch:
    """Replace functions of `trl.trainer.utils` with ours, in all of TRL's modules, loaded now or later.

    These are `selective_log_softmax` and, in versions of TRL that have them, `selective_log_softmax_and_entropy` and
    `entropy_from_logits`.

    Returns:
        The `Patch`, which undoes this.

    Raises:
        ImportError: Without TRL, or with a version that has no `selective_log_softmax`.
    """
    ours = (selective_log_softmax, selective_log_softmax_and_entropy, entropy_from_logits)
    return _replaced("trl.trainer.utils", {function.__name__: function for function in ours})


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **options: object,
) -> torch.Tensor:
    """The loss of transformers' causal language models (`ForCausalLMLoss`), computed by `cross_entropy`.

    It reads the logits in the model's dtype, without a float32 copy of 16-bit logits. The loss is float32 nevertheless,
    and its gradient is written in the forward pass where possible.

    Args:
        logits: (batch, length, vocab_size).
        labels: (batch, length): the tokens themselves; token t + 1 is the target of position t.
        vocab_size: The length of a row.
        num_items_in_batch: The divisor of the sum, if several batches are accumulated; None: the mean.
        ignore_index: A target that is ignored.
        shift_labels: The targets, already shifted, instead of `labels`.
        **options: Further arguments of the model; ignored, as in `ForCausalLMLoss`.

    Returns:
        The loss, a float32 scalar.
    """
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows, targets = logits.reshape(-1, vocab_size), shift_labels.reshape(-1).to(logits.device)
    loss_of = partial(cross_entropy, rows, targets, ignore_index=ignore_index, dtype=torch.float32)
    if num_items_in_batch is None:
        return loss_of()
    items = num_items_in_batch
    if isinstance(items, torch.Tensor):
        items = items.to(logits.device)
    return loss_of(reduction="sum", grad_scale=1 / items) / items


def patch_transformers(model: Any = None, *, override: bool = False) -> Patch:
    """Run the softmaxes and the cross entropy of transformers' models on our kernels.

    This includes everything that `accelerate(cross_entropy=True)` replaces in torch: eager attention,
    mixture-of-experts routers, losses. A model with the loss of causal language models also gets `causal_lm_loss`.

    Args:
        model: A model from transformers, whose `loss_function` is replaced; None: only what all models share.
        override: As in `accelerate`.

    Returns:
        The `Patch`, which undoes this.

    Raises:
        TypeError: For a model that has no `loss_function`.
    """
    if model is not None and not hasattr(model, "loss_function"):
        raise TypeError(f"{type(model).__name__} has no loss_function: it is no model of transformers")
    patch = Patch()
    patch._changes.enter_context(accelerate(cross_entropy=True, override=override))
    if model is not None and getattr(model, "loss_type", None) == "ForCausalLM":
        patch._changes.callback(setattr, model, "loss_function", model.loss_function)
        model.loss_function = causal_lm_loss
    return patch


def patch_flashinfer() -> Patch:
    """Replace `flashinfer.sampling.softmax` with `sampling.softmax`, in all of FlashInfer's modules.

    Returns:
        The `Patch`, which undoes this.

    Raises:
        ImportError: Without FlashInfer, or with a version that has no `sampling.softmax`.
    """
    return _replaced("flashinfer.sampling", {"softmax": sampling.softmax})


def _scale(temperature: float) -> float:
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}: it must be above 0")
    return 1 / temperature


def _replaced(home: str, ours: dict[str, Callable[..., Any]]) -> Patch:
    """Ours for the functions of a module that have these names; the first of them must be there."""
    module, patch = import_module(home), Patch()
    if not hasattr(module, next(iter(ours))):
        raise ImportError(f"this version of {home} has no {next(iter(ours))}", name=home)
    for name, function in ours.items():
        original = getattr(module, name, function)
        _swap(home, name, original, function)
        patch._changes.callback(_swap, home, name, function, original)
    return patch


def _swap(home: str, name: str, old: object, new: object) -> None:
    """In every loaded module of the library: those that took the name from its home have it, too."""
    library = home.partition(".")[0]
    for path, module in list(sys.modules.items()):
        if path.partition(".")[0] == library and getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
