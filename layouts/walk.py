"""The way of one row through a row-reducing kernel, as steps for the explorer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from .figures.scene import Facts
from .html import Step


def row_walk(
    row: int,
    *,
    tile: str,
    predicate: str = "",
    pieces: str = "",
    staged: str = "",
    shuffle: str = "",
    buffer: str = "",
    cluster: str = "",
    output: str = "",
    end: int | None = None,
    exchanges: Sequence[tuple[str, int]] = (("the maximum, and the sum of exponentials relative to it", 0),),
) -> list[Step]:
    """Steps for one row of the tile, from global memory to the output.

    Each argument is the name of a figure on the page (of ``thread_value``, ``predicate_tensor``,
    ``row_pieces``, ``thread_value`` of shared memory that loads pass through, ``warp_shuffle``,
    ``reduction_buffer``, ``cluster_exchange``); what is left out has no step. ``row`` is both the row of the
    tile and the row of the reduction buffer, as where one warp or more share a row. The row has ``end`` columns
    of the tile (all, if left out). ``exchanges`` names what each reduction merges, and the stage of the buffer that
    it goes through.
    """

    def in_tile(facts: Facts) -> bool:
        place = re.match(r"\((\d+), (\d+)", facts.coordinate)
        return bool(place) and int(place[1]) == row and (end is None or int(place[2]) < end)

    def in_row(facts: Facts) -> bool:
        return facts.coordinate.startswith(f"({row}, ")

    def in_buffer(stage: int) -> Callable[[Facts], bool]:
        start, stop = f"(row {row}, ", f", stage {stage})"
        return lambda facts: facts.coordinate.startswith(start) and facts.coordinate.endswith(stop)

    def storing(stage: int) -> Callable[[Facts], bool]:
        return lambda facts: facts.role in ("sender", "receiver", f"barrier {stage}")

    together = "neighbouring threads take neighbouring addresses, in unbroken runs of memory."
    steps = [
        Step(
            "Head, body and tail",
            "The row does not begin or end on a vector boundary. The scalars before the first boundary "
            "and after the last go one by one to the row's first threads; all between is whole vectors.",
            pieces,
            in_row,
        ),
        Step(
            "Which vectors exist",
            "Each thread compares the first column of each of its vectors with the end of the row: one "
            "bit per vector, not per element. Vectors past the end are not loaded; their registers hold "
            "padding that changes no result.",
            predicate,
            in_row,
        ),
        Step(
            "Global memory to shared memory" if staged else "Global memory to registers",
            f"The threads of row {row} {'start asynchronous copies of' if staged else 'load'} its vectors: {together}",
            tile,
            in_tile,
        ),
        Step(
            "Shared memory to registers",
            "When they have arrived, each thread reads back the vectors that it copied itself, so that "
            "no barrier between threads is needed.",
            staged,
            in_tile,
        ),
    ]
    how = "the mbarrier has counted all bytes" if cluster else "all warps have passed the barrier"
    for i, (what, stage) in enumerate(exchanges):
        count = f" ({i + 1} of {len(exchanges)})" if len(exchanges) > 1 else ""
        later = f" The slots drawn are of stage 0; those of stage {stage} follow." if stage else ""
        steps += [
            Step(
                f"In registers{count}",
                f"Each thread reduces the values that it holds to one partial result: {what}.",
                staged or tile,
                in_tile,
            ),
            Step(
                f"Shuffles{count}",
                "The lanes that share the row exchange partial results, in one round per power of two, "
                "until each of them holds the warp's.",
                shuffle,
                lambda facts: True,
            ),
            Step(
                f"Into every CTA of the cluster{count}",
                "Lane i of each warp stores the warp's partial result into the shared memory of CTA i "
                f"and adds its bytes to that CTA's mbarrier.{later}",
                cluster,
                storing(stage),
            ),
            Step(
                f"Reduction buffer{count}",
                "The partial results of all warps of the row now lie side by side. When "
                f"{how}, the lanes of each warp of the row read them, lane i slots i, i + 32 and so on, "
                "and one more reduction by shuffles gives every thread the row's result.",
                buffer,
                in_buffer(stage),
            ),
        ]
    steps.append(
        Step(
            "Registers to the output",
            "Each thread turns the values that it still holds into the result and stores them at the same "
            "coordinates: the row has been read once and is written once.",
            output or tile,
            in_tile,
        )
    )
    return [step for step in steps if step.figure]
