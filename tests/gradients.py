"""What the tests of softmax_matmul's gradients share: the float64 oracle, torch's own result, and the bound between.

An element may be off by `FACTOR` times the largest error of torch's own gradients on the same input, in the call's
dtypes. That can be nothing by luck, or where gradients cancel: half a unit in the last place of the largest element is
always allowed, and sums of float32 may be off by `SUMS` of what they sum. The exponentials that dV is summed from are
rounded, and so is the result that delta is, and the exponentials of which that was a sum: that is worth `ROUNDED` of
these products (the root of their squares). A bias of many scores has all that of each of their gradients. Where the
oracle is NaN the result is, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from checking import FACTOR, random

INF = float("inf")
SUMS = 2.0**-20
ROUNDED = 0.75  # of the dtype's epsilon: a rounding's root mean square is about a quarter
MOST = 2.0
DEEP = 128  # columns of V, beyond which the backward keeps exponentials as it multiplies with them


class Gradients(NamedTuple):
    """Of scores, values, bias and sink."""

    scores: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None = None
    sink: torch.Tensor | None = None


@dataclass
class Call:
    """Arguments of softmax_matmul, and the gradient of its result."""

    scores: torch.Tensor
    values: torch.Tensor
    grad: torch.Tensor
    scale: float = 1.0
    causal: int | None = None
    zero: bool = False
    mask: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    lse_grad: torch.Tensor | None = None
    sink: torch.Tensor | None = None

    def whole(self, shown: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
        """What is in the sums: scores, and beside them the sink."""
        if sink is None:
            return shown
        return torch.cat([shown, sink.to(shown.dtype).expand(*shown.shape[:-1], 1)], -1)

    def shown(self, scores: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The scores that enter the softmax."""
        shown = scores * self.scale
        if bias is not None:
            shown = shown + bias
        if self.mask is not None:
            shown = shown.masked_fill(~self.mask, -INF)
        if self.causal is not None:
            beyond = torch.ones(shown.shape[-2:], dtype=torch.bool, device=shown.device)
            shown = shown.masked_fill(beyond.triu(self.causal + 1), -INF)
        return shown

    def torch(self, dtype: torch.dtype | None = None) -> tuple[Gradients, torch.Tensor, torch.Tensor]:
        """torch's gradients, result and log-sum-exps, in a dtype or in the tensors' own."""
        leaves = [
            None if t is None else t.detach().to(dtype or t.dtype).requires_grad_()
            for t in (self.scores, self.values, self.bias, self.sink)
        ]
        shown = self.whole(self.shown(leaves[0], leaves[2]), leaves[3])
        lse = torch.logsumexp(shown.detach().double(), -1)
        if self.zero:
            empty = (lse == -INF)[..., None]
            exponentials = torch.softmax(shown.masked_fill(empty, 0), -1).masked_fill(empty, 0)
        else:
            exponentials = torch.softmax(shown, -1)
        exponentials = exponentials[..., : self.scores.shape[-1]]
        result = exponentials.to(leaves[1].dtype) @ leaves[1]
        outputs, slopes = [result], [self.grad.to(result.dtype)]
        if self.lse_grad is not None:
            outputs.append(torch.logsumexp(shown, -1).expand(result.shape[:-1]))
            slopes.append(self.lse_grad.to(shown.dtype))
        torch.autograd.backward(outputs, slopes)
        return Gradients(*(None if t is None else t.grad for t in leaves)), result.detach(), lse

    def check(self, found: Gradients, factor: float = FACTOR):
        """Raise AssertionError where a gradient is further from the oracle than torch's own allows."""
        (exact, result, lse), own = self.torch(torch.float64), self.torch()[0]
        exponentials = self._exponentials(torch.float64)[0].nan_to_num(0.0)
        products = (self.grad.double() * result).nan_to_num(0.0).norm(dim=-1, keepdim=True)
        shares = (exponentials * (self.grad.double() @ self.values.double().mT)).norm(dim=-1, keepdim=True)
        delta = ROUNDED * torch.finfo(self.values.dtype).eps * products.hypot(shares)
        sums = SUMS * self.grad.double().norm(dim=-1).max() * self.values.double().norm(dim=-1).max()
        for name in Gradients._fields:
            got, right, theirs = (getattr(g, name) for g in (found, exact, own))
            if right is None:
                continue
            assert got.shape == right.shape, f"d{name} has shape {tuple(got.shape)}"
            assert torch.equal(got.isnan(), right.isnan()), f"d{name} is NaN elsewhere than the oracle"
            floor = sums + torch.finfo(got.dtype).eps / 2 * right.nan_to_num(0.0).abs().max()
            if name == "scores":
                # Of rounded exponentials where values are deep, and as many sums as values share them.
                shared = products.numel() * got.shape[-1] / got.numel()
                floor *= (1 + (self.values.shape[-1] > DEEP)) * shared**0.5
                floor += abs(self.scale) * (exponentials * delta).max()
            if name == "values":
                terms = exponentials.square().mT @ self.grad.double().square()
                floor += ROUNDED * torch.finfo(got.dtype).eps * terms.sum_to_size(got.shape).max().sqrt()
            if name == "bias":
                summed = (exponentials.numel() / self.bias.numel()) ** 0.5
                largest = exact.scores.nan_to_num(0.0).abs().max() / abs(self.scale)
                floor += summed * (torch.finfo(self.scores.dtype).eps * largest + delta.max())
            if name == "sink":  # its share of the rounding of each row's delta
                share = (self.sink.double() - lse[..., None]).exp().nan_to_num(0.0)
                floor += (share.numel() / self.sink.numel()) ** 0.5 * (share * delta).max()
            off, allowed = ((x.double() - right).nan_to_num(0.0).abs().max() for x in (got, theirs))
            assert off <= max(factor * allowed, floor), (
                f"d{name} is off by {off:.3e}, torch by {allowed:.3e} at values up to {right.abs().max():.3e}"
            )

    def check_result(self, result: torch.Tensor, lse: torch.Tensor | None = None):
        """Raise AssertionError where a result of the forward, or its log-sum-exps, are too far from the oracle.

        The root mean square of its errors may be `FACTOR` times that of torch's softmax and product in float32, rounded
        to the same dtype, and what rounding the exponentials to that dtype adds; no error may exceed `MOST` units,
        which are what the exponentials and the sizes of the values add up to.
        """
        values, eps = self.values.double(), torch.finfo(self.values.dtype).eps
        exponentials, right_lse = self._exponentials(torch.float64)
        right, unit = exponentials @ values, exponentials @ values.abs()
        assert result.shape == right.shape and result.dtype == self.values.dtype
        assert torch.equal(result.isnan(), right.isnan()), "NaN elsewhere than in the oracle"
        own = (self._exponentials(torch.float32)[0] @ self.values.float()).to(result.dtype)
        rounding = eps / 4 * (exponentials.square() @ values.square()).sqrt()
        error = (result.double() - right).nan_to_num(0.0)
        off, allowed, rounding = (
            x.double().nan_to_num(0.0).square().mean().sqrt() for x in (error, own - right, rounding)
        )
        allowed = FACTOR * allowed + (1 + 4 / result.numel() ** 0.5) * rounding
        assert off <= allowed, f"off by {off:.3e}, {allowed:.3e} is allowed"
        over = (error.abs() / (MOST * eps * unit.nan_to_num(0.0) + 1e-7)).max()
        assert over <= 1, f"an element is off by {over * MOST:.3g} of its units"
        if lse is not None:
            right_lse = right_lse.expand(right.shape[:-1])
            assert lse.shape == right_lse.shape and lse.dtype == torch.float32
            # Of a row with +inf in it, which is NaN, either is right.
            same = (lse == right_lse) | (lse.isnan() & (right_lse.isnan() | (right_lse == INF)))
            gap = (lse.double() - right_lse).abs()
            wrong = ~same & ~(gap <= 1e-5 + 2.0**-18 * right_lse.abs())
            assert not wrong.any(), f"{int(wrong.sum())} log-sum-exps are wrong, by {gap[wrong][:3].tolist()}"

    def _exponentials(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The softmax and its log-sum-exps, computed in a dtype."""
        shown = self.shown(self.scores.to(dtype), None if self.bias is None else self.bias.to(dtype))
        whole = self.whole(shown, self.sink)
        lse, exponentials = torch.logsumexp(whole, -1), torch.softmax(whole, -1)[..., : shown.shape[-1]]
        return exponentials.masked_fill((lse == -INF)[..., None], 0.0) if self.zero else exponentials, lse

    def mutants(self) -> Iterator[tuple[str, Gradients]]:
        """Wrong gradients, each as some broken kernel would give it."""
        right, result, lse = self.torch(torch.float64)
        exponentials = (self.shown(self.scores.double(), self.bias) - lse[..., None]).exp()
        grad, values = self.grad.double(), self.values.double()
        slopes = grad @ values.mT
        delta = (grad * result).sum(-1, keepdim=True)

        def gradients(exponentials, slopes, delta, later=None) -> Gradients:
            dscores = exponentials * (slopes - delta) * self.scale
            dvalues = (exponentials if later is None else later).mT @ grad
            return Gradients(dscores.to(self.scores.dtype), dvalues.to(self.values.dtype))

        yield "zeros", Gradients(*(torch.zeros_like(t) for t in (self.scores, self.values)))
        yield "no delta", gradients(exponentials, slopes, 0.0)
        yield "delta of the next row", gradients(exponentials, slopes, delta.roll(1, -2))
        yield (
            "log-sum-exp of the next row",
            gradients(
                (self.shown(self.scores.double(), self.bias) - lse.roll(1, -1)[..., None]).exp(),
                slopes,
                delta,
            ),
        )
        yield "no scale", Gradients(right.scores / self.scale, right.values)
        step = exponentials.clone()
        step[..., 64:128, :] = 0
        yield "a step missing from dV", gradients(exponentials, slopes, delta, step)
        tile = right.scores.clone()
        tile[..., 64:128, 64:128] = 0
        yield "a tile of dS not written", Gradients(tile, right.values)
        yield "columns of V missing", gradients(exponentials, grad[..., :-16] @ values[..., :-16].mT, delta)
        yield (
            "columns exchanged within 8",
            Gradients(right.scores.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), right.values),
        )


def call(
    batch: tuple[int, ...],
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype = torch.bfloat16,
    *,
    owners: tuple[int, ...] | None = None,
    scores: torch.dtype | None = None,
    mask: tuple[int, ...] | None = None,
    bias: tuple[int, ...] | None = None,
    sink: tuple[int, ...] | None = None,
    device: str | None = None,
    **options,
) -> Call:
    """A random call. owners: the batch of values; mask, bias, sink: their shapes; scores: their dtype."""
    scores = scores or dtype
    make = {"device": device}
    hidden = None if mask is None else random(mask, torch.float32, 4, **make) < 0.5
    return Call(
        random((*batch, rows, columns), scores, 1, 2.0, **make),
        random((*(batch if owners is None else owners), columns, depth), dtype, 2, **make),
        random((*batch, rows, depth), dtype, 3, **make),
        mask=hidden,
        bias=None if bias is None else random(bias, scores, 5, **make),
        # As large as a row's sum.
        sink=None if sink is None else random(sink, scores, 7, **make) + math.log(columns),
        **options,
    )
