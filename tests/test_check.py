"""A kernel of each movement is compiled: for `make check`."""

import pytest

from cute_softmax.plan.describe import plan_matmul_shape, plan_shape
from cute_softmax.runtime.compile import compile_class

PLANS = {
    "row": plan_shape((4096, 1024)),
    "column": plan_shape((1024, 4096), dim=0),
    "split": plan_shape((4, 4_000_000)),
    "matmul": plan_matmul_shape((4, 512, 512), 64),
    "matmul_backward": plan_matmul_shape((4, 512, 512), 64, backward=True),
}


@pytest.mark.parametrize("movement", PLANS)
def test_compiles(movement, tmp_path, monkeypatch):
    kernel = PLANS[movement].kernel
    assert kernel.movement == movement
    monkeypatch.setenv("CUTE_DSL_ARCH", kernel.architecture)
    assert compile_class(kernel, f"--keep-cubin --dump-dir={tmp_path}").__cubin__
