"""Results beside float64, and beside the errors that torch makes."""

from __future__ import annotations

import torch

CHUNK = 1 << 24  # elements that are compared in float64 at a time

Errors = dict[str, list[float]]


def errors(x: torch.Tensor, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor) -> Errors:
    """The largest errors of softmax over rows, [ours, torch's] of "y" and "dx", as shares of a row's largest value."""
    leaf = x.detach().requires_grad_()
    torch_y = torch.softmax(leaf, -1)
    torch_y.backward(dy)
    found = {"y": [0.0, 0.0], "dx": [0.0, 0.0]}
    step = max(1, CHUNK // max(1, x.shape[1]))
    for i in range(0, x.shape[0], step):
        rows = slice(i, i + step)
        exact_y = torch.softmax(x.detach()[rows].double(), -1)
        grad = dy[rows].double()
        exact_dx = exact_y * (grad - (grad * exact_y).sum(-1, keepdim=True))
        for name, exact, results in (
            ("y", exact_y, (y, torch_y.detach())),
            ("dx", exact_dx, (dx, leaf.grad)),
        ):
            scale = exact.abs().amax(-1, keepdim=True)
            for j, result in enumerate(results):
                error = ((result[rows].double() - exact) / scale).abs().max().item()
                # A NaN is the worst error, and max() would lose it.
                found[name][j] = float("inf") if error != error else max(found[name][j], error)
    return found


def agrees(found: Errors, dtype: torch.dtype) -> bool:
    """Whether our errors are no larger than torch's; one rounding to the output's dtype is allowed beside them."""
    rounding = torch.finfo(dtype).eps / 2
    return all(ours <= theirs + rounding for ours, theirs in found.values())
