"""The wheel: what is in it, and that it installs and imports in a clean environment."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources: setuptools writes into the tree that it builds."""
    source = tmp_path_factory.mktemp("source")
    files = run("git", "-C", ROOT, "ls-files", "-co", "--exclude-standard", "cute_softmax", "layouts")
    for name in [*files.split(), "pyproject.toml", "README.md", "LICENSE"]:
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    target = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", target, source)
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


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.name == f"cute_softmax-{PROJECT['version']}-py3-none-any.whl"
    tops = {name.split("/")[0] for name in names}
    assert tops == {"cute_softmax", "layouts", f"cute_softmax-{PROJECT['version']}.dist-info"}
    for needed in (
        "cute_softmax/py.typed",
        "cute_softmax/kernels/row.py",
        "layouts/py.typed",
        "layouts/figures/predicate.py",
        "layouts/assets/explorer.js",
        f"cute_softmax-{PROJECT['version']}.dist-info/licenses/LICENSE",
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
    assert text[1].split() == ["cu13", "bench", "docs", "dev"]
    needed = "\n".join(text[2:])
    assert "nvidia-cutlass-dsl<4.9,>=4.8.1\n" in needed
    assert 'nvidia-cutlass-dsl[cu13]<4.9,>=4.8.1; extra == "cu13"' in needed
    # Every requirement has a lower and an upper bound; tools for developers may lack the upper one.
    for line in text[2:]:
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
        "print([n for n in ('torch', 'cutlass', 'rich') if n in sys.modules], cute_softmax.__file__)",
    ).splitlines()
    assert said[0].endswith("_edges") and said[1] == "41" and int(said[2]) > 10
    assert said[3].startswith("[] ") and str(ROOT) not in said[3]


def test_importing_the_package_does_not_import_cutlass():
    code = "import sys, cute_softmax; print(cute_softmax.softmax.__name__, 'cutlass' in sys.modules)"
    assert run(sys.executable, "-c", code).split() == ["softmax", "False"]


def test_the_public_names_are_there():
    import cute_softmax

    assert all(hasattr(cute_softmax, name) for name in cute_softmax.__all__)
    assert cute_softmax.__version__ == PROJECT["version"]


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
        assert requirement.split(">")[0].split("[")[0] in pinned, requirement
    assert pinned["torch"] == [""]
