"""The wheel: what is in it, and that it installs and imports in a clean environment."""

import ast
import builtins
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import cute_softmax
from cute_softmax.commands import line as command_line

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = cute_softmax.__version__
HOME = "https://example.org/somebody/cute_softmax"


def run(*command: object, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources: setuptools writes into the tree that it builds."""
    source = tmp_path_factory.mktemp("source")
    files = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "cute_softmax", "layouts")
    for name in [*files.split(), "pyproject.toml", "setup.py", "README.md", "LICENSE"]:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    target = tmp_path_factory.mktemp("dist")
    environment = os.environ | {"PROJECT_URL": HOME}
    pip = [sys.executable, "-m", "pip"]
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", target, source, env=environment)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment that holds the wheel and nothing it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel)
    return python


def test_metadata_names_the_home_of_the_project(wheel):
    """Which a build is told, as the release's workflow does."""
    metadata = zipfile.ZipFile(wheel).read(f"cute_softmax-{VERSION}.dist-info/METADATA").decode()
    assert (
        f"Project-URL: Source, {HOME}\n" in metadata and f"Project-URL: Issues, {HOME}/issues\n" in metadata
    )
    assert "PROJECT_URL: ${{ github." in (ROOT / ".github" / "workflows" / "release.yml").read_text()


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"cute_softmax-{VERSION}-py3-none-any.whl"
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cute_softmax", "layouts", f"cute_softmax-{VERSION}.dist-info"}
    for needed in (
        "cute_softmax/py.typed",
        "cute_softmax/plan/tables/h200.json",
        "cute_softmax/kernels/row.py",
        "layouts/py.typed",
        "layouts/figures/predicate.py",
        "layouts/assets/explorer.js",
        f"cute_softmax-{VERSION}.dist-info/licenses/LICENSE",
    ):
        assert needed in names
    sources = {
        p.relative_to(ROOT).as_posix()
        for top in ("cute_softmax", "layouts")
        for p in (ROOT / top).rglob("*.py")
    }
    assert sources <= set(names)


def test_metadata_names_dependencies_and_extras(clean):
    text = run(
        clean,
        "-I",
        "-c",
        "from importlib.metadata import metadata as m; d = m('cute-softmax');"
        "print(d['Requires-Python'], d['License-Expression']); print(*d.get_all('Provides-Extra'));"
        "print(*d.get_all('Requires-Dist'), sep='\\n')",
    ).splitlines()
    assert text[0] == ">=3.10 MIT"
    assert text[1].split() == list(PROJECT["optional-dependencies"])
    needed = "\n".join(text[2:])
    assert "nvidia-cutlass-dsl<4.9,>=4.8\n" in needed
    assert 'nvidia-cutlass-dsl[cu13]<4.9,>=4.8; extra == "cu13"' in needed
    # Every requirement has a lower and an upper bound; tools for developers may lack the upper one.
    for line in text[2:]:
        if line.startswith("cute-softmax["):
            continue
        assert ">" in line.split(";")[0]
        assert "<" in line.split(";")[0] or 'extra == "dev"' in line, line


def test_plans_and_layouts_need_no_other_package(clean):
    said = run(
        clean,
        "-I",
        "-c",
        "import sys, cute_softmax, layouts\n"
        "from cute_softmax import plan\nfrom cute_softmax.plan import catalogue, hardware, problem\n"
        "p = problem.canonical((8, 50257), (1,), [problem.Operand('bf16', (50257, 1))] * 2)\n"
        "print(plan.plan('softmax', p, hardware.H200).row_class.name)\n"
        "print(layouts.parse('((32,4),8):((32,1),4)')(33, 2))\n"
        "sm = hardware.ARCHITECTURES['sm_90a']\n"
        "print(sum(1 for _ in catalogue.classes('softmax', sm, ('bf16', 'bf16'))))\n"
        "others = {'torch', 'cutlass', 'rich', 'click', 'drawsvg'} & {*sys.modules}\n"
        "print(sorted(others), cute_softmax.__file__)",
    ).splitlines()
    assert said[0].endswith("_edges") and said[1] == "41" and int(said[2]) > 10
    assert said[3].startswith("[] ") and str(ROOT) not in said[3]


def test_the_command_of_the_wheel_says_what_it_lacks(clean):
    code = (
        "import sys; from importlib.metadata import entry_points\n"
        "(command,) = entry_points(group='console_scripts', name='cute-softmax')\nsys.exit(command.load()(['info']))"
    )
    done = subprocess.run([clean, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'cute-softmax[cli]'" in done.stderr


@pytest.fixture(scope="module")
def furnished(wheel, tmp_path_factory) -> Path:
    """A new environment with the wheel, which finds the packages of this one: all but the checkout."""
    folder = tmp_path_factory.mktemp("furnished")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", site, wheel)
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python


def test_the_wheel_works_where_its_dependencies_are(furnished, tmp_path):
    code = (
        "import torch, cute_softmax\nx = torch.randn(8, 1000, requires_grad=True)\n"
        "y = cute_softmax.softmax(x, dtype=torch.float32); y.square().sum().backward()\n"
        "assert torch.equal(y, torch.softmax(x, -1)) and x.grad.abs().max() > 0\n"
        "from cute_softmax.__main__ import main\n"
        "assert main(['explain', '4096x8192']) == 0\n"
        f"assert main(['diagrams', '64x1000', '-o', {str(tmp_path)!r}]) == 0\n"
        "assert main(['bench', '--list']) == 2\n"
        "print(cute_softmax.__file__)"
    )
    done = subprocess.run([furnished, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout.splitlines()[-1]
    assert "softmax of 4096 rows of 8192" in done.stdout and (tmp_path / "explorer.html").exists()
    assert done.stderr.startswith("error: the benchmarks are in the repository")


def test_importing_the_package_does_not_import_cutlass():
    code = "import sys, cute_softmax; print(cute_softmax.softmax.__name__, 'cutlass' in sys.modules)"
    assert run(sys.executable, "-c", code).split() == ["softmax", "False"]


def test_the_public_names_are_there():
    assert all(hasattr(cute_softmax, name) for name in cute_softmax.__all__)
    assert "version" not in PROJECT  # that is read from the package


def test_dir_shows_the_api_and_nothing_else():
    """In a new process, and after all of it has been used."""
    code = (
        "import cute_softmax as c; a = dir(c); [getattr(c, n) for n in a]; import cute_softmax.api.softmax\n"
        "assert a == dir(c); print(*a)"
    )
    shown = set(run(sys.executable, "-c", code).split())
    assert shown == {*cute_softmax.__all__, "sum", "hardware", "__version__"}


def test_what_is_found_lazily_is_what_readers_of_the_source_see():
    """The imports for type checkers name the same homes as `__getattr__` looks in."""
    source = ast.parse((ROOT / "cute_softmax" / "__init__.py").read_text())
    (block,) = (node for node in source.body if isinstance(node, ast.If))
    told = {(i.module, a.name) for i in block.body for a in i.names}
    homes = {(home, name) for name, home in cute_softmax._HOME_OF.items()}
    assert told == homes | {(None, name) for name in cute_softmax._MODULES}


def test_a_star_import_hides_no_builtin():
    names: dict = {}
    exec("from cute_softmax import *", names)
    assert "softmax" in names and not {*names} & ({*dir(builtins)} - {"__builtins__", "__doc__", "__name__"})


def test_a_name_that_there_is_not_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cute_softmax' has no attribute 'softmex'"):
        print(cute_softmax.softmex)


def test_functions_are_not_hidden_by_modules_of_their_names():
    """Whatever of the package was imported first."""
    code = (
        "from cute_softmax.acceleration import Report\nfrom cute_softmax.api import softmax, matmul, explain\n"
        "import inspect, cute_softmax as c\n"
        "print(*[n for n in dir(c) if inspect.ismodule(getattr(c, n))])"
    )
    assert set(run(sys.executable, "-c", code).split()) == {*cute_softmax._MODULES}


def test_importing_the_package_is_quick():
    """It loads nothing of the package's own; what a first call needs beside torch is a fraction of what torch takes."""
    code = (
        "import sys, time, torch\nbefore, start = {*sys.modules}, time.process_time()\nimport cute_softmax\n"
        "took = time.process_time() - start\n"
        "print(took, *({*sys.modules} - before))"
    )
    took, *loaded = run(sys.executable, "-c", code).split()
    assert {*loaded} == {"cute_softmax", "cute_softmax.version"} and float(took) < 0.03


def test_operators_are_registered_by_one_module():
    """A process that runs an exported graph needs them all before it calls a function."""
    code = (
        "import importlib, pkgutil, torch, cute_softmax.operators\n"
        "names = lambda: {n for n in torch._C._dispatch_get_all_op_names() if n.startswith('cute_softmax::')}\n"
        "first, package = names(), importlib.import_module('cute_softmax.dispatch')\n"
        "for m in pkgutil.walk_packages(package.__path__, 'cute_softmax.dispatch.'): importlib.import_module(m.name)\n"
        "assert first == names(), names() - first; print(len(first))"
    )
    assert int(run(sys.executable, "-c", code)) >= 10


def test_an_exported_program_runs_in_another_process(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            return cute_softmax.softmax(x, -1)

    x, path = torch.randn(4, 8), tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Model(), (x,)), path)
    code = (
        f"import torch, cute_softmax.operators\nm = torch.export.load({str(path)!r}).module()\n"
        "x = torch.arange(32.0).view(4, 8); assert torch.equal(m(x), torch.softmax(x, -1)); print('same')"
    )
    assert run(sys.executable, "-c", code) == "same\n"


def test_constraints_hold_every_dependency_at_one_version_per_python():
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            requirement, _, marker = line.partition(";")
            name, version = requirement.strip().split("==")
            assert "*" not in version
            pinned.setdefault(name, []).append(marker.strip())
    for name, markers in pinned.items():
        assert len(markers) == 1 or all("python_full_version" in m for m in markers), name
    wanted = [*PROJECT["dependencies"], *(r for e in PROJECT["optional-dependencies"].values() for r in e)]
    for requirement in wanted:
        assert requirement.split(">")[0].split("[")[0] in {*pinned, "cute-softmax"}, requirement
    assert pinned["torch"] == [""]


def test_what_the_repository_says_of_its_versions_agrees():
    """Ruff's version before a commit is that of the tests, and what changed has a heading."""
    (pinned,) = re.findall(r"^ruff==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert f"rev: v{pinned}\n" in (ROOT / ".pre-commit-config.yaml").read_text()
    assert f"\n## {VERSION}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_forms_and_workflows_name_what_there_is():
    """Commands, scripts and targets of the files that are used elsewhere."""
    form = (ROOT / ".github" / "ISSUE_TEMPLATE" / "fault.yml").read_text()
    assert {*re.findall(r"cute-softmax (\w+)", form)} == {"info", "explain"} <= {*command_line.line.commands}
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        text = workflow.read_text()
        targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)
        assert {*re.findall(r"run: make (\w+)", text)} <= {*targets}
        assert all((ROOT / name).exists() for name in re.findall(r"python (\S+\.py)", text))
