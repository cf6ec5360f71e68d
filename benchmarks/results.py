"""Results files: `benchmarks/results/<gpu>/<suite>.json`, one header over a list of rows."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from .cases import Case

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks" / "results"

HEADER_KEYS = ("gpu", "driver", "torch", "cutlass_dsl", "commit", "date", "command")
ROW_KEYS = ("suite", "op", "shape", "dim", "dtype", "provider")
FIGURE_KEYS = ("us", "gbps", "vs_copy", "spread")

Row = dict[str, Any]


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_ints(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int for n in value)


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and value > 0


# What the keys of a row hold, in words and as a test of it.
_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(
        ("suite", "op", "dtype", "provider", "method", "mode", "view", "error"), ("a text", _is_text)
    ),
    **dict.fromkeys(("shape", "dim"), ("a list of ints", _are_ints)),
    **dict.fromkeys(("us", "vs_torch"), ("a positive number", _is_positive)),
    **dict.fromkeys(
        ("gbps", "vs_copy"), ("a positive number or null", lambda value: value is None or _is_positive(value))
    ),
    **dict.fromkeys(("spread", "peak_bytes"), ("a number", lambda value: value == 0 or _is_positive(value))),
}


@dataclass
class Results:
    """The contents of one results file."""

    header: dict[str, Any]
    rows: list[Row]

    @property
    def suite(self) -> str:
        """The suite that all rows belong to."""
        return self.rows[0]["suite"]


def describe(error: BaseException) -> str:
    """An error as one line of at most 200 characters, without the folders of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = re.sub(r"(?<![\w.])/(?:[\w.+@-]+/)+", "", lines[0] if lines else "")
    name = type(error).__name__
    if name == "WrongResult":
        return text
    if isinstance(error, ModuleNotFoundError):
        return f"not installed: {text}"[:200]
    return f"{name}: {text}"[:200].rstrip(": ")


def make_row(suite: str, case: Case, provider: str, method: str, **figures: Any) -> Row:
    """A row of the format; `figures` are us, spread and extras, or error."""
    row: Row = {
        "suite": suite,
        "op": case.op,
        "shape": list(case.shape),
        "dim": list(case.dim),
        "dtype": case.dtype,
        "provider": provider,
        "method": method,
    }
    row |= {key: value for key in ("mode", "view") if (value := getattr(case, key))}
    if "error" not in figures:
        row |= dict.fromkeys(FIGURE_KEYS)
    return row | figures


class Key(NamedTuple):
    """What rows of different providers share when they measure the same thing."""

    case: Case
    method: str


def key_of(row: Row) -> Key:
    """The cell that a row belongs to."""
    case = Case(
        row["op"],
        tuple(row["shape"]),
        row["dtype"],
        tuple(row["dim"]),
        row.get("mode", ""),
        row.get("view", ""),
    )
    return Key(case, row.get("method", ""))


def cells(rows: Sequence[Row]) -> dict[Key, dict[str, Row]]:
    """Rows by cell and provider, in the order of the file."""
    grouped: dict[Key, dict[str, Row]] = {}
    for row in rows:
        grouped.setdefault(key_of(row), {})[row["provider"]] = row
    return grouped


def add_ratios(rows: Sequence[Row]) -> None:
    """Fills `vs_copy` (time of the copy of the same bytes over this row's) and, on host times, `vs_torch`."""
    for cell in cells(rows).values():
        for row in cell.values():
            if "error" in row:
                continue
            if row["gbps"] is not None:
                if "us" in cell.get("copy", {}):
                    row["vs_copy"] = round(cell["copy"]["us"] / row["us"], 4)
            elif "us" in cell.get("torch", {}):
                row["vs_torch"] = round(row["us"] / cell["torch"]["us"], 4)


def gpu_folder(name: str) -> str:
    """The folder of a GPU's results, which has the name of its table: "NVIDIA H200" gives "h200"."""
    from cute_softmax.plan.tables import name_for  # with all of torch

    return name_for(name)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def commit() -> str | None:
    """The commit measured: `BENCH_COMMIT` where it is set, else git's, marked when files have changed."""
    if given := os.environ.get("BENCH_COMMIT"):
        return given
    head = _output("git", "rev-parse", "--short=12", "HEAD")
    if head and _output("git", "status", "--porcelain", "--", "cute_softmax", "benchmarks/*.py"):
        head += "+changes"
    return head


def command_line(argv: Sequence[str]) -> str:
    """The command as one would repeat it, without this machine's: a folder given to --save, and the time it had."""
    kept, option = [], ""
    for argument in argv:
        if option and not argument.startswith("-"):
            option = ""
            continue
        name = argument.split("=")[0]
        option = argument if argument in ("--save", "--minutes") else ""
        if name != "--minutes":
            kept.append("--save" if name == "--save" else argument)
    return shlex.join(["python", "-m", "benchmarks", *kept])


def make_header(argv: Sequence[str]) -> dict[str, Any]:
    """The header of a run on the current GPU. Beyond the format: CUDA and the peers' versions."""
    import torch

    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver.splitlines()[0] if driver else None,
        "torch": torch.__version__,
        "cutlass_dsl": _version("nvidia-cutlass-dsl"),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command_line(argv),
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "liger": _version("liger-kernel"),
        "quack": _version("quack-kernels"),
        "trl": _version("trl"),
        "flashinfer": _version("flashinfer-python"),
        "cudnn": cudnn,
    }


def validate(data: Any) -> None:
    """Raises ValueError naming what in `data` is not of the format."""
    if not isinstance(data, dict) or set(data) != {"header", "rows"}:
        raise ValueError('a results file is an object of "header" and "rows"')
    if not isinstance(data["header"], dict) or not isinstance(data["rows"], list):
        raise ValueError("header must be an object, and rows a list")
    if missing := [k for k in HEADER_KEYS if k not in data["header"]]:
        raise ValueError(f"header lacks {missing}")
    if not _is_text(data["header"]["gpu"]):
        raise ValueError(f"header: gpu must be a text, got {data['header']['gpu']!r}")
    if not data["rows"]:
        raise ValueError("no rows")
    for i, row in enumerate(data["rows"]):
        if not isinstance(row, dict):
            raise ValueError(f"row {i} must be an object, got {row!r}")
        wanted = ROW_KEYS if "error" in row else ROW_KEYS + FIGURE_KEYS
        if missing := [k for k in wanted if k not in row]:
            raise ValueError(f"row {i} lacks {missing}")
        if "error" in row and "us" in row:
            raise ValueError(f"row {i} has both a figure and an error")
        for key, (what, holds) in _KINDS.items():
            if key in row and not holds(row[key]):
                raise ValueError(f"row {i}: {key} must be {what}, got {row[key]!r}")
        if row["suite"] != data["rows"][0]["suite"]:
            raise ValueError(f"row {i} belongs to suite {row['suite']!r}, row 0 does not")


def load(path: Path) -> Results:
    """Reads and validates a results file; OSError where it cannot be read, ValueError where it is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        validate(data)
    except ValueError as error:
        raise ValueError(f"{path} is no results file: {error}") from None
    return Results(data["header"], data["rows"])


def save(results: Results, folder: Path) -> Path:
    """Writes `<folder>/<gpu>/<suite>.json`, one line a row, over an earlier run's; returns its path."""
    data = {"header": results.header, "rows": results.rows}
    validate(data)
    path = Path(folder) / gpu_folder(results.header["gpu"]) / f"{results.suite}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps(results.header, indent=2).replace("\n", "\n  ")
    rows = ",\n    ".join(json.dumps(row) for row in results.rows)
    text = f'{{\n  "header": {header},\n  "rows": [\n    {rows}\n  ]\n}}\n'
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
    return path
