"""The source's rooms: imports point down, and no file imports itself by a detour."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# From the ground up. A room imports from those of the floors below its own, and from itself.
FLOORS = (
    {"layouts", "plan/tables", "version"},
    {"layouts/figures", "plan"},
    {"layouts/pages", "kernels/common"},
    {"kernels/maths", "draw/checks"},
    {"kernels", "kernels/panel", "kernels/matmul", "kernels/shards", "kernels/topk", "draw"},
    {"runtime"},
    {"dispatch", "dispatch/common", "ladder"},
    {"dispatch/softmax", "dispatch/topk"},
    {"dispatch/heads", "dispatch/matmul"},
    {"dispatch/sharded"},
    {"api"},
    {"acceleration"},
    {"commands", "hardware", "nn", "operators", "sampling"},
    {"integrations"},
    {"cute_softmax"},
)
# Files of a package's own folder that are a room by themselves: what users of the package see.
ROOMS_OF_FILES = {
    "cute_softmax/__init__.py": "cute_softmax",
    "cute_softmax/__main__.py": "cute_softmax",
    "layouts/__init__.py": "layouts/pages",
    "layouts/__main__.py": "layouts/pages",
    "layouts/html.py": "layouts/pages",
    "layouts/walk.py": "layouts/pages",
}


def sources(root: Path) -> list[Path]:
    """The Python files of both packages below a folder, relative to it."""
    return sorted(f.relative_to(root) for p in ("cute_softmax", "layouts") for f in (root / p).rglob("*.py"))


def room(file: Path) -> str:
    """The room of a file."""
    if str(file) in ROOMS_OF_FILES:
        return ROOMS_OF_FILES[str(file)]
    folder = file.parent.as_posix()
    if folder == "cute_softmax":
        return file.stem
    return folder.removeprefix("cute_softmax/")


@cache
def imported(source: str) -> list[tuple[int, str, list[str]]]:
    """(dots, module, names) of all that a source imports, wherever in it; not of what only types are taken from."""
    tree = ast.parse(source)
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in only_types:
            continue
        if isinstance(node, ast.Import):
            found += [(0, a.name, []) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            found.append((node.level, node.module or "", [a.name for a in node.names]))
    return found


def imports(root: Path, file: Path) -> Iterator[Path]:
    """The files of both packages that a file imports."""
    for dots, module, names in imported((root / file).read_text(encoding="utf-8")):
        above = file.parts[: len(file.parts) - dots] if dots else ()
        path = [*above, *filter(None, module.split("."))]
        for name in [[*path, n] if _file(root, [*path, n]) else path for n in names] or [path]:
            found = _file(root, name)
            if found and found != file:
                yield found


def _file(root: Path, module: list[str]) -> Path | None:
    path = Path(*module)
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if (root / file).is_file():
            return file
    return None


def complaints(root: Path) -> list[str]:
    """What is wrong with the imports of the packages below a folder."""
    floor = {name: i for i, names in enumerate(FLOORS) for name in names}
    found, graph = [], {}
    for file in sources(root):
        if room(file) not in floor:
            found.append(f"{file} lies in no room")
            continue
        graph[file] = set(imports(root, file))
        for other in graph[file]:
            if room(other) != room(file) and floor.get(room(other), -1) >= floor[room(file)]:
                found.append(f"{file} ({room(file)}) imports {other} ({room(other)}), which is not below")
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found.append("a circle: " + " -> ".join(map(str, error.args[1])))
    return found


def test_imports_point_down():
    assert complaints(ROOT) == []


@pytest.mark.parametrize(
    ("file", "added", "said"),
    [
        ("plan/row.py", "from ..dispatch import forms", "plan/row.py (plan) imports"),
        ("plan/base.py", "def f():\n    from ..draw import overview", "cute_softmax/draw/__init__.py (draw)"),
        ("kernels/common/online.py", "from . import copy", "a circle: "),
        ("api/reductions.py", "import cute_softmax.commands.demo", "commands/demo.py (commands)"),
        ("misplaced/file.py", "", "misplaced/file.py lies in no room"),
    ],
)
def test_what_points_up_or_in_circles_is_noticed(file, added, said, tmp_path):
    for source in sources(ROOT):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_bytes((ROOT / source).read_bytes())
    changed = tmp_path / "cute_softmax" / file
    changed.parent.mkdir(exist_ok=True)
    with changed.open("a") as f:
        f.write(f"\n{added}\n")
    assert any(said in complaint for complaint in complaints(tmp_path))


@pytest.mark.parametrize("file", sorted((ROOT / "cute_softmax/kernels").rglob("*.py")), ids=lambda f: f.stem)
def test_static_questions_are_marked_where_the_compiler_rewrites_code(file):
    """`const_expr` stands in functions that the DSL rewrites, where an `if` would else be one of run time."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and "const_expr(" in ast.unparse(node):
            assert {"cute.jit", "cute.kernel"} & {*map(ast.unparse, node.decorator_list)}, node.name
