"""How softmax(S) @ V is cut into tiles of rows, columns of V and parts of the columns of S, and who takes which."""

from types import SimpleNamespace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common import online
from ..common.copy import DTYPES
from .softmax_rows import TILE_N


class Works:
    """What the kernels of softmax(S) @ V have alike besides `Rows`, whatever multiplies and loads.

    spec: see `cute_softmax.plan.matmul.MatmulClass`.
    """

    def __init__(self, spec):
        self.spec = spec
        self.dtypes = [DTYPES[name] for name in spec.dtypes]
        self.exp = online.Fast(spec.dtypes[0])

    def call(
        self,
        shape: tuple,
        sizes: tuple,
        parts: tuple,
        scale: Float32,
        offset: Int32,
        extras: tuple,
        results: tuple,
        **own,
    ) -> SimpleNamespace:
        """What a CTA knows of its call; own: what only some kernels have."""
        s = self.spec
        rows, columns, depth = shape
        cta, _, _ = cute.arch.block_idx()
        ctas, _, _ = cute.arch.grid_dim()
        row_tiles, depth_tiles = cute.ceil_div(rows, s.rows), cute.ceil_div(depth, s.depth)
        batches = sizes[0] * sizes[1] * sizes[2]
        return SimpleNamespace(
            rows=rows,
            columns=columns,
            depth=depth,
            sizes=sizes,
            row_tiles=row_tiles,
            depth_tiles=depth_tiles,
            batches=batches,
            works=batches * row_tiles * depth_tiles * parts[0],
            parts=parts[0],
            part_steps=parts[1],
            mask=extras[:6] if const_expr(s.mask) else (),
            bias=extras[-6:] if const_expr(bool(s.bias)) else (),
            cta=cta,
            ctas=ctas,
            scale=scale,
            offset=offset,
            results=results,
            **own,
        )

    def work(self, this, turn: Int32) -> SimpleNamespace:
        """The tile that this CTA takes in its turn: its place, and how many steps of columns it has.

        Tiles of one batch follow each other, so that V is in L2. Causal ones come in the order of their length, the
        longest first, and every second turn in reverse: CTAs then end together.
        """
        s = self.spec
        index = turn * this.ctas + this.cta
        if const_expr(s.causal):
            backwards = turn * this.ctas + this.ctas - 1 - this.cta
            index = Int32(cutlass.select_(turn % 2 == 1, backwards, index))
        if const_expr(s.paired):
            part, rest = index % 2, index // 2
            depth_tile, rest = rest % this.depth_tiles, rest // this.depth_tiles
        else:
            depth_tile, rest = index % this.depth_tiles, index // this.depth_tiles
            part, rest = rest % this.parts, rest // this.parts
        end = this.columns
        if const_expr(s.causal):
            batch, row_tile = rest % this.batches, this.row_tiles - 1 - rest // this.batches
            last = cutlass.min((row_tile + 1) * s.rows, this.rows) - 1
            end = cutlass.min(end, last + this.offset + 1)
        else:
            row_tile, batch = rest % this.row_tiles, rest // this.row_tiles
        first = part * this.part_steps
        steps = cutlass.min(cutlass.max(cute.ceil_div(end, TILE_N), 1) - first, this.part_steps)
        b2, rest = batch % this.sizes[2], batch // this.sizes[2]
        return SimpleNamespace(
            exists=index < this.works,
            row_tile=row_tile,
            depth_tile=depth_tile,
            part=part,
            batch=batch,
            modes=(rest // this.sizes[1], rest % this.sizes[1], b2),
            first=first,
            # Of each warpgroup, where they take turns: the last ones may find nothing.
            steps=cute.ceil_div(steps, s.shares),
            columns=cutlass.min(this.columns, (first + steps) * TILE_N),
        )
