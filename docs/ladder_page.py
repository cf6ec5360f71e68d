"""What is generated of the page about the ladder: figures from the rungs' own values, traffic, speed and winners."""

from __future__ import annotations

import functools
import json

from committed import table

from benchmarks import console, report, results, traffic
from benchmarks.cases import LADDER
from cute_softmax.ladder import RUNGS
from cute_softmax.plan.problem import ITEM_SIZE
from layouts import Layout, figures
from layouts.figures import Figure
from layouts.operations import with_steps

# Rows of which the last step is ragged, whatever the rung.
COLUMNS, DTYPE = 3000, "bf16"
SHOWN = (512, 1024, 2048, 4096, 8192, 10240)
SUITES = {"bf16": "ladder", "fp32": "ladder-fp32"}
# GB/s of the memory, as NVIDIA states them for the SXM boards, and the folder of the results.
PEAK = {"H100": 3350, "H200": 4800}
FOLDERS = {"H100": "h100-80gb-hbm3", "H200": "h200"}
COUNTED = results.FOLDER / FOLDERS["H200"] / "checks" / "ladder-traffic.json"
SECTOR_BYTES = 32
# GB/s that the first system had over the shapes of its table, from its slowest to its fastest.
FIRST_SYSTEM = 2740, 3000
UNMEASURED = "Not measured yet."


@functools.cache
def _values(rung: int) -> dict:
    return traffic.traced(rung, DTYPE, COLUMNS)


def _tile(rung: int, tv: Layout, tiler: tuple[int, int]) -> Figure:
    return figures.thread_value(
        tv,
        tiler,
        element_bytes=ITEM_SIZE[DTYPE],
        memory=Layout(tiler, (COLUMNS, 1)),
        space="gX",
        keep=(COLUMNS,) if tiler[1] > COLUMNS else (),
        fold=False,
        title=f"Rung {rung}: {RUNGS[rung].title}",
    )


def drawings() -> dict[str, Figure]:
    """The figures of the page by name."""
    found = {"ladder_layout": figures.layout_grid(Layout((4, 8), (8, 1)), title="The layout (4,8):(8,1)")}
    for rung, rows in ((1, 128), (3, 4), (4, 1)):
        tv = _values(rung)["tv"]
        found[f"ladder_rung{rung}"] = _tile(rung, tv, (rows, tv.size // rows))
    copy, coordinates, buffer = _values(6)["copy"], _values(6)["tXcX"], _values(7)["sR"]
    (vector, _), _, steps = coordinates.shape
    tiler = 1, copy.tiler[1] * steps
    found["ladder_rung6"] = _tile(6, with_steps(copy.tv, copy.tiler, steps), tiler)
    kept = _values(5)
    found["ladder_rung5"] = figures.thread_value(
        kept["tv"],
        kept["sX"].shape,
        element_bytes=ITEM_SIZE[DTYPE],
        memory=kept["sX"],
        space="sX",
        shared=True,
        keep=(COLUMNS,),
        fold=False,
        title=f"Rung 5: {RUNGS[5].title}",
    )
    found["ladder_predicate"] = figures.predicate_tensor(
        Layout((1, 1, steps), (steps, 0, 1)),
        copy.tv,
        copy.tiler,
        COLUMNS,
        vector=vector,
        element_bytes=ITEM_SIZE[DTYPE],
        title=f"Rung 6: which vectors of a row of {COLUMNS:,} exist",
    )
    found["ladder_buffer"] = figures.reduction_buffer(
        buffer, element_bytes=4, title="Rung 7: the reduction buffer"
    )
    found["ladder_shuffles"] = figures.warp_shuffle(
        buffer.shape[1][0], title="Rung 7: the states of eight warps"
    )
    return found


def _found(gpu: str, suite: str) -> results.Results | None:
    path = results.FOLDER / FOLDERS[gpu] / f"{suite}.json"
    return results.load(path) if path.exists() else None


@functools.cache
def _speeds() -> dict[tuple[str, str], dict[int, dict]]:
    """(GPU, dtype) -> N -> provider -> row, of what is timed with a cold L2."""
    found = {}
    for gpu in PEAK:
        for dtype, suite in SUITES.items():
            measured = _found(gpu, suite)
            if measured is not None:
                found[gpu, dtype] = {
                    key.case.shape[1]: cell
                    for key, cell in results.cells(measured.rows).items()
                    if key.method == "events-cold"
                }
    return found


@functools.cache
def _traffic() -> list[dict]:
    """What was predicted and counted; without counters what is predicted."""
    if COUNTED.exists():
        return json.loads(COUNTED.read_text(encoding="utf-8"))["rows"]
    return [
        {
            "rung": step.number,
            "dtype": dtype,
            "shape": traffic.SHAPE,
            "predicted": traffic.predict(step.number, dtype),
        }
        for dtype in traffic.DTYPES
        for step in RUNGS
    ]


def rung(number: int) -> str:
    """What a rung asks of memory and how fast it is."""
    name = LADDER[number]
    rows = []
    for entry in (e for e in _traffic() if e["rung"] == number):
        predicted, counted = entry["predicted"], entry.get("counted", {})
        m, n = entry["shape"]
        matrix = m * n * ITEM_SIZE[entry["dtype"]]
        rows.append(
            [f"{entry['dtype']}, {m:,} x {n:,}"]
            + [
                f"{predicted[f'{what}_sectors'] / predicted[f'{what}_requests']:.4g}"
                for what in ("load", "store")
            ]
            + [
                f"{sum(of[f'{what}_sectors'] for what in ('load', 'store')) * SECTOR_BYTES / matrix:.4g}"
                for of in (predicted, *[counted] * bool(counted))
            ]
            + [f"{counted[f'dram_{what}_bytes'] / matrix:.2f}" for what in ("read", "write") * bool(counted)]
        )
    head = ["memory traffic", "sectors per load", "per store", "sectors x 32 B, predicted"]
    head += ["counted", "DRAM read, counted", "written"][: len(rows[0]) - len(head)]
    traffic_table = table(head, rows)
    speed_rows = []
    for (gpu, dtype), cells in _speeds().items():
        words = []
        for n in SHOWN:
            row = cells[n].get(name, {})
            words.append(f"{row['gbps']:.0f} ({row['vs_copy']:.2f})" if row.get("gbps") else "")
        speed_rows.append([f"{gpu}, {dtype}", *words])
    speed_table = table(["GB/s", *(f"N = {n:,}" for n in SHOWN)], speed_rows) if speed_rows else UNMEASURED
    return f"{traffic_table}\n\n{speed_table}"


def winners() -> str:
    """The fastest rung for every N, as a share of the memory's bandwidth, and the package's kernel beside it."""
    if not _speeds():
        return UNMEASURED
    columns = list(next(iter(_speeds().values())))
    rows = []
    for n in columns:
        line = [f"{n:,}"]
        for (gpu, _), cells in _speeds().items():
            timed = {
                name: row["gbps"] / PEAK[gpu] for name, row in cells[n].items() if row.get("gbps") is not None
            }
            best = max((name for name in LADDER if name in timed), key=timed.__getitem__)
            line += [f"{best.removeprefix('rung')}: {timed[best]:.0%}", f"{timed['cute_softmax']:.0%}"]
            line += [f"{timed['copy']:.0%}"]
        rows.append(line)
    head = ["N"]
    for gpu, dtype in _speeds():
        head += [f"{gpu}, {dtype}: best rung", "cute_softmax", "copy"]
    return table(head, rows)


def first_table() -> str:
    """The shapes of the first system's table, on the GPU that it was measured on."""
    measured = _found("H100", "rows-forward")
    if measured is None:
        return UNMEASURED
    names = ("cute_softmax", "copy", "torch.compile", "liger", "quack", "torch")
    rows = []
    for key, cell in results.cells(measured.rows).items():
        if key.method == "events-cold":
            timed = {name: cell[name] for name in names if cell.get(name, {}).get("gbps")}
            best = max((name for name in timed if name != "copy"), key=lambda name: timed[name]["gbps"])
            words = {name: f"{row['gbps']:.0f}, {row['us'] / 1e3:.3f}" for name, row in timed.items()}
            words[best] = f"**{words[best]}**"
            slow, fast = (timed["copy"]["gbps"] * timed["copy"]["us"] / gbps / 1e3 for gbps in FIRST_SYSTEM)
            first = f"{FIRST_SYSTEM[0]} to {FIRST_SYSTEM[1]}, {slow:.3f} to {fast:.3f}"
            rows.append([key.case.label, first, *(words.get(name, "refuses") for name in names)])
    h = measured.header
    versions = ", ".join(report.with_version(name, h) for name in names[2:])
    run = f"{h['gpu']}, {h['date'][:10]}, `{h['command']}`; {versions}"
    source = f"The fastest of each row is marked, the copy apart. {run}."
    return f"{table(['bf16; GB/s, ms', 'the first system, then', *names], rows)}\n\n{source}"


def directions() -> str:
    """The naive form beside the others over rows and over columns."""
    parts = []
    for gpu in PEAK:
        measured = _found(gpu, "directions")
        if measured is not None:
            parts += [f"**{t.title}**\n\n{console.as_markdown(t)}" for t in report.tables(measured)]
    return "\n\n".join(parts) or UNMEASURED


def sources() -> str:
    """Where the figures of the page come from."""
    headers = [
        measured.header
        for gpu in PEAK
        for suite in (*SUITES.values(), "directions")
        if (measured := _found(gpu, suite)) is not None
    ]
    if COUNTED.exists():
        headers.append(json.loads(COUNTED.read_text(encoding="utf-8"))["header"])
    found = [f"- {h['gpu']}, {h['date'][:10]}, `{h['command']}`" for h in headers]
    return "\n".join(dict.fromkeys(found)) or UNMEASURED


BLOCKS = {
    **{f"rung {step.number}": functools.partial(rung, step.number) for step in RUNGS},
    "winners": winners,
    "first table": first_table,
    "directions": directions,
    "sources": sources,
}
