"""``python -m benchmarks.traffic``: what the rungs of the ladder ask of memory, predicted and counted.

The prediction is of `layouts.access`, from the thread-value layout that a rung has while it is traced, times its trips;
it needs no GPU. Counters are read by Nsight Compute on a machine with an NVIDIA GPU:

    python -m benchmarks.traffic --save       writes results/<gpu>/checks/ladder-traffic.json
    python -m benchmarks.traffic --predict    prints the predictions
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from cute_softmax.ladder import RUNGS, compile_form, form_of, rung_of
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import Layout, access
from layouts.arguments import Parser
from layouts.trace import CopyValue, observing

from . import results

# Whole tiles of every rung, in tensors larger than the L2 of any GPU yet.
SHAPE = (32768, 2048)
DTYPES = ("bf16", "fp32")
COUNTERS = {
    "load_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "store_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l2_read_sectors": "lts__t_sectors_op_read.sum",
    "l2_write_sectors": "lts__t_sectors_op_write.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "nanoseconds": "gpu__time_duration.sum",
}
ARCHITECTURE = "sm_90a"


def traced(rung: int, dtype: str, columns: int, architecture: str = ARCHITECTURE) -> dict[str, Any]:
    """The layouts that a rung has, by name: those that it observes while it is compiled."""
    with observing() as found:
        compile_form(form_of(rung, dtype, columns, architecture))
    return found


def predict(rung: int, dtype: str, shape: tuple[int, int] = SHAPE) -> dict[str, int]:
    """Requests and sectors of 32 bytes that the rung's loads and stores of a matrix (M, N) take.

    Raises ValueError where M or N are no whole number of the rung's tiles.
    """
    step, (rows, columns), size = rung_of(rung), shape, ITEM_SIZE[dtype]
    found = traced(rung, dtype, columns)
    copy = found.get("copy")
    if isinstance(copy, CopyValue):
        tv, tiler = copy.tv, copy.tiler
    else:
        tv = found["tv"]
        tiler = tv.size // columns, columns
    vector = tv[1].size if step.vectors else 1
    if rows % tiler[0] or columns % tiler[1]:
        raise ValueError(f"{rows} x {columns} is no whole number of tiles of {tiler[0]} x {tiler[1]}")
    memory = Layout(tiler, (columns, 1))
    trip = access.check_copy(tv, tiler, memory, element_bytes=size, vector=vector)
    tiles = math.prod(shape) // math.prod(tiler)
    return {
        f"{what}_{unit}": trips * tiles * getattr(trip, unit)
        for what, trips in (("load", step.reads), ("store", step.writes))
        for unit in ("requests", "sectors")
    }


def launch_all() -> None:
    """Launch every rung once in each dtype, in order: what ncu counts."""
    import torch

    from cute_softmax import ladder
    from cute_softmax.runtime import launch

    for dtype in DTYPES:
        x = torch.randn(SHAPE, device="cuda").to(launch.TORCH_DTYPES[dtype])
        for step in RUNGS:
            ladder.softmax(x, step.number)
            torch.cuda.synchronize()


def counted(ncu: str) -> Iterator[dict[str, int]]:
    """The counters of every launch of `launch_all`. Raises RuntimeError with ncu's words where it fails."""
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name-base", "function", "--kernel-name", "regex:.*kernel_cutlass.*"]
    command += [
        "--metrics",
        ",".join(COUNTERS.values()),
        sys.executable,
        "-m",
        "benchmarks.traffic",
        "--launch",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=results.ROOT)
    except FileNotFoundError:
        raise RuntimeError(f"{ncu} is not there: Nsight Compute reads the counters") from None
    lines = done.stdout.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise RuntimeError(f"ncu failed ({done.returncode}): {(done.stdout + done.stderr)[-2000:]}")
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row["ID"].isdigit():
            yield {name: round(float(row[metric].replace(",", ""))) for name, metric in COUNTERS.items()}


def measure(ncu: str) -> list[dict[str, Any]]:
    """A row for each rung and dtype: what was predicted and what was counted."""
    found = list(counted(ncu))
    forms = [(dtype, step) for dtype in DTYPES for step in RUNGS]
    if len(found) != len(forms):
        raise RuntimeError(f"ncu saw {len(found)} kernels instead of {len(forms)}")
    return [
        {
            "rung": step.number,
            "dtype": dtype,
            "shape": list(SHAPE),
            "predicted": predict(step.number, dtype),
            "counted": counters,
        }
        for (dtype, step), counters in zip(forms, found, strict=True)
    ]


def main(argv: list[str]) -> int:
    """The exit status of the command line `argv`."""
    parser = Parser(prog="python -m benchmarks.traffic", description=__doc__.split("\n\n")[0])
    parser.add_argument("--save", action="store_true", help="write results/<gpu>/checks/ladder-traffic.json")
    parser.add_argument("--predict", action="store_true", help="only print the predictions; needs no GPU")
    parser.add_argument("--ncu", default="ncu", help="the ncu to run")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.launch:
        launch_all()
        return 0
    if given.predict:
        for dtype in DTYPES:
            for step in RUNGS:
                print(dtype, step.number, step.title, predict(step.number, dtype))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("the counters are those of an NVIDIA GPU; there is none here (see --predict)", file=sys.stderr)
        return 2
    try:
        rows = measure(given.ncu)
    except RuntimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for row in rows:
        same = all(row["counted"][name] == n for name, n in row["predicted"].items())
        print(
            row["dtype"],
            row["rung"],
            "as predicted" if same else f"predicted {row['predicted']}",
            row["counted"],
        )
    if given.save:
        header = results.make_header([]) | {"command": "python -m benchmarks.traffic --save"}
        path = results.FOLDER / results.gpu_folder(header["gpu"]) / "checks" / "ladder-traffic.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"saved {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
