"""The judge itself on the CPU, where ATen computes all samples; and that it finds what is wrong."""

import pickle

import opinfo
import pytest
import simulated
import torch

import cute_softmax


@pytest.fixture(scope="module")
def verdicts():
    return opinfo.judge("cpu")


@pytest.mark.long
def test_all_samples_pass(verdicts):
    assert not any(v.failed for v in verdicts), opinfo.table([v for v in verdicts if v.failed])
    assert {v.operator.split()[0] for v in verdicts} == {*opinfo.FUNCTIONS}
    assert all(v.passed for v in verdicts)
    text = opinfo.table(verdicts)
    assert "softmax with_dtype" in text and "0 failed" in text.splitlines()[-1]


def test_torch_is_not_frozen():
    assert not torch.backends.flags_frozen()


class Pickling:
    """A pool of processes, as far as what goes to them and comes back is concerned."""

    def __init__(self, jobs, context):
        assert context.get_start_method() == "spawn"  # CUDA does not survive a fork

    __enter__, __exit__ = lambda self: self, lambda *_: None

    def map(self, function, *each):
        there = pickle.loads(pickle.dumps((function, [*zip(*each, strict=True)])))
        return pickle.loads(pickle.dumps([there[0](*given) for given in there[1]]))


def test_by_several_processes(verdicts, monkeypatch):
    few = opinfo.tasks()[:4]
    monkeypatch.setattr(opinfo, "tasks", lambda: few)
    monkeypatch.setattr(opinfo, "ProcessPoolExecutor", Pickling)
    assert opinfo.judge_by(2, "cpu") == verdicts[:8]


WRONG = {
    "scaled": lambda x, dim, dtype=None, out=None: cute_softmax.softmax(x, dim, dtype) * 1.02,
    "of another dim": lambda x, dim, dtype=None: cute_softmax.softmax(x, 0, dtype),
    "of another dtype": lambda x, dim, dtype=None: cute_softmax.softmax(x, dim, torch.float64),
    "flat": lambda x, dim, dtype=None: cute_softmax.softmax(x, dim, dtype).flatten(),
    "without a gradient": lambda x, dim, dtype=None: cute_softmax.softmax(x.detach(), dim, dtype),
    "in base 2": lambda x, dim, dtype=None: cute_softmax.softmax(x, dim, dtype, scale=0.6931),
    "in place": lambda x, dim, dtype=None: cute_softmax.softmax_(x.clone() if x.requires_grad else x, dim),
    "NaN": lambda x, dim, dtype=None: cute_softmax.softmax(x, dim, dtype).log().sqrt(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails(name, monkeypatch):
    monkeypatch.setattr(opinfo, "FUNCTIONS", {"softmax": WRONG[name]})
    monkeypatch.setattr(opinfo, "ROUTES", ("functions",))
    assert all(v.failed for v in opinfo.judge("cpu"))


def test_saved_results_are_readable():
    """What is committed says what judged, when, on what, and that nothing failed."""
    for path in opinfo.results.FOLDER.glob("*/checks/opinfo.json"):
        header, rows = opinfo.load(path)
        assert {*opinfo.results.HEADER_KEYS} <= {*header}
        command = header["command"].split()
        assert command[:2] == ["python", "tests/opinfo.py"] and "--save" in command
        assert not any(row.failed for row in rows)
        assert {(row.dtype, row.route) for row in rows} == {
            (str(d).removeprefix("torch."), route) for d in opinfo.DTYPES for route in opinfo.ROUTES
        }


@pytest.mark.long
def test_samples_by_simulated_kernels(monkeypatch):
    """The way of CUDA tensors through the functions, with launches that torch computes."""
    launched = simulated.install(monkeypatch)
    monkeypatch.setattr(opinfo, "ROUTES", ("functions",))
    verdicts = opinfo.judge("cpu")
    assert not any(v.failed for v in verdicts), opinfo.table([v for v in verdicts if v.failed])
    assert len({launch.math for launch in launched}) >= 7
