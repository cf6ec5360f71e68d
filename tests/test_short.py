"""The short movement: its plans, and who loads, reads, writes and stores what by the kernel's own index arithmetic."""

from dataclasses import replace
from itertools import product, zip_longest
from math import prod
from types import SimpleNamespace

import classes
import numpy as np
import pytest
from compiled import accesses, check_all, check_compiled, compile_and_read

from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.kernels import short_rows, short_work
from cute_softmax.kernels.common import index
from cute_softmax.plan import MATHS, WARP, Prologue, plan, table_of
from cute_softmax.plan.catalogue import classes as listed
from cute_softmax.plan.catalogue import longest_row
from cute_softmax.plan.choose import plan_call
from cute_softmax.plan.describe import plan_of
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.order import order_of
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical
from cute_softmax.plan.short import SKEW, short_class
from cute_softmax.plan.short_plan import ShortPlan
from layouts import Layout

LIMIT = table_of().short[-1].capacity
LENGTHS = range(1, LIMIT + 1)
SERVED = [math for math, online in MATHS if online and not MATHS[math, online].group_inputs]
ROWS = (1, 33, 4097)


@pytest.fixture(autouse=True)
def however_few():
    with classes.however_few():
        yield


def short_plan(math, pair, rows, columns, *, offsets=(), pads=(), device=H200):
    """The plan of contiguous rows, or of rows that begin at `offsets` and lie `pads` apart, operand by operand."""
    dtypes = classes.operands(math, pair)
    full = MATHS[math, True].full
    operands = [
        Operand(d, (columns + pad, 1) if i < full else (1 + pad, 0), offset * ITEM_SIZE[d])
        for i, (d, offset, pad) in enumerate(zip_longest(dtypes, offsets, pads, fillvalue=0))
    ]
    return plan(math, canonical((rows, columns), (1,), operands), device)


def every_plan(rows=ROWS, lengths=LENGTHS, maths=("softmax", "softmax_backward", "logsumexp")):
    for math in maths:
        for pair, n, m in product(classes.PAIRS_OF[math], lengths, rows):
            yield short_plan(math, pair, m, n)


# -- Plans -------------------------------------------------------------------------------------------------------------


def test_every_short_row_that_lies_densely():
    for made in every_plan():
        c = made.kernel
        assert isinstance(made, ShortPlan) and made.columns <= c.capacity and made.scratch == 0
        assert made.warp_rows * made.columns <= c.elements and made.warp_rows % WARP == 0
        assert made.warp_rows * c.warps * made.ctas >= made.rows > made.warp_rows * c.warps * (made.ctas - 1)
        assert made.turns % c.rows_per_thread == 0
        assert c.capacity % c.piece == 0, "the registers of a row are pieces"
        assert c.sure < c.least <= made.columns, "what is moved without a predicate is the row's"
        assert c.whole == (c.vector % made.columns == 0) and c.vector == 16 // max(c.sizes)
        # Threads with a word in common would overwrite each other's results.
        assert made.pairs or c.whole or made.columns % 2 == 0 or {*c.sizes} != {2}
        assert made.arguments == (made.rows, made.columns, made.warp_rows, made.ctas, 0)


@pytest.mark.parametrize("pair", [("bf16", "bf16"), ("bf16", "fp32")], ids="->".join)
def test_plans_have_no_problems(pair):
    for math, n in product(("softmax", "logsumexp"), (1, 3, 4, 9, 24, 48, 57)):
        if pair in classes.PAIRS_OF[math]:
            made = short_plan(math, pair, 90, n)
            assert checks.check(made).problems == (), made.explain()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shared_memory_is_enough_everywhere(architecture):
    device = replace(H200, architecture=ARCHITECTURES[architecture])
    for math, n in product(SERVED, LENGTHS[::9]):
        for pair in classes.PAIRS_OF[math]:
            made = short_plan(math, pair, 1000, n, device=device)
            assert made.movement == "short" and made.kernel.shared_memory <= device.architecture.shared_memory
            assert "  movement   short: " in made.explain()


def test_what_goes_another_way():
    pair = ("bf16", "bf16")
    assert short_plan("softmax", pair, 100, LIMIT + 1).movement == "row"
    assert short_plan("softmax", pair, 100, 24, pads=(8, 0)).movement == "row"
    assert short_plan("softmax", pair, 100, 24, pads=(0, 1)).movement == "row"
    assert short_plan("softmax", pair, 1, 24, pads=(8, 8)).movement == "short"  # of one row there is no next
    # Where the numbers of rows are put decides nothing.
    apart = short_plan("logsumexp", pair, 100, 24, pads=(0, 2))
    assert apart.movement == "short" and apart.operand_strides == ((), (3,))
    assert apart.kernel == short_plan("logsumexp", pair, 100, 24).kernel
    assert short_plan("logsumexp", pair, 100, 2, pads=(0, 2)).kernel.access == (8, 1)


def test_a_tensor_that_begins_off_a_vector_is_loaded_in_smaller_pieces():
    aligned = short_plan("softmax", ("bf16", "fp32"), 100, 19)
    assert aligned.kernel.access == (4, 4)
    for offset, access in ((1, 1), (2, 2), (4, 4), (7, 1)):
        made = short_plan("softmax", ("bf16", "fp32"), 100, 19, offsets=(offset, 2))
        assert made.kernel.access == (access, 2) and checks.check(made).problems == ()
    assert replace(made.kernel, access=aligned.kernel.access) == aligned.kernel
    # The numbers of rows that a vector holds whole go side by side.
    assert short_plan("logsumexp", ("bf16", "bf16"), 100, 2).kernel.access == (8, 4)
    assert short_plan("logsumexp", ("bf16", "bf16"), 100, 2, offsets=(0, 6)).kernel.access == (8, 2)
    assert short_plan("logsumexp", ("bf16", "bf16"), 100, 7).kernel.access == (8, 1)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
def test_classes_are_few(architecture):
    """As many as there are capacities, and one each for the shortest lengths."""
    for math, dtype in product(SERVED, ("bf16", "fp32")):
        dtypes = classes.operands(math, (dtype, dtype))
        found = [c for c in listed(math, ARCHITECTURES[architecture], dtypes) if c.movement == "short"]
        assert len({c.name for c in found}) == len(found) <= 14 and longest_row(found[-1]) == LIMIT
        asked = [short_class(math, architecture, dtypes, n) for n in LENGTHS]
        assert list(dict.fromkeys(asked)) == found
        assert [longest_row(c) for c in asked] == [
            max(n for n in LENGTHS if asked[n - 1] == c) for c in asked
        ]


def test_few_rows_are_spread_over_the_gpu():
    few, many = (short_plan("softmax", ("bf16", "bf16"), n, 8 + 2) for n in (1 << 14, 1 << 24))
    assert few.kernel == many.kernel and few.warp_rows < many.warp_rows
    assert few.ctas * few.kernel.warps > H200.multiprocessors


def test_one_order_whatever_the_number_of_rows_and_the_alignment():
    for n in (3, 24, 57):
        plans = [
            short_plan("softmax", ("bf16", "bf16"), m, n, offsets=(o, o)) for m in ROWS for o in range(8)
        ]
        assert len({order_of(p) for p in plans}) == 1
    assert len({order_of(short_plan("softmax", ("bf16", "bf16"), 5, n)) for n in LENGTHS}) == LIMIT


# -- Index arithmetic --------------------------------------------------------------------------------------------------

LANES = np.arange(WARP)


def stretch_of(made: ShortPlan, number: int) -> SimpleNamespace:
    """What a warp's threads know of their stretch, by the kernel's arithmetic on ints."""
    c = made.kernel
    return SimpleNamespace(
        left=short_work.elements_left(made.rows, made.columns, number, made.warp_rows),
        skew=short_work.skew_of(made.columns, c.vector),
        pairs=short_work.in_pairs(c, made.columns, made.warp_rows),
    )


def vectors(made: ShortPlan, left: int):
    """(first elements, places) of each lane's vectors of a step that exist; and the elements of the tail."""
    c = made.kernel
    for k in range(c.steps):
        first = np.array([c.tv((int(lane), (0, k))) for lane in LANES])
        place = short_work.place_of_step(LANES, k, short_work.skew_of(made.columns, c.vector))
        there = first + c.vector <= left
        yield first[there], place[there]
    whole = left // c.vector
    tail = whole * c.vector + LANES
    yield tail[tail < left], None


@pytest.mark.parametrize("pair", classes.PAIRS, ids="->".join)
def test_each_element_has_one_place_and_comes_back_from_it(pair):
    """Loaded once, at a place of its own within the warp's shared memory, and read there by the row's thread."""
    first = classes.PAIRS.index(pair)
    for n, m in product(LENGTHS[first :: 1 if first == 0 else 5], (3, 1000)):
        made = short_plan("softmax", pair, m, n)
        c, stored = made.kernel, []
        for number in {0, (made.stretches - 1) // 2, made.stretches - 1}:
            w = stretch_of(made, number)
            places = np.full(c.elements, -1)  # of each element
            for first, place in vectors(made, w.left):
                if place is None:
                    v = w.left // c.vector
                    places[first] = short_work.place_of(v, w.skew) * c.vector + first % c.vector
                    continue
                for e in range(c.vector):
                    assert (places[first + e] == -1).all()
                    places[first + e] = place * c.vector + e
            assert (places[: w.left] >= 0).all() and (places[w.left :] == -1).all()
            held = places[: w.left]
            assert len({*held}) == w.left and (c.whole or held.max() < c.places)
            assert bool(w.pairs) == made.pairs or c.whole
            if c.whole:
                continue
            rows = np.concatenate([short_work.row_of(LANES, t, w.pairs) for t in range(made.turns)])
            assert sorted(rows) == list(range(made.warp_rows))
            assert all(
                made.row_at(int(lane), t) == short_work.row_of(int(lane), t, w.pairs)
                for t in range(min(made.turns, 4))
                for lane in LANES
            )
            # A row in pieces that its length allows: as `pieces` has them, within one vector each.
            for size in (c.vector, c.vector // 2, 1):
                if n % size == 0:
                    break
            element = rows[:, None] * n + np.arange(n)
            exists = element < w.left
            at = short_work.place_of(element // c.vector, w.skew) * c.vector + element % c.vector
            assert (at[exists] == places[element[exists]]).all()
            first = element[:, ::size]
            assert (first // c.vector == (first + size - 1) // c.vector).all() and (first % size == 0).all()
            stored.append(exists.sum())
        assert c.whole or sum(stored) >= min(made.rows * n, 1)


@pytest.mark.parametrize("odd", [0, 1])
def test_rows_of_halves_by_words(odd):
    """`read_words` and `write_words` step by step, on a warp's shared memory of numbered elements."""
    for n in [n for n in LENGTHS if n % 4 and not (odd and n % 2 == 0)]:
        c = short_class("softmax", "sm_90a", ("bf16", "bf16"), n, laid=("apart",))
        words, sure = c.capacity // 2, c.sure // 2
        assert 2 * sure < n <= c.capacity

        def ends(count, sure=sure):
            """(word, the end of its chunk in elements) of so many words."""
            chunk = short_rows.CHUNK // 2
            for j in range(count):
                yield j, 2 * (sure if j < sure else min(j + chunk - (j - sure) % chunk, count))

        memory = np.arange(100, 100 + c.capacity + 2)  # halves; the row begins at number `odd`
        shared, held = memory.reshape(-1, 2), np.full((words + 1, 2), -1)
        row = np.full((words, 2), -1)
        if odd:
            held[0] = shared[0]
        for j, end in ends(words):
            whole = j < sure or end <= n
            if whole or short_work.word_is_read(j, n, odd):
                held[j + odd] = shared[j + odd]
            row[j] = (held[j][1], held[j + 1][0]) if odd else held[j]
            if not whole and not odd and short_work.word_is_last(j, n):
                row[j][1] = -1
        assert row.reshape(-1)[:n].tolist() == list(range(100 + odd, 100 + odd + n))
        assert (row.reshape(-1)[n:] == -1).all()

        results, target = np.arange(1000, 1000 + c.capacity), np.full(c.capacity + 2, -1)
        if odd:
            target[1] = results[0]
        for j, end in ends(words - odd):
            whole = j < sure or end + odd <= n
            if whole or short_work.word_is_written(j, n, odd):
                target[2 * (j + odd) : 2 * (j + odd) + 2] = results[2 * j + odd : 2 * j + odd + 2]
            if not whole and not odd and short_work.word_is_last(j, n):
                target[2 * j] = results[2 * j]
        assert target[odd : odd + n].tolist() == list(range(1000, 1000 + n))
        assert (target[:odd] == -1).all() and (target[odd + n :] == -1).all(), "a neighbour's elements"


def test_lanes_look_at_different_banks():
    """Of 16-bit and 32-bit rows alike: but for lengths of many factors of two, each request is as few wavefronts as its
    bytes need."""
    for n, pair in product(LENGTHS, (("bf16", "bf16"), ("fp32", "fp32"))):
        made = short_plan("softmax", pair, 1 << 20, n)
        if made.kernel.whole:
            continue
        width, found = checks.short.rows_requests(made, 0)
        cost = [checks.common.access.shared_request(lanes, width).wavefronts for lanes in found]
        units = n * ITEM_SIZE[pair[0]] // 16
        usual = max(width * WARP // 128, 1)
        assert max(cost) <= usual * (4 if n % made.kernel.vector == 0 and units % 2 == 0 and units > 8 else 2)
        if units % 2 or width < 16 or units in (2, 4, 8):
            assert max(cost) == usual, (n, pair, cost)


def test_the_words_of_a_run():
    """Each element is copied once, alone or in a word, and words are made of words of the run only."""
    for each, to, count in product((2, 4), range(9), range(40)):
        head, words = short_work.words_of_run(to, count, each)
        tail = head + words * each
        copied = [*range(head), *range(tail, count), *range(head, tail)]
        assert sorted(copied) == list(range(count)) and head + count - tail < WARP
        if words:
            assert (to + head) % each == 0 and head >= each and count - tail >= each


def test_rows_of_bytes_by_words():
    """`read_bytes` step by step: the row's bytes, and zeros behind them."""
    for n in (1, 2, 3, 5, 12, 31, 49, 63):
        capacity = next(c.capacity for c in table_of().short if n <= c.capacity)
        for start in range(40, 44):
            memory = np.arange(1, 200, dtype=np.uint8)
            words = memory[: 49 * 4].view("<u4").astype(np.uint64)
            held = [
                int(words[start // 4 + j]) if short_work.byte_word_is_read(j, n) else 0
                for j in range(capacity // 4 + 1)
            ]
            row = []
            for j in range(capacity // 4):
                word = (held[j] | held[j + 1] << 32) >> 8 * (start % 4) & short_work.bytes_of_word(j, n)
                row += word.to_bytes(4, "little")
            assert row[:n] == memory[start : start + n].tolist() and not any(row[n:])


def scored(shape, columns, strides, name="mask"):
    """The plan of a softmax over the last dimension of a tensor of 16-bit elements with a mask, or a bias, that lies so
    in the others."""
    whole = [prod((*shape, columns)[d + 1 :]) for d in range(len(shape) + 1)]
    x, dtype = Operand("bf16", tuple(whole)), {"mask": "bool", "bias": "bf16"}[name]
    operands = x, Operand(dtype, (*strides, 1)), x
    return plan_call(
        "softmax", (*shape, columns), (len(shape),), operands, H200, prologue=Prologue(**{name: True})
    )


@pytest.mark.parametrize(
    ("shape", "strides", "runs"),
    [
        ((64, 6, 49), (49 * 49, 0, 49), (1, 49)),  # a mask of each window, for all heads
        ((64, 6, 49), (0, 49 * 49, 49), (1, 294)),  # a bias of each head
        ((64, 6, 49), (49, 0, 0), (294, 64)),  # of a sequence, for all rows
        ((64, 6, 49), (0, 0, 0), (18816, 1)),
        ((64, 6, 49), (0, 49, 0), (49, 6)),
        ((5, 3, 7), (49 * 49, 98, 0), (7, 1)),
        ((5, 3, 7), (7 * 49, 5 * 7 * 49, 49), (1, 7)),  # dimensions in another order
        ((300,), (64,), (1, 1)),
    ],
)
def test_rows_that_lie_apart(shape, strides, runs):
    """Each row of each stretch finds its own in shared memory: step by step what `ShortKernel.fetch` does."""
    made = scored(shape, 49, strides)
    assert made.kernel.laid == ("dense", "apart") and not made.kernel.whole
    *in_modes, repeat, run = made.operand_strides[1]
    assert (repeat, run) == runs and checks.check(made).problems == ()

    def start_of(row: int) -> int:
        return index.dot(index.of_row(row, list(made.kept[1:]), True), in_modes)

    wanted = np.add.outer(0, np.zeros(1, int))
    for n, s in zip(shape, strides, strict=True):
        wanted = np.add.outer(wanted, np.arange(n) * s)
    wanted = wanted.ravel()
    for number in range(made.stretches):
        first = number * made.warp_rows
        rows = min(made.warp_rows, made.rows - first)
        begin, end = short_work.distinct_rows(first, rows, repeat)
        assert end - begin <= rows, "no more than there is room for"
        held, row = {}, begin
        while row < end:
            behind = min((row // run + 1) * run, end)
            start = start_of(row // run * run * repeat) + row % run * made.columns
            held |= {row - begin + k: start + k * made.columns for k in range(behind - row)}
            row = behind
        for r in range(rows):
            found = held[short_work.distinct_row(first, rows, repeat, r)]
            assert found == wanted[first + r]
        assert held[short_work.distinct_row(first, rows, repeat, rows + 5)] == wanted[first + rows - 1]
        assert made.shared_row(1, rows - 1) < rows


def test_what_scores_of_short_rows_are_planned_as():
    alike = scored((64, 6, 49), 49, (6 * 49 * 49, 49 * 49, 49))
    assert alike.kernel.laid == ("dense", "dense") and alike.kernel.kept_modes == 1
    assert alike.kernel.access == (8, 8, 8) and alike.kernel.shared_memory == 49152 + 6144
    both = scored((64, 49), 49, (0, 49), "bias")
    assert both.kernel.access == (8, 0, 8) and both.kernel.sources == (0, 1, 0)
    assert both.kernel.min_blocks >= 4 and "49 contiguous; copied" in both.explain()
    x = Operand("bf16", (49 * 49, 49, 1))
    single = Operand("bool", (0, 1, 0))
    made = plan_call("softmax", (64, 49, 49), (2,), (x, single, x), H200, prologue=Prologue(mask=True))
    assert made.kernel.laid == ("dense", "single") and made.kernel.placed == (0,)
    assert "mask: one element per row, in registers" in made.explain()
    # Vectors hold whole rows, unless some lie apart.
    assert scored((64, 6), 4, (24, 4)).kernel.whole and not scored((64, 6), 4, (0, 4)).kernel.whole
    # A diagonal, of rows that lie in the order of their positions.
    made = plan_call("softmax", (64, 49, 49), (2,), (x, x), H200, prologue=Prologue(causal=True), query=1)
    assert made.movement == "short" and made.kept == (64, 49)
    turned = plan_call("softmax", (64, 49, 49), (2,), (x, x), H200, prologue=Prologue(causal=True), query=0)
    assert turned.movement == "row"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_compile(architecture, tmp_path, monkeypatch):
    which = list(ARCHITECTURES).index(architecture)
    forms = [
        (57, Prologue(mask=True, zero=True), ("bf16", "bool", "bf16"), ("dense", "apart")),
        (12, Prologue(bias=True, scale="groups"), ("fp32", "fp32", "fp32", "fp32"), ("dense", "dense")),
        (8, Prologue(causal=True, scale="number"), ("bf16", "bf16"), ("dense",)),
        (24, Prologue(sink=True, mask=True), ("fp16", "bool", "fp16", "fp32", "fp32"), ("dense", "single")),
    ]
    columns, prologue, dtypes, laid = forms[which % len(forms)]
    c = short_class("softmax", architecture, dtypes, columns, laid=laid, prologue=prologue, kept_modes=2)
    found = compile_and_read(c, tmp_path, monkeypatch)
    assert found.ptx.count("ex2.approx") >= columns and found.stack <= 128


# -- Compiled ----------------------------------------------------------------------------------------------------------


# Bytes of stack: ptxas puts four numbers of 48 aside, to have 80 registers and no more.
STACK = {("softmax", "short48_12x4"): 16}


def check_short(c, found):
    """What holds for each compiled class of short rows."""
    check_compiled(c, found, STACK.get((c.math, c.name), 0), padding=128)
    widths = {
        int(w) for name, w in (key.split() for key in accesses(found.ptx)) if name in ("cp.async", "ld")
    }
    assert widths >= {c.access[0] * ITEM_SIZE[c.dtypes[0]]}, widths
    if c.math in ("softmax", "log_softmax", "logsumexp"):
        exponentials = found.ptx.count("ex2.approx")
        # Of rows of one length the compiler knows what padding is.
        assert exponentials >= c.rows_per_thread * (c.columns or c.capacity), f"{exponentials} exponentials"


def sampled(architecture, every, first=0):
    found = []
    for math in SERVED:
        for pair in classes.PAIRS_OF[math]:
            dtypes = classes.operands(math, pair)
            found += dict.fromkeys(short_class(math, architecture, dtypes, n) for n in LENGTHS)
    return classes.sample(found, every, first)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_all_elements_of_a_row_are_in_its_sum(dtype, tmp_path, monkeypatch):
    """Of every capacity: 12 is no number of vectors of eight."""
    dtypes = classes.operands("logsumexp", (dtype, dtype))
    found = [short_class("logsumexp", "sm_90a", dtypes, n) for n in (1, 3, 8, 9, 12, 16, 24, 31, 47, 64)]
    check_all(found, lambda c: check_short(c, compile_and_read(c, tmp_path, monkeypatch)))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiled_classes(architecture, tmp_path, monkeypatch):
    first = list(ARCHITECTURES).index(architecture)
    every = 37 if architecture == "sm_90a" else 149
    check_all(
        sampled(architecture, every, first),
        lambda c: check_short(c, compile_and_read(c, tmp_path, monkeypatch)),
    )


def test_figures_of_a_row_in_pairs_and_of_whole_ones():
    for n, words in (
        (57, "begin in the middle of a word"),
        (4, "stay in the registers"),
        (48, "a place is left empty"),
    ):
        found = draw.figures(plan_of(1000, n))
        assert words in found["rows"].svg()


def test_a_wrong_map_is_found():
    made = short_plan("softmax", ("bf16", "bf16"), 100, 24)

    class Wrong(type(made.kernel)):
        tv = property(lambda self: Layout((WARP, (self.vector, self.steps)), (1, (1, WARP))))

    fields = {**made.kernel.fields, "prologue": made.kernel.prologue}
    broken = replace(made, kernel=Wrong(**fields))
    assert checks.check(broken).problems
    too_many = replace(made, warp_rows=made.warp_rows * 4)
    assert any("are more than" in p for p in checks.check(too_many).problems)
    assert SKEW * 16 == 128
