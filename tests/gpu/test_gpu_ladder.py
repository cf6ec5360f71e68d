"""The rungs of the ladder on the device: numbers, ugly rows, odd lengths and places, nothing written beside them."""

import math

import pytest
import rungs
import torch
from building import build
from checking import DEVICE, DTYPES, Guarded, check_softmax, mutants, random

from cute_softmax import ladder
from cute_softmax.runtime.launch import device_facts

every_rung = pytest.mark.parametrize("rung", [step.number for step in ladder.RUNGS])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """All of them in all cores: one after the other they would take minutes."""
    if torch.cuda.is_available():
        architecture = device_facts(torch.cuda.current_device()).architecture.name
        found = rungs.forms(architecture) + rungs.long_forms(architecture)
        build(found, ladder.function_of)


def check(y, x, rung, dim=-1):
    check_softmax(y, x, dim, rungs.factor(rung, x.dtype, x.shape[-1]))


@every_rung
@dtypes
def test_every_length(rung, dtype):
    for columns in rungs.UGLY:
        for rows in (1, 5, 300):
            x = rungs.ugly(rows, columns, DTYPES[dtype])
            y = ladder.softmax(x, rung)
            assert y.dtype == x.dtype and y.shape == x.shape
            check(y, x, rung)


@pytest.mark.parametrize("form", rungs.long_forms("sm_90a"), ids=lambda form: f"{form.rung} {form.dtype}")
def test_a_vocabulary(form):
    x = rungs.ugly(8, rungs.LONG, DTYPES[form.dtype])
    check(ladder.softmax(x, form.rung), x, form.rung)


@dtypes
def test_the_naive_form_over_columns(dtype):
    for shape in ((1, 5), (33, 300), (1000, 129), (127, 1)):
        x = random(shape, DTYPES[dtype], seed=1)
        check(ladder.softmax(x, 0, dim=0), x, 0, 0)


@every_rung
@dtypes
@pytest.mark.parametrize("columns", [1, 33, 1000, 1023])
@pytest.mark.parametrize("offset", [0, 1])
def test_nothing_beside_the_result_is_written(rung, dtype, columns, offset):
    """Poisoned guards around input and output: read, they would make the result NaN."""
    x = Guarded.of(random((37, columns), DTYPES[dtype], seed=2), offset=offset)
    y = Guarded((37, columns), DTYPES[dtype], offset=offset)
    base = math.gcd(16, x.tensor.data_ptr(), y.tensor.data_ptr())
    architecture = device_facts(torch.cuda.current_device()).architecture.name
    form = ladder.form_of(rung, dtype, columns, architecture, base)
    ladder.function_of(form)(x.tensor, y.tensor)
    torch.cuda.synchronize()
    x.check(written=False)
    y.check()
    check(y.tensor, x.tensor, rung)


@every_rung
@dtypes
def test_mutants_fail(rung, dtype):
    x = random((40, 1000), DTYPES[dtype], seed=3)
    y = ladder.softmax(x, rung)
    check(y, x, rung)
    for name, wrong in mutants(y, x):
        with pytest.raises(AssertionError):
            check(wrong, x, rung)
            pytest.fail(f"{name} passes")


@every_rung
def test_empty(rung):
    for shape in ((0, 5), (5, 0)):
        assert ladder.softmax(torch.empty(shape, device=DEVICE), rung).shape == shape


def test_streams_and_graphs():
    x = random((64, 1000), torch.float32, seed=4)
    for step in ladder.RUNGS:
        expected = ladder.softmax(x, step.number)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            other = ladder.softmax(x, step.number)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ladder.softmax(x, step.number)
        captured.fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(expected, other) and torch.equal(expected, captured), step
