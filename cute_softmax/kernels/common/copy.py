"""What a thread holds of a row, and how it gets from and to global memory."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int16, Int32, Int64, Uint16, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T

from . import online
from .index import select
from .reduce import tree

DTYPES = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16, "fp32": cutlass.Float32}
DTYPES |= {"bool": cutlass.Uint8, "int32": cutlass.Int32, "int64": cutlass.Int64}  # as torch stores them
PACKED_MAX = {
    cutlass.BFloat16: "max.NaN.bf16x2 {$w0}, {$r0}, {$r1};",
    cutlass.Float16: "max.NaN.f16x2 {$w0}, {$r0}, {$r1};",
}


def global_pointer(dtype: type, address: Int64, offset: Int64, align: int) -> cute.Pointer:
    """A pointer to element `offset` of the tensor at `address` (bytes), known to be `align` bytes aligned."""
    return cute.make_ptr(
        dtype, address + offset * (dtype.width // 8), cute.AddressSpace.gmem, assumed_align=align
    )


@dataclass(frozen=True)
class GlobalTensor:
    """mX: a tensor in global memory: its address in bytes, and its strides in elements, of the kept modes and of the
    reduced ones, each in the order that a movement has them in."""

    dtype: type
    address: Int64
    kept: list[Int64]
    reduced: list[Int64] = ()

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.width // 8

    def element(self, offset: Int64) -> cute.Tensor:
        """The element at an offset from the tensor's beginning."""
        return element(self.dtype, self.address, offset)


def global_tensors(
    dtypes: list[type], operands: tuple, kept_modes: int, reduced_modes: int = 0
) -> list[GlobalTensor]:
    """mX of a kernel's operands: of each its address, and its strides in the kept and in the reduced modes."""
    mX, each = [], 1 + kept_modes + reduced_modes
    for i, dtype in enumerate(dtypes):
        address, *strides = operands[i * each : (i + 1) * each]
        mX.append(GlobalTensor(dtype, address, strides[:kept_modes], strides[kept_modes:]))
    return mX


def in_global(
    dtype: type, address: Int64, at: Int64 | int, count: int, align: int | None = None
) -> cute.Tensor:
    """`count` elements of the tensor at `address` (bytes) in global memory, from element `at` on; aligned to `align`
    bytes, or to what they are together."""
    pointer = global_pointer(dtype, address, at, align or count * dtype.width // 8)
    return cute.make_tensor(pointer, cute.make_layout(count))


def element(dtype: type, address: Int64, offset: Int64 | int = 0) -> cute.Tensor:
    """Element `offset` of the tensor at `address` (bytes) in global memory."""
    return in_global(dtype, address, offset, 1)


def in_shared(dtype: type, address: Int32, count: int = 1, align: int | None = None) -> cute.Tensor:
    """`count` elements in shared memory, aligned to `align` bytes, or to what they are together."""
    align = align or count * dtype.width // 8
    pointer = cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=align)
    return cute.make_tensor(pointer, cute.make_layout(count))


def policy(how: str) -> Int64:
    """An L2 eviction policy: evict_last, evict_normal or evict_first."""
    return cute.arch.inline_ptx(
        f"createpolicy.fractional.L2::{how}.b64 {{$w0}}, 1.0;", write_only_types=[Int64]
    )


def read_policy(evict_last: Int32) -> Int64:
    """The L2 eviction policy of reads, chosen at run time: evict_last if the flag is set, else the usual one."""
    return select(evict_last != 0, policy("evict_last"), policy("evict_normal"))


def load(src: cute.Tensor, dst: cute.Tensor, access: int, policy: Int64):
    """Global memory to registers, `access` elements at a time."""
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(), src.element_type, num_bits_per_copy=access * src.element_type.width
    )
    cute.copy(atom, src, dst, cache_policy=policy)


def load_if(wanted: Boolean, src: cute.Tensor):
    """The one element of `src` in global memory where it is wanted, else 0; without a branch.

    Behind a branch for one thread the compiler would give that thread a copy of all that follows.
    """
    width = src.element_type.width
    held = cute.make_rmem_tensor(1, src.element_type)
    word = {16: Int16, 32: Int32, 64: Int64}[width]
    cute.recast_tensor(held, word)[0] = cute.arch.inline_ptx(
        f"{{.reg .pred p; setp.ne.s32 p, {{$r1}}, 0; mov.b{width} {{$w0}}, 0; "
        f"@p ld.global.b{width} {{$w0}}, [{{$r0}}];}}",
        write_only_types=[word],
        read_only_args=[src.iterator.toint(), Int32(wanted)],
    )
    return held[0]


def load_async(
    src: cute.Tensor,
    dst: cute.Tensor,
    access: int,
    policy: Int64 | None,
    ahead: int = 0,
    exist: Int32 | None = None,
) -> None:
    """cp.async from global to shared memory, `access` elements at a time; through registers below its 4 bytes.

    ahead: L2 fetches so many bytes around, 64, 128 or 256, for whoever asks for the neighbours next; by 0 the compiler
    is free to choose, which it does by what else a kernel has. exist: bytes of a single access that are read; those
    behind become 0.
    """
    size = access * src.element_type.width // 8
    if size < 4:
        held = cute.make_rmem_tensor(src.shape, src.element_type)
        load(src, held, access, policy)
        cute.autovec_copy(held, dst)
        return
    hint = "" if policy is None else ".L2::cache_hint"
    hint += f".L2::{ahead}B" if ahead else ""
    through = "cg" if size == 16 else "ca"  # only 16-byte copies can pass L1 by
    for i in range(0, cute.size(src), access):
        operands, kinds, last = [(dst.iterator + i).toint(), (src.iterator + i).toint()], "r,l", ""
        if policy is not None:
            operands, kinds, last = [*operands, policy], f"{kinds},l", ", $2"
        if exist is not None:
            operands, kinds, last = [*operands, exist], f"{kinds},r", f", ${len(operands)}{last}"
        llvm.inline_asm(
            None,
            [operand.ir_value() for operand in operands],
            f"cp.async.{through}.shared.global{hint} [$0], [$1], {size}{last};",
            f"{kinds},~{{memory}}",
            has_side_effects=True,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )


def store(src: cute.Tensor, dst: cute.Tensor, policy: Int64 | None = None, exists: Boolean | None = None):
    """Registers to global memory in one access.

    policy: an L2 eviction policy, for 4 bytes or more. exists: whether to store at all, decided without a branch.

    Between two branches the compiler schedules what one vector needs, and no other: panels gain up to 5% by `exists`
    (docs/experiments.md). What computes its results before, as `row` does, gains nothing, and in the loops of kernels
    that stream the compiler makes no branches.
    """
    bits = cute.size(src) * src.element_type.width
    if policy is None and exists is None:
        atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), src.element_type, num_bits_per_copy=bits)
        cute.copy(atom, src, dst)
        return
    width = min(bits, 32)
    words = cute.recast_tensor(src, Uint32 if width == 32 else Uint16)
    n = cute.size(words)
    names = ", ".join(f"${1 + j}" for j in range(n))
    lanes, value = (f".v{n}", f"{{{names}}}") if n > 1 else ("", names)
    operands = [dst.iterator.toint(), *(words[j] for j in range(n))]
    kinds = ["l", *n * ["r" if width == 32 else "h"]]
    hint, last, before, after = "", "", "", ""
    if policy is not None:
        hint, last = ".L2::cache_hint", f", ${len(operands)}"
        operands.append(policy)
        kinds.append("l")
    if exists is not None:
        before, after = f"{{.reg .pred p; setp.ne.s32 p, ${len(operands)}, 0; @p ", "}"
        operands.append(Int32(exists))
        kinds.append("r")
    llvm.inline_asm(
        None,
        [operand.ir_value() for operand in operands],
        f"{before}st.global{hint}{lanes}.b{width} [$0], {value}{last};{after}",
        ",".join([*kinds, "~{memory}"]),
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


class Slots:
    """A thread's places in shared memory for a Float32 of each element of its vectors, which lay there before.

    vectors: the places, one tensor of Float32 each.
    """

    def __init__(self, vectors: list[cute.Tensor]):
        self.vectors = vectors

    def keep(self, first: int, count: int, numbers: list[Float32]) -> Callable[[], Iterator[Float32]]:
        """Put numbers into `count` vectors from `first` on, as far as there are; those behind them stay in registers.

        Returns a function that gives all of them again.
        """
        kept, numbers = self.vectors[first : first + count], iter(numbers)
        for vector in kept:
            held = cute.make_rmem_tensor(cute.size(vector), Float32)
            pack(numbers, held)
            cute.autovec_copy(held, vector)
        rest = list(numbers)

        def again() -> Iterator[Float32]:
            for vector in kept:
                held = cute.make_rmem_tensor(cute.size(vector), Float32)
                cute.autovec_copy(vector, held)
                yield from unpack(held)
            yield from rest

        return again


class Fragment:
    """One thread's elements of a row: packed vectors, and scalars where the row has ragged edges.

    vectors: functions that give vector k in registers; called whenever the vector is needed.
    fresh: convert to Float32 anew each time, so that the packed registers stay alive between two passes over the
        row and not their conversions, which are twice as many.
    staging: how the elements come, see `cute_softmax.plan.RowClass`: all but "direct" ones are waited for vector by
        vector when they are first looked at, and "shared" ones are in new registers each time.
    slots: where a row math keeps what it computes of the elements, if not in registers.
    waited: whether all of "shared" ones have come, and no one is waited for.
    """

    def __init__(
        self,
        vectors: list[Callable],
        scalars: list,
        fresh: bool,
        staging: str = "direct",
        slots: Slots | None = None,
        waited: bool = False,
    ):
        self.vectors, self.scalars, self.fresh = vectors, scalars, fresh
        self.staging, self.slots, self.waited = staging, slots, waited
        self.steps = len(vectors)

    def packed(self, k: int) -> cute.Tensor:
        vector = self.vectors[k]()
        if self.fresh:
            forget(vector)
        return vector

    def parts(self, steps: int) -> Iterator[list[Float32]]:
        """The elements in lists of `steps` vectors; the scalars come last."""
        for _, part in self.parts_and_maxima(steps):
            yield part

    def parts_and_maxima(self, steps: int) -> Iterator[tuple[Callable[[], Float32], list[Float32]]]:
        """`parts`, each behind a function that gives its largest element."""
        for k in range(0, len(self.vectors), steps):
            vectors = [self.packed(j) for j in range(k, min(k + steps, len(self.vectors)))]
            scalars = [s.to(Float32) for s in self.scalars] if k + steps >= len(self.vectors) else []
            part = [x for vector in vectors for x in unpack(vector)]
            yield partial(largest, vectors, scalars), part + scalars

    def __iter__(self) -> Iterator[Float32]:
        for part in self.parts(1):
            yield from part

    def maximum(self) -> Float32:
        """The largest element; NaN if one is NaN."""
        vectors = (self.packed(k) for k in range(len(self.vectors)))
        return largest(vectors, [s.to(Float32) for s in self.scalars])


def largest(vectors: Iterable[cute.Tensor], scalars: list[Float32]) -> Float32:
    """The largest element of register vectors and of scalars; NaN if one is NaN."""
    words, rest = [], [*scalars]
    for vector in vectors:
        if vector.element_type in PACKED_MAX and cute.size(vector) > 1:
            dtype = vector.element_type
            words += words_of(vector)
        else:
            rest += unpack(vector)
    if words:
        rest += packed_maxima(dtype, [words])
    return tree(online.maximum, rest)


def packed_maxima(dtype: type, pairs: Iterable[Iterable[Uint32]]) -> list[Float32]:
    """Of each series of pairs of 16-bit numbers the largest first and the largest second one; NaN if one is NaN. Pairs
    are compared packed, two to an instruction."""
    larger = partial(packed_maximum, dtype)
    return unpack(vector_of([tree(larger, words) for words in pairs], dtype))


def packed_maximum(dtype: type, a: Uint32, b: Uint32) -> Uint32:
    """Element by element, the maxima of two pairs of 16-bit numbers."""
    return cute.arch.inline_ptx(PACKED_MAX[dtype], write_only_types=[Uint32], read_only_args=[a, b])


def funnel_shift(low: Uint32, high: Uint32, bits: Int32, left: bool = False) -> Uint32:
    """Shift the low one's bits out of two words: 32 of them, `bits` behind the first or, to the left, before the
    high one's."""
    return cute.arch.inline_ptx(
        f"shf.{'l' if left else 'r'}.wrap.b32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}};",
        write_only_types=[Uint32],
        read_only_args=[low, high, bits],
    )


def words_of(vector: cute.Tensor) -> list[Uint32]:
    """A register vector as words."""
    words = cute.recast_tensor(vector, Uint32)
    return [words[j] for j in range(cute.size(words))]


def vector_of(words: list[Uint32], dtype: type) -> cute.Tensor:
    """The register vector that these words are."""
    vector = cute.make_rmem_tensor(len(words) * 32 // dtype.width, dtype)
    target = cute.recast_tensor(vector, Uint32)
    for j, word in enumerate(words):
        target[j] = word
    return vector


def unpack(vector: cute.Tensor) -> list[Float32]:
    """The elements of a register vector as Float32; with a stride of 0 they are one."""
    n = cute.size(vector)
    if n > cute.cosize(vector.layout):
        return [vector[0].to(Float32)] * n
    if vector.element_type is cutlass.BFloat16 and n >= 2:
        # A bfloat16 is the upper half of a float32: one shift or mask each.
        halves = [(word << Uint32(16), word & Uint32(0xFFFF0000)) for word in words_of(vector)]
        return [half.bitcast(Float32) for pair in halves for half in pair]
    converted = cute.make_rmem_tensor(n, Float32)
    converted.store(vector.load().to(Float32).reshape(n))
    return [converted[j] for j in range(n)]


def pack(values: Iterator[Float32], vector: cute.Tensor):
    """Take as many values as the register vector has elements, round and store them."""
    n = cute.size(vector)
    rounded = cute.make_rmem_tensor(n, Float32)
    for j in range(n):
        rounded[j] = next(values)
    vector.store(rounded.load().to(vector.element_type).reshape(vector.shape))


def forget(vector: cute.Tensor):
    """Hide from the compiler that it has seen these registers before (an empty asm; no instruction)."""
    if vector.element_type.width * cute.size(vector) < 32:
        return
    words = cute.recast_tensor(vector, Int32)
    for j in range(cute.size(words)):
        hidden = llvm.inline_asm(
            T.i32(),
            [words[j].ir_value()],
            "",
            "=r,0",
            has_side_effects=False,
            is_align_stack=False,
            asm_dialect=llvm.AsmDialect.AD_ATT,
        )
        words[j] = Int32(hidden)
