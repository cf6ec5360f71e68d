"""The way of one row through a row-reducing kernel, as steps for the explorer."""

from __future__ import annotations

from .figures.scene import Facts
from .html import Step


def row_walk(
    row: int,
    *,
    tile: str,
    predicate: str = "",
    shuffle: str = "",
    buffer: str = "",
    cluster: str = "",
    output: str = "",
    cta: int = 0,
    warp: int = 0,
) -> list[Step]:
    """Steps for one row of the tile, from global memory to the output.

    Each argument is the name of a figure on the page (of ``thread_value``, ``predicate_tensor``,
    ``warp_shuffle``, ``reduction_buffer``, ``cluster_exchange``); what is left out has no step. ``row`` is
    both the row of the tile and the row of the reduction buffer, as where one warp or more share a row;
    ``cta`` and ``warp`` are those whose store the cluster's figure draws.
    """

    def in_tile(facts: Facts) -> bool:
        return facts.coordinate.startswith(f"({row}, ")

    def in_buffer(facts: Facts) -> bool:
        return facts.coordinate.startswith(f"(row {row}, ")

    def storing(facts: Facts) -> bool:
        slot = f"written by warp {warp} of CTA {cta},"
        return facts.note.startswith(("st.async", slot)) or facts.space.startswith("mbarrier")

    steps = []
    if predicate:
        steps.append(
            Step(
                "Which vectors exist",
                "Each thread compares the first column of each of its vectors with the row's length, "
                "once for all "
                "rows. Vectors past the end are not loaded; their registers are filled with -inf.",
                predicate,
                in_tile,
            )
        )
    steps += [
        Step(
            "Global memory to registers",
            f"The threads of row {row} load its vectors; neighbouring threads take neighbouring "
            "addresses, so that "
            "a warp's request is whole 128-byte lines.",
            tile,
            in_tile,
        ),
        Step(
            "In registers",
            "Each thread reduces the values it holds to one partial result: the maximum, and the sum of "
            "exponentials relative to it.",
            tile,
            in_tile,
        ),
    ]
    if shuffle:
        steps.append(
            Step(
                "Shuffles",
                "The lanes of a warp exchange partial results, in one round per power of two, until "
                "every lane holds "
                "the warp's.",
                shuffle,
                lambda facts: facts.note.startswith(("round", "its own")),
            )
        )
    if cluster:
        steps.append(
            Step(
                "Into every CTA of the cluster",
                "Lane i of each warp stores the warp's partial result into the shared memory of CTA i "
                "and adds its "
                "bytes to that CTA's mbarrier.",
                cluster,
                storing,
            )
        )
    if buffer:
        how = "the mbarrier has counted all bytes" if cluster else "all warps have passed the barrier"
        written = "The partial results of all warps of the row now lie side by side"
        steps.append(
            Step(
                "Reduction buffer",
                f"{written}. When {how}, lane i of each warp of the row reads slot i, and one more round "
                "of shuffles "
                "gives every thread the row's result.",
                buffer,
                in_buffer,
            )
        )
    steps.append(
        Step(
            "Registers to the output",
            "Each thread turns the values that it still holds in registers into the result and stores "
            "them where it "
            "loaded from: the row has been read once and is written once.",
            output or tile,
            in_tile,
        )
    )
    return steps
