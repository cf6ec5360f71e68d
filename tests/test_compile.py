"""Compiled kernels, read without a GPU: registers, spills, shared memory and the width of every access.

Samples of the Plan classes of every math and architecture, most of sm_90a; all of them, which takes half an hour of two
cores, with CUTE_SOFTMAX_TEST_CLASSES=all. Compiling needs no GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from fnmatch import fnmatch
from itertools import cycle

import classes
import pytest
from compiled import (
    Compiled,
    accesses,
    check_all,
    check_compiled,
    compile_and_read,
    compile_anew,
    is_compiled,
)

from cute_softmax.plan import MATHS, MODES, RowClass
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.problem import ITEM_SIZE

# Maths of which most classes are compiled; the others have their configurations.
LEADING = ("softmax", "softmax_backward", "logsumexp")

# (math, classes) -> bytes of stack that they may use, with the reason. All others use none.
STACK = {
    ("softmax", "128x7x8_cluster8*"): (8, "a reference and its scale, kept from the sum to the quotient"),
    ("softmax", "128x8x8_cluster8*"): (40, "six CTAs an SM, faster than five, leave 80 registers a thread"),
    ("softmax", "256x8x8_cluster8*"): (24, "three CTAs an SM, faster than two, leave 80 registers a thread"),
    ("softmax", "1024x8x8*"): (
        120,
        "without clusters a CTA takes the row: 32 of 64 registers are packed row",
    ),
    ("log_softmax", "1024x8x8*"): (88, "likewise"),
    ("softmax", "256x8x8_cluster16_shared*"): (16, "five CTAs an SM, faster than four, leave 48 registers"),
    ("softmax", "128x10x4_cluster16*"): (8, "seven CTAs an SM, faster than six, leave 72 registers"),
    ("softmax_backward", "256x10x8_cluster16*"): (32, "80 of 128 registers are two packed rows"),
    ("softmax_backward", "256x19x8_cluster16_shared*"): (240, "of y read one by one: 152 addresses"),
    ("softmax_backward", "512x16x8_cluster16_shared*"): (88, "64 of 128 registers are a packed row"),
    ("selective", "*"): (32, "the arguments of the message about an index out of range"),
    ("selective", "*_rows2*"): (48, "likewise, of two rows"),
    ("selective", "*_rows8*"): (200, "likewise, of eight rows"),
    ("selective_entropy", "*"): (32, "likewise"),
    ("selective_entropy", "*_rows2*"): (48, "likewise"),
    ("selective_entropy", "*_rows8*"): (200, "likewise"),
    ("softmax_backward", "128x4x8*"): (16, "of fp16 on sm_120a: six CTAs an SM leave 80 registers"),
    ("softmax_backward", "1024x4x8*"): (80, "without clusters: 32 of 64 registers are two packed rows"),
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
    """What a thread loads and stores; the refill of a persistent kernel is written a second time.

    A group result is one store a row, of the first thread of the row."""
    expected = Counter()
    vectors, scalars = c.steps * c.rows_per_thread, c.edge_scalars * c.rows_per_thread
    for i, dtype in enumerate(c.dtypes):
        size, output = ITEM_SIZE[dtype], i >= len(c.access)
        if i >= c.facts.full:
            given = i < c.facts.full + len(c.facts.group_inputs)
            again = c.persistent and c.facts.operands[i] in ("scale", "alpha")  # before the first tile, too
            expected[f"{'ld' if given else 'st'} {size}"] += c.rows_per_thread * (1 + again)
            continue
        if not output and not c.access[i]:  # one element a row
            expected[f"ld {size}"] += c.rows_per_thread
            continue
        if output:
            expected[f"st {c.vector * size}"] += vectors
        else:
            bytes_ = c.access[i] * size
            how = "ld" if bytes_ < 4 else "cp.async"
            how = "ld" if c.staging[i] == "direct" else how
            refilled = c.steps_of(i) if c.staging[i] == "async" and c.persistent else 0
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
    allowed = [n for (m, names), (n, _) in STACK.items() if m == c.math and fnmatch(c.name, names)]
    losses = STACK_OF_LOSSES * c.rows_per_thread if c.prologue.target == "loss" else 0
    heads = STACK_OF_HEADS * (c.prologue.entropy or c.prologue.more) + STACK_OF_CAPS * c.prologue.softcap
    return max(allowed, default=0) + STACK_OF_MODES[c.kept_modes] + losses + heads


def check_rows(found: Iterable[RowClass], compiled: Callable[[RowClass], Compiled]):
    """Everything that is asserted of classes of rows."""

    def check(c: RowClass):
        check_compiled(c, compiled(c), may_use_stack(c))
        assert accesses(compiled(c).ptx) == expected_accesses(c)

    check_all(found, check)


def config_of(c: RowClass) -> tuple:
    """What a class has from its configuration."""
    return c.threads_per_row, c.steps, c.threads, c.rows_per_thread, c.cluster_n, c.persistent


@pytest.mark.parametrize("edges", [False, True], ids=["aligned", "ragged"])
@pytest.mark.parametrize(
    ("math", "pair"), [(m, p) for m, pairs in classes.PAIRS_OF.items() for p in pairs], ids=str
)
def test_every_class_of_sm_90a(math, pair, edges, compiled):
    found = classes.intervals(math, "sm_90a", classes.operands(math, pair), edges=edges)
    leading = math in LEADING and pair in classes.SAME[::2]
    check_rows((i.row_class for i in classes.sample(found, 3 if leading else 7, edges)), compiled)


@pytest.mark.parametrize("kept_modes", MODES[1:])
@pytest.mark.parametrize("math", classes.PAIRS_OF)
def test_kept_modes(math, kept_modes, compiled):
    """Some configurations, with the row's index taken apart."""
    by_config = {}
    for dtype in ("bf16", "fp32"):
        for edges in (False, True):
            dtypes = classes.operands(math, (dtype, dtype))
            for interval in classes.intervals(math, "sm_90a", dtypes, edges=edges):
                by_config.setdefault(config_of(interval.row_class), []).append(interval.row_class)
    found = [replace(f[3 * i % len(f)], kept_modes=kept_modes) for i, f in enumerate(by_config.values())]
    check_rows(classes.sample(found, 6 if math in classes.FAMILY else 3, kept_modes), compiled)


@pytest.mark.long
def test_two_passes(compiled):
    found = classes.intervals("softmax", "sm_90a", ("bf16", "bf16"), edges=True, online=False)
    found = found + classes.intervals("softmax", "sm_90a", ("fp32", "fp32"), edges=True, online=False)[1::2]
    check_rows((i.row_class for i in classes.sample(found, 3)), compiled)


@pytest.mark.long
@pytest.mark.parametrize("math", ["softmax", "softmax_backward"])
def test_narrow_accesses(math, compiled):
    """Each configuration once, with inputs that are read 1, 2 or 4 elements at a time."""
    dtypes = classes.operands(math, ("bf16", "bf16"))
    by_config = {}
    for width in classes.widths(math, dtypes)[1:]:
        for edges in (False, True):
            for interval in classes.intervals(math, "sm_90a", dtypes, edges=edges, width=width):
                by_config.setdefault(config_of(interval.row_class), []).append(interval.row_class)
    check_rows((found[5 * i % len(found)] for i, found in enumerate(by_config.values())), compiled)


@pytest.mark.parametrize("math", classes.PAIRS_OF)
@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a != "sm_90a"])
def test_every_configuration_of_other_architectures(architecture, math, compiled):
    """Some configurations, each architecture others, dtypes, edges, passes and the modes of a row's index in turns."""
    by_config = {}
    for pair in classes.PAIRS_OF[math]:
        dtypes = classes.operands(math, pair)
        for edges in (False, True):
            for online in (True, False) if (math, False) in MATHS else (True,):
                for interval in classes.intervals(math, architecture, dtypes, edges=edges, online=online):
                    by_config.setdefault(config_of(interval.row_class), []).append(interval.row_class)
    assert len(by_config) >= 10
    chosen = [found[7 * i % len(found)] for i, found in enumerate(by_config.values())]
    first = list(ARCHITECTURES).index(architecture)
    taken = classes.sample(chosen, 3 if math in LEADING[:2] else 5, first)
    check_rows(
        (replace(c, kept_modes=modes) for c, modes in zip(taken, cycle(MODES), strict=False)), compiled
    )


def test_table_of_stacks_is_no_longer_than_needed(compiled, tmp_path):
    for (math, names), (_, reason) in STACK.items():
        assert reason
        found = [
            i.row_class
            for architecture in ("sm_90a", "sm_80", "sm_120a")
            for pair in (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("bf16", "fp32"))
            for online in (True, False)
            if (math, online) in MATHS
            for edges in (True, False)
            for width in (None, *classes.widths(math, classes.operands(math, pair), online)[1:])
            for i in classes.intervals(
                math, architecture, classes.operands(math, pair), edges=edges, width=width, online=online
            )
            if fnmatch(i.row_class.name, names)
        ]
        assert found, f"no class of {math} is called {names}"
        # Those that other tests have compiled come first; of the others most use it in their whole accesses.
        found.sort(key=lambda c: (not is_compiled(c, tmp_path), "access" in c.name))
        assert any(compiled(c).stack for c in found), f"{math} {names} uses no stack: remove it"


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


def test_each_field_shapes_the_code(compiled, tmp_path, monkeypatch):
    """A class that differs in one of them compiles to other code, and the same one to the same."""
    found = classes.intervals("softmax", "sm_90a", ("bf16", "bf16"), edges=True)
    c = next(i.row_class for i in found if i.row_class.exchanges)  # else two passes are one
    base = compiled(c).ptx
    for change in ({"online": False}, {"edges": False}, {"access": (2,)}, {"keep": False}, {"steps": 5}):
        assert compiled(replace(c, **change)).ptx != base, change
    assert compile_anew(c, tmp_path, monkeypatch).ptx == base
