"""Small real kernels for the tests of the store, and processes that use it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cute_softmax.runtime import cache
from cute_softmax.runtime.cache import Store

FIELDS = {"arch": "sm_90a", "dtype": "float32", "threads": 128, "cluster": (1, 1), "stages": None}
PROJECT = Path(__file__).parents[1]


def compile_kernel(arch: str = "sm_90a"):
    """y = x + 1, of addresses, length and stream."""
    os.environ["CUTE_DSL_ARCH"] = arch
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute

    @cute.kernel
    def add_one(mX: cute.Tensor, mY: cute.Tensor):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < mX.shape[0]:
            mY[i] = mX[i] + 1.0

    @cute.jit
    def launch(x: cutlass.Int64, y: cutlass.Int64, n: cutlass.Int32, stream: cuda.CUstream):
        mX, mY = (
            cute.make_tensor(
                cute.make_ptr(cutlass.Float32, address, cute.AddressSpace.gmem), cute.make_layout((n,))
            )
            for address in (x, y)
        )
        # More shared memory than the 48 KB that a kernel gets unasked.
        grid = (cute.ceil_div(n, 128), 1, 1)
        add_one(mX, mY).launch(grid=grid, block=(128, 1, 1), smem=64 * 1024, stream=stream)

    integers = (cutlass.Int64(0), cutlass.Int64(0), cutlass.Int32(0))
    options = f"--enable-tvm-ffi --gpu-arch={arch}"
    return cute.compile(launch, *integers, cute.runtime.make_fake_stream(), options=options)


class Build:
    """Returns one compiled kernel and counts how often it is asked to."""

    def __init__(self, compiled) -> None:
        self.compiled = compiled
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.compiled


@pytest.fixture(scope="session")
def compiled():
    return compile_kernel()


@pytest.fixture
def build(compiled) -> Build:
    return Build(compiled)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def fresh_fingerprint():
    for function in (cache.fingerprint, cache.runtime_library):
        function.cache_clear()
    yield
    for function in (cache.fingerprint, cache.runtime_library):
        function.cache_clear()


def entry_of(store: Store) -> Path:
    """The one entry."""
    (entry,) = store.entries()
    return entry.path


def run_python(script: str, **environment: str) -> str:
    """What a process prints."""
    paths = os.pathsep.join([str(PROJECT), str(PROJECT / "tests"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
