"""The `column` and `split` movements: their Plan classes, and how a problem is cut into panels and parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from .base import PlanBase
from .hardware import Device
from .maths import CACHE_LINE, MATHS, WARP, Math, NotPlanned, check_counts
from .modes import MODES, access_of, offset_of, padded
from .panel_class import PanelClass, exchange_words
from .panel_configs import (
    AHEAD,
    CHUNKS_OF_A_PART,
    CHUNKS_OF_A_PART_ALONE,
    DEEP,
    DEEP_PANELS_AT_ONCE,
    DEEP_ROWS_AT_ONCE,
    HELD,
    NARROWEST_BYTES,
    SHIFTED,
    SHIFTED_BELOW_BYTES,
    SHIFTED_FROM,
    STREAMING,
    PanelConfig,
)
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Problem

# An exchange point waits so long (nanoseconds) before a CTA leaves its part to the last one that arrives.
PATIENCE = 1_000_000


@dataclass(frozen=True)
class PanelPlan(PlanBase):
    """How one launch over columns, or over rows that several CTAs share, runs: the column and split movements.

    What is compiled, and the numbers that change from call to call. Plain numbers, made without a GPU, torch or
    cutlass. A *group* is what is reduced together, a *panel* the groups that CTAs work on side by side. A notebook
    draws it: the tile of the first CTA.

    Attributes:
        problem: The call in canonical form: its dimensions merged, sizes and strides in elements, dtypes.
        kernel: What is compiled: threads, vectors, cluster, staging.
        length: Elements of a group.
        kept: Sizes of the kept dimensions, the slowest first; vectors of columns lie in the last.
        reduced: Sizes of the reduced dimensions, likewise.
        parts: CTAs (clusters) that share a panel.
        share: Elements of a group that a CTA takes.
        operand_strides: Per operand, its strides in the kept and then in the reduced dimensions, each the fastest
            first, in elements.
        evict_last: Whether reads ask to be evicted from L2 last.
        resident: CTAs that the GPU holds at a time.
        patience: Nanoseconds that a CTA waits for the others before it leaves its part to the last one.
    """

    problem: Problem
    kernel: PanelClass
    length: int
    kept: tuple[int, ...]
    reduced: tuple[int, ...]
    parts: int
    share: int
    operand_strides: tuple[tuple[int, ...], ...]
    evict_last: bool
    resident: int
    patience: int = PATIENCE

    @property
    def chunks(self) -> int:
        """Chunks of a share; some may be empty."""
        c = self.kernel
        fewest = c.registers + c.ahead - c.wait if c.ahead else 0
        return max(math.ceil(self.share / c.chunk), fewest)

    @property
    def again(self) -> int:
        """How many chunks are read twice: those that are not held."""
        return max(self.chunks - self.kernel.buffers, 0) if self.kernel.repeats else 0

    @property
    def groups(self) -> int:
        """How many groups there are, side by side in panels."""
        return math.prod(self.kept)

    def group(self, operand: int, index: int) -> int:
        """Elements from the beginning of an operand to that of a group."""
        strides = self.operand_strides[operand][: len(self.kept)]
        return offset_of(index, self.kept, strides[::-1])

    def element(self, operand: int, index: int) -> int:
        """Elements from the beginning of a group to one of its elements."""
        strides = self.operand_strides[operand][len(self.kept) :]
        return offset_of(index, self.reduced, strides[::-1])

    def pieces(self, group: int) -> tuple[int, int]:
        """(head, body) of a group: elements before its first line of cache, and in whole vectors; all others are its
        tail. Tensors are taken to begin `problem.offsets` elements past a cache line."""
        c = self.kernel
        if not c.edges:
            return 0, self.length
        start = self.problem.offsets[c.facts.reference] + self.group(c.facts.reference, group)
        head = min(-start % c.line, self.length)
        return head, (self.length - head) // c.vector * c.vector

    def bounds(self, part: int, rank: int, group: int = 0) -> range:
        """The elements of the body of a group that a CTA takes: CTA `rank` of its cluster, of a part."""
        head, body = self.pieces(group)
        first = (part * self.kernel.cluster_n + rank) * self.share
        return range(head + first, head + max(first, min(first + self.share, body)))

    @property
    def abreast(self) -> int:
        """Groups between the ends of which panels lie: where vectors are shifted, those of the last kept mode."""
        return self.kept[-1] if self.kernel.shifted else self.groups

    def panel(self, tile: int) -> range:
        """The groups of a panel."""
        c, outer, inner = self.kernel, *divmod(tile, math.ceil(self.abreast / self.kernel.advance))
        first = outer * self.abreast
        return range(first, first + self.abreast)[inner * c.advance :][: c.columns]

    @property
    def tiles(self) -> int:
        """How many panels there are."""
        return _panels(self.kernel, self.groups, self.abreast)

    @property
    def ctas(self) -> int:
        """CTAs of the grid, or clusters: those that stream to outputs work on several items, one after the other."""
        c, items = self.kernel, self.tiles * self.parts
        several = c.streaming and c.facts.outputs and c.cluster_n == 1
        return min(items, self.resident) if several else items

    @property
    def exchange_bytes(self) -> int:
        """Bytes of all exchange points, in whole 16."""
        return -(-self.tiles * exchange_words(self.parts) * 4 // 16) * 16

    @property
    def scratch(self) -> int:
        """Bytes of zeroed memory that the launch needs: the exchange points, then the parts' states."""
        if not self.kernel.exchange:
            return 0
        states = self.tiles * self.parts * self.kernel.columns * self.kernel.published_bytes
        return self.exchange_bytes + states

    @property
    def arguments(self) -> tuple[int, ...]:
        """The ints that the compiled function takes between the stream and the scratch memory or the operands."""
        return (
            self.ctas,
            self.tiles * self.parts,
            self.length,
            self.groups,
            self.parts,
            self.share,
            int(self.evict_last),
            self.patience,
            self.chunks,
            self.exchange_bytes,
            *self.kept[:0:-1],
            *self.reduced[:0:-1],
        )

    def explain(self) -> str:
        """The plan as a person would want to read it."""
        c = self.kernel
        if c.orientation == "column":
            where = f"panels of {c.columns} columns by {self.length} elements, {c.across} x {c.down} threads"
        else:
            where = f"a CTA or more a row, {c.threads} threads along it"
        if c.cluster_n > 1:
            where += f", clusters of {c.cluster_n} CTAs"
        if c.exchange:
            where += f"; {self.parts} parts that exchange states in global memory"
        lines = [
            f"{c.math} of {self.groups} groups of {self.length}, "
            f"{' -> '.join(dict.fromkeys(c.dtypes))}, for {c.architecture}",
            f"  movement   {c.movement}: {where}; class {c.name}",
            f"  threads    {c.threads} a CTA; tile of {c.tile} elements by {c.columns} groups",
            f"  thread     {c.steps} vectors of {c.vector} elements in shared memory"
            + (f", {c.registers * c.chunk_steps} in registers" if c.registers else ""),
            f"  loads      cp.async, {' and '.join(c.load_widths)} at a time; "
            f"L2 {'evict_last' if self.evict_last else 'evict_normal'}",
            *(["  edges      head and tail scalars apart"] if c.edges else []),
            *(
                [f"  edges      aligned blocks, shifted into place; a panel every {c.advance} columns"]
                if c.shifted
                else []
            ),
            f"  modes      kept {' x '.join(map(str, self.kept))}, "
            f"reduced {' x '.join(map(str, self.reduced))}",
            f"  reduction  {c.stages} stage(s); buffer {c.reduction_buffer}, "
            f"{c.reduction_buffer.cosize * 4} bytes",
            f"  grid       {self.ctas} {'clusters' if c.cluster_n > 1 else 'CTAs'} for {self.tiles} "
            f"panels; {c.shared_memory} bytes of shared memory a CTA",
            f"  traffic    {self.problem.bytes / 1e6:.1f} MB, "
            + (f"{self.again} of {self.chunks} chunks read twice" if c.repeats else "every element read once")
            + (" and written once" if c.facts.outputs else ", one result written per group"),
        ]
        return "\n".join(lines)


def plan_panel(math_name: str, problem: Problem, device: Device, evict_last: bool) -> PanelPlan:
    """The plan of the column or split movement for any problem.

    Raises NotPlanned for groups of 2^31 elements and more, for as many groups, and for tensors of too many dimensions.
    """
    facts = MATHS[math_name, True]
    check_counts({"elements in a group": problem.length, "groups": problem.groups})
    one = Mode(1, (0,) * len(problem.dtypes))
    kept, reduced = list(problem.kept) or [one], list(problem.reduced) or [one]
    orientation = _orientation(kept, reduced, facts.full)
    # The mode along which vectors lie comes last.
    along = kept if orientation == "column" else reduced
    inner = min(along, key=lambda m: _step(m, facts.full))
    along.append(along.pop(along.index(inner)))
    vector = _vector(problem, [*kept, *reduced], inner, facts.full)
    widest, smallest = _widest(problem, facts.full), min(ITEM_SIZE[d] for d in problem.dtypes[: facts.full])
    misaligned = vector < widest and set(inner.strides[: facts.full]) == {1}
    edges = misaligned and orientation == "row" and len(reduced) == 1
    narrow = vector * smallest < SHIFTED_BELOW_BYTES and inner.size >= SHIFTED_FROM
    # Panels that are shifted overlap: one would write what its neighbour has still to read.
    shifted = misaligned and orientation == "column" and narrow and not problem.in_place
    if edges or shifted:
        vector = widest
    access = _access(problem, kept, widest, facts) if edges else (vector,) * len(facts.inputs)
    # What is shared out: the longest body of a row. Panels end where a shifted mode does.
    length = max(problem.length // vector, 1) * vector if edges else problem.length
    abreast = inner.size if shifted else problem.groups
    kept, reduced = _padded(kept, problem), _padded(reduced, problem)

    def class_of(
        config: PanelConfig, narrowed: int = 1, *, exchange: bool = False, streaming: bool = False
    ) -> PanelClass:
        size = max(ITEM_SIZE[d] for d in problem.dtypes[: facts.full])
        width = min(vector, config.vector_bytes // size) if orientation == "column" else vector
        # Up to the end of the block that the last group's result may lie in.
        beyond = width - 1 if shifted and facts.outputs else 0
        return PanelClass(
            math=math_name,
            architecture=device.architecture.name,
            dtypes=problem.dtypes,
            orientation=orientation,
            vector=width,
            access=tuple(min(a, width) for a in access),
            edges=edges,
            shifted=shifted,
            across=_across(config, abreast + beyond, width, size, narrowed) if orientation == "column" else 1,
            threads=config.threads,
            steps=config.steps,
            cluster_n=config.cluster_n,
            kept_modes=len(kept),
            reduced_modes=len(reduced),
            exchange=exchange,
            buffers=config.buffers if streaming else 1,
            min_blocks=config.min_blocks,
            ahead=config.ahead,
            registers=config.registers,
        )

    def panels(c: PanelClass) -> int:
        return _panels(c, problem.groups, abreast)

    def share_of(c: PanelClass, ctas: int) -> int:
        # Shares of a row begin on a line of L2, lest two CTAs read and write one sector: 4 rows of 2^28 elements in 264
        # parts that did not had half as many sectors more to read, all hits, and ran at 0.52 of a copy (H200, ncu).
        line = CACHE_LINE // smallest
        grain = c.unit if orientation == "column" else max(c.unit, line)
        return math.ceil(math.ceil(length / ctas) / grain) * grain

    def planned(c: PanelClass, parts: int, share: int) -> PanelPlan:
        return PanelPlan(
            problem=problem,
            kernel=c,
            length=problem.length,
            kept=tuple(m.size for m in kept),
            reduced=tuple(m.size for m in reduced),
            parts=parts,
            share=share,
            operand_strides=tuple(
                tuple(m.strides[i] for modes in (kept, reduced) for m in reversed(modes))
                for i in range(len(problem.dtypes))
            ),
            evict_last=evict_last,
            resident=device.multiprocessors * c.min_blocks,
        )

    for config in (SHIFTED if shifted else HELD)[len(facts.inputs)]:
        c, narrowed = class_of(config), 1
        if (shifted or orientation == "row") and not facts.outputs and config.cluster_n == 16:
            break  # what is only read need not be held: see docs/experiments.md
        if not _fits(config, c, share_of(c, c.cluster_n), device):
            continue
        few_bytes = orientation == "column" and vector < widest and facts.outputs
        if config.narrow and not (few_bytes and panels(c) * c.cluster_n >= device.multiprocessors):
            continue
        # Narrower panels where wide ones would leave SMs idle.
        narrowest = (CACHE_LINE if shifted else NARROWEST_BYTES) // smallest
        while (
            panels(c) * c.cluster_n < device.multiprocessors
            and not config.alone
            and c.across > 1
            and c.columns > narrowest
        ):
            narrowed *= 2
            c = class_of(config, narrowed)
        return planned(c, 1, share_of(c, c.cluster_n))

    def keeping(made: PanelPlan) -> PanelPlan:
        """A plan with as many CTAs as take whole panels: so each has the same part of all its panels."""
        return replace(made, resident=max(made.resident // made.parts, 1) * made.parts)

    def cut(
        config: PanelConfig, parts_of: Callable[[PanelClass, int], int], several: bool = False
    ) -> PanelPlan:
        """Parts of panels: at least so many that all SMs have some. several: stream, too, where CTAs hold what they
        take, but take one part after the other."""
        c, resident = class_of(config), device.multiprocessors * config.min_blocks
        parts = parts_of(class_of(config, streaming=True), resident)
        share = share_of(c, parts)
        parts = math.ceil(length / share)
        streaming = share > c.tile or (several and panels(c) * parts > resident)
        made = planned(class_of(config, exchange=parts > 1, streaming=streaming), parts, share)
        return keeping(made) if several else made

    def of_chunks(chunks_of_a_part: float, panels_at_once: int) -> Callable[[PanelClass, int], int]:
        """Parts of so many chunks at least, of so many panels at a time."""

        def parts_of(c: PanelClass, resident: int) -> int:
            chunks = math.ceil(length / c.chunk)
            parts = max(
                resident // panels(c), min(int(chunks / chunks_of_a_part), resident // panels_at_once), 1
            )
            return min(parts, math.ceil(length / c.tile))

        return parts_of

    def whole_panels(c: PanelClass, resident: int) -> int:
        """Deep parts, of as many panels at a time as share all SMs evenly: so that a CTA keeps its part."""
        parts = of_chunks(deep.chunks, DEEP_PANELS_AT_ONCE)(c, resident)
        if panels(c) * parts <= resident:
            return parts
        return resident // math.ceil(resident / parts)

    def held(c: PanelClass, resident: int) -> int:
        """Parts of as many rows at a time as can be held, of some at least, but of one where a part is very long."""
        at_once = max(resident // math.ceil(length / c.tile), DEEP_ROWS_AT_ONCE)
        if length >= CHUNKS_OF_A_PART_ALONE * resident * c.chunk:
            at_once = 1
        # As many in the last round as in the others, or nearly.
        at_once = math.ceil(panels(c) / math.ceil(panels(c) / at_once))
        return max(resident // at_once, 1)

    def row_ahead() -> PanelPlan | None:
        """The plan with as many rows at once as are held, and the next ahead; None for longer rows, and for no more."""
        c, resident = class_of(AHEAD, exchange=True, streaming=True), device.multiprocessors
        parts = math.ceil(length / (c.most_chunks * c.chunk))
        if (
            len(facts.inputs) > 1
            or not 1 < parts <= resident <= c.readers * c.loads  # which it reads at once
            or problem.groups <= (at_once := resident // parts)
        ):
            return None
        share = share_of(c, resident // at_once)
        return keeping(planned(c, math.ceil(length / share), share))

    def deep_config() -> PanelConfig | None:
        """The deep configuration for what has a full output, if the architecture has room for as many as share an
        SM."""
        for config in DEEP.get((orientation, len(facts.inputs)), ()) if facts.outputs else ():
            c = class_of(config, exchange=True, streaming=True)
            room = config.min_blocks * c.shared_memory <= device.architecture.shared_memory
            if length <= config.longest and room:
                return config
        return None

    deep = deep_config()
    if deep:
        if orientation == "row":
            made = row_ahead() or cut(deep, held, several=True)
        else:
            made = cut(deep, whole_panels, several=True)
        if made.kernel.streaming:
            return made
    config = STREAMING[len(facts.inputs)]
    while class_of(config, exchange=True, streaming=True).shared_memory > device.architecture.shared_memory:
        config = replace(config, steps=config.steps // 2)
    return cut(config, of_chunks(CHUNKS_OF_A_PART[orientation], 1))


def _panels(c: PanelClass, groups: int, abreast: int) -> int:
    """How many panels there are of so many groups, side by side in so many."""
    return groups // abreast * math.ceil(abreast / c.advance)


def _fits(config: PanelConfig, c: PanelClass, share: int, device: Device) -> bool:
    """Whether the CTAs of a cluster hold their shares of a panel, and the architecture them."""
    return (
        c.cluster_n <= device.architecture.cluster_limit
        and share <= c.tile
        and (c.orientation == "column" if config.alone else c.down > 1 and c.columns <= c.threads)
        and c.shared_memory <= device.architecture.shared_memory
    )


def _step(mode: Mode, full: int) -> int:
    """How far apart neighbours of a mode lie, in all full operands together; modes of one element count for none."""
    return sum(abs(s) for s in mode.strides[:full]) if mode.size > 1 else 1 << 62


def _orientation(kept: list[Mode], reduced: list[Mode], full: int) -> str:
    """Along which modes vectors lie: those with the closest neighbours."""
    nearest_kept, nearest_reduced = (min(_step(m, full) for m in modes) for modes in (kept, reduced))
    return "column" if nearest_kept < nearest_reduced else "row"


def _padded(modes: list[Mode], problem: Problem) -> tuple[Mode, ...]:
    """`padded`, or NotPlanned."""
    found = padded(modes, len(problem.dtypes))
    if found is None:
        raise NotPlanned(
            f"{len(modes)} dimensions that do not merge, of {problem}: at most {MODES[-1]} are planned"
        )
    return found


def _widest(problem: Problem, full: int) -> int:
    """Elements of the widest access."""
    return ALIGNMENT // max(ITEM_SIZE[d] for d in problem.dtypes[:full])


def _vector(problem: Problem, others: list[Mode], inner: Mode, full: int) -> int:
    """Elements of an access: as wide as all addresses allow."""
    vector = _widest(problem, full)
    if inner.size > 1 and any(s != 1 for s in inner.strides[:full]):
        return 1
    numbers = [inner.size, *problem.offsets[:full]]
    numbers += [s for m in others if m is not inner and m.size > 1 for s in m.strides[:full]]
    return math.gcd(vector, *numbers)


def _access(problem: Problem, kept: list[Mode], vector: int, facts: Math) -> tuple[int, ...]:
    """Per input, elements of a load of a row whose vectors begin where those of the reference operand do."""

    def place(i: int) -> tuple[int, ...]:
        return problem.offsets[i], *(m.strides[i] for m in kept if m.size > 1)

    reference = place(facts.reference)
    return tuple(access_of(vector, place(i), reference) for i in range(len(facts.inputs)))


def _across(config: PanelConfig, groups: int, vector: int, size: int, narrowed: int) -> int:
    """Threads side by side over a panel: a power of two."""
    if config.alone:
        return config.threads
    most = min(max(config.panel_bytes // (vector * size), 1), WARP)
    needed = 1 << (math.ceil(groups / vector) - 1).bit_length()
    return max(min(most, needed) // narrowed, 1)
