"""The package of the kernel hub: built, and loaded as the hub's loader does, in a process that has nothing else."""

import ast
import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import cute_softmax

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = {*sys.stdlib_module_names, "torch", "cutlass", "tvm_ffi"}
# How the loader imports a package: from the path of its first file, under the name that its metadata has.
LOAD = """
import importlib.util, json, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"cute_softmax", "layouts", "filelock", "platformdirs", "drawsvg", "rich", "click"}:
            raise ModuleNotFoundError(f"not on the hub: {name}", name=name)
def load(folder):
    name = json.load(open(folder + "/metadata.json"))["id"]
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""


def script(name: str):
    spec = spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    return script("hub").build(tmp_path_factory.mktemp("hub"))


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-c", LOAD + code],
        capture_output=True,
        text=True,
        cwd="/",
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_are_relative_or_allowed(package):
    seen = set()
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text())
        for block in [n for n in ast.walk(tree) if isinstance(n, ast.If)]:
            if ast.unparse(block.test) == "TYPE_CHECKING":
                block.body = [ast.Pass()]
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                seen |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                seen.add(node.module.split(".")[0])
            elif isinstance(node, ast.ImportFrom):
                above = file.relative_to(package).parts[:-1]
                assert node.level <= len(above) + 1, f"{file} imports from above the package"
                target = package.joinpath(
                    *above[: len(above) + 1 - node.level], *(node.module or "").split(".")
                )
                left_out = {"draw", "figures"} & {*target.parts}
                assert left_out or target.is_dir() or target.with_suffix(".py").exists(), (
                    file,
                    ast.unparse(node),
                )
    assert seen <= ALLOWED, seen - ALLOWED
    assert {"torch", "cutlass", "tvm_ffi"} <= seen


def test_what_is_there(package):
    metadata = json.loads((package / "metadata.json").read_text())
    assert metadata["name"] == "cute-softmax" and metadata["backend"] == {"type": "cuda"}
    assert metadata["id"].isidentifier() and metadata["python-depends"] == ["nvidia-cutlass-dsl", "tvm-ffi"]
    there = {p.relative_to(package).parts[0] for p in package.iterdir()}
    assert {"plan", "kernels", "layouts", "nn.py", "py.typed"} <= there and not {
        "draw",
        "commands",
        "ladder",
    } & there
    assert (package / "plan" / "tables" / "h200.json").exists()
    assert cute_softmax.__version__ in (package.parents[1] / "README.md").read_text()


def test_it_computes_as_the_package_does(package):
    said = run(f"""
sys.meta_path.insert(0, Refused())
kernel = load({str(package)!r})
import torch
x = torch.randn(8, 100, requires_grad=True)
y = kernel.softmax(x, scale=2.0)
y.square().sum().backward()
assert torch.allclose(y, torch.softmax(2 * x, -1)) and x.grad.any()
assert torch.equal(kernel.nn.Softmax(-1)(x), torch.softmax(x, -1))
with kernel.accelerate(): torch.softmax(x, -1)
print(kernel.explain((4096, 8192)).splitlines()[0])
plan = kernel.plan_softmax((4096, 8192))
assert plan._repr_svg_() is None and plan.kernel.tv._repr_svg_() is None
sys.meta_path.pop(0)  # torch's own compiler takes locks
f = torch.compile(lambda t: kernel.logsumexp(t, -1), fullgraph=True, backend="eager")
assert torch.equal(f(x), torch.logsumexp(x, -1))
""")
    assert said == "softmax of 4096 rows of 8192, bf16, for sm_90a\n"


@pytest.mark.long
def test_its_kernels_compile_and_are_kept(package, tmp_path):
    code = f"""
sys.meta_path.insert(0, Refused())
kernel = load({str(package)!r})
from importlib import import_module
of = lambda name: import_module("." + name, kernel.__name__)
c = of("plan.describe").plan_shape((64, 1001)).kernel
of("runtime.launch").function_of(c)
print(len(of("runtime.cache").Store().entries()), "cutlass" in sys.modules, of("runtime.cache").fingerprint())
"""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "CUTE_SOFTMAX_CACHE_DIR": ""}
    first, second = (run(code, **environment).split() for _ in range(2))
    assert first[:2] == ["1", "True"] and second[:2] == ["1", "False"] and first[2] == second[2]
    assert (tmp_path / "cute_softmax").is_dir()
    source = package / "kernels" / "row.py"
    text = source.read_text()
    try:
        source.write_text(text + "# changed\n")
        assert run(code, **environment).split()[0] == "2", "sources are part of the key"
    finally:
        source.write_text(text)


def test_it_shares_a_process_with_the_installed_package(package):
    said = run(
        f"""
sys.path.insert(0, {str(ROOT)!r})
kernel = load({str(package)!r})
import cute_softmax, cute_softmax.operators, torch
kernel.softmax, kernel.logsumexp
x = torch.randn(3, 4)
assert torch.equal(kernel.softmax(x), cute_softmax.softmax(x))
names = {{n.split("::")[0] for n in torch._C._dispatch_get_all_op_names() if n.startswith("cute_softmax")}}
print(len(names), kernel.softmax is cute_softmax.softmax)
"""
    )
    assert said == "2 False\n"


def test_another_version_has_another_namespace(package, tmp_path, monkeypatch):
    hub = script("hub")
    first = json.loads((package / "metadata.json").read_text())["id"]
    assert first == json.loads((hub.build(tmp_path / "again") / "metadata.json").read_text())["id"]
    monkeypatch.setattr(hub, "sources", lambda there=hub.sources: list(there())[:-1])
    assert first != json.loads((hub.build(tmp_path / "other") / "metadata.json").read_text())["id"]


def test_the_lock_of_the_hub(tmp_path):
    folders, path, order = script("hub_folders"), tmp_path / "lock", []

    def hold():
        with folders.locked(path, 5):
            order.append("first")
            time.sleep(0.3)
            order.append("done")

    thread = threading.Thread(target=hold)
    thread.start()
    while not order:
        time.sleep(0.01)
    with pytest.raises(TimeoutError), folders.locked(path, 0.05):
        pass
    with folders.locked(path, 5):
        order.append("second")
    thread.join()
    assert order == ["first", "done", "second"]
    with pytest.raises(OSError), folders.locked(tmp_path / "none" / "lock", 1):
        pass


def test_the_folders_of_the_hub_are_those_of_the_library(monkeypatch, tmp_path):
    from cute_softmax.runtime import folders

    hub = script("hub_folders")
    for set_to in (None, str(tmp_path)):
        for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
            monkeypatch.delenv(name, raising=False) if set_to is None else monkeypatch.setenv(name, set_to)
        assert hub.cache_folder() == folders.cache_folder()
        assert hub.settings_folder() == folders.settings_folder()
