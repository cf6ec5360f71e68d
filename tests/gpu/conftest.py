"""GPU tests: marked `gpu`, and kernels are built in parallel. Without a CUDA device they are collected, and one that
says why and how many there are is skipped for all of them.

CUTE_SOFTMAX_TEST_PART=i/n takes every n-th test from the i-th on, so that n processes share a GPU.
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
SHARED = "PYTEST_XDIST_WORKER" in os.environ or "CUTE_SOFTMAX_TEST_PART" in os.environ
# Why GPU tests cannot run; None where they can.
MISSING = None if torch.cuda.is_available() else "no CUDA device: torch.cuda.is_available() is False"


def pytest_collection_modifyitems(items):
    part, parts = map(int, os.environ.get("CUTE_SOFTMAX_TEST_PART", "0/1").split("/"))
    items[:] = [item for i, item in enumerate(items) if i % parts == part or HERE not in item.path.parents]
    ours = [item for item in items if HERE in item.path.parents]
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if SHARED and item.get_closest_marker("timed"):
            item.add_marker(pytest.mark.skip(reason="other tests use the GPU: pytest -m timed tests/gpu"))
    if MISSING and ours:
        ours[0].add_marker(pytest.mark.skip(reason=f"{len(ours)} GPU tests: {MISSING}"))
        others = {*ours[1:]}
        items[:] = [item for item in items if item not in others]


def architecture() -> str:
    """The compilation target of the device."""
    return launch.device_facts(torch.cuda.current_device()).architecture.name


@pytest.fixture(scope="session", autouse=True)
def built():
    """The classes that these tests use, built ahead: one after another they would take several minutes."""
    if MISSING or os.environ.get("CUTE_SOFTMAX_TEST_BUILD") == "0":
        return
    build(classes.launched(architecture()))


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
def clean(alone):
    """A failed launch must fail its own test, not the next; and what one has freed is there for other processes'."""
    yield
    if not MISSING and checking.DEVICE == "cuda":
        torch.cuda.synchronize()
        if torch.cuda.memory_reserved() > MOST_KEPT:
            torch.cuda.empty_cache()
