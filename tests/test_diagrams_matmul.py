"""Figures and checks of softmax_matmul, and that they show what its kernels have: each class is traced on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from drawings import MATMULS, made, run
from traced import trace_to_the_end

from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.plan import NotPlanned, describe
from cute_softmax.plan import matmul_layouts as named
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.matmul_backward import matmul_backward_class
from cute_softmax.plan.matmul_class import MatmulClass
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import ComposedLayout, Layout, Swizzle
from layouts.trace import MmaValue, differences


@pytest.fixture(scope="module", params=MATMULS)
def case(request):
    """A plan and its figures."""
    p = made(request.param)
    return p, draw.figures(p)


def fragments_of(c) -> dict[str, tuple[str, Layout]]:
    """Figure -> (space of the cells that show a fragment, its thread-value layout over 64 rows)."""
    if c.movement == "matmul_backward":
        accumulators = named.fragment(c.rows)
        sums = named.fragment(c.share_depth)
        return {
            "registers": ("", accumulators),
            "first_product": ("dPᵀ", accumulators),
            "second_product": ("dV", sums),
        }
    scores = named.fragment(64)
    found = {"registers": ("", scores), "pairs": ("sS", scores), "exchange": ("stored by", named.stored())}
    if c.instruction == "wgmma":  # else drawn from what cute has alone
        found["fragments"] = ("O", named.fragment(c.depth))
    return found


def test_cells_of_fragments_are_those_of_the_layouts(case):
    p, found = case
    for name, (space, tv) in fragments_of(p.kernel).items():
        if name not in found:
            continue
        facts = [x.facts for x in found[name].cells if x.facts.threads and x.facts.space == space]
        assert facts, name
        for f in facts:
            (thread,) = f.threads
            value = int(re.match(r"\d+", f.value)[0])
            row, column = map(int, re.match(r"\((\d+), (\d+)", f.coordinate).groups())
            assert tv(thread, value) == row + column * 64, (name, f)


def test_addresses_of_figures_are_those_of_the_tiles(case):
    """Cells of shared memory against the layouts, by the byte that they name."""
    p, found = case
    c = p.kernel
    scores, values = (ITEM_SIZE[d] for d in c.dtypes[:2])
    tiles = {
        "scores": (scores, named.by_rows(scores, c.rows, 64, 1)),
        "values": (values, named.by_columns(values, c.depth, 64, 1)),
        "grad": (values, named.by_rows(values, c.rows, c.depth, 1)),
    }
    for name in tiles.keys() & found.keys():
        item, tile = tiles[name]
        memory = named.first_stage(tile)
        cells = [f for f in (x.facts for x in found[name].cells) if f.start is not None]
        swizzled = cells[len(cells) // 2 :]
        assert len(swizzled) == 16 * 8
        for f in swizzled:
            at = tuple(map(int, re.findall(r"\d+", f.coordinate)))
            assert f.byte == memory(at[::-1] if name == "values" else at) * item


def test_the_swizzle_removes_every_conflict():
    lines = checks.check(made("usual")).shared
    assert "sS, read by ldmatrix: 16 bytes a lane, 4 wavefronts a request, 0 bank conflicts." in lines
    assert "sS without its swizzle: 16 bytes a lane, 32 wavefronts a request, 448 bank conflicts." in lines
    assert (
        "sV, read by the tensor cores: 16 bytes a row of 8, 1 wavefront a request, 0 bank conflicts." in lines
    )
    backward = checks.check(made("backward")).shared
    assert len(backward) == 2 and all(line.endswith("0 bank conflicts.") for line in backward)


def test_a_wrong_plan_is_found(monkeypatch):
    p = made("usual")
    c = p.kernel

    def problems(plan) -> str:
        return " ".join(checks.check(plan).problems)

    assert "do not fill the tile" in problems(replace(p, matmul_class=Narrow(**c.fields)))
    assert "parts" in problems(replace(p, part_steps=7))
    assert "cannot step" in problems(replace(p, operand_strides=((4097, 0, 0, 0), *p.operand_strides[1:])))
    assert "room for" in problems(replace(p, matmul_class=replace(c, score_stages=8)))
    back = made("backward")
    assert "do not share" in problems(
        replace(back, kernel=replace(back.kernel, shares=3, consumers=3, depth=128))
    )
    with monkeypatch.context() as patch:
        patch.setattr(named, "swizzle", lambda item: Swizzle(2, 3, 3))
        assert "bank conflicts" in " ".join(s for s in checks.check(p).shared if " 0 bank" not in s)
    for plan, source in ((p, SWAPPED), (back, SWAPPED_TRANSPOSED)):
        with monkeypatch.context() as patch:
            patch.setattr(named, "matrices", lambda columns, transposed=False, source=source: source)
            assert "wanted is" in problems(plan)
    with monkeypatch.context() as patch:
        patch.setattr(named, "value_matrices", lambda: Layout(((8, 2, 2), 8), ((16, 8, 128), 1)))
        assert "V: ldmatrix" in problems(made("mma"))


# `matrices` with the second and the third matrix exchanged.
SWAPPED = Layout(((8, 2, 2, 4), (8, 4)), ((1, 512, 8, 16), (64, 1024)))
SWAPPED_TRANSPOSED = Layout(((8, 2, 2, 4), (8, 4)), ((64, 512, 8, 16), (1, 1024)))


class Narrow(MatmulClass):
    """A class whose tile has a block more than its warpgroups take."""

    @property
    def rows(self) -> int:
        return super().rows + 64


def test_kernels_give_ldmatrix_the_addresses_that_are_drawn():
    """Their own arithmetic, on numbers instead of registers."""
    from cute_softmax.kernels.common import tensor_cores

    tile = named.first_stage(named.by_rows(2, 64, 64, 1))
    for transposed, function in (
        (False, tensor_cores.row_of_matrix),
        (True, tensor_cores.row_of_transposed),
    ):
        source = named.matrices(64, transposed=transposed)
        for thread in range(128):
            row, piece = function(thread % 32, thread // 32)
            for k in range(4):
                m, n = source(thread, 8 * k) % 64, source(thread, 8 * k) // 64
                if transposed:
                    assert (row + 16 * k) * 128 + piece * 16 == 2 * tile((n, m))
                else:
                    assert (row * 128 + piece * 16) ^ (32 * k) == 2 * tile((m, n))


def test_operands_without_wgmma_are_two_instructions():
    """`values_fragment` is the B operand of the hardware twice, `fragment` its A and C in four warps."""
    for thread in range(32):
        for value in range(8):
            half, inside = divmod(value, 4)
            operand = named.VALUES_OPERAND(thread, inside)
            assert named.values_fragment()(thread, value) == operand % 8 + 8 * half + operand // 8 * 16


def test_accumulators_are_operands_as_they_are():
    """The re-layout between both products of the backward is the identity."""
    rows, k = 64, named.INSTRUCTION_K
    accumulators, operand = named.fragment(rows), named.fragment(k)
    for thread in range(128):
        for value in range(rows // 2):
            block, inside = divmod(value, 8)
            assert accumulators(thread, value) == operand(thread, inside) + block * k * 64


AMPERE = {"device": replace(H200, architecture=ARCHITECTURES["sm_80"])}
BACKWARD = {"backward": True}


@pytest.mark.parametrize(
    ("shape", "depth", "options", "error", "words"),
    [
        ((64, 64), 64, {**AMPERE, "instruction": "wgmma"}, NotPlanned, "sm_80"),
        ((64, 64), 64, {**AMPERE, **BACKWARD}, NotPlanned, "sm_90a"),
        ((64,), 64, {}, ValueError, "two dimensions"),
        ((1 << 31, 64), 64, {}, NotPlanned, "2147483648 rows: at most"),
        ((1 << 31, 64), 64, BACKWARD, NotPlanned, "2147483648 rows: at most"),
        ((64, 1 << 31), 64, {}, NotPlanned, "2147483648 columns: at most"),
        ((64, 1 << 31), 64, BACKWARD, NotPlanned, "2147483648 columns: at most"),
        ((1 << 31, 64, 64), 64, {}, NotPlanned, "2147483648 batches: at most"),
        ((1 << 31, 64, 64), 64, BACKWARD, NotPlanned, "2147483648 batches: at most"),
        ((64, 64), 1 << 31, {}, NotPlanned, "2147483648 columns of V: at most"),
        # The rows of all batches, line by line.
        ((1 << 16, (1 << 16) + 1, 65), 64, {}, NotPlanned, "4295032832 rows: at most"),
        ((64, 64), 64, {"dtype": "bool"}, TypeError, "no kernels for dtype 'bool'"),
        ((64, 64), 64, {"dtype": "int64"}, TypeError, "no kernels for dtype 'int64'"),
        ((1 << 31, 1 << 30), 64, {}, ValueError, "elements: at most"),
    ],
)
def test_what_is_not_planned(shape, depth, options, error, words):
    with pytest.raises(error, match=words):
        describe.plan_matmul_shape(shape, depth, **options)


# What follows is run by itself, see `test_every_class_is_drawn_as_its_kernel_is`.


def classes() -> list:
    """One class for each way in which layouts come about."""
    found = [made(name).kernel for name in MATMULS]
    halves = ("bf16", "bf16", "bf16")
    found += [
        matmul_backward_class(ARCHITECTURES["sm_90a"], halves, depth, lines=lines)
        for depth, lines in ((256, False), (320, True))
    ]
    return list(dict.fromkeys(found))


def trace(c) -> dict:
    """The layouts that the kernel of a class tells, under the names of `draw.drawn`, swizzles in elements."""
    found, told = {}, trace_to_the_end(c)
    for name, value in told.items():
        if isinstance(value, ComposedLayout):
            found[name] = in_elements(value, ITEM_SIZE[c.dtypes[0 if name == "sS" else 1]])
        elif isinstance(value, Layout):
            found[name] = value
        else:
            assert isinstance(value, MmaValue)
            found |= {
                "mma": {"rA": value.a, "rO": value.c} | ({"rB": value.b} if len(told) == 1 else {}),
                "mma_P": {"rP": value.c},
                "mma_V": {"rE": value.a, "rdV": value.c},
            }[name]
    return found


def in_elements(layout: ComposedLayout, item: int) -> ComposedLayout:
    """A tile of cute's, whose swizzle counts bytes."""
    assert layout.outer == Swizzle(3, 4, 3) and layout.offset == 0
    return ComposedLayout(Swizzle(3, 4 - (item.bit_length() - 1), 3), 0, layout.inner)


def others(layout):
    """Layouts that are slightly wrong."""
    from test_faithful import swapped

    if isinstance(layout, ComposedLayout):
        yield replace(layout, outer=Swizzle(2, layout.outer.base, 3))
        yield layout.inner
    else:
        yield from swapped(layout)


def copies() -> dict:
    """ldmatrix's and stmatrix's addresses and fragments, those of mma.sync, and wgmma's tiles, as cute has them."""
    import cutlass
    import cutlass.cute as cute
    from cutlass.cute.nvgpu import warp, warpgroup

    from cute_softmax.kernels.common import tensor_cores
    from layouts.trace import read

    found = {}

    def look():
        half = cutlass.BFloat16
        wide = tensor_cores.mma(half, 64, a_in_registers=True, a_by_rows=True, b_by_rows=False)
        plain = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=False, num_matrices=4), half)
        turned = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose=True, num_matrices=4), half)
        store = cute.make_copy_atom(warp.StMatrix8x8x16bOp(transpose=True, num_matrices=4), half)
        loaded = read(cute.make_tiled_copy_A(plain, wide))
        found["matrices"], found["A"] = loaded.source, loaded.destination
        found["transposed"] = read(cute.make_tiled_copy_C(turned, wide)).source
        found["stored back"] = read(cute.make_tiled_copy_C(store, wide)).destination
        small = read(cute.make_tiled_mma(warp.MmaF16BF16Op(half, cutlass.Float32, (16, 8, 16))))
        found["warp A"], found["warp B"], found["warp C"] = small.a, small.b, small.c
        kinds = warpgroup.SmemLayoutAtomKind
        for item, rows, columns, stages in TILES:
            dtype = {2: half, 4: cutlass.Float32}[item]
            for name, kind, shape, order in (
                ("by_rows", kinds.K_SW128, (rows, columns, stages), (0, 1, 2)),
                ("by_columns", kinds.MN_SW128, (columns, rows, stages), (1, 0, 2)),
            ):
                tile = cute.tile_to_shape(warpgroup.make_smem_layout_atom(kind, dtype), shape, order=order)
                found[f"{name} {item, *shape}"] = in_elements(read(tile), item)

    @cute.jit
    def host():
        look()

    cute.compile(host)
    return found


TILES = ((2, 256, 64, 5), (2, 64, 128, 3), (2, 32, 512, 4), (2, 8, 64, 1), (4, 128, 64, 2), (4, 64, 64, 1))
DRAWN_COPIES = {
    **{f"by_rows {i, r, c, s}": named.by_rows(i, r, c, s) for i, r, c, s in TILES},
    **{f"by_columns {i, c, r, s}": named.by_columns(i, c, r, s) for i, r, c, s in TILES},
    "matrices": named.matrices(16),
    "A": named.fragment(16),
    "transposed": named.matrices(64, transposed=True),
    "stored back": named.matrices(64, transposed=True),
    "warp A": named.fragment(16, 1),
    "warp B": named.VALUES_OPERAND,
    "warp C": named.fragment(8, 1),
}


def trace_all() -> dict:
    """The layouts compared, what is wrong with them, and the wrong ones that went unnoticed."""
    found = {"classes": 0, "layouts": 0, "others": 0, "wrong": [], "missed": []}
    pairs = [("copies", DRAWN_COPIES, copies())]
    pairs += [(f"{c.movement} {c.name}", draw.drawn(c), trace(c)) for c in classes()]
    for where, ours, theirs in pairs:
        found["wrong"] += [f"{where}: {line}" for line in differences(ours, theirs)]
        found["wrong"] += [f"{where}: {n}: no figure draws it" for n in theirs.keys() - ours.keys()]
        for name, layout in ours.items():
            for other in others(layout):
                if other.offsets() != layout.offsets():
                    found["others"] += 1
                    if not differences({name: other}, theirs):
                        found["missed"].append(f"{where}: {name} drawn as {other}")
        found["classes"] += 1
        found["layouts"] += len(ours)
    return found


@pytest.mark.long
def test_every_class_is_drawn_as_its_kernel_is():
    found = run(__file__, "sm_90a")
    assert found["wrong"] == [] and found["missed"] == []
    assert found["classes"] >= 12 and found["layouts"] >= 50 and found["others"] >= 100


if __name__ == "__main__":
    print(json.dumps(trace_all()))
