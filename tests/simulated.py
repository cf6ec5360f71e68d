"""Launches without a GPU: each is planned for an H200 and recorded, and torch writes what its kernel would.

The formulas are written from the meaning of a launch alone, in float64, not with those that the package has.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from remembered import fresh_forms

from cute_softmax.dispatch import arguments, forms
from cute_softmax.plan import NO_PROLOGUE, NotPlanned
from cute_softmax.plan.hardware import H200
from cute_softmax.runtime import launch

INF = math.inf


class Launches(list):
    """What was launched: (math, prologue, numbers, shape, dims, dtypes). refuse: no prologue is planned."""

    refuse = False

    def run(self, name, tensors, dims, online=True, prologue=NO_PROLOGUE, numbers=(), query=None):
        if self.refuse and (prologue or name.startswith("selective")):
            raise NotPlanned("refused")
        launch.call_of(name, tensors, dims, online, prologue=prologue, query=query)
        self.append(
            SimpleNamespace(
                math=name,
                prologue=prologue,
                numbers=numbers,
                shape=tuple(tensors[0].shape),
                dims=dims,
                dtypes=tuple(t.dtype for t in tensors),
                strides=tuple(t.stride() for t in tensors),
            )
        )
        assert all(t.shape == tensors[0].shape for t in tensors)
        outputs = {"entropy": 3, "selective": 3, "selective_entropy": 4}.get(name, 1)
        results = simulated(name, list(tensors[:-outputs]), dims, prologue, list(numbers), query)
        for result, value in zip(tensors[-outputs:], results, strict=True):
            for d in range(result.dim()):  # group outputs
                if result.stride(d) == 0:
                    result, value = result.narrow(d, 0, 1), value.narrow(d, 0, 1)
            result.copy_(value)


def simulated(name, tensors, dims, prologue, numbers, query):
    """The results in float64, each of full shape."""
    scale = numbers.pop(0) if prologue.scale == "number" else 1.0
    alpha = numbers.pop(0) if prologue.alpha == "number" else 1.0
    offset = numbers.pop(0) if prologue.causal else None
    assert not numbers
    found = target = None
    if prologue.target:
        found, target = tensors.pop().double(), tensors.pop()
    if prologue.alpha == "groups":
        alpha = tensors.pop().double()
    if prologue.scale == "groups":
        scale = tensors.pop().double()
    chosen = tensors.pop() if name.startswith("selective") else None
    below = None
    if offset is not None:
        shape = tensors[0].shape
        assert query == len(shape) - 2 and dims == (len(shape) - 1,)
        below = torch.ones(shape[-2:], dtype=torch.bool).tril(offset)
    first, *others = tensors
    nothing = scale == 0 if prologue.scale == "groups" else torch.tensor(False)
    if name == "softmax_backward":
        dy, y = first.double(), others[0].double()
        d = scale * y * (dy - (dy * y).sum(dims, keepdim=True) * alpha)
        d = d.masked_fill(nothing, 0)
        return [d if below is None else d.masked_fill(~below, 0)]
    if name == "log_softmax_backward":
        dy, y = first.double(), others[0].double()
        masked = prologue.mask or prologue.causal
        dy = dy.masked_fill(y == -INF, 0) if masked else dy
        d = dy - y.exp() * dy.sum(dims, keepdim=True)
        d = d.masked_fill(y == -INF, 0) if masked else d
        d = (scale * d).masked_fill(nothing, 0)
        return [d if below is None else d.masked_fill(~below, 0)]
    x = first.double() * scale
    if prologue.bias:
        x = x + others.pop(0).double()
    if prologue.mask:
        x = x.masked_fill(~others.pop(0), -INF)
    if below is not None:
        x = x.masked_fill(~below, -INF)
    assert not others
    top = x.amax(dims, keepdim=True)
    e = (x - top.nan_to_num(neginf=0.0, posinf=INF)).exp()
    total = e.sum(dims, keepdim=True)
    lse = torch.logsumexp(x, dims, keepdim=True)
    if name == "softmax":
        y = e / (torch.where(total == 0, 1.0, total) if prologue.zero else total)
        if target is not None:
            at = torch.arange(x.shape[-1]) == target
            y = torch.where(at, torch.expm1(found), y)
        return [alpha * y]
    if name == "log_softmax":
        y = x - lse
        return [torch.where(lse == -INF, x, y) if prologue.zero else y]
    if name == "entropy" or chosen is not None:
        p, log = e / total, total.log()
        results = [top, log, -torch.where(p == 0, 0.0, p * (x - lse)).sum(dims, True)]
        if chosen is not None:
            assert dims == (x.dim() - 1,)
            results.insert(0, x.gather(-1, chosen[..., :1]) - top - log)
        return [r.expand(x.shape) for r in (results[:3] if name == "selective" else results)]
    return [
        {"logsumexp": lambda: lse, "amax": lambda: top, "sum": lambda: x.sum(dims, True)}[name]().expand(
            x.shape
        )
    ]


def install(monkeypatch) -> Launches:
    """CPU tensors of the kernels' dtypes count as CUDA ones, and launches are simulated."""
    launches = Launches()
    monkeypatch.setattr(launch, "run", launches.run)
    monkeypatch.setattr(launch, "device_facts", lambda index: H200)
    monkeypatch.setattr(launch, "function_of", lambda kernel: None)
    # Forms are made and found; what they would launch goes the way of any address and device.
    monkeypatch.setattr(forms, "launcher", lambda *form: form[-1])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -2, raising=False)
    fresh_forms(monkeypatch)
    monkeypatch.setattr(arguments, "on_gpu", lambda tensor: True)
    return launches
