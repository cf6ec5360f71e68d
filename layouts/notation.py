"""CuTe's own notation, read: ``((32,4),8):((32,1),4)`` and ``S<3,4,3> o 0 o (8,64):(64,1)``.

The reader keeps where each part stood, so that every error shows the text with a caret under the place. It
also takes what CUTLASS C++ prints: ``_32`` for a static 32, ``Sw<3,4,3>``, and between the two ``o`` a pointer such as
``smem_ptr[16b](unset)``, which is offset 0, or nothing at all, as in ``Sw<3,4,3> o (8,64):(64,1)``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .algebra import ComposedLayout, Layout, Swizzle
from .ints import IntTuple

_TOKEN = re.compile(
    r"\s*(?:(?P<number>_?\d+)|(?P<swizzle>Sw?<)|(?P<compose>[o∘])|(?P<pointer>\w+_ptr(?:\[\w+\])?(?:<[\w,<>]*>)?\((?:unset|0x[0-9a-fA-F]+)\))|(?P<mark>[(),:>]))"
)


class LayoutSyntaxError(ValueError):
    """Text that is no layout; ``position`` is the offset of the offending character in ``text``."""

    def __init__(self, message: str, text: str, position: int):
        self.text, self.position = text, position
        super().__init__(f"{message}\n  {text}\n  {' ' * position}^")


@dataclass(frozen=True)
class Node:
    """An int or a tuple as it was written, and where it began."""

    value: int | tuple[Node, ...]
    position: int

    def plain(self) -> IntTuple:
        return tuple(n.plain() for n in self.value) if isinstance(self.value, tuple) else self.value


class Reader:
    """A recursive-descent reader of one text."""

    def __init__(self, text: str):
        self.text, self.at = text, 0

    def fail(self, message: str, position: int | None = None) -> LayoutSyntaxError:
        return LayoutSyntaxError(message, self.text, self.here() if position is None else position)

    def here(self) -> int:
        rest = self.text[self.at :]
        return self.at + len(rest) - len(rest.lstrip())

    def peek(self) -> str | None:
        match = _TOKEN.match(self.text, self.at)
        return match[match.lastgroup] if match else None

    def take(self, wanted: str) -> bool:
        if self.peek() != wanted:
            return False
        self.at = _TOKEN.match(self.text, self.at).end()
        return True

    def expect(self, wanted: str, meaning: str) -> None:
        if not self.take(wanted):
            raise self.fail(f"expected {wanted!r} {meaning}")

    def number(self, meaning: str) -> int:
        match = _TOKEN.match(self.text, self.at)
        if not match or match["number"] is None:
            found = self.text[self.here() : self.here() + 1]
            why = {
                "?": "a dynamic value; a drawing needs its number",
                "-": "negative numbers do not occur in a layout",
                "": "the text ends here",
            }.get(found, f"found {found!r}")
            raise self.fail(f"expected {meaning}: {why}")
        self.at = match.end()
        if self.text[self.at : self.at + 1] == "@":
            raise self.fail("a basis stride (1@0) maps to coordinates, not to offsets", self.at)
        return int(match["number"].lstrip("_"))

    def node(self, meaning: str) -> Node:
        start = self.here()
        if not self.take("("):
            return Node(self.number(meaning), start)
        parts = [self.node(meaning)]
        while self.take(","):
            if self.peek() == ")" and len(parts) == 1:
                break
            parts.append(self.node(meaning))
        self.expect(")", "to close the tuple")
        return Node(tuple(parts), start)

    def layout(self) -> Layout:
        shape = self.node("a size or '('")
        self.check_sizes(shape)
        if not self.take(":"):
            return Layout(shape.plain())
        stride = self.node("a stride or '('")
        self.check_congruent(shape, stride)
        return Layout(shape.plain(), stride.plain())

    def check_sizes(self, node: Node) -> None:
        if isinstance(node.value, tuple):
            for n in node.value:
                self.check_sizes(n)
        elif node.value < 1:
            raise self.fail("a size must be at least 1", node.position)

    def check_congruent(self, shape: Node, stride: Node) -> None:
        if isinstance(shape.value, tuple) != isinstance(stride.value, tuple):
            kinds = ("a tuple", "an int") if isinstance(shape.value, tuple) else ("an int", "a tuple")
            raise self.fail(f"the shape has {kinds[0]} here and the stride {kinds[1]}", stride.position)
        if not isinstance(shape.value, tuple):
            return
        for s, d in zip(shape.value, stride.value, strict=False):
            self.check_congruent(s, d)
        have, want = len(stride.value), len(shape.value)
        if have != want:
            place = stride.value[want].position if have > want else stride.position
            raise self.fail(f"the shape has {want} modes here and the stride {have}", place)

    def swizzle(self) -> Swizzle:
        start = self.here()
        if not (self.take("S<") or self.take("Sw<")):
            raise self.fail("expected a swizzle S<bits,base,shift>")
        bits = self.number("the swizzle's bits")
        self.expect(",", "after the swizzle's bits")
        base = self.number("the swizzle's base")
        self.expect(",", "after the swizzle's base")
        shift = self.number("the swizzle's shift")
        self.expect(">", "to close the swizzle")
        if shift < bits:
            raise self.fail(f"a swizzle's shift ({shift}) must be at least its bits ({bits})", start)
        return Swizzle(bits, base, shift)

    def pointer(self) -> bool:
        match = _TOKEN.match(self.text, self.at)
        if not match or match["pointer"] is None:
            return False
        self.at = match.end()
        return True

    def compose_sign(self) -> bool:
        return self.take("o") or self.take("∘")

    def expression(self) -> Layout | Swizzle | ComposedLayout:
        outer = self.swizzle() if self.peek() in ("S<", "Sw<") else self.layout()
        if not self.compose_sign():
            return outer
        if self.peek() == "(":
            return ComposedLayout(outer, 0, self.layout())
        offset = 0 if self.pointer() else self.number("the offset between the two 'o'")
        if not self.compose_sign():
            raise self.fail("expected 'o' between the offset and the inner layout")
        return ComposedLayout(outer, offset, self.layout())


def parse(text: str) -> Layout | Swizzle | ComposedLayout:
    """The value that ``text`` names in CuTe's notation; ``str`` is its inverse.

    ``parse("((32,4),8):((32,1),4)")``, ``parse("S<3,4,3> o 0 o (8,64):(64,1)")``; a shape alone is compact
    and column-major. Malformed text raises ``LayoutSyntaxError`` (a ``ValueError``) with a caret there.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, got {type(text).__name__}")
    reader = Reader(text)
    value = reader.expression()
    if reader.here() != len(text):
        raise reader.fail("unexpected text after the layout")
    return value
