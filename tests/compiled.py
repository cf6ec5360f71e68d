"""What can be read off a compiled kernel without a GPU: registers, stack, shared memory, accesses, layouts."""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from traced import trace, wrong

from cute_softmax.plan import PanelClass, RowClass
from cute_softmax.plan.hardware import ARCHITECTURES
from cute_softmax.plan.topk import TopkClass
from cute_softmax.runtime.compile import compile_class
from cute_softmax.runtime.resources import cuobjdump
from layouts.trace import Value, observing

PROGRAMMATIC = "6"  # cudaLaunchAttributeProgrammaticStreamSerialization


class Compiled(NamedTuple):
    """What can be read off a compiled kernel; if only its PTX was asked for, nothing of its machine code."""

    registers: int | None
    stack: int | None
    local: int | None
    threads: tuple[int, ...] | None
    min_blocks: int | None
    shared: int  # dynamic, in bytes
    cluster: int
    ptx: str
    layouts: dict[str, Value]  # as the kernel has them


def compile_and_read(c: RowClass | PanelClass, folder: Path, monkeypatch, to_run: bool = False) -> Compiled:
    """What the class compiles to: once in a run, for all tests that ask for it.

    folder: of the test, for what the compiler leaves. to_run: only the PTX is asked for.
    """
    kept = kept_in(folder, c)
    if to_run and not kept.exists():
        kept = kept.with_suffix(".ptx")
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        written = kept.with_suffix(f"{kept.suffix}.{os.getpid()}")
        written.write_bytes(pickle.dumps(compile_anew(c, folder, monkeypatch, to_run)))
        written.replace(kept)
    return pickle.loads(kept.read_bytes())


def kept_in(folder: Path, c: RowClass | PanelClass) -> Path:
    """The file of what was read off a class, beside the folders of all workers' tests."""
    run = next((parent for parent in folder.parents if parent.name.startswith("pytest-")), folder.parent)
    return run / "compiled" / hashlib.sha256(repr(c).encode()).hexdigest()


def of_run(c: RowClass | PanelClass, folder: Path) -> Path | None:
    """The file of a class that some test of this run has compiled, be it only to run it."""
    kept = kept_in(folder, c)
    return next((file for file in (kept, kept.with_suffix(".ptx")) if file.exists()), None)


def layouts_of(c: RowClass | PanelClass, folder: Path) -> dict[str, Value]:
    """What the kernel of a class tells: of one that was compiled in this run what it told then."""
    kept = of_run(c, folder)
    return pickle.loads(kept.read_bytes()).layouts if kept else trace(c)


def compile_anew(c: RowClass | PanelClass, folder: Path, monkeypatch, to_run: bool = False) -> Compiled:
    """The same, however often it has been compiled.

    As where the architecture is another machine's: without the engine that would run it, a fifth of the time. Only to
    run its PTX, which is the same, the machine code is not optimized, a quarter of what is left: it is not read.
    """
    from cutlass.cutlass_dsl import CuTeDSL

    monkeypatch.setenv("CUTE_DSL_ARCH", c.architecture)
    monkeypatch.setattr(CuTeDSL, "_runtime_can_run_compiled", lambda *_: False)
    with observing() as layouts:
        level = "--opt-level 0 " if to_run else ""
        function = compile_class(c, f"{level}--keep-ptx --keep-cubin --dump-dir={folder}")
    cubin, ptx = folder / "kernel.cubin", function.__ptx__
    on_host = host_code(function)
    check_launches(
        ptx,
        on_host,
        c.early,
        twice=isinstance(c, RowClass | PanelClass),
        silent=isinstance(c, RowClass) and c.cluster_n > 1 and not c.persistent,
        later=isinstance(c, TopkClass) and c.forward,
    )
    launched = launch_of(on_host)
    if to_run:
        return Compiled(None, None, None, None, None, *launched, ptx, layouts)
    cubin.write_bytes(function.__cubin__)
    done = subprocess.run([cuobjdump(), "-res-usage", str(cubin)], capture_output=True, text=True, check=True)
    # Of several kernels the one that takes the most: the others wait, and do no more.
    usage = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout + done.stderr)
    registers, stack, local = max(tuple(map(int, found)) for found in usage)
    threads = max(tuple(map(int, found)) for found in re.findall(r"\.reqntid (\d+), (\d+), (\d+)", ptx))
    blocks = re.search(r"\.minnctapersm (\d+)", ptx)
    return Compiled(
        registers, stack, local, threads, int(blocks[1]) if blocks else 0, *launched, ptx, layouts
    )


def check_compiled(c: RowClass | PanelClass, found: Compiled, stack: int, padding: int = 0):
    """What holds for every compiled class. stack: bytes that it may use; padding: of shared memory at most."""
    arch = ARCHITECTURES[c.architecture]
    assert found.local == 0 and found.stack <= stack, f"{found.stack} bytes of stack"
    assert found.threads == (c.threads, 1, 1) and found.min_blocks == c.min_blocks
    registers = -(-found.registers // 8) * 8  # as they are given to warps
    assert registers * c.threads * max(c.min_blocks, 1) <= arch.registers, f"{found.registers} registers"
    assert found.shared <= c.shared_memory <= found.shared + padding, f"{found.shared} of {c.shared_memory}"
    assert c.shared_memory <= arch.shared_memory and found.cluster == c.cluster_n
    assert f".target {c.architecture}" in found.ptx
    assert not wrong(c, found.layouts), wrong(c, found.layouts)


def touches_before_it_waits(kernel: str, twice: bool = False) -> bool:
    """Whether a way through a kernel's PTX leads to global memory before it waits for what precedes the kernel.

    Where a branch decides whether to wait, as the number of CTAs does, both ways count as if they did. twice: but not
    one that leads to another wait, as the number of CTAs decides at which of the two it waits."""
    blocks, labels = [[]], {}
    for line in kernel[kernel.index("{") :].split("\n"):
        text = line.strip()
        if label := re.match(r"(\$L\w+):", text):
            blocks.append([])
            labels[label[1]] = len(blocks) - 1
        elif text:
            blocks[-1].append(text)
            if re.match(r"(@!?%p\d+\s+)?bra", text):
                blocks.append([])

    def after(i: int) -> list[int]:
        """The blocks that may follow."""
        last = blocks[i][-1] if blocks[i] else ""
        jump = re.match(r"(@!?%p\d+\s+)?bra(?:\.uni)?\s+(\$L\w+)", last)
        found = [labels[jump[2]]] if jump else []
        goes_on = not (jump and not jump[1]) and not last.startswith(("ret", "exit", "trap"))
        return found + [i + 1] * (goes_on and i + 1 < len(blocks))

    def reached(i: int) -> set[int]:
        """The blocks that may come from block i on."""
        found, new = set(), [i]
        while new:
            if (block := new.pop()) not in found:
                found.add(block)
                new += after(block)
        return found

    waits = {i for i, block in enumerate(blocks) if any("griddepcontrol.wait" in line for line in block)}
    seen, left = set(), [0]
    while left:
        i = left.pop()
        if i in seen:
            continue
        seen.add(i)
        for line in blocks[i]:
            if "griddepcontrol.wait" in line:
                break
            if re.search(r"\b(ld|st|red|atom)\.[\w.:]*global|\bcp\.async", line):
                return True
        if i not in waits:
            follow = after(i)
            here = not waits.isdisjoint(follow)
            left += [f for f in follow if not here or (twice and f not in waits and reached(f) & waits)]
    return False


def check_launches(ptx: str, body: str, early: bool, *, twice: bool, silent: bool, later: bool):
    """Each kernel that may be launched early waits for what precedes it, in all its roles, before it touches global
    memory; then the next may begin. The number of CTAs decides about it, if it is not one. body: see `host_code`;
    twice: see `touches_before_it_waits`; silent: whether a grid of so many CTAs that the first of its waits is theirs
    lets none begin; later: whether the number of CTAs decides when the next may begin, too."""
    from cute_softmax.kernels.common.early import MOST_CTAS

    for kernel in ptx.split(".entry ")[1:]:
        name = kernel.split("(")[0]
        told = re.findall(r"griddepcontrol\.(\w+)", kernel)
        if silent:
            told = [word for word, then in zip_longest(told, told[1:]) if not word == then == "wait"]
        once = ["wait", *["launch_dependents"] * (1 + later)]
        assert told == once * (len(told) // len(once)) and bool(told) == early, name
        assert not early or not touches_before_it_waits(kernel, twice), (
            f"{name} touches memory before it waits"
        )
    # Attributes of launches are pairs of a name and a number, which is stored in field 2 of a union.
    constants = dict(re.findall(r"(%\d+) = llvm.mlir.constant\((\d+) : i32\)", body))
    stored = r"llvm\.store (%\d+), %\d+ : i32, !llvm\.ptr"
    attributes = re.findall(rf"{stored}\n.*\[0, 2\].*\n *{stored}", body)
    allowed = [constants.get(value) for name, value in attributes if constants.get(name) == PROGRAMMATIC]
    assert allowed and all((value != "0") == early for value in allowed), allowed
    assert None not in allowed or f"constant({MOST_CTAS} : i64)" in body


def check_all(classes: Iterable, check: Callable):
    """Check each class, all of them, so that one failure shows how many there are."""
    failed = []
    for c in dict.fromkeys(classes):
        try:
            check(c)
        except AssertionError as error:
            told = " ".join(str(error).split("\n")[:2])
            failed.append(f"{c.architecture} {c.math} {'/'.join(c.dtypes)} {c.name}: {told}")
    assert not failed, "\n".join(["", *failed])


def host_code(function) -> str:
    """What a compiled function does on the host, in LLVM's dialect."""
    return str(function.ir_module).split("llvm.func @cutlass___call__", 1)[1].split("\n  llvm.func", 1)[0]


def launch_of(body: str) -> tuple[int, int]:
    """(bytes of dynamic shared memory, CTAs of a cluster) that the host code asks of CUDA: of several launches, those
    of the one that takes the most.

    They are fields of the launch configuration that it fills in: (grid[3], block[3], bytes, stream, ...), and of an
    attribute of three numbers. body: see `host_code`.
    """

    def stored(struct: str, launch: str) -> dict[str, int | None]:
        """field -> the constant that is stored there first."""
        fields = {}
        for name, field in re.findall(
            rf"(%\d+) = llvm.getelementptr %\d+\[0, ([\d, ]+)\] .*{struct}", launch
        ):
            value = re.search(rf"llvm.store (%\d+), {name} ", body)
            value = value and re.search(
                rf"^ *{value[1]} = llvm.mlir.constant\((\d+) : i\d+\)", body, re.MULTILINE
            )
            fields.setdefault(field, int(value[1]) if value else None)
        return fields

    return max(
        (
            stored("array<3 x i32>", launch)["2"],
            math.prod(stored(r"struct<\(i32, i32, i32\)>", launch).values()),
        )
        for launch in body.split("@_cudaLaunchKernelEx")[:-1]
    )


def accesses(ptx: str) -> Counter:
    """How many global loads, stores and asynchronous copies of how many bytes there are."""
    found = Counter()
    for operation, suffix in re.findall(r"\b(ld|st)\.global((?:\.[\w:]+)*) ", ptx):
        lanes, bits = re.search(r"(?:\.v(\d))?\.[bufs](\d+)$", suffix).groups()
        found[f"{operation} {int(lanes or 1) * int(bits) // 8}"] += 1
    for size in re.findall(r"cp\.async\.c[ag]\.[\w.:]+ \[%?\w+\], \[%?\w+\], (\d+)", ptx):
        found[f"cp.async {size}"] += 1
    return found
