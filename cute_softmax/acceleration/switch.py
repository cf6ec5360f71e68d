"""Our kernels under torch's own softmax, for programs that do not change.

`accelerate` registers them for operators of `aten` on torch's CUDA key; calls that they do not support go to the
kernels that were registered before. A loss is not an operator: torch's function is replaced. Every call is counted.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps

import torch

from . import losses, operators, originals
from .overrides import override_of, tells_places

KEY = "CUDA"  # of torch's dispatcher
_SERVED = ""  # the reason of a call that was served

_changing = threading.Lock()  # of the six that follow, and of what torch calls
_library: torch.library.Library | None = None
_left: dict[str, str] = {}  # operators that others had overridden when ours were registered, and where
_overriding: torch.library.Library | None = None  # in the place of these, where that is asked for
_loss: Callable[..., torch.Tensor] | None = None  # torch's own, while ours stands in its place
_open: list[Acceleration] = []  # for the whole program, or blocks; as often as it was entered
_generation = 0  # calls of `restore`, which ends all of them

_counting = threading.Lock()
_counts: dict[tuple[str, str], _Tally] = {}  # (operator, reason) -> calls
_at_start: Counter[tuple[str, str]] | None = None  # the same, when torch was last changed; None if never


class _Tally:
    """A number of events of all threads. Those who `add` need no lock: that is one C function."""

    def __init__(self) -> None:
        self.add = itertools.count().__next__
        self._reads = 0

    def read(self) -> int:
        """How many there were. Reading counts, too, which is taken off again; not for two threads at a time."""
        self._reads += 1
        return self.add() - self._reads + 1


class _Thread(threading.local):
    inside = False  # an original kernel, whose own calls are not the program's


_thread = _Thread()


@dataclass(frozen=True)
class Report:
    """Where calls of torch's operators went; `str` makes a readable text of it.

    Attributes:
        active: Whether our kernels replace torch's now.
        ended: Whether they did, and no longer do.
        served: Calls that ran on our kernels, per operator.
        handed_on: Calls that went on to ATen, per operator and reason.
        overridden: Operators for which another package's kernels run now, and where they were registered. They are left
            alone, unless `accelerate(override=True)` is used.
    """

    active: bool
    ended: bool
    served: dict[str, int]
    handed_on: dict[tuple[str, str], int]
    overridden: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        served, handed_on = sum(self.served.values()), sum(self.handed_on.values())
        state = "is active" if self.active else "was active" if self.ended else "is not active"
        lines = [f"cute_softmax.accelerate {state}: {served:,} calls served, {handed_on:,} handed on"]
        lines += [f"  {name}: {calls:,} served" for name, calls in self.served.items()]
        lines += [f"  {name}: {calls:,} handed on: {why}" for (name, why), calls in self.handed_on.items()]
        lines += [
            f"  {name}: overridden by another package: {where}" for name, where in self.overridden.items()
        ]
        return "\n".join(lines)


class Acceleration:
    """A context manager that ends what `accelerate` began, and reports the calls since then."""

    def __init__(self, generation: int, cross_entropy: bool, override: bool) -> None:
        self._first: int | None = generation
        self._entered: list[int] = []  # generations
        self._start = _copy_of_counts()
        self._cross_entropy, self._override = cross_entropy, override

    def __enter__(self) -> Acceleration:
        with _changing:
            if self._first != _generation:  # else it has been open since it was made
                _begin(self)
            self._first = None
            self._entered.append(_generation)
        return self

    def __exit__(self, *_: object) -> None:
        with _changing:
            if self._entered.pop() == _generation:
                _open.remove(self)
                _settle()

    def report(self) -> Report:
        """Report the calls since this acceleration began.

        Returns:
            The calls of all threads.
        """
        return _report(self._start)


def accelerate(*, cross_entropy: bool = False, override: bool = False) -> Acceleration:
    """Run torch's own softmax, log_softmax, logsumexp and their gradients on our kernels, for CUDA tensors.

    In a `with` statement it lasts until the block ends; blocks may be nested and may overlap in several threads.
    Otherwise it lasts until `restore`. It applies to all threads. Do not switch it while another thread is inside a
    softmax: torch's table of kernels has no lock for its readers.

    Everything in torch that calls these operators then uses our kernels: `torch.softmax`,
    `torch.nn.functional.softmax`, `Tensor.log_softmax`, `torch.nn.CrossEntropyLoss`, the math path of
    scaled_dot_product_attention, their gradients, and their transforms (vmap, grad, jvp). Results have ATen's dtype,
    shape and strides. Calls that the kernels do not support (float64, complex numbers, integers) go to ATen, and
    `accelerated` counts them. CPU tensors are not affected, nor is code compiled by inductor, which has its own
    kernels.

    Args:
        cross_entropy: Also replace `torch.nn.functional.cross_entropy`, which modules and libraries call by that name,
            with our `cross_entropy`: for class indices, without the matrix of log-probabilities. Other calls still go
            to torch's.
        override: Also replace kernels that another package has registered for an operator (such as a serving engine's
            batch-invariant mode); calls that ours do not support go to those kernels. Otherwise they stay, with a
            UserWarning, and the report names them.

    Returns:
        A context manager, which also reports the calls since it was created.

    Examples:
        >>> import torch
        >>> from cute_softmax import accelerate
        >>> scores = torch.randn(4, 1000, device="cuda" if torch.cuda.is_available() else "cpu")
        >>> with accelerate() as acceleration:
        ...     y = torch.softmax(scores, -1)
        >>> report = acceleration.report()
    """
    with _changing:
        made = Acceleration(_generation, cross_entropy, override)
        _begin(made)
        return made


def restore() -> None:
    """Give torch its own kernels back, exactly as they were, even if blocks are open. May be called more than once."""
    global _generation
    with _changing:
        _open.clear()
        _settle()
        _generation += 1


def accelerated() -> Report:
    """Report which calls ran on our kernels and which went to ATen, and why, since torch was last accelerated.

    Returns:
        The calls of all threads; `print` shows them as text.
    """
    return _report(_at_start)


def _begin(one: Acceleration) -> None:
    """Open it; what fails leaves all as it was. Under `_changing`."""
    _open.append(one)
    try:
        _settle()
    except BaseException:
        _open.remove(one)
        _settle()
        raise


def _settle() -> None:
    """Let torch call what those that are open ask for. Under `_changing`."""
    global _library, _overriding, _left, _loss, _at_start
    anyway = any(one._override for one in _open)
    if _overriding is not None and not anyway:
        _end(_overriding)
        _overriding = None
    if _open and _library is None:
        _at_start = _copy_of_counts()
        _left = _overridden()
        _library = _registered([name for name in _routes() if f"aten::{name}" not in _left])
        if _left and not anyway:
            told = ", ".join(f"{name} ({where})" for name, where in _left.items())
            warnings.warn(
                f"another package has overridden {told}: left to it; accelerate(override=True) replaces it",
                stacklevel=4,
            )
    elif not _open and _library is not None:
        _end(_library)
        _library = None
    if anyway and _overriding is None:
        _overriding = _registered([name for name in _routes() if f"aten::{name}" in _left])
    functional, wanted = torch.nn.functional, any(one._cross_entropy for one in _open)
    if wanted and _loss is None:
        _loss = functional.cross_entropy
        functional.cross_entropy = _loss_by_ours(_loss)
    elif not wanted and _loss is not None:
        functional.cross_entropy = _loss
        _loss = None


def _loss_by_ours(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    route = _route(losses.NAME, losses.serve, original)

    @wraps(original)
    def cross_entropy(*arguments: object, **named: object) -> torch.Tensor:
        if torch.compiler.is_compiling():  # what is traced counts nothing
            return original(*arguments, **named)
        return route(*arguments, **named)

    return cross_entropy


def _routes() -> dict[str, Callable[..., torch.Tensor | str]]:
    """What serves each overload that we replace."""
    routes = {}
    for operator in operators.OPERATORS:
        routes[operator.name] = operator.serve
        if originals.REACHABLE and operator.has_out:
            routes[f"{operator.name}.out"] = operator.serve_out
    return routes


def _overridden() -> dict[str, str]:
    """Which operators other packages have overridden, and where."""
    places = {f"aten::{overload}": override_of(overload, KEY) for overload in _routes()}
    return {name: where for name, where in places.items() if where is not None}


def _registered(overloads: list[str]) -> torch.library.Library:
    """Our kernels in the place of those that there are, until it is destroyed."""
    routes = _routes()
    # Before any is replaced, for one may call another. A build of torch without CUDA has not all of them.
    found = {overload: originals.original(overload, KEY) for overload in overloads}
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)
            for overload, original in found.items():
                if original is not None:
                    library.impl(overload, _route(f"aten::{overload}", routes[overload], original), KEY)
    except BaseException:
        _end(library)
        raise
    return library


def _end(library: torch.library.Library) -> None:
    """Take back what it has registered; where torch has no name for that, it ends with the last reference to it."""
    getattr(library, "_destroy", lambda: None)()


def _route(
    name: str, serve: Callable[..., torch.Tensor | str], original: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The kernel to register: ours, or the original where ours gives a reason instead of a result."""

    served = _tally(name, _SERVED)

    def route(*arguments: object, **named: object) -> torch.Tensor:
        inside = _thread.inside
        result = serve(*arguments, **named)
        if type(result) is not str:
            if not inside:
                served.add()
            return result
        if not inside:
            _tally(name, result).add()
        _thread.inside = True
        try:
            return original(*arguments, **named)
        finally:
            _thread.inside = inside

    return route


def _tally(name: str, reason: str) -> _Tally:
    with _counting:
        return _counts.setdefault((name, reason), _Tally())


def _copy_of_counts() -> Counter[tuple[str, str]]:
    with _counting:
        return Counter({key: tally.read() for key, tally in _counts.items()})


def _report(start: Counter[tuple[str, str]] | None) -> Report:
    """The calls since; there are none where nothing was ever begun."""
    calls, active = _copy_of_counts() - (start or Counter()), _library is not None
    return Report(
        active=active,
        ended=start is not None and not active,
        served={name: n for (name, why), n in sorted(calls.items()) if why == _SERVED},
        handed_on={key: n for key, n in sorted(calls.items()) if key[1] != _SERVED},
        overridden=_overridden() if tells_places() or _library is None else dict(_left),
    )
