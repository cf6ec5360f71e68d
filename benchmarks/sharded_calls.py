"""What the suite of shared rows calls: a slice of random rows, each operation by each provider, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import cute_softmax

if TYPE_CHECKING:
    from .sharded import Ranks

Tensor = torch.Tensor
# Its name from torch 2.13 on, where the other is deprecated.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
DTYPE = torch.bfloat16
CHUNK = 512  # rows that are worked on in float64 at a time
SEEN = 32  # rows of matrices that are compared
ROTATED = 8
IGNORED = -100
# Of results in bfloat16, and of losses in it.
TOLERANCE = 2.0**-6


class Slices:
    """A rank's slice of random rows, targets anywhere in the rows, and numbers of whole rows in float64.

    shape: of whole rows. among: how many ranks share them, as many as there are if None.
    """

    count = ROTATED  # inputs that graphs rotate over, made when they are needed

    def __init__(self, shape: tuple[int, int], ranks: Ranks, among: int | None = None):
        self.shape, self.ranks = shape, ranks
        among = among or ranks.count
        self.rows, self.columns = shape[0], shape[1] // among
        self.start = ranks.rank * self.columns
        self.group = dist.group.WORLD
        self._made: dict[int, Tensor] = {}
        generator = torch.Generator(ranks.device).manual_seed(7)
        self.target = torch.randint(shape[1], (self.rows,), device=ranks.device, generator=generator)
        self.target[::97] = IGNORED
        self.chosen = torch.where(self.target == IGNORED, 0, self.target)
        self.local_target = self.chosen % self.columns
        self._right: dict[str, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Of a slice."""
        return self.rows * self.columns * DTYPE.itemsize

    def x(self, i: int = 0) -> Tensor:
        """Input i."""
        if i not in self._made:
            generator = torch.Generator(self.ranks.device).manual_seed(100 * i + self.ranks.rank)
            x = torch.empty((self.rows, self.columns), device=self.ranks.device, dtype=DTYPE)
            self._made[i] = x.normal_(0, 3, generator=generator)
        return self._made[i]

    def leaf(self, i: int = 0) -> Tensor:
        return self.x(i).detach().requires_grad_()

    def right(self) -> dict[str, Tensor]:
        """lse, found, entropy of all rows, (rows) in float64."""
        if self._right:
            return self._right
        tops, sums, weighted = [], [], []
        for part in self.x().split(CHUNK):
            s = part.double()
            top = s.amax(-1, keepdim=True)
            e = (s - top).exp()
            tops.append(top[:, 0])
            sums.append(e.sum(-1))
            weighted.append((e * s).sum(-1))
        top, total, weight = (torch.cat(t) for t in (tops, sums, weighted))
        local = self.chosen - self.start
        here = (local >= 0) & (local < self.columns)
        score = self.x().gather(1, torch.where(here, local, 0)[:, None])[:, 0].double()
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX)
        ratio = (top - highest).exp()
        numbers = torch.stack([total * ratio, weight * ratio, torch.where(here, score, 0.0)])
        dist.all_reduce(numbers)
        lse = highest + numbers[0].log()
        self._right = {"lse": lse, "found": numbers[2] - lse, "entropy": lse - numbers[1] / numbers[0]}
        return self._right

    def check(self, op: str, found: object) -> str:
        """What is wrong with a result; empty if it is right."""
        r, counts = self.right(), self.target != IGNORED
        p = (self.x()[:SEEN].double() - r["lse"][:SEEN, None]).exp()
        loss = -torch.where(counts, r["found"], 0.0).sum() / counts.sum()
        here = torch.arange(self.columns, device=p.device) + self.start == self.chosen[:SEEN, None]
        slope = (p - here.double()) * (counts[:SEEN, None] / counts.sum())
        wanted = {
            "logsumexp": lambda: [r["lse"]],
            "selective_log_softmax": lambda: [r["found"]],
            "entropy": lambda: [r["entropy"]],
            "softmax": lambda: [p],
            "log_softmax": lambda: [p.log()],
            "softmax_backward": lambda: [_slope(p, self.upstream()[:SEEN].double(), self.group)],
            "cross_entropy": lambda: [loss, slope],
        }[op]()
        results = found if isinstance(found, tuple) else (found,)
        for got, right in zip(results, wanted, strict=True):
            got = got.double()[: len(right)] if right.dim() else got.double()
            off = (got - right).abs().max() / right.abs().max()
            if not off <= TOLERANCE:
                return f"wrong result: off by {off:.2g} of the largest"
        return ""

    def upstream(self) -> Tensor:
        """What flows back into a softmax."""
        return self.x(1)


def _slope(p: Tensor, dy: Tensor, group) -> Tensor:
    dot = (p * dy).sum(-1, keepdim=True)
    dist.all_reduce(dot, group=group)
    return p * (dy - dot)


def share_of(columns: int, ranks: int) -> int:
    """Elements of a slice of many ranks' rows, in whole vectors."""
    return -(-columns // ranks // 8) * 8


Make = Callable[[Slices], Callable[[], object]]


@dataclass
class Op:
    """An operation by providers: functions that make the call of a slice. streams: matrices that it moves at the least.

    unchecked: providers of something else; graphed: calls that take which input, for graphs.
    """

    streams: int
    providers: dict[str, Make]
    mode: str = ""
    unchecked: tuple[str, ...] = ("local", "all-gather", "copy")
    graphed: dict[str, Callable[[Slices], Callable[[int], object]]] = field(default_factory=dict)


def _of(function: Callable[[Slices, Tensor], object]) -> Make:
    return lambda s: lambda: function(s, s.x())


def _rotating(function: Callable[[Slices, Tensor], object]) -> Callable[[Slices], Callable[[int], object]]:
    def make(s: Slices) -> Callable[[int], object]:
        every = [s.x(i) for i in range(s.count)]
        return lambda i: function(s, every[i])

    return make


def _again(make: Make) -> Callable[[Slices], Callable[[int], object]]:
    """A call that is the same for every input."""

    def rotating(s: Slices) -> Callable[[int], object]:
        call = make(s)
        return lambda _: call()

    return rotating


def _gather(numbers: int, times: int = 1) -> Make:
    """All-gathers of so many float32 a row."""

    def make(s: Slices) -> Callable[[], object]:
        mine = torch.zeros(numbers * s.rows, device=s.ranks.device)
        every = torch.empty(s.ranks.count * numbers * s.rows, device=s.ranks.device)

        def call() -> Tensor:
            for _ in range(times):
                all_gather(every, mine)
            return every

        return call

    return make


def _copy(s: Slices) -> Callable[[], object]:
    to = torch.empty_like(s.x())
    return lambda: to.copy_(s.x())


def _mesh(s: Slices):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(s.ranks.device.type, (s.ranks.count,))


def _dtensor(function: Callable[[Tensor], Tensor], rows: bool) -> Make:
    """A function of a DTensor; rows: whether it gives numbers of rows."""

    def make(s: Slices) -> Callable[[], object]:
        from torch.distributed.tensor import DTensor, Shard

        x = DTensor.from_local(s.x(), _mesh(s), [Shard(1)], run_check=False)
        if rows:
            return lambda: function(x).full_tensor()
        return lambda: function(x).redistribute(placements=[Shard(1)]).to_local()

    return make


def _both(loss: Callable[[Slices, Tensor], Tensor]) -> Make:
    """A loss and the gradient of a leaf."""

    def make(s: Slices) -> Callable[[], object]:
        def call() -> tuple[Tensor, Tensor]:
            x = s.leaf()
            found = loss(s, x)
            return found, torch.autograd.grad(found, x)[0]

        return call

    return make


def _both_rotating(loss: Callable[[Slices, Tensor], Tensor]) -> Callable[[Slices], Callable[[int], object]]:
    def make(s: Slices) -> Callable[[int], object]:
        every = [s.leaf(i) for i in range(s.count)]

        def call(i: int) -> tuple[Tensor, Tensor]:
            found = loss(s, every[i])
            return found, torch.autograd.grad(found, every[i])[0]

        return call

    return make


def _loss_parallel(s: Slices) -> Callable[[], object]:
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = _mesh(s)

    def call() -> tuple[Tensor, Tensor]:
        local = s.leaf()
        x = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
        with loss_parallel():
            loss = torch.nn.functional.cross_entropy(x, s.target, ignore_index=IGNORED)
            (d,) = torch.autograd.grad(loss, local)
        return (loss.full_tensor() if isinstance(loss, DTensor) else loss), d

    return call


class Megatron(torch.autograd.Function):
    """The vocabulary-parallel cross entropy of Megatron-LM, written from its paper (Shoeybi et al., 2019, and its later
    description): three all-reduces forward, none backward; float32 exponentials are kept."""

    @staticmethod
    def forward(ctx, logits, target, start, group):
        s = logits.float()
        top = s.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        s = s - top.unsqueeze(-1)
        local = target - start
        elsewhere = (local < 0) | (local >= s.shape[-1])
        local = local.masked_fill(elsewhere, 0)
        score = s.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(score, group=group)
        e = s.exp_()
        total = e.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(e.div_(total.unsqueeze(-1)), local, elsewhere)
        ctx.dtype = logits.dtype
        return total.log() - score

    @staticmethod
    def backward(ctx, grad):
        p, local, elsewhere = ctx.saved_tensors
        d = p.clone()
        d.scatter_add_(-1, local.unsqueeze(-1), -(~elsewhere).to(d.dtype).unsqueeze(-1))
        return d.mul_(grad.unsqueeze(-1)).to(ctx.dtype), None, None, None


def _megatron(s: Slices, x: Tensor) -> Tensor:
    counts = s.target != IGNORED
    return (Megatron.apply(x, s.chosen, s.start, s.group) * counts).sum() / counts.sum()


def _softmax_backward(group: bool) -> Make:
    def make(s: Slices) -> Callable[[], object]:
        x, dy = s.leaf(), s.upstream()
        y = cute_softmax.softmax(x, group=s.group) if group else cute_softmax.softmax(x)
        return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    return make


def _numbers(ours, local, gathered: int, dtensor=None, more: dict[str, Make] | None = None) -> Op:
    providers = {"cute_softmax": _of(ours), "local": _of(local), "all-gather": _gather(gathered)}
    if dtensor is not None:
        providers["dtensor"] = _dtensor(dtensor, rows=True)
    graphed = {"cute_softmax": _rotating(ours), "local": _rotating(local)}
    graphed["all-gather"] = _again(_gather(gathered))
    return Op(1, providers | (more or {}), graphed=graphed)


def _matrix(ours, local, dtensor) -> Op:
    providers = {
        "cute_softmax": _of(ours), "local": _of(local), "all-gather": _gather(2), "copy": _copy,
        "dtensor": _dtensor(dtensor, rows=False),
    }  # fmt: skip
    graphed = {"cute_softmax": _rotating(ours), "local": _rotating(local)}
    graphed["all-gather"] = _again(_gather(2))
    return Op(2, providers, graphed=graphed)


def _ours_loss(s: Slices, x: Tensor) -> Tensor:
    return cute_softmax.cross_entropy(x, s.target, ignore_index=IGNORED, group=s.group, dtype=torch.float32)


def _local_loss(s: Slices, x: Tensor) -> Tensor:
    return cute_softmax.cross_entropy(x, s.local_target, dtype=torch.float32)


OPS: dict[str, Op] = {
    "logsumexp": _numbers(
        lambda s, x: cute_softmax.logsumexp(x, -1, group=s.group),
        lambda s, x: cute_softmax.logsumexp(x, -1),
        2,
        lambda x: torch.logsumexp(x, -1),
    ),
    "selective_log_softmax": _numbers(
        lambda s, x: cute_softmax.selective_log_softmax(x, s.chosen, group=s.group),
        lambda s, x: cute_softmax.selective_log_softmax(x, s.local_target),
        3,
    ),
    "entropy": _numbers(
        lambda s, x: cute_softmax.entropy(x, group=s.group), lambda s, x: cute_softmax.entropy(x), 3
    ),
    "softmax": _matrix(
        lambda s, x: cute_softmax.softmax(x, group=s.group),
        lambda s, x: cute_softmax.softmax(x),
        lambda x: torch.softmax(x, -1),
    ),
    "log_softmax": _matrix(
        lambda s, x: cute_softmax.log_softmax(x, group=s.group),
        lambda s, x: cute_softmax.log_softmax(x),
        lambda x: torch.log_softmax(x, -1),
    ),
    "softmax_backward": Op(
        3,
        {
            "cute_softmax": _softmax_backward(True),
            "local": _softmax_backward(False),
            "all-gather": _gather(1),
        },
    ),
    "cross_entropy": Op(
        2,
        {
            "cute_softmax": _both(_ours_loss), "local": _both(_local_loss), "all-gather": _gather(3), "copy": _copy,
            "loss_parallel": _loss_parallel, "megatron": _both(_megatron),
        },
        mode="forward + backward",
        graphed={
            "cute_softmax": _both_rotating(_ours_loss), "local": _both_rotating(_local_loss),
            "all-gather": _again(_gather(3)),
            "copy": _again(_copy),
        },
    ),
}  # fmt: skip


def kernels_of(shapes: Sequence[tuple[int, int]], count: int, many: Sequence[int]) -> list[object]:
    """The Plan classes of what is measured on so many ranks, and of the slices of many: those that take long."""
    from cute_softmax.plan import Prologue, facts_of, plan_call
    from cute_softmax.plan.mean import plan_share, plan_total
    from cute_softmax.plan.problem import Operand
    from cute_softmax.plan.shards import plan_merge, plan_slice
    from cute_softmax.runtime.launch import device_facts

    device, found = device_facts(torch.cuda.current_device()), {}
    alone, chosen = Prologue(state="alone"), Prologue(state="chosen")
    states = (
        ("logsumexp", alone), ("selective", chosen), ("entropy", alone), ("softmax_backward", alone),
        ("logsumexp", Prologue()), ("softmax", Prologue()), ("log_softmax", Prologue()),
        ("selective", Prologue()), ("entropy", Prologue()), ("softmax_backward", Prologue()),
        ("softmax", Prologue(alpha="groups", target="loss")),
    )  # fmt: skip
    widths = [(s, s[1] // count, states) for s in shapes]
    widths += [(shapes[0], share_of(shapes[0][1], n), (states[4], states[5])) for n in many]
    for (rows, _), columns, maths in widths:
        for name, prologue in maths:
            facts = facts_of(name, True, prologue)
            order = (*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs)
            full = (*facts.inputs, *facts.outputs)
            operands = []
            for operand in order:
                kind = "bf16" if operand in full or (operand == "lse" and not prologue) else "fp32"
                strides = (columns, 1) if operand in full else (0 if operand == "alpha" else 1, 0)
                operands.append(Operand("int64" if operand == "index" else kind, strides))
            found[plan_call(name, (rows, columns), (1,), operands, device, prologue=prologue).kernel] = None
        if maths is not states:
            continue
        x = Operand("bf16", (columns, 1))
        for name, inputs in (("softmax", 1), ("log_softmax", 1), ("softmax_backward", 2)):
            made = plan_slice(name, (rows, columns), (x,) * (inputs + 1), (), (), "", (), (0,) * 6, device)
            found[made.kernel] = None
        loss = (("shared",), ("loss",), "fp32", (0,), (0,) * 6, device)
        found[plan_slice("gradient", (rows, columns), (x, x), *loss).kernel] = None
    merges = (
        ("bf16", (), ("lse",)), ("bf16", ("chosen",), ("found",)), ("bf16", ("weighted",), ("entropy",)),
        ("fp32", (), ()), ("fp32", ("chosen",), ("loss",)),
    )  # fmt: skip
    for dtype, beside, names in merges:
        found[plan_merge("state", dtype, beside, names, (1, count), device).kernel] = None
    found[plan_merge("sum", "fp32", (), (), (1, count), device).kernel] = None
    for plan in (*plan_share(1, 0, 0, device), *plan_total(1, "fp32", True, device)):
        found[plan.kernel] = None
    return [*found]
