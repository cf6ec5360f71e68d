"""What is measured: cases and the suites they form. Plain data; needs neither torch nor a GPU.

A new suite is an entry of `SUITES`; a new operation also needs its inputs and check in `operations.py` and a
method of its name on every provider that has it (`providers.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}

# Tensors an operation must move at the least: each input read once, each output written once.
STREAMS = {
    "softmax": 2, "softmax_backward": 3, "log_softmax": 2, "log_softmax_backward": 3, "masked_softmax": 2,
    "logsumexp": 1, "amax": 1, "sum": 1, "selective_log_softmax": 1, "selective_gradient": 3,
    "cross_entropy": 2, "topk_softmax": 1, "topk_gradient": 3,
    "softmax_matmul": 1, "softmax_matmul_backward": 2,
}  # fmt: skip
# Operations that keep one value of each row: they write next to nothing.
REDUCTIONS = ("logsumexp", "amax", "sum")
# Operations whose memory counts as much as their time: rows of results hold their `peak_bytes`.
PEAKS = ("selective_log_softmax", "selective_gradient", "cross_entropy", "softmax_matmul_backward")
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
        """The element type of the result, from the mode "to fp32"."""
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
        if self.op == "topk_softmax":
            return (*self.shape[:-1], self.k)
        if self.op not in (*REDUCTIONS, "selective_log_softmax"):
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
            read = sum(min(row + 1, columns) for row in range(queries))
            return streams * (queries * columns + read) // (2 * queries * columns)
        masks = {MASK: self.elements, ROW_MASK: columns, SHARED_MASK: queries * columns}
        masks[BATCH_MASK] = math.prod(outer[:1]) * queries * columns
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


def _cases(op: str, *shapes: tuple[int, ...], dim: int | tuple[int, ...] = -1) -> tuple[Case, ...]:
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(Case(op, shape, dim=dims) for shape in shapes)


# The order in which tables and plots show providers.
PROVIDERS = ("cute_softmax", "copy", "torch", "torch.compile", "liger", "quack", "cudnn")
# The rungs of the ladder, which are ours, too, and no peers.
NAIVE, RUNGS = "naive", tuple(f"rung{i}" for i in range(1, 8))
LADDER = (NAIVE, *RUNGS)
# The yardstick ("copy") is no peer, and neither are we.
PEERS = tuple(p for p in PROVIDERS if p not in ("cute_softmax", "copy"))
# For softmax_matmul the yardstick is the product alone; for few rows, which take what reading takes, a copy that moves
# as many bytes.
_PRODUCT = ("cute_softmax", "copy", "torch", "torch.compile", "quack")
# For its gradients a copy of the scores to theirs.
_GRADIENTS = ("cute_softmax", "copy", "torch", "torch.compile")
_EAGER = ("cute_softmax", "torch", "torch.compile", "liger", "quack")

# Modes of softmax_matmul: columns of the values, and whether it is causal, or made of row statistics and a product.
DEPTH, AND_CAUSAL, TWO_STEPS = "D = ", ", causal", ", statistics first"
FEW_ROWS = 64
# Within `batch_invariant`: the shapes of few rows, and an odd vocabulary; more rows, whose results must not cost more.
INVARIANT = "batch-invariant"
INVARIANT_SHAPES = (
    *((rows, columns) for columns in (32000, 50257, 128256, 151936) for rows in (1, 8, 64, 512)),
    (8, 1048576), (64, 1048576),
)  # fmt: skip

NO_GRAD, GRAD, FORWARD_BACKWARD = "no grad", "grad", "forward+backward"
COLD_STORE, WARM_STORE, NEW_COLUMNS = "cold store", "warm store", "new N"
# Modes of topk_softmax and its gradient: how many are chosen, and whether their probabilities are renormalized.
CHOSEN, RENORMALIZED = "k = ", ", renormalized"
# Experts and k of models in use (Mixtral, OLMoE, DeepSeek-V2 and V3, Kimi K2), and the most.
_EXPERTS = ((8, 2), (64, 8), (160, 6), (256, 8), (384, 8), (1024, 8), (1024, 32))
_ROUTED, _ROUTERS = (1, 64, 1024, 8192, 65536), ("topk_softmax", "topk_gradient")
# Results in another element type.
TO = "to "
# Of masked_softmax: a scale alone, or with a causal mask, or with a mask of the scores' own shape, of one row, of one
# matrix for all, of one for each index of the first dimension.
SCALED, CAUSAL, MASK, ROW_MASK = "scaled", "causal", "masked", "one mask row"
SHARED_MASK, BATCH_MASK = "one mask", "a mask a batch"
_SCORES = ((8, 32, 1024, 1024), (4, 32, 2048, 2048), (2, 16, 4096, 4096), (1, 16, 8192, 8192))

# Softmax over dim 0: wide matrices of short columns, tall ones of long columns.
_WIDE = ((128, 1048576), (1024, 262144), (4096, 65536))
_TALL = ((65536, 4096), (262144, 1024), (1048576, 64))
_ODD_IMAGES = ((32, 512, 55, 55), (8, 21, 513, 513))
_ODD_COLUMNS = ((128, 1048577), (4096, 65537))

# What language models have for vocabularies (Llama 3, DeepSeek, Qwen 2.5 and 2, GPT-4o and its like, Command R, Gemma),
# and what lies just past a power of two.
VOCABULARIES = (128256, 129280, 131080, 151936, 152064, 200064, 201088, 256000, 262144, 262152)
_TOKENS = (16, 128, 2048)


def _over_vocabularies(op: str, mode: str = "") -> tuple[Case, ...]:
    return tuple(Case(op, (rows, n), mode=mode) for rows in _TOKENS for n in VOCABULARIES)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "rows-forward",
            "softmax over rows, forward",
            _cases(
                "softmax",
                *((32768, n) for n in (1024, 2048, 4096, 6144)),
                *((16384, n) for n in (8192, 16384)),
                *((8192, n) for n in (8192, 16384)),
                *((4096, n) for n in (8192, 16384, 32768, 65536, 131072)),
            ),
            PROVIDERS,
        ),
        Suite(
            "rows-backward",
            "softmax over rows, backward",
            _cases(
                "softmax_backward",
                (32768, 256),
                (32768, 1024),
                (16384, 4096),
                (8192, 8192),
                (4096, 32768),
                (4096, 65536),
                (2048, 131072),
                (8192, 262144),
            ),
            PROVIDERS,
        ),
        Suite(
            "small-rows",
            "softmax over short rows, forward",
            _cases("softmax", (262144, 64), (65536, 128), (32768, 256), (32768, 512)),
            PROVIDERS,
        ),
        Suite(
            "long-rows",
            "softmax over long rows, forward",
            _cases("softmax", (8192, 262144), (512, 1000000)),
            PROVIDERS,
        ),
        Suite(
            "odd-rows",
            "softmax over rows of odd length, forward",
            _cases("softmax", (32768, 1023), (8192, 50257), (4096, 151937)),
            PROVIDERS,
        ),
        Suite(
            "fp32-rows",
            "softmax over rows, forward, fp32",
            _cases(
                "softmax",
                *((32768, n) for n in (256, 512, 1024, 2048, 4096)),
                (16384, 8192),
                (8192, 16384),
                (4096, 32768),
                (4096, 65536),
                (2048, 131072),
            ),
            PROVIDERS,
            dtype="fp32",
        ),
        Suite(
            "columns-forward",
            "softmax over columns, forward",
            _cases("softmax", *_WIDE, dim=0),
            PROVIDERS,
        ),
        Suite(
            "columns-tall",
            "softmax over tall columns, forward",
            _cases("softmax", *_TALL, dim=0),
            PROVIDERS,
        ),
        Suite(
            "columns-backward",
            "softmax over columns, backward",
            _cases("softmax_backward", *_WIDE, *_TALL, dim=0),
            PROVIDERS,
        ),
        Suite(
            "any-dims",
            "softmax over inner dimensions, forward",
            (
                *_cases("softmax", (32, 512, 56, 56), (8, 1000, 128, 128), dim=1),
                *_cases("softmax", (64, 128, 32, 256), dim=(1, 3)),
                *_cases("softmax", (8, 16, 2048, 2048), dim=-2),
            ),
            PROVIDERS,
        ),
        Suite(
            "odd-columns",
            "softmax over columns that begin off vector boundaries, forward and backward",
            (
                *_cases("softmax", *_ODD_IMAGES, dim=1),
                *_cases("softmax", *_ODD_COLUMNS, dim=0),
                *_cases("softmax_backward", *_ODD_IMAGES, dim=1),
                *_cases("softmax_backward", *_ODD_COLUMNS, dim=0),
            ),
            PROVIDERS,
        ),
        Suite(
            "split-rows",
            "softmax over rows longer than a cluster holds, forward",
            _cases("softmax", (512, 1048576), (64, 3000001), (64, 16777216), (4, 268435456)),
            PROVIDERS,
        ),
        Suite(
            "few-rows",
            "softmax over few rows, forward",
            _cases("softmax", (1, 128256), (8, 151936), (64, 128256), (8, 1048576), (64, 1048576)),
            PROVIDERS,
            kind="graph",
        ),
        Suite(
            "batch-invariant",
            "rows within batch_invariant and outside, forward",
            tuple(
                Case(op, shape, mode=mode)
                for op in ("softmax", "log_softmax", "logsumexp")
                for shape in INVARIANT_SHAPES
                for mode in ("", INVARIANT)
            ),
            ("cute_softmax", "copy"),
            kind="graph",
        ),
        Suite(
            "reductions",
            "reductions over rows",
            (
                *(Case(op, (32768, 50304)) for op in REDUCTIONS),
                *_cases("logsumexp", (1, 151936)),
                *_cases("softmax", (1, 151936)),
            ),
            PROVIDERS,
        ),
        Suite(
            "vocabularies",
            "rows of the vocabularies in use",
            (
                *_over_vocabularies("softmax"),
                *_over_vocabularies("softmax", f"{TO}fp32"),
                *_over_vocabularies("log_softmax"),
                *_over_vocabularies("log_softmax", f"{TO}fp32"),
                *_over_vocabularies("logsumexp"),
                *_over_vocabularies("softmax_backward"),
                *_over_vocabularies("log_softmax_backward"),
            ),
            ("cute_softmax", "copy", "torch", "quack"),
        ),
        Suite(
            "ladder",
            "softmax over 1024 rows by the rungs of the ladder, forward",
            _cases("softmax", *((1024, n) for n in range(512, 10241, 512))),
            ("cute_softmax", "copy", "torch", "cudnn", *LADDER),
        ),
        Suite(
            "directions",
            "softmax over rows and over columns, the naive form beside the others, forward",
            tuple(
                Case("softmax", shape, dim=(dim,))
                for shape in ((1024, 10240), (4096, 4096), (8192, 8192), (65536, 1024))
                for dim in (1, 0)
            ),
            ("cute_softmax", "copy", "torch", "cudnn", NAIVE),
        ),
        Suite(
            "family",
            "the softmax family over a vocabulary",
            (
                *(Case(op, (32768, 50304)) for op in ("softmax", "log_softmax", "logsumexp")),
                Case("log_softmax_backward", (16384, 50304)),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "selective",
            "log-probabilities of given tokens, and forward with backward",
            (
                *_cases("selective_log_softmax", (8192, 151936), (8192, 32768)),
                *_cases("selective_gradient", (8192, 151936), (8192, 32768)),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "cross-entropy",
            "cross entropy of tokens, forward with backward",
            _cases("cross_entropy", (4096, 151936), (8192, 32768), (512, 151936)),
            ("cute_softmax", "copy", "torch", "torch.compile", "liger", "quack"),
        ),
        Suite(
            "routers",
            "the largest of a softmax over experts, and forward with backward",
            tuple(
                Case(op, (tokens, experts), mode=f"{CHOSEN}{k}{among}")
                for op, among, (experts, k), tokens in product(
                    _ROUTERS, ("", RENORMALIZED), _EXPERTS, _ROUTED
                )
            ),
            ("cute_softmax", "copy", "torch", "torch.compile", "quack"),
        ),
        Suite(
            "masked",
            "masked and scaled softmax",
            (
                *_cases("softmax", (64, 4096, 4096), (32768, 4096), *_SCORES),
                Case("masked_softmax", (64, 4096, 4096), mode=CAUSAL),
                *(Case("masked_softmax", (32768, 4096), mode=mode) for mode in (SCALED, MASK, ROW_MASK)),
                *(
                    Case("masked_softmax", shape, mode=mode)
                    for shape in _SCORES
                    for mode in (BATCH_MASK, SHARED_MASK, CAUSAL)
                ),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "fp32-any",
            "softmax over any dimension, fp32",
            (
                *_cases("softmax", (1024, 131072), (65536, 2048), dim=0),
                *_cases("softmax_backward", (1024, 131072), dim=0),
                *_cases("softmax", (32, 512, 56, 56), dim=1),
                *_cases("softmax", (64, 8388608)),
                *_cases("logsumexp", (16384, 50304)),
            ),
            PROVIDERS,
            dtype="fp32",
        ),
        Suite(
            "views",
            "softmax over slices, odd lengths and transposed tensors, forward",
            (
                Case("softmax", (16384, 4097), view=SLICE),
                Case("softmax", (16384, 8192), dim=(0,), view=TRANSPOSED),
                Case("softmax", (16384, 8192), dim=(1,), view=TRANSPOSED),
                Case("softmax", (8192, 50257)),
            ),
            PROVIDERS,
        ),
        Suite(
            "matmul",
            "softmax(S) @ V, forward; the yardstick is the product S @ V alone, for few rows a copy of as many bytes",
            (
                *(Case("softmax_matmul", (32, 4096, 4096), mode=f"{DEPTH}{d}") for d in (64, 128)),
                Case("softmax_matmul", (8, 8192, 8192), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (1, 16384, 16384), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (64, 2048, 2048), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (16, 4097, 4095), mode=f"{DEPTH}128"),
                *(
                    Case("softmax_matmul", (32, 4096, 4096), mode=f"{DEPTH}128{way}")
                    for way in (AND_CAUSAL, TWO_STEPS)
                ),
                *(Case("softmax_matmul", (32, rows, 131072), mode=f"{DEPTH}128") for rows in (1, 16)),
            ),
            _PRODUCT,
        ),
        Suite(
            "matmul-backward",
            "gradients of softmax(S) @ V, backward alone; the yardstick copies S to its gradient",
            (
                *(Case("softmax_matmul_backward", (32, 4096, 4096), mode=f"{DEPTH}{d}") for d in (64, 128)),
                Case("softmax_matmul_backward", (8, 8192, 8192), mode=f"{DEPTH}128"),
                *(Case("softmax_matmul_backward", (4, 4096, 4096), mode=f"{DEPTH}{d}") for d in (256, 512)),
                Case("softmax_matmul_backward", (16, 4097, 4095), mode=f"{DEPTH}128"),
                Case("softmax_matmul_backward", (32, 4096, 4096), mode=f"{DEPTH}128{AND_CAUSAL}"),
            ),
            _GRADIENTS,
        ),
        Suite(
            "overhead",
            "host time of an eager call",
            tuple(Case("softmax", (128, 128), mode=mode) for mode in (NO_GRAD, GRAD, FORWARD_BACKWARD)),
            _EAGER,
            kind="host",
        ),
        Suite(
            "overhead-scores",
            "host time of an eager call on scores, of the family, of heads and of a product",
            (
                *(Case("masked_softmax", (128, 128), mode=mode) for mode in (SCALED, ROW_MASK, MASK, CAUSAL)),
                *(Case(op, (128, 128)) for op in ("log_softmax", "logsumexp", "selective_log_softmax")),
                Case("selective_gradient", (128, 128)),
                Case("softmax_matmul", (4, 128, 128), mode=f"{DEPTH}64"),
            ),
            ("cute_softmax", "torch", "torch.compile"),
            kind="host",
        ),
        Suite(
            "first-call",
            "first softmax of a fresh process",
            tuple(Case("softmax", (4096, 4096), mode=mode) for mode in (COLD_STORE, WARM_STORE, NEW_COLUMNS)),
            _EAGER,
            kind="process",
        ),
    )
}


def parse_shape(text: str) -> tuple[int, ...]:
    """The shape written as "4096x8192"; ValueError when it is no list of positive numbers."""
    shape = tuple(int(part) for part in text.lower().split("x"))
    if not shape or min(shape) < 1:
        raise ValueError(f"shape {text!r}: sizes must be at least 1")
    return shape
