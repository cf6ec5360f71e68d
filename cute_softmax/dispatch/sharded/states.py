"""Which part of a row a rank has, what a call asks of shared rows, and the exchange of their states.

A state is what threads, warps and CTAs merge, too: the (maximum, sum of exponentials relative to it) of a slice's
scores; beside it may stand what an entropy, the score of a chosen element or a mean needs, 8 to 20 bytes a row. Every
rank gathers the states of all and merges them in the order of the ranks, in float32, so that all have the same bits.

In batch-invariant calls a row is cut into blocks of a given size first, from its beginning on, and each has a state of
its own. A block is one rank's, and the states are merged in the order of the blocks: how many ranks there are, and
which has what, decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist

from ...runtime.private import look_up

Tensor = torch.Tensor
_resolve = look_up("distributed.distributed_c10d._resolve_process_group")
_seen: WeakValueDictionary[str, object] = (
    WeakValueDictionary()
)  # groups by name, where torch has no list of them
# What a part of a row that has no element has.
NOTHING = {"max": -math.inf, "sum": 0.0, "weighted": 0.0, "score": -math.inf, "fallen": 0.0, "count": 0.0}


@dataclass(frozen=True)
class Shared:
    """A call on rows that ranks share, but for its tensors: this rank's part of every row, and what is asked of them.

    group: the name of the ranks' ProcessGroup. start: the index of the slice's first element in the row; width: how
        many elements of the row it has (those behind them are padding); size: of the whole row, 0 if it is not known.
    alike: whether all slices are equally long, rank after rank, but for what of the last ones is padding.
    block: elements of the blocks that rows are reduced by, on whose multiples slices begin; 0 where a slice is one
        block. blocks: of a whole row.
    scale: of the scores. dtype: of the results. log: whether it is the logarithm of a softmax.
    results: what is asked of rows, some of "found lse entropy even", or "loss".
    reduction, ignore, smoothing, squares: of a loss, as `cross_entropy` has them.
    """

    group: str
    start: int
    width: int
    size: int = 0
    alike: bool = False
    block: int = 0
    blocks: int = 1
    scale: float = 1.0
    dtype: torch.dtype = torch.float32
    log: bool = False
    results: str = ""
    reduction: str = ""
    ignore: int = -1
    smoothing: float = 0.0
    squares: float = 0.0

    def asks(self, **of_call: object) -> Shared:
        """The same part of the rows, with what a call asks of them."""
        return replace(self, **of_call)

    @property
    def names(self) -> tuple[str, ...]:
        """The results that are asked for."""
        return tuple(self.results.split())

    @property
    def even(self) -> bool:
        """Whether the mean of all log-probabilities has a part."""
        return self.smoothing != 0 or "even" in self.names

    @property
    def beside(self) -> tuple[str, ...]:
        """What stands beside the pair of a state, as plans call it."""
        chosen = "found" in self.names or "loss" in self.names
        flags = {"weighted": "entropy" in self.names, "chosen": chosen, "even": self.even}
        return tuple(name for name, there in flags.items() if there)

    @property
    def numbers(self) -> tuple[str, ...]:
        """Of a state, in the order in which they are exchanged."""
        more = {"weighted": ("weighted",), "chosen": ("score",), "even": ("fallen", "count")}
        return ("max", "sum", *(name for flag in self.beside for name in more[flag]))

    @property
    def whole(self) -> int:
        """How many numbers of a whole row are kept: its state, and the entropy."""
        return 2 + ("entropy" in self.names)

    @property
    def first(self) -> int:
        """The first block of the slice."""
        return self.start // self.block if self.block else 0

    @property
    def home(self) -> int:
        """The block whose state has the score of a chosen element of this slice, wherever in the slice that is."""
        return min(self.first, self.blocks - 1)

    def local(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """An index into whole rows as one into the slice, 0 where it lies elsewhere; and whether it lies here."""
        local = index - self.start
        here = (local >= 0) & (local < self.width)
        return torch.where(here, local, 0), here

    @property
    def ranks(self) -> int:
        return dist.get_world_size(group_of(self.group))


def name_of(group: dist.ProcessGroup) -> str:
    """What `group_of` finds a group by."""
    if _resolve is None:
        _seen[group.group_name] = group
    return group.group_name


def group_of(name: str) -> dist.ProcessGroup:
    """The ProcessGroup of a name. Raises ValueError where there is none any more."""
    try:
        return _seen[name] if _resolve is None else _resolve(name)
    except (RuntimeError, LookupError, ValueError) as error:
        raise ValueError(f"the process group {name!r} of rows that ranks share is gone: {error}") from error


def check_group(group: object) -> None:
    """Raise TypeError for what is no ProcessGroup."""
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, not {type(group).__name__}")


def slice_of(
    columns: int,
    group: object,
    start: int | None,
    size: int | None,
    alike: bool = False,
    block: int | None = None,
) -> Shared:
    """The part of a rank with so many columns, some of which may lie behind the row's end. group: a ProcessGroup, or
    the name of one where start and size are given; alike, block: see `Shared`.

    Raises TypeError for what is no ProcessGroup, ValueError for a rank outside it, for a start or size below 0, and for
    slices that are not cut at multiples of a block.
    """
    if isinstance(group, str):  # of a DTensor, which knows where its slice lies
        name, rank, ranks = group, 0, 1
    else:
        check_group(group)
        name, rank, ranks = name_of(group), dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("this process is no member of the group")
    for what, number in (("vocab_start", start), ("vocab_size", size)):
        if number is not None and (type(number) is not int or number < 0):
            raise ValueError(f"{what} is {number!r}: it must be an int of 0 or more")
    given, start = start, rank * columns if start is None else start
    width = columns if size is None else min(max(size - start, 0), columns)
    # Where a slice begins as if all were equally long, another rank's may not.
    whole = (ranks * columns if given is None else 0) if size is None else size
    part = Shared(name, start, width, whole, alike or given is None)
    if block is None:
        return part
    if given is not None and size is None:
        raise ValueError("vocab_start without vocab_size: batch-invariant calls must know where rows end")
    # Of equally long slices all ranks know at once what is wrong with any.
    cut = columns if given is None and ranks > 1 and columns < whole else start if width else 0
    last = start + width == whole
    if cut % block or (given is not None and width % block and not last):
        raise ValueError(
            f"this rank's slice is [{start}, {start + width}) of rows of {whole}: batch-invariant calls with a "
            f"block_size of {block} need slices that begin and end at multiples of it"
        )
    return part.asks(block=block, blocks=-(-whole // block))


def gathered(mine: Tensor, name: str) -> Tensor:
    """The numbers of all ranks, (ranks, ...), of this rank's, which lie side by side; one collective.

    Raises RuntimeError where the other ranks do not take part: one of them has raised an error, or makes other calls.
    """
    group = group_of(name)
    ranks = dist.get_world_size(group)
    every = mine.new_empty((ranks, *mine.shape))
    if mine.numel():
        # Its name from torch 2.13 on, where the other is deprecated.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        try:
            all_gather(every.flatten(0, 1), mine, group=group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {dist.get_rank(group)} of {ranks} has not got the other ranks' states of rows that they share: "
                f"a rank that raised an error does not send its own ({error})"
            ) from error
    return every


_aside: dict[int, torch.cuda.Stream] = {}


def _beside(device: torch.device) -> torch.cuda.Stream:
    """The stream for collectives beside kernels. Of high priority: the few CTAs of a collective come next on an SM that
    has room, and not behind all CTAs of the kernel that hides it."""
    if device.index not in _aside:
        _aside[device.index] = torch.cuda.Stream(device, priority=-1)
    return _aside[device.index]


def exchanged(
    pieces: list, send: Callable[[object], Tensor], receive: Callable[[object, Tensor], None], name: str
) -> None:
    """Gather what `send` gives for each piece of the rows, and hand it to `receive`. Of several pieces the collective
    of one runs beside what is done for the next."""
    if len(pieces) == 1:
        receive(pieces[0], gathered(send(pieces[0]), name))
        return
    waiting = []
    for piece in pieces:
        mine = send(piece)
        waiting.append((piece, mine, *_gathered_aside(mine, name)))
    for piece, mine, every, done in waiting:
        if done is not None:
            torch.cuda.current_stream(mine.device).wait_event(done)
        receive(piece, every)


def _gathered_aside(mine: Tensor, name: str) -> tuple[Tensor, torch.cuda.Event | None]:
    """(`gathered`, an event behind it) on a stream of its own, where there are streams."""
    if not mine.is_cuda:
        return gathered(mine, name), None
    beside = _beside(mine.device)
    beside.wait_stream(torch.cuda.current_stream(mine.device))
    with torch.cuda.stream(beside):
        return gathered(mine, name), beside.record_event()


def blocks_of(part: Shared) -> Iterator[tuple[slice, int, int]]:
    """(columns, first block, how many) of this rank's whole blocks together, and of the last one if that is shorter."""
    whole = part.width // part.block
    if whole:
        yield slice(0, whole * part.block), part.first, whole
    if part.width % part.block:
        yield slice(whole * part.block, part.width), part.first + whole, 1
