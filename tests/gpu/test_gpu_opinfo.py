"""PyTorch's samples and error inputs on the device; see `tests/opinfo.py`."""

import opinfo
import pytest

ALLOWED = {
    "an empty tensor",
    "float64",
    "dtype float64",
    "errors are ATen's",
    "a second derivative",
    "not an operator that accelerate replaces",
}


@pytest.mark.parametrize("task", range(len(opinfo.tasks())))
def test_samples(task):
    """All pass, and ATen computes only what is said to go there."""
    verdicts = opinfo.judge("cuda", [opinfo.tasks()[task]])
    assert not any(v.failed for v in verdicts), opinfo.table(verdicts)
    for v in verdicts:
        assert {*v.handed_on} <= ALLOWED, v
        if not (v.route == "accelerate" and v.operator in opinfo.NOT_REPLACED):
            assert v.passed > v.handed_on.total(), v
