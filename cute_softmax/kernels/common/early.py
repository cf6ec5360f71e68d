"""Programmatic dependent launch: a kernel is launched while what precedes it in its stream still runs, prepares what
does not depend on it, and waits for its end before it touches global memory.

Only then the next kernel may begin in the same way, as soon as all CTAs have come so far and an SM has room. So each
sees what it would see if they ran one after another, and at most two overlap.
"""

from typing import Any

import cutlass.cute as cute

from ...plan.hardware import ARCHITECTURES


def begins_early(spec: Any) -> bool:
    """Whether the kernel of a Plan class is launched so."""
    return ARCHITECTURES[spec.architecture].early


def wait_for_stream(spec: Any) -> None:
    """Wait until all that precedes this kernel has ended and its results can be seen; then let the next one begin."""
    if begins_early(spec):
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
