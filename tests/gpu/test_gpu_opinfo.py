"""PyTorch's samples and error inputs on the device; see `tests/opinfo.py`."""

import opinfo
import pytest


@pytest.fixture(scope="module")
def verdicts():
    return opinfo.judge("cuda")


def test_all_pass(verdicts):
    assert not any(v.failed for v in verdicts), opinfo.table([v for v in verdicts if v.failed])


def test_our_kernels_did_the_work(verdicts):
    """ATen computed only what is said to go there."""
    reasons = {why for v in verdicts for why in v.handed_on}
    allowed = {"an empty tensor", "float64", "dtype float64", "errors are ATen's", "a second derivative"}
    assert reasons <= allowed | {"not an operator that accelerate replaces"}, reasons
    for v in verdicts:
        if not (v.route == "accelerate" and v.operator in opinfo.NOT_REPLACED):
            assert v.passed > v.handed_on.total(), v
