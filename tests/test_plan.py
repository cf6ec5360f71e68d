"""Plans of thousands of random problems on every architecture: each column has one owner, all fits."""

import dataclasses
import math
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import classes
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rows import check, row_plan, times_owned

from cute_softmax import plan as plans
from cute_softmax.kernels import row_work
from cute_softmax.plan import MATHS, NotPlanned, PanelPlan, plan, row_class, table_of
from cute_softmax.plan import catalogue as ahead
from cute_softmax.plan.hardware import ARCHITECTURES, H200, Architecture, architecture_of
from cute_softmax.plan.maths import MOST
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical, contiguous
from cute_softmax.plan.row import FEW_FILL

ROOT = Path(__file__).parents[1]
UGLY = (
    1, 2, 3, 7, 8, 9, 31, 33, 63, 65, 127, 129, 255, 257, 500, 511, 513, 1000, 1023, 1025, 2047, 2049,
    4095, 5000, 8191, 8193, 16385, 20000, 32767, 50257, 65537, 99999, 128256, 151936, 200064, 262143, 300001,
    524287, 1000000,
)  # fmt: skip
# Of one math, dtypes and kind of edges: all of them can be compiled ahead. Fewer would leave cliffs: a row that fills
# two thirds of its class runs at 0.73 to 0.92 of a copy, one that fills it at 1.02 (docs/experiments.md).
MOST_CLASSES = 48
forms = pytest.mark.parametrize("arch", ARCHITECTURES)


@st.composite
def cases(draw, longest: int):
    math_name, online = draw(st.sampled_from(sorted(MATHS)))
    # Every power of two is as likely as the next; around it, not on it.
    columns = min(longest, max(1, draw(st.integers(0, longest.bit_length() - 1).map(lambda e: 1 << e)) + draw(
        st.integers(-9, 9)
    )))  # fmt: skip
    if draw(st.booleans()):
        columns = draw(st.integers(1, 3 * columns).map(lambda n: min(n, longest)))
    return {
        "math_name": math_name,
        "online": online,
        "pair": draw(st.sampled_from(classes.PAIRS)),
        "rows": draw(st.one_of(st.integers(1, 70), st.integers(1, 1 << 32))),
        "columns": columns,
        "arch": draw(st.sampled_from(sorted(ARCHITECTURES))),
        "offsets": draw(st.tuples(*[st.integers(0, 7)] * 3)),
        "pads": draw(st.tuples(*[st.sampled_from([0, 0, 1, 2, 3, 4, 8, 16])] * 3)),
    }


def hardly_too_long(case) -> bool:
    """Whether rows may be too long for the row movement: they hold more bytes than a cluster's registers."""
    arch = ARCHITECTURES[case["arch"]]
    dtypes = classes.operands(case["math_name"], case["pair"])
    return case["columns"] * 16 > arch.cluster_limit * 32768 * 16 // max(ITEM_SIZE[d] for d in dtypes) / 4


def too_many(case, error: NotPlanned) -> bool:
    """Whether there are more rows than a grid has CTAs, and this is what the error says."""
    return case["rows"] > MOST and re.search(r"\d (CTAs|clusters): at most", str(error)) is not None


@pytest.mark.long
@settings(max_examples=2500)
@given(cases(1 << 17))
def test_every_column_has_one_owner(case):
    try:
        made = row_plan(**case)
    except NotPlanned as error:  # panels have no inputs of groups, and no more than 2^31 groups
        given = MATHS[case["math_name"], case["online"]].group_inputs
        long = hardly_too_long(case) and (given or "counted in 32 bits" in str(error))
        assert long or too_many(case, error)
        return
    if isinstance(made, PanelPlan):
        assert hardly_too_long(case), made.explain()
        return
    check(made)
    for row in {min(row, made.rows - 1) for row in (0, 1, 2, made.rows)}:
        counts = times_owned(made, row)
        assert (counts == 1).all(), (made.row_class.name, row, counts.min(), counts.max())


@st.composite
def views(draw):
    """A shape, and strides of dimensions that may merge or not, the last one contiguous."""
    shape, strides, reach = [], [], draw(st.integers(1, 40))
    shape.append(reach)
    strides.append(1)
    for _ in range(draw(st.integers(1, 6))):
        reach += draw(st.sampled_from([0, 0, 1, 8]))
        size = draw(st.integers(1, 4))
        shape.append(size)
        strides.append(reach)
        reach *= size
    return tuple(shape[::-1]), tuple(strides[::-1])


@settings(max_examples=500)
@given(
    views(),
    st.sampled_from(sorted(MATHS)),
    st.sampled_from(["bf16", "fp32"]),
    st.integers(0, 7),
    st.randoms(),
)
def test_rows_of_dimensions_that_do_not_merge(view, which, dtype, offset, order):
    """Every row begins where some index of the kept dimensions puts it, in every operand alike."""
    (shape, strides), facts = view, MATHS[which]
    kept = range(len(shape) - 1)
    dense = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    group = [*(math.prod(shape[d + 1 : -1]) for d in kept), 0]
    operands = [Operand(dtype, strides, offset * ITEM_SIZE[dtype])] * len(facts.inputs)
    operands += [Operand(dtype, tuple(dense))] * len(facts.outputs)
    operands += [Operand(dtype, tuple(group))] * len(facts.group_inputs + facts.group_outputs)
    permuted = [*kept]
    order.shuffle(permuted)
    permuted.append(len(shape) - 1)
    turned = [o._replace(strides=tuple(o.strides[d] for d in permuted)) for o in operands]
    problem = canonical([shape[d] for d in permuted], (len(shape) - 1,), turned)
    try:
        with classes.by_rows():
            made = plan(which[0], problem, H200, online=which[1])
    except NotPlanned as error:
        assert len(problem.kept) > plans.MODES[-1] and "dimensions that do not merge" in str(error)
        return
    if isinstance(made, PanelPlan):
        assert len(problem.kept) > plans.MODES[-1], "one of them lies across"
        return
    check(made)
    wanted = {
        tuple(sum(i * s for i, s in zip(index, o.strides, strict=False)) for o in operands)
        for index in product(*(range(n) for n in shape[:-1]))
    }
    found = [tuple(made.row_start(i, row) for i in range(len(operands))) for row in range(made.rows)]
    assert len(found) == len(wanted) and {*found} == wanted
    for row in range(min(made.rows, 9)):
        assert (times_owned(made, row) == 1).all()


def test_group_results_weigh_an_element_per_row():
    made = row_plan("logsumexp", ("bf16", "bf16"), 100, 1000, "sm_90a")
    assert made.problem.bytes == 100 * (1000 + 1) * 2
    assert "one result written per row" in made.explain()
    wide = row_plan("sum", ("bf16", "fp32"), 100, 1000, "sm_90a", pads=(0, 7))
    assert wide.problem.bytes == 100 * (1000 * 2 + 4) and wide.operand_strides == ((1000,), (8,))
    assert wide.row_class.vector == 8, "the result's dtype narrows no access"
    assert row_plan("amax", ("bf16",) * 2, 4, 1024, "sm_90a", offsets=(3, 0)).row_class.access == (8,)


@settings(max_examples=250)
@given(cases(1 << 20))
def test_every_column_of_the_longest_rows_has_one_owner(case):
    case["arch"] = "sm_100a"
    longest = classes.longest(
        case["math_name"], "sm_100a", classes.operands(case["math_name"], case["pair"]), case["online"]
    )
    try:
        made = row_plan(**case)
    except NotPlanned as error:  # panels have no inputs of groups
        given = MATHS[case["math_name"], case["online"]].group_inputs
        assert (given and case["columns"] > longest) or too_many(case, error)
        return
    if isinstance(made, PanelPlan):
        assert case["columns"] > longest
        return
    check(made)
    assert (times_owned(made, min(3, made.rows - 1)) == 1).all(), made.row_class.name


@pytest.mark.parametrize("columns", UGLY)
def test_ugly_lengths(columns):
    """On every architecture, with rows that begin at each place of a vector (rows of odd stride do)."""
    seen = set()
    for arch, (math_name, online), pair in product(ARCHITECTURES, MATHS, classes.PAIRS):
        if columns > classes.longest(math_name, arch, classes.operands(math_name, pair), online):
            if MATHS[math_name, online].group_inputs:
                with pytest.raises(
                    NotPlanned, match=f"{math_name} of groups that are not contiguous or do not"
                ):
                    row_plan(math_name, pair, 9, columns, arch, online=online)
                continue
            longer = row_plan(math_name, pair, 9, columns, arch, online=online)
            assert isinstance(longer, PanelPlan) and longer.length == columns
            continue
        made = row_plan(math_name, pair, 9, columns, arch, online=online)
        check(made)
        # Who owns what depends on no more than this.
        c = made.row_class
        form = (c.vector, c.edges, c.line, c.cluster_n, c.threads_per_row, c.steps, c.rows_per_thread)
        if form not in seen:
            seen.add(form)
            for row in range(9 if columns <= 5000 else 2):
                assert (times_owned(made, row) == 1).all(), (c.name, row)


@pytest.mark.parametrize(
    ("function", "mutant"),
    [
        ("edge", lambda found: (found[0] + 1, found[1])),
        ("edge", lambda found: (found[0], found[1] & False)),
        ("reads", lambda found: found & False),
        ("row_of", lambda row: dataclasses.replace(row, start=row.start + 1)),
        ("share_of", lambda share: share - 8),
    ],
)
def test_mutants_of_the_kernel_fail(function, mutant, monkeypatch):
    """Of its own index arithmetic, which `times_owned` walks through."""
    made, right = row_plan("softmax", ("bf16",) * 2, 9, 20001, "sm_90a"), getattr(row_work, function)
    assert made.row_class.cluster_n > 1 and (times_owned(made, 3) == 1).all()
    monkeypatch.setattr(row_work, function, lambda *a: mutant(right(*a)))
    with pytest.raises(AssertionError):
        assert (times_owned(made, 3) == 1).all()


@forms
def test_tiles_hold_each_element_once(arch):
    """tv and steps cover the tile; slots of the reduction buffer differ, and peers of a row lie next to each other."""
    for c in classes.all_classes(arch, classes.SAME + classes.MIXED[:1]):
        rows, columns = c.step_tiler
        assert sorted(c.tv.offsets()) == list(range(rows * columns))
        assert c.tiler == (rows, columns * c.steps) and c.smem.cosize == math.prod(c.tiler)
        # Rows share their bits, unless each begins, and so ends, at a vector of its own.
        assert c.predicate.cosize == c.steps * (c.rows_per_thread if c.edges else 1)
        assert sorted(c.reduction_buffer.offsets()) == list(range(c.reduction_buffer.size))
        assert sorted(c.reduction_buffer[1].offsets()) == list(range(c.warps_per_row * c.cluster_n))


@forms
@pytest.mark.parametrize(("math_name", "online"), sorted(MATHS))
@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
def test_classes_are_few_and_lengths_share_them(pair, math_name, online, arch):
    dtypes = classes.operands(math_name, pair)
    for edges, ctas in product((False, True), classes.ctas_of(arch, pair)):
        found = classes.intervals(math_name, arch, dtypes, edges=edges, online=online, ctas=ctas)
        assert len(found) <= MOST_CLASSES
        assert found[0].first == 1 or edges
        assert len({i.row_class for i in found}) == len(found), "a class that comes twice"
        assert len({i.row_class.name for i in found}) == len(found)
        for before, after in pairwise(found):
            assert before.last + 1 == after.first
        for interval in found:
            step = max(1, (interval.last - interval.first) // 4)
            for columns in range(interval.first, interval.last + 1, step):
                c = interval.row_class
                assert plans.vector_of(dtypes[: c.facts.full], columns) == c.vector
                options = {"edges": edges, "access": c.access, "online": online, "ctas": ctas}
                assert plans.row_class(math_name, ARCHITECTURES[arch], dtypes, columns, **options) == c


@forms
def test_classes_to_compile_ahead_are_all_there_are(arch):
    """`cute_softmax.plan.catalogue` reckons where a class ends; here every end was found by asking for each length."""
    for math_name, online in MATHS:
        for pair in classes.PAIRS:
            dtypes = classes.operands(math_name, pair)
            for edges in (False, True):
                how, few = {"edges": edges, "online": online}, set()
                for ctas in classes.ctas_of(arch, pair):
                    found = classes.intervals(math_name, arch, dtypes, ctas=ctas, **how)
                    listed = ahead.classes(math_name, ARCHITECTURES[arch], dtypes, ctas=ctas, **how)
                    longer = [i.row_class for i in found if i.last > classes.shorter(math_name, dtypes)]
                    assert [c for c in listed if c.movement == "row"] == longer
                    if ctas > 1:
                        few |= {
                            i.row_class for i in classes.own_intervals(math_name, arch, dtypes, ctas, **how)
                        }
                if pair in classes.SAME[::2]:
                    assert set(ahead.of_few_rows(math_name, ARCHITECTURES[arch], dtypes, **how)) == few


@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
def test_longest_rows(pair):
    """A cluster of 16 holds a million columns in 16 bits, half of that in 32. What is only read need not be held: where
    an index is given a vocabulary fits, and else rows are streamed."""
    for arch in ("sm_90a", "sm_100a", "sm_103a"):
        for math_name, online in MATHS:
            facts, dtypes = MATHS[math_name, online], classes.operands(math_name, pair)
            longest = classes.longest(math_name, arch, dtypes, online)
            if facts.outputs:
                assert longest >= (500_000 if "fp32" in pair else 1_000_000)
            elif facts.group_inputs:
                assert longest >= 262_144
            else:
                made = row_plan(math_name, pair, 100, longest + 8, arch, online=online)
                assert made.movement == "split" and made.kernel.buffers > 1 and made.kernel.cluster_n == 1
    for arch in ARCHITECTURES:
        assert classes.longest("softmax", arch, pair) >= 32768
        assert classes.longest("softmax_backward", arch, classes.operands("softmax_backward", pair)) >= 16384


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmax_backward", "logsumexp"])
def test_few_rows_have_larger_clusters(name):
    """As long as all of them run in two turns; one row more and each has as many CTAs or fewer."""
    pair = ("bf16", "bf16")
    dtypes = classes.operands(name, pair)
    lists = table_of().few.values()
    fits = {
        takes: 2 * H200.multiprocessors // takes for takes in sorted({c.takes for few in lists for c in few})
    }
    assert fits == {2: 132, 3: 88, 4: 66, 6: 44, 8: 33, 15: 17, 16: 16, 18: 14}
    for takes, rows in fits.items():
        for interval in classes.own_intervals(name, "sm_90a", dtypes, takes):
            c = interval.row_class
            config = next(
                config
                for config in table_of().few[name]
                if all(
                    getattr(config, f) == getattr(c, f)
                    for f in ("threads", "steps", "cluster_n", "min_blocks")
                )
                and config.precise in (None, False)
            )
            assert config.takes == takes
            assert not c.persistent and interval.first > table_of().few_above * c.vector
            for columns in (interval.first, interval.last):
                assert columns > (config.above * c.vector if config.least else FEW_FILL * c.capacity)
                few, more = (row_plan(name, pair, n, columns, "sm_90a") for n in (rows, rows + 1))
                assert few.row_class == dataclasses.replace(c, edges=columns % 8 > 0) != more.row_class
                assert few.row_class.cluster_n >= more.row_class.cluster_n, "fewer CTAs for fewer rows"
    for arch in ("sm_80", "sm_86", "sm_89"):  # no clusters
        assert not ahead.of_few_rows(name, ARCHITECTURES[arch], dtypes)


@pytest.mark.parametrize(
    ("rows", "columns", "cluster", "blocks"),
    [
        (14, 217_300, 16, 2),
        (14, 278_528, 16, 2),
        (14, 278_532, 16, 3),
        (15, 262_144, 16, 3),
        (15, 262_148, 6, 1),
        (17, 267_264, 6, 1),
        (17, 267_268, 16, 3),
        (18, 262_148, 16, 3),
    ],
)
def test_few_rows_of_a_table_that_says_which(rows, columns, cluster, blocks):
    """As many as run at once (`least`), and longer than others are faster for (`above`)."""
    c = row_plan("softmax", ("fp32", "fp32"), rows, columns, "sm_90a").row_class
    assert (c.cluster_n, c.min_blocks) == (cluster, blocks)


def test_few_rows_in_one_turn_take_a_cluster_however_empty():
    """A vector more than 8 CTAs of 2 steps hold: half of the next cluster is empty."""
    for rows, clusters in ((8, 8), (9, 4)):
        made = row_plan("softmax", ("bf16", "bf16"), rows, 128 * 2 * 8 * 8 + 8, "sm_90a")
        assert made.row_class.cluster_n == clusters


def test_class_depends_on_neither_rows_nor_strides_nor_addresses():
    """But for few long rows."""
    (interval,) = [
        i for i in classes.intervals("softmax", "sm_90a", ("bf16",) * 2) if i.first <= 5000 <= i.last
    ]
    middle = (interval.first + interval.last) // 16 * 8
    for rows, columns, offset, pad in (
        (1, 5000, 0, 0),
        (10**9, middle, 0, 8),
        (4, interval.last, 8, 0),
        (7, -(-interval.first // 8) * 8, 0, 80),
    ):
        made = row_plan(
            "softmax", ("bf16", "bf16"), rows, columns, "sm_90a", offsets=(offset,) * 2, pads=(pad,) * 2
        )
        assert made.row_class == interval.row_class and made.rows == rows
        assert made.row_strides == ((columns + pad,) * 2 if rows > 1 else (0, 0))
    ragged = {
        row_plan("softmax", ("bf16", "bf16"), 3, n, "sm_90a", offsets=(o, o), pads=(p, p)).row_class
        for n, o, p in ((5000, 1, 0), (5000, 0, 3), (5001, 0, 0), (interval.last - 1, 5, 2))
    }
    assert ragged == {dataclasses.replace(interval.row_class, edges=True)}


@pytest.mark.parametrize(
    ("offsets", "pads", "edges", "access"),
    [
        ((0, 0), (0, 0), False, 8),
        ((1, 0), (0, 0), False, 1),
        ((2, 0), (0, 0), False, 2),
        ((4, 0), (0, 0), False, 4),
        ((0, 0), (2, 0), False, 2),
        ((3, 3), (1, 1), True, 8),
        ((3, 1), (0, 0), True, 2),
        ((0, 4), (0, 0), True, 4),
        ((0, 0), (8, 16), False, 8),
    ],
)
def test_width_of_access(offsets, pads, edges, access):
    """As wide as addresses and strides of input and output differ by; the output's own vectors stay whole."""
    c = row_plan("softmax", ("bf16", "bf16"), 4, 4096, "sm_90a", offsets=offsets, pads=pads).row_class
    assert (c.edges, c.access, c.vector) == (edges, (access,), 8)


@pytest.mark.parametrize(
    ("shape", "dims", "strides", "movement"),
    [
        ((4, 8), (0,), (8, 1), "column"),
        ((4, 7), (1,), (7, 1), "short"),
        ((4, 8), (1,), (8, 1), "row"),
        ((10_000, 8), (1,), (8, 1), "short"),
        ((4, 8), (1,), (9, 1), "row"),
        ((4, 72), (1,), (72, 1), "row"),
        ((4, 8), (1,), (8, 2), "split"),
        ((2, 3, 4), (0, 2), (12, 4, 1), "split"),
        ((2, 3, 4), (0, 1), (12, 4, 1), "column"),
        ((3,) * 6 + (8,), (5, 6), (2187, 800, 300, 113, 37, 12, 1), "split"),
        ((2, 2_000_000), (1,), (2_000_000, 1), "split"),
        ((2_000_000, 64), (0,), (64, 1), "split"),
        ((8_000, 64), (0,), (64, 1), "column"),
        ((42_000, 64), (0,), (64, 1), "split"),
        ((20_000, 128), (0,), (128, 1), "column"),
    ],
)
def test_movements(shape, dims, strides, movement):
    operand = Operand("bf16", strides)
    made = plan("softmax", canonical(shape, dims, [operand, operand]), H200)
    assert made.movement == movement and made.kernel.math == "softmax"
    assert f"  movement   {movement}: " in made.explain()


@pytest.mark.parametrize(
    ("math", "columns", "dtype", "most"),
    [
        ("softmax", 7, "bf16", 0),  # of a word or two
        ("softmax", 9, "bf16", 64),
        ("softmax", 33, "bf16", 6 * 33),
        ("softmax", 24, "bf16", 6 * 24),  # a thread in four would have nothing
        ("softmax", 16, "bf16", 24 * 16),
        ("softmax", 40, "bf16", 24 * 40),
        ("softmax", 64, "bf16", None),  # however many
        ("logsumexp", 64, "bf16", 24 * 64),
        ("softmax_backward", 16, "bf16", None),
        ("softmax_backward", 24, "bf16", 6 * 24),
        ("softmax_backward", 40, "bf16", None),
        ("softmax", 8, "fp32", 24 * 8),
        ("softmax", 16, "fp32", None),
        ("softmax_backward", 4, "fp32", 0),
    ],
)
def test_short_rows_are_shared_by_threads(math, columns, dtype, most):
    """Where there are few, and where threads that share them are filled; most: rows of an SM."""

    dtypes = classes.operands(math, (dtype, dtype))
    listed = {
        c
        for edges in (False, True)
        for c in ahead.of_shared_rows(math, H200.architecture, dtypes, edges=edges)
    }

    def movement(rows: int, offset: int = 0) -> str:
        operands = [contiguous(d, (rows, columns))._replace(address=offset * ITEM_SIZE[d]) for d in dtypes]
        if math == "logsumexp":
            operands[-1] = contiguous(dtype, (rows, columns), (1,))
        made = plan(math, canonical((rows, columns), (1,), operands), H200)
        assert made.movement == "short" or made.kernel in listed
        return made.movement

    if most is None:
        assert movement(10_000_000) == "row" and movement(10_000_000, offset=1) == "short"
    else:
        assert not most or movement(132 * most) == "row"
        assert movement(132 * most + 1) == "short"


def test_rows_that_no_configuration_holds():
    with pytest.raises(
        NotPlanned, match=r"rows of 2000000 elements .bf16, bf16. do not fit on chip"
    ) as caught:
        options = {"edges": False, "access": (8,)}
        row_class("softmax", H200.architecture, ("bf16", "bf16"), 2_000_000, **options)
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, ValueError)


def test_input_and_output_must_both_be_contiguous_for_rows():
    operands = [Operand("bf16", (8, 1)), Operand("bf16", (1, 4))]
    assert plan("softmax", canonical((4, 8), (1,), operands), H200).movement != "row"


@pytest.mark.parametrize("columns", [33, 1000, 8192, 50257, 151936, 500000, 1000000])
def test_explain_says_what_matters(columns):
    for (math_name, online), pair in product(MATHS, classes.PAIRS):
        if MATHS[math_name, online].group_inputs and columns > 262_144:
            continue  # not planned
        made = row_plan(math_name, pair, 4096, columns, "sm_90a", online=online, offsets=(3, 0, 0))
        if made.movement != "row":  # what is only read is not held
            continue
        c, text = made.row_class, made.explain()
        dtypes = " -> ".join(dict.fromkeys(d for d in c.dtypes if d != "int64"))
        assert text.startswith(f"{math_name} of 4096 rows of {columns}, {dtypes}, for sm_90a\n")
        for words in (
            f"class {c.name}\n",
            f"{c.access[0] * ITEM_SIZE[c.dtypes[0]]} bytes",
            "head and tail" if c.edges else "edges      none",
            f"{c.shared_memory} bytes of shared memory per CTA",
            f"{made.problem.bytes / 1e6:.1f} MB",
        ):
            assert words in text, (words, text)
        assert ("persistent" in text) == c.persistent
        assert (f"cluster of {c.cluster_n}" in text) == (c.cluster_n > 1)


def test_persistent_grids_are_no_larger_than_needed():
    for rows in (1, 3, 1000):
        made = row_plan("softmax", ("bf16", "bf16"), rows, 1_000_000, "sm_90a")
        c = made.row_class
        assert made.ctas <= max(1, H200.multiprocessors // c.cluster_n)
        assert made.ctas == rows or made.ctas * c.cluster_n * c.threads <= H200.multiprocessors * 2048


def test_inconsistent_classes_are_refused():
    c = row_plan("softmax", ("bf16", "bf16"), 4, 4096, "sm_90a").row_class
    with pytest.raises(ValueError, match="threads with several rows exchange by shuffles only"):
        dataclasses.replace(c, rows_per_thread=2)
    with pytest.raises(ValueError, match="a persistent kernel refills its slots"):
        dataclasses.replace(c, persistent=True, staging=("shared",))


def test_architectures():
    names = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_89", (9, 0): "sm_90a", (10, 0): "sm_100a",
             (10, 3): "sm_103a", (12, 0): "sm_120a"}  # fmt: skip
    for capability, name in names.items():
        found = architecture_of(capability)
        assert isinstance(found, Architecture) and found.name == name
        assert (found.cluster_limit > 1) == (capability >= (9, 0))
    assert set(names.values()) == set(ARCHITECTURES)
    for unknown in ((7, 5), (8, 7), (11, 0), (99, 0)):
        with pytest.raises(
            ValueError, match=rf"no kernels for compute capability {unknown[0]}.{unknown[1]}; supp"
        ):
            architecture_of(unknown)


def test_plans_need_neither_torch_nor_cutlass():
    """Importing a plan and using it, with both blocked."""
    code = (
        "import sys; sys.modules.update(torch=None, cutlass=None, cuda=None)\n"
        "from cute_softmax.plan import plan\n"
        "from cute_softmax.plan.hardware import H200\n"
        "from cute_softmax.plan.problem import Operand, canonical\n"
        "x = Operand('bf16', (8192, 1))\n"
        "print(plan('softmax', canonical((4096, 8192), (1,), [x, x]), H200).explain())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "softmax of 4096 rows of 8192" in done.stdout


def test_importing_the_package_loads_no_cutlass():
    code = "import sys, cute_softmax; sys.exit('cutlass' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
