"""The way of one group through the column and split movements, as steps for the explorer."""

from __future__ import annotations

import re

from layouts.figures import Facts
from layouts.html import Step

from .panel_view import View


def walk(view: View) -> list[Step]:
    """The steps of the explorer: the first group of the first panel on its way; those of figures that a Plan does not
    have are left out."""
    c = view.kernel

    def first(facts: Facts) -> bool:
        """The first group: column 0, or where a CTA has one group all there is."""
        if view.flat:
            return facts.coordinate.startswith("(0, ")
        return re.match(r"\(\d+, 0\b", facts.coordinate) is not None

    def of_first(facts: Facts) -> bool:
        """A slot of the first group: its column is 0."""
        return "column 0" in facts.coordinate

    steps = [
        Step(
            "Which vectors exist",
            "Each thread compares how much of the group is left with the place of each of its vectors. What does not "
            "exist is not loaded; its slot holds padding that changes no result.",
            "predicate",
            lambda facts: facts.role == "loaded",
        ),
        Step(
            "Global memory to shared memory",
            "Each thread starts asynchronous copies (cp.async) of all its vectors into its own slots: neighbouring "
            "threads take neighbouring addresses.",
            "tile",
            first,
        ),
        Step(
            "Shared memory to registers",
            "When its own copies have arrived each thread reads its slots back, once for each stage.",
            "smem",
            first,
        ),
    ]  # fmt: skip
    for what, stage in view.exchanges:
        turn = f" ({stage + 1} of {len(view.exchanges)})" if len(view.exchanges) > 1 else ""
        shuffles = [
            Step(
                f"Shuffles{turn}",
                f"Each thread has reduced what it holds to one partial result: {what}. Lanes with the same "
                "groups merge theirs.",
                "shuffle",
                lambda facts: True,
            )
        ]
        steps += [
            *([] if c.aligned else shuffles),
            Step(
                f"Reduction buffer{turn}",
                f"Each {'thread' if c.aligned else 'warp'} writes its partial result; after a barrier one thread a "
                "column merges those of all.",
                "reduction_buffer",
                lambda facts, stage=stage: of_first(facts) and facts.space.endswith(f"stage {stage}"),
            ),
        ]
    if c.trips == 2:
        steps += [
            Step(
                "To the CTA that merges a column",
                "Each CTA has columns of its own to merge: one thread a column stores the CTA's state into the one "
                "that has this column.",
                "cluster",
                lambda facts: facts.role == "first trip" and of_first(facts),
            ),
            Step(
                "Back into every CTA of the cluster",
                "Neighbouring lanes there merge the states of all CTAs by shuffles, and each of them stores the result "
                "into one CTA.",
                "cluster",
                lambda facts: facts.role == "second trip" and of_first(facts),
            ),
        ]
    else:
        steps.append(
            Step(
                "Into every CTA of the cluster",
                "One thread a column stores the CTA's state into all CTAs; each merges what it has received.",
                "cluster",
                lambda facts: facts.role in ("sender", "receiver", "barrier"),
            )
        )
    waits = bool(c.facts.outputs)
    steps += [
        Step(
            "Count in",
            "Having written its states, the CTA counts itself in"
            + (" and waits for the others, but not for ever." if waits else "."),
            "exchange",
            lambda facts: facts.role == "word",
        ),
        Step(
            "Merge the parts",
            f"In {'every CTA' if waits else 'the last CTA to arrive'} the threads of a column merge the states of all "
            "parts, in a fixed order.",
            "exchange",
            lambda facts: facts.role in ("published", "merged") and of_first(facts),
        ),
    ]
    stored = (
        "Each thread turns the values in its slots into results and stores them at the same coordinates."
        if waits
        else "The first thread of each group stores its result."
    )
    return [*steps, Step("Results to global memory", stored, "tile", first)]
