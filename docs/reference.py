"""The reference: what the docstrings of public names say, read by griffe, as Markdown.

Public are the names in ``__all__`` of the package and of its public modules, and the classes that their signatures
name: what a caller gets in hand. Their docstrings are in Google's style, with Markdown in the text.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe
from griffe import DocstringSectionKind as Kind
from griffe import ParameterKind

import cute_softmax

PACKAGE = cute_softmax.__name__
WIDTH = 100  # of a signature in one line
_STARS = {ParameterKind.var_positional: "*", ParameterKind.var_keyword: "**"}


WITH_SCORES = f"{PACKAGE}.dispatch.common.spec.with_scores"


class Scores(griffe.Extension):
    """Shows the arguments of scores one by one, as `inspect` does: see WITH_SCORES."""

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        if all(d.callable_path != WITH_SCORES for d in func.decorators):
            return
        shown = inspect.signature(getattr(importlib.import_module(func.module.path), func.name)).parameters
        del func.parameters["scores"]
        for p in shown.values():
            if p.name not in func.parameters:
                what = {"annotation": p.annotation, "default": repr(p.default)}
                func.parameters.add(griffe.Parameter(p.name, kind=ParameterKind.keyword_only, **what))


@dataclass(frozen=True)
class Entry:
    """A public name, as it follows ``cute_softmax.`` or, of a class that `__all__` lacks, alone.

    module: where to import it from.
    """

    name: str
    module: str
    object: griffe.Object

    @property
    def anchor(self) -> str:
        """Of its heading, as GitHub makes it."""
        return self.name.lower().replace(".", "")

    @property
    def members(self) -> list[griffe.Object]:
        """Of a class: its public methods and own attributes, and what else is public and has a docstring."""
        if not self.object.is_class:
            return []
        members = [m.final_target if m.is_alias else m for m in self.object.all_members.values()]
        return [m for m in members if m.is_public and (m.has_docstring or self._must_have_one(m))]

    def _must_have_one(self, member: griffe.Object) -> bool:
        return not member.is_special and (member.is_function or member.parent is self.object)


@cache
def _package() -> griffe.Module:
    """As griffe reads its source."""
    root = Path(__file__).resolve().parents[1]
    return griffe.load(PACKAGE, search_paths=[root], extensions=griffe.load_extensions(Scores()))


def _at(path: str) -> griffe.Object:
    found = _package()[path.removeprefix(f"{PACKAGE}.")]
    return found.final_target if found.is_alias else found


@cache
def entries() -> dict[str, Entry]:
    """All public names, those in ``__all__`` first."""
    found = {}
    for name in sorted((*cute_softmax.__all__, "sum")):  # which a star import leaves out
        value = getattr(cute_softmax, name)
        values = {name: value}
        if inspect.ismodule(value):
            values = {f"{name}.{inner}": getattr(value, inner) for inner in value.__all__}
        for whole, v in values.items():
            found[whole] = Entry(whole, PACKAGE, _at(f"{v.__module__}.{v.__qualname__}"))
    waiting = list(found.values())
    for entry in waiting:
        for path in _classes(entry):
            module, _, name = path.rpartition(".")
            made = Entry(name, _public(module, name), _at(path))
            if all(made.object is not known.object for known in waiting):
                found[name] = made
                waiting.append(made)
    return found


def _public(module: str, name: str) -> str:
    """The shortest of the modules that have an object in their ``__all__``, or its own."""
    value = getattr(importlib.import_module(module), name)
    loaded = ((path, m) for path, m in sys.modules.items() if path.startswith(f"{PACKAGE}."))
    found = [p for p, m in loaded if name in getattr(m, "__all__", ()) and getattr(m, name) is value]
    return min(found, key=len, default=module)


def _classes(entry: Entry) -> Iterator[str]:
    """The paths of the package's classes in signatures."""
    for o in (entry.object, *entry.members):
        if o.is_attribute:
            continue
        annotations = [p.annotation for p in _parameters(o)] if _names(o, Kind.parameters) else []
        for annotation in (*annotations, getattr(o, "returns", None)):
            for part in annotation.iterate() if isinstance(annotation, griffe.Expr) else ():
                if isinstance(part, griffe.ExprName) and part.canonical_path.startswith(f"{PACKAGE}."):
                    yield part.canonical_path


def _parameters(o: griffe.Function | griffe.Class) -> list[griffe.Parameter]:
    return [p for p in o.parameters if p.name != "self"]


def _sections(o: griffe.Object) -> list[griffe.DocstringSection]:
    return o.docstring.parse("google", returns_multiple_items=False) if o.has_docstring else []


def _names(o: griffe.Object, kind: Kind) -> list[str]:
    """What sections of a kind describe."""
    return [
        item.name.lstrip("*") for section in _sections(o) if section.kind is kind for item in section.value
    ]


def _brief(o: griffe.Object) -> bool:
    """Whether a member is described by text alone."""
    return all(section.kind is Kind.text for section in _sections(o))


# -- What is missing ---------------------------------------------------------------------------------------------------


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def complaints() -> list[str]:
    """What is wrong with docstrings: griffe's warnings, and what is not described or does not exist."""
    griffe.logger.addHandler(warnings := _Warnings())
    try:
        lacks = [what for entry in entries().values() for what in _lacks(entry)]
    finally:
        griffe.logger.removeHandler(warnings)
    return [*dict.fromkeys(warnings.said), *lacks]


def _lacks(entry: Entry) -> Iterator[str]:
    fields = [*_names(entry.object, Kind.attributes), *_names(entry.object, Kind.parameters)]
    for o in (entry.object, *entry.members):
        if not o.has_docstring:
            if not (o.is_attribute and o.name in fields):
                yield f"{o.path}: no docstring"
            continue
        kinds = {section.kind for section in _sections(o)}
        yield from (f"{o.path}: a section of {kind.value}" for kind in kinds if kind not in _RENDERED)
        # Text alone is enough for a method; and who gets an object from a function does not call its class.
        called = o.is_function and (o is entry.object or not _brief(o))
        made = o.is_class and (entry.module == PACKAGE or Kind.parameters in kinds)
        if called or made:
            told = _names(o, Kind.parameters)
            yield from (f"{o.path}: no words about {p.name}" for p in _parameters(o) if p.name not in told)
        if called and str(o.returns) != "None" and Kind.returns not in kinds:
            yield f"{o.path}: no words about the result"
    there = [m.name for m in entry.members]
    for name in _names(entry.object, Kind.attributes):
        if name not in there:
            yield f"{entry.object.path}: no attribute {name}"


# -- Markdown ----------------------------------------------------------------------------------------------------------


def functions() -> str:
    """The functions."""
    return _pages(lambda entry: entry.object.is_function and "." not in entry.name)


def modules() -> str:
    """What public modules hold."""
    return _pages(lambda entry: "." in entry.name)


def objects() -> str:
    """What a caller gets in hand, gives or catches."""
    return _pages(lambda entry: entry.object.is_class and "." not in entry.name)


def _pages(wanted: Callable[[Entry], bool]) -> str:
    chosen = [entry for entry in entries().values() if wanted(entry)]
    index = "\n".join(f"| {_link(entry)} | {_linked(_summary(entry.object), entry)} |" for entry in chosen)
    return "\n\n".join([f"| | |\n|---|---|\n{index}", *map(_page, chosen)])


def _page(entry: Entry) -> str:
    o, parts = entry.object, [f"### {entry.name}"]
    if entry.module != PACKAGE or (o.is_class and "." not in entry.name):
        parts.append(f"```python\nfrom {entry.module} import {entry.name}\n```")
    if o.is_function or _names(o, Kind.parameters):
        parts.append(_signature(entry.name, o))
    parts += _described(o, entry)
    brief = [m for m in entry.members if m.has_docstring and _brief(m)]
    if brief:
        items = "\n".join(_item(f"`{_called(m)}`", _text(m), entry) for m in brief)
        parts.append(f"**Further attributes and methods**\n\n{items}")
    for m in entry.members:
        if not _brief(m):
            name = f"{entry.name}.{m.name}"
            parts += [f"#### {name}", _signature(name, m), *_described(m, entry)]
    return "\n\n".join(parts)


def _described(o: griffe.Object, entry: Entry) -> list[str]:
    return [_RENDERED[section.kind](section, entry) for section in _sections(o)]


def _signature(name: str, o: griffe.Function | griffe.Class) -> str:
    """With an argument a line where it is long."""
    arguments = []
    for p in _parameters(o):
        if p.kind is ParameterKind.keyword_only and "*" not in arguments:
            arguments.append("*")
        default = "" if p.required or p.kind in _STARS else f" = {p.default}"
        arguments.append(f"{_STARS.get(p.kind, '')}{p.name}: {p.annotation}{default}")
    returns = f" -> {o.returns}" if o.is_function else ""
    text = f"{name}({', '.join(arguments)}){returns}"
    if len(text) > WIDTH:
        lines = "".join(f"    {a},\n" for a in arguments)
        text = f"{name}(\n{lines}){returns}"
    return "```py\n" + text.replace("'", '"') + "\n```"


def _called(m: griffe.Object) -> str:
    return f"{m.name}({', '.join(p.name for p in _parameters(m))})" if m.is_function else m.name


def _text(o: griffe.Object) -> str:
    return _sections(o)[0].value


def _summary(o: griffe.Object) -> str:
    return " ".join(_text(o).partition("\n\n")[0].split())


def _link(entry: Entry) -> str:
    return f"[`{entry.name}`](#{entry.anchor})"


def _linked(text: str, entry: Entry) -> str:
    """With links from the names of others to their descriptions."""

    def link(match: re.Match) -> str:
        other = entries().get(match[1])
        return match[0] if other is None or other is entry else _link(other)

    return re.sub(r"(?<!`)`([\w.]+)`(?!`)", link, text)


def _item(name: str, text: str, entry: Entry) -> str:
    return f"- {name}: " + _linked(text, entry).replace("\n", "\n  ")


def _named(title: str) -> Callable[[griffe.DocstringSection, Entry], str]:
    """How a section of names with descriptions is rendered."""

    def rendered(section: griffe.DocstringSection, entry: Entry) -> str:
        items = [_item(f"`{item.name}`", item.description, entry) for item in section.value]
        return f"**{title}**\n\n" + "\n".join(items)

    return rendered


def _raises(section: griffe.DocstringSectionRaises, entry: Entry) -> str:
    items = [_item(_linked(f"`{item.annotation}`", entry), item.description, entry) for item in section.value]
    return "**Raises**\n\n" + "\n".join(items)


def _examples(section: griffe.DocstringSectionExamples, entry: Entry) -> str:
    pieces = (
        f"```pycon\n{text}\n```" if kind is Kind.examples else _linked(text, entry)
        for kind, text in section.value
    )
    return "\n\n".join(pieces)


_RENDERED: dict[Kind, Callable[[griffe.DocstringSection, Entry], str]] = {
    Kind.text: lambda section, entry: _linked(section.value, entry),
    Kind.parameters: _named("Arguments"),
    Kind.attributes: _named("Attributes"),
    Kind.returns: lambda section, entry: "**Returns** " + _linked(section.value[0].description, entry),
    Kind.raises: _raises,
    Kind.examples: _examples,
}
