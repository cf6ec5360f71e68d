"""Launches without a GPU: each is planned for an H200 and recorded, and torch writes what its kernel would.

All that comes before a launch is what a GPU has: forms, plans, and the addresses and numbers that a compiled function
gets, from which its operands are found in memory. The formulas are written from the meaning of a launch alone, in
float64, not with those that the package has.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from types import SimpleNamespace

import shards
import torch
from remembered import fresh_forms

from cute_softmax.dispatch.common import arguments, forms
from cute_softmax.dispatch.heads import largest, loss
from cute_softmax.dispatch.matmul import backward, kernels
from cute_softmax.dispatch.sharded import kernels as of_shards
from cute_softmax.dispatch.topk import kernels as topk
from cute_softmax.plan import facts_of
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.problem import ALIGNMENT, ITEM_SIZE, Operand
from cute_softmax.plan.prologue import OF_RANKS, OF_SLICES
from cute_softmax.runtime import launch, private, record

INF = math.inf
_PLANNED = launch._call.__wrapped__
_PRODUCT = kernels._call.__wrapped__
_AROUND_LOSSES = loss._calls.__wrapped__
_CHOICE = topk._call.__wrapped__
_SHARDS = of_shards._call.__wrapped__
_LARGEST = largest._call.__wrapped__


class Launches(list):
    """What was launched: (math, prologue, numbers, shape, dims, dtypes, strides, invariant). refuse: what only the row
    movement has is not planned, as of rows that it cannot hold."""

    refuse = False

    def call(self, name, device, shape, dims, operands, online, prologue, query, in_place, invariant):
        """`launch._call`, whose function computes from memory what the kernel would."""
        if self.refuse and (prologue.of_rows or name.startswith("selective")):
            return "refused"
        found = _PLANNED(name, device, shape, dims, operands, online, prologue, query, in_place, invariant)
        if isinstance(found, str):
            return found
        laid = dict(zip(found.plan.laid_out, found.plan.laid_strides, strict=True))
        operands = [Operand(o.dtype, laid[i]) if i in laid else o for i, o in enumerate(operands)]

        def function(stream, *arguments):
            tensors = []
            for place, operand in zip(found.places, operands, strict=True):
                # What a group has one of is read and written alone.
                full = any(shape[d] > 1 and operand.strides[d] for d in dims if shape)
                unit = ALIGNMENT if full else ITEM_SIZE[operand.dtype]
                assert (arguments[place] - operand.address) % unit == 0, "planned for another alignment"
                tensors.append(at(arguments[place], shape, operand))
            numbers = [
                arguments[place] if as_int is int else float_of(arguments[place])
                for place, as_int in found.numbers
            ]
            self.launched(name, tensors, dims, prologue, numbers, query, invariant)

        found.function = function
        return found

    def launched(self, name, tensors, dims, prologue, numbers, query, invariant=False):
        self.append(
            SimpleNamespace(
                math=name,
                prologue=prologue,
                numbers=tuple(numbers),
                shape=tuple(tensors[0].shape),
                dims=dims,
                dtypes=tuple(t.dtype for t in tensors),
                strides=tuple(t.stride() for t in tensors),
                invariant=invariant,
            )
        )
        outputs = {"entropy": 3, "selective": 3 + prologue.even, "selective_entropy": 4}.get(name, 1)
        outputs = (
            outputs
            + (prologue.sink and name != "logsumexp")
            + (prologue.target == "loss" and name == "softmax")
        )
        outputs = len(facts_of(name, True, prologue).group_outputs) if prologue.state else outputs
        results = simulated(name, list(tensors[:-outputs]), dims, prologue, list(numbers), query)
        for result, value in zip(tensors[-outputs:], results, strict=True):
            for d in range(result.dim()):  # group outputs
                if result.stride(d) == 0:
                    result, value = result.narrow(d, 0, 1), value.narrow(d, 0, 1)
            result.copy_(value)

    def around_losses(self, device, plan_of, *arguments):
        """`loss._calls`, likewise."""
        every = _AROUND_LOSSES(device, plan_of, *arguments)
        for found in every:
            found.function = self.around(found, arguments)
        return every

    def around(self, found, arguments):
        plan = found.plan

        def launched(stream, *given):
            self.append(SimpleNamespace(math=plan.kernel.math))
            addresses = [given[place] for place in found.places]
            if plan.kernel.movement == "rescale":
                self.rescaled(*arguments, *addresses)
            else:
                self.added_up(plan, dict(zip(plan.kernel.operands, addresses, strict=True)))

        return launched

    def rescaled(self, shape, operands, address, factor):
        number = at(factor, *dense((1,), operands[1].dtype)).float()
        if number != 1:
            at(address, shape, operands[0]).mul_(number)

    def added_up(self, plan, addresses):
        kernel, n, sums = plan.kernel, plan.elements, []
        for name in kernel.sources:
            targets = name == "targets" and not kernel.counted
            x = at(addresses[name], *dense((n,), "int64" if targets else "fp32"))
            x = torch.cat(
                [(x != plan.ignore).double() if targets else x.double(), torch.zeros(-n % plan.ctas)]
            )
            sums.append(x.view(plan.ctas, -1).sum(1))
        if kernel.sliced:
            at(addresses["sums"], *dense((len(sums), plan.ctas), "fp32")).copy_(torch.stack(sums))
            return
        number = torch.tensor(plan.number).to(torch.int32).view(torch.float32).double()
        factor = at(addresses["factor"], *dense((1,), "fp32")).double() if kernel.shared else 1
        found = {
            "share": lambda: torch.cat([number / sums[0], 1 / sums[0]]),
            "total": lambda: sums[0] * factor,
            "mean": lambda: sums[0] / sums[-1],
        }[kernel.math]()
        at(addresses["result"], *dense((len(found),), kernel.dtypes[1])).copy_(found)
        if kernel.math == "mean":
            at(addresses["share"], *dense((1,), "fp32")).copy_(1 / sums[1])

    def of_shards(self, device, plan_of, *arguments):
        """`dispatch.sharded.kernels._call`, likewise."""
        found = _SHARDS(device, plan_of, *arguments)

        def launched(stream, *given):
            self.append(SimpleNamespace(math=found.plan.kernel.math, kernel=found.plan.kernel))
            addresses = dict(zip(found.plan.kernel.operands, (given[p] for p in found.places), strict=True))
            (shards.merged if found.plan.kernel.movement == "merge" else shards.finished)(
                found.plan, addresses, *arguments
            )

        found.function = launched
        return found

    def product(self, device, shape, depth, operands, spec, lse, stats, instruction):
        """`matmul._call`, likewise."""
        found = _PRODUCT(device, shape, depth, operands, spec, lse, stats, instruction)
        _, values, mask, bias, sink = operands
        given = zip((shape, (*shape[:-2], shape[-1], depth), *[shape] * 3), operands, strict=True)
        given = [(s, o) for s, o in given if o is not None]
        results = [dense((*shape[:-1], depth), values.dtype)] + [dense(shape[:-1], "fp32")] * lse

        def function(stream, *arguments):
            addresses = [arguments[place] for place in found.places]
            tensors = [at(a, s, o) for a, (s, o) in zip(addresses, given + results, strict=False)]
            known = at(addresses[-1], *dense(shape[:-1], "fp32")) if stats else None
            self.append(
                SimpleNamespace(math="softmax_matmul", stats=stats, lse=lse, invariant=spec.invariant)
            )
            x, v, *extra = tensors[: len(tensors) - len(results)]
            sinks = [] if sink is None else [extra.pop()[..., :1].double()]
            x = scores_of(x, extra, mask, bias, spec.factor, spec.causal)
            sums = torch.logsumexp(torch.cat([x, *sinks], -1), -1) if known is None else known.double()
            p = torch.exp(x - (sums.nan_to_num(neginf=0.0) if spec.zero else sums).unsqueeze(-1))
            for result, value in zip(tensors[-len(results) :], (p @ v.double(), sums), strict=False):
                result.copy_(value)

        found.function = function
        return found

    def choice(self, device, rows, columns, k, source, grad, result, index, renormalize, invariant):
        """`dispatch.topk.kernels._call`, likewise."""
        found = _CHOICE(device, rows, columns, k, source, grad, result, index, renormalize, invariant)
        c, few = found.plan.kernel, (rows, k)
        if found.plan.laid_out:
            _, source = dense((rows, columns), source.dtype)

        def function(stream, *arguments):
            addresses = [arguments[place] for place in found.places]
            self.append(
                SimpleNamespace(math=c.math, index=index, dtypes=c.dtypes, invariant=found.plan.invariant)
            )
            if grad is None:
                given = ((rows, columns), source), dense(few, result), dense(few, index)
                self.begins_with_vectors(c, addresses[0], rows, source)
                x, values, indices = (at(a, *g) for a, g in zip(addresses, given, strict=True))
                order = torch.sort(x.double(), dim=-1, descending=True, stable=True).indices[:, :k]
                of = x.double().gather(-1, order) if renormalize else x.double()
                p = torch.softmax(of, -1)
                values.copy_(p if renormalize else p.gather(-1, order))
                indices.copy_(order)
                return
            read = (few if renormalize else (rows, columns)), source
            given = read, (few, grad), dense(few, index), dense((rows, columns), result)
            if not renormalize:
                self.begins_with_vectors(c, addresses[0], rows, source)
            x, dy, indices, dx = (at(a, *g) for a, g in zip(addresses, given, strict=True))
            p = x.double() if renormalize else torch.softmax(x.double(), -1).gather(-1, indices.long())
            dot = (p * dy.double()).sum(-1, keepdim=True)
            zeros = torch.zeros(dx.shape, dtype=torch.float64)
            others = zeros if renormalize else -dot * torch.softmax(x.double(), -1)
            dx.copy_(others.scatter_add(-1, indices.long(), p * (dy.double() - dot * renormalize)))

        found.function = function
        return found

    def largest(self, device, rows, columns, k, operand, result, index_stride, scaled, invariant):
        """`dispatch.heads.largest._call`, likewise."""
        found = _LARGEST(device, rows, columns, k, operand, result, index_stride, scaled, invariant)
        names = found.plan.kernel.operands
        if found.plan.laid_out:
            _, operand = dense((rows, columns), operand.dtype)

        def function(stream, *arguments):
            self.append(
                SimpleNamespace(math="topk_log_softmax", kernel=found.plan.kernel, invariant=invariant)
            )
            addresses = {n: arguments[place] for n, place in zip(names, found.places, strict=True)}
            x = at(addresses["x"], (rows, columns), operand).double()
            scale = float_of(arguments[found.numbers[0][0]]) if scaled else 1.0
            log_p, top = torch.log_softmax(x * scale, -1), (x * scale).amax(-1)
            results = {"max": top, "log": torch.logsumexp(x * scale, -1) - top}
            if k:
                order = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :k]
                results |= {"values": log_p.gather(-1, order), "indices": order}
            if index_stride is not None:
                index = at(addresses["index"], (rows, 1), Operand("int64", (index_stride, 0)))
                results |= {"found": log_p.gather(-1, index), "ranks": (x > x.gather(-1, index)).sum(-1)}
            assert {*results} == {*names} - {"x", "index"}
            dtypes = {"values": result, "found": result, "indices": "int64", "ranks": "int64"}
            for name, value in results.items():
                shape = (rows, k) if name in ("values", "indices") else (rows, 1)
                dtype = dtypes.get(name, "fp32")
                at(addresses[name], *dense(shape, dtype)).copy_(value.view(shape))

        found.function = function
        return found

    @staticmethod
    def begins_with_vectors(c, address, rows, source):
        """All rows begin at multiples of the accesses that a class of the `topk` movement makes to them."""
        starts = address, (rows > 1) * source.strides[0] * ITEM_SIZE[source.dtype]
        assert not any(start % (c.vector * ITEM_SIZE[source.dtype]) for start in starts)

    def gradients(self, *form):
        """`matmul_backward._bound`, likewise: the first launch leaves what it reads to the second."""
        made = backward.bound(backward.planned(*form))
        _, shape, shared, depth, operands, causal, scale, factor, zero, *invariant = form
        operands, left = dict(operands), {}
        shapes = dict.fromkeys(("scores", "dscores", "mask", "bias"), shape)
        shapes |= dict.fromkeys(("lse", "lse_grad", "sink", "sink_grad"), shape[:-1])
        shapes |= dict.fromkeys(("output", "grad"), (*shape[:-1], depth))
        values = [1 if s else n for s, n in zip(shared, shape, strict=False)]
        shapes |= dict.fromkeys(("values", "dvalues"), (*values, shape[-1], depth))

        def tensors(call, arguments):
            """Those of the problem; of dvalues, which may be that of parts, the address."""
            addresses = {
                n: arguments[place] for n, place in zip(call.plan.operands, call.places, strict=True)
            }
            found = {n: at(a, shapes[n], operands[n]) for n, a in addresses.items() if n in operands}
            return found | {n: a for n, a in addresses.items() if n == "dvalues"}

        def first(stream, *arguments):
            left.update(tensors(made.first, arguments))

        def second(stream, *arguments):
            t = left | tensors(made.second, arguments)
            self.append(SimpleNamespace(math="softmax_matmul_backward", invariant=invariant == [True]))
            extra = [t[n] for n in ("mask", "bias") if n in t]
            x = scores_of(t["scores"], extra, *(operands.get(n) for n in ("mask", "bias")), scale, causal)
            p = torch.exp(x - t["lse"].double().nan_to_num(neginf=0.0).unsqueeze(-1))
            p = p if zero else p.masked_fill(t["lse"].isneginf().unsqueeze(-1), torch.nan)
            grad = t["grad"].double()
            delta = (grad * t["output"].double()).sum(-1, keepdim=True)
            if "lse_grad" in t:
                delta = delta - t["lse_grad"].double().unsqueeze(-1)
            inner = p * (grad @ t["values"].double().mT - delta)
            if "sink" in t:
                log = (t["sink"].double() - t["lse"].double()).unsqueeze(-1)
                log = log.masked_fill(t["sink"].isneginf().unsqueeze(-1), -INF)
                t["sink_grad"].copy_(of_sink(log, delta)[0].squeeze(-1))
            t["dscores"].copy_(factor * inner.masked_fill(x == -INF, 0))
            parts = made.plan.splits
            target = "fp32" if parts > 1 else operands["values"].dtype
            to = at(t["dvalues"], *dense((parts, *shapes["dvalues"]), target)).zero_()
            to[0].copy_((p.mT @ grad).sum_to_size(shapes["dvalues"]))

        made.first.function, made.second.function = first, second
        return made


def scores_of(x, extra, mask, bias, scale, causal):
    """The scores of a product in float64; extra: its mask and its bias, those that there are."""
    x, extra = x.double() * scale, list(extra)
    counts = extra.pop(0) if mask is not None else None
    x = x + extra.pop(0) if bias is not None else x
    x = x if counts is None else x.masked_fill(~counts, -INF)
    below = torch.ones(x.shape[-2:], dtype=torch.bool).tril(x.shape[-1] if causal is None else causal)
    return x.masked_fill(~below, -INF)


def dense(shape: Sequence[int], dtype: str) -> tuple[Sequence[int], Operand]:
    """The shape and the operand of a contiguous tensor."""
    return shape, Operand(dtype, torch.empty(shape, device="meta").stride())


def at(address: int, shape: Sequence[int], operand: Operand) -> torch.Tensor:
    """The tensor of a launch's operand at an address."""
    others = {"bool": torch.bool, "int32": torch.int32, "int64": torch.int64}
    dtype = {**launch.TORCH_DTYPES, **others}[operand.dtype]
    count = 1 + sum((n - 1) * stride for n, stride in zip(shape, operand.strides, strict=True))
    memory = (ctypes.c_byte * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, operand.strides)


def float_of(bits: int) -> float:
    """The number that `launch.float_bits` gave the bits of."""
    return struct.unpack("<f", struct.pack("<I", bits))[0]


def simulated(name, tensors, dims, prologue, numbers, query):
    """The results in float64, each of full shape; of rows that ranks share those of one rank, which has all of them."""
    if prologue.ranks:
        named = dict(zip(prologue.numbers, numbers, strict=True))
        assert (named["ranks"], named["rank"], named.get("start", 0)) == (1, 0, 0)
        numbers = [n for key, n in named.items() if key not in (*OF_RANKS, *OF_SLICES)]
    start = numbers.pop() if prologue.state == "chosen" else 0
    scale = numbers.pop(0) if prologue.scale == "number" else 1.0
    cap = numbers.pop(0) if prologue.softcap else None
    alpha = numbers.pop(0) if prologue.alpha == "number" else 1.0
    factor = numbers.pop(0) if prologue.factor else 1.0
    offset = numbers.pop(0) if prologue.causal else None
    ignored = numbers.pop(0) if prologue.target == "loss" else None
    squares = numbers.pop(0) if prologue.squares else 0.0
    smoothing = numbers.pop(0) if prologue.even and prologue.target == "loss" else 0.0
    assert not numbers
    if prologue.against:
        return [divergence_of(tensors, dims, prologue.against, scale)]
    sink = tensors.pop().double() if prologue.sink else None
    even = tensors.pop().double() if prologue.even and prologue.target == "found" else 0.0
    found = target = None
    of_entropy, down = (tensors.pop().double(), tensors.pop().double()) if prologue.entropy else (0.0, 0.0)
    more = tensors.pop().double() if prologue.more else 0.0
    alpha = 0.0 if prologue.entropy else alpha
    if prologue.target == "found":
        found = tensors.pop().double()
    if prologue.target:
        target = tensors.pop()
    if prologue.alpha == "groups":
        alpha = tensors.pop().double()
    if prologue.factor:
        alpha, more, down, even = (t * factor for t in (alpha, more, down, even))
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
        dot = (dy * y).sum(dims, keepdim=True)
        if prologue.state:
            return [dot.expand(dy.shape)]
        d = (scale * y * (dy - dot * alpha)).masked_fill(nothing, 0)
        return [d if below is None else d.masked_fill(~below, 0), *of_sink(sink, dot)]
    if name == "log_softmax_backward":
        dy, y = first.double(), others[0].double()
        masked = prologue.mask or prologue.causal
        dy = dy.masked_fill(y == -INF, 0) if masked else dy
        dot = dy.sum(dims, keepdim=True)
        d = dy - y.exp() * dot
        d = d.masked_fill(y == -INF, 0) if masked else d
        d = (scale * d).masked_fill(nothing, 0)
        return [d if below is None else d.masked_fill(~below, 0), *of_sink(sink, dot)]
    x = first.double() * scale
    x = x if cap is None else cap * torch.tanh(x / cap)
    slope = 1.0 if cap is None else 1 - (x / cap) ** 2
    if prologue.bias:
        x = x + others.pop(0).double()
    if prologue.mask:
        x = x.masked_fill(~others.pop(0), -INF)
    if below is not None:
        x = x.masked_fill(~below, -INF)
    assert not others
    if prologue.state:
        return shards.state_of(x, dims, chosen, start, name, prologue.even)
    top = x.amax(dims, keepdim=True) if sink is None else torch.maximum(x, sink).amax(dims, keepdim=True)
    e = (x - top.nan_to_num(neginf=0.0, posinf=INF)).exp()
    total = e.sum(dims, keepdim=True)
    if sink is not None:
        first = sink.amax(dims, keepdim=True)  # which is the same for all elements
        total = total + (first - top.nan_to_num(neginf=0.0, posinf=INF)).exp()
    lse = torch.where(top.isinf(), top, top + total.log())  # not by an operator that `accelerate` replaces
    log = [] if sink is None else [torch.where(sink == -INF, sink, sink - lse)]
    if name == "logsumexp" and prologue.target == "loss":
        return loss_and_gradient(x, e / total, lse, target, ignored, squares, smoothing, 0.0, slope)[1:]
    if name == "softmax":
        y = e / (torch.where(total == 0, 1.0, total) if prologue.zero else total)
        if prologue.target == "loss":
            return loss_and_gradient(x, y, lse, target, ignored, squares, smoothing, alpha, slope)
        if target is not None:
            at = torch.arange(x.shape[-1]) == target
            d = alpha * torch.where(at, torch.expm1(found), y) + torch.where(at, more, 0.0)
            x = torch.where(at, found + lse, x)
        else:
            d = alpha * y
        d = d + down * y * (torch.where(y == 0, 0.0, x - lse) + of_entropy) if prologue.entropy else d
        # `more` has the part of `even` in it.
        return [(d + (even if target is None else torch.where(at, 0.0, even))) * slope, *log]
    if name == "log_softmax":
        y = x - lse
        return [torch.where(lse == -INF, x, y) if prologue.zero else y, *log]
    if name == "entropy" or chosen is not None:
        p, log = e / total, total.log()
        entropies = -torch.where(p == 0, 0.0, p * (x - lse)).sum(dims, True)
        results = [top, log, (x - lse).mean(dims, True) if prologue.even else entropies]
        if chosen is not None:
            assert dims == (x.dim() - 1,)
            results.insert(0, x.gather(-1, chosen[..., :1]) - top - log)
        count = 3 if name == "selective" and not prologue.even else 4
        return [r.expand(x.shape) for r in results[:count]]
    return [
        {"logsumexp": lambda: lse, "amax": lambda: top, "sum": lambda: x.sum(dims, True)}[name]().expand(
            x.shape
        )
    ]


def of_sink(log, dot):
    """The gradients of sinks whose logarithms in the softmax these are, likewise; none where there is no sink."""
    return [] if log is None else [torch.where(log == -INF, 0.0, -log.exp() * dot)]


def divergence_of(tensors, dims, against, scale):
    """The divergence of the softmax of the second tensor from that of the first; or its gradient in one of them, times
    the third, by the divergence as the last."""
    if against == "weights":
        x, w = tensors[0].double() * scale, tensors[1].double()
        q = x - x.amax(dims, keepdim=True)
        q = q - q.exp().sum(dims, keepdim=True).log()
        if len(tensors) == 2:
            return -(w * q).sum(dims, keepdim=True).expand(w.shape)
        return tensors[2].double() * (q.exp() * w.sum(dims, keepdim=True) - w)
    q, p = (t.double() * scale for t in tensors[:2])
    q, p = (torch.log(torch.exp(t - t.amax(dims, keepdim=True))) for t in (q, p))
    q, p = (t - t.exp().sum(dims, keepdim=True).log() for t in (q, p))
    terms = torch.where(p.exp() == 0, 0.0, p.exp() * (p - q))
    if against == "loss":
        return terms.sum(dims, keepdim=True).expand(p.shape)
    alpha = tensors[2].double()
    return alpha * (q.exp() - p.exp() if against == "input" else terms - p.exp() * tensors[3].double())


def loss_and_gradient(x, y, lse, target, ignored, squares, smoothing, alpha, slope):
    """The gradients of the rows' losses in the elements times alpha, and the losses."""
    counts = target != ignored
    index = torch.where(counts, target, 0)[..., :1]
    loss = lse - (1 - smoothing) * x.gather(-1, index) + squares * lse.square()
    loss = loss - smoothing * x.mean(-1, keepdim=True) if smoothing else loss
    at = (torch.arange(x.shape[-1]) == index).double()
    d = y * (1 + 2 * squares * lse) - (1 - smoothing) * at - smoothing / x.shape[-1]
    results = torch.where(counts, alpha * slope * d, 0.0), torch.where(counts, loss, 0.0)
    return [r.expand(x.shape) for r in results]


def install(monkeypatch, launches: Launches | None = None) -> Launches:
    """CPU tensors of the kernels' dtypes count as CUDA ones, and launches are simulated."""
    launches = Launches() if launches is None else launches
    monkeypatch.setattr(launch, "_call", launches.call)
    monkeypatch.setattr(kernels, "_call", launches.product)
    monkeypatch.setattr(backward, "_bound", launches.gradients)
    monkeypatch.setattr(loss, "_calls", launches.around_losses)
    monkeypatch.setattr(topk, "_call", launches.choice)
    monkeypatch.setattr(largest, "_call", launches.largest)
    monkeypatch.setattr(of_shards, "_call", launches.of_shards)
    monkeypatch.setattr(launch, "device_facts", lambda index, shipped_only=False: H200)
    monkeypatch.setattr(launch, "function_of", record.note)  # which returns nothing
    for name, value in (("device", -1), ("stream", 7)):  # of CPU tensors
        monkeypatch.setattr(private, f"current_{name}", lambda *_, value=value: value)
    monkeypatch.setattr(
        forms,
        "empty_strided",
        lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype),
    )
    fresh_forms(monkeypatch)
    monkeypatch.setattr(arguments, "on_gpu", lambda tensor: True)
    return launches
