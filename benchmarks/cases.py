"""What is measured: cases, plain data that needs neither torch nor a GPU. `suites.py` has the suites they form.

A new operation also needs its inputs and check in `operations.py` and a method of its name on every provider that has
it (`providers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Tensors an operation must move at the least: each input read once, each output written once.
STREAMS = {
    "softmax": 2, "softmax_backward": 3, "log_softmax": 2, "log_softmax_backward": 3, "masked_softmax": 2,
    "logsumexp": 1, "amax": 1, "sum": 1, "selective_log_softmax": 1, "selective_gradient": 3,
    "cross_entropy": 2, "topk_softmax": 1, "topk_gradient": 3, "topk_log_softmax": 1,
    "entropy": 1, "entropy_gradient": 3, "kl_div": 2, "kl_div_gradient": 5,
    "softmax_matmul": 1, "softmax_matmul_backward": 2, "sampling": 2,
}  # fmt: skip
# Operations that keep one value of each row: they write next to nothing.
REDUCTIONS = ("logsumexp", "amax", "sum")
# Those, and others with one number of each row.
NUMBERS = (*REDUCTIONS, "selective_log_softmax", "entropy", "kl_div")
# Operations whose memory counts as much as their time: rows of results hold their `peak_bytes`.
PEAKS = (
    "selective_log_softmax", "selective_gradient", "cross_entropy", "softmax_matmul_backward",
    "entropy_gradient", "kl_div_gradient",
)  # fmt: skip
# Operations on what autograd has kept of a forward, which belongs to the stream that it ran on: no graph holds them.
KEPT = ("softmax_matmul_backward",)

# Inputs that are no contiguous tensor: `x[..., 1 : n + 1]` of rows of 2 (n - 1), so an odd offset; `x.mT`.
SLICE, TRANSPOSED = "odd slice", "transposed"


@dataclass(frozen=True)
class Case:
    """One call to measure. `mode` tells apart ways to call the same operation (with or without grad, ...).

    `view` says how the input lies in memory: "" contiguous, else `SLICE` or `TRANSPOSED`; `shape` is the view's.
    """

    op: str
    shape: tuple[int, ...]
    dtype: str = "bf16"
    dim: tuple[int, ...] = (-1,)
    mode: str = ""
    view: str = ""

    @property
    def details(self) -> tuple[str, ...]:
        """What is unusual about this case beyond its shape: view, dim, mode."""
        dim = "" if self.dim == (-1,) else f"dim {', '.join(map(str, self.dim))}"
        return tuple(filter(None, (self.view, dim, self.mode)))

    @property
    def label(self) -> str:
        """Shape and details, as progress lines and tables show them."""
        return ", ".join((" x ".join(str(n) for n in self.shape), *self.details))

    @property
    def elements(self) -> int:
        """Elements of one input of this case."""
        return math.prod(self.shape)

    @property
    def result(self) -> str:
        """The element type of the result, from the mode "to fp32"; of probabilities to sample from always that."""
        if self.op == "sampling":
            return "fp32"
        return self.mode.removeprefix(TO) if self.mode.startswith(TO) else self.dtype

    @property
    def depth(self) -> int:
        """Columns of the values that a softmax is multiplied with, from the mode "D = 128"."""
        return int(self.mode.removeprefix(DEPTH).split(",")[0])

    @property
    def k(self) -> int:
        """Elements of a row that are chosen, from the mode "k = 8"."""
        return int(self.mode.removeprefix(CHOSEN).split(",")[0])

    @property
    def output_shape(self) -> tuple[int, ...]:
        """The shape of what the operation returns."""
        if self.op == "softmax_matmul":
            return (*self.shape[:-1], self.depth)
        if self.op in ("topk_softmax", "topk_log_softmax"):
            return (*self.shape[:-1], self.k)
        if self.op not in NUMBERS:
            return self.shape
        reduced = {d % len(self.shape) for d in self.dim}
        return tuple(n for d, n in enumerate(self.shape) if d not in reduced)

    @property
    def traffic(self) -> int:
        """Bytes that `gbps` counts: each input read once and each output of its size written once; of a mask what it
        has before it is broadcast, and nothing of scores beyond a diagonal."""
        if self.op.startswith("softmax_matmul"):
            # Rows of the result or of what comes in for it, and of the values; those have a gradient, too.
            *batch, rows, columns = self.shape
            others = math.prod(batch) * (rows + STREAMS[self.op] * columns) * self.depth
            return (STREAMS[self.op] * self.elements + others) * ITEM_BYTES[self.dtype]
        few = self.op == "topk_gradient" and self.mode.endswith(
            RENORMALIZED
        )  # its backward reads k numbers a row
        streams = (STREAMS[self.op] - few) * self.elements * ITEM_BYTES[self.dtype]
        if self.op != "masked_softmax":
            return streams + self.elements * (ITEM_BYTES[self.result] - ITEM_BYTES[self.dtype])
        *outer, queries, columns = self.shape
        if self.mode == CAUSAL:
            square = min(queries, columns)  # whose diagonal bounds what is read; rows below it are read whole
            read = square * (square + 1) // 2 + (queries - square) * columns
            return streams * (queries * columns + read) // (2 * queries * columns)
        masks = {MASK: self.elements, ROW_MASK: columns, SHARED_MASK: queries * columns}
        masks[BATCH_MASK] = math.prod(outer[:1]) * queries * columns
        masks[GROUP_MASK] = math.prod(self.shape[d] for d in self.dim)
        masks[GROUP_BIAS] = 2 * masks[GROUP_MASK]
        return streams + masks.get(self.mode, 0)


@dataclass(frozen=True)
class Suite:
    """Cases that are run, saved and shown together.

    `kind` says which clock: "device" (time on the GPU, cold L2), "graph" (in a replayed CUDA graph, warm L2), "map"
    (on the GPU, one figure a case), "host" (time of the calling thread) or "process" (first call of a fresh process).
    `dtype` fixes the element type; None leaves it to `--dtype`.
    """

    name: str
    title: str
    cases: tuple[Case, ...]
    providers: tuple[str, ...]
    kind: str = "device"
    dtype: str | None = None

    def with_dtype(self, dtype: str) -> Suite:
        """This suite with `dtype` in every case, unless its own is fixed.

        A suite in another type than its usual bf16 gets a name of its own, hence a results file of its own.
        """
        chosen = self.dtype or dtype
        name = self.name if self.dtype or chosen == "bf16" else f"{self.name}-{chosen}"
        # Results of another width stay that: bf16 to fp32 becomes fp32 to bf16.
        modes = {f"{TO}fp32": f"{TO}bf16"} if chosen == "fp32" else {}
        cases = (replace(c, dtype=chosen, mode=modes.get(c.mode, c.mode)) for c in self.cases)
        return replace(self, name=name, cases=tuple(cases))

    def with_shapes(self, shapes: list[tuple[int, ...]]) -> Suite:
        """This suite over other shapes: those of its cases that differ in nothing but shape are replaced."""
        kinds = dict.fromkeys(replace(c, shape=()) for c in self.cases)
        return replace(self, cases=tuple(replace(kind, shape=s) for kind in kinds for s in shapes))


def labels(cases: Sequence[Case]) -> list[str]:
    """What tells the cases apart: their labels, and operation and element type as far as they differ."""
    ops, dtypes = {case.op for case in cases}, {case.dtype for case in cases}
    return [
        ", ".join((case.label, *[case.op] * (len(ops) > 1), *[case.dtype] * (len(dtypes) > 1)))
        for case in cases
    ]


# The order in which tables and plots show providers.
PROVIDERS = ("cute_softmax", "copy", "torch", "torch.compile", "liger", "quack", "cudnn")
# The rungs of the ladder, which are ours, too, and no peers.
NAIVE, RUNGS = "naive", tuple(f"rung{i}" for i in range(1, 8))
LADDER = (NAIVE, *RUNGS)
# The yardstick ("copy") is no peer, and neither are we.
PEERS = tuple(p for p in PROVIDERS if p not in ("cute_softmax", "copy"))
# Peers of one operation: TRL's own kernel, and its form written anew from its description, see `fused`; FlashInfer.
TRL, FLASHINFER = ("trl", "trl-form"), "flashinfer"
SPECIALISTS = (*TRL, FLASHINFER)
# Modes of softmax_matmul: columns of the values, and whether it is causal, or made of row statistics and a product.
DEPTH, AND_CAUSAL, TWO_STEPS = "D = ", ", causal", ", statistics first"
FEW_ROWS = 64
# Within `batch_invariant`.
INVARIANT = "batch-invariant"
NO_GRAD, GRAD, FORWARD_BACKWARD = "no grad", "grad", "forward+backward"
# Calls of so many shapes one after the other, without a gradient: the case's, and longer rows.
SHAPES_IN_TURN = 32
IN_TURN = f"{SHAPES_IN_TURN} shapes in turn"
COLD_STORE, WARM_STORE, NEW_COLUMNS = "cold store", "warm store", "new N"
# Modes of topk_softmax and its gradient: how many are chosen, and whether their probabilities are renormalized.
CHOSEN, RENORMALIZED = "k = ", ", renormalized"
# Results in another element type.
TO = "to "
# Of chosen log-probabilities: that of each row plus its entropy.
WITH_ENTROPY = "with entropy"
# Of probabilities to sample from: the temperature of all rows, or a tensor of them.
TEMPERATURE, T_A_ROW = "T = ", "one T a row"
# Of cross_entropy.
SMOOTHED, CAPPED, RECOMPUTED = "label smoothing", "softcap", "recomputed"
# Of masked_softmax: a scale alone, or with a causal mask, or with a mask of the scores' own shape, of one row, of one
# matrix for all, of one for each index of the first dimension.
SCALED, CAUSAL, MASK, ROW_MASK = "scaled", "causal", "masked", "one mask row"
SHARED_MASK, BATCH_MASK = "one mask", "a mask a batch"
# A mask or a bias of one group, whatever its dimensions, for all groups.
GROUP_MASK, GROUP_BIAS = "one mask group", "one bias group"


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape written as "4096x8192"; ValueError when it is no list of positive numbers."""
    shape = tuple(int(part) for part in text.lower().split("x"))
    if not shape or min(shape) < 1:
        raise ValueError(f"shape {text!r}: sizes must be at least 1")
    return shape
