"""Compiled kernels of topk_softmax, read without a GPU: registers, stack, shared memory, accesses, layouts."""

from collections.abc import Iterator

import pytest
from classes import sample
from compiled import accesses, check_all, compile_and_read

from cute_softmax.draw import drawn
from cute_softmax.plan.hardware import ARCHITECTURES, Device
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.topk import TopkClass, plan_topk, plan_topk_backward
from cute_softmax.plan.topk_long import NO_ROOM, ROOMS, LongTopkClass, plan_topk_long
from layouts.trace import differences

MANY = 1 << 20  # rows
ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


def classes(
    architecture: str, columns: int, k: int, dtypes: tuple[str, str], stride: int | None = None, **options
) -> Iterator[TopkClass]:
    """Forward for few and for many rows, and backward."""
    device, (source, values) = Device(ARCHITECTURES[architecture], 132, 60 << 20), dtypes
    rows, few = Operand(source, (stride or columns, 1)), Operand(values, (k, 1))
    for count in (4, MANY):
        yield plan_topk(count, columns, k, rows, values, device, **options).kernel
    read = few if options.get("renormalize") else rows
    yield plan_topk_backward(4, columns, k, read, few, source, device, **options).kernel


def check(c: TopkClass, folder, monkeypatch):
    found = compile_and_read(c, folder, monkeypatch)
    assert found.stack == 0 and found.local == 0, f"{found.stack} bytes of stack"
    assert found.threads == (c.threads, 1, 1)
    assert found.registers <= 128, f"{found.registers} registers"
    assert found.shared == c.shared_memory, f"{found.shared} of {c.shared_memory}"
    assert not differences(drawn(c), found.layouts)
    assert found.layouts.keys() == drawn(c).keys()
    moved, width = accesses(found.ptx), c.vector * ITEM[c.dtypes[0] if c.forward else c.dtypes[-1]]
    if c.forward:
        # Of rough keys the elements that are chosen are read again, and in doubt the row.
        row = c.vectors * (1 + c.rough)
        assert sum(n for a, n in moved.items() if "ld" in a) == row + c.slots * c.rough
        assert moved[f"ld {width}"] == row + c.slots * (c.rough and width == 4)
        # A lane's results leave at once where they can.
        size = {"int32": 4, "int64": 8}[c.index] * c.slots
        assert moved[f"st {min(size, 16)}"] >= max(size // 16, 1)
        # The largest of a whole warp is taken by one instruction; lists are merged by shuffles.
        assert ("redux.sync" in found.ptx) == (c.takes or c.rough)
    else:
        assert (
            moved[f"st {width}"] == c.vectors and sum(n for a, n in moved.items() if "st" in a) == c.vectors
        )
        assert c.renormalize or moved[f"ld {width}"] >= c.vectors


@pytest.mark.long
@pytest.mark.parametrize("renormalize", [False, True], ids=["whole", "renormalized"])
@pytest.mark.parametrize("dtypes", [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "fp32")], ids="/".join)
def test_routers(dtypes, renormalize, tmp_path, monkeypatch):
    found = [
        c
        for columns, k in ((8, 2), (64, 8), (256, 8), (1024, 8))
        for c in classes("sm_90a", columns, k, dtypes, renormalize=renormalize)
    ]
    check_all(found, lambda c: check(c, tmp_path, monkeypatch))


@pytest.mark.parametrize("architecture", ["sm_80", "sm_100a", "sm_120a"])
def test_architectures(architecture, tmp_path, monkeypatch):
    found = [c for dtype in ("fp16", "fp32") for c in classes(architecture, 256, 8, (dtype, dtype))]
    check_all(found, lambda c: check(c, tmp_path, monkeypatch))


@pytest.mark.parametrize(
    ("columns", "k", "stride"),
    [(63, 6, None), (60, 2, None), (1000, 32, 1002), (1023, 40, None), (1, 1, None)],
)
def test_odd_rows_and_long_lists(columns, k, stride, tmp_path, monkeypatch):
    found = [
        c
        for dtype in ("bf16", "fp32")
        for c in classes("sm_90a", columns, k, (dtype, dtype), stride, index="int32")
    ]
    check_all(found, lambda c: check(c, tmp_path, monkeypatch))


def held(architecture: str) -> list[LongTopkClass]:
    """Classes of rows that clusters hold: of every room, plain and with all that there may be; the others' a few."""
    device, found = Device(ARCHITECTURES[architecture], 132, 60 << 20), []
    for rows, columns, k, dtype, options in (
        (32, 151936, 8, "bf16", {}),
        (1, 128257, 8, "fp32", {"index_stride": 1, "scaled": True}),
        (4, 50257, 20, "bf16", {"index_stride": 1, "scaled": True}),
        (130, 32768, 32, "fp16", {"scaled": True}),
        (8, 151936, 128, "bf16", {}),
        (1, 128257, 128, "fp32", {"index_stride": 1, "scaled": True}),
        (16, 65537, 0, "bf16", {"index_stride": 1, "scaled": True}),
    ):
        made = plan_topk_long(rows, columns, k, contiguous(dtype, (rows, columns)), device, **options)
        assert made.kernel.held or architecture != "sm_90a"
        found += [made.kernel] * bool(made.kernel.held)
    return found if architecture == "sm_90a" else sample(found, 2)


def check_long(c: LongTopkClass, folder, monkeypatch):
    found = compile_and_read(c, folder, monkeypatch)
    # What is printed of a wrong index takes 24; with all that there may be, what a row has one of is spilled: 16 bytes
    # on sm_90a, up to 96 on sm_120a. Of a row that is held 40 to 48 of 64 registers are elements.
    everything, spilled = c.edges and c.chosen and c.scaled, 96 if "120" in c.architecture else 56
    allowed = 24 * c.chosen + spilled * (everything and c.split)
    if c.held:
        # Elsewhere the compiler of machine code asks for more at once.
        allowed += 80 * everything if c.architecture == "sm_90a" else 296
    assert found.local == 0 and found.stack <= allowed, f"{found.stack} bytes of stack"
    assert found.threads == (c.threads, 1, 1) and found.min_blocks == c.min_blocks
    assert found.registers * c.threads * c.min_blocks <= ARCHITECTURES[c.architecture].registers
    assert found.shared == c.shared_memory, f"{found.shared} of {c.shared_memory}"
    named = {"tv": c.tv, "smem": c.smem, "reduction_buffer": c.reduction_buffer}
    named |= {"maxima": c.maxima} if c.held and c.most else {}
    assert not differences(named, found.layouts) and found.layouts.keys() == named.keys()
    moved, width = accesses(found.ptx), c.vector * ITEM[c.dtypes[0]]
    assert found.cluster == c.cluster_n
    # The first tile, and in the loop the next one; of rows that are held also all vectors at once.
    assert moved[f"{'cp.async' if width >= 4 else 'ld'} {width}"] >= 2 * c.steps or (c.held and not c.most)
    assert moved[f"ld {width}"] >= c.held


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
def test_long_rows(architecture, tmp_path, monkeypatch):
    plain, every = [(False, False, False, False), (True, False, True, False)], (True, True, True, True)
    kinds = [
        *zip(("bf16", "fp32", "bf16", "fp16", "fp16", "bf16", "fp32", "bf16"), (*ROOMS, NO_ROOM), strict=True)
    ]
    if architecture != "sm_90a":
        plain, kinds = [every], sample(kinds, 3, list(ARCHITECTURES).index(architecture))
    found = [
        LongTopkClass(
            architecture,
            (dtype, dtype if n % 2 else "fp32"),
            16 // ITEM[dtype],
            edges,
            room.k,
            room.threads,
            chosen,
            split,
            scaled,
        )
        for n, (dtype, room) in enumerate(kinds)
        for edges, chosen, split, scaled in {every, plain[n % len(plain)]}
        if room.k or chosen
    ]
    if architecture == "sm_90a":  # of batch-invariant calls
        found += [
            LongTopkClass(
                architecture, ("bf16", "fp32"), v, False, ROOMS[0].k, ROOMS[0].threads, True, False, False
            )
            for v in (1, 2, 4)
        ]
    if ARCHITECTURES[architecture].cluster_limit > 1:
        found += held(architecture)
    check_all(found, lambda c: check_long(c, tmp_path, monkeypatch))
