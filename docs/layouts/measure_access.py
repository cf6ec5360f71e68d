"""Hardware counters of small CuTe kernels with known layouts, beside what ``layouts.access`` predicts.

On a machine with an NVIDIA GPU and Nsight Compute, from the repository's root::

    python docs/layouts/measure_access.py -o docs/layouts/access.json

runs every case once under ``ncu --clock-control none`` and writes counters and predictions to one file.
``--compile`` only builds the kernels for sm_90a, which needs no GPU; ``--launch`` is what ncu runs.

Each kernel is one CTA of 128 threads. A *global* case reads one vector a thread at the address that its
layout gives the thread. A *shared* case stores one vector a thread through one layout, waits, and loads one
through another; the layout that is not under test is conflict-free. Offsets are in 4-byte words.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path

import cutlass
import cutlass.cute as cute
from cutlass.cute.runtime import from_dlpack, make_fake_compact_tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from layouts import AnyLayout, access, parse  # noqa: E402

THREADS = 128
WORD = 4
COUNTERS = {
    "global_sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "global_requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "load_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum",
    "load_requests": "smsp__inst_executed_op_shared_ld.sum",
    "store_conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "store_wavefronts": "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum",
    "store_requests": "smsp__inst_executed_op_shared_st.sum",
}


@dataclass(frozen=True)
class Case:
    """One kernel: ``layout`` maps a thread to its vector's offset in words; ``width`` is in bytes."""

    name: str
    space: str  # global, load or store (the latter two of shared memory)
    width: int
    layout: str
    base: int = 0  # words added to every offset

    @property
    def value(self) -> AnyLayout:
        return parse(self.layout)

    @property
    def words(self) -> int:
        return self.width // WORD

    @property
    def extent(self) -> int:
        """Words of the buffer, in whole 16-byte units."""
        return -(-(self.base + self.value.cosize + self.words - 1) // 4) * 4


CASES = (
    Case("global 4 B, side by side", "global", 4, "128:1"),
    Case("global 8 B, side by side", "global", 8, "128:2"),
    Case("global 16 B, side by side", "global", 16, "128:4"),
    Case("global 4 B, one word past a sector", "global", 4, "128:1", base=1),
    Case("global 4 B, every 2nd word", "global", 4, "128:2"),
    Case("global 4 B, every 4th word", "global", 4, "128:4"),
    Case("global 4 B, every 8th word", "global", 4, "128:8"),
    Case("global 4 B, every 64th word", "global", 4, "128:64"),
    Case("global 4 B, one word for all", "global", 4, "128:0"),
    Case("global 16 B, every 2nd vector", "global", 16, "128:8"),
    Case("global 16 B, one vector for all", "global", 16, "128:0"),
    Case("global 16 B, 4 rows a warp", "global", 16, "(8,16):(4,1024)"),
    Case("global 4 B, column of a matrix", "global", 4, "(32,4):(1024,1)"),
    *(
        Case(f"shared {space} {name}", space, width, layout)
        for space in ("load", "store")
        for name, width, layout in (
            ("4 B, side by side", 4, "128:1"),
            ("4 B, every 2nd word", 4, "(32,4):(2,64)"),
            ("4 B, every 4th word", 4, "(32,4):(4,128)"),
            ("4 B, every 8th word", 4, "(32,4):(8,256)"),
            ("4 B, every 32nd word (column)", 4, "(32,4):(32,1)"),
            ("4 B, column of a padded matrix", 4, "(32,4):(33,1)"),
            ("8 B, side by side", 8, "128:2"),
            ("8 B, every 2nd vector", 8, "128:4"),
            ("8 B, every 4th vector", 8, "128:8"),
            ("16 B, side by side", 16, "128:4"),
            ("16 B, every 2nd vector", 16, "128:8"),
            ("16 B, rows of 128 B down a column", 16, "(8,16):(32,4)"),
            ("16 B, the same, swizzled", 16, "S<3,2,3> o 0 o (8,8,2):(32,4,256)"),
            ("16 B, the same, rows padded by 16 B", 16, "(8,16):(36,4)"),
        )
    ),
    # Lanes that share a vector. Stores have none of these: lanes that store to one address race.
    *(
        Case(f"shared load {name}", "load", width, layout)
        for name, width, layout in (
            ("4 B, one word for all", 4, "128:0"),
            ("8 B, one vector for all", 8, "128:0"),
            ("16 B, one vector for all", 16, "128:0"),
            ("8 B, pairs share a vector", 8, "(2,64):(0,2)"),
            ("16 B, pairs share a vector", 16, "(2,64):(0,4)"),
            ("8 B, halves of a warp share", 8, "(16,2,4):(2,0,32)"),
            ("8 B, lanes 2 apart share", 8, "(2,2,32):(2,0,4)"),
            ("16 B, lanes 2 apart share", 16, "(2,2,32):(4,0,8)"),
            ("8 B, lanes 4 apart share", 8, "(4,2,16):(2,0,8)"),
            ("16 B, lanes 4 apart share", 16, "(4,2,16):(4,0,16)"),
            ("8 B, fours share a vector", 8, "(4,32):(0,2)"),
            ("16 B, fours share a vector", 16, "(4,32):(0,4)"),
            ("8 B, threes share a vector", 8, "(3,43):(0,2)"),
            ("16 B, threes share a vector", 16, "(3,43):(0,4)"),
            # In a run of 17, all pairs share in one half of each warp, and all but one in the other.
            ("8 B, runs of 17 share a vector", 8, "(17,8):(0,2)"),
            ("16 B, runs of 17 share a vector", 16, "(17,8):(0,4)"),
            ("8 B, pairs share every 16th vector", 8, "(2,64):(0,32)"),
            ("16 B, pairs share every 8th vector", 16, "(2,64):(0,32)"),
            # Each pass of the usual size meets its conflict in banks of its own.
            ("8 B, pairs share, 2 rows of 4 vectors", 8, "(2,4,2,2,4):(0,2,32,8,64)"),
            ("16 B, pairs share, 2 rows of 2 vectors", 16, "(2,2,2,2,8):(0,4,32,8,64)"),
        )
    ),
)

# Cases whose measured counters differ from the prediction for a reason that access.md gives.
EXPLAINED: dict[str, str] = {}


def predict(case: Case) -> dict[str, int]:
    """The counters that ``layouts.access`` expects of a case (those of the access under test)."""
    offsets = [(case.base + case.value(t)) * WORD for t in range(THREADS)]
    warps = [offsets[i : i + access.WARP] for i in range(0, THREADS, access.WARP)]
    if case.space == "global":
        found = [access.global_request(w, case.width) for w in warps]
        return {"global_sectors": sum(r.sectors for r in found), "global_requests": len(found)}
    found = [access.shared_request(w, case.width) for w in warps]
    return {
        f"{case.space}_conflicts": sum(r.conflicts for r in found),
        f"{case.space}_wavefronts": sum(r.wavefronts for r in found),
        f"{case.space}_requests": len(found),
    }


def build(case: Case, fake: bool):
    """(compiled function, its arguments) of a case; with ``fake`` for sm_90a, without a GPU."""
    words = case.words

    def cute_layout(layout: AnyLayout):
        if hasattr(layout, "outer"):
            swizzle = cute.make_swizzle(layout.outer.bits, layout.outer.base, layout.outer.shift)
            return cute.make_composed_layout(swizzle, layout.offset, cute_layout(layout.inner))
        return cute.make_layout(layout.shape, stride=layout.stride)

    def vector(pointer, offset, count: int):
        """``count`` words at ``pointer + offset``, whose offset is a multiple of their number."""
        return cute.make_tensor(pointer + cute.assume(offset, divby=count), cute.make_layout(count))

    def move(source, target, count: int):
        atom = cute.make_copy_atom(
            cute.nvgpu.CopyUniversalOp(), cutlass.Float32, num_bits_per_copy=32 * count
        )
        cute.copy(atom, source, target)

    def finish(values, out, count: int, thread):
        total = values[0]
        for i in range(1, count):
            total += values[i]
        out[thread] = total

    @cute.kernel
    def access_global(source: cute.Tensor, out: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        offset = cute_layout(case.value)(thread) + case.base
        values = cute.make_rmem_tensor(cute.make_layout(words), cutlass.Float32)
        move(vector(source.iterator, offset, words), values, words)
        finish(values, out, words, thread)

    @cute.kernel
    def access_shared(source: cute.Tensor, out: cute.Tensor):
        thread = cute.arch.thread_idx()[0]
        plain = parse("128:1")
        store, load = (plain, case.value) if case.space == "load" else (case.value, plain)
        store_words, load_words = (1, words) if case.space == "load" else (words, 1)
        size = max(case.extent, THREADS)
        buffer = cutlass.memory.SmemAllocator().allocate_tensor(
            cutlass.Float32, cute.make_layout(size), byte_alignment=16
        )
        written = cute.make_rmem_tensor(cute.make_layout(store_words), cutlass.Float32)
        for i in cutlass.range_constexpr(store_words):
            written[i] = source[thread + i * THREADS]
        move(written, vector(buffer.iterator, cute_layout(store)(thread), store_words), store_words)
        cute.arch.sync_threads()
        read = cute.make_rmem_tensor(cute.make_layout(load_words), cutlass.Float32)
        move(vector(buffer.iterator, cute_layout(load)(thread), load_words), read, load_words)
        finish(read, out, load_words, thread)

    kernel = access_global if case.space == "global" else access_shared

    @cute.jit
    def launch(source: cute.Tensor, out: cute.Tensor):
        kernel(source, out).launch(grid=(1, 1, 1), block=(THREADS, 1, 1))

    extent = max(case.extent, 4 * THREADS)
    if fake:
        tensors = [
            make_fake_compact_tensor(cutlass.Float32, (n,), assumed_align=16) for n in (extent, THREADS)
        ]
        return cute.compile(launch, *tensors, options="--gpu-arch=sm_90a"), tensors
    import torch

    tensors = [from_dlpack(torch.randn(n, device="cuda"), assumed_align=16) for n in (extent, THREADS)]
    return cute.compile(launch, *tensors), tensors


def launch_all() -> None:
    """Compile every case and launch it once, in order."""
    import torch

    for case in CASES:
        function, tensors = build(case, fake=False)
        function(*tensors)
        torch.cuda.synchronize()
        print(case.name, file=sys.stderr)


def available(ncu: str) -> dict[str, str]:
    """Those of ``COUNTERS`` that this ncu knows on this GPU; all where it cannot say."""
    listed = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True)
    known = {line.split()[0] for line in listed.stdout.splitlines() if line.strip()}
    found = {k: m for k, m in COUNTERS.items() if m.removesuffix(".sum") in known}
    return found or COUNTERS


def rows(text: str) -> Iterator[dict[str, str]]:
    """The kernels in ncu's raw CSV page: one row each, after the row of units."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row["ID"].isdigit():
            yield row


def measure(ncu: str) -> list[dict]:
    """Every case's counters and predictions; ``RuntimeError`` with ncu's words where it fails."""
    counters = available(ncu)
    command = [ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base"]
    command += ["--kernel-name-base", "function", "--kernel-name", "regex:.*access_(global|shared).*"]
    command += ["--metrics", ",".join(counters.values()), sys.executable, str(Path(__file__)), "--launch"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ)
    if done.returncode:
        raise RuntimeError(f"ncu failed ({done.returncode}):\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    found = list(rows(done.stdout))
    if len(found) != len(CASES):
        raise RuntimeError(f"ncu saw {len(found)} kernels instead of {len(CASES)}:\n{done.stdout[-3000:]}")
    results = []
    for case, row in zip(CASES, found, strict=True):
        counts = {k: round(float(row[m].replace(",", ""))) for k, m in counters.items() if row.get(m)}
        results.append({**asdict(case), "predicted": predict(case), "measured": counts})
    return results


def said(*command: str) -> str:
    """The first line that a command prints; empty where it cannot run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except FileNotFoundError:
        return ""
    return done.stdout.strip().split("\n")[0]


def header() -> dict[str, str]:
    """What was measured where."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cutlass_dsl": cutlass.__version__,
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": "python docs/layouts/measure_access.py",
    }


def main(arguments: list[str]) -> int:
    """0, or 2 where nothing can be measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs/layouts/access.json")
    parser.add_argument("--ncu", default="ncu", help="the ncu to run")
    parser.add_argument("--compile", action="store_true", help="only build the kernels, for sm_90a")
    parser.add_argument("--launch", action="store_true", help="only launch the kernels (ncu runs this)")
    given = parser.parse_args(arguments)
    if given.compile:
        os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
        for case in CASES:
            build(case, fake=True)
            print("built", case.name, predict(case))
        return 0
    import torch

    if not torch.cuda.is_available():
        print("counters need an NVIDIA GPU; there is none here", file=sys.stderr)
        return 2
    if given.launch:
        launch_all()
        return 0
    try:
        results = measure(given.ncu)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    given.output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"header": header(), "rows": results}, indent=1)
    given.output.write_text(text + "\n", encoding="utf-8")
    for r in results:
        shown = {k: r["measured"].get(k) for k in r["predicted"]}
        verdict = "equal" if shown == r["predicted"] else "DIFFERS"
        print(f"{verdict:8} {r['name']:42} predicted {r['predicted']} measured {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
