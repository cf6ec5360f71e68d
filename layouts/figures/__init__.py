"""Figures of layouts. Each function takes Layout values and numbers and returns a ``Figure``."""

from .composed import composed
from .follow import follow_thread
from .pieces import Pieces, row_pieces
from .plain import layout_grid, swizzle_banks
from .predicate import predicate_tensor
from .reduction import cluster_exchange, reduction_buffer
from .scene import Cell, Facts, Figure
from .shuffle import warp_shuffle
from .slots import Slots, Use, slots, slots_of_peers
from .tensor_cores import matrix_load, shared_operand_product, thread_registers
from .threads import mma_fragments, thread_value, tiled_copy

__all__ = [
    "Cell",
    "Facts",
    "Figure",
    "Pieces",
    "Slots",
    "Use",
    "cluster_exchange",
    "composed",
    "follow_thread",
    "layout_grid",
    "matrix_load",
    "mma_fragments",
    "predicate_tensor",
    "reduction_buffer",
    "row_pieces",
    "shared_operand_product",
    "slots",
    "slots_of_peers",
    "swizzle_banks",
    "thread_registers",
    "thread_value",
    "tiled_copy",
    "warp_shuffle",
]
