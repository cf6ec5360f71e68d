"""What PTX has for tiles: matrices of a warp, wgmma, and bulk copies, those of tensor maps (TMA) among them.

wgmma and what is stored in bulk happen when they are waited for, and not before: a wait that is missing, and memory
that is used again too early, are seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from ptx_numbers import listed, raw, typed

WARP, WARPGROUP = 32, 128


@dataclass(frozen=True)
class TensorMap:
    """A tensor in global memory as TMA sees it: the bytes of an element, its sizes and, of all modes but the first,
    strides in bytes, and the box of an instruction; the first mode is contiguous. swizzle: rows of 128 bytes are."""

    address: int
    item: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: bool = False

    def __post_init__(self):
        if any(n % 16 for n in (self.address, *self.strides)) or max(self.box) > 256 or min(self.sizes) < 1:
            raise ValueError(f"there is no such map: {self}")

    @property
    def bytes(self) -> int:
        return self.item * int(np.prod(self.box))

    def elements(self, coordinates: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Of the elements of a box that are inside of the tensor, (index in the box, address)."""
        index, address = np.zeros(1, np.int64), np.full(1, self.address)
        inside = np.ones(1, bool)
        each = zip(coordinates, self.box, self.sizes, (self.item, *self.strides), strict=True)
        for first, count, size, stride in reversed([*each]):
            at = first + np.arange(count)
            index = (index[:, None] * count + np.arange(count)).reshape(-1)
            address = (address[:, None] + at * stride).reshape(-1)
            inside = (inside[:, None] & (at >= 0) & (at < size)).reshape(-1)
        return index[inside], address[inside].astype(np.uint64)


class Tensors:
    """A part of `ptx.Grid`."""

    def begin_tensors(self) -> None:
        self.stores = Groups(self.count)
        self.products = Groups(self.count)

    def end_tensors(self) -> None:
        if self.stores.under_way or self.products.under_way:
            raise RuntimeError("the kernel ends before something that it has begun")

    # Matrices of a warp: lane l holds two elements of row l // 4 of each 8 x 8 matrix, from column l % 4 * 2 on.

    def _ldmatrix(self, i, idx):
        names = listed(i.operands[0])
        # A row of a matrix from each lane.
        rows = self.get("shared", self.place(i.operands[1], idx, 32), idx, 16)
        rows = np.ascontiguousarray(rows).view(np.uint16).reshape(-1, 4, 8, 8)[:, : len(names)]
        if "trans" in i.parts:
            rows = rows.swapaxes(2, 3)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(-1, len(names), WARP)
        for k, name in enumerate(names):
            self.write(name, idx, words[:, k].reshape(-1))

    def _stmatrix(self, i, idx):
        words = np.stack(
            [self.read(name, idx, 32).reshape(-1, WARP) for name in listed(i.operands[1])], axis=1
        )
        if words.shape[1] != 4:
            raise ValueError("not one of those that are known")
        rows = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 4, 8, 8)
        if "trans" in i.parts:
            rows = rows.swapaxes(2, 3)
        data = np.ascontiguousarray(rows).reshape(-1, 8).view(np.uint8)
        self.put("shared", self.place(i.operands[0], idx, 32), idx, data)

    def _mma(self, i, idx):
        """m16n8k16: of A four matrices, one below the other first, of B two, transposed, of C two of float32."""
        if i.parts[3] != "m16n8k16" or i.parts[-1] != "f32":
            raise ValueError("not one of those that are known")
        d, a, b, c = (listed(operand) for operand in i.operands)
        left = rows_of(self.matrices(a, idx, i.parts[7]))
        right = self.matrices(b, idx, i.parts[8]).transpose(0, 1, 3, 2).reshape(-1, 16, 8)
        self.add_product(d, c, idx, left, right)

    def matrices(self, names: list[str], idx: np.ndarray, kind: str) -> np.ndarray:
        """(warp, matrix, row, column) of registers that hold a part of a matrix each, in float64."""
        parts = [typed(self.read(name, idx, 32), kind + "x2").reshape(-1, 8, 8) for name in names]
        return np.stack(parts, 1).astype(np.float64)

    def add_product(self, to: list[str], addend: list[str] | None, idx, left, right) -> None:
        """left (warp, 16, 16) @ right (warp, 16, columns) into registers, of which four hold 16 x 8."""
        sums = left @ right
        if addend is not None:
            held = [typed(self.read(name, idx, 32), "f32").reshape(-1, 8, 4) for name in addend]
            # (warp, row of eight, pair, columns of eight, rows above each other, of the pair)
            held = np.stack(held, -1).reshape(-1, 8, 4, len(addend) // 4, 2, 2)
            sums = sums + held.transpose(0, 4, 1, 3, 2, 5).reshape(sums.shape)
        sums = sums.astype(np.float32).reshape(len(sums), 2, 8, -1, 4, 2)
        sums = sums.transpose(0, 2, 4, 3, 1, 5).reshape(len(idx), -1)
        for k, name in enumerate(to):
            self.write(name, idx, raw(np.ascontiguousarray(sums[:, k]), "f32"))

    # wgmma: each warp of a warpgroup has 16 rows.

    def _wgmma(self, i, idx):
        how = i.parts[1]
        if how == "commit_group":
            self.products.commit(idx)
        elif how == "wait_group":
            self.products.wait(idx, int(i.operands[0]))
        elif how == "mma_async":
            self.products.begin(idx, self.product(i, idx))

    def product(self, i, idx) -> Callable[[np.ndarray], None]:
        """What an mma_async of these threads does when they wait for it; A is in registers, or described as B is."""
        d, a, b, adds, *more = i.operands
        if more[:2] != ["1", "1"] or i.parts[-3] != "f32":
            raise ValueError("not one of those that are known")
        kind, columns = i.parts[-1], int(re.search(r"n(\d+)k16", i.name)[1])
        in_registers, turned = a[0] == "{", [t == "1" for t in more[2:]]
        # Copies, as registers may change until then.
        left = self.matrices(listed(a), idx, kind) if in_registers else self.read(a, idx, 64).copy()
        right, adds = self.read(b, idx, 64).copy(), self.predicate(adds, idx)

        def multiply(here: np.ndarray):
            first = here & (self.special["%laneid"][idx] == 0)
            cta = self.cta[idx[first]]
            if in_registers:
                A = rows_of(left[here.reshape(-1, WARP)[:, 0]])
            else:
                row = self.special["%tid.x"][idx[first]] % WARPGROUP // WARP * 16
                A = self.described(left[first], cta, row, 16, turned[0], kind)
            B = self.described(right[first], cta, np.zeros_like(cta), columns, turned[-1], kind)
            if adds[here].any() != adds[here].all():
                raise ValueError("some warps add, others do not")
            held = listed(d)
            self.add_product(held, held if adds[here].all() else None, idx[here], A, B.transpose(0, 2, 1))

        return multiply

    def described(self, descriptor, cta, first, count: int, turned: bool, kind: str) -> np.ndarray:
        """(warp, index from `first` on, term) of an operand in shared memory. turned: the indices lie side by side,
        not the 16 terms."""
        start, across, along = (
            (descriptor >> np.uint64(at) & np.uint64(0x3FFF)) << np.uint64(4) for at in (0, 16, 32)
        )
        mode = np.unique(descriptor >> np.uint64(62))
        if mode != 1:
            raise ValueError("rows of other than 128 bytes")
        n = (first[:, None] + np.arange(count))[:, :, None].astype(np.uint64)
        k = np.arange(16, dtype=np.uint64)
        start, across, along = (x[:, None, None] for x in (start, across, along))
        eight, pitch = np.uint64(8), np.uint64(128)
        if turned:
            side = np.uint64(64)
            at = n // side * across + n % side * np.uint64(2) + k % eight * pitch + k // eight * along
        else:
            at = n // eight * along + n % eight * pitch + k * np.uint64(2)
        at = swizzled((start + at).astype(np.int64))
        held = self.shared[cta[:, None, None, None], at[..., None] + np.arange(2)]
        return typed(np.ascontiguousarray(held).view(np.uint16)[..., 0], kind).astype(np.float64)

    def _setmaxnreg(self, i, idx):
        """Registers are as many as wanted."""

    def _prefetch(self, i, idx):
        """Nothing is far away."""

    # Bulk copies.

    def copy_bulk(self, i, idx):
        if "commit_group" in i.parts:
            self.stores.commit(idx)
        elif "wait_group" in i.parts:
            self.stores.wait(idx, int(i.operands[0]))
        elif "bulk_group" in i.parts:
            store = self.tile_stores(i, idx) if "tensor" in i.parts else self.line_stores(i, idx)
            self.stores.begin(idx, lambda here: [one() for one, now in zip(store, here, strict=True) if now])
        else:
            self.load_bulk(i, idx)

    def load_bulk(self, i, idx):
        """To shared memory; a barrier hears of the bytes."""
        tensor = "tensor" in i.parts
        to = self.place(i.operands[0], idx, 32)
        barrier = self.place(i.operands[2 if tensor else 3], idx, 32)
        cta, offset = self.shared_rows(barrier, idx)
        for k, key in enumerate(zip(cta.tolist(), offset.tolist(), strict=True)):
            thread = idx[k : k + 1]
            if tensor:
                tensor_map, coordinates = self.tile(i.operands[1], thread)
                data = np.zeros((tensor_map.bytes // tensor_map.item, tensor_map.item), np.uint8)
                index, addresses = tensor_map.elements(coordinates)
                data[index] = self.memory.load(addresses, tensor_map.item)
                data, swizzle = data.reshape(-1), tensor_map.swizzle
            else:
                size = int(self.read(i.operands[2], thread, 32)[0])
                source = self.place(i.operands[1], thread, 64)[0]
                pieces = source + np.arange(0, size, 16, dtype=np.uint64)
                data, swizzle = self.memory.load(pieces, 16).reshape(-1), False
            self.barriers[key].bytes -= len(data)
            self.barriers[key].stores.append(partial(self.put_pieces, int(to[k]), data, thread, swizzle))
            self.barriers[key].settle()

    def tile_stores(self, i, idx) -> list[Callable]:
        """What each thread stores from shared memory as a tile."""

        def store(tensor_map: TensorMap, coordinates: list[int], source: int, thread: np.ndarray):
            data = self.pieces(source, tensor_map.bytes, thread, tensor_map.swizzle)
            index, addresses = tensor_map.elements(coordinates)
            self.memory.store(addresses, data.reshape(-1, tensor_map.item)[index])

        # Where operands are those of the whole warp, a GPU does it once.
        first = np.unique(self.warp[idx], return_index=True)[1]
        sources, stores = self.place(i.operands[1], idx, 32), [lambda: None] * len(idx)
        for k in first:
            one = idx[k : k + 1]
            if (sources[self.warp[idx] == self.warp[idx[k]]] != sources[k]).any():
                raise ValueError("lanes of a warp store different tiles")
            stores[k] = partial(store, *self.tile(i.operands[0], one), int(sources[k]), one)
        return stores

    def line_stores(self, i, idx) -> list[Callable]:
        """Likewise, without a map."""

        def store(to: int, source: int, size: int, thread: np.ndarray):
            data = self.pieces(source, size, thread, False).reshape(-1, 16)
            self.memory.store(np.arange(to, to + size, 16, dtype=np.uint64), data)

        numbers = (
            self.place(i.operands[0], idx, 64),
            self.place(i.operands[1], idx, 32),
            self.read(i.operands[2], idx, 32),
        )
        each = zip(*(n.tolist() for n in numbers), strict=True)
        return [partial(store, *of_one, idx[k : k + 1]) for k, of_one in enumerate(each)]

    def tile(self, operand: str, thread: np.ndarray) -> tuple[TensorMap, list[int]]:
        """The map and the coordinates of a thread's tile."""
        name, _, coordinates = operand.strip("[] ").partition(",")
        number = int(self.read(name.strip(), thread, 64)[0])
        found = self.parameters[self.launch[thread[0]]][number]
        return found, [int(self.read(c, thread, 32).view(np.int32)[0]) for c in listed(coordinates.strip())]

    def put_pieces(self, to: int, data: np.ndarray, thread: np.ndarray, swizzle: bool):
        """Into shared memory, 16 bytes at a time."""
        at = np.arange(to, to + len(data), 16)
        at = swizzled(at) if swizzle else at
        threads = np.repeat(thread, len(at))
        self.put("shared", at.astype(np.uint64), threads, data.reshape(-1, 16))

    def pieces(self, source: int, size: int, thread: np.ndarray, swizzle: bool) -> np.ndarray:
        at = np.arange(source, source + size, 16)
        at = swizzled(at) if swizzle else at
        return self.get("shared", at.astype(np.uint64), np.repeat(thread, len(at)), 16).reshape(-1)


class Groups:
    """What threads have begun, and do in groups when they wait for them."""

    def __init__(self, threads: int):
        self.committed = np.zeros(threads, np.int64)
        self.under_way: list[tuple[np.ndarray, np.ndarray, np.ndarray, Callable]] = []

    def begin(self, idx: np.ndarray, action: Callable[[np.ndarray], None]):
        """action: of the threads of idx that are marked."""
        self.under_way.append((idx, self.committed[idx], np.ones(len(idx), bool), action))

    def commit(self, idx: np.ndarray):
        self.committed[idx] += 1

    def wait(self, idx: np.ndarray, groups: int):
        """For all but the last groups of these threads."""
        waits = np.zeros(len(self.committed), bool)
        waits[idx] = True
        left = []
        for threads, group, open_, action in self.under_way:
            here = open_ & waits[threads] & (group < self.committed[threads] - groups)
            if here.any():
                action(here)
            if (open_ & ~here).any():
                left.append((threads, group, open_ & ~here, action))
        self.under_way = left


def rows_of(matrices: np.ndarray) -> np.ndarray:
    """(warp, 16, 16) of four matrices of 8 x 8, those one below the other first."""
    return matrices.reshape(-1, 2, 2, 8, 8).transpose(0, 2, 3, 1, 4).reshape(-1, 16, 16)


def swizzled(at: np.ndarray) -> np.ndarray:
    """Addresses whose bits 4 to 6 are exchanged with the three above them, as in rows of 128 bytes."""
    return at ^ (at >> 7 & 7) << 4
