"""GPU tests: marked `gpu`, and kernels are built in parallel. Without a CUDA device they are collected, and one that
says why and how many there are is skipped for all of them.

``-n 16`` lets 16 processes share the GPUs, which they take in turn. CUTE_SOFTMAX_TEST_DONE=FILE leaves out the tests
that the file names and adds those that pass: a run that was cut goes on. Without a GPU, CUTE_SOFTMAX_TEST_EMULATED=1
runs those that can run in the interpreter of kernels, see `emulated_gpu`.
"""

import os
import tempfile
from contextlib import nullcontext
from pathlib import Path

import checking
import classes
import pytest
import torch
from building import build
from filelock import FileLock

from cute_softmax.runtime import launch

HERE = Path(__file__).parent
MOST_KEPT = 1 << 30  # bytes of the GPU's memory that a process keeps from test to test
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")  # gw0, gw1, ...
DONE = os.environ.get("CUTE_SOFTMAX_TEST_DONE")
EMULATED = os.environ.get("CUTE_SOFTMAX_TEST_EMULATED") == "1"
if EMULATED:
    import emulated
    import emulated_gpu

    emulated_gpu.pretend(pytest.MonkeyPatch())
unsettled: set[str] = set()  # tests that have failed or were skipped
# Why GPU tests cannot run; None where they can.
MISSING = None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items):
    done = set(Path(DONE).read_text().splitlines()) if DONE and Path(DONE).exists() else ()
    items[:] = [item for item in items if item.nodeid not in done]
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if WORKER and item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.skip(reason="other tests use the GPU: pytest -m timed tests/gpu"))
    if MISSING and ours:
        ours[0].add_marker(pytest.mark.skip(reason=f"{len(ours)} GPU tests: {MISSING}"))
        others = {*ours[1:]}
        items[:] = [item for item in items if item not in others]


def pytest_runtest_logreport(report):
    """Note a test that has passed. Of processes side by side the one that gives them work hears of all."""
    if DONE and not WORKER:
        if report.failed or report.skipped:
            unsettled.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in unsettled:
            with open(DONE, "a") as file:
                file.write(report.nodeid + "\n")


def architecture() -> str:
    """The compilation target of the device."""
    return launch.device_facts(torch.cuda.current_device()).architecture.name


@pytest.fixture(scope="session", autouse=True)
def built(tmp_path_factory):
    """The classes that these tests use, built ahead: one after another they would take several minutes."""
    if EMULATED:
        return emulated.install(pytest.MonkeyPatch(), tmp_path_factory.mktemp("emulated"))
    if MISSING or os.environ.get("CUTE_SOFTMAX_TEST_BUILD") == "0":
        return
    build(classes.launched(architecture()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with emulated_gpu.limited() if EMULATED else nullcontext():
        return (yield)


@pytest.fixture
def arch() -> str:
    return architecture()


@pytest.fixture(autouse=True)
def alone(request):
    """Of the tests that take most of the GPU's memory one runs at a time, of all processes."""
    large = not MISSING and request.node.get_closest_marker("large")
    with FileLock(Path(tempfile.gettempdir()) / "cute-softmax-large-tests.lock") if large else nullcontext():
        yield


@pytest.fixture(autouse=True)
def clean(alone, built):
    """A failed launch must fail its own test, not the next; and what one has freed is there for other processes'."""
    yield
    if EMULATED:
        built.clear()
    if not MISSING and checking.DEVICE == "cuda":
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()
