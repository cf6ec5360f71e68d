"""What the checks of all movements share: who has which element, and what requests to memory cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from layouts import Layout, access
from layouts.figures.scene import count

from ...plan import WARP
from ...plan.base import ClassBase
from .report import Traffic

MAX_PHASES = 64  # rows or panels looked at: more than there are ways to lie off a vector boundary


def uncovered(what: str, tv: Layout, tiler: tuple[int, int]) -> list[str]:
    """What is wrong with a tile's thread-value layout; empty if each element has one thread."""
    found = access.coverage(tv, tiler)
    if found.exact:
        return []
    several = len(found.repeated)
    return [f"{what}: {len(found.missing)} elements have no thread and {several} have several"]


def unshared(
    held: Sequence[range],
    head: int,
    body: int,
    length: int,
    *,
    unit: int,
    tile: int | None,
    slots: int,
    line: int,
) -> list[str]:
    """What is wrong with how CTAs share a group of `length` elements, of which `body` in whole vectors of `unit` come
    behind a `head`; empty if each has one CTA or thread.

    held: the elements that each CTA takes of the body; tile: how many it has room for, None for any; slots: of
    scalars, the first `line` - 1 for the head, the others for the tail.
    """
    taken = [(elements.start, elements.stop) for elements in held if elements]
    for cta, elements in enumerate(held):
        if tile is not None and len(elements) > tile:
            return [f"CTA {cta} takes {len(elements)} elements and its tile has {tile}"]
        if len(elements) % unit:
            return [f"CTA {cta} takes {len(elements)} elements, not whole vectors of {unit}"]
    for slot in range(slots):
        after = head + body + slot - (line - 1)
        if slot < head:
            taken.append((slot, slot + 1))
        elif slot >= line - 1 and after < length:
            taken.append((after, after + 1))
    end = 0
    for start, stop in sorted(taken):
        if start != end:
            return [f"elements {min(start, end)} to {max(start, end)} are taken twice or never"]
        end = stop
    return [] if end == length else [f"taken up to element {end} of {length}"]


def traffic(
    c: ClassBase, requests: Callable[[int], Iterable[access.Lanes]], problems: list[str]
) -> Iterator[Traffic]:
    """The requests of each full operand, by its index; accesses that are not aligned are added to `problems`."""
    for operand, name in enumerate((*c.facts.inputs, *c.facts.outputs)):
        width = c.access_bytes(operand)
        if not width:
            continue  # one element a group
        try:
            yield Traffic.of(name, width, requests(operand))
        except ValueError as error:
            problems.append(f"{name}: {error}")


def requests_of(
    elements: Sequence[int | None], item: int, vector: int = 1, width: int = 1
) -> Iterator[list[int | None]]:
    """The byte addresses of each request of warps whose threads move a vector of elements of `item` bytes, `width` of
    them at a time; elements: each thread's first one, None where it moves nothing."""
    for first in range(0, len(elements), WARP):
        lanes = elements[first : first + WARP]
        if any(e is not None for e in lanes):
            for part in range(0, vector, width):
                yield [None if e is None else (e + part) * item for e in lanes]


def wavefronts(requests: Iterable[access.Lanes], width: int, each: str = "a lane") -> str:
    """What requests to shared memory cost, in words."""
    found = [access.shared_request(lanes, width) for lanes in requests]
    total, conflicts = sum(r.wavefronts for r in found), sum(r.conflicts for r in found)
    a_request = f"{total / len(found):.4g} wavefront{'s' * (total != len(found))}"
    return f"{width} bytes {each}, {a_request} a request, {count(conflicts, 'bank conflict')}"
