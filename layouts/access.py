"""What a copy does to memory: coverage, alignment, sectors and lines of global memory, banks of shared
memory.

The unit is the *request*: one instruction of one warp, in which each active lane moves ``width`` bytes. A
copy of V-element vectors is therefore as many requests as it has warps and vectors a thread, never one per
thread.

Rules (CUDA C++ Programming Guide, "Compute Capability 5.x" on shared memory; on 64- and 128-bit shared accesses
NVIDIA's answer at https://forums.developer.nvidia.com/t/unexpected-shared-memory-bank-conflict/77228/2; compared
with measured counters in ``docs/layouts/access.md``):

- Global memory moves in sectors of 32 bytes, four to a line of 128; a request touches each distinct sector
  once.
- Shared memory has 32 banks of 4 bytes. A request of up to 4 bytes a lane is one pass of 32 lanes, of 8
  bytes two passes of 16 lanes, of 16 bytes four passes of 8 lanes. A pass takes as many wavefronts as the
  bank with the most distinct 4-byte words has words; lanes that want the same word share it.
- A shared load of 8 or 16 bytes a lane has half as many passes, of twice the lanes, where every active lane t
  wants the vector of lane t ^ 1, or every one that of lane t ^ 2. A partner that is off agrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from . import ints
from .algebra import AnyLayout, Layout, check_enumerable

WARP = 32
SECTOR_BYTES, LINE_BYTES = 32, 128
BANKS, BANK_BYTES = 32, 4
WIDTHS = (1, 2, 4, 8, 16)

Lanes = Sequence[int | None]


@dataclass(frozen=True, slots=True)
class GlobalRequest:
    """One request to global memory: distinct sectors and lines, and the bytes that its lanes asked for."""

    sectors: int
    lines: int
    bytes: int

    @property
    def ideal_sectors(self) -> int:
        """The sectors that as many bytes side by side would take."""
        return -(-self.bytes // SECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class SharedRequest:
    """One request to shared memory: its wavefronts, and those that it would take without a conflict."""

    wavefronts: int
    ideal: int

    @property
    def conflicts(self) -> int:
        """Wavefronts beyond the ideal, as ``l1tex__data_bank_conflicts_pipe_lsu_mem_shared`` counts
        them."""
        return self.wavefronts - self.ideal


def banks_of(byte: int, width: int) -> str:
    """The shared-memory banks of ``width`` bytes at address ``byte``, in words: ``5`` or ``28..3``."""
    words = max(1, width // BANK_BYTES)
    first = byte // BANK_BYTES % BANKS
    if words >= BANKS:
        return f"0..{BANKS - 1}"
    return str(first) if words == 1 else f"{first}..{(first + words - 1) % BANKS}"


def _active(addresses: Lanes, width: int) -> list[int]:
    if width not in WIDTHS:
        raise ValueError(f"width must be one of {WIDTHS} bytes, got {width}")
    if len(addresses) > WARP:
        raise ValueError(f"a request has at most {WARP} lanes, got {len(addresses)} addresses")
    active = [a for a in addresses if a is not None]
    for lane, address in enumerate(addresses):
        if address is not None and address % width:
            raise ValueError(f"lane {lane}: address {address} is not aligned to its {width}-byte access")
    return active


def global_request(addresses: Lanes, width: int) -> GlobalRequest:
    """The request in which lane i moves ``width`` bytes at byte ``addresses[i]`` (None: the lane is off).

    Raises ``ValueError`` for a width the hardware lacks or an address not aligned to it.
    """
    active = _active(addresses, width)
    sectors = {a // SECTOR_BYTES for a in active}
    return GlobalRequest(
        len(sectors), len({s * SECTOR_BYTES // LINE_BYTES for s in sectors}), len(set(active)) * width
    )


def _partners_share(addresses: Lanes, distance: int) -> bool:
    """Whether every active lane t wants what lane ``t ^ distance`` wants, or that lane is off."""
    active = {lane: a for lane, a in enumerate(addresses) if a is not None}
    return all(active.get(lane ^ distance, a) == a for lane, a in active.items())


def shared_request(addresses: Lanes, width: int) -> SharedRequest:
    """The request in which lane i moves ``width`` bytes at byte ``addresses[i]`` (None: the lane is off).

    Lanes with one address are taken to load; stores of theirs would race. Raises ``ValueError`` for a width
    the hardware lacks or an address not aligned to it.
    """
    _active(addresses, width)
    lanes_per_pass = WARP if width <= BANK_BYTES else WARP * BANK_BYTES // width
    if lanes_per_pass < WARP and (_partners_share(addresses, 1) or _partners_share(addresses, 2)):
        lanes_per_pass *= 2
    wavefronts = passes = 0
    for start in range(0, len(addresses), lanes_per_pass):
        words = {
            a // BANK_BYTES + i
            for a in addresses[start : start + lanes_per_pass]
            if a is not None
            for i in range(max(1, width // BANK_BYTES))
        }
        if words:
            passes += 1
            wavefronts += max(Counter(w % BANKS for w in words).values())
    return SharedRequest(wavefronts, passes)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How often a thread-value layout reaches each element of a tile."""

    size: int
    missing: tuple[tuple[int, int], ...]
    repeated: tuple[tuple[int, int], ...]
    most: int

    @property
    def exact(self) -> bool:
        """Every element exactly once."""
        return not self.missing and not self.repeated


def owners(tv: AnyLayout, tiler: tuple[int, int]) -> list[tuple[tuple[int, int], ...]]:
    """For each element of the tile, by column-major index, the (thread, value) pairs that own it.

    ``tv`` maps (thread, value) to the index in a tile of ``tiler`` (rows, columns). Raises ``ValueError``
    where ``tv`` has not two modes or points past the tile, naming the thread and the value, and where either has
    more than ``MOST_COORDINATES``.
    """
    threads, index = indices(tv, tiler)
    found: list[tuple[tuple[int, int], ...]] = [()] * (tiler[0] * tiler[1])
    for i, element in enumerate(index):
        found[element] += ((i % threads, i // threads),)
    return found


def indices(tv: AnyLayout, tiler: tuple[int, int]) -> tuple[int, list[int]]:
    """(how many threads there are, the index of each thread's first value, of each one's second, ...).

    Raises ``ValueError`` as ``owners`` does.
    """
    modes = ints.as_tuple(tv.shape)
    if len(modes) != 2:
        raise ValueError(f"a thread-value layout has two modes (threads, values), {tv} has {len(modes)}")
    rows, columns = tiler
    ints.at_least(1, rows=rows, columns=columns)
    check_enumerable(f"the {rows} x {columns} tile", rows * columns)
    threads, found = ints.product(modes[0]), tv.offsets()
    if max(found) >= rows * columns:
        i, index = next((i, index) for i, index in enumerate(found) if index >= rows * columns)
        raise ValueError(
            f"thread {i % threads} value {i // threads} of {tv} is at index {index}, past the "
            f"{rows * columns} elements of the {rows} x {columns} tile"
        )
    return threads, found


def coverage(tv: AnyLayout, tiler: tuple[int, int]) -> Coverage:
    """Which (row, column) of the tile no thread owns, and which more than one; see ``owners``."""
    rows = tiler[0]
    _, found = indices(tv, tiler)
    counts = [0] * (rows * tiler[1])
    for index in found:
        counts[index] += 1
    place = [(i % rows, i // rows) for i in range(len(counts))]
    return Coverage(
        len(counts),
        tuple(p for p, n in zip(place, counts, strict=True) if n == 0),
        tuple(p for p, n in zip(place, counts, strict=True) if n > 1),
        max(counts),
    )


@dataclass(frozen=True, slots=True)
class CopyRequest:
    """One warp's instruction within a copy: its first value, and each lane's byte address."""

    warp: int
    value: int
    addresses: tuple[int, ...]


def copy_requests(
    tv: AnyLayout, tiler: tuple[int, int], memory: AnyLayout, element_bytes: int, vector: int, base: int = 0
) -> Iterator[CopyRequest]:
    """The requests of a tiled copy whose threads move ``vector`` elements at a time.

    ``memory`` maps (row, column) of the tile to an offset in elements, ``base`` is the byte address of
    offset 0. Raises ``ValueError``, naming thread and value, where a vector's elements are not side by side
    in memory or its address is not aligned to its width, and where ``memory`` is smaller than the tile.
    """
    ints.at_least(1, element_bytes=element_bytes, vector=vector)
    ints.at_least(0, base=base)
    held = [ints.product(mode) for mode in ints.as_tuple(memory.shape)]
    if len(held) != 2 or any(n < size for n, size in zip(held, tiler, strict=True)):
        raise ValueError(
            f"memory {memory} has {' x '.join(map(str, held))} elements, the tile {tiler[0]} x {tiler[1]}"
        )
    rows = tiler[0]
    threads, index = indices(tv, tiler)
    values = len(index) // threads
    width = vector * element_bytes
    if values % vector:
        raise ValueError(f"a thread has {values} values, which are no whole number of vectors of {vector}")
    if held[0] * held[1] <= 2 * len(index):
        offsets = memory.offsets()
        where = {i: offsets[i % rows + i // rows * held[0]] for i in set(index)}
    else:
        where = {i: memory((i % rows, i // rows)) for i in set(index)}
    for value in range(0, values, vector):
        for warp in range(-(-threads // WARP)):
            addresses = []
            for thread in range(warp * WARP, min(threads, (warp + 1) * WARP)):
                offsets = [where[index[(value + v) * threads + thread]] for v in range(vector)]
                if offsets != list(range(offsets[0], offsets[0] + vector)):
                    raise ValueError(
                        f"thread {thread}, values {value}..{value + vector - 1}: the elements of one "
                        f"vector lie at offsets {offsets}, not side by side"
                    )
                address = base + offsets[0] * element_bytes
                if address % width:
                    raise ValueError(
                        f"thread {thread}, value {value}: byte address {address} is not aligned to the "
                        f"{width}-byte access"
                    )
                addresses.append(address)
            yield CopyRequest(warp, value, tuple(addresses))


@dataclass(frozen=True, slots=True)
class CopyReport:
    """A tiled copy's requests added up, as a profiler would count them on one tile.

    ``sectors`` and ``lines`` for global memory, ``wavefronts`` and ``conflicts`` for shared memory, with
    the ideal for as many bytes; ``coverage`` of the tile.
    """

    space: str
    requests: int
    width: int
    bytes: int
    coverage: Coverage
    sectors: int = 0
    lines: int = 0
    wavefronts: int = 0
    ideal: int = 0

    @property
    def conflicts(self) -> int:
        """Shared memory: wavefronts beyond the ideal."""
        return self.wavefronts - self.ideal if self.space == "shared" else 0

    @property
    def efficiency(self) -> float:
        """Ideal over actual traffic: 1.0 is perfect."""
        return self.ideal / (self.sectors if self.space == "global" else self.wavefronts)

    def lines_of_text(self) -> list[str]:
        """The report as a person would read it."""
        c = self.coverage
        if c.exact:
            told = f"coverage   all {c.size:,} elements exactly once"
        else:
            told = (
                f"coverage   {len(c.missing):,} of {c.size:,} elements missed, {len(c.repeated):,} repeated"
            )
            if c.missing:
                told += f"; first missed {c.missing[0]}"
            if c.repeated:
                told += f"; first repeated {c.repeated[0]}, at most {c.most} times"
        out = [told, f"requests   {self.requests:,} ({self.width} bytes a lane, {self.bytes:,} bytes in all)"]
        if self.space == "global":
            out.append(
                f"sectors    {self.sectors:,} of 32 bytes in {self.lines:,} line visits; ideal {self.ideal:,}"
            )
        else:
            out.append(
                f"wavefronts {self.wavefronts:,}; ideal {self.ideal:,}; bank conflicts {self.conflicts:,}"
            )
        out.append(f"efficiency {self.efficiency:.0%}")
        return out


def check_copy(
    tv: AnyLayout,
    tiler: tuple[int, int],
    memory: AnyLayout | None = None,
    *,
    element_bytes: int,
    vector: int,
    space: str = "global",
    base: int = 0,
) -> CopyReport:
    """Coverage and traffic of one tiled copy; ``memory`` defaults to the row-major tile. See
    ``copy_requests``."""
    if space not in ("global", "shared"):
        raise ValueError(f"space must be 'global' or 'shared', got {space!r}")
    memory = memory or Layout(tiler, (tiler[1], 1))
    width = vector * element_bytes
    found = [r.addresses for r in copy_requests(tv, tiler, memory, element_bytes, vector, base)]
    totals = {"requests": len(found), "width": width, "bytes": sum(map(len, found)) * width}
    if space == "global":
        each = [global_request(a, width) for a in found]
        traffic = {
            "sectors": sum(r.sectors for r in each),
            "lines": sum(r.lines for r in each),
            "ideal": sum(r.ideal_sectors for r in each),
        }
    else:
        each = [shared_request(a, width) for a in found]
        traffic = {"wavefronts": sum(r.wavefronts for r in each), "ideal": sum(r.ideal for r in each)}
    return CopyReport(space, coverage=coverage(tv, tiler), **totals, **traffic)
