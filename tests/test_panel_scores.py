"""Scores in the kernels of columns and split rows: plans, the arithmetic of what lies beside elements, their code."""

import math
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import panels
import pytest
import simulated
import torch
from compiled import accesses, check_all, check_compiled, compile_and_read
from hypothesis import given, settings
from hypothesis import strategies as st
from prologues import DEVICES
from test_panel_compile import may_use_stack

from cute_softmax import log_softmax, logsumexp, softmax
from cute_softmax.draw import figures, overview
from cute_softmax.draw.checks import check
from cute_softmax.kernels.common.copy import GlobalTensor
from cute_softmax.kernels.panel import scores, work
from cute_softmax.plan import NotPlanned, PanelPlan, Prologue, facts_of
from cute_softmax.plan.choose import plan_call
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.order import order_of
from cute_softmax.plan.problem import ITEM_SIZE, Operand

LONG = (1 << 20) + 8
RESERVED = 1024  # bytes of shared memory that CUDA takes for each CTA


def strides_of(shape, whole, order=None) -> tuple[int, ...]:
    """Dense strides of a tensor that is broadcast to a shape: 0 along what it is broadcast. order: of memory, the
    slowest dimension first."""
    found, step = [0] * len(whole), 1
    for d in reversed(order or range(len(shape))):
        found[d], step = (0 if shape[d] < whole[d] else step), step * shape[d]
    return tuple(found)


def plan_of(
    name: str,
    prologue: Prologue,
    shape: tuple[int, ...],
    dims: tuple[int, ...] = (-1,),
    dtype: str = "bf16",
    arch: str = "sm_90a",
    *,
    beside: dict[str, tuple[int, ...]] | None = None,
    order: tuple[int, ...] | None = None,
    strides: dict[str, tuple[int, ...]] | None = None,
    offsets: dict[str, int] | None = None,
    bias: str = "bf16",
) -> PanelPlan:
    """The plan of a call. beside: shapes that a bias and a mask are broadcast from; order: of all tensors' memory;
    strides, offsets: of single operands, in elements."""
    prologue, dims = prologue.of(name), tuple(d % len(shape) for d in dims)
    facts, operands = facts_of(name, True, prologue), []
    for operand in (*facts.inputs, *facts.group_inputs, *facts.outputs, *facts.group_outputs):
        group = operand in (*facts.group_inputs, *facts.group_outputs)
        own = tuple(1 if d in dims else n for d, n in enumerate(shape)) if group else shape
        own = (beside or {}).get(operand, own)
        kind = {"mask": "bool", "bias": bias}.get(operand, "fp32" if group else dtype)
        at = (strides or {}).get(operand) or strides_of(own, shape, order)
        operands.append(Operand(kind, at, (offsets or {}).get(operand, 0) * ITEM_SIZE[kind]))
    query = len(shape) - 2 if prologue.causal else None
    return plan_call(name, shape, dims, operands, DEVICES[arch], prologue=prologue, query=query)


# -- Plans ---------------------------------------------------------------------------------------------------------


@st.composite
def cases(draw) -> dict:
    shape = tuple(draw(st.sampled_from([1, 2, 5, 8])) for _ in range(draw(st.integers(1, 2))))
    shape += (
        draw(st.sampled_from([1, 3, 8, 24, 48, 51, 64, 100, 129, 256])),
        draw(st.sampled_from([1, 7, 33, 200, 520])),
    )
    reduced = draw(st.sampled_from([(-1,), (-2,), (0,), (0, -1)]))
    own = {n: tuple(draw(st.sampled_from([n, n, 1])) for n in shape) for n in ("bias", "mask")}
    return {
        "name": draw(st.sampled_from(["softmax", "log_softmax", "logsumexp"])),
        "prologue": Prologue(
            scale=draw(st.sampled_from(["", "number", "groups"])), bias=draw(st.booleans()), mask=draw(st.booleans())
        ),
        "shape": shape,
        "dims": reduced,
        "dtype": draw(st.sampled_from(["bf16", "fp32"])),
        "bias": draw(st.sampled_from(["bf16", "fp32"])),
        "beside": own,
        "offsets": {n: draw(st.sampled_from([0, 0, 1, 4])) for n in ("x", "y", "bias", "mask")},
    }  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(cases(), st.sampled_from(sorted(panels.SMALL)))
def test_every_element_of_every_operand_is_found(case, movement):
    """With what lies beside it: in the plan's own movement, and in another."""
    made = plan_of(**case)
    if not isinstance(made, PanelPlan):
        return
    panels.check_numbers(made)
    plans = [made, *[p for name, p in panels.movements(made) if name == movement]]
    for plan in plans:
        if plan.problem.groups * plan.problem.length < 20_000:
            panels.check_owners(plan)


@pytest.mark.parametrize("shape", [(4, LONG), (4, LONG + 1), (300, LONG), (2, 3 * LONG)])
@pytest.mark.parametrize("prologue", [Prologue(mask=True), Prologue(bias=True, mask=True, scale="groups")])
def test_long_rows_are_held_with_what_lies_beside_them(shape, prologue):
    made = plan_of("softmax", prologue, shape, beside={"mask": (1, shape[1]), "bias": (1, shape[1])})
    plain = plan_of("softmax", Prologue(), shape)
    c, room = made.kernel, ARCHITECTURES["sm_90a"].shared_memory
    assert made.movement == "split" and plain.again == 0 and not (c.ahead and shape[1] % 8)
    assert made.again <= (made.chunks / 2 if prologue.bias and shape[1] % 8 else 0)
    # As many CTAs share an SM as wait for each other.
    assert c.min_blocks * c.shared_memory <= room and made.ctas <= 132 * c.min_blocks
    panels.check_numbers(made)


def test_numbers_alone_change_no_movement():
    for shape, dims in (
        ((300, LONG), (1,)),
        ((4, LONG + 1), (1,)),
        ((4096, 8192), (0,)),
        ((4096, 8191), (0,)),
    ):
        plain = plan_of("softmax", Prologue(), shape, dims)
        for prologue in (Prologue(scale="number"), Prologue(scale="groups", alpha="groups", zero=True)):
            made = plan_of("softmax", prologue, shape, dims)
            assert replace(made.kernel, prologue=Prologue(), dtypes=plain.kernel.dtypes) == plain.kernel
            told = made.explain()
            assert "scores times" in told and "bf16 -> " not in told


def test_a_mask_that_is_shared_is_one_element_or_a_vector():
    for own, access in (((4096, 1), 0), ((1, 8192), 8), ((4096, 8192), 8)):
        c = plan_of("softmax", Prologue(mask=True), (4096, 8192), (0,), beside={"mask": own}).kernel
        assert c.orientation == "column" and c.access == (8, access) and c.words(1) == 0
        assert c.tile_of(1).cosize == (c.tile if access == 0 else c.smem.cosize)
    odd = plan_of("softmax", Prologue(mask=True), (4, LONG), offsets={"mask": 1}).kernel
    assert odd.access == (8, 1) and odd.words(1) == 3 and odd.tile_of(1).shape[0] == 3
    even = plan_of("softmax", Prologue(bias=True), (4, LONG), offsets={"bias": 2}).kernel
    assert even.access == (8, 2) and even.words(1) == 0
    wide = plan_of("softmax", Prologue(bias=True), (4, LONG), bias="fp32").kernel
    assert wide.access == (8, 4) and wide.vector == 8


def test_what_is_one_for_a_row_of_a_panel_takes_no_room():
    """As many CTAs share an SM as without it, and of a row of a panel there is one element, in whatever batch."""
    arch = ARCHITECTURES["sm_90a"]
    for shape, dim in (((4096, 65536), 0), ((128, 1048576), 0), ((32, 512, 56, 56), 1)):
        one = tuple(n if d == dim else 1 for d, n in enumerate(shape))
        for prologue in (Prologue(mask=True), Prologue(bias=True), Prologue(mask=True, bias=True)):
            c = plan_of("softmax", prologue, shape, (dim,), beside={"mask": one, "bias": one}).kernel
            assert c.alike == c.lanes == 16
            assert c.min_blocks * (c.shared_memory + RESERVED) <= arch.shared_memory + RESERVED, c.name
    for heads, alike in ((768, 16), (64, 8), (24, 1)):
        shape, one = (512, 1000, heads), (512, 1000, 1)
        c = plan_of("softmax", Prologue(mask=True), shape, (1,), beside={"mask": one}).kernel
        assert c.orientation == "column" and c.access == (8, 0) and c.alike == alike


def test_neighbours_that_lie_apart_are_copied_first():
    shape, mask = (64, 4096), Prologue(mask=True)
    made = plan_of("softmax", mask, shape, strides={"mask": (1, 64)})
    assert made.movement == "row" and made.laid_out == (1,) and made.laid_strides == ((4096, 1),)
    assert "copied     a bias or a mask" in made.explain()
    made = plan_of("softmax", mask, shape, (0,), strides={"mask": (1, 64)})
    assert made.movement == "column" and made.laid_strides == ((4096, 1),)
    made = plan_of("softmax", mask, (8, *shape), strides={"mask": (0, 1, 64)})
    assert made.laid_strides == ((0, 4096, 1),), "what is broadcast stays so"
    for strides in ((4096, 1), (0, 1), (1, 0)):
        assert not plan_of("softmax", mask, shape, strides={"mask": strides}).laid_out
    # An element at a time, of all.
    apart = dict.fromkeys(("x", "y"), (4096 * 2, 2))
    assert not plan_of("softmax", mask, shape, strides={**apart, "mask": (1, 64)}).laid_out
    # Beside elements that are expanded, or overlap, those of the result say which are neighbours.
    for x in ((0, 1), (1, 1)):
        for dims in ((0,), (1,)):
            made = plan_of("softmax", mask, shape, dims, strides={"x": x, "mask": (1, 64)})
            assert made.laid_out == (1,) and made.laid_strides == ((4096, 1),)
    # More modes than kernels have, for the mask alone.
    shape = (2,) * 7 + (64,)
    made = plan_of("softmax", mask, shape, beside={"mask": (2, 1) * 3 + (2, 64)})
    assert made.laid_out == (1,) and made.laid_strides == (strides_of(shape, shape),)
    one = {"x": (0, *strides_of(shape, shape)[1:])}
    made = plan_of("softmax", mask, shape, beside={"mask": (2, 1) * 3 + (2, 64)}, strides=one)
    assert made.laid_out == (1,) and made.laid_strides == (strides_of(shape, shape),)


def test_bits_do_not_depend_on_how_a_mask_is_broadcast():
    """Within batch_invariant()."""
    for length in (LONG, LONG + 1, 3 * LONG, 40 * LONG):
        prologue, found = Prologue(mask=True, bias=True), set()
        x, dense = Operand("bf16", (length, 1)), (length, 1)
        for strides, address in ((dense, 0), (dense, 1), ((0, 1), 3), ((1, 0), 0)):
            operands = [x, Operand("bf16", strides, 2 * address), Operand("bool", strides, address), x]
            made = plan_call(
                "softmax", (4, length), (1,), operands, DEVICES["sm_90a"], prologue=prologue, invariant=True
            )
            found.add(order_of(made))
        assert len(found) == 1 and "softmax_bias_mask" in str(found)


def test_a_position_is_that_of_the_query():
    """In rows, in columns along the queries, and in columns along another dimension."""
    shape, prologue = (4, 64, 96), Prologue(causal=True)
    for order, orientation, query in (((1, 2, 0), "column", 1), ((0, 2, 1), "column", 0)):
        made = plan_of("softmax", prologue, shape, order=order)
        c = made.kernel
        assert isinstance(made, PanelPlan) and (c.orientation, c.query) == (orientation, query)
        walk = panels.Walk(made, 0)
        found = scores.positions(walk.item)
        for slot, position in enumerate(found):
            place = walk.item.starts[0] + slot
            inside = np.broadcast_to(walk.item.inside, walk.group.shape)
            # The index in the mode of queries, of the place where a group begins.
            (stride,) = {strides_of(shape, shape, order)[1]}
            right = place // stride % shape[1]
            assert (
                np.broadcast_to(position, inside.shape)[inside]
                == np.broadcast_to(right, inside.shape)[inside]
            ).all()
    made = plan_of("softmax", prologue, (2, 3, 8 * LONG))
    assert made.kernel.query == 0 and made.kept[-1] == 3
    walk = panels.Walk(made, 0)
    assert {int(n) for n in np.unique(walk.item.position)} == {0, 1, 2}


def test_what_no_panel_computes():
    for prologue in (Prologue(alpha="groups", target="found"), Prologue(alpha="groups", target="loss")):
        with pytest.raises(NotPlanned, match="do not fit on chip"):
            plan_of("softmax", prologue, (4, 3 * LONG))


@pytest.mark.parametrize(("shape", "dims"), [((4, LONG + 1), (1,)), ((300, 4096), (0,)), ((300, 4099), (0,))])
def test_drawings_and_checks_know_all_operands(shape, dims):
    prologue, own = (
        Prologue(mask=True, bias=True, scale="groups"),
        (1, shape[1]) if dims == (1,) else (shape[0], 1),
    )
    made = plan_of("softmax", prologue, shape, dims, beside={"mask": own})
    report = check(made)
    assert not report.problems
    told = "\n".join(report.lines())
    assert all(f"First tile, {name}: " in told for name in ("x", "bias", "mask", "y"))
    assert "mask in shared memory" in told and "4 bytes a lane" in told
    assert all(figure.svg() for figure in figures(made).values()) and overview(made).svg()


# -- Words ---------------------------------------------------------------------------------------------------------


def funnel(low: int, high: int, bits: int) -> int:
    return ((high << 32 | low) >> bits) & 0xFFFFFFFF


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(("dtype", "vector"), [*product(["bool", "bf16", "fp32"], [1, 2, 4, 8])])
def test_words_hold_the_vector_wherever_it_begins(dtype, vector, shifted):
    """As the kernel copies and shifts them, on bytes; and nothing is read behind what is wanted."""
    size, memory = ITEM_SIZE[dtype], np.arange(1, 97, dtype=np.uint8)
    base = plan_of("softmax", Prologue(mask=True), (4, LONG)).kernel
    for access in (a for a in (1, 2, 4, 8) if a <= vector and a * size <= 16):
        c = replace(
            base, dtypes=("bf16", dtype, "bf16"), vector=vector, access=(vector, access), shifted=shifted
        )
        count = c.words(1)
        if not count:
            assert access * size >= 4 and not shifted
            continue
        for place, beside in product(range(8, 24), (None, 1, vector, 99) if shifted else (None,)):
            if place % (access * size):
                continue
            into, read = scores.into_word(place), set()
            words = []
            for j in range(count):
                limit = scores.wanted(c, 1, size, into, beside, j)
                here = range(4 if limit is None else limit)
                read |= {place - into + 4 * j + b for b in here}
                words.append(sum(int(memory[place - into + 4 * j + b]) << 8 * b for b in here))
            wanted = vector if beside is None else min(vector, beside)
            assert max(read) < place + wanted * size and min(read) >= place - into
            if access * size < 4:
                words = [funnel(a, b, 8 * into) for a, b in zip(words, [*words[1:], words[-1]], strict=True)]
            else:
                assert into == 0
            found = b"".join(w.to_bytes(4, "little") for w in words)[: wanted * size]
            assert found == memory[place : place + wanted * size].tobytes(), (access, place, beside)


def test_places_beside_the_elements():
    """One for a whole row has a stride of 0, where the elements' is known to be 1."""
    made = plan_of("softmax", Prologue(mask=True), (4, LONG), beside={"mask": (4, 1)})
    launch = panels.launch_of(made, 5)
    assert (
        len({*work.places(launch, 1, 2, 64)}) == 1
        and len({*work.places(launch, 0, 2, 64)}) == made.kernel.steps
    )
    assert isinstance(launch.mX[1], GlobalTensor) and isinstance(launch.mX[0].dtype, SimpleNamespace)


# -- Calls, with simulated launches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, (0, 2)])
def test_calls_over_any_dimension(dim, monkeypatch):
    """One launch each way, of the very tensors of the call but for a mask that lies apart."""
    launches = simulated.install(monkeypatch)
    r = torch.Generator().manual_seed(3)
    x, bias = torch.randn(6, 16, 24, generator=r), torch.randn(6, 1, 24, generator=r)
    mask = torch.rand(24, 16, generator=r).lt(0.7).mT
    factor = torch.rand(1, 1, 1, generator=r) + 0.5
    s = (x.double() * factor + bias).masked_fill(~mask, -math.inf)
    dims = (dim,) if isinstance(dim, int) else dim
    lse = torch.logsumexp(s, dims, keepdim=True)
    for function, exact in ((softmax, (s - lse).exp()), (log_softmax, s - lse)):
        leaf = x.clone().requires_grad_()
        y = function(leaf, dim, scale=factor, bias=bias, mask=mask)
        assert torch.allclose(y.double(), exact, atol=1e-5, equal_nan=True)
        y.masked_fill(~mask, 0.0).sum().backward()
        assert leaf.grad.isfinite().all() and (leaf.grad[:, ~mask] == 0).all()
    assert [work.math for work in launches] == [
        "softmax", "softmax_backward", "log_softmax", "log_softmax_backward",
    ]  # fmt: skip
    assert all(work.dtypes[0] == torch.float32 and work.prologue for work in launches)
    launches.clear()
    (dx,) = torch.autograd.grad(logsumexp(leaf, dim).sum(), leaf)
    assert torch.allclose(
        dx.double(), (x.double() - torch.logsumexp(x.double(), dims, True)).exp(), atol=1e-5
    )
    assert [work.math for work in launches] == ["logsumexp", "softmax"]
    assert launches[1].prologue == Prologue(alpha="groups")


# -- Compiled ----------------------------------------------------------------------------------------------------------


ROW = {"beside": {"mask": (1, LONG)}}
COMPILED = [
    ("softmax", Prologue(mask=True), (4, LONG), (1,), ROW),
    ("softmax", Prologue(mask=True), (4, LONG + 1), (1,), {"beside": {"mask": (1, LONG + 1)}}),
    ("softmax", Prologue(scale="number", mask=True), (300, LONG), (1,), ROW),
    ("softmax", Prologue(scale="groups", alpha="number", zero=True), (300, LONG), (1,), {}),
    ("log_softmax", Prologue(mask=True, bias=True), (4096, 8192), (0,), {"beside": {"mask": (4096, 1)}}),
    ("softmax", Prologue(mask=True, scale="groups"), (200, 8191), (0,), {"beside": {"mask": (200, 1)}}),
    ("logsumexp", Prologue(mask=True), (200000, 256), (0,), {"beside": {"mask": (1, 256)}, "dtype": "fp32"}),
    ("softmax_backward", Prologue(scale="groups", alpha="number"), (4, LONG), (1,), {}),
    (
        "log_softmax_backward",
        Prologue(scale="number", causal=True),
        (4, 512, 512),
        (2,),
        {"order": (0, 2, 1)},
    ),
]
COMPILED += [
    ("softmax", Prologue(sink=True), (4, LONG), (1,), {}),
    ("softmax", Prologue(sink=True), (4096, 4096), (0,), {}),
    ("log_softmax", Prologue(sink=True), (300, LONG), (1,), {}),
    ("log_softmax", Prologue(sink=True, mask=True), (200000, 256), (0,), {"beside": {"mask": (1, 256)}}),
    ("logsumexp", Prologue(sink=True), (200000, 256), (0,), {}),
    ("logsumexp", Prologue(sink=True, scale="groups"), (4, LONG + 1), (1,), {}),
    ("softmax_backward", Prologue(sink=True), (200, 8191), (0,), {}),
    ("log_softmax_backward", Prologue(sink=True, mask=True), (4, LONG + 1), (1,), {}),
]
STACK = 80  # bytes: as of plain ones, two CTAs an SM leave 64 registers, and a row ahead 128 for two


def test_classes(tmp_path, monkeypatch):
    """No more stack than plain panels have, and what lies beside the elements is copied as wide as it is planned."""
    plans = {
        plan_of(name, prologue, shape, dims, **how).kernel: how
        for name, prologue, shape, dims, how in COMPILED
    }
    plans |= {
        plan_of(*COMPILED[n][:4], arch=arch, **COMPILED[n][4]).kernel: {}
        for n, arch in ((0, "sm_80"), (4, "sm_100a"))
    }

    def compiled(c):
        made = compile_and_read(c, tmp_path, monkeypatch)
        check_compiled(c, made, max(may_use_stack(c), STACK), padding=16)
        got = accesses(made.ptx)
        for i in c.facts.beside:
            if c.access[i] == 0:
                loads = math.ceil(c.chunk_steps / c.alike)
                assert got[f"ld {ITEM_SIZE[c.dtypes[i]]}"] >= loads, (c.name, got)
                continue
            size = 4 if c.words(i) else c.access[i] * ITEM_SIZE[c.dtypes[i]]
            copies = c.words(i) or c.vector // c.access[i]
            how = "ld" if c.bits(i) else "cp.async"
            assert got[f"{how} {size}"] >= c.chunk_steps * copies, (c.name, got)

    check_all(plans, compiled)
