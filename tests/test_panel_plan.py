"""Plans of panels: thousands of random problems, in each of which the threads' own arithmetic is walked through.

Every element of every group is reduced once and finished once, whatever the dimensions, strides and offsets, in every
movement; accesses are aligned; everything fits the architecture.
"""

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, product

import classes
import panels
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from panels import FEW_COLUMNS, dense, problem_of

from cute_softmax.kernels.panel import abreast, aligned, shift, work
from cute_softmax.plan import MATHS, WARP, NotPlanned, PanelClass, PanelPlan, panel, plan, plan_panel
from cute_softmax.plan.describe import plan_shape
from cute_softmax.plan.hardware import ARCHITECTURES, H200, Device
from cute_softmax.plan.maths import MOST
from cute_softmax.plan.modes import MODES
from cute_softmax.plan.panel_configs import (
    ALIGNED_CTAS,
    ALIGNED_REGISTERS,
    NARROWEST_BYTES,
    SHIFTED_FROM,
    PanelConfig,
)
from cute_softmax.plan.problem import ITEM_SIZE, Operand, Problem, canonical
from cute_softmax.plan.table import table_of

TABLE = table_of()
# The tuner's bound for the lengths that it measures is 64; of others some have an odd number of steps.
MOST_CLASSES = 72
DEVICES = {name: Device(a, multiprocessors=132, l2=50 << 20) for name, a in ARCHITECTURES.items()}
# Panels have no group inputs.
NAMES = sorted(name for name in classes.PAIRS_OF if not MATHS[name, True].group_inputs)
forms = pytest.mark.parametrize("arch", ARCHITECTURES)


@pytest.fixture(autouse=True)
def no_sweeps(monkeypatch):
    """Panels of all columns: which of them are swept over is tested in `test_sweep`."""
    monkeypatch.setattr(panel, "_swept", lambda groups: None)


def panel_plan(problem: Problem, name: str, arch: str = "sm_90a") -> PanelPlan:
    return plan_panel(name, problem, DEVICES[arch], False)


@st.composite
def strides(draw, shape, *, written: bool):
    """Strides of a permuted tensor whose dimensions may be sliced and stepped, and expanded unless it is written."""
    found, reach = [0] * len(shape), draw(st.sampled_from([1, 1, 1, 1, 2, 3, 8]))
    for d in draw(st.permutations(range(len(shape))) | st.just(range(len(shape))[::-1])):
        reach += draw(st.sampled_from([0, 0, 0, 1, 3, 8]))
        if not written and draw(st.integers(0, 7)) == 0:
            continue
        found[d] = reach
        reach *= shape[d]
    return tuple(found)


@st.composite
def problems(draw, most: int):
    name = draw(st.sampled_from(NAMES))
    pair = draw(st.sampled_from(classes.PAIRS_OF[name]))
    dtypes, full = classes.operands(name, pair), MATHS[name, True].full
    shape, left = [], most
    for _ in range(draw(st.integers(1, 6))):
        shape.append(min(draw(st.sampled_from([1, 2, 3, 4, 8, 16, 7, 33, 64, 129, 520])), left))
        left = max(left // shape[-1], 1)
    shape = tuple(draw(st.permutations(shape)))
    dims = draw(st.sets(st.integers(0, len(shape) - 1), min_size=1))
    same = draw(strides(shape, written=True))
    places = [
        same if draw(st.booleans()) else draw(strides(shape, written=i >= full - 1 and name not in classes.REDUCTIONS))
        for i in range(full)
    ]  # fmt: skip
    group = tuple(0 if d in dims else s for d, s in enumerate(draw(strides(shape, written=True))))
    places += [group] * (len(dtypes) - full)
    offset = draw(st.sampled_from([0, 0, 0, 1, 2, 4, 8]))
    operands = [
        Operand(d, s, draw(st.sampled_from([offset, offset, 3])) * ITEM_SIZE[d])
        for d, s in zip(dtypes, places, strict=True)
    ]
    return name, canonical(shape, dims, operands)


merging = set()


def check_whole(made: PanelPlan):
    panels.check_numbers(made)
    panels.check_owners(made)
    c = made.kernel
    form = c.across, c.threads, c.slots, c.cluster_n, c.exchange and made.parts
    if form not in merging:
        merging.add(form)
        panels.check_merging(c, made.parts)


def unmergeable(problem: Problem) -> bool:
    return max(len(problem.kept), len(problem.reduced)) > MODES[-1]


@pytest.mark.long
@settings(max_examples=400)
@given(problems(4096), st.sampled_from(sorted(ARCHITECTURES)))
def test_every_element_has_one_owner(drawn, arch):
    name, problem = drawn
    try:
        made = panel_plan(problem, name, arch)
    except NotPlanned as error:
        assert unmergeable(problem) and "dimensions that do not merge" in str(error)
        return
    check_whole(made)
    assert f"class {made.kernel.name}\n" in made.explain()


@pytest.mark.long
@settings(max_examples=150)
@given(problems(3000))
def test_every_movement_has_one_owner(drawn):
    """The same problems in every movement, on configurations so small that short groups need it."""
    name, problem = drawn
    if unmergeable(problem):
        return
    for _, made in panels.movements(panel_plan(problem, name)):
        panels.check_owners(made)
        panels.check_merging(made.kernel, made.parts)


@st.composite
def by_hand(draw):
    """A plan whose configuration, parts and panels are drawn, too."""
    name, problem = draw(problems(6000).filter(lambda drawn: not unmergeable(drawn[1])))
    made = panel_plan(problem, name)
    across = draw(st.sampled_from([1, 2, 4, 8, 16, 32]))
    config = PanelConfig(
        draw(st.sampled_from([32, 64, 128, 256])),
        draw(st.sampled_from([2, 4, 6])),
        cluster_n=draw(st.sampled_from([1, 1, 2, 4, 16])),
    )
    if made.kernel.orientation == "row":
        across = 1
    across = min(across, max(config.threads // made.kernel.slots, 1))
    parts = draw(st.sampled_from([1, 1, 2, 3, 7, 40])) if config.cluster_n == 1 else 1
    return panels.forced(made, config, parts, across=across)


@pytest.mark.long
@settings(max_examples=250)
@given(by_hand())
def test_configurations_and_panels_of_any_shape(made):
    panels.check_owners(made)
    panels.check_merging(made.kernel, made.parts)


LENGTHS = (1, 2, 3, 7, 33, 127, 128, 129, 1023, 1025, 2048, 4097, 9000, 33000)
WIDTHS = (1, 3, 8, 40, 64, 130)


@pytest.mark.parametrize("name", ["softmax", "softmax_backward", "logsumexp"])
@pytest.mark.parametrize("width", WIDTHS)
def test_first_dimension(width, name):
    """Ugly lengths on the real configurations; of the longest a walk of one dtype."""
    for length, pair in product(LENGTHS, (("bf16", "bf16"), ("fp32", "fp32"))):
        made = panel_plan(problem_of(name, pair, (length, width), (0,)), name)
        panels.check_numbers(made)
        if length * width <= 150_000:
            check_whole(made)


def large(name: str, dtype: str):
    """Problems too large to walk through: (length, width, outer groups)."""
    for length, width, outer in product(
        (1, 100, 5000, 70_000, 10**6, MOST), (1, 7, 64, 4096, 10**6, MOST), (1, 3, 70_000)
    ):
        if length * width * outer < 1 << 40 and width * outer <= MOST:
            shape = (outer, length, width)
            yield problem_of(name, (dtype, dtype), shape, (1,))
            yield problem_of(name, (dtype, dtype), shape, (1,), tuple(3 * s for s in dense(shape)))


@forms
@pytest.mark.parametrize("name", NAMES)
def test_large_problems(name, arch):
    names = {}
    for dtype in ("bf16", "fp32"):
        for problem in large(name, dtype):
            made = panel_plan(problem, name, arch)
            panels.check_numbers(made)
            same = replace(made.kernel, min_blocks=1)
            names.setdefault((dtype, made.kernel.name), set()).add(tuple(same.fields.items()))
    assert len(names) > 20
    assert all(len(found) == 1 for found in names.values()), "two classes of one name"


@pytest.mark.parametrize("field", ["orientation", "vector", "across", "threads", "steps", "cluster_n"])
def test_names_tell_classes_apart(field):
    c = panel_plan(problem_of("softmax", ("bf16",) * 2, (128, 64), (0,)), "softmax").kernel
    other = {"orientation": "row"}.get(field) or 2 * getattr(c, field)
    assert replace(c, **{field: other}).name != c.name


@forms
def test_configurations_fit_and_follow_each_other(arch):
    """In the order of the longest columns that they hold, as the first that fits is taken, and wide panels before
    narrow ones; what none of them holds can be streamed."""
    for inputs, configs in (*TABLE.held.items(), *TABLE.shifted.items()):
        for clusters in (False, True):
            room = [
                (t.room, -t.panel_bytes)
                for t in configs
                if (t.cluster_n > 1) == clusters and not t.alone and not t.narrow
            ]
            assert room == sorted(room)
        name = ("logsumexp", "softmax", "softmax_backward")[inputs]
        for config, across, orientation in product(
            (*configs, TABLE.streaming[max(inputs, 1)]), (1, 4, 16), ("column", "row")
        ):
            problem = problem_of(name, ("bf16",) * 2, (128, 64), (0,))
            made = panels.forced(
                panel_plan(problem, name), config, across=1 if orientation == "row" else across
            )
            c = replace(made.kernel, architecture=arch, orientation=orientation)
            if config.cluster_n <= ARCHITECTURES[arch].cluster_limit:
                panels.check_merging(c, 100)
    for name in ("softmax", "softmax_backward"):
        for pair in classes.PAIRS:
            for shape in ((10**6, 64), (10**6, 1)):
                made = panel_plan(problem_of(name, pair, shape, (0,)), name, arch)
                panels.check_numbers(made)
                assert made.kernel.exchange


def test_narrow_vectors_have_configurations_of_their_own():
    """Of many threads and steps, where panels fill the GPU; others stream such columns, or exchange."""

    def every_other(name: str, shape: tuple[int, int]) -> PanelClass:
        return panel_plan(problem_of(name, ("bf16",) * 2, shape, (0,), (2 * shape[1], 2)), name).kernel

    for shape, config in (
        ((4096, 65536), TABLE.held[1][-2]),
        ((8192, 32768), TABLE.held[1][-1]),
        ((8193, 65536), None),
    ):
        c = every_other("softmax", shape)
        assert c.vector == 1 and c.exchange == (config is None)
        assert config is None or (config.narrow and (c.threads, c.steps) == (config.threads, config.steps))
    for name, shape in (("softmax", (4096, 3)), ("logsumexp", (4096, 65536))):
        assert every_other(name, shape).steps < TABLE.held[1][-1].steps


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")])
@pytest.mark.parametrize("name", ["softmax", "softmax_backward", "logsumexp"])
def test_columns_that_begin_anywhere_are_shifted(name, pair):
    """Copied in whole blocks, if there are enough side by side; walked through, on real configurations and in all
    movements."""
    for width, lengths, outer, offsets in (
        (SHIFTED_FROM, (5, 300), 1, (1, 3, 2, 0)),
        (55, (3, 20, 100, 200), 2, (0, 0, 0, 0)),
        (131, (9, 70, 500), 1, (0, 1, 7, 0)),
        (257, (21, 150), 1, (0, 0, 0, 0)),
        (1025, (7, 21), 1, (5, 5, 5, 0)),
    ):
        for length in lengths:
            strides = (length * (width + 2), width + 2, 1) if width % 2 else (length * width, width, 1)
            problem = problem_of(name, pair, (outer, length, width), (1,), strides, offsets)
            made = panel_plan(problem, name)
            c = made.kernel
            assert c.shifted and c.vector * max(ITEM_SIZE[d] for d in c.dtypes[: c.facts.full]) in (8, 16)
            check_whole(made)
            for _, other in panels.movements(made) if outer * length * width < 10_000 else ():
                panels.check_owners(other)
                panels.check_merging(other.kernel, other.parts)


def test_what_is_not_shifted():
    """Few columns, vectors of 8 bytes, neighbours that do not lie side by side, and what is written in place."""
    problem = problem_of("softmax", ("bf16",) * 2, (300, 131), (0,))
    assert panel_plan(problem, "softmax").kernel.shifted
    assert not panel_plan(replace(problem, in_place=True), "softmax").kernel.shifted
    for length, beside, shifted in (
        (1 << 17, 33, True),
        (1 << 17, 32, False),
        (1 << 16, 33, False),
        (1 << 17, 34, False),
    ):
        made = panel_plan(problem_of("softmax", ("fp32",) * 2, (length, beside), (0,)), "softmax")
        assert made.kernel.shifted == shifted, (length, beside)
    for shape, strides in (
        ((300, SHIFTED_FROM - 1), None),
        ((300, 132), None),
        ((300, 131), (300, 2)),
        ((300, 136), None),
    ):
        c = panel_plan(problem_of("softmax", ("bf16",) * 2, shape, (0,), strides), "softmax").kernel
        assert c.orientation == "column" and not c.shifted and c.extra == c.overlap == 0


def test_panels_are_as_wide_as_memory_likes():
    """Whole 256 bytes where there is enough to do; never less than a sector for the sake of idle SMs."""
    for pair in (("bf16", "bf16"), ("fp32", "fp32")):
        size = ITEM_SIZE[pair[0]]
        wide = panel_plan(problem_of("softmax", pair, (1000, 128, 4096), (1,)), "softmax").kernel
        assert wide.columns * size == 256 and wide.vector * size == 16
        narrow = panel_plan(problem_of("softmax", pair, (128, 512), (0,)), "softmax").kernel
        assert NARROWEST_BYTES <= narrow.columns * size < 256


@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
def test_deep_parts_share_all_sms_evenly(name):
    """A CTA keeps its part, panel after panel, and nearly all SMs are full; a part has the chunks that it should. Of
    short columns two CTAs share an SM."""
    configs = TABLE.deep["column", len(MATHS[name, True].inputs)]
    held_otherwise = (12000, 16384, 20480, 24576) if name == "softmax_backward" else ()
    for length in (*held_otherwise, 32768, 40000, 49152, 65536, 100000, 1 << 18):
        made = panel_plan(problem_of(name, ("bf16",) * 2, (length, 20000), (0,)), name)
        assert made.kernel.streaming and made.resident % made.parts == 0, made.kernel.name
        config = configs[length > configs[0].longest]
        assert (made.kernel.threads, made.kernel.min_blocks) == (config.threads, config.min_blocks)
        ctas = 132 * config.min_blocks
        assert 0.94 * ctas <= made.resident <= ctas
        at_once = made.resident // made.parts
        assert made.chunks >= (config.chunks if at_once > 1 else config.chunks_alone)

        def chunks(n: int) -> int:
            return math.ceil(math.ceil(length / (ctas // n)) / made.kernel.chunk)  # noqa: B023

        # As few at a time as have so many, or up to twice as many, if that takes no more loads.
        fewest = next(
            n for n in range(1, 99) if chunks(n) >= (config.chunks if n > 1 else config.chunks_alone)
        )
        again = [max(chunks(n) - config.buffers, 0) for n in (at_once, fewest)]
        loads, least = (
            math.ceil(made.tiles / n) * (chunks(n) + twice)
            for n, twice in zip((at_once, fewest), again, strict=True)
        )
        assert fewest <= at_once <= 2 * fewest and loads <= least


@pytest.mark.parametrize("name", ["softmax", "softmax_backward"])
@pytest.mark.parametrize("odd", [0, 1, 8])
@pytest.mark.parametrize("outer", [1, 3])
def test_panels_of_rows_that_begin_off_lines(name, odd, outer):
    """They are twice as wide, and all turns alike."""
    held_otherwise = ((11216, 3712), (16832, 7936)) if name == "softmax_backward" or odd == 1 else ()
    for length, beside in (
        *held_otherwise,
        (32000, 1024),
        (65024, 2048),
        (128256, 1024),
        (970736, 128),
    ):
        made = panel_plan(problem_of(name, ("bf16",) * 2, (outer, length, beside + odd), (1,)), name)
        c, at_once = made.kernel, made.resident // made.parts
        assert c.width == (512 if odd else 256) and c.shifted == (odd == 1)
        panels.check_numbers(made)
        if not odd:
            assert made.spacing == 0
            continue
        turns = math.ceil(made.tiles / at_once)
        most = c.advance_of(made.abreast)
        assert made.advance == most or (made.advance < most and made.advance % (2 * c.slots) == 0)
        assert turns * at_once - made.tiles < at_once
        if math.ceil((beside + odd) / most) * outer <= 5:
            assert turns == 1


def test_rows_that_begin_off_sectors_have_no_panels_narrower_than_lines():
    """Where they do not split sectors, they may; so may gradients. Longer ones are streamed, in wide panels."""
    for size, pair in ((2, ("bf16", "bf16")), (4, ("fp32", "fp32"))):
        for length, name in product((6160, 9000, 20000), ("softmax", "log_softmax", "softmax_backward")):
            gradient = name == "softmax_backward"
            if gradient and length > 10240:
                continue
            for bytes_, least in ((16, 64 if gradient else 128), (32, 64), (64, 64)):
                made = panel_plan(problem_of(name, pair, (length, 8192 + bytes_ // size), (0,)), name)
                assert made.kernel.width == (512 if made.kernel.streaming else least), (length, name, bytes_)


def test_columns_have_few_classes():
    """Those of one math and dtype, of all lengths that are held, of an even and of an odd number of columns."""
    lengths = sorted({*range(2, 200), *(round(1.03**i) for i in range(180, 336))})
    for name, dtype, odd in product(("softmax", "softmax_backward", "logsumexp"), ("bf16", "fp32"), (0, 1)):
        found = {
            plan_shape(
                (n, (1 << 28) // ITEM_SIZE[dtype] // n // 64 * 64 + odd), dtype, dim=0, math=name
            ).kernel
            for n in lengths
        }
        assert len(found) <= MOST_CLASSES, (name, dtype, odd)


def test_parts_without_outputs_fill_their_last_round():
    """4,352 columns of 32,768 elements in eight parts were 272 CTAs, of which 264 run at once."""
    for height, width, odd in product((20000, 32768, 70000, 128256), range(512, 8200, 320), (0, 1)):
        problem = problem_of("logsumexp", ("bf16", "fp32"), (height, width + odd), (0,))
        made = panel_plan(problem, "logsumexp")
        items = made.tiles * made.parts
        assert made.parts > 1 and math.ceil(items / made.resident) * made.resident < 1.3 * items, (
            height,
            width,
        )


def test_columns_stay_shifted_where_aligned_ones_need_a_round_more():
    """264 CTAs run at once: 257 panels, or 274 of aligned blocks."""
    for width, kept in ((17935, True), (32769, False), (131071, True)):
        problem = problem_of("logsumexp", ("bf16", "fp32"), (4096, width), (0,))
        assert panel_plan(problem, "logsumexp").kernel.aligned == kept


def test_what_an_sm_holds():
    """Of each CTA the system takes 1 KiB: two of 113 KB fill the 228 KB of an SM, two of 128 bytes more do not."""
    architecture = ARCHITECTURES["sm_90a"]
    assert architecture.ctas_of(architecture.shared_memory) == 1
    assert architecture.ctas_of(113 << 10) == 2 and architecture.ctas_of((113 << 10) + 1) == 1


def test_room_of_a_configuration_is_filled():
    """Of what a CTA or a cluster has room for a column that it holds takes most, of the shortest more than half."""
    for length in (*range(17, 1025), *range(1025, 8193, 37)):
        made = panel_plan(problem_of("softmax", ("bf16",) * 2, (length, 200000), (0,)), "softmax")
        c = made.kernel
        assert length > (0.6 if length > 32 else 0.5) * c.cluster_n * c.tile, (length, c.name)
        assert c.columns in (256, 128, 64, 32) and (c.cluster_n == 16 or length <= 2560)


def test_vectors_are_whole_where_addresses_allow():
    shape = (50_000, 48)  # long enough for configurations that take whole vectors
    for offsets, of, vector in (
        ((0, 0), None, 8), ((4, 0), None, 4), ((0, 4), None, 4), ((8, 8), None, 8),
        ((0, 0), (52, 1), 4), ((0, 0), (1, 50_000), 8), ((0, 0), (96, 2), 1),
    ):  # fmt: skip
        problem = problem_of("softmax", ("bf16", "bf16"), shape, (0,), of, (*offsets, 0))
        c = panel_plan(problem, "softmax").kernel
        assert c.vector == vector and not c.shifted, (offsets, of)
    for offsets, of in (((1, 0), None), ((2, 0), None), ((0, 3), None), ((0, 0), (49, 1)), ((0, 0), (50, 1))):
        problem = problem_of("softmax", ("bf16", "bf16"), shape, (0,), of, (*offsets, 0))
        c = panel_plan(problem, "softmax").kernel
        assert c.vector == 8 and c.shifted, (offsets, of)
    for width, vector, rows in ((40, 8, 1), (44, 4, 1), (45, 8, 8), (2, 2, 1)):
        made = panel_plan(problem_of("softmax", ("bf16", "bf16"), (1_000_000, width), (0,)), "softmax")
        assert (made.kernel.vector, made.kernel.rows_abreast) == (vector, rows)
    made = panel_plan(problem_of("logsumexp", ("bf16", "fp32"), (3000, 45), (0,)), "logsumexp")
    assert (made.kernel.vector, made.kernel.rows_abreast) == (1, 1)


@pytest.mark.parametrize(("math", "dtype", "shape", "name"), FEW_COLUMNS)
def test_few_columns_are_shared_as_was_fastest(math, dtype, shape, name):
    assert plan_shape(shape, dtype, dim=0, math=math).kernel.name == name


@pytest.mark.parametrize("math", ["softmax", "softmax_backward", "logsumexp"])
@pytest.mark.parametrize("pair", classes.PAIRS)
def test_threads_hold_hardly_a_step_that_no_share_needs(math, pair):
    """Of columns and of rows with gaps one more, from nine on, to make an even number; what is streamed has chunks."""
    seen = set()
    for length, (outer, inner) in product(
        (1, 2, 3, 5, 9, 17, 58, 87, 129, 260, 700, 1500, 3000, 7000),
        ((1, 4), (1, 200), (9, 55 * 55), (700, 64), (3, 65536)),
    ):
        for dims in ((1,), (1, 3)):
            shape = (outer, length, inner, 16) if len(dims) > 1 else (outer, length, inner)
            made = panel_plan(problem_of(math, pair, shape, dims), math)
            c = made.kernel
            step = c.down * c.unit
            if not c.streaming:
                needed = -(-made.share // step)
                assert c.steps in (needed, needed + (needed > 8 and needed % 2)), (shape, dims, c.name)
                seen.add((c.orientation, c.steps))
    assert len(seen) > 14 and {orientation for orientation, _ in seen} == {"column", "row"}


def test_slots_of_exchanged_states_that_lie_apart_are_in_different_banks():
    """Those that the lanes of a line write at a time, and those that neighbours merge."""
    seen = 0
    for pair, length, width, rows in product(
        classes.PAIRS, (11, 26, 100, 300, 984, 3320), (999, 1000, 4097), (1, 5)
    ):
        c = panel_plan(problem_of("softmax", pair, (rows, length, width), (1,)), "softmax").kernel
        if not c.apart:
            assert not c.aligned and c.cluster_n == 1
            continue
        seen += 1
        slots, lanes = c.column_slots, range(c.lanes)
        for v in range(c.slots):
            written = [slots(a * c.slots + v) % 32 for a in lanes]
            assert len({*written}) == len(written)
        of_thread = {c.merged_by(column): slots(column + c.before) for column in range(c.columns)}
        assert sorted(of_thread) == [*range(c.columns)]
        read = [of_thread[t] for t in range(min(WARP, c.columns))]
        assert max(Counter(slot % 32 for slot in read).values()) <= 1 + c.aligned
    assert seen > 20


def test_classes_ask_for_no_more_ctas_than_an_sm_has_room_for():
    """Neither in shared memory nor, of aligned blocks, in registers: what spilled took up to 1.7 times as long."""
    seen = set()
    for pair, length, width in product(
        classes.PAIRS,
        (11, 17, 26, 38, 70, 80, 120, 128, 140, 150, 192, 288, 432, 984, 2216, 3320),
        (55 * 55, 56 * 56, 64),
    ):
        for name in ("softmax", "softmax_backward"):
            made = panel_plan(problem_of(name, pair, (700, length, width), (1,)), name)
            c, arch = made.kernel, ARCHITECTURES[made.kernel.architecture]
            assert c.streaming or c.min_blocks <= max(arch.ctas_of(c.shared_memory), 1)
            if c.aligned:
                slots = c.threads * c.slots
                assert c.min_blocks * slots * ALIGNED_REGISTERS <= arch.registers
                assert c.min_blocks <= ALIGNED_CTAS.get((slots, c.steps), c.min_blocks)
                seen.add((slots, c.steps))
    assert seen > {*ALIGNED_CTAS}


def test_columns_that_one_panel_has_room_for_are_not_two():
    for width in range(49, 120):
        for pair in classes.SAME:
            made = panel_plan(problem_of("logsumexp", (pair[0], "fp32"), (200000, width), (0,)), "logsumexp")
            c = made.kernel
            assert made.tiles == 1 or not c.aligned or width > c.columns - 2 * c.slots, (width, pair)


def test_every_pair_of_dimensions():
    shape = (3, 4, 5, 8)
    for count in (1, 2, 3, 4):
        for dims in combinations(range(4), count):
            for name in NAMES:
                check_whole(panel_plan(problem_of(name, ("bf16", "bf16"), shape, dims), name))


def test_what_is_not_planned_says_why():
    for number in (MOST + 1, 1 << 33):
        for shape, what in (((number, 2), "elements in a group"), ((2, number), "groups")):
            problem = problem_of("softmax", ("bf16",) * 2, shape, (0,))
            with pytest.raises(NotPlanned, match=rf"{number} {what}: at most {MOST} are counted in 32 bits"):
                plan("softmax", problem, H200)
    rows = problem_of("softmax", ("bf16",) * 2, (MOST + 1, 4096), (1,))  # a CTA each
    with pytest.raises(NotPlanned, match=rf"{MOST + 1} CTAs: at most {MOST} are counted in 32 bits"):
        plan("softmax", rows, H200)
    short = problem_of("softmax", ("bf16",) * 2, (MOST + 1, 8), (1,))  # several to a CTA
    assert plan("softmax", short, H200).rows == MOST + 1
    for name, online, words in (
        ("softmax_backward", False, "softmax_backward takes one pass over its rows"),
        ("softmin", True, "math is 'softmin': the row maths are softmax, "),
    ):
        with pytest.raises(ValueError, match=words):
            plan(name, short, H200, online=online)
    shape, of = (3,) * 7, (2187, 800, 300, 113, 37, 12, 1)
    with pytest.raises(NotPlanned, match=r"6 dimensions that do not merge, .*: at most 5 are planned"):
        plan("softmax", problem_of("softmax", ("bf16",) * 2, shape, (6,), of), H200)


# Mutants: the walk must see what a broken plan or kernel would do.


def example() -> PanelPlan:
    made = panel_plan(problem_of("softmax", ("bf16",) * 2, (3, 500, 40), (1,)), "softmax")
    return panels.forced(made, PanelConfig(128, 2), 3)


def shifted_example() -> PanelPlan:
    """Whose results lie otherwise in their blocks than the elements."""
    problem = problem_of("softmax", ("bf16",) * 2, (2, 200, 131), (1,), offsets=(0, 1))
    return panels.forced(panel_plan(problem, "softmax"), PanelConfig(128, 2), 3)


def aligned_example() -> PanelPlan:
    made = panel_plan(problem_of("softmax", ("bf16",) * 2, (2, 200, 131), (1,)), "softmax")
    return panels.forced(made, PanelConfig(128, 2), 3, across=8)


def abreast_example() -> PanelPlan:
    """Whose last row has 3 of 8 rows of memory, that is 27 of 72 columns: a vector ends outside the tensor."""
    return panels.forced(
        panel_plan(problem_of("softmax", ("bf16",) * 2, (507, 9), (0,)), "softmax"), PanelConfig(128, 2), 3
    )


MUTANTS = {
    "a step is dropped": lambda p: replace(p, kernel=replace(p.kernel, steps=p.kernel.steps - 1, buffers=1)),
    "shares are too small": lambda p: replace(p, share=p.share - 1),
    "nothing is streamed": lambda p: replace(p, kernel=replace(p.kernel, buffers=1)),
    "a part is missing": lambda p: replace(p, parts=p.parts - 1),
    "groups are cut short": lambda p: replace(p, length=p.length - 1),
    "groups are missing": lambda p: replace(p, kept=(p.kept[0] - 1, *p.kept[1:])),
    "nobody exchanges": lambda p: replace(p, kernel=replace(p.kernel, exchange=False)),
    "strides of the input are the output's in reverse": lambda p: replace(
        p, operand_strides=(p.operand_strides[0][::-1], p.operand_strides[1])
    ),
    "the wrong mode lies across": lambda p: replace(
        p, operand_strides=tuple((s[1], s[0], *s[2:]) for s in p.operand_strides)
    ),
    "vectors begin anywhere": lambda p: replace(p, problem=replace(p.problem, offsets=(1, 0))),
    "a vector too wide": lambda p: replace(p, kernel=replace(p.kernel, vector=16)),
}


# Of rows that lie side by side.
ABREAST_MUTANTS = {
    "the last row has a column more": lambda p: replace(p, last_row=p.last_row + 1),
    "the last row has a column less": lambda p: replace(p, last_row=p.last_row - 1),
    "the last row is whole": lambda p: replace(p, last_row=p.kept[-1]),
    "twice as many rows": lambda p: replace(p, kernel=replace(p.kernel, rows_abreast=16)),
    "a row less": lambda p: replace(p, length=p.length - 1),
}


@pytest.mark.parametrize(
    ("example", "mutant"),
    [
        pytest.param(example, mutant, id=name)
        for example, mutants in ((example, MUTANTS), (abreast_example, ABREAST_MUTANTS))
        for name, mutant in mutants.items()
    ],
)
def test_mutants_of_a_plan_fail(example, mutant):
    made = example()
    panels.check_owners(made)
    with pytest.raises((AssertionError, ValueError)):
        panels.check_owners(mutant(made))


# Of a class whose columns are shifted: its properties are what the kernel is built from.
SHIFTED_MUTANTS = {
    "lines do not overlap": (shifted_example, "overlap", 0),
    "panels do not overlap": (shifted_example, "advance", 64),
    "lines overlap by two vectors": (shifted_example, "overlap", 16),
    "aligned panels overlap by one vector": (aligned_example, "overlap", 8),
    "aligned panels do not overlap": (aligned_example, "advance", 64),
}


@pytest.mark.parametrize("name", SHIFTED_MUTANTS)
def test_mutants_of_shifted_columns_fail(name, monkeypatch):
    example, *mutant = SHIFTED_MUTANTS[name]
    made = example()
    panels.check_owners(made)
    monkeypatch.setattr(PanelClass, *mutant)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        panels.check_owners(made)


@pytest.mark.parametrize(
    "made", [example, shifted_example, aligned_example], ids=["vectors", "shifted", "aligned"]
)
def test_panels_too_far_apart_fail(made):
    plan = made()
    near, far = (replace(plan, spacing=plan.advance + n * plan.kernel.slots) for n in (-1, 1))
    panels.check_owners(near)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        panels.check_owners(far)


def ragged_example() -> PanelPlan:
    return panel_plan(problem_of("softmax", ("bf16",) * 2, (5, 1001), (1,)), "softmax")


# Of the kernel's own arithmetic: a plan, a function and what becomes of its result.
KERNEL_MUTANTS = {
    "threads miss their last vector": (example, work, "left", lambda rest: rest - 1),
    "vectors lie beside their place": (example, work, "places", lambda found: [place + 2 for place in found]),
    "the edges of rows lie beside theirs": (ragged_example, work, "edge", lambda found: (found[0] + 1, found[1])),
    "blocks begin beside their boundary": (shifted_example, shift, "shift_of", lambda found: found - 1),
    "lanes store others' blocks, too": (shifted_example, shift, "stores", lambda found: (found[0] | True, found[1])),
    "scalars outside of memory's rows": (shifted_example, shift, "is_group", lambda found: found | True),
    "rows begin beside where they do": (aligned_example, work, "shift_of", lambda found: (found - 1) % 8),
    "blocks that are the next panel's are stored, too": (
        aligned_example, aligned, "stores", lambda found: (found[0] | True, found[1])
    ),
    "all blocks are whole": (aligned_example, aligned, "stores", lambda found: (found[0], found[1] | True)),
    "all rows that lie side by side are whole": (abreast_example, abreast, "is_last", lambda found: found & False),
    "blocks behind the line are missing": (shifted_example, shift, "holds_behind", lambda found: found & False),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNEL_MUTANTS)
def test_mutants_of_the_kernel_fail(name, monkeypatch):
    example, module, function, mutant = KERNEL_MUTANTS[name]
    made, right = example(), getattr(module, function)
    panels.check_owners(made)
    monkeypatch.setattr(module, function, lambda *a: mutant(right(*a)))
    with pytest.raises((AssertionError, IndexError)):
        panels.check_owners(made)


def test_a_broken_merge_fails():
    with pytest.raises(AssertionError):
        panels.check_merging(replace(example().kernel, across=3), 5)
