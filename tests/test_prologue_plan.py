"""Plans with a prologue: every operand is found, aligned as its access says; what is not served says so."""

import dataclasses
import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prologues import operands_of, plan_of
from rows import check, times_owned

from cute_softmax.draw import figures, overview
from cute_softmax.draw.checks import check as check_report
from cute_softmax.kernels import row_work
from cute_softmax.plan import MODES, NO_PROLOGUE, NotPlanned, Plan, Prologue, facts_of, plan, plan_panel
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.problem import ITEM_SIZE, Operand, canonical
from cute_softmax.plan.prologue import FORMS
from cute_softmax.runtime.cache import entry_key

EVERY = Prologue(scale="groups", bias=True, mask=True, causal=True, alpha="number", zero=True)
FORWARD = ("softmax", "log_softmax", "logsumexp", "entropy")


@st.composite
def prologues(draw, name: str) -> Prologue:
    flags = {n: draw(st.booleans()) for n in ("bias", "mask", "causal", "zero")}
    alpha = draw(st.sampled_from(FORMS)) if name.startswith("softmax") else ""
    return Prologue(scale=draw(st.sampled_from(FORMS)), alpha=alpha, **flags)


def test_long_rows_have_their_mask_beside_them():
    """In shared memory as the row itself, to be read in each pass."""
    for columns in (170000, 262144, 400000, 800000):
        plain, scaled = (
            plan_of("softmax", p, (4096, columns)) for p in (Prologue(), Prologue(scale="groups"))
        )
        assert plain.kernel.staging == scaled.kernel.staging == ("shared",)
        assert plain.kernel.min_blocks == scaled.kernel.min_blocks >= 2
        for prologue in (
            Prologue(mask=True),
            Prologue(mask=True, scale="number"),
            Prologue(mask=True, causal=True),
        ):
            masked = plan_of("softmax", prologue, (4096, columns), strides={"mask": (0, 1)})
            assert masked.kernel.staging == ("shared", "shared")
            assert masked.kernel.shared_memory > plain.kernel.shared_memory


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_all_rows_share_stays_while_rows_come_and_go(dtype):
    """Of rows without edges; in as many places as it leaves, the row's vectors take turns."""
    columns, pair = (1 << 20) // (1 if dtype == "bf16" else 2), (dtype, dtype)
    one, room = {"bias": (0, 0, 1), "mask": (0, 0, 1)}, ARCHITECTURES["sm_90a"].shared_memory
    for name, prologue in product(
        ("softmax", "log_softmax"), (Prologue(mask=True), Prologue(bias=True, scale="groups"))
    ):
        plain = plan_of(name, Prologue(), (4, 16, columns), pair).kernel
        c = plan_of(name, prologue, (4, 16, columns), pair, strides=one).kernel
        assert c.persistent and c.staging == ("async", "resident") and c.shared_memory <= room
        assert (c.threads, c.steps, c.cluster_n) == (plain.threads, plain.steps, plain.cluster_n)
        assert c.staged == (8 if prologue.bias else 0)
        places = dict.fromkeys(range(c.staged_steps))
        places |= {k: (0, k) for k in places}
        for tile, first in product(range(5), range(0, c.steps, c.part)):
            later, coming = row_work.following(c, first)
            for k in range(c.part):
                place = (first + k) % c.steps_of(0)
                assert places[place] == (tile, first + k), "another vector lies there"
                places[place] = tile + later, coming + k
        # Each row its own, rows that begin at different places of a vector, and one order of additions for all.
        assert "resident" not in plan_of(name, prologue, (4, 16, columns), pair).kernel.staging
        odd = plan_of(name, prologue, (4, 16, columns - 1), pair, strides=one).kernel
        assert "resident" not in getattr(odd, "staging", ())
        for wrong in ({"persistent": False}, {"edges": True}, {"staged": 3}):
            with pytest.raises(ValueError, match=r"rows|parts"):
                dataclasses.replace(c, **wrong)
    made = plan_of("softmax", Prologue(bias=True), (4, 16, columns), pair, strides=one)
    told = made.explain()
    assert "bias: resident" in told and not check_report(made).problems
    assert all(figure.svg() for figure in figures(made).values()) and overview(made).svg()


@st.composite
def cases(draw) -> dict:
    name = draw(st.sampled_from((*FORWARD, "softmax_backward", "log_softmax_backward")))
    shape = (
        draw(st.sampled_from([1, 2, 3])),
        draw(st.sampled_from([1, 4])),
        draw(st.sampled_from([1, 5, 8])),
    )
    shape += (draw(st.one_of(st.integers(1, 300), st.sampled_from([1000, 2048, 4096, 5001, 20000]))),)
    pad = draw(st.sampled_from([0, 0, 1, 8]))
    dense = (*(math.prod(shape[d + 1 : -1]) * (shape[-1] + pad) for d in range(3)), 1)
    strides = {n: dense for n in ("x", "y", "dy", "dx") if draw(st.booleans())}
    for n in ("bias", "mask"):
        own = [math.prod(shape[d + 1 :]) for d in range(4)]
        kept = [s if draw(st.booleans()) else 0 for s in own[:3]]
        strides[n] = (*kept, draw(st.sampled_from([1, 1, 1, 0])))
    offsets = {n: draw(st.sampled_from([0, 0, 1, 4])) for n in ("x", "y", "dx", "bias", "mask")}
    return {
        "name": name,
        "prologue": draw(prologues(name)),
        "shape": shape,
        "pair": draw(st.sampled_from([("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp32")])),
        "architecture": draw(
            st.sampled_from(sorted(ARCHITECTURES) if shape[-1] < 6000 else ["sm_90a", "sm_103a"])
        ),
        "strides": strides,
        "offsets": offsets,
    }


def check_alignment(made: Plan):
    """Each access of each input begins on a multiple of its width, in all rows; the dtype's own for one element."""
    c, r = made.row_class, made.row_class.facts.reference
    for row in range(min(made.rows, 40)):
        begin = made.problem.offsets[r] + made.row_start(r, row)
        head = min(-begin % c.vector, made.columns) if c.edges else 0
        if made.columns - head < c.vector:
            continue  # scalars alone
        for i, access in enumerate(c.access):
            if access:
                assert (made.problem.offsets[i] + made.row_start(i, row) + head) % access == 0, (
                    c.name,
                    i,
                    row,
                )
                assert access * ITEM_SIZE[c.dtypes[i]] <= 16


@pytest.mark.long
@settings(max_examples=1500)
@given(cases())
def test_every_element_of_every_operand_is_found(case):
    made = plan_of(**case)
    check(made)
    for row in {0, made.rows // 2, made.rows - 1}:
        assert (times_owned(made, row) == 1).all()
    check_alignment(made)
    name, shape, prologue = case["name"], case["shape"], case["prologue"].of(case["name"])
    operands = operands_of(
        name, prologue, shape, case["pair"], strides=case["strides"], offsets=case["offsets"]
    )
    # Each row begins where some index of the kept dimensions puts it, in every operand alike.
    wanted = [
        tuple(sum(i * s for i, s in zip(index, o.strides, strict=False)) for o in operands)
        for index in product(*(range(n) for n in shape[:-1]))
    ]
    found = [tuple(made.row_start(i, row) for i in range(len(operands))) for row in range(made.rows)]
    assert sorted(found) == sorted(wanted)
    c, facts = made.row_class, facts_of(name, True, prologue)
    assert c.kept_modes <= max(len(made.problem.kept), 1) and c.dtypes == tuple(o.dtype for o in operands)
    for i, operand in enumerate(facts.inputs):
        assert (c.access[i] == 0) == (operands[i].strides[-1] == 0 and shape[-1] > 1), operand
    if prologue.causal:
        # A row's position is its index in the last mode.
        assert made.kept[-1] == shape[-2]
        for row in range(made.rows):
            index = wanted.index(found[row])
            if wanted.count(found[row]) == 1:
                assert row % made.kept[-1] == index % shape[-2]


def test_modes_along_which_a_mask_is_shared_are_the_fastest():
    shape, prologue = (2, 16, 4096, 4096), Prologue(mask=True)
    dense = tuple(math.prod(shape[d + 1 :]) for d in range(4))
    for strides, kept in (
        ((0, 0, 4096, 1), (4096, 32)),
        ((4096 * 4096, 0, 4096, 1), (2, 4096, 16)),
        ((4096, 0, 0, 1), (2, 16 * 4096)),
        (dense, (2 * 16 * 4096,)),
    ):
        assert plan_of("softmax", prologue, shape, strides={"mask": strides}).kept == kept
    # Neither short rows nor those that have a position.
    assert plan_of("softmax", prologue, (2, 16, 64, 64), strides={"mask": (0, 0, 64, 1)}).kept == (32, 64)
    causal = dataclasses.replace(prologue, causal=True)
    assert plan_of("softmax", causal, shape, strides={"mask": (0, 0, 4096, 1)}).kept == (32, 4096)


def test_query_stays_by_itself():
    x = Operand("bf16", (4 * 8 * 16, 8 * 16, 16, 1))
    problem = canonical((2, 4, 8, 16), (3,), [x, x], 2)
    assert [m.size for m in problem.kept] == [8, 8] and problem.query
    assert [m.size for m in canonical((2, 4, 8, 16), (3,), [x, x]).kept] == [64]
    one = Operand("bf16", (16, 16, 1))
    assert [m.size for m in canonical((5, 1, 16), (2,), [one, one], 1).kept] == [5, 1]
    for prologue, query in ((Prologue(causal=True), None), (NO_PROLOGUE, 2)):
        with pytest.raises(ValueError, match="a causal prologue needs a problem with a query dimension"):
            plan("softmax", canonical((2, 4, 8, 16), (3,), [x, x], query), H200, prologue=prologue)


def test_a_mask_weighs_what_it_has():
    shape = (2, 4, 8, 1024)
    full = plan_of("softmax", Prologue(mask=True), shape).problem.bytes
    shared = plan_of("softmax", Prologue(mask=True), shape, strides={"mask": (0, 0, 0, 1)}).problem.bytes
    elements = math.prod(shape)
    assert full == elements * 5 and shared == elements * 4 + 1024


def test_what_is_not_served_says_so():
    found = Prologue(alpha="groups", target="found")
    with pytest.raises(
        NotPlanned, match=r"softmax with a prologue \(alpha_groups_target_found\) of groups that are not cont"
    ):
        plan_of("softmax", found, (64, 100), strides=dict.fromkeys(("x", "y"), (1, 64)))
    with pytest.raises(NotPlanned, match="do not fit on chip"):
        plan_of("softmax", found, (4, 3_000_000))
    with pytest.raises(NotPlanned, match=r"at most \d+ are counted in 32 bits"):
        plan_of("softmax", Prologue(scale="number"), (1 << 32, 8))
    with pytest.raises(NotPlanned, match="amax with scale: no kernel does this"):
        plan_of("amax", Prologue(scale="number"), (4, 100))
    with pytest.raises(NotPlanned, match="log_softmax with alpha"):
        plan_of("log_softmax", Prologue(alpha="number"), (4, 100))
    with pytest.raises(ValueError, match="scale is 'row': it is one of '', 'number', 'groups'"):
        Prologue(scale="row")


def test_gradients_have_neither_bias_nor_mask():
    assert EVERY.of("softmax_backward") == Prologue(scale="groups", causal=True, alpha="number")
    given = dataclasses.replace(EVERY, alpha="")
    assert given.of("log_softmax_backward") == Prologue(scale="groups", causal=True, mask=True)
    for name in ("softmax_backward", "log_softmax_backward"):
        facts = facts_of(name, True, Prologue(scale="groups", causal=True))
        assert facts.operands == ("dy", "y", "dx", "scale") and facts.group_inputs == ("scale",)
    assert Prologue(zero=True).of("logsumexp") == NO_PROLOGUE


def test_operands_and_numbers_are_in_order():
    assert EVERY.numbers == ("alpha", "offset") and EVERY.groups == ("scale",)
    facts = facts_of("softmax", True, EVERY)
    assert facts.operands == ("x", "bias", "mask", "y", "scale")
    assert facts.operands[facts.reference] == facts.operands[facts.result] == "y"
    facts = facts_of("entropy", True, Prologue(scale="groups"))
    assert facts.operands == ("x", "scale", "max", "log", "entropy") and facts.operands[facts.result] == "max"
    assert Prologue(scale="number", alpha="number", causal=True).numbers == ("scale", "alpha", "offset")


def test_no_prologue_changes_nothing():
    assert not NO_PROLOGUE and Prologue() == NO_PROLOGUE and NO_PROLOGUE.name == NO_PROLOGUE.told == ""
    x = Operand("bf16", (4096, 1))
    made = plan("softmax", canonical((64, 4096), (1,), [x, x]), H200, prologue=NO_PROLOGUE)
    assert made == plan("softmax", canonical((64, 4096), (1,), [x, x]), H200)
    assert "prologue" not in made.explain()
    problem = canonical((64, 4096), (0,), [x, x])
    assert plan("softmax", problem, H200, prologue=NO_PROLOGUE) == plan_panel("softmax", problem, H200, False)


def test_numbers_are_no_part_of_a_class():
    """Neither are they in the plan: a class, with its prologue, is plain values for the store."""
    made = plan_of("softmax", EVERY, (2, 4, 100))
    c = made.row_class
    assert (
        c.prologue == EVERY
        and c.fields["prologue"] == EVERY.name == "scale_groups_bias_mask_causal_alpha_number_zero"
    )
    keys = {
        entry_key("row", dataclasses.replace(c, prologue=p).fields)
        for p in (EVERY, NO_PROLOGUE, Prologue(mask=True))
    }
    assert len(keys) == 3
    assert made.arguments == (made.rows, made.columns, made.ctas, made.evict_last, *made.kept[1:])


def test_explain_tells_of_the_prologue():
    text = plan_of("softmax", EVERY, (2, 16, 4096)).explain()
    for words in (
        "scores times one number per row; a bias added; masked; causal", "results times a number",
        "zeros in empty rows", "  prologue ", "every element before the diagonal read once",
    ):  # fmt: skip
        assert words in text, (words, text)


@pytest.mark.parametrize(
    ("name", "prologue"), [("softmax", EVERY), ("entropy", Prologue(scale="groups", mask=True))]
)
@pytest.mark.parametrize("columns", [1001, 4096, 50257])
def test_drawings_and_checks_know_all_operands(name, prologue, columns):
    for last in (0, 1):
        made = plan_of(name, prologue, (2, 5, columns), strides={"mask": (columns, 0, last)})
        report = check_report(made)
        assert not report.problems
        assert any(line.startswith("First tile, mask") for line in report.lines()) == bool(last)
        assert all(figure.svg() for figure in figures(made).values()) and overview(made).svg()


def test_as_many_modes_as_there_are():
    for modes in range(1, MODES[-1] + 2):
        shape = (2,) * modes + (64,)
        strides, reach = [1], 64 + 8
        for _ in range(modes):
            strides.insert(0, reach)
            reach = reach * 2 + 8
        places = dict.fromkeys(("x", "y"), tuple(strides))
        if modes > MODES[-1]:
            with pytest.raises(NotPlanned):
                plan_of("softmax", Prologue(scale="number"), shape, strides=places)
        else:
            made = plan_of("softmax", Prologue(scale="number"), shape, strides=places)
            assert made.row_class.kept_modes == modes
