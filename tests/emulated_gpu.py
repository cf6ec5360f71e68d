"""The GPU tests without a GPU: kernels run in the interpreter, on the random numbers that torch makes on a GPU, so that
what fails there fails here. Tests that ask CUDA itself are skipped, and so are those that take more than
CUTE_SOFTMAX_TEST_SECONDS (60).
"""

from __future__ import annotations

import math
import os
import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import building
import checking
import numpy as np
import pytest
import torch

from cute_softmax.plan.hardware import H200

# What torch says where CUDA is missing.
NEEDED = "(not compiled with|requires) CUDA|Cannot get CUDA|ATen_cuda|dummy base class|No CUDA GPUs|no NVIDIA driver"
SECONDS = int(os.environ.get("CUTE_SOFTMAX_TEST_SECONDS", "60"))
DSL = "nvidia_cutlass_dsl"  # in the paths of its files
FACTS = SimpleNamespace(
    major=9,
    minor=0,
    name="none",
    multi_processor_count=H200.multiprocessors,
    shared_memory_per_block_optin=H200.architecture.shared_memory,
    L2_cache_size=H200.l2,
)
PRESENT = {
    "is_available": True,
    "device_count": 1,
    "current_device": 0,
    "get_device_capability": (9, 0),
    "get_device_properties": FACTS,
    "memory_reserved": 0,
    "synchronize": None,
    "empty_cache": None,
}


class TooLong(BaseException):
    """Nothing that a test expects."""


def pretend(monkeypatch: pytest.MonkeyPatch):
    """Let tests believe that there is a GPU, and make what they compute with on the CPU."""
    for name, answer in PRESENT.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    monkeypatch.setattr(building, "precompile", lambda *_: ())  # each is compiled for the interpreter
    monkeypatch.setattr(checking, "DEVICE", "cpu")
    monkeypatch.setattr(checking, "random", random)


@contextmanager
def limited():
    """A test, which is skipped where it cannot run here."""

    def stop(_, frame):
        while frame and DSL not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is None:
            raise TooLong
        signal.alarm(1)  # MLIR ends the process where an exception passes through it

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    except TooLong:
        pytest.skip(f"takes more than {SECONDS} s in the interpreter")
    except (AssertionError, RuntimeError) as error:
        if not re.search(NEEDED, str(error)):
            raise
        pytest.skip("asks CUDA itself")
    finally:
        signal.alarm(0)


# -- Random numbers ----------------------------------------------------------------------------------------------------


def random(shape: Sequence[int], dtype: torch.dtype, seed: int = 0, scale: float = 1.0, device=None):
    """As `checking.random` on a GPU of 132 SMs, but for the last bits of logarithms and sines.

    Source: torch's kernels of distributions, Philox4x32-10 (Salmon et al., 2011) and Box and Muller's transform.
    """
    count = math.prod(shape)
    threads = 256 * min(132 * 8, math.ceil(count / 256))
    number = np.arange(threads, dtype=np.uint64)
    found = np.empty((math.ceil(count / max(4 * threads, 1)), 4, threads), np.float32)
    for turn, four in enumerate(found):  # a thread makes four numbers at a time
        words = philox((np.full_like(number, turn), 0 * number, number, 0 * number), seed)
        four[:2], four[2:] = normal(*words[:2]), normal(*words[2:])
    values = torch.from_numpy(found.reshape(-1)[:count].copy()).reshape(tuple(shape))
    return (values * scale).to(dtype)


def philox(counter: Sequence[np.ndarray], key: int) -> Sequence[np.ndarray]:
    """Four words of 32 bits for each counter of four."""
    low, keys = np.uint64(0xFFFFFFFF), [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        a, b = counter[0] * np.uint64(0xD2511F53), counter[2] * np.uint64(0xCD9E8D57)
        high = [x >> np.uint64(32) for x in (b, a)]
        counter = (
            high[0] ^ counter[1] ^ np.uint64(keys[0]), b & low, high[1] ^ counter[3] ^ np.uint64(keys[1]), a & low
        )  # fmt: skip
        keys = [(k + step) & 0xFFFFFFFF for k, step in zip(keys, (0x9E3779B9, 0xBB67AE85), strict=True)]
    return counter


def normal(a: np.ndarray, b: np.ndarray) -> Iterator[np.ndarray]:
    """Two normal numbers of two words."""
    unit = np.float32(2.0**-32)
    radius = np.sqrt(np.float32(-2) * np.log(a.astype(np.float32) * unit + unit / 2))
    turn = unit * np.float32(2 * math.pi)
    angle = b.astype(np.float32) * turn + turn / 2
    return np.sin(angle) * radius, np.cos(angle) * radius
