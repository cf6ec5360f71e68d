"""What a problem asks of panels, and how they are cut into parts: numbers that the decisions of `panel` need."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from .hardware import Device
from .maths import CACHE_LINE, WARP, Math, NotPlanned
from .modes import MODES, access_of, padded, power_of_two, rows_of_vectors, step_of
from .panel_class import WORD, PanelClass
from .panel_configs import (
    ABREAST_BYTES,
    ABREAST_ROWS,
    ALIGNED_CTAS,
    ALIGNED_REGISTERS,
    ALL_NUMBERS_OF_STEPS,
    INVARIANT_ROWS,
    LONG_COLUMNS,
    NARROWEST_BYTES,
    SHIFTED_BELOW_BYTES,
    SHIFTED_FROM,
    PanelConfig,
)
from .panel_plan import PanelPlan, panels_of
from .problem import ALIGNMENT, ITEM_SIZE, Mode, Problem
from .prologue import NO_PROLOGUE, Prologue, facts_of
from .table import Table, table_of


@dataclass(frozen=True)
class Groups:
    """What a problem asks of panels: along which modes vectors lie, how wide they are, and what is shared out.

    kept, reduced: modes, the slowest first; of those that vectors lie along the mode of the vectors comes last.
    vector, widest: elements of an access that all addresses allow, and of 16 bytes. access, edges, shifted,
    rows_abreast: see `PanelClass`; aligned: whether blocks can be, where a thread's rows begin alike. boundary: bytes
    at whose multiples rows of memory begin, at most a cache line. length: the longest body of a group. abreast: groups
    between the ends of which panels lie, or columns of rows that lie side by side. run: groups side by side that have
    the same element of each input with an access of 0; 0 for all of them.
    """

    math: str
    problem: Problem
    device: Device
    evict_last: bool
    orientation: str
    kept: tuple[Mode, ...]
    reduced: tuple[Mode, ...]
    vector: int
    widest: int
    access: tuple[int, ...]
    edges: bool
    shifted: bool
    aligned: bool
    boundary: int
    length: int
    abreast: int
    run: int
    rows_abreast: int = 1
    invariant: bool = False
    prologue: Prologue = NO_PROLOGUE
    query: int = 0

    @classmethod
    def of(
        cls,
        math_name: str,
        problem: Problem,
        device: Device,
        evict_last: bool,
        invariant: bool = False,
        prologue: Prologue = NO_PROLOGUE,
    ) -> Groups:
        facts = facts_of(math_name, True, prologue)
        one = Mode(1, (0,) * len(problem.dtypes))
        kept, reduced = list(problem.kept) or [one], list(problem.reduced) or [one]
        orientation = "row" if invariant else _orientation(kept, reduced, facts)
        along = kept if orientation == "column" else reduced
        inner = min(along, key=lambda m: step_of(m, facts))
        sizes = [ITEM_SIZE[problem.dtypes[i]] for i in facts.main]
        widest = ALIGNMENT // max(sizes)
        rows = 1
        if orientation == "column" and not invariant and not prologue:
            rows = _rows_abreast(problem, kept, reduced, inner, widest, facts)
        if rows > 1:
            kept[kept.index(inner)] = inner = replace(inner, size=inner.size * rows)
            reduced = [Mode(math.ceil(problem.length / rows), tuple(s * rows for s in reduced[0].strides))]
        # Of a position the index is that of the last kept mode, or of the one before where vectors lie along another.
        query = int(problem.query and orientation == "column" and inner is not kept[-1])
        along.append(along.pop(along.index(inner)))
        vector = _vector(problem, [*kept, *reduced], inner, facts)
        if invariant:
            # Whole vectors of a row, wherever it begins: loads may be narrower, see `in_rows`.
            vector = math.gcd(widest, problem.length)
        misaligned = not invariant and vector < widest and {inner.strides[i] for i in facts.main} == {1}
        edges = misaligned and orientation == "row" and len(reduced) == 1
        least = SHIFTED_FROM if problem.length < LONG_COLUMNS else min(SHIFTED_FROM, WARP * vector + 1)
        narrow = vector * min(sizes) < SHIFTED_BELOW_BYTES and inner.size >= least
        # Panels that are shifted overlap: one would write what its neighbour has still to read.
        shifted = misaligned and orientation == "column" and narrow and not problem.in_place
        if edges or shifted:
            vector = widest
        access = (vector,) * len(facts.inputs)
        if edges:
            access = _access(problem, kept, widest, facts)
        elif invariant:
            places = [_place(problem, kept, i) for i in range(len(facts.inputs))]
            access = tuple(math.gcd(vector, *place) for place in places)
        elif facts.beside:
            others = [m for m in (*kept, *reduced) if m is not inner]
            places = {i: _place(problem, others, i) for i in facts.beside}
            access = tuple(math.gcd(vector, *places.get(i, ())) for i in range(len(facts.inputs)))
        access = tuple(
            _beside(a, vector, inner, problem, i) if i in facts.beside else a for i, a in enumerate(access)
        )
        return cls(
            math=math_name,
            problem=problem,
            device=device,
            evict_last=evict_last,
            orientation=orientation,
            kept=_padded(kept, problem),
            reduced=_padded(reduced, problem),
            vector=vector,
            widest=widest,
            access=access,
            edges=edges,
            shifted=shifted,
            aligned=shifted and _alike(problem, [*kept, *reduced], vector, facts) and len(reduced) == 1,
            boundary=CACHE_LINE if rows > 1 else _boundary([*kept, *reduced], inner, problem, facts),
            length=max(problem.length // vector, 1) * vector if edges else math.ceil(problem.length / rows),
            # Panels end where a shifted mode does, and where rows that lie side by side do.
            abreast=inner.size if shifted or rows > 1 else problem.groups,
            rows_abreast=rows,
            run=0 if shifted else _run(kept, inner, [i for i, a in enumerate(access) if a == 0]),
            invariant=invariant,
            prologue=prologue,
            query=query,
        )

    @cached_property
    def facts(self) -> Math:
        return facts_of(self.math, True, self.prologue)

    @property
    def inputs(self) -> int:
        """By how many inputs configurations are listed: what is beside the elements counts for nothing."""
        return len(self.facts.inputs) - len(self.facts.beside)

    @property
    def common(self) -> bool:
        """Whether what is beside the elements, if anything is, is the same for all groups, and lies as they do."""
        beside = {i: ITEM_SIZE[self.problem.dtypes[i]] for i in self.facts.beside}
        same = all(m.strides[i] == 0 for m in self.kept if m.size > 1 for i in beside)
        whole = all(self.access[i] * size >= WORD for i, size in beside.items())
        return not beside or (same and whole and not self.edges)

    @property
    def configs(self) -> tuple[PanelConfig, ...]:
        """The configurations of panels that are held."""
        if self.shifted:
            return self.table.shifted[self.inputs]
        return self.table.held_of(self.inputs, bool(self.facts.outputs))

    @property
    def groups(self) -> int:
        """How many columns there are, of rows that lie side by side all."""
        return self.problem.groups * self.rows_abreast

    @property
    def table(self) -> Table:
        return table_of(self.device.table)

    @cached_property
    def smallest(self) -> int:
        """Bytes of an element of the narrowest full operand."""
        return min(ITEM_SIZE[self.problem.dtypes[i]] for i in self.facts.main)

    def stand(self, config: PanelConfig, narrowed: int = 1) -> tuple[int, int]:
        """(elements of a vector, threads side by side) of a configuration's panels; narrowed: see `class_of`."""
        if self.orientation == "row":
            return self.vector, 1
        size = ALIGNMENT // self.widest
        width = min(self.vector, config.vector_bytes // size)
        if self.rows_abreast > 1:
            return width, power_of_two(self.abreast // width)
        # Up to the end of the block that the last group's result may lie in; where blocks stay as they lie, so many
        # that one panel has all groups in all rows of its threads, see `PanelClass.advance_of`.
        beyond = width - 1 if self.shifted and self.facts.outputs else 0
        if self.aligned:
            beyond = -self.abreast % width + width
        return width, _across(config, self.abreast + beyond, width, size, narrowed)

    def has_threads(self, config: PanelConfig) -> bool:
        """Whether the threads of a configuration hold a group at all, which most of a table do not."""
        width, across = self.stand(config)
        unit = 1 if self.orientation == "column" else width
        return self.length <= config.threads // across * config.steps * config.cluster_n * unit

    def splits_sectors(self, config: PanelConfig) -> bool:
        """Whether panels of less than a cache line would share sectors of L2 with their neighbours, as rows begin off
        these: of one input and an output wider ones are faster."""
        # 0.75 to 0.91 of the time (6,160 to 10,240 bf16 and float32 elements, rows at multiples of 16 bytes); of
        # gradients 0.95 to 1.11; where rows begin at sectors, 0.98 to 1.19 (H200, 2026-11-29; docs/experiments.md).
        narrow = self.orientation == "column" and config.panel_bytes < CACHE_LINE
        one_of_each = self.inputs == 1 and bool(self.facts.outputs)
        return narrow and one_of_each and not self.shifted and self.boundary < NARROWEST_BYTES

    def class_of(
        self, config: PanelConfig, narrowed: int = 1, *, exchange: bool = False, streaming: bool = False
    ) -> PanelClass:
        """The class of a configuration; narrowed: by which factor panels are narrower than it says."""
        width, across = self.stand(config, narrowed)
        spread = self.orientation == "column" and 0 in self.access
        aligned = self.aligned and config.threads // across % width == 0
        return PanelClass(
            math=self.math,
            architecture=self.device.architecture.name,
            dtypes=self.problem.dtypes,
            orientation=self.orientation,
            vector=width,
            access=tuple(min(a, width) for a in self.access),
            edges=self.edges,
            shifted=self.shifted,
            across=across,
            threads=config.threads,
            steps=config.steps,
            cluster_n=config.cluster_n,
            kept_modes=len(self.kept),
            reduced_modes=len(self.reduced),
            exchange=exchange,
            buffers=config.buffers if streaming else 1,
            min_blocks=config.min_blocks,
            ahead=config.ahead,
            registers=config.registers,
            prologue=self.prologue,
            query=self.query,
            alike=math.gcd(self.run // width, min(across, WARP)) if spread else 1,
            aligned=aligned,
            rows_abreast=self.rows_abreast,
        )

    def room_for(self, c: PanelClass) -> PanelClass:
        """The class for as many CTAs, of those it says, as an SM has shared memory for, and registers where blocks stay
        as they lie."""
        # More than there is shared memory for, as some say of shifted columns and of clusters, would cost registers for
        # CTAs that an SM does not hold: 56 x 56 images of 192 to 3320 channels took 2 to 5% longer (H200, 2026-11-28).
        architecture = self.device.architecture
        most = architecture.ctas_of(c.shared_memory)
        if c.aligned:
            slots = c.threads * c.slots
            registers = architecture.registers // (slots * ALIGNED_REGISTERS)
            most = min(most, registers, ALIGNED_CTAS.get((slots, c.steps), most))
        return c if c.min_blocks <= most else replace(c, min_blocks=max(most, 1))

    def filled(self, c: PanelClass, share: int) -> PanelClass:
        """The class in as many steps as a share needs, with the CTAs that there is room for then."""
        # Steps beyond the end of a share cost their instructions, their registers and their shared memory: 0.96 of the
        # time without them over 694 tensors, 0.65 at the least. Of many there is an even number, unless that costs a
        # CTA: aligned blocks of 1,835 elements in 16 steps took 1.11 of the time in 15 (H200, 2026-11-29).
        needed = self.room_for(c.filled(share))
        if needed.steps <= ALL_NUMBERS_OF_STEPS or needed.steps % 2 == 0 or needed.steps == c.steps:
            return needed
        even = self.room_for(replace(needed, steps=needed.steps + 1))
        return needed if even.min_blocks < needed.min_blocks else even

    def widths(self, config: PanelConfig, narrowest: int = 0) -> Iterator[PanelClass]:
        """The classes of a configuration, in panels ever narrower, down to so many columns, or a sector of L2."""
        if self.shifted or not narrowest:
            narrowest = (CACHE_LINE if self.shifted else NARROWEST_BYTES) // self.smallest
        narrowed, c = 1, self.class_of(config)
        yield c
        while c.across > 1 and c.columns > narrowest and self.rows_abreast == 1:
            narrowed *= 2
            c = self.class_of(config, narrowed)
            yield c

    def taken(self, c: PanelClass) -> int:
        """Bytes of shared memory that decide; of a batch-invariant plan those that a bias and a mask take at most, lest
        it matter how they are broadcast or aligned."""
        if self.invariant:
            worst = (1 if i in self.facts.beside else a for i, a in enumerate(c.access))
            c = replace(c, access=tuple(worst))
        return c.shared_memory

    def fits(self, c: PanelClass) -> bool:
        """Whether an SM holds as many CTAs as it should: those of parts wait for each other, and all should run."""
        return c.min_blocks <= self.device.architecture.ctas_of(self.taken(c))

    def holds(self, c: PanelClass, alone: bool = False) -> bool:
        """Whether the CTAs of a cluster hold their shares of a panel, and the architecture them; alone: see
        `PanelConfig`."""
        architecture = self.device.architecture
        return (
            c.cluster_n <= architecture.cluster_limit
            and self.share(c, c.cluster_n) <= c.tile
            and (
                c.orientation == "column" and c.rows_abreast == 1
                if alone
                else c.down > 1 and c.groups <= c.threads
            )
            and self.taken(c) <= architecture.shared_memory
        )

    def beside(self, config: PanelConfig) -> PanelConfig:
        """A streaming configuration that has room for what lies beside the elements: with fewer chunks, then with
        smaller ones."""
        while self.facts.beside and config.steps > config.buffers:
            c = self.class_of(config, exchange=True, streaming=True)
            if self.fits(c):
                break
            fewer = config.buffers - 1 if config.buffers > 2 else 2
            steps = fewer * c.chunk_steps if fewer < config.buffers else config.steps // 2
            config = replace(config, steps=steps, buffers=fewer)
        return config

    def panels(self, c: PanelClass) -> int:
        """How many panels decisions are made for: all that there are."""
        if self.invariant:
            return INVARIANT_ROWS
        return panels_of(c.advance_of(self.abreast), self.groups, self.abreast)

    def share(self, c: PanelClass, ctas: int) -> int:
        """Elements of a group that each of so many CTAs takes."""
        # Shares of a row begin on a line of L2, lest two CTAs read and write one sector: 4 rows of 2^28 elements in 264
        # parts that did not had half as many sectors more to read, all hits, and ran at 0.52 of a copy (H200, ncu).
        line = CACHE_LINE // self.smallest
        grain = c.unit if self.orientation == "column" else max(c.unit, line)
        return math.ceil(math.ceil(self.length / ctas) / grain) * grain

    def plan(self, c: PanelClass, parts: int, share: int) -> PanelPlan:
        """The plan of a class, with panels in so many parts."""
        c, rows = c if c.streaming else self.filled(c, share), self.rows_abreast
        last = self.problem.length - (math.ceil(self.problem.length / rows) - 1) * rows
        return PanelPlan(
            problem=self.problem,
            kernel=c,
            length=math.ceil(self.problem.length / rows),
            kept=tuple(m.size for m in self.kept),
            reduced=tuple(m.size for m in self.reduced),
            parts=parts,
            share=share,
            operand_strides=tuple(
                tuple(m.strides[i] for modes in (self.kept, self.reduced) for m in reversed(modes))
                for i in range(len(self.problem.dtypes))
            ),
            last_row=self.abreast // rows * last if rows > 1 else 0,
            evict_last=self.evict_last,
            resident=self.device.multiprocessors * c.min_blocks,
            table=self.table.title,
            invariant=self.invariant,
        )

    def cut(
        self, config: PanelConfig, parts_of: Callable[[PanelClass, int], int], several: bool = False
    ) -> PanelPlan:
        """Parts of panels, by (class, CTAs that the GPU holds). several: stream, too, where CTAs hold what they take,
        but take one part after the other."""
        c, resident = self.class_of(config), self.device.multiprocessors * config.min_blocks
        share = self.share(c, parts_of(self.class_of(config, streaming=True), resident))
        parts = math.ceil(self.length / share)
        streaming = share > c.tile or (several and self.panels(c) * parts > resident)
        made = self.plan(self.class_of(config, exchange=parts > 1, streaming=streaming), parts, share)
        return keeping(made) if several else made

    def parts_of_chunks(self, c: PanelClass, resident: int, chunks: int) -> int:
        """Parts of so many chunks at least; and so many that all SMs have some."""
        panels = self.panels(c)
        most = min(math.ceil(self.length / c.chunk) // chunks, resident)
        most = min(max(resident // panels, most, 1), math.ceil(self.length / c.tile))
        if self.facts.outputs:
            return most
        # Down to half as many: those whose rounds of CTAs take the least time.
        return min(range(most, most // 2, -1), key=lambda parts: math.ceil(panels * parts / resident) / parts)


def keeping(made: PanelPlan) -> PanelPlan:
    """A plan with as many CTAs as take whole panels: so each has the same part of all its panels."""
    return replace(made, resident=max(made.resident // made.parts, 1) * made.parts)


def _orientation(kept: list[Mode], reduced: list[Mode], facts: Math) -> str:
    """Along which modes vectors lie: those with the closest neighbours."""
    nearest_kept, nearest_reduced = (min(step_of(m, facts) for m in modes) for modes in (kept, reduced))
    return "column" if nearest_kept < nearest_reduced else "row"


def _beside(access: int, vector: int, inner: Mode, problem: Problem, i: int) -> int:
    """Elements of a load of an input beside the elements: 0 for one of all of a vector."""
    if inner.strides[i] == 0 and vector > 1:
        return 0
    return min(access, ALIGNMENT // ITEM_SIZE[problem.dtypes[i]])


def _run(kept: list[Mode], inner: Mode, spread: list[int]) -> int:
    """Groups side by side along the inner mode that have the same element of each of these inputs, which are broadcast
    along it; 0 for all of the problem's."""
    apart = any(m.strides[i] for m in kept if m is not inner and m.size > 1 for i in spread)
    return inner.size if apart else 0


def _padded(modes: list[Mode], problem: Problem) -> tuple[Mode, ...]:
    """`padded`, or NotPlanned."""
    found = padded(modes, len(problem.dtypes))
    if found is None:
        raise NotPlanned(
            f"{len(modes)} dimensions that do not merge, of {problem}: at most {MODES[-1]} are planned"
        )
    return found


def _vector(problem: Problem, others: list[Mode], inner: Mode, facts: Math) -> int:
    """Elements of an access: as wide as all addresses allow."""
    vector = ALIGNMENT // max(ITEM_SIZE[problem.dtypes[i]] for i in facts.main)
    if inner.size > 1 and any(inner.strides[i] != 1 for i in facts.main):
        return 1
    numbers = [inner.size, *(problem.offsets[i] for i in facts.main)]
    numbers += [m.strides[i] for m in others if m is not inner and m.size > 1 for i in facts.main]
    return math.gcd(vector, *numbers)


def _access(problem: Problem, kept: list[Mode], vector: int, facts: Math) -> tuple[int, ...]:
    """Per input, elements of a load of a row whose vectors begin where those of the reference operand do."""
    reference = _place(problem, kept, facts.reference)
    return tuple(access_of(vector, _place(problem, kept, i), reference) for i in range(len(facts.inputs)))


def _boundary(modes: list[Mode], inner: Mode, problem: Problem, facts: Math) -> int:
    """Bytes at whose multiples rows of memory along the inner mode begin."""
    others = [m for m in modes if m is not inner and m.size > 1]
    sizes = {i: ITEM_SIZE[problem.dtypes[i]] for i in facts.main}
    steps = [m.strides[i] * size for m in others for i, size in sizes.items()]
    return math.gcd(CACHE_LINE, *steps, *(problem.offsets[i] * size for i, size in sizes.items()))


def _place(problem: Problem, kept: list[Mode], i: int) -> tuple[int, ...]:
    """Where rows of an operand begin: its offset, and its strides between them."""
    return problem.offsets[i], *(m.strides[i] for m in kept if m.size > 1)


def _alike(problem: Problem, modes: list[Mode], vector: int, facts: Math) -> bool:
    """Whether where a group lies in a block is the same in all full operands, with nothing beside them."""
    if facts.beside:
        return False
    places = {tuple(n % vector for n in _place(problem, modes, i)) for i in facts.main}
    return len(places) == 1


def _rows_abreast(
    problem: Problem, kept: list[Mode], reduced: list[Mode], inner: Mode, widest: int, facts: Math
) -> int:
    """How many rows of memory make whole vectors, where rows of few columns, an odd number, follow each other; or 1."""
    few = inner.size * ALIGNMENT // widest <= ABREAST_BYTES and problem.length >= ABREAST_ROWS * widest
    if not (few and inner.size > 1 and inner.size % 2 and facts.outputs and len(reduced) == 1):
        return 1
    others = [m for m in kept if m is not inner and m.size > 1]
    return rows_of_vectors(problem, others, reduced[0], inner, widest, facts) or 1


def _across(config: PanelConfig, groups: int, vector: int, size: int, narrowed: int) -> int:
    """Threads side by side over a panel: a power of two."""
    if config.alone:
        return config.threads
    most = min(max(config.panel_bytes // (vector * size), 1), WARP)
    needed = power_of_two(math.ceil(groups / vector))
    return max(min(most, needed) // narrowed, 1)
