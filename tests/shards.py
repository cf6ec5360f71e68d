"""What the kernels of shared rows compute, in float64, from the meaning of a launch alone; see `simulated`."""

from __future__ import annotations

import math
from collections.abc import Mapping

import simulated
import torch

INF = math.inf


def read(address: int, shape, dtype: str) -> torch.Tensor:
    return simulated.at(address, *simulated.dense(shape, dtype))


def state_of(x, dims, chosen, start, name, even):
    """The numbers of the state of a part of each row, of full shape; x: the scores."""
    top = x.amax(dims, keepdim=True)
    apart = x - top.clamp(min=-3.4028234663852886e38)
    e = apart.exp()
    found = [top, e.sum(dims, keepdim=True)]
    if name.endswith("entropy"):
        found.append(torch.where(e == 0, 0.0, e * apart).sum(dims, keepdim=True))
    if chosen is not None:
        index = chosen[..., :1] - start
        here = (index >= 0) & (index < x.shape[-1])
        found.append(torch.where(here, x.gather(-1, torch.where(here, index, 0)), -INF))
    if even:
        found += [apart.sum(dims, keepdim=True), torch.full_like(top, x.shape[-1])]
    return [t.expand(x.shape) for t in found]


def merged(plan, addresses: Mapping[str, int], math_name, dtype, beside, results, numbers):
    """The merge of the states of all parts, each read where the kernel would read it."""
    rows, ranks, blocks = plan.rows, plan.ranks, plan.blocks
    every = read(addresses["states"], (ranks, plan.kernel.numbers, blocks, rows), "fp32").double()
    parts = list(every.permute(1, 2, 0, 3).flatten(1, 2))
    if math_name == "sum":
        read(addresses["whole"], (rows,), "fp32").copy_(parts[0].sum(0))
        return
    tops, sums, *more = parts
    top = tops.amax(0)
    ratio = torch.where(tops == -INF, 0.0, (tops - top).exp())
    ratio = torch.where(tops.isnan() | (tops == INF), torch.nan, ratio)
    total = (sums * ratio).sum(0)
    lse = torch.where(top == INF, top, top + total.log())
    found, kept = {"lse": lse}, [top, total]
    if "weighted" in beside:
        moved = more.pop(0) + torch.where(sums == 0, 0.0, sums * (tops - top))
        found["entropy"] = total.log() - (torch.where(ratio == 0, 0.0, ratio * moved)).sum(0) / total
        kept.append(found["entropy"])
    index = read(addresses["index"], (rows,), "int64") if "chosen" in beside else None
    if index is not None:
        found["found"] = more.pop(0).amax(0) - top - total.log()
    if "even" in beside:
        fallen, count = more
        fallen = fallen + torch.where(count == 0, 0.0, count * (tops - top))
        found["even"] = fallen.sum(0) / count.sum(0) - total.log()
    read(addresses["whole"], (len(kept), rows), "fp32").copy_(torch.stack(kept))
    if "loss" in results:
        smoothing, squares = (simulated.float_of(bits) for bits in (plan.smoothing, plan.squares))
        loss = -found["found"]
        loss = (1 - smoothing) * loss - smoothing * found["even"] if plan.kernel.even else loss
        loss = loss + squares * lse.square() if plan.kernel.squares else loss
        found["loss"] = torch.where(index == plan.ignore, 0.0, loss)
    for name in results:
        read(addresses[name], (rows,), dtype).copy_(found[name])


def finished(
    plan, addresses: Mapping[str, int], math_name, shape, operands, flags, upstream, dtype, steps, numbers
):
    """What a slice becomes."""
    k, rows = plan.kernel, shape[0]
    names = ("dy", "y", "dx") if k.inputs == 2 else ("x", "y")
    full = [simulated.at(addresses[n], shape, o) for n, o in zip(names, operands, strict=True)]
    scale, smoothing, squares = (simulated.float_of(b) for b in (plan.scale, plan.smoothing, plan.squares))
    assert (scale != 1) is k.scaled
    *inputs, output = full
    x, *others = (t.double() for t in inputs)
    if k.inputs == 2:
        total = read(addresses["whole"], (rows, 1), "fp32").double()
        found = (x - total) * others[0] if k.math == "softmax_backward" else x - others[0].exp() * total
        output.copy_(found * scale)
        return
    whole = read(addresses["whole"], (2 + ("entropy" in upstream), rows, 1), "fp32").double()
    top, total, *entropy = whole
    x = x * scale
    log = x - top - total.log()
    if k.math != "gradient":
        output.copy_(log if k.math == "log_softmax" else log.exp())
        return
    zero = torch.zeros_like(top)
    g = dict.fromkeys(("found", "lse", "entropy", "even"), zero)
    for name, step in zip(upstream, steps, strict=True):
        g[name] = simulated.at(addresses[name], (rows, 1), simulated.Operand(dtype, (step, 1))).double()
    at = torch.zeros_like(x, dtype=torch.bool)
    if k.chosen:
        index = read(addresses["index"], (rows, 1), "int64")
        if "loss" in upstream:
            share = read(addresses["share"], (1,), "fp32").double() if k.shared else 1.0
            of_loss = torch.where(index == plan.ignore, 0.0, g["loss"] * share)
            smoothing, squares = smoothing * k.smoothed, squares * k.squares
            g["found"], g["even"] = -(1 - smoothing) * of_loss, -smoothing * of_loss
            g["lse"] = g["lse"] + 2 * squares * (top + total.log()) * of_loss
        at = torch.arange(shape[1]) == index - plan.start
    p = log.exp()
    d = p * (g["lse"] - g["found"] - g["even"]) + torch.where(at, g["found"], 0.0)
    if entropy:
        d = d - torch.where(p == 0, 0.0, p * (log + entropy[0])) * g["entropy"]
    output.copy_((d + g["even"] / max(plan.length, 1)) * scale)
