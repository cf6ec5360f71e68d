"""Facts about GPU architectures and devices that decisions depend on. No torch, no cutlass, no GPU needed."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
SHARED_UNIT = 128  # bytes that shared memory is given out in


@dataclass(frozen=True)
class Architecture:
    """One compilation target. `cute_softmax.hardware.ARCHITECTURES` has the supported ones, by name.

    Source: CUDA C++ Programming Guide, "Technical specifications per compute capability".

    Args:
        name: The compiler's name for it, such as "sm_90a".
        shared_memory: Bytes available to one CTA.
        cluster_limit: CTAs of the largest cluster. 1: no clusters. Above 8 is not portable, but all architectures
            listed here with clusters allow it.
        registers: 32-bit registers of an SM; one CTA can have all of them.
        threads: The most threads of a CTA.
        early: Whether a kernel can be launched before what precedes it has ended (programmatic dependent launch).
    """

    name: str
    shared_memory: int
    cluster_limit: int
    registers: int = 65536  # 32-bit registers of an SM; a CTA can have all of them
    threads: int = 1024  # threads of a CTA
    early: bool = True

    def ctas_of(self, shared_memory: int) -> int:
        """How many CTAs with this many bytes each an SM has shared memory for; the system takes 1 KiB per CTA."""
        each = -(-shared_memory // SHARED_UNIT) * SHARED_UNIT + KIB
        return (self.shared_memory + KIB) // each


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_80", 163 * KIB, 1, early=False),
        Architecture("sm_86", 99 * KIB, 1, early=False),
        Architecture("sm_89", 99 * KIB, 1, early=False),
        Architecture("sm_90a", 227 * KIB, 16),
        Architecture("sm_100a", 227 * KIB, 16),
        Architecture("sm_103a", 227 * KIB, 16),
        Architecture("sm_120a", 99 * KIB, 8),
    )
}
_BY_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100a",
    (10, 3): "sm_103a",
    (12, 0): "sm_120a",
}


@dataclass(frozen=True)
class Device:
    """A GPU as plans see it, such as `cute_softmax.hardware.H200`.

    Args:
        architecture: The compilation target of its kernels.
        multiprocessors: The number of SMs.
        l2: Bytes of its L2 cache.
        table: The measured configurations that its plans use: the name of a shipped table, or the path of a file of
            your own.
        eights: Clusters of 8 CTAs, each on an SM of its own, that run at once. None: not known.

    Examples:
        >>> from cute_softmax import plan_softmax
        >>> from cute_softmax.hardware import ARCHITECTURES, Device
        >>> b200 = Device(ARCHITECTURES["sm_100a"], multiprocessors=148, l2=126 << 20)
        >>> plan_softmax((4096, 8192), device=b200).ctas
        4096
    """

    architecture: Architecture
    multiprocessors: int
    l2: int
    table: str = "h200"
    eights: int | None = None


H200 = Device(ARCHITECTURES["sm_90a"], multiprocessors=132, l2=60 << 20, eights=15)


def architecture_of(capability: tuple[int, int]) -> Architecture:
    """The target for a compute capability.

    Raises ValueError for GPUs that the CuTe DSL kernels here are not built for.
    """
    name = _BY_CAPABILITY.get(tuple(capability))
    if name is None:
        known = ", ".join(f"{a}.{b}" for a, b in _BY_CAPABILITY)
        raise ValueError(
            f"no kernels for compute capability {capability[0]}.{capability[1]}; supported: {known}"
        )
    return ARCHITECTURES[name]
