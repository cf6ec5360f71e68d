"""What the suite of shared rows must reach, and what more ranks would cost: read off its results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .results import Results, Row

SUITE = "sharded"
BOTH = "forward + backward"
MERGED_US = 10.0  # beyond the slice's own time and an all-gather
# Times of the slice alone, of the same kind: of a softmax the matrix is read once more; a cross entropy has two reads
# and a write where a copy has one of each.
OVER_LOCAL = {"softmax": 1.55, "log_softmax": 1.55}
OVER_COPY = 1.6
BOUND_BY_WAYS = (*OVER_LOCAL, "cross_entropy")  # whose collective and whose slices on chip have a bound each
PIECES, ON_CHIP, OVER_LOCAL_ON_CHIP = ("1 piece", "2 pieces"), "on chip", 1.25
WAYS = (*PIECES, ON_CHIP)  # of one operation, as modes
# What NCCL's tuning takes for a hop between GPUs of a host, and for one between hosts (its protocol for small messages,
# src/graph/tuning.cc): beyond two GPUs nothing was measured.
HOP_US, NETWORK_HOP_US, GPUS_A_HOST = 0.6, 2.7, 8
NUMBERS = {"logsumexp": 2, "softmax": 2}  # that are gathered of a row


@dataclass(frozen=True)
class Verdict:
    """A bound on a time, in microseconds."""

    what: str
    value: float | None
    bound: float | None

    @property
    def met(self) -> bool:
        return None not in (self.value, self.bound) and self.value <= self.bound

    def __str__(self) -> str:
        if None in (self.value, self.bound):
            return f"FAIL  {SUITE}: {self.what}: no figure"
        said = "pass" if self.met else "FAIL"
        return f"{said}  {SUITE}: {self.what}: {self.value:.1f} us; must <= {self.bound:.1f} us"


def _times(rows: Sequence[Row]) -> dict[tuple, float]:
    """Microseconds by (op, shape, mode, method, provider)."""
    return {
        (r["op"], tuple(r["shape"]), r.get("mode", ""), r["method"], r["provider"]): r["us"]
        for r in rows
        if "us" in r
    }


def judge(found: Results) -> Iterator[Verdict]:
    """What is required of each shape; of few rows by graphs."""
    us = _times(found.rows)
    cells = dict.fromkeys((op, shape, mode, method) for op, shape, mode, method, _ in us)
    graphed = {(op, shape) for op, shape, _, method in cells if method.startswith("graph")}
    for op, shape, mode, method in cells:
        if op in BOUND_BY_WAYS and mode == ON_CHIP:
            ours = us.get((op, shape, mode, method, "cute_softmax"))
            locally = (us.get((op, shape, m, method, "local")) for m in ("", BOTH))
            local = next(filter(None, locally), None)
            bound = None if local is None else OVER_LOCAL_ON_CHIP * local
            name = f"{op} on chip, {' x '.join(map(str, shape))} ({method})"
            yield Verdict(f"{name} over {OVER_LOCAL_ON_CHIP} of the slice's own", ours, bound)
        if (op, shape, mode, method, "all-gather") not in us or op == "all_gather":
            continue
        if (op, shape) in graphed and not method.startswith("graph"):
            continue
        ours, local, gather, copy = (
            us.get((op, shape, mode, method, p)) for p in ("cute_softmax", "local", "all-gather", "copy")
        )
        if op in BOUND_BY_WAYS:  # by a collective, whichever way is usual
            by_pieces = [us.get((op, shape, pieces, method, "cute_softmax")) for pieces in PIECES]
            ours = min(filter(None, by_pieces), default=ours)
        name = f"{op}, {' x '.join(map(str, shape))} ({method})"
        if op == "cross_entropy":
            bound = None if copy is None else OVER_COPY * copy + gather
            yield Verdict(f"{name} over {OVER_COPY} copies and an all-gather", ours, bound)
        elif op in OVER_LOCAL:
            bound = None if local is None else OVER_LOCAL[op] * local + gather
            yield Verdict(f"{name} over {OVER_LOCAL[op]} of the slice's own and an all-gather", ours, bound)
        elif op != "softmax_backward":
            bound = None if local is None else local + gather + MERGED_US
            yield Verdict(f"{name} over the slice's own, an all-gather and {MERGED_US:.0f} us", ours, bound)


@dataclass(frozen=True)
class Cost:
    """An all-gather of so many ranks: ``first + bytes / rate`` between two, and a hop more for each other one.

    first: microseconds; rate: bytes a microsecond. All bytes but a rank's own come in one after another.
    """

    first: float
    rate: float

    def us(self, ranks: int, size: int) -> float:
        """Of so many bytes from each rank."""
        hosts = -(-ranks // GPUS_A_HOST)
        hops = (ranks - hosts - 1) * HOP_US + (hosts - 1) * NETWORK_HOP_US if ranks > 1 else 0.0
        return (self.first if ranks > 1 else 0.0) + hops + (ranks - 1) * size / self.rate


def fitted(rows: Sequence[Row]) -> Cost:
    """The cost by the all-gathers that were measured between two ranks: least squares of the relative error."""
    points = [(r["shape"][1], r["us"]) for r in rows if r["op"] == "all_gather" and "us" in r]
    if len(points) < 2:
        raise ValueError("no two sizes of all-gathers were measured")
    # Minimise the sum of ((a + b * size) / us - 1) ** 2.
    u = [(1 / us, size / us) for size, us in points]
    aa, ab, bb = (sum(x[i] * x[j] for x in u) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = sum(x[0] for x in u), sum(x[1] for x in u)
    determinant = aa * bb - ab * ab
    first, slope = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    return Cost(first, 1 / max(slope, 1e-12))


@dataclass(frozen=True)
class Line:
    """What a logsumexp and a softmax take where so many ranks share the rows, in microseconds: measured of a slice of
    that length, and of so many states' merge; the collective by `Cost`."""

    ranks: int
    logsumexp: float
    softmax: float
    merge: float
    gather: float

    @property
    def whole_logsumexp(self) -> float:
        return self.logsumexp + self.gather + self.merge

    @property
    def whole_softmax(self) -> float:
        """The slice is read once more than by a softmax of its own: for its state."""
        return self.logsumexp + self.gather + self.merge + self.softmax


def model(found: Results) -> list[Line]:
    """A line for each number of ranks that slices were measured for; ValueError where there are none."""
    cost, us, lines = fitted(found.rows), {}, []
    for row in found.rows:
        if row["provider"] == "local" and row.get("mode", "").endswith(" ranks") and "us" in row:
            us[row["op"], int(row["mode"].split()[0])] = row["us"]
            rows = row["shape"][0]
    for ranks in sorted({ranks for _, ranks in us}):
        of = [us[op, ranks] for op in ("logsumexp", "softmax", "merge")]
        lines.append(Line(ranks, *of, cost.us(ranks, 4 * NUMBERS["logsumexp"] * rows)))
    if not lines:
        raise ValueError("no slices of many ranks were measured")
    return lines
