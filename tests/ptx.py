"""PTX run on the CPU: all threads of a grid at once, as NumPy arrays, so that kernels are tested where there is no GPU.

Of the instructions those that the kernels here use. Threads have program counters of their own; each step runs one
instruction for all that are furthest behind, so that the lanes of a warp meet again where they had parted. All CTAs run
at once, warps in step or, with a seed, some before others. What is asynchronous is seen when it has been waited for. So
what is found is an access outside of what was given, a misaligned one, a wait that is missing, and one without end.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial

import numpy as np
from ptx_numbers import BITS, NUMBERS, high_of_product, listed, literal, raw, rounded, typed, wider, width
from ptx_tensors import Groups, Tensors

WARP = 32
WAIT = 64  # steps that a thread rests that asks whether something has come
TOGETHER = {"shfl", "redux", "vote", "elect"}  # of the lanes of a warp that a mask names
MATRICES = {"ldmatrix", "stmatrix", "mma", "wgmma"}  # of all of them
TURN = 24  # steps that some warps run before others
BLOCK = 16  # bytes
BARRIERS = 16  # of a CTA
RANK = 24  # bit from which on an address of shared memory names a CTA of the cluster, counted from 1


@dataclass(frozen=True)
class Instruction:
    """guard: a predicate's register, "!" before it for its opposite, or "". name: with all its suffixes."""

    guard: str
    name: str
    operands: tuple[str, ...]
    text: str

    @cached_property
    def parts(self) -> list[str]:
        return self.name.split(".")


@dataclass
class Program:
    """A kernel: its threads a CTA, bytes of local memory of a thread, its code, and where labels stand in it."""

    threads: int
    local: int = 0
    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)


def parse(text: str, kernel: str = "") -> Program:
    """The one kernel of a module, or the one of several whose name says so."""
    (text,) = [part for part in text.split(".entry ")[1:] if kernel in part.split("(")[0]]
    program = Program(int(re.search(r"\.reqntid (\d+)", text)[1]))
    if local := re.search(r"\.local .*__local_depot\d+\[(\d+)\]", text):
        program.local = int(local[1])
    body = text[text.index("{") :]
    parts = enumerate(body.split("// begin inline asm"))
    body = re.sub(r"//.*", "", "".join(own_labels(number, part) for number, part in parts))
    # Statements end in a semicolon, labels in a colon. Braces are of scopes, unless they hold a vector.
    body = re.sub(r"\{(?=\s*(?:\.reg|\.param|[@a-zA-Z\n$]))|\}(?!\s*[,;]|\])", " ", body)
    pieces = re.split(r"(;|(?<!:):(?=\s))", body)
    for statement, end in zip(pieces[::2], pieces[1::2], strict=False):
        line = " ".join(statement.split())
        if end == ":":
            program.labels[line] = len(program.code)
            continue
        if not line or line.startswith((".reg", ".pragma", ".shared", ".local", ".param", ".loc")):
            continue
        found = re.fullmatch(r"(?:@(!?%?\w+) )?([a-z][\w.:]*)(?: (.*))?", line)
        if found is None:
            raise SyntaxError(f"no instruction: {line}")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[3] or "")
        program.code.append(Instruction(found[1] or "", found[2], tuple(operands), line))
    return program


def own_labels(number: int, part: str) -> str:
    """Inline assembly with labels that no other has: they are known within its braces."""
    asm, end, rest = part.partition("// end inline asm")
    for label in re.findall(r"^\s*(\w+):\s", asm, re.M) if end else ():
        asm = re.sub(rf"\b{label}\b", f"{label}__{number}", asm)
    return asm + end + rest


@lru_cache(maxsize=1024)
def alike(name: str, count: int, bits: int) -> np.ndarray:
    """The raw bits of an operand that is the same for so many threads, whatever has run before."""
    if name == "__dynamic_shmem__0" or name.startswith(("__local_depot", "printfFormat")):
        number = 0
    elif "_param_" in name:  # where it lies, of which only its number counts
        number = int(name.rpartition("_")[2])
    elif (number := literal(name)) is None:
        # A register that nobody has written: what is made of it counts for nothing.
        number = 0xA5A5A5A5A5A5A5A5
    found = np.full(count, number & ((1 << bits) - 1), BITS[bits])
    found.flags.writeable = False
    return found


class Trap(RuntimeError):
    """The kernel has found what it refuses."""


class Memory:
    """The host's memory, at so many bytes from some addresses on; what lies between belongs to nobody.

    Loads may begin and end anywhere in the 16 bytes that hold a byte of these, stores may not: a GPU's memory is given
    out in larger pieces.
    """

    def __init__(self, places: Iterable[tuple[int, int]]):
        exact = [(address, address + size) for address, size in places if size]
        self.exact = _merged(exact)
        rounded = _merged([(begin & -BLOCK, end + BLOCK - 1 & -BLOCK) for begin, end in exact])
        self.bases = np.array([begin for begin, _ in rounded], np.uint64)
        self.arrays = [
            np.ctypeslib.as_array((ctypes.c_ubyte * (end - begin)).from_address(begin))
            for begin, end in rounded
        ]

    def find(self, addresses: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each address (which array, where in it)."""
        which = np.searchsorted(self.bases, addresses, side="right").astype(np.int64) - 1
        if (which < 0).any():
            raise IndexError(f"nothing at {int(addresses[which < 0][0]):#x}")
        at = (addresses - self.bases[which]).astype(np.int64)
        room = np.array([a.size for a in self.arrays])[which]
        if (at + size > room).any():
            bad = int(np.argmax(at + size > room))
            raise IndexError(f"{size} bytes at {at[bad]} of an array of {room[bad]}")
        return which, at

    def load(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """(address, byte)."""
        aligned(addresses, size & -size)
        which, at = self.find(addresses, size)
        if len(which) and (which == which[0]).all():
            return self.arrays[which[0]][at[:, None] + np.arange(size)]
        out = np.empty((len(addresses), size), np.uint8)
        for w in np.unique(which):
            here = which == w
            out[here] = self.arrays[w][at[here, None] + np.arange(size)]
        return out

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        size = data.shape[1]
        aligned(addresses, size)
        which, at = self.find(addresses, size)
        inside = np.zeros(len(addresses), bool)
        for begin, end in self.exact:
            inside |= (addresses >= np.uint64(begin)) & (addresses + np.uint64(size) <= np.uint64(end))
        if not inside.all():
            raise IndexError(
                f"{size} bytes are stored at {int(addresses[~inside][0]):#x}, which is not given"
            )
        for w in np.unique(which):
            here = which == w
            self.arrays[w][at[here, None] + np.arange(size)] = data[here]


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same places, those that touch as one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            begin, end = found[-1][0], max(end, found.pop()[1])
        found.append((begin, end))
    return found


def aligned(addresses: np.ndarray, size: int) -> None:
    if (addresses % np.uint64(size) != 0).any():
        raise ValueError(f"{size} bytes at an address that is no multiple of them")


@dataclass
class Barrier:
    """An mbarrier: arrivals and bytes that its phase still waits for, and how many phases have ended."""

    count: int
    left: int
    bytes: int = 0
    phases: int = 0
    stores: list[Callable] = field(default_factory=list)

    def settle(self) -> None:
        """End the phase if nothing is left of it: what it waited for is there now."""
        if self.left == 0 and self.bytes == 0:
            self.left, self.phases = self.count, self.phases + 1
            for store in self.stores:
                store()
            self.stores.clear()


class Grid(Tensors):
    """One launch.

    grid, cluster: CTAs along x and y; shared: bytes of dynamic shared memory of a CTA; seed: of which warps run when.
    residue: what each byte of shared memory is before; by default numbers there are as large as there are.
    in_turn: a cluster begins when the one before has ended, as where there is room for one.
    ranks: as many launches at once, of GPUs that see each other's memory; each has its part of the grid along x.
    """

    def __init__(
        self,
        program: Program,
        memory: Memory,
        grid: tuple[int, int],
        cluster: tuple[int, int],
        shared: int,
        seed: int | None = None,
        ranks: int = 1,
        residue: int = 0x7F,
        in_turn: bool = False,
    ):
        self.program, self.memory, self.in_turn = program, memory, in_turn
        self.random = None if seed is None else np.random.default_rng(seed)
        ctas, threads = grid[0] * grid[1], program.threads
        self.count = T = ctas * threads
        self.thread = np.arange(T)
        self.cta = self.thread // threads
        self.warp = self.thread // threads * -(-threads // WARP) + self.thread % threads // WARP
        lanes, x, y = self.thread % threads, self.cta % grid[0], self.cta // grid[0]
        # The first CTA of each one's cluster, and from there the CTA of a rank.
        self.first = self.cta - x % cluster[0] - y % cluster[1] * grid[0]
        own = grid[0] // ranks
        self.launch = x // own
        rank = np.arange(cluster[0] * cluster[1])
        self.ranks = rank % cluster[0] + rank // cluster[0] * grid[0]
        self.special = {
            "%tid.x": lanes,
            "%laneid": lanes % WARP,
            "%ntid.x": np.full(T, threads),
            "%ctaid.x": x % own,
            "%ctaid.y": y,
            "%nctaid.x": np.full(T, own),
            "%nctaid.y": np.full(T, grid[1]),
            "%cluster_ctarank": x % cluster[0] + y % cluster[1] * cluster[0],
        }
        self.shared = np.full((ctas, shared), residue, np.uint8)
        self.local = np.full((T, program.local), 0xA5, np.uint8)
        self.registers: dict[str, np.ndarray] = {}
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.pc = np.zeros(T, np.int64)
        self.done = np.zeros(T, bool)
        self.rests = np.zeros(T, np.int64)  # until this step
        self.waiting: dict[tuple, list[np.ndarray]] = {}
        self.blocked = np.zeros(T, bool)
        self.said = np.zeros(T, bool)  # what a barrier counts
        self.cluster_arrived = np.zeros(T, np.int64)
        self.cluster_waited = np.zeros(T, np.int64)
        self.copies = Groups(T)
        self.begin_tensors()
        self.step = 0

    @np.errstate(all="ignore")
    def run(self, *parameters: Sequence[int], most: int = 2_000_000) -> None:
        """Until every thread has returned. parameters: of each launch, each as the number that its bits are, or as a
        TensorMap."""
        self.parameters = parameters
        code, labels, chosen = self.program.code, self.program.labels, np.ones(self.warp[-1] + 1, bool)
        while not self.done.all():
            self.step += 1
            if self.step > most:
                raise RuntimeError("the kernel does not end")
            awake = ~self.done & ~self.blocked
            ready = awake & (self.rests <= self.step)
            if not ready.any():
                if not awake.any():
                    raise RuntimeError("threads wait for each other without end")
                self.step = int(self.rests[awake].min())
                continue
            if self.in_turn:
                ready &= self.first == self.first[ready].min()
            if self.random is not None:
                if self.step % TURN == 1:
                    chosen = self.random.random(self.warp[-1] + 1) < 0.3
                if (ready & chosen[self.warp]).any():
                    ready &= chosen[self.warp]
            at = self.pc[ready].min()
            group = ready & (self.pc == at)
            idx = np.nonzero(group)[0]
            if code[at].parts[0] in ALONE:
                self.run_alone(idx, at, ready & ~group, awake & (self.rests > self.step))
                continue
            instruction = code[at]
            self.pc[idx] = at + 1
            if instruction.guard:
                idx = idx[self.predicate(instruction.guard, idx)]
            kind = instruction.parts[0]
            if kind in MATRICES or (kind in TOGETHER and instruction.operands[-1] == "-1"):
                idx = self.whole_warps(idx, at)
            if not len(idx):
                continue
            if kind == "bra":
                self.pc[idx] = labels[instruction.operands[0]]
            elif kind in ("ret", "exit"):
                self.done[idx] = True
            else:
                self.execute(instruction, idx)
        self.end_tensors()

    def run_alone(self, idx: np.ndarray, at: int, others: np.ndarray, resting: np.ndarray) -> None:
        """Threads' instructions from one on that no other thread has to do with, a step each: as far as no others meet
        them, wake up, or have their turn."""
        stop = self.pc[others].min(initial=len(self.program.code))
        wake = self.rests[resting].min(initial=1 << 62)
        while True:
            instruction = self.program.code[at]
            here = idx[self.predicate(instruction.guard, idx)] if instruction.guard else idx
            if len(here):
                self.execute(instruction, here)
            at, step = at + 1, self.step + 1
            turn = self.random is not None and step % TURN == 1
            if at >= stop or step >= wake or turn or self.program.code[at].parts[0] not in ALONE:
                break
            self.step = step
        self.pc[idx] = at

    def execute(self, instruction: Instruction, idx: np.ndarray) -> None:
        """One instruction of these threads."""
        kind = instruction.parts[0]
        try:
            if kind in BINARY:
                self._binary(instruction, idx, BINARY[kind])
            elif kind in UNARY:
                self._unary(instruction, idx, UNARY[kind])
            else:
                getattr(self, "_" + kind)(instruction, idx)
        except (IndexError, ValueError, KeyError, AttributeError) as error:
            raise type(error)(f"{instruction.text}: {error}") from error

    def whole_warps(self, idx: np.ndarray, at: int) -> np.ndarray:
        """Those whose whole warp is at this instruction, with those that rest there; the others come back to it when
        threads behind it, in whichever turn of a loop, have had time."""
        if len(resting := np.nonzero((self.pc == at) & ~self.done & ~self.blocked)[0]):
            idx = np.union1d(idx, resting)
        here, alive = (np.bincount(self.warp[t], minlength=self.warp[-1] + 1) for t in (idx, ~self.done))
        whole = (here == alive)[self.warp[idx]]
        self.pc[idx[whole]] = at + 1
        self.pc[idx[~whole]] = at
        self.rests[idx[~whole]] = self.step + WAIT
        return idx[whole]

    # Operands.

    def read(self, name: str, idx: np.ndarray, bits: int) -> np.ndarray:
        """The raw bits of an operand, one for each thread; not to be changed, as they may be the register itself."""
        held = self.registers.get(name)
        if held is None:
            held = self.special.get(name)
        if held is not None:
            # Of wider ones the lower bits. As many threads as there are are all of them, in their order.
            return (held if len(idx) == self.count else held[idx]).astype(BITS[bits], copy=False)
        if name in ("%globaltimer", "%clock64"):  # a step is a nanosecond
            return np.full(len(idx), self.step, BITS[bits])
        return alike(name, len(idx), bits)

    def write(self, name: str, idx: np.ndarray, value: np.ndarray) -> None:
        if name == "_":
            return
        held = self.registers.get(name)
        if held is None:
            held = self.registers[name] = np.zeros(self.count, value.dtype)
        elif held.itemsize < value.itemsize:
            held = self.registers[name] = held.astype(value.dtype)
        held[slice(None) if len(idx) == self.count else idx] = value

    def predicate(self, name: str, idx: np.ndarray) -> np.ndarray:
        held = self.registers.get(name.lstrip("!"))
        held = np.zeros(len(idx), bool) if held is None else held[idx]
        return ~held if name[0] == "!" else held

    def values(
        self, instruction: Instruction, idx: np.ndarray, count: int, kind: str, first: int = 1
    ) -> list:
        """So many operands as numbers of a type."""
        return [
            typed(self.read(o, idx, width(kind)), kind) for o in instruction.operands[first : first + count]
        ]

    def result(self, instruction: Instruction, idx: np.ndarray, value: np.ndarray, kind: str) -> None:
        self.write(instruction.operands[0], idx, raw(value, kind))

    # Arithmetic.

    def _binary(self, instruction: Instruction, idx: np.ndarray, function: Callable) -> None:
        kind = instruction.parts[-1]
        if kind == "pred":
            a, b = (self.predicate(o, idx) for o in instruction.operands[1:3])
            self.write(instruction.operands[0], idx, function(a, b))
            return
        self.result(instruction, idx, function(*self.values(instruction, idx, 2, kind)), kind)

    def _max(self, i, idx):
        self._extreme(i, idx, np.maximum, np.fmax)

    def _min(self, i, idx):
        self._extreme(i, idx, np.minimum, np.fmin)

    def _extreme(self, i, idx, nan, number):
        function = nan if "NaN" in i.parts or i.parts[-1][0] in "su" else number
        if "relu" in i.parts:
            self._binary(i, idx, lambda a, b: np.maximum(function(a, b), a.dtype.type(0)))
        else:
            self._binary(i, idx, function)

    def _mul(self, i, idx):
        kind = i.parts[-1]
        if "wide" in i.parts:
            a, b = (x.astype(wider(kind)) for x in self.values(i, idx, 2, kind))
            self.write(i.operands[0], idx, (a * b).view(np.uint64))
        elif "hi" in i.parts:
            a, b = self.values(i, idx, 2, kind)
            self.result(i, idx, high_of_product(a, b).astype(NUMBERS[kind]), kind)
        else:
            self._binary(i, idx, np.multiply)

    def _mad(self, i, idx):
        kind = i.parts[-1]
        a, b, c = self.values(i, idx, 3, kind)
        self.result(i, idx, a * b + c, kind)

    def _fma(self, i, idx):
        kind = i.parts[-1]
        a, b, c = (x.astype(np.float64) for x in self.values(i, idx, 3, kind))
        exact = a * b + c
        found = exact.astype(np.float32)
        if "rm" in i.parts:
            found = np.where(found > exact, np.nextafter(found, np.float32(-np.inf)), found)
        if "sat" in i.parts:
            found = np.where(np.isnan(found), np.float32(0), np.clip(found, np.float32(0), np.float32(1)))
        self.result(i, idx, found, kind)

    def _div(self, i, idx):
        kind = i.parts[-1]
        a, b = self.values(i, idx, 2, kind)
        quotient = a / b if kind[0] == "f" else np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))
        self.result(i, idx, quotient.astype(a.dtype) if kind != "u32" else a // b, kind)

    def _rem(self, i, idx):
        kind = i.parts[-1]
        a, b = self.values(i, idx, 2, kind)
        self.result(i, idx, np.fmod(a, b), kind)

    def _unary(self, i, idx, function):
        kind = i.parts[-1]
        value = function(self.values(i, idx, 1, kind)[0])
        if "ftz" in i.parts:
            value = np.where(np.abs(value) < np.finfo(np.float32).tiny, np.float32(0), value)
        self.result(i, idx, value, kind)

    def _not(self, i, idx):
        if i.parts[-1] == "pred":
            self.write(i.operands[0], idx, ~self.predicate(i.operands[1], idx))
        else:
            self._unary(i, idx, np.invert)

    def _popc(self, i, idx):
        value = self.read(i.operands[1], idx, int(i.parts[-1][1:])).astype(np.uint64)
        self.write(i.operands[0], idx, np.bitwise_count(value).astype(np.uint32))

    def _clz(self, i, idx):
        value = self.read(i.operands[1], idx, 32).astype(np.float64)  # exact
        self.write(i.operands[0], idx, (32 - np.frexp(value)[1]).astype(np.uint32))

    def _shl(self, i, idx):
        kind = i.parts[-1]
        a, by = self.values(i, idx, 1, kind)[0], self.read(i.operands[2], idx, 32)
        wide = np.where(by >= width(kind), 0, a.astype(np.uint64) << np.minimum(by, 63).astype(np.uint64))
        self.result(i, idx, wide.astype(a.dtype), kind)

    def _shr(self, i, idx):
        kind = i.parts[-1]
        a, by = self.values(i, idx, 1, kind)[0], self.read(i.operands[2], idx, 32)
        most = width(kind) - 1
        shifted = a >> np.minimum(by, most).astype(a.dtype)
        self.result(
            i, idx, np.where((by > most) & (a >= 0) & (kind[0] != "s"), 0, shifted).astype(a.dtype), kind
        )

    def _shf(self, i, idx):
        a, b, by = (self.read(o, idx, 32).astype(np.uint64) for o in i.operands[1:4])
        by = by & np.uint64(31)
        whole = (b << np.uint64(32)) | a
        found = whole >> by if "r" in i.parts else (whole << by) >> np.uint64(32)
        self.write(i.operands[0], idx, (found & np.uint64(0xFFFFFFFF)).astype(np.uint32))

    def _prmt(self, i, idx):
        a, b, how = (self.read(o, idx, 32).astype(np.uint64) for o in i.operands[1:4])
        whole, out = (b << np.uint64(32)) | a, np.zeros(len(idx), np.uint64)
        for k in range(4):
            pick = how >> np.uint64(4 * k)
            byte = whole >> ((pick & np.uint64(7)) * np.uint64(8)) & np.uint64(0xFF)
            sign = np.where(byte >> np.uint64(7) == 1, np.uint64(0xFF), np.uint64(0))
            out |= np.where(pick & np.uint64(8), sign, byte) << np.uint64(8 * k)
        self.write(i.operands[0], idx, out.astype(np.uint32))

    def _bfi(self, i, idx):
        a, b, at, count = (self.read(o, idx, 32).astype(np.uint64) for o in i.operands[1:5])
        mask = ((np.uint64(1) << count) - np.uint64(1)) << at
        self.write(i.operands[0], idx, (b & ~mask | a << at & mask).astype(np.uint32))

    def _bfe(self, i, idx):
        a, at, count = (self.read(o, idx, 32).astype(np.uint64) for o in i.operands[1:4])
        found = (a >> at & (np.uint64(1) << count) - np.uint64(1)).astype(np.int64)
        if i.parts[-1][0] == "s":
            found = np.where(
                found >> np.maximum(count.astype(np.int64) - 1, 0) & 1,
                found - (1 << count.astype(np.int64)),
                found,
            )
        self.write(i.operands[0], idx, found.astype(np.uint32))

    def _lop3(self, i, idx):
        a, b, c = (self.read(o, idx, 32) for o in i.operands[1:4])
        table, out = int(i.operands[4], 0), np.zeros(len(idx), np.uint32)
        for k in range(8):  # of each bit of the table, the bits of the three that choose it
            if table >> k & 1:
                out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
        self.write(i.operands[0], idx, out)

    def _setp(self, i, idx):
        how, kind = i.parts[1], i.parts[-1]
        a, b = self.values(i, idx, 2, kind)
        nan = np.isnan(a) | np.isnan(b) if kind[0] == "f" else np.zeros(len(idx), bool)
        if how in ("nan", "num"):
            found = nan if how == "nan" else ~nan
        else:
            found = COMPARE[how](a, b)
            found = found | nan if how[-1] == "u" else found & ~nan
        self.write(i.operands[0], idx, found)

    def _selp(self, i, idx):
        kind = i.parts[-1]
        a, b = (self.read(o, idx, width(kind)) for o in i.operands[1:3])
        self.write(i.operands[0], idx, np.where(self.predicate(i.operands[3], idx), a, b))

    def _mov(self, i, idx):
        kind, (to, source) = i.parts[-1], i.operands
        if kind == "pred":
            said = source.lstrip("-").isdigit()
            self.write(to, idx, np.full(len(idx), source != "0") if said else self.predicate(source, idx))
        elif to[0] == "{":
            names = listed(to)
            whole, each = self.read(source, idx, width(kind)), width(kind) // len(names)
            for k, name in enumerate(names):
                self.write(name, idx, (whole >> whole.dtype.type(each * k)).astype(BITS[each]))
        elif source[0] == "{":
            names = listed(source)
            each, whole = width(kind) // len(names), np.zeros(len(idx), BITS[width(kind)])
            for k, name in enumerate(names):
                whole |= self.read(name, idx, each).astype(whole.dtype) << whole.dtype.type(each * k)
            self.write(to, idx, whole)
        else:
            self.write(to, idx, self.read(source, idx, width(kind)))

    def _cvta(self, i, idx):
        self.write(i.operands[0], idx, self.read(i.operands[1], idx, 64))

    def _cvt(self, i, idx):
        to, source = [p for p in i.parts if re.fullmatch(r"[bsuf]\d+|bf16|bf16x2|f16x2", p)]
        if to in ("bf16x2", "f16x2"):
            high, low = (rounded(x, to[:-2]) for x in self.values(i, idx, 2, "f32"))
            self.write(i.operands[0], idx, high.astype(np.uint32) << np.uint32(16) | low)
            return
        value = self.values(i, idx, 1, source)[0]
        if to in ("bf16", "f16") and source == "f32":
            self.write(i.operands[0], idx, rounded(value, to))
        else:
            self.result(i, idx, value.astype(NUMBERS[to]), to)

    # Memory.

    def place(self, operand: str, idx: np.ndarray, bits: int) -> np.ndarray:
        name, _, more = operand.strip("[] ").partition("+")
        found = self.read(name, idx, bits).astype(np.uint64) + np.uint64(int(more or 0) & (1 << 64) - 1)
        return found & np.uint64((1 << bits) - 1)

    def shared_rows(self, addresses: np.ndarray, idx: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(CTA, offset) of addresses of shared memory, of the own CTA or of one that `mapa` has named."""
        rank = (addresses >> np.uint64(RANK)).astype(np.int64)
        offset = (addresses & np.uint64((1 << RANK) - 1)).astype(np.int64)
        return np.where(rank == 0, self.cta[idx], self.first[idx] + self.ranks[rank - 1]), offset

    def owned(self, space: str, addresses: np.ndarray, idx: np.ndarray, size: int) -> tuple:
        """(memory, its rows, bytes of these) where CTAs or threads have memory of their own."""
        aligned(addresses, size)
        if space == "local":
            held, rows, offset = self.local, idx, addresses.astype(np.int64)
        else:
            held, (rows, offset) = self.shared, self.shared_rows(addresses, idx)
        if (offset + size > held.shape[1]).any():
            raise IndexError(f"beyond {held.shape[1]} bytes of {space} memory")
        return held, rows[:, None], offset[:, None] + np.arange(size)

    def get(self, space: str, addresses: np.ndarray, idx: np.ndarray, size: int) -> np.ndarray:
        if space == "global":
            return self.memory.load(addresses, size)
        held, rows, offsets = self.owned(space, addresses, idx, size)
        return held[rows, offsets]

    def put(self, space: str, addresses: np.ndarray, idx: np.ndarray, data: np.ndarray) -> None:
        if space == "global":
            self.memory.store(addresses, data)
            return
        held, rows, offsets = self.owned(space, addresses, idx, data.shape[1])
        held[rows, offsets] = data

    def _ld(self, i, idx):
        bits = width(i.parts[-1])
        if "param" in i.parts:
            number, offset = re.search(r"_param_(\d+)(?:\+(\d+))?", i.operands[1]).groups()
            for k, name in enumerate(listed(i.operands[0])):
                shift, mask = 8 * int(offset or 0) + k * bits, (1 << bits) - 1
                each = [of_launch[int(number)] >> shift & mask for of_launch in self.parameters]
                self.write(name, idx, np.array(each, BITS[bits])[self.launch[idx]])
            return
        names = listed(i.operands[0])
        space = space_of(i)
        addresses = self.place(i.operands[1], idx, 32 if space == "shared" else 64)
        data = self.get(space, addresses, idx, len(names) * bits // 8)
        columns = np.ascontiguousarray(data).view(BITS[bits])
        if i.parts[-1][0] == "s":  # to whatever width the registers have
            columns = columns.view(NUMBERS[i.parts[-1]]).astype(np.int64).view(np.uint64)
        for k, name in enumerate(names):
            self.write(name, idx, columns[:, k].copy())
        if {"acquire", "relaxed", "volatile"} & {*i.parts}:
            self.rests[idx] = self.step + WAIT

    def _st(self, i, idx):
        if "param" in i.parts:
            return  # of what is printed before a trap
        if "async" in i.parts:
            self.store_async(i, idx)
            return
        space = space_of(i)
        addresses = self.place(i.operands[0], idx, 32 if space == "shared" else 64)
        self.put(space, addresses, idx, self.stored(i, idx))

    def stored(self, i, idx) -> np.ndarray:
        """The (thread, byte) of a store."""
        data = np.stack([self.read(name, idx, width(i.parts[-1])) for name in listed(i.operands[1])], 1)
        return np.ascontiguousarray(data).view(np.uint8).reshape(len(idx), -1)

    def store_async(self, i, idx):
        """Stores of some threads at once, for each mbarrier that counts them."""
        places, data = self.place(i.operands[0], idx, 32), self.stored(i, idx)
        owners = np.stack(self.shared_rows(self.place(i.operands[2], idx, 32), idx))
        keys, which, counts = np.unique(owners, axis=1, return_inverse=True, return_counts=True)
        groups = np.split(np.argsort(which.reshape(-1), kind="stable"), np.cumsum(counts)[:-1])
        for key, here in zip(zip(*keys.tolist(), strict=True), groups, strict=True):
            barrier = self.barriers[key]
            barrier.bytes -= data[here].size
            barrier.stores.append(partial(self.put, "shared", places[here], idx[here], data[here]))
            barrier.settle()

    def _cp(self, i, idx):
        if "bulk" in i.parts:
            self.copy_bulk(i, idx)
            return
        if "commit_group" in i.parts:
            self.copies.commit(idx)
            return
        if "wait_group" in i.parts or "wait_all" in i.parts:
            self.copies.wait(idx, int(i.operands[0]) if i.operands else 0)
            return
        size, *more = i.operands[2 : len(i.operands) - ("cache_hint" in i.name)]
        target, source = self.place(i.operands[0], idx, 32), self.place(i.operands[1], idx, 64)
        data = np.zeros((len(idx), int(size)), np.uint8)
        read = self.read(more[0], idx, 32) if more else np.full(len(idx), int(size))
        for count in np.unique(read[read > 0]):  # behind the bytes that are read come zeros
            here = read == count
            aligned(source[here], int(size))
            data[here, : int(count)] = self.memory.load(source[here], int(count))
        self.copies.begin(idx, lambda here: self.put("shared", target[here], idx[here], data[here]))

    def _atom(self, i, idx):
        bits, how = (
            width(i.parts[-1]),
            next(p for p in i.parts if p in ("add", "cas", "exch", "max", "min", "or", "inc")),
        )
        space, kind = space_of(i), NUMBERS[i.parts[-1]]
        addresses = self.place(i.operands[1], idx, 32 if space == "shared" else 64)
        given = [self.read(o, idx, bits).view(kind) for o in i.operands[2:]]
        old = np.empty(len(idx), kind)
        for k in range(len(idx)):  # one after another
            here, one = idx[k : k + 1], addresses[k : k + 1]
            old[k] = np.ascontiguousarray(self.get(space, one, here, bits // 8)).view(kind)[0, 0]
            a = given[0][k]
            new = {
                "add": old[k] + a, "exch": a, "or": old[k] | a, "max": max(old[k], a), "min": min(old[k], a),
                "cas": given[-1][k] if old[k] == a else old[k], "inc": 0 if old[k] >= a else old[k] + 1,
            }[how]  # fmt: skip
            self.put(space, one, here, np.array([[new]], kind).view(np.uint8))
        self.write(i.operands[0], idx, old.view(BITS[bits]))
        self.rests[idx] = self.step + WAIT

    def _red(self, i, idx):
        self._atom(Instruction("", i.name, ("_", *i.operands), i.text), idx)

    # Threads together.

    def _shfl(self, i, idx):
        how, to = i.parts[2], i.operands[0].split("|")[0]
        value = np.zeros(self.count, np.uint32)
        value[idx] = self.read(i.operands[1], idx, 32)
        by = self.read(i.operands[2], idx, 32).astype(np.int64)
        lane = self.special["%laneid"][idx]
        clamp = self.read(i.operands[3], idx, 32).astype(np.int64)
        source = {"bfly": lane ^ by, "idx": by & 31, "down": lane + by, "up": lane - by}[how]
        outside = {"up": source < (clamp & 31)}.get(how, source > (clamp & 31) | (lane & ~(clamp >> 8)))
        source = np.where(outside & (how != "idx"), lane, source)
        self.write(to, idx, value[idx - lane + source])

    def _elect(self, i, idx):
        lane = self.special["%laneid"][idx]
        first = np.zeros(len(idx), bool)
        first[np.unique(self.warp[idx], return_index=True)[1]] = True
        leader, chosen = i.operands[0].split("|")
        self.write(leader, idx, (lane * 0).astype(np.uint32))
        self.write(chosen, idx, first)

    def _vote(self, i, idx):
        held = self.predicate(i.operands[1], idx)
        warp = self.warp[idx]
        if "ballot" in i.parts:
            sums = np.zeros(warp.max() + 1, np.uint64)
            np.add.at(sums, warp, held.astype(np.uint64) << self.special["%laneid"][idx].astype(np.uint64))
            self.write(i.operands[0], idx, sums[warp].astype(np.uint32))
            return
        some = np.zeros(warp.max() + 1, np.int64)
        np.add.at(some, warp, held)
        every = np.bincount(warp)
        self.write(i.operands[0], idx, (some > 0 if "any" in i.parts else some == every)[warp])

    def _redux(self, i, idx):
        value, warp = self.values(i, idx, 1, i.parts[-1])[0], self.warp[idx]
        functions = {
            "add": np.add,
            "max": np.maximum,
            "min": np.minimum,
            "or": np.bitwise_or,
            "and": np.bitwise_and,
        }
        _, first, inverse = np.unique(warp, return_index=True, return_inverse=True)
        found = functions[i.parts[2]].reduceat(value, first)  # the lanes of a warp stand side by side
        self.result(i, idx, found[inverse], i.parts[-1])

    def _bar(self, i, idx):
        if "warp" in i.parts:
            self.meet(idx, self.warp, "warp", None)
            return
        if "popc" in i.parts:
            self.said[idx] = self.predicate(i.operands[2], idx)
            numbers, count = i.operands[1], self.program.threads
        else:
            numbers, *counts = i.operands or ("0",)
            count = int(counts[0]) if counts else self.program.threads
        number = np.zeros(self.count, np.int64)
        number[idx] = self.read(numbers, idx, 32)
        for all_here in self.meet(idx, self.cta * BARRIERS + number, "bar", count):
            if "popc" in i.parts:
                said = np.count_nonzero(self.said[all_here])
                self.write(i.operands[0], all_here, np.full(len(all_here), said, np.uint32))

    def meet(self, idx: np.ndarray, place: np.ndarray, what: str, count: int | None) -> list[np.ndarray]:
        """Block threads until all of their place are here; those of the places of which all are."""
        complete = []
        for p in np.unique(place[idx]):
            here = self.waiting.setdefault((what, int(p)), [])
            here.append(mine := idx[place[idx] == p])
            self.blocked[mine] = True
            needed = count if count is not None else int((~self.done & (place == p)).sum())
            if sum(map(len, here)) >= needed:
                complete.append(np.sort(np.concatenate(here)))
                self.blocked[complete[-1]] = False
                del self.waiting[what, int(p)]
        return complete

    def _barrier(self, i, idx):
        if "arrive" in i.parts:
            self.cluster_arrived[idx] += 1
            return
        if "cluster" not in i.parts:
            self._bar(i, idx)
            return
        for first in np.unique(self.first[idx]):  # wait: those of a cluster go on when all have arrived
            mine = idx[self.first[idx] == first]
            turn = self.cluster_waited[mine] + 1
            if (self.cluster_arrived[self.first == first] >= turn.max()).all():
                self.cluster_waited[mine] = turn
            else:
                self.pc[mine] -= 1
                self.rests[mine] = self.step + WAIT

    def _mapa(self, i, idx):
        rank = self.read(i.operands[2], idx, 32)
        self.write(
            i.operands[0], idx, self.read(i.operands[1], idx, 32) | (rank + np.uint32(1)) << np.uint32(RANK)
        )

    def _mbarrier(self, i, idx):
        how = i.parts[1]
        cta, offset = self.shared_rows(self.place(i.operands[how not in ("init", "inval")], idx, 32), idx)
        keys = [*zip(cta.tolist(), offset.tolist(), strict=True)]
        if how == "init":
            for key, count in zip(keys, self.read(i.operands[1], idx, 32).tolist(), strict=True):
                self.barriers[key] = Barrier(count, count)
        elif how == "arrive":
            given = self.read(i.operands[2], idx, 32).tolist() if "expect_tx" in i.parts else [0] * len(keys)
            for key, size in zip(keys, given, strict=True):
                self.barriers[key].left -= 1
                self.barriers[key].bytes += size
                self.barriers[key].settle()
        elif how == "try_wait":
            parity = self.read(i.operands[2], idx, 32).astype(np.int64)
            came = np.array([self.barriers[key].phases for key in keys]) % 2 != parity
            self.write(i.operands[0], idx, came)
            self.rests[idx[~came]] = self.step + WAIT

    def _fence(self, i, idx):
        """What is written is seen by all at once."""

    _membar = _fence

    def _createpolicy(self, i, idx):
        self.write(i.operands[0], idx, np.zeros(len(idx), np.uint64))

    def _call(self, i, idx):
        """What is printed is not."""

    def _trap(self, i, idx):
        raise Trap(f"trap in thread {idx[0]}")

    def _griddepcontrol(self, i, idx):
        """No grid runs beside another."""

    def _nanosleep(self, i, idx):
        self.rests[idx] = self.step + WAIT


BINARY = {
    "add": np.add, "sub": np.subtract, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip
UNARY = {
    "neg": np.negative, "abs": np.abs, "ex2": np.exp2, "lg2": np.log2, "tanh": np.tanh, "rcp": np.reciprocal,
}  # fmt: skip
# What a thread does without any other, and goes on with the next one.
ALONE = {
    *BINARY, *UNARY, "max", "min", "mul", "mad", "fma", "div", "rem", "not", "popc", "clz", "shl", "shr", "shf", "prmt",
    "bfi", "bfe", "lop3", "setp", "selp", "mov", "cvta", "cvt", "ld", "st", "createpolicy",
}  # fmt: skip
COMPARE = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
COMPARE |= {name + "u": COMPARE[name] for name in ("eq", "ne", "lt", "le", "gt", "ge")}


def space_of(instruction: Instruction) -> str:
    """The memory that is named."""
    return next((s for s in ("shared", "local") if any(p.startswith(s) for p in instruction.parts)), "global")
