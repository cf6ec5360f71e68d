"""The key of a stored kernel: what it covers, and the runtime library that is taken."""

import ast
import ctypes
import importlib.metadata
import os
import shutil
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from stored import FIELDS, PROJECT

from cute_softmax.runtime import cache

pytest_plugins = ("stored",)


def test_the_key_covers_name_and_every_field():
    changes = [
        FIELDS | change for change in ({"arch": "sm_100a"}, {"threads": 129}, {"stages": 0}, {"more": 1})
    ]
    keys = {cache.entry_key("add_one", fields) for fields in [FIELDS, *changes]}
    keys.add(cache.entry_key("add_two", FIELDS))
    assert len(keys) == 6
    assert cache.entry_key("add_one", dict(reversed(FIELDS.items()))) == cache.entry_key("add_one", FIELDS)
    assert cache.entry_key("add_one", {"x": True}) != cache.entry_key("add_one", {"x": 1})
    assert cache.entry_key("add_one", {"x": 1.0}) != cache.entry_key("add_one", {"x": 1})


def imported_by(path: Path) -> set[Path]:
    """The files of this project that a module imports: with the module, or what compiles, when it compiles."""
    found = set()
    package = path.relative_to(PROJECT).parent.parts
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if path.name == "compile.py" else tree.body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            names = [base, *([*base, alias.name] for alias in node.names)]
        for name in names:
            module = PROJECT.joinpath(*name)
            found.update(f for f in (module.with_suffix(".py"), module / "__init__.py") if f.is_file())
    return found


def shaping() -> set[Path]:
    """The files that shape kernels: those of kernels and of what compiles them, and all that they import."""
    found: set[Path] = set()
    unseen = {PROJECT / "cute_softmax/runtime/compile.py"}
    for folder in ("kernels", "ladder"):
        unseen.update(PROJECT.glob(f"cute_softmax/{folder}/**/*.py"))
    while unseen:
        found |= unseen
        unseen = {file for path in unseen for file in imported_by(path)} - found
    return found


def test_what_shapes_kernels():
    names = {str(path.relative_to(PROJECT)) for path in shaping()}
    assert {
        "cute_softmax/kernels/row.py",
        "cute_softmax/kernels/common/online.py",
        "cute_softmax/kernels/matmul/forward_mma.py",
        "cute_softmax/ladder/rung1_thread.py",
        "cute_softmax/plan/row.py",
        "cute_softmax/plan/hardware.py",
        "layouts/algebra.py",
    } <= names
    assert {path.name for path in imported_by(Path(__file__))} == {"cache.py", "__init__.py"}


def test_the_key_covers_each_file_that_shapes_a_kernel(tmp_path):
    def key() -> str:
        cache.fingerprint.cache_clear()
        return cache.fingerprint(tmp_path)

    for folder in ("cute_softmax", "layouts"):
        shutil.copytree(PROJECT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    seen = {key()}
    shapes = sorted(path.relative_to(PROJECT) for path in shaping())
    for file in shapes:
        with (tmp_path / file).open("a") as source:
            source.write("# changed\n")
        seen.add(key())
    assert len(shapes) > 50 and len(seen) == len(shapes) + 1
    (tmp_path / "cute_softmax/api/softmax.py").write_text("shapes no kernel")
    assert key() in seen


@pytest.mark.parametrize("package", ["nvidia-cutlass-dsl", "apache-tvm-ffi"])
def test_the_key_covers_versions(package, monkeypatch, fresh_fingerprint):
    before = cache.fingerprint()
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9" if name == package else version(name))
    cache.fingerprint.cache_clear()
    assert cache.fingerprint() != before


def test_the_key_covers_cpu_cuda_and_environment(monkeypatch, fresh_fingerprint):
    def fingerprint() -> str:
        cache.fingerprint.cache_clear()
        return cache.fingerprint()

    before = fingerprint()
    for name in cache.NO_CODE:
        monkeypatch.setenv(name, "/other")
    monkeypatch.setenv("HOSTNAME", "other")
    assert fingerprint() == before
    monkeypatch.setenv("CUTE_DSL_LINEINFO", "1")
    assert fingerprint() != before
    monkeypatch.delenv("CUTE_DSL_LINEINFO")
    assert "avx" in cache._cpu_features() or os.uname().machine != "x86_64"
    with monkeypatch.context() as patch:
        patch.setattr(cache, "_cpu_features", lambda: "flags: none")
        assert fingerprint() != before
    with monkeypatch.context() as patch:
        patch.setattr(cache, "runtime_library", lambda: Path("/x/cu12/lib/libcute_dsl_runtime.so"))
        assert fingerprint() != before
    assert fingerprint() == before


# ---------------------------------------------------------------------------------------------------- runtime library


def test_the_runtime_library_is_the_one_cutlass_takes():
    import cutlass
    import cutlass.cute as cute

    assert str(cache.runtime_library()) in cute.runtime.find_runtime_libraries()
    assert cache.runtime_library().parts[-3] == f"cu{cutlass.CUDA_VERSION.major}"


@pytest.mark.parametrize(
    ("installed", "driver", "taken"),
    [
        ((12, 13), 13010, 13),
        ((12, 13), 12090, 12),
        ((12, 13), None, 13),
        ((12,), 13010, 12),
        ((13,), 12090, 13),
        ((9, 13), None, 13),
    ],
)
def test_the_cuda_version_taken(installed, driver, taken, tmp_path, monkeypatch, fresh_fingerprint):
    package = tmp_path / "nvidia_cutlass_dsl"
    for version in installed:
        library = package / f"cu{version}/lib/libcute_dsl_runtime.so"
        library.parent.mkdir(parents=True)
        library.write_text("")
    spec = ModuleSpec("cutlass", None, origin=str(package / "dsl_packages/cutlass/__init__.py"))
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: spec)

    class Driver:
        def __init__(self, name: str) -> None:
            if driver is None:
                raise OSError(name)

        def cuDriverGetVersion(self, version) -> int:
            ctypes.cast(version, ctypes.POINTER(ctypes.c_int))[0] = driver
            return 0

    monkeypatch.setattr(cache.ctypes, "CDLL", Driver)
    assert cache.runtime_library() == package / f"cu{taken}/lib/libcute_dsl_runtime.so"


def test_an_incomplete_install_is_named(tmp_path, monkeypatch, fresh_fingerprint):
    spec = ModuleSpec("cutlass", None, origin=str(tmp_path / "a/b/__init__.py"))
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(FileNotFoundError, match=r"no cu.*libcute_dsl_runtime\.so in"):
        cache.runtime_library()
