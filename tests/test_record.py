"""The record of kernels that a program used: what is written comes back, of every kind."""

import classes
import pytest
import test_matmul_backward_plan
import test_matmul_mma
from test_panel_compile import selection

from cute_softmax.plan.describe import plan_matmul_shape, plan_of
from cute_softmax.plan.hardware import H200
from cute_softmax.plan.mean import plan_share
from cute_softmax.plan.problem import Operand, contiguous
from cute_softmax.plan.rescale import plan_rescale
from cute_softmax.plan.shards import plan_merge, plan_slice
from cute_softmax.plan.topk import plan_topk
from cute_softmax.plan.topk_long import plan_topk_long
from cute_softmax.runtime import launch, record


def every_kind():
    yield from classes.launched("sm_90a")
    yield from selection("sm_90a", "softmax", 3)
    yield from (plan_of(100, columns).kernel for columns in (4, 57))
    yield plan_of(2200, 200_000, math="logsumexp").kernel
    yield plan_matmul_shape((4, 64, 128), 64, "bf16").kernel
    yield test_matmul_mma.planned("sm_80", (2,), 64, 128, 64).kernel
    yield from (one.kernel for one in test_matmul_backward_plan.planned((2,), 64, 128, 64).launches)
    yield plan_rescale((4, 40), (Operand("bf16", (40, 1)), Operand("fp32", ())), H200).kernel
    yield plan_share(40, -100, 0, H200)[0].kernel
    yield plan_merge("state", "fp32", ("chosen",), ("found", "lse"), (4, 2), H200).kernel
    x, how = Operand("bf16", (40, 1)), (("scaled",), ("lse",), "fp32", (1,), (0,) * 6)
    yield plan_slice("gradient", (4, 40), (x, x), *how, H200).kernel
    yield plan_topk(4, 64, 2, contiguous("bf16", (4, 64)), "bf16", H200).kernel
    yield plan_topk_long(4, 64, 2, contiguous("bf16", (4, 64)), H200, scaled=True).kernel


def test_what_is_written_comes_back(tmp_path, monkeypatch):
    path = tmp_path / "used"
    monkeypatch.setenv(record.ENVIRONMENT, str(path))
    wanted = list(dict.fromkeys(every_kind()))
    assert {type(c).__name__ for c in wanted} == set(record.kinds())
    for c in (*wanted, *wanted[:5]):
        record.note(c)
    found = record.read(path)
    assert found == wanted and [c.fields for c in found] == [c.fields for c in wanted]


def test_a_class_is_written_when_it_is_first_used(tmp_path, monkeypatch):
    path = tmp_path / "used"
    c = plan_matmul_shape((4, 64, 128), 64, "bf16").kernel
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(launch._store, "load", lambda name, fields, build: name)
    monkeypatch.delenv(record.ENVIRONMENT, raising=False)
    launch.function_of(c)
    assert not path.exists()
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setenv(record.ENVIRONMENT, str(path))
    for _ in range(2):
        launch.function_of(c)
    assert record.read(path) == [c] and len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    "line", ["no JSON", "[]", "{}", '{"kind": "RowClass"}', '{"kind": "Other", "math": "softmax"}']
)
def test_a_line_that_is_no_class_is_named(tmp_path, line):
    path = tmp_path / "used"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="used, line 1 is no Plan class"):
        record.read(path)
