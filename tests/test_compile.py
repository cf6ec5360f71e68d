"""Compiled kernels, read without a GPU: registers, spills, shared memory and the width of every access.

Samples of the Plan classes of every math and architecture, most of sm_90a, and of these so many that each configuration
and any two other properties are compiled together; all classes, which takes half an hour of two cores, with
CUTE_SOFTMAX_TEST_CLASSES=all. Compiling needs no GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache
from itertools import chain, cycle, product

import classes
import occupancy
import pytest
from compiled import (
    Compiled,
    accesses,
    check_all,
    check_compiled,
    compile_and_read,
    compile_anew,
    touches_before_it_waits,
)
from covering import check_covered, cost_of_class, covering, of_class

from cute_softmax.plan import MATHS, MODES, RowClass
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.problem import ITEM_SIZE

# Maths of which most classes are compiled; the others have their configurations.
LEADING = ("softmax", "softmax_backward", "logsumexp")

# What a class has from its configuration.
CONFIG = (
    "threads_per_row", "steps", "threads", "rows_per_thread", "cluster_n", "persistent", "min_blocks", "staging",
)  # fmt: skip
TURNS = 32
# (math, classes) -> bytes of stack that they may use, with the reason, and one that uses some. All others use none.
STACK = {
    ("softmax", "128x8x8_cluster8*"): (
        40,
        "six CTAs an SM, faster than five, leave 80 registers a thread",
        "sm_90a bf16->bf16 128x8x8_cluster8_edges",
    ),
    ("softmax", "1024x8x8*"): (
        144,
        "without clusters a CTA takes the row: 32 of 64 registers are packed row",
        "sm_80 bf16->bf16 1024x8x8_edges",
    ),
    ("log_softmax", "1024x8x8*"): (
        88,
        "likewise",
        "sm_80 bf16->bf16 1024x8x8_edges",
    ),
    ("softmax", "128x10x4_cluster16_edges_two_pass"): (
        8,
        "seven CTAs an SM leave 72 registers, of which 40 are the row",
        "sm_90a fp32->fp32 128x10x4_cluster16_edges_two_pass",
    ),
    ("softmax_backward", "256x10x8_cluster16*"): (
        48,
        "80 of 128 registers are two packed rows",
        "sm_90a bf16->bf16 256x10x8_cluster16_edges_access1_4",
    ),
    ("softmax", "256x6x8*"): (
        56,
        "four CTAs an SM, faster than three, leave 64 registers, of which 24 are packed row",
        "sm_90a bf16->bf16 256x6x8_edges_access1",
    ),
    ("softmax_backward", "256x6x8_cluster*"): (
        16,
        "three CTAs an SM, faster than two, leave 80 registers, of which 48 are two packed rows",
        "sm_90a bf16->bf16 256x6x8_cluster16_edges",
    ),
    ("softmax_backward", "256x4x8_cluster*"): (
        16,
        "likewise, of which 32 are two packed rows",
        "sm_90a bf16->bf16 256x4x8_cluster8_edges",
    ),
    ("softmax_backward", "288x20x4_cluster16_shared*"): (
        40,
        "two CTAs an SM leave 96 registers, of which 80 are y",
        "sm_90a fp32->fp32 288x20x4_cluster16_shared_edges_access4_2",
    ),
    ("log_softmax_backward", "192x21x4_cluster16_shared*"): (
        32,
        "three CTAs an SM leave 96 registers, of which 84 are y",
        "sm_90a fp32->fp32 192x21x4_cluster16_shared",
    ),
    ("selective", "*"): (
        32,
        "the arguments of the message about an index out of range",
        "sm_90a bf16->fp32 128x4x8_edges",
    ),
    ("selective", "*_rows2*"): (
        48,
        "likewise, of two rows",
        "sm_90a bf16->fp32 8x1x8_rows2",
    ),
    ("selective", "*_rows8*"): (
        200,
        "likewise, of eight rows",
        "sm_90a bf16->fp32 4x1x1_rows8",
    ),
    ("selective_entropy", "*"): (
        32,
        "likewise",
        "sm_90a bf16->fp32 128x4x8_edges",
    ),
    ("selective_entropy", "*_rows2*"): (
        48,
        "likewise",
        "sm_90a bf16->fp32 8x1x8_rows2",
    ),
    ("selective_entropy", "*_rows8*"): (
        200,
        "likewise",
        "sm_90a bf16->fp32 4x1x1_rows8",
    ),
    ("softmax_backward", "128x4x8*"): (
        24,
        "of fp16 on sm_120a: six CTAs an SM leave 80 registers",
        "sm_120a fp16->fp16 128x4x8_edges",
    ),
    ("softmax_backward", "1024x4x8*"): (
        80,
        "without clusters: 32 of 64 registers are two packed rows",
        "sm_80 bf16->bf16 1024x4x8_edges",
    ),
}

# ptxas calls a subroutine for the 64-bit division that takes a row's index apart, and a few classes save registers
# around it: sum of rows of 4 elements on sm_100a (8 bytes), softmax in clusters (8 bytes); with five modes softmax of
# rows of 65536 on sm_80, for which it takes 32 registers of 64 (192 bytes).
STACK_OF_MODES = {1: 0, 2: 16, 5: 192}
# Of a loss the arguments of the message about an index out of range, for each row of a thread.
STACK_OF_LOSSES = 56
# Of the gradients of several numbers of a row those numbers, where CTAs that share an SM leave few registers; likewise
# what a cap and its slope are made of.
STACK_OF_HEADS, STACK_OF_CAPS = 8, 24


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """RowClass -> Compiled."""
    return lambda c: compile_and_read(c, tmp_path, monkeypatch)


def expected_accesses(c: RowClass) -> Counter:
    """What a thread loads and stores; the refill of a persistent kernel is written a second time, and once more for
    what lies beyond a diagonal, with two stores of its results.

    A group result is one store a row, of the first thread of the row."""
    expected = Counter()
    vectors, scalars = c.steps * c.rows_per_thread, c.edge_scalars * c.rows_per_thread
    for i, dtype in enumerate(c.dtypes):
        size, output = ITEM_SIZE[dtype], i >= len(c.access)
        if i >= c.facts.full:
            given = i < c.facts.full + len(c.facts.group_inputs)
            again = c.persistent and c.facts.operands[i] in ("scale", "alpha")  # before the first tile, too
            unused = c.math.endswith("_backward") and c.facts.operands[i] == "sink"
            hidden = c.hides and given and not (c.persistent or unused)
            expected[f"{'ld' if given else 'st'} {size}"] += c.rows_per_thread * (1 + again + hidden)
            continue
        if not output and not c.access[i]:  # one element a row
            expected[f"ld {size}"] += c.rows_per_thread
            continue
        if output:
            expected[f"st {c.vector * size}"] += vectors * (3 if c.hides else 1)
        else:
            bytes_ = c.access[i] * size
            how = "ld" if bytes_ < 4 else "cp.async"
            how = "ld" if c.staging[i] == "direct" else how
            refilled = c.steps_of(i) if c.staging[i] == "async" and c.persistent else 0
            refilled += vectors * (c.hides and refilled > 0)
            expected[f"{how} {bytes_}"] += (vectors + refilled * c.rows_per_thread) * (
                c.vector // c.access[i]
            )
        expected[f"{'st' if output else 'ld'} {size}"] += scalars
    if "index" in c.facts.group_inputs:  # the chosen element: read, or written once more
        if c.prologue.target:
            expected[f"st {ITEM_SIZE[c.dtypes[c.facts.result]]}"] += c.rows_per_thread
        if c.prologue.target != "found":
            expected[f"ld {ITEM_SIZE[c.dtypes[0]]}"] += c.rows_per_thread
        if c.prologue.target != "found":  # the index once more, where it is out of range
            expected["ld 8"] += c.rows_per_thread
    return +expected


def may_use_stack(c: RowClass) -> int:
    """Bytes of stack that the table allows."""
    allowed = [n for (m, names), (n, *_) in STACK.items() if m == c.math and fnmatch(c.name, names)]
    losses = STACK_OF_LOSSES * c.rows_per_thread if c.prologue.target == "loss" else 0
    heads = STACK_OF_HEADS * (c.prologue.entropy or c.prologue.more) + STACK_OF_CAPS * c.prologue.softcap
    return max(allowed, default=0) + STACK_OF_MODES[c.kept_modes] + losses + heads


def check_rows(found: Iterable[RowClass], compiled: Callable[[RowClass], Compiled]):
    """Everything that is asserted of classes of rows."""

    def check(c: RowClass):
        check_compiled(c, compiled(c), may_use_stack(c))
        assert accesses(compiled(c).ptx) == expected_accesses(c)
        if c.architecture == occupancy.ARCHITECTURE and c.dtypes[0] == c.dtypes[-1]:
            before, now = occupancy.recorded().get(occupancy.told(c), 0), occupancy.held(c, compiled(c))
            assert now >= before, f"an SM holds {now} CTAs, and held {before}"

    check_all(found, check)


def of_sm_90a() -> Iterator[RowClass]:
    """Each seventh configuration of the leading maths, and each fifteenth of the others."""
    for math, pairs in classes.PAIRS_OF.items():
        for pair, edges in product(pairs, (False, True)):
            found = classes.intervals(math, "sm_90a", classes.operands(math, pair), edges=edges)
            leading = math in LEADING and pair in classes.SAME[::2]
            yield from (i.row_class for i in classes.sample(found, 7 if leading else 15, edges))


def by_config(
    math: str, architecture: str, forms: Iterable[tuple[tuple[str, ...], dict]]
) -> list[list[RowClass]]:
    """The classes of each configuration, of some (dtypes, form of call)."""
    found = {}
    for dtypes, form in forms:
        for interval in classes.intervals(math, architecture, dtypes, **form):
            c = interval.row_class
            found.setdefault(tuple(getattr(c, name) for name in CONFIG), []).append(c)
    return [*found.values()]


EDGES = ({"edges": False}, {"edges": True})


def of_kept_modes() -> Iterator[RowClass]:
    """Some configurations, with the row's index taken apart."""
    for math, modes in product(classes.PAIRS_OF, MODES[1:]):
        forms = product((classes.operands(math, (d, d)) for d in ("bf16", "fp32")), EDGES)
        found = [f[3 * i % len(f)] for i, f in enumerate(by_config(math, "sm_90a", forms))]
        for c in classes.sample(found, 9 if math in classes.FAMILY else 5, modes):
            yield replace(c, kept_modes=modes)


def of_two_passes() -> Iterator[RowClass]:
    form = {"edges": True, "online": False}
    found = classes.intervals("softmax", "sm_90a", ("bf16", "bf16"), **form)
    found = found + classes.intervals("softmax", "sm_90a", ("fp32", "fp32"), **form)[1::2]
    yield from (i.row_class for i in classes.sample(found, 3))


def of_narrow_accesses() -> Iterator[RowClass]:
    """Each configuration once, with inputs that are read 1, 2 or 4 elements at a time."""
    for math in ("softmax", "softmax_backward"):
        dtypes = classes.operands(math, ("bf16", "bf16"))
        forms = [(dtypes, {**e, "width": w}) for w in classes.widths(math, dtypes)[1:] for e in EDGES]
        yield from (f[5 * i % len(f)] for i, f in enumerate(by_config(math, "sm_90a", forms)))


def of_other_architectures() -> Iterator[RowClass]:
    """Some configurations, each architecture others, dtypes, edges, passes and the modes of a row's index in turns."""
    others = [(i, a) for i, a in enumerate(ARCHITECTURES) if a != "sm_90a"]
    for (first, architecture), (math, pairs) in product(others, classes.PAIRS_OF.items()):
        passes = (True, False) if (math, False) in MATHS else (True,)
        forms = product(
            (classes.operands(math, pair) for pair in pairs),
            [{**e, "online": o} for e in EDGES for o in passes],
        )
        chosen = [f[7 * i % len(f)] for i, f in enumerate(by_config(math, architecture, forms))]
        assert len(chosen) >= 10
        taken = classes.sample(chosen, 5 if math in LEADING[:2] else 8, first)
        yield from (replace(c, kept_modes=modes) for c, modes in zip(taken, cycle(MODES), strict=False))


@cache
def sampled() -> tuple[RowClass, ...]:
    """All of these."""
    kinds = of_sm_90a(), of_kept_modes(), of_two_passes(), of_narrow_accesses(), of_other_architectures()
    return tuple(dict.fromkeys(chain(*kinds)))


@cache
def spilling() -> list[RowClass]:
    """The class that each line of the table of stacks names."""
    found = []
    for (math, _), (*_, where) in STACK.items():
        architecture, pair, name = where.split()
        dtypes = classes.operands(math, tuple(pair.split("->")))
        forms = product((False, True), (None, *classes.widths(math, dtypes)))
        how = {"online": not name.endswith("two_pass")}
        asked = (classes.intervals(math, architecture, dtypes, edges=e, width=w, **how) for e, w in forms)
        found.append(next(i.row_class for i in chain.from_iterable(asked) if i.row_class.name == name))
    return found


@cache
def chosen() -> list[RowClass]:
    """Those that are compiled: among them each configuration of each math of the samples."""
    first = spilling()
    return covering((c for c in sampled() if c not in first), has, cost_of_class, first)


def has(c: RowClass) -> set:
    return of_class(c, CONFIG)


def test_configurations_and_any_two_properties_are_compiled():
    check_covered(sampled(), chosen(), has)


def test_how_many_ctas_an_sm_holds_is_recorded():
    """After a change of configurations `python tests/occupancy.py` does it."""
    assert {occupancy.told(c) for c in occupancy.of_table()} == occupancy.recorded().keys()


@pytest.mark.parametrize("turn", range(TURNS))
def test_classes(turn, compiled):
    check_rows(chosen()[turn::TURNS], compiled)


def test_table_of_stacks_is_no_longer_than_needed(compiled):
    for ((math, names), (*_, reason, _)), c in zip(STACK.items(), spilling(), strict=True):
        assert reason and fnmatch(c.name, names) and c.math == math
        assert compiled(c).stack, f"{math} {names} uses no stack: remove it"


@pytest.mark.parametrize("edges", (False, True))
@pytest.mark.parametrize("dtype", ("bf16", "fp32"))
def test_vectors_in_registers_are_loaded_before_they_meet_those_in_shared_memory(dtype, edges, compiled):
    found = classes.intervals("softmax_backward", "sm_90a", (dtype,) * 3, edges=edges)
    c = next(i.row_class for i in found if {*i.row_class.staging} == {"shared", "direct"})
    ptx = compiled(c).ptx
    assert ptx.rindex("ld.global") < ptx.index("bar.warp.sync")


def test_readers_of_ptx():
    ptx = """
    ld.global.L2::cache_hint.v4.b32 {%r1, %r2, %r3, %r4}, [%rd1], %rd2;
    ld.global.b16 %rs1, [%rd1];
    ld.global.L2::cache_hint.b64 %rd1, [%rd1], %rd2;
    ld.param.b64 %rd1, [p];
    st.global.v2.b32 [%rd1], {%r1, %r2};
    st.shared.v2.b32 [%r1], {%r1, %r2};
    cp.async.cg.shared.global.L2::cache_hint [%r1], [%rd1], 16, %rd2;
    """
    assert accesses(ptx) == {"ld 16": 1, "ld 8": 1, "ld 2": 1, "st 8": 1, "cp.async 16": 1}


def test_reader_of_waits():
    wait = "setp.gt.u64 %p1, %rd1, 256;\n@%p1 bra $L1;\ngriddepcontrol.wait;\n$L1:\n"
    again = wait.replace("$L1", "$L2")
    load = "ld.global.b32 %r1, [%rd1];\n"
    for text, once, twice in (
        (wait + load, False, False),
        (load + wait, True, True),
        (wait + again + load, False, False),
        (wait + load + again, False, True),  # some grids wait at the second place, and have loaded before
    ):
        kernel = "k(\n)\n{\n" + text + "ret;\n}"
        assert touches_before_it_waits(kernel) == once and touches_before_it_waits(kernel, True) == twice, (
            text
        )


def test_each_field_shapes_the_code(compiled, tmp_path, monkeypatch):
    """A class that differs in one of them compiles to other code, and the same one to the same."""
    found = classes.intervals("softmax", "sm_90a", ("bf16", "bf16"), edges=True)
    c = next(i.row_class for i in found if i.row_class.exchanges)  # else two passes are one
    base = compiled(c).ptx
    for change in ({"online": False}, {"edges": False}, {"access": (2,)}, {"keep": False}, {"steps": 5}):
        assert compiled(replace(c, **change)).ptx != base, change
    assert compile_anew(c, tmp_path, monkeypatch).ptx == base
