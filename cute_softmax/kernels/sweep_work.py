"""What a CTA of the sweep movement has to do: which lines of which columns, in either pass, see `sweep`."""

from dataclasses import dataclass, replace

from cutlass import Boolean, Float32, Int32, Int64

from ..plan.sweep import TURNS
from .common.copy import GlobalTensor
from .common.index import ceil_div, smaller, wide


@dataclass(frozen=True)
class Launch:
    """The numbers of `SweepPlan.arguments`, addresses of the parts' states and of those of columns, and the tensors,
    whose two strides are those of `SweepPlan.operand_strides`. numbers: of the prologue, by name."""

    columns: Int32
    abreast: Int32
    lines: Int32
    rest: Int32
    panels: Int32
    parts: Int32
    share: Int32
    of_parts: Int64
    of_columns: Int64
    numbers: dict[str, Float32]
    mX: list[GlobalTensor]

    @property
    def width(self) -> Int32:
        """Columns of a line."""
        return self.abreast * self.columns


@dataclass(frozen=True)
class Item:
    """What a thread has to do: its first column in the lines of a matrix, and which of the lines of a part; last:
    whether the rest behind the whole lines is its CTA's, too. row: of a line, in which the column lies; here: how many
    elements that row has from the column on, None where that is known to be a vector or more."""

    matrix: Int32
    part: Int32
    column: Int32
    first: Int32
    end: Int32
    last: Boolean
    row: Int32
    here: Int32 | None


def item_of(launch: Launch, cta: Int32, panel_columns: int, thread_column: Int32) -> Item:
    """A CTA's item, for a thread whose vectors begin at this column of a panel."""
    part = cta // launch.panels % launch.parts
    first, column = part * launch.share, cta % launch.panels * panel_columns + thread_column
    return Item(
        matrix=cta // launch.panels // launch.parts,
        part=part,
        column=column,
        first=first,
        end=smaller(first + launch.share, launch.lines),
        last=part == launch.parts - 1,
        row=column // launch.columns,
        here=launch.columns - column % launch.columns,
    )


def turn_of(launch: Launch, item: Item, turn: Int32, steps: int) -> Item:
    """The lines of an item that the second pass takes in a turn, the last ones in turn 0."""
    each = ceil_div(ceil_div(launch.share, TURNS), steps) * steps
    first = smaller(item.first + (TURNS - 1 - turn) * each, item.end)
    end = smaller(first + each, item.end)
    return replace(item, first=first, end=end, last=item.last & (turn == 0))


def state_at(launch: Launch, item: Item) -> Int64:
    """Which of the parts' states is that of a thread's first column."""
    return (wide(item.matrix) * launch.parts + item.part) * launch.width + item.column
