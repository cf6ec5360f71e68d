"""What kernels on sm_90a's tensor cores share: tiles that TMA loads in, rings of stages, and wgmma operands.

A tile of 16-bit numbers lies in shared memory as boxes of 64 columns, 128 bytes a row, whose 16-byte pieces are
exchanged within 8 rows (the 128-byte swizzle): TMA writes it so, ldmatrix and wgmma read it without conflicts.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from layouts.algebra import ComposedLayout

from ...plan import matmul_layouts
from .index import select


def by_rows(dtype: type, rows: int, columns: int, stages: int):
    """The layout of (rows, columns, stages) whose boxes hold their columns side by side: ldmatrix reads it as A, and
    wgmma as an operand whose rows are M or N and whose columns are K."""
    return composed(matmul_layouts.by_rows(dtype.width // 8, rows, columns, stages))


def by_columns(dtype: type, columns: int, rows: int, stages: int):
    """The memory of `by_rows`, seen as (columns, rows, stages): wgmma reads it as an operand whose columns are M
    or N and whose rows are K."""
    return composed(matmul_layouts.by_columns(dtype.width // 8, columns, rows, stages))


def composed(layout: ComposedLayout) -> cute.ComposedLayout:
    """A tile of `plan.matmul_layouts` as cute has it: its 128-byte swizzle counts bytes, whatever the elements."""
    inner = layout.inner
    return cute.make_composed_layout(
        cute.make_swizzle(3, 4, 3), 0, cute.make_layout(inner.shape, stride=inner.stride)
    )


def tensor_map(tensor: cute.Tensor, layout, tiler: tuple[int, int]) -> tuple:
    """Make, on the host, (TMA atom, tensor of coordinates) to load tiles of a tensor in global memory into `layout`.

    tensor: (rows or columns, columns or rows, batch modes); beyond its shape zeros are loaded.
    layout: with stages.
    """
    one = cute.slice_(layout, (None, None, 0))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, one, tiler)


def partition(tma: cute.CopyAtom, sX: cute.Tensor, gX: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """(tXsX, tXgX): tiles in shared and in global memory, whose first two modes are a tile, as TMA copies them."""
    tile = (cute.group_modes(x, 0, 2) for x in (sX, gX))
    return cpasync.tma_partition(tma, 0, cute.make_layout(1), *tile)


def shared(smem: cutlass.memory.SmemAllocator, dtype: type, layout) -> cute.Tensor:
    """A swizzled tensor in shared memory; 1024 bytes are the period of the swizzle."""
    return smem.allocate_tensor(dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner)


def mma(
    dtype: type, columns: int, *, a_in_registers: bool, a_by_rows: bool, b_by_rows: bool
) -> cute.TiledMma:
    """wgmma of a warpgroup: 64 rows of A times `columns` of B, 16 terms an instruction, summed in float32.

    a_by_rows, b_by_rows: how the operand lies in shared memory, `by_rows` (K contiguous) or `by_columns`.
    """
    major = {True: OperandMajorMode.K, False: OperandMajorMode.MN}
    source = warpgroup.OperandSource.RMEM if a_in_registers else warpgroup.OperandSource.SMEM
    op = warpgroup.MmaF16BF16Op(dtype, Float32, (64, columns, 16), source, major[a_by_rows], major[b_by_rows])
    return cute.make_tiled_mma(op)


def ldmatrix(address: Int32, transposed: bool = False) -> tuple:
    """Four 8 x 8 matrices of 16-bit numbers, a word of each per lane. Lanes 0-7, 8-15, .. give the addresses (bytes in
    shared memory) of the rows of the first, second, .. matrix."""
    how = ".trans" if transposed else ""
    return cute.arch.inline_ptx(
        f"ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}}];",
        write_only_types=[Uint32] * 4,
        read_only_args=[address],
    )


def row_of_matrix(lane: Int32 | int, warp: Int32 | int) -> tuple:
    """(row, 16-byte piece as it lies) whose address a lane gives to ldmatrix for a warp's 16 rows and 16 columns of a
    tile `by_rows`; 16 columns further bits of the piece are exchanged with 2."""
    return warp * 16 + lane % 16, (lane // 16) ^ (lane % 8)


def row_of_transposed(lane: Int32 | int, warp: Int32 | int) -> tuple:
    """The row where the tile is read as its transpose, of which the warp holds 16 rows and 16 columns."""
    return lane // 16 * 8 + lane % 8, (warp * 2 + lane // 8 % 2) ^ (lane % 8)


@dataclass(frozen=True)
class Ring:
    """Stages of shared memory that a producer fills and consumers empty, with a pair of mbarriers each.

    full, empty: the barriers of the first stage. releases, fillers: how many threads release a stage, and how many
    announce bytes to it.
    A position in the ring is (stage, phase); both sides begin at `begin()` and `advance` alike.
    """

    full: cute.Pointer
    empty: cute.Pointer
    stages: int
    stage_bytes: int
    releases: int
    fillers: int

    @cute.jit
    def initialise(self, thread: Int32):
        """Initialise the barriers, by the first thread, before a fence and a barrier."""
        if thread == 0:
            for i in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(self.full + i, self.fillers)
                cute.arch.mbarrier_init(self.empty + i, self.releases)

    @staticmethod
    def begin(share: Int32 | int = 0) -> tuple[Int32, Int32]:
        """share: where one of several consumers that take turns begins."""
        return Int32(share), Int32(0)

    def advance(self, stage: Int32, phase: Int32, by: int = 1) -> tuple[Int32, Int32]:
        """by: of how many consumers that take turns, a divisor of the stages."""
        last = stage >= self.stages - by
        return (
            select(last, stage + by - self.stages, stage + by),
            select(last, phase ^ 1, phase),
        )

    def leave(self, stage: Int32, phase: Int32, lane: Int32, by: int = 1) -> tuple[Int32, Int32]:
        """Consumer: release a stage, and go on to the next."""
        self.release(stage, lane)
        return self.advance(stage, phase, by)

    def acquire(self, stage: Int32, phase: Int32) -> cute.Pointer:
        """Producer warp: wait until the stage is empty, announce its bytes; the barrier that TMA reports to."""
        self.wait_empty(stage, phase ^ 1)
        self.announce(stage)
        return self.full + stage

    def wait_empty(self, stage: Int32, parity: Int32):
        """Producer: wait until the stage is empty."""
        cute.arch.mbarrier_wait(self.empty + stage, parity)

    def announce(self, stage: Int32):
        """Producer warp: say that the bytes of a stage will come."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(self.full + stage, self.stage_bytes)

    def wait(self, stage: Int32, phase: Int32):
        """Consumer: wait until the stage is full."""
        cute.arch.mbarrier_wait(self.full + stage, phase)

    @cute.jit
    def release(self, stage: Int32, lane: Int32):
        """Consumer: the first lane speaks for its warp, all of which has read."""
        if lane == 0:
            cute.arch.mbarrier_arrive(self.empty + stage)


def ring_of(
    smem: cutlass.memory.SmemAllocator, stages: int, stage_bytes: int, releases: int, fillers: int = 1
) -> Ring:
    """A ring whose barriers lie behind what has been allocated."""
    full, empty = (smem.allocate_array(Int64, num_elems=stages) for _ in range(2))
    return Ring(full, empty, stages, stage_bytes, releases, fillers)
