"""The page of Plans: for each kind of Plan one problem, its figures, and what they teach about CuTe.

`gallery.py` writes it. No number stands here that a Plan decides: a section names shapes to try and what it
needs of a Plan, takes the first shape that gives it, and its words are filled in from that Plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from cute_softmax import draw
from cute_softmax.plan import Plan, describe
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import ints
from layouts.figures import Figure
from layouts.figures.scene import count
from layouts.html import explorer


@dataclass(frozen=True)
class Section:
    """A section of the page. ``needs`` says which Plans it can be about, ``shapes`` are tried in order,
    ``words`` is the introduction, and ``figures`` the text before each figure, by the figure's name."""

    key: str
    heading: str
    shapes: tuple[tuple[int, ...], ...]
    needs: Callable[[Plan], bool]
    words: Callable[[Plan], str]
    figures: dict[str, Callable[[Plan], str]]
    op: str = "softmax"
    dtype: str = "bf16"
    backward: bool = False
    two_pass: bool = False
    dim: tuple[int, ...] = (-1,)
    depth: int = 0  # columns of V, where the section is about softmax(S) @ V

    @cached_property
    def options(self) -> dict:
        """The keyword arguments of `describe.plan_shape`."""
        math = f"{self.op}_backward" if self.backward else self.op
        return {"math": math, "online": not self.two_pass, "dim": self.dim}

    @cached_property
    def chosen(self) -> tuple[tuple[int, ...], Plan]:
        """The first shape that the section can be about, with its Plan; ValueError if there is none."""
        for shape in self.shapes:
            if self.depth:
                plan = describe.plan_matmul_shape(shape, self.depth, "bf16", backward=self.backward)
            else:
                plan = describe.plan_shape(shape, self.dtype, **self.options)
            if self.needs(plan):
                return shape, plan
        raise ValueError(f"no Plan of {self.shapes} fits the section {self.heading!r}: give it other shapes")

    @property
    def plan(self) -> Plan:
        """The Plan that the section is about."""
        return self.chosen[1]

    @property
    def command(self) -> str:
        """The command that draws this Plan."""
        flags = f" --op {self.op}" if self.op != "softmax" else ""
        flags += (" --backward" if self.backward else "") + (" --two-pass" if self.two_pass else "")
        if self.dim != (-1,):
            flags = f" --dim {','.join(map(str, self.dim))}{flags}"
        if self.depth:
            flags = f" --matmul {self.depth}{flags}"
        shape = "x".join(map(str, self.chosen[0]))
        return f"python -m cute_softmax diagrams {shape} --dtype {self.dtype}{flags} -o out/"

    @cached_property
    def drawn(self) -> dict[str, Figure]:
        """The section's figures, by file name without its ending."""
        found = draw.figures(self.plan)
        return {f"plan_{self.key}_{name}": found[name] for name in self.figures}


def bits(p: Plan) -> str:
    """The size of a vector in words."""
    c = p.row_class
    return f"{c.vector} elements of {size(p)} bytes, one access of {8 * c.vector * size(p)} bits"


def size(p: Plan) -> int:
    """Bytes of an element."""
    return ITEM_SIZE[p.row_class.dtypes[0]]


SECTIONS = (
    Section(
        "stretch",
        "Rows of a few elements: a thread holds whole ones",
        ((100_000, 57), (100_000, 19)),
        lambda p: p.movement == "short" and p.pairs,
        lambda p: (
            f"{p.rows:,} rows of {p.columns}, contiguous. A row is {p.columns * 2} bytes, so most rows begin off a "
            f"vector boundary, but {p.warp_rows} of them are one stretch of memory, which a warp loads and stores in "
            f"{p.kernel.steps} steps of whole vectors. In between, each thread takes its own rows from shared memory."
        ),
        {
            "tile": lambda p: (
                f"**Stretch.** The layout `{p.kernel.tv}` maps (lane, (element of a vector, step)) to an element of "
                "the stretch: lanes side by side, then the next step. It does not depend on the length of a row."
            ),
            "rows": lambda p: (
                "**Rows.** Which thread has which row, and in which bank each element is. Here the layout is "
                f"`{p.rows_tv}`: (lane, (element of a row, turn)). Every other row of odd length begins in the middle "
                "of a word of two elements, so a thread takes two neighbouring rows: in each turn the rows of all "
                "lanes begin alike, in different banks."
            ),
        },
    ),
    Section(
        "short",
        "Short rows: a warp holds several",
        ((12, 60), (12, 104), (28, 60)),
        lambda p: p.movement == "row" and p.row_class.rows_per_thread == 2 and p.rows < p.row_class.tiler[0],
        lambda p: (
            f"{p.rows:,} rows of {p.columns}, float32. A row of {p.columns} elements is {p.columns * size(p)} bytes: "
            f"{count(p.row_class.threads_per_row, 'thread')} that load {p.row_class.vector * size(p)} bytes at a time "
            "are enough, so the 32 threads of a warp hold "
            f"{32 // p.row_class.threads_per_row * p.row_class.rows_per_thread} rows. No shared memory is needed: the "
            "threads of a row exchange registers."
        ),
        {
            "tv": lambda p: (
                "**Thread-value layout.** A CuTe layout is a function from coordinates to numbers, written "
                "`shape:stride`. The layout of a *tiled copy* maps (thread, value) to an index in a tile: it says who "
                f"moves what. Here it is `{p.row_class.tv}`. The first mode, "
                f"`{ints.show(p.row_class.tv.shape[0])}`, counts threads, first along a row, then down. The "
                f"second, `{ints.show(p.row_class.tv.shape[1])}`, counts a thread's values (V, M): V = "
                f"{bits(p)}; M = {count(p.row_class.rows_per_thread, 'row')} that a thread owns. Indices run down the "
                f"columns of the tile, so a stride of {p.row_class.tiler[0]} is one column to the right. "
                f"`T5 V0..{p.row_class.vector - 1}` in a cell: thread 5 has these elements in its registers 0 to "
                f"{p.row_class.vector - 1}. `cute.make_tiled_copy(atom, tv, "
                "tiler)` is this figure; `get_slice(thread).partition_S(tensor)` gives one thread its cells, as a "
                f"tensor of shape ((V, M), 1, K), where K = {p.row_class.steps} is the number of repetitions of the "
                "figure to the right."
            ),
            "predicate": lambda p: (
                "**Predicate tensor.** Rows rarely fill the tile. Before a thread loads, it compares the column of "
                "each of its *vectors* with the end of the row and keeps the results, one bit each, in a tensor "
                f"`{p.row_class.predicate}`: mode 0 is the rows that the thread owns, mode 1 the rows over which the "
                "copy repeats (here one copy covers the tile), mode 2 the steps. The stride over rows is 0: all rows "
                "end at the same column and share one bit, so nothing is stored twice. One more bit per row says "
                "whether the row exists at all: this tile has more rows than the matrix."
            ),
            "shuffle": lambda p: (
                "**Shuffles.** Each thread has reduced its own values. In each round a lane takes its "
                "partner's result, at a distance of 1, 2, 4, ...; after "
                f"{(p.row_class.threads_per_row - 1).bit_length()} rounds all {p.row_class.threads_per_row} "
                "lanes of a row hold the result."
            ),
        },
        op="log_softmax",
        dtype="fp32",
    ),
    Section(
        "block",
        "A row for several warps",
        ((32768, 1000), (32768, 2000), (32768, 4000)),
        lambda p: p.row_class.warps_per_row > 1 and p.row_class.cluster_n == 1 and not p.row_class.edges,
        lambda p: (
            f"{p.rows:,} rows of {p.columns:,}: {count(p.row_class.warps_per_row, 'warp')} share a row, and exchange "
            "their results in shared memory."
        ),
        {
            "tile": lambda p: (
                f"**Steps.** The tiled copy covers {p.row_class.step_tiler[1]:,} columns; the tile of "
                f"{p.row_class.tiler[1]:,} takes K = {count(p.row_class.steps, 'step')} of it. Thread 0 has "
                f"columns 0 to {p.row_class.vector - 1} and then, a whole step to the right, the next: in "
                "every step neighbouring threads touch neighbouring addresses. The text under the figure is computed "
                "by `cute_softmax.draw.checks`: no element is missed or taken twice, and the number of 32-byte "
                "sectors that the requests touch."
            ),
            "reduction_buffer": lambda p: (
                f"**Reduction buffer.** `{p.row_class.reduction_buffer}` is (rows, (warps of a row, CTAs), "
                "stages) with the warps of a row fastest. Lane 0 of each warp writes its slot; after one "
                "barrier lane i of *every* warp reads slot i, and a warp's shuffles finish the work. Because the "
                "peers are adjacent, this is one load without a bank conflict. A slot has "
                f"{p.row_class.facts.state_bytes} bytes: the pair (max, sum of exponentials relative to it)."
            ),
        },
    ),
    Section(
        "two_pass",
        "The same in two passes",
        ((32768, 1000), (32768, 2000), (32768, 4000)),
        lambda p: p.row_class.exchanges and p.row_class.facts.stages == 2 and p.row_class.cluster_n == 1,
        lambda p: (
            "Instead of the pair, a kernel can reduce first the maximum of the row and then the sum, in two exchanges."
        ),
        {
            "reduction_buffer": lambda p: (
                f"**Stages.** `{p.row_class.reduction_buffer}` has {p.row_class.reduction_buffer.shape[2]} "
                "stages, the slowest mode: sums are never written where a slow warp may still read maxima, so one "
                "barrier per exchange is enough. A slot is a single number of "
                f"{p.row_class.facts.state_bytes} bytes."
            ),
        },
        two_pass=True,
    ),
    Section(
        "edges",
        "Rows off a vector boundary",
        ((8192, 50257), (8192, 1003)),
        lambda p: p.row_class.edges,
        lambda p: (
            f"{p.rows:,} rows of {p.columns:,}, an odd number. A 16-byte access needs a 16-byte boundary, "
            f"and here each row begins {count(p.columns % p.row_class.vector, 'element')} further past such a "
            "boundary than the row before it."
        ),
        {
            "edges": lambda p: (
                "**Head, body, tail.** The vectors keep their width: the scalars before a row's first boundary and "
                "after its last are given one by one to the first threads of the row, and only whole aligned vectors "
                "remain. The figure has one row for each alignment; a thread has room for "
                f"{count(p.row_class.edge_scalars, 'scalar')}."
            ),
            "predicate": lambda p: (
                "**The predicate** covers the body: still one bit per vector, and no vector straddles the end. Rows "
                "with another alignment have another body, so here each row has bits of its own."
            ),
        },
    ),
    Section(
        "cluster",
        "A row for a cluster of CTAs",
        ((4096, 65536), (4096, 131072), (4096, 262144)),
        lambda p: p.row_class.cluster_n > 1 and not p.row_class.edges,
        lambda p: (
            f"{p.rows:,} rows of {p.columns:,}: a row of {p.columns * 2:,} bytes stays in the registers of "
            f"{p.row_class.cluster_n} CTAs, each of which takes {p.share:,} columns. "
            "[The explorer of this Plan](plan_explorer.html) goes through it step by step."
        ),
        {
            "cluster": lambda p: (
                "**Cluster exchange.** On Hopper and newer GPUs the CTAs of a cluster can write into each other's "
                "shared memory. Every CTA has the same reduction buffer, "
                f"`{p.row_class.reduction_buffer}`, whose second mode now counts warps and CTAs. Lane i of "
                "each warp stores the warp's result into CTA i (`st.async`), and the store itself signals that CTA's "
                "mbarrier that its bytes have arrived. The barrier completes when all have: no CTA ever waits for "
                "another one to read."
            ),
            "thread": lambda p: (
                "**One thread followed.** Everything that a single thread touches; the rest is dimmed. `--thread N` "
                "draws it for thread N."
            ),
        },
    ),
    Section(
        "persistent",
        "Persistent CTAs",
        ((512, 1000000), (512, 600000), (512, 524288)),
        lambda p: p.row_class.persistent,
        lambda p: (
            f"{p.rows:,} rows of {p.columns:,}: a row spreads over the registers of {p.row_class.cluster_n} SMs. A "
            f"grid of {count(p.ctas, 'cluster')} is persistent and takes one row after another, so that the next row "
            "can arrive in shared memory while the current one is in registers."
        ),
        {
            "smem": lambda p: (
                f"**Shared memory.** `{p.row_class.smem}` maps (row, column) of the tile to an element of "
                "sX; the same thread-value layout partitions it and global memory, so a thread reads back exactly "
                "what it copied. Each cell names its banks: neighbouring threads access neighbouring banks, and a "
                "16-byte request is served a quarter of a warp at a time, "
                "without conflict."
            ),
        },
    ),
    Section(
        "backward",
        "The gradient",
        ((4096, 8192), (4096, 16384), (4096, 4096)),
        lambda p: p.row_class.warps_per_row > 1,
        lambda p: (
            f"dx = y (dy - sum(dy y)) for {p.rows:,} rows of {p.columns:,}: two tensors are read and one is "
            "written, by the same movement. A row math says what is loaded, reduced and written; the layouts do not "
            "depend on it."
        ),
        {
            "tile": lambda p: (
                f"**Two inputs.** A thread holds the same {count(p.row_class.steps, 'vector')} of dy and of "
                "y: one tiled copy and one predicate are used for all operands."
            ),
        },
        backward=True,
    ),
)


PANELS = (
    Section(
        "column",
        "Columns: a panel for a cluster",
        ((1024, 262144), (1024, 65536), (4096, 65536)),
        lambda p: p.movement == "column" and p.kernel.cluster_n > 1,
        lambda p: (
            f"Softmax over the first dimension of 1,024 x 262,144 elements: the {p.length:,} elements of a group are "
            f"{p.operand_strides[0][-1]:,} apart, and neighbouring groups are adjacent. So a vector spans "
            f"{p.kernel.vector} groups, and a *panel* is {p.kernel.columns} neighbouring groups, "
            f"{p.kernel.columns * 2} bytes wide, because the amount of a DRAM page touched at once decides the speed. "
            f"{p.kernel.cluster_n} CTAs share the panel."
        ),
        {
            "tv": lambda p: (
                f"**Across and down.** `{p.kernel.tv}`: {p.kernel.across} threads side by side across the panel, and "
                f"{p.kernel.down} such rows down its groups. Rows of the figure are elements of a group, "
                "columns are groups, and neighbouring threads still take neighbouring addresses."
            ),
            "tile": lambda p: (
                f"**The CTA's tile**: {p.kernel.steps} such steps down. A thread holds {p.kernel.vector} groups, a few "
                "elements of each."
            ),
            "shuffle": lambda p: (
                f"**Shuffles** merge lanes with the same groups, every {p.kernel.across}th lane; the lanes in between "
                "belong to other groups."
            ),
            "cluster": lambda p: (
                "**Cluster.** One thread per column holds its CTA's maximum and sum, and stores them into all "
                f"{p.kernel.cluster_n} CTAs: layout `{p.kernel.peers}`, (column, CTA)."
            ),
        },
        dim=(0,),
    ),
    Section(
        "row_of_two",
        "A group in two dimensions",
        ((64, 50, 1000), (256, 50, 1000)),
        lambda p: p.kernel.orientation == "row" and p.kernel.reduced_modes > 1,
        lambda p: (
            "Softmax over the first and the last dimension of 64 x 50 x 1,000: a group is 64 runs of 1,000 elements, "
            f"{p.operand_strides[0][-1]:,} apart. Nothing is copied to make it contiguous: the kernel splits the "
            "index of each vector into both coordinates. The last dimension is contiguous, so vectors run along the "
            "group."
        ),
        {
            "tile": lambda p: (
                "**The tile** has one group, from left to right. The offsets of the cells (shown under the pointer) "
                "jump after every 1,000 elements; the Plan ensures that no vector straddles such an edge."
            ),
        },
        dim=(0, 2),
    ),
    Section(
        "sweep",
        "Two passes over lines of whole vectors",
        ((128256, 1039), (200001, 1001)),
        lambda p: p.movement == "sweep" and p.abreast > 1,
        lambda p: (
            f"Softmax over the first dimension of {p.length:,} x {p.columns:,}: rows of memory begin anywhere, but "
            f"{p.abreast} of them are {p.width * 2:,} bytes, whole cache lines. In these *lines* all columns begin "
            "alike, so that each thread walks down columns of its own, twice: for their states, and for their results."
        ),
        {
            "tile": lambda p: (
                f"**Lines.** `{p.kernel.tv}`: {p.kernel.threads} threads side by side, each with {p.kernel.vector} "
                f"elements of {p.kernel.steps} lines at a time. Column {p.columns:,} of a line is column 0 of the next "
                "row of memory: to a thread there is no difference before states are merged."
            ),
            "reduction_buffer": lambda p: (
                "**Between the passes** a column's states are merged, wherever in a line they come from: layout "
                f"`{p.kernel.reduction_buffer}`, (number, column, thread)."
            ),
        },
        dim=(0,),
    ),
    Section(
        "split",
        "Parts that exchange states in global memory",
        ((200000, 1024), (1000000, 1024)),
        lambda p: p.movement == "split" and p.kernel.exchange and p.kernel.streaming,
        lambda p: (
            f"Softmax over the first dimension of 200,000 x 1,024: {p.tiles} panels would leave most SMs idle, and no "
            f"cluster can hold one. {p.parts} CTAs take a part of each panel, read it in chunks and exchange states "
            "in global memory."
        ),
        {
            "exchange": lambda p: (
                "**The exchange point** is a few zeroed words and a state for each column and part. A CTA publishes "
                "its states, counts itself in, and reads those of all parts until none is zero, as no state is zero; "
                "it merges them in the order of the parts. A CTA that times out gives up its part, and the last CTA "
                "to arrive finishes it."
            ),
            "predicate": lambda p: (
                "**Where data ends**: the last panel has fewer groups, the last part fewer elements."
            ),
        },
        dim=(0,),
    ),
)


MATMULS = (
    Section(
        "matmul",
        "softmax(S) @ V: scores become an operand",
        ((32, 4096, 4096),),
        lambda p: p.kernel.blocks == 2,
        lambda p: (
            f"softmax(S) @ V for S of 32 x 4,096 x 4,096 and {p.depth} columns of V, without a softmax matrix: scores "
            "are exponentiated in the registers from which the tensor cores then read them. [softmax(S) @ "
            "V](../matmul.md) shows the tile, the fragments A, B and C, one thread's registers and the swizzle of V; "
            "here is the rest."
        ),
        {
            "ring": lambda p: (
                f"**Ring of stages.** Producer warps keep {p.kernel.score_stages} tiles of S and "
                f"{p.kernel.value_stages} of V in flight, ahead of the warps that compute. A pair of mbarriers per "
                "stage says when it is full and when it is empty again."
            ),
            "scores": lambda p: (
                "**Swizzle.** Shared memory has 32 banks of 4 bytes, and a request for two words of one bank takes an "
                "additional pass. Eight rows of 128 bytes begin in the same bank, and the eight pieces of 16 bytes "
                "that ldmatrix reads at once would all be in the same banks. So row r permutes its pieces by an xor "
                "with r: the composed layout `S<3,3,3> o 0 o ...` first computes the offset, then flips three of its "
                "bits by three higher ones. This costs nothing extra, as an xor is as cheap as a sum."
            ),
            "ldmatrix": lambda p: (
                "**ldmatrix** moves four 8 x 8 matrices in one instruction. Left: each lane gives the address of one "
                "row of a matrix. Right: a row's eight elements go to the four lanes of a quad, a pair each. The "
                "right side is a *fragment*: the order in which the tensor cores expect the A operand, "
                "`((4,8,4),(2,2,2)):((128,1,16),(64,8,512))` for 64 x 16 elements in 128 threads."
            ),
            "exchange": lambda p: (
                "**Before the store.** Accumulators come in pairs, and a pair of 16-bit numbers is a store of 4 "
                "bytes. In two rounds of shuffles the four lanes of a quad exchange pairs, so that each stores 16 "
                "bytes."
            ),
        },
        depth=128,
    ),
    Section(
        "gradients",
        "Its gradients, transposed",
        ((8, 8192, 8192),),
        lambda p: not p.kernel.lines and not p.kernel.deep,
        lambda p: (
            "The gradients of softmax(S) @ V for S of 8 x 8,192 x 8,192. There are two products, dP\u1d40 = V "
            "dO\u1d40 and dV += P\u1d40 dO, and the result of the first becomes an operand of the second."
        ),
        {
            "tile": lambda p: (
                "**Two products.** A CTA owns columns of S, which are rows of V and dV, and walks down the rows."
            ),
            "ldmatrix": lambda p: (
                "**Transposed while loading.** The products need S\u1d40, but S is in memory. With `.trans`, ldmatrix "
                "distributes matrices along their columns; stmatrix writes dS back in the same way."
            ),
            "first_product": lambda p: (
                "**Accumulators.** Both operands of this product are contiguous in K, which is D: a piece of 16 bytes "
                "of dO is 8 neighbours in k."
            ),
            "registers": lambda p: (
                "**From accumulators to operand.** The fragment of an accumulator of 16 columns is also that of the A "
                "operand: rounded to 16 bits, the registers are used in place."
            ),
        },
        backward=True,
        depth=128,
    ),
)


def figures() -> dict[str, Figure]:
    """Every figure of the page, by file name without its ending."""
    return {name: figure for section in SECTIONS + PANELS + MATMULS for name, figure in section.drawn.items()}


def plan_explorer() -> str:
    """The explorer of the section on clusters."""
    (section,) = (s for s in SECTIONS if s.key == "cluster")
    return explorer(**draw.page(section.plan))


TENSOR_CORES = (
    "The last kernels, `cute_softmax/kernels/matmul/forward_wgmma.py` and `backward.py`, multiply matrices. Their "
    "layouts are in `cute_softmax/plan/matmul_layouts.py`: tiles in shared memory, from which the kernels build "
    "theirs, and "
    "fragments, which the hardware prescribes and a test compares with CuTe's (`tests/test_diagrams_matmul.py`)."
)
ANY_DIMENSION = (
    "Groups that are not contiguous rows, and rows that do not fit in a cluster, use another kernel, "
    "`cute_softmax/kernels/panel/panel.py`: its inputs pass through shared memory, in slots that each belong to one "
    "thread."
)


def text() -> str:
    """``plans.md``."""
    lines = [
        "# The layouts of our kernels",
        "",
        "A *Plan* says how a softmax is distributed over threads, warps and CTAs. Its layouts are plain values; the",
        "kernel is built from them and these figures are drawn from them, and a test traces every kernel and",
        "compares (`tests/test_faithful.py`). All problems here are on an H200, bf16 where nothing else is said.",
        "",
        "Read from the top: each section adds one thing. The code behind the figures is",
        "`cute_softmax/kernels/row.py`; `gX` is this CTA's part of x in global memory, `sX` in shared "
        "memory, `pX`",
        "its predicate, and `tXcX` its coordinates, partitioned by x's tiled copy.",
    ]
    lines += ["", "## Rows"]
    for s in SECTIONS + PANELS + MATMULS:
        if s is PANELS[0]:
            lines += ["", "## Any dimension", "", ANY_DIMENSION]
        if s is MATMULS[0]:
            lines += ["", "## Tensor cores", "", TENSOR_CORES]
        lines += ["", f"### {s.heading}", "", s.words(s.plan), "", "```bash", s.command, "```"]
        lines += ["", "```text", s.plan.explain(), "```"]
        for name, words in s.figures.items():
            figure = s.drawn[f"plan_{s.key}_{name}"]
            lines += ["", words(s.plan), "", f"![{figure.title}](figures/plan_{s.key}_{name}.svg)"]
    return "\n".join(lines) + "\n"
