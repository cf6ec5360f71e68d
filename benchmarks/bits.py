"""The bits of fixed inputs: recorded for a GPU, and compared with what was recorded.

python -m benchmarks bits --save     write benchmarks/results/<gpu>/checks/bits.json
python -m benchmarks bits            compare with it; 1 where a bit differs, 2 where there is nothing to compare with

An input is made of integers alone, so that no generator of random numbers decides it: the same for every version of
torch and every GPU. Of each result the file has a digest, within `batch_invariant` and outside. Bits that a version
changes are no error; it says so where it says what has changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import cute_softmax
from cute_softmax.plan.table import table_of
from cute_softmax.runtime import launch
from layouts.arguments import Parser

from .operations import DTYPES
from .results import FOLDER, gpu_folder, make_header
from .run import current_device

FORMAT = 1
# Lengths on both sides of every decision: scalars, one vector, a warp, few rows, odd, clusters, split rows.
SHAPES = (
    (3, 7), (64, 33), (64, 1000), (64, 1001), (2, 9000), (64, 9000), (3, 32000), (64, 32000), (3, 50257), (64, 50257),
    (8, 151936), (2, 1048577),
)  # fmt: skip
_DEPTH = 64  # columns of the values of a product
_MULTIPLIER = 6364136223846793005  # Knuth's, of a linear congruential generator modulo 2 ** 64


class Function(NamedTuple):
    """One function of (rows, N): its results, whose bits are recorded. longest: elements of a row."""

    call: Callable[[Tensor], tuple[Tensor, ...]]
    longest: int = 1 << 31


def fixed(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Tensor:
    """A tensor of multiples of 1/64 from -8 to 8, by integers alone: every dtype has these numbers."""
    count = 1
    for size in shape:
        count *= size
    state = (torch.arange(count, dtype=torch.int64) + 1) * _MULTIPLIER + seed
    state = (state ^ (state >> 29)) * _MULTIPLIER
    numbers = ((state >> 33) % 1025 - 512).to(torch.float32) / 64
    return numbers.view(*shape).to(dtype).to(device)


def _index(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device)
    return rows * 7919 % x.shape[1]


def _with_gradient(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def both(x: Tensor) -> tuple[Tensor, ...]:
        x = x.detach().requires_grad_()
        y = function(x)
        (d,) = torch.autograd.grad(y, x, fixed(y.shape, y.dtype, y.device, seed=1))
        return y.detach(), d

    return both


def _product(x: Tensor) -> tuple[Tensor, ...]:
    values = fixed((x.shape[1], _DEPTH), torch.bfloat16, x.device, seed=2)
    return cute_softmax.softmax_matmul(x.to(torch.bfloat16), values, return_lse=True)


FUNCTIONS = {
    "softmax": Function(_with_gradient(cute_softmax.softmax)),
    "softmax over columns": Function(lambda x: (cute_softmax.softmax(x.mT.contiguous(), 0),), longest=50257),
    "log_softmax": Function(_with_gradient(cute_softmax.log_softmax)),
    "logsumexp": Function(_with_gradient(lambda x: cute_softmax.logsumexp(x, -1))),
    "sum": Function(lambda x: (cute_softmax.sum(x, -1),)),
    "entropy": Function(_with_gradient(cute_softmax.entropy)),
    "selective_log_softmax": Function(
        _with_gradient(lambda x: cute_softmax.selective_log_softmax(x, _index(x)))
    ),
    "cross_entropy": Function(
        _with_gradient(lambda x: cute_softmax.cross_entropy(x, _index(x), reduction="none"))
    ),
    "softmax_matmul": Function(_product, longest=50257),
}


def digest(tensor: Tensor) -> str:
    """Sixteen digits that tell the bits of a tensor apart."""
    raw = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()[:16]


def measured(device: torch.device | str) -> Iterator[tuple[str, str]]:
    """(what, digest) of every result of every function, outside `batch_invariant` and within."""
    for shape in SHAPES:
        for dtype in ("bf16", "fp32"):
            x = fixed(shape, DTYPES[dtype], device)
            for name, function in FUNCTIONS.items():
                if shape[1] > function.longest:
                    continue
                what = f"{name}, {shape[0]} x {shape[1]}, {dtype}"
                outside = function.call(x)
                with cute_softmax.batch_invariant():
                    inside = function.call(x)
                for i, (one, other) in enumerate(zip(outside, inside, strict=True)):
                    yield f"{what}, result {i}", digest(one)
                    yield f"{what}, result {i}, batch-invariant", digest(other)


def recorded(device: torch.device | str, argv: Sequence[str]) -> dict:
    """What a file has: the header of a run, the package's version, the digests of the tables, and those of results."""
    index = torch.device(device).index or 0
    tables = {
        name: table_of(launch.facts_for(index, invariant).table).title
        for name, invariant in (("table", False), ("shipped_table", True))
    }
    versions = {"format": FORMAT, "version": cute_softmax.__version__, **tables}
    return {"header": make_header(argv) | versions, "bits": dict(measured(device))}


def load(path: Path) -> dict:
    """The contents of a file. Raises OSError where there is none, ValueError for one of another kind."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or set(found) != {"header", "bits"}:
        raise ValueError(f'{path.name} is no record of bits: an object of "header" and "bits"')
    if found["header"].get("format") != FORMAT:
        raise ValueError(f"{path.name} has format {found['header'].get('format')!r}, not {FORMAT}")
    return found


def differences(before: dict, now: dict) -> list[str]:
    """What differs between two records, a line each: bits, and results that one of them lacks."""
    lines = []
    for what in sorted({*before["bits"], *now["bits"]}):
        old, new = before["bits"].get(what), now["bits"].get(what)
        if old != new:
            lines.append(f"{what}: {old or 'not recorded'} -> {new or 'not there any more'}")
    return lines


def main(argv: Sequence[str]) -> int:
    """The exit status of `python -m benchmarks bits`."""
    parser = Parser(
        prog="python -m benchmarks bits", description="Records, or compares, the bits of fixed inputs."
    )
    parser.add_argument("--save", action="store_true", help="write them instead of comparing")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="of results (benchmarks/results)")
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bits are those of an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    path = given.folder / gpu_folder(torch.cuda.get_device_name()) / "checks" / "bits.json"
    before = None
    if not given.save:
        try:
            before = load(path)
        except (OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    now = recorded(current_device(), ["bits", *argv])
    if before is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        print(f"saved {len(now['bits'])} digests in {path}")
        return 0
    lines = differences(before, now)
    for line in lines:
        print(line)
    for key in ("version", "table", "shipped_table", "torch", "cutlass_dsl"):
        if before["header"].get(key) != now["header"].get(key):
            print(f"{key}: {before['header'].get(key)} -> {now['header'].get(key)}")
    print(f"{len(lines)} of {len(now['bits'])} differ")
    return int(bool(lines))
