"""Figures and checks of softmax_matmul, and that they show what its kernels have: each class is traced on the CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from drawings import MATMULS, made, run

from cute_softmax import draw
from cute_softmax.draw import checks
from cute_softmax.plan import NotPlanned, describe
from cute_softmax.plan import matmul_layouts as named
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.matmul_backward import matmul_backward_class
from cute_softmax.plan.matmul_class import MatmulClass
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import ComposedLayout, Layout, Swizzle
from layouts.trace import MmaValue, differences, observing

FRAGMENTS = {"registers", "fragments", "first_product", "second_product", "pairs", "exchange"}


@pytest.fixture(scope="module", params=MATMULS)
def case(request):
    """A plan and its figures."""
    p = made(request.param)
    return p, draw.figures(p)


def tile_of(p, name: str) -> tuple[Layout, int]:
    """The thread-value layout that a figure draws in its last grid, and the rows of its tile."""
    c = p.kernel
    if isinstance(c, MatmulClass):
        tv = {"fragments": named.fragment(c.depth), "exchange": named.stored()}.get(name, named.fragment(64))
        return tv, 64
    tv = named.fragment(c.share_depth if name == "second_product" else c.rows)
    return tv, 64


def test_cells_of_fragments_are_those_of_the_layouts(case):
    p, found = case
    for name in FRAGMENTS & set(found):
        if name == "fragments" and p.kernel.movement == "matmul" and p.kernel.instruction == "mma":
            continue  # drawn from what cute has alone
        tv, rows = tile_of(p, name)
        space = {"fragments": "O", "first_product": "dPᵀ", "second_product": "dV", "exchange": "destination"}
        seen = 0
        for cell in found[name].cells:
            f = cell.facts
            if (name == "exchange" and f.start is None) or not f.threads or not f.coordinate:
                continue
            if name in space and name != "exchange" and f.space != space[name]:
                continue
            (thread,) = f.threads
            value = int(re.match(r"\d+", f.value)[0])
            row, column = map(int, re.match(r"\((\d+), (\d+)", f.coordinate).groups())
            assert tv(thread, value) == row + column * rows, (name, f)
            seen += 1
        assert seen, name


def test_addresses_of_figures_are_those_of_the_tiles(case):
    """Cells of shared memory against the layouts, by the byte that they name."""
    p, found = case
    c = p.kernel
    for name in {"scores", "values", "grad"} & set(found):
        item, turned = ITEM_SIZE[c.dtypes[0 if name == "scores" else 1]], name == "values"
        if name == "scores":
            tile = named.by_rows(item, c.rows, 64 if isinstance(c, MatmulClass) else c.columns, 1)
        else:
            tile = (
                named.by_columns(item, c.depth, 64, 1) if turned else named.by_rows(item, c.rows, c.depth, 1)
            )
        memory = named.first_stage(tile)
        cells = [f for f in (x.facts for x in found[name].cells) if f.start is not None]
        swizzled = cells[len(cells) // 2 :]
        assert len(swizzled) == 16 * 8
        for f in swizzled:
            at = tuple(map(int, re.findall(r"\d+", f.coordinate)))
            assert f.byte == memory(at[::-1] if turned else at) * item


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


def test_what_is_not_planned():
    ampere = replace(H200, architecture=ARCHITECTURES["sm_80"])
    assert describe.plan_matmul_shape((64, 64), 64, device=ampere).kernel.instruction == "mma"
    with pytest.raises(NotPlanned, match="sm_80"):
        describe.plan_matmul_shape((64, 64), 64, device=ampere, instruction="wgmma")
    with pytest.raises(NotPlanned, match="sm_90a"):
        describe.plan_matmul_shape((64, 64), 64, device=ampere, backward=True)
    with pytest.raises(ValueError, match="two dimensions"):
        describe.plan_matmul_shape((64,), 64)
    for shape, depth, words in (
        ((1 << 31, 64), 64, "2147483648 rows"),
        ((64, 1 << 31), 64, "2147483648 columns"),
        ((1 << 31, 64, 64), 64, "2147483648 batches"),
    ):
        for backward in (False, True):
            with pytest.raises(NotPlanned, match=f"{words}: at most"):
                describe.plan_matmul_shape(shape, depth, backward=backward)
    with pytest.raises(NotPlanned, match="2147483648 columns of V: at most"):
        describe.plan_matmul_shape((64, 64), 1 << 31)
    with pytest.raises(NotPlanned, match="4295032832 rows: at most"):  # those of all batches, line by line
        describe.plan_matmul_shape((1 << 16, (1 << 16) + 1, 65), 64)
    for dtype in ("bool", "int64"):
        with pytest.raises(TypeError, match=f"no kernels for dtype '{dtype}'"):
            describe.plan_matmul_shape((64, 64), 64, dtype)
    with pytest.raises(ValueError, match="elements: at most"):
        describe.plan_matmul_shape((1 << 31, 1 << 30), 64)


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
    from cute_softmax.runtime.compile import compile_class

    with observing() as seen:
        compile_class(c)
    found = {}
    for name, value in seen.items():
        if isinstance(value, ComposedLayout):
            found[name] = in_elements(value, ITEM_SIZE[c.dtypes[0 if name == "sS" else 1]])
        elif isinstance(value, Layout):
            found[name] = value
        else:
            assert isinstance(value, MmaValue)
            found |= {
                "mma": {"rA": value.a, "rO": value.c} | ({"rB": value.b} if len(seen) == 1 else {}),
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


def test_every_class_is_drawn_as_its_kernel_is():
    found = run(__file__, "sm_90a")
    assert found["wrong"] == [] and found["missed"] == []
    assert found["classes"] >= 12 and found["layouts"] >= 50 and found["others"] >= 100


if __name__ == "__main__":
    print(json.dumps(trace_all()))
