"""The store of compiled kernels between processes, and on GPUs."""

import time
from pathlib import Path

import pytest
from stored import FIELDS, compile_kernel, entry_of, run_python

from cute_softmax.runtime import cache
from cute_softmax.runtime.cache import Store

pytest_plugins = ("stored",)
FORKS = f"""
import os, signal, sys, time, warnings
import tvm_ffi, filelock
from cute_softmax.runtime.cache import Store
from stored import compile_kernel

warnings.simplefilter("error")
root, log = os.environ["STORE"], os.environ["LOG"]
def note(word):
    with open(log, "a") as file:
        file.write(word + "\\n")
def wait_for(word, seconds=120):
    end = time.monotonic() + seconds
    while word not in open(log).read():
        assert time.monotonic() < end, word
        time.sleep(0.01)
def build():
    note("build")
    return compile_kernel()
def hang():
    note("hang")
    time.sleep(1000)
def child(build):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            assert callable(Store(root).load("add_one", {FIELDS!r}, build))
            note("loaded")
            status = 0
        finally:
            os._exit(status)
    return process
"""


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "log"
    path.write_text("")
    return path


def test_many_processes_compile_once(store, log):
    script = FORKS + "children = [child(build) for _ in range(12)]\n"
    script += "assert [os.waitpid(c, 0)[1] for c in children] == [0] * 12\n"
    run_python(script, STORE=str(store.root), LOG=str(log))
    words = log.read_text().split()
    assert words.count("build") == 1
    assert words.count("loaded") == 12
    assert len(store.entries()) == 1


def test_a_killed_process_blocks_nobody(store, log):
    script = FORKS + (
        "victim = child(hang)\n"
        "wait_for('hang')\n"
        "others = [child(build) for _ in range(2)]\n"
        "time.sleep(0.3)\n"
        "assert 'build' not in open(log).read()  # they wait for the victim\n"
        "os.kill(victim, signal.SIGKILL)\n"
        "os.waitpid(victim, 0)\n"
        "assert [os.waitpid(c, 0)[1] for c in others] == [0, 0]\n"
    )
    start = time.monotonic()
    run_python(script, STORE=str(store.root), LOG=str(log))
    assert log.read_text().split().count("build") == 1
    assert time.monotonic() - start < cache.LOCK_TIMEOUT_S / 2


def test_a_holder_that_hangs_is_not_waited_for_forever(store, build, monkeypatch):
    import filelock

    store.load("add_one", FIELDS, build)
    entry = entry_of(store)
    entry.unlink()
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.2)
    with filelock.FileLock(entry.with_suffix(".lock")):
        process = run_python(
            f"""
from cute_softmax.runtime import cache
from stored import FIELDS, compile_kernel
cache.LOCK_TIMEOUT_S = 0.2
print(callable(cache.Store({str(store.root)!r}).load("add_one", FIELDS, lambda: compile_kernel())))
"""
        )
    assert process.split() == ["True"]
    assert entry.exists()


# ---------------------------------------------------------------------------------------------------------------- GPU


@pytest.fixture
def gpu(request):
    """torch, and the device and architecture of a GPU."""
    torch, device = pytest.importorskip("torch"), request.param
    if torch.cuda.device_count() <= device:
        pytest.skip(f"needs {device + 1} GPUs, found {torch.cuda.device_count()}")
    major, minor = torch.cuda.get_device_capability(device)
    return torch, device, f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", [0, 1], indirect=True)
@pytest.mark.parametrize("linked", [True, False])
def test_loaded_functions_compute(gpu, linked, store, monkeypatch):
    torch, device, arch = gpu
    if not linked:
        monkeypatch.setattr(cache, "LINKERS", ())
    fields = FIELDS | {"arch": arch}
    store.load("add_one", fields, lambda: compile_kernel(arch))
    function = Store(store.root).load("add_one", fields, lambda: pytest.fail("built twice"))
    x = torch.randn(1000, device=f"cuda:{device}")
    y = torch.full_like(x, torch.nan)
    stream = torch.cuda.Stream(device=device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        x.mul_(2)  # done before the kernel only if that runs on the same stream
        function(x.data_ptr(), y.data_ptr(), 1000, stream.cuda_stream)
        assert torch.cuda.current_device() == device
    stream.synchronize()
    assert torch.equal(y, x + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", [0], indirect=True)
def test_a_failed_launch_raises(gpu, store):
    torch, _, arch = gpu
    function = store.load("add_one", FIELDS | {"arch": arch}, lambda: compile_kernel(arch))
    with pytest.raises(Exception, match=r"(?i)cuda"):
        function(0, 0, 0, 0)  # a grid of no blocks
    x = torch.zeros(10, device="cuda")
    function(x.data_ptr(), x.data_ptr(), 10, torch.cuda.current_stream().cuda_stream)
    assert x.sum().item() == 10
