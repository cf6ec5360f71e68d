"""softmax_matmul without wgmma, without a GPU: plans and compiled classes of every architecture."""

import re

import pytest
import test_matmul
from compiled import accesses, compile_and_read
from test_matmul import PLANS, covers, operand

from cute_softmax.plan.hardware import ARCHITECTURES, H200, KIB, Device
from cute_softmax.plan.maths import NotPlanned
from cute_softmax.plan.matmul import canonical_matmul, plan_matmul
from cute_softmax.plan.matmul_class import TILE_N, matmul_classes

WITHOUT = [name for name in ARCHITECTURES if name != "sm_90a"]


def planned(architecture, *shape, **options):
    device = Device(ARCHITECTURES[architecture], 100, 40 << 20)
    return test_matmul.planned(*shape, device=device, instruction="mma", **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("batch", "rows", "columns", "depth", "options"), PLANS)
def test_tiles_cover_the_problem(architecture, batch, rows, columns, depth, options):
    made = planned(architecture, batch, rows, columns, depth, **options)
    c, target = made.kernel, ARCHITECTURES[architecture]
    assert c.instruction == "mma" and c.threads == 128 * c.warpgroups
    covers(made)
    assert c.stages >= 2
    assert c.resident * (c.shared_memory + KIB) <= target.shared_memory + KIB
    assert c.resident * c.threads * 256 <= target.registers
    assert c.split == (made.parts > 1)
    assert made.ctas == made.tiles * made.parts
    assert f"cp.async of {c.access[0]} and {c.access[1]} bytes" in made.explain()


def test_what_an_architecture_gets():
    """mma.sync is what there is besides sm_90a, and can be asked for there."""
    problem = canonical_matmul((64, 64), 64, operand((64, 64)), operand((64, 64)), "bf16")
    for name in WITHOUT:
        device = Device(ARCHITECTURES[name], 108, 40 << 20)
        assert plan_matmul(problem, device).kernel.instruction == "mma"
        with pytest.raises(NotPlanned, match="no wgmma"):
            plan_matmul(problem, device, instruction="wgmma")
    assert plan_matmul(problem, H200).kernel.instruction == "wgmma"
    made = plan_matmul(problem, H200, instruction="mma")
    assert made.kernel.instruction == "mma" and "mma.sync: timed on an H200 only" in made.explain()


def test_few_rows_fill_the_gpu():
    assert planned("sm_80", (1,), 1, 131072, 128).ctas > 100


FORMS = {
    "plain": ((32,), 4096, 4096, 128, {"lse": True}),
    "wide": ((2,), 500, 1000, 256, {"scores": "fp32", "scale": 2.0, "zero": True, "causal": 0}),
    "bias": ((2,), 500, 1000, 250, {"dtype": "fp16", "bias": "fp32", "mask": True}),
    "odd": ((2,), 4097, 4095, 255, {"mask": True}),
    "lines": ((2,), 4097, 4095, 128, {}),
    "few": ((2,), 3, 4095, 256, {"scale": 0.5, "causal": 1, "stats": True}),
    "stats": ((32,), 4096, 4096, 128, {"stats": True}),
    "sink": ((32,), 4096, 4096, 128, {"lse": True, "sink": "bf16", "causal": 0, "scale": 0.5}),
    "few with sinks": ((2,), 3, 4095, 256, {"lse": True, "sink": "fp32"}),
}
# Both forms without spills, and the whole range of what is loaded.
CASES = [(name, "plain") for name in ARCHITECTURES]
CASES += [(("sm_90a", "sm_80", "sm_120a")[i % 3], form) for i, form in enumerate(FORMS)]


@pytest.mark.parametrize(("architecture", "form"), dict.fromkeys(CASES))
def test_resources_and_instructions(architecture, form, tmp_path, monkeypatch):
    *shape, options = FORMS[form]
    c = planned(architecture, *shape, **options).kernel
    found = compile_and_read(c, tmp_path, monkeypatch)
    assert found.stack == found.local == 0
    assert c.shared_memory - KIB <= found.shared <= ARCHITECTURES[architecture].shared_memory
    # 16 terms an instruction, 8 columns; V's matrices are transposed on their way.
    products = re.findall(r"mma\.sync\.aligned\.m16n8k16", found.ptx)
    assert len(products) == c.blocks * TILE_N // 16 * c.depth // 8
    assert len(re.findall(r"ldmatrix\.sync\.aligned\.m8n8\.x4\.trans", found.ptx)) == TILE_N * c.depth // 256
    copies = {int(k.split()[1]) for k in accesses(found.ptx) if k.startswith("cp.async")}
    assert copies == {width for width in c.access if width >= 4}


@pytest.mark.parametrize(("depth", "causal"), [(128, None), (128, 0), (64, 0)])
def test_all_configurations_compile(depth, causal, tmp_path, monkeypatch):
    """Also those that a plan of these sizes would not take."""
    flags = {"instruction": "mma", "causal": causal is not None}
    classes = matmul_classes(ARCHITECTURES["sm_90a"], ("bf16",) * 3, 4096, depth, **flags)
    for i, c in enumerate(classes):
        folder = tmp_path / str(i)
        folder.mkdir()
        assert compile_and_read(c, folder, monkeypatch).stack == 0
