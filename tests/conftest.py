"""Settings of all tests. `checking` and `classes` are importable from every folder below this one."""

import contextlib
import functools
import gc
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

# The DSL reads its target when it is imported, whichever test comes first. Without a GPU it finds none by itself,
# and what it compiles then for sm_90a could not even be loaded.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")

# PTX goes through files that are named after a function and its arguments' types: workers that compile two kernels
# of one name at a time must not read each other's.
dumps = tempfile.TemporaryDirectory(prefix="cute_softmax_dumps_")
os.environ["CUTE_DSL_DUMP_DIR"] = dumps.name


def share_gpus(worker: int):
    """Let workers take the GPUs in turn: each sees all of them, its own one first. Before anything asks CUDA."""
    import torch

    every = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", every).split(",")
    first = worker % len(gpus)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])


if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    # Workers share the cores: more threads than these would wait for each other.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if Path("/dev/nvidiactl").exists():
        share_gpus(int(worker.removeprefix("gw")))

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    # The same examples in every run: a failure that only some runs see helps nobody.
    settings.register_profile(
        "fixed", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("fixed")


def pytest_collection_modifyitems(items):
    """What takes long begins first, so that no worker is left with it while the others have nothing to do."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish():
    """Modules and tests live as long as the run: the garbage collector need not look at them again and again; nor as
    often at what compilations make, most of which is gone by then: 4% of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests have room for their frames: some trace kernels, or run them, in loops of many calls."""
    from cute_softmax.runtime.frames import with_room

    pyfuncitem.obj = functools.partial(with_room, pyfuncitem.obj)


@pytest.fixture
def fake_device(monkeypatch):
    """The benchmarks' device on the CPU: see the file of that name."""
    import fake_device

    fake_device.install(monkeypatch)


@pytest.fixture
def launches(monkeypatch):
    """What is launched, without a GPU: see `simulated`."""
    import simulated

    return simulated.install(monkeypatch)


@pytest.fixture(params=["formula", "kernel"])
def launched(request):
    """`launches`, and once more None, where torch's operations compute on the CPU."""
    return request.getfixturevalue("launches") if request.param == "kernel" else None


def pytest_terminal_summary(terminalreporter):
    """How many tests were skipped, one line a reason."""
    skipped = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    reasons = Counter(r[2].removeprefix("Skipped: ") for r in skipped if isinstance(r, tuple))
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
