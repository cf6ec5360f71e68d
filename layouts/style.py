"""Colours and type of all figures, in light and dark.

A *paint* is the class of a filled shape, a *voice* the class of a text. Colour never carries a fact alone:
every cell also says it in words, and cells that must differ also differ in their border.
"""

from __future__ import annotations

from collections.abc import Iterable

# The eight colours of CuTe's own thread-value drawings, but for the two greens: those are darker here, since
# theirs and the yellows are one colour to a protanope. For a dark page the same hues under light text.
THREADS_LIGHT = ("#afafff", "#8fe88f", "#ffffaf", "#ffafaf", "#d2d2ff", "#a8e4b0", "#ffffd2", "#ffd2d2")
THREADS_DARK = ("#4a4ab5", "#1f7434", "#6d6200", "#a33e3e", "#33336b", "#1d4a29", "#47400f", "#632b2b")

# Banks run from blue to yellow with rising lightness (as cividis does), which every kind of sight can order.
_BANKS_LIGHT = ("#7f9fdc", "#a6b6da", "#cfd0cb", "#ebe19b", "#ffe84d")
_BANKS_DARK = ("#1d3f85", "#36507c", "#54585f", "#6c6131", "#806400")

INK_LIGHT, INK_DARK = "#16191d", "#f4f6f8"
PAGE_LIGHT, PAGE_DARK = "#ffffff", "#14181d"

# paint -> (light fill, dark fill, border dashed)
_PAINTS: dict[str, tuple[str, str, bool]] = {
    "plain": ("#ffffff", "#20262d", False),
    "true": ("#9fd0ff", "#1b5a94", False),
    "false": ("#e9ebee", "#2b3138", True),
    "ghost": ("#f6fafe", "#182430", True),
    "scalar": ("#ffc78a", "#8a4b06", False),
    "barrier": ("#ffd9a8", "#74470c", False),
    "card": ("#f7f8fa", "#1a1f26", False),
}

# voice -> (px, monospaced, weight, muted)
VOICES: dict[str, tuple[float, bool, int, bool]] = {
    "title": (17, False, 600, False),
    "lead": (12.5, False, 400, True),
    "head": (13, False, 600, False),
    "note": (12, False, 400, False),
    "axis": (10, True, 400, True),
    "cell": (11, True, 500, False),
    "small": (9.5, True, 400, False),
    "formula": (13, True, 500, False),
    "sign": (26, False, 400, True),
}

SANS = "system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif"
MONO = "ui-monospace,'SF Mono',Menlo,Consolas,'DejaVu Sans Mono',monospace"
# What other threads' cells are; and the same for a renderer that paints the whole page for each element that fades.
DIM, DIM_PARTS = ".dim{opacity:.2}", ".dim{fill-opacity:.2;stroke-opacity:.2}"


def thread_paint(thread: int) -> str:
    """The paint of a thread: eight colours, by ``thread % 8``."""
    return f"t{thread % 8}"


def bank_paint(bank: int, banks: int = 32) -> str:
    """The paint of bank (or group of banks) ``bank`` out of ``banks``."""
    return f"b{round(bank * 31 / max(1, banks - 1))}"


def _mix(stops: tuple[str, ...], at: float) -> str:
    at *= len(stops) - 1
    i = min(int(at), len(stops) - 2)
    pairs = zip(bytes.fromhex(stops[i][1:]), bytes.fromhex(stops[i + 1][1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (at - i)):02x}" for a, b in pairs)


def fills(paint: str) -> tuple[str, str]:
    """(light, dark) fill of a paint."""
    if paint in _PAINTS:
        return _PAINTS[paint][:2]
    kind, number = paint[0], int(paint[1:])
    if kind == "t":
        return THREADS_LIGHT[number], THREADS_DARK[number]
    return _mix(_BANKS_LIGHT, number / 31), _mix(_BANKS_DARK, number / 31)


def text_width(text: str, voice: str) -> float:
    """An upper estimate, in px, of how wide ``text`` is set in ``voice``."""
    px, mono, weight, _ = VOICES[voice]
    return len(text) * px * (0.605 if mono else 0.53 if weight < 600 else 0.6)


def css(paints: Iterable[str], voices: Iterable[str]) -> str:
    """The style sheet for the given paints and voices; ``prefers-color-scheme`` turns it dark."""
    light = [f".page{{fill:{PAGE_LIGHT}}}", f"text{{fill:{INK_LIGHT}}}"]
    dark = [f".page{{fill:{PAGE_DARK}}}", f"text{{fill:{INK_DARK}}}", ".muted{fill:#a3adb8}"]
    light += [
        ".muted{fill:#57606a}",
        ".c rect{stroke:#7d8590;stroke-width:1}",
        ".thick{stroke:#16191d;stroke-width:2.4;fill:none}",
        ".link{stroke:#4b5563;stroke-width:1.3;fill:none}",
        ".tip{fill:#4b5563}",
        ".edge{stroke:#b42318;stroke-width:2.4;stroke-dasharray:6 3;fill:none}",
        ".frame{stroke:#aab2bd;stroke-width:1}",
        DIM,
        ".c .mid{text-anchor:middle}",
        ".mid{text-anchor:middle}",
        ".end{text-anchor:end}",
    ]
    dark += [
        ".c rect{stroke:#69737f}",
        ".thick{stroke:#f4f6f8}",
        ".link{stroke:#b6c0cb}",
        ".tip{fill:#b6c0cb}",
        ".edge{stroke:#ff8a80}",
        ".frame{stroke:#4a545f}",
    ]
    for paint in sorted(set(paints)):
        day, night = fills(paint)
        light.append(f".{paint}{{fill:{day}}}")
        dark.append(f".{paint}{{fill:{night}}}")
        if paint in _PAINTS and _PAINTS[paint][2]:
            light.append(f".c .{paint}{{stroke-dasharray:3 2}}")
    for voice in sorted(set(voices)):
        px, mono, weight, _ = VOICES[voice]
        family = MONO if mono else SANS
        light.append(f".{voice}{{font-size:{px}px;font-weight:{weight};font-family:{family}}}")
    return "\n".join([*light, "@media (prefers-color-scheme:dark){", *dark, "}"])
