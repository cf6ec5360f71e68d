"""softmax_matmul without a GPU: plans, compiled classes, checks of arguments, the composed form and its gradient."""

import math
import re
import subprocess
from collections import Counter
from importlib import metadata

import pytest
import torch
from compiled import compile_anew

from cute_softmax import softmax_matmul
from cute_softmax.dispatch.matmul.calls import operator
from cute_softmax.kernels.matmul.tiles import Call, Tiles, grid_of
from cute_softmax.plan.hardware import ARCHITECTURES, H200
from cute_softmax.plan.maths import NotPlanned
from cute_softmax.plan.matmul import MatmulPlan, access_of, aligned, canonical_matmul, plan_matmul
from cute_softmax.plan.matmul_class import TILE_N
from cute_softmax.plan.problem import Operand
from cute_softmax.runtime.resources import cuobjdump


def operand(shape, dtype="bf16", broadcast=()) -> Operand:
    """A contiguous tensor; batch dimensions in `broadcast` have stride 0."""
    strides = torch.empty(shape, device="meta").stride()
    return Operand(dtype, tuple(0 if d in broadcast else s for d, s in enumerate(strides)))


def planned(
    batch,
    rows,
    columns,
    depth,
    dtype="bf16",
    scores=None,
    mask=False,
    bias="",
    sink="",
    shared=(),
    device=H200,
    instruction="wgmma",
    **options,
):
    """The plan of contiguous tensors; shared: batch dimensions in which there is one V."""
    shape = (*batch, rows, columns)
    problem = canonical_matmul(
        shape,
        depth,
        operand(shape, scores or dtype),
        operand((*batch, columns, depth), dtype, shared),
        dtype,
        operand(shape, "bool") if mask else None,
        operand(shape, bias) if bias else None,
        operand(shape, sink)._replace(strides=(1, *[0] * (len(shape) - 1))) if sink else None,
        tma=instruction == "wgmma",
    )
    return plan_matmul(problem, device, instruction=instruction, **options)


def covers(made: MatmulPlan):
    """Tiles and parts have all rows, columns and steps, and no part is empty."""
    c = made.kernel
    assert c.rows * math.ceil(made.rows / c.rows) >= made.rows
    assert c.depth % 64 == 0 and c.depth * math.ceil(made.depth / c.depth) >= made.depth
    steps = math.ceil(made.columns / TILE_N)
    assert (made.parts - 1) * made.part_steps < steps <= made.parts * made.part_steps


PLANS = [
    ((32,), 4096, 4096, 128, {}),
    ((32,), 4096, 4096, 64, {"dtype": "fp16"}),
    ((8,), 8192, 8192, 128, {"lse": True}),
    ((1,), 16384, 16384, 128, {}),
    ((64,), 2048, 2048, 128, {"causal": 0, "scale": 0.5, "zero": True}),
    ((32,), 1, 131072, 128, {"lse": True}),
    ((32,), 16, 131072, 256, {}),
    ((2,), 100, 1000, 512, {"mask": True}),
    ((2,), 500, 1000, 65, {"bias": "fp32", "mask": True}),
    ((2,), 500, 1000, 64, {"scores": "fp32", "scale": 2.0}),
    ((2,), 3, 1000, 64, {"scores": "fp32", "bias": "bf16"}),
    ((2,), 4097, 4095, 128, {}),
    ((2,), 3, 4095, 128, {"lse": True}),
    ((32,), 4096, 4096, 128, {"lse": True, "sink": "bf16", "causal": 0, "scale": 0.5}),
    ((1,), 2048, 16384, 128, {"lse": True, "sink": "fp32"}),
    ((8,), 16, 131072, 128, {"lse": True, "sink": "fp16", "dtype": "fp16", "zero": True}),
    ((2,), 500, 1000, 65, {"sink": "fp32", "bias": "fp32", "mask": True, "lse": True}),
]


@pytest.mark.parametrize(("batch", "rows", "columns", "depth", "options"), PLANS)
def test_tiles_cover_the_problem(batch, rows, columns, depth, options):
    made = planned(batch, rows, columns, depth, **options)
    c = made.kernel
    covers(made)
    assert made.parts == c.cluster if c.cluster > 1 else c.split == (made.parts > 1)
    works = made.tiles * made.parts
    assert made.ctas == (works if c.cluster > 1 else min(works, H200.multiprocessors))
    if c.paired:
        assert made.parts == 2 and not c.alternate and not c.split
        # Of every two blocks a CTA leaves one, in the stages of scores.
        assert c.warpgroups * c.blocks // 2 * c.left_bytes <= c.score_stages * c.score_stage_bytes
    elif c.alternate:
        stages = c.score_stages * c.score_stage_bytes + c.value_stages * c.value_stage_bytes
        assert c.shares * c.left_bytes <= (stages if c.cluster > 1 else c.kept_bytes)
        # Each of those who add up takes as many pieces of eight columns, or none.
        assert c.pieces * c.cluster * 8 == c.depth and c.pieces % c.taken == 0
    assert c.shared_memory + 2048 <= ARCHITECTURES["sm_90a"].shared_memory
    assert c.score_stages % c.shares == 0 and c.value_stages % c.shares == 0
    registers = c.threads - 128, c.consumer_registers, c.producer_registers
    assert registers[0] * registers[1] + 128 * registers[2] <= 65536 // c.threads // 8 * 8 * c.threads


@pytest.mark.parametrize(("batch", "rows", "columns", "depth", "options"), PLANS)
def test_every_step_is_taken_once(batch, rows, columns, depth, options):
    """By the CTAs of the grid, by their own arithmetic; causal tiles end where the diagonal does."""
    made = planned(batch, rows, columns, depth, **options)
    c, taken = made.kernel, Counter()
    shape = made.rows, made.columns, made.depth
    grid = grid_of(c, shape, made.batch, made.parts)
    given = made.parts, made.part_steps, (), (), made.scale, made.offset, (), (), ()
    call = Call(*shape, grid, *given, 0, None, None, None)
    works = made.tiles * made.parts
    for cta in range(made.ctas):
        tiles = Tiles(c, call, cta, made.ctas)
        for turn in range(math.ceil(works / made.ctas)):
            work = tiles.work(turn)
            if work.exists:
                end = (
                    min(made.columns, (work.row_tile + 1) * c.rows + made.offset)
                    if c.causal
                    else made.columns
                )
                steps = math.ceil(end / TILE_N) - work.first
                assert work.steps == math.ceil(min(steps, made.part_steps) / c.shares)
                taken[work.batch, work.row_tile, work.depth_tile, work.part] += 1
    assert len(taken) == works and set(taken.values()) == {1}


@pytest.mark.parametrize(("batch", "rows", "columns", "depth", "options"), PLANS)
def test_code(batch, rows, columns, depth, options, tmp_path, monkeypatch):
    """No spills; and products run beside exponentials: ptxas makes every wgmma wait for itself where it does not see
    that nothing touches its registers."""
    made = planned(batch, rows, columns, depth, **options)
    compile_anew(made.kernel, tmp_path, monkeypatch)

    def read(*tool: str) -> str:
        command = [*tool, tmp_path / "kernel.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout + done.stderr

    assert re.findall(r"STACK:(\d+)", read(cuobjdump(), "-res-usage")) == ["0"] * (1 + made.kernel.split)
    code = read(nvdisasm())
    # In the loop and after it, once for each block.
    assert len(re.findall(r"WARPGROUP\.DEPBAR", code)) == 2 * made.kernel.blocks
    assert len(re.findall(r"HGMMA", code)) == 8 * made.kernel.blocks
    assert f"{rows} x {columns}" in made.explain()


def nvdisasm() -> str:
    files = metadata.files("nvidia-cuda-nvdisasm") or ()
    return str(next(file.locate() for file in files if file.name == "nvdisasm"))


def test_large_plans():
    """What the sizes of the targets get."""
    assert planned((32,), 4096, 4096, 128).kernel.rows == 256
    assert planned((32,), 1, 131072, 128).parts > 1
    assert planned((1,), 1, 131072, 128).ctas > 100


def test_batches_merge_in_order():
    shape = (2, 3, 5, 64, 128)
    problem = canonical_matmul(shape, 64, operand(shape), operand((2, 3, 5, 128, 64)), "bf16")
    assert problem.batch == (30,)
    shared = operand((2, 3, 5, 128, 64), broadcast=(1,))
    assert canonical_matmul(shape, 64, operand(shape), shared, "bf16").batch == (2, 3, 5)
    with pytest.raises(NotPlanned, match="batch dimensions"):
        shape = (2, 3, 5, 7, 64, 128)
        problem = canonical_matmul(
            shape, 64, operand(shape), operand((2, 3, 5, 7, 128, 64), broadcast=(0, 2)), "bf16"
        )
        plan_matmul(problem, H200)


@pytest.mark.parametrize(
    ("dtype", "strides", "address", "shape", "tma", "bytes_"),
    [
        ("bf16", (128, 1), 0, (64, 128), True, 16),
        ("bf16", (128, 1), 8, (64, 128), False, 4),
        ("bf16", (128, 1), 2, (64, 128), False, 2),
        ("bf16", (130, 1), 0, (64, 130), False, 4),
        ("bf16", (129, 1), 0, (64, 129), False, 2),
        ("bf16", (129, 1), 0, (1, 129), True, 16),
        ("bf16", (1, 64), 0, (64, 128), False, 2),
        ("bf16", (0, 1), 0, (64, 128), False, 16),
        ("bf16", (0, 128, 1), 0, (3, 64, 128), True, 16),
        ("bf16", (0, 129, 1), 0, (3, 1, 129), True, 16),
        ("fp32", (132, 1), 0, (64, 128), True, 16),
        ("fp32", (130, 1), 0, (64, 130), False, 4),
        ("fp32", (129, 1), 0, (64, 129), False, 4),
    ],
)
def test_alignment(dtype, strides, address, shape, tma, bytes_):
    """What TMA reads as it lies, and by which accesses all else is."""
    given = Operand(dtype, strides, address), shape
    assert aligned(*given) == tma and access_of(*given) == bytes_


def test_the_key_tells_classes_apart():
    plans = [planned(b, r, c, d, **o) for b, r, c, d, o in PLANS]
    names = {(p.kernel.name, p.kernel.dtypes) for p in plans}
    assert len(names) == len({p.kernel for p in plans})
    assert all(isinstance(p, MatmulPlan) for p in plans)


def halves(*shape):
    return torch.zeros(shape, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("error", "match", "arguments", "options"),
    [
        (TypeError, "scores must be", ([1.0], halves(3, 4)), {}),
        (TypeError, "values has dtype", (halves(2, 3), torch.zeros(3, 4, dtype=torch.int32)), {}),
        (TypeError, "scores are", (halves(2, 3), torch.zeros(3, 4)), {}),
        (ValueError, "3 columns", (halves(2, 3), halves(4, 4)), {}),
        (ValueError, "two dimensions", (halves(3), halves(3, 4)), {}),
        (ValueError, "do not broadcast", (halves(2, 2, 3), halves(3, 3, 4)), {}),
        (TypeError, "mask is", (halves(2, 3), halves(3, 4)), {"mask": halves(2, 3)}),
        (ValueError, "mask", (halves(2, 3), halves(3, 4)), {"mask": torch.ones(5, 3, dtype=torch.bool)}),
        (ValueError, "bias", (halves(2, 3), halves(3, 4)), {"bias": halves(4, 2, 3)}),
        (TypeError, "scale", (halves(2, 3), halves(3, 4)), {"scale": "2"}),
        (TypeError, "causal", (halves(2, 3), halves(3, 4)), {"causal": 0.5}),
        (TypeError, "scale must be a number, not bool", (halves(2, 3), halves(3, 4)), {"scale": True}),
        (ValueError, "empty_rows", (halves(2, 3), halves(3, 4)), {"empty_rows": "no"}),
    ],
)
def test_errors(error, match, arguments, options):
    with pytest.raises(error, match=match):
        softmax_matmul(*arguments, **options)


def test_composed():
    """CPU tensors: the same meaning in two steps."""
    s, v = torch.randn(2, 5, 7), torch.randn(7, 3)
    mask = torch.ones(5, 7, dtype=torch.bool)
    mask[2] = False
    out, lse = softmax_matmul(s, v, scale=0.5, mask=mask, empty_rows="zero", return_lse=True)
    x = (s * 0.5).masked_fill(~mask, -math.inf)
    assert (out[:, 2] == 0).all() and lse[:, 2].isneginf().all()
    right = torch.softmax(x, -1) @ v
    torch.testing.assert_close(out[:, :2], right[:, :2])
    assert softmax_matmul(s, v, mask=mask)[:, 2].isnan().all()
    for causal, offset in ((True, 0), (1, 1)):
        below = torch.ones(5, 7).tril(offset) > 0
        torch.testing.assert_close(
            softmax_matmul(s, v, causal=causal),
            torch.softmax(s.masked_fill(~below, -math.inf), -1) @ v,
        )


def test_gradient_of_the_operator():
    def random(*shape):
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    s, v, bias = random(2, 5, 7), random(7, 3), random(5, 1)
    mask = torch.rand(2, 1, 7) > 0.3
    mask[..., 0] = True
    assert torch.autograd.gradcheck(lambda s, v: operator(s, v, None, None, 0.7, 1, False), (s, v))
    assert torch.autograd.gradcheck(lambda s, v, b: operator(s, v, mask, b, 0.7, None, True), (s, v, bias))
