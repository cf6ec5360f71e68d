"""The checks of softmax_matmul's gradients fail for what broken kernels would give."""

import pytest
from gradients import Gradients, call

CALL = call((2,), 192, 256, 64, device="cpu", scale=0.5)


def test_torch_itself_passes():
    CALL.check(CALL.torch()[0])


@pytest.mark.parametrize("mutant", list(CALL.mutants()), ids=lambda m: m[0])
def test_mutants_fail(mutant):
    _, wrong = mutant
    with pytest.raises(AssertionError, match="is off by"):
        CALL.check(Gradients(*wrong[:2]))
