"""The store of compiled kernels: each thing the contract asks of it, on small real kernels."""

import ast
import contextlib
import ctypes
import importlib.metadata
import json
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from cute_softmax.commands import cache as command
from cute_softmax.runtime import cache
from cute_softmax.runtime.cache import Store

FIELDS = {"arch": "sm_90a", "dtype": "float32", "threads": 128, "cluster": (1, 1), "stages": None}
PROJECT = Path(__file__).parents[1]
NOBODY = 65534


def compile_kernel(name: str, arch: str = "sm_90a"):
    """y = x + 1: `raw` takes addresses, length and stream, `tensors` runs on the caller's stream."""
    os.environ["CUTE_DSL_ARCH"] = arch
    import cuda.bindings.driver as cuda
    import cutlass
    import cutlass.cute as cute

    @cute.kernel
    def add_one(mX: cute.Tensor, mY: cute.Tensor):
        i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
        if i < mX.shape[0]:
            mY[i] = mX[i] + 1.0

    @cute.jit
    def launch(mX: cute.Tensor, mY: cute.Tensor, stream: cuda.CUstream):
        # More shared memory than the 48 KB that a kernel gets unasked.
        grid = (cute.ceil_div(mX.shape[0], 128), 1, 1)
        add_one(mX, mY).launch(grid=grid, block=(128, 1, 1), smem=64 * 1024, stream=stream)

    @cute.jit
    def raw(x: cutlass.Int64, y: cutlass.Int64, n: cutlass.Int32, stream: cuda.CUstream):
        mX = cute.make_tensor(
            cute.make_ptr(cutlass.Float32, x, cute.AddressSpace.gmem), cute.make_layout((n,))
        )
        mY = cute.make_tensor(
            cute.make_ptr(cutlass.Float32, y, cute.AddressSpace.gmem), cute.make_layout((n,))
        )
        launch(mX, mY, stream)

    options = f"--enable-tvm-ffi --gpu-arch={arch}"
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=name == "tensors")
    if name == "raw":
        integers = (cutlass.Int64(0), cutlass.Int64(0), cutlass.Int32(0))
        return cute.compile(raw, *integers, stream, options=options)
    n = cute.sym_int()
    vectors = [cute.runtime.make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2)]
    return cute.compile(launch, *vectors, stream, options=options)


class Build:
    """Returns one compiled kernel and counts how often it is asked to."""

    def __init__(self, compiled) -> None:
        self.compiled = compiled
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.compiled


@pytest.fixture(scope="module")
def compiled():
    return compile_kernel("raw")


@pytest.fixture
def build(compiled) -> Build:
    return Build(compiled)


@pytest.fixture
def store(tmp_path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def fresh_fingerprint():
    for function in (cache.fingerprint, cache.runtime_library):
        function.cache_clear()
    yield
    for function in (cache.fingerprint, cache.runtime_library):
        function.cache_clear()


@contextlib.contextmanager
def unprivileged(folder: Path):
    """Run the body as a user who may do no more than file modes say, the owner of `folder`."""
    if os.geteuid() != 0:
        yield
        return
    os.chown(folder, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextlib.contextmanager
def one_warning(match: str):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 1, messages
    assert match in messages[0]
    assert "cannot be used" in messages[0]


def entry_of(store: Store) -> Path:
    (entry,) = store.entries()
    return entry.path


def run_python(script: str, **environment: str) -> str:
    paths = os.pathsep.join([str(PROJECT), str(PROJECT / "tests"), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------------------- hit and miss


def test_a_miss_builds_and_a_hit_does_not(store, build):
    first = store.load("add_one", FIELDS, build)
    again = store.load("add_one", FIELDS, build)
    elsewhere = Store(store.root).load("add_one", FIELDS, build)
    assert build.calls == 1
    assert {type(f).__name__ for f in (first, again, elsewhere)} == {"Function"}
    assert all(map(callable, (first, again, elsewhere)))


def test_what_a_miss_leaves_in_the_folder(store, build):
    store.load("add_one", FIELDS, build)
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700
    entry = entry_of(store)
    assert entry.name == f"add_one-{cache.entry_key('add_one', FIELDS)}.so"
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600
    assert {path.name for path in store.root.iterdir()} == {entry.name, f"{entry.stem}.lock"}
    assert store.size_bytes() == entry.stat().st_size < 40_000


@pytest.mark.parametrize("name", ["raw", "tensors"])
def test_a_warm_process_loads_without_cutlass(store, name):
    store.load(name, FIELDS, lambda: compile_kernel(name))
    script = f"""
import json, sys, time
import torch
start = time.process_time()
from cute_softmax.runtime.cache import Store
imported = time.process_time()
import tvm_ffi
tvm = time.process_time()
function = Store().load({name!r}, {FIELDS!r}, lambda: sys.exit("built"))
end = time.process_time()
def error(*arguments):
    try:
        function(*arguments)
    except Exception as error:
        return [type(error).__name__, str(error)]
# No element is no block: an error on a GPU as without one.
empty = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")
errors = [error(*((0, 0, 0, 0) if {name!r} == "raw" else (empty, empty))), error("x"), error("x", 0, 0, 0)]
print(json.dumps([errors, "cutlass" in sys.modules, imported - start, tvm - imported, end - tvm]))
"""
    errors, cutlass, *seconds = json.loads(run_python(script, CUTE_SOFTMAX_CACHE_DIR=str(store.root)))
    print(
        "CPU time of import cache, import tvm_ffi, load: " + ", ".join(f"{1e3 * s:.1f} ms" for s in seconds)
    )
    assert not cutlass
    assert errors[0][0] in ("RuntimeError", "ValueError"), errors
    assert errors[1][0] == "TypeError"
    assert "parameters when calling" in errors[1][1]
    assert errors[2][0] == "TypeError"
    assert (
        seconds[0] + seconds[2] < 0.5
    )  # of CPU time: 0.13, nearly all for the modules here; cutlass takes 0.7


def test_the_fallback_function_is_the_bare_one(compiled):
    assert type(cache._in_memory(compiled)).__name__ == "Function"
    assert cache._in_memory(len) is len


def test_wrong_arguments_and_a_failing_build(store, build):
    with pytest.raises(ValueError, match=r"name must be an identifier.*'\.\./x'"):
        store.load("../x", FIELDS, build)
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.load("add_one", {"dtype": object()}, build)
    with pytest.raises(ZeroDivisionError):
        store.load("add_one", FIELDS, lambda: 1 / 0)
    assert build.calls == 0
    store.load("add_one", FIELDS, build)  # the failure left no lock behind
    assert build.calls == 1


# ------------------------------------------------------------------------------------------------------- key


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
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")  # a field of the plan
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


def test_the_fingerprint_is_fast(tmp_path):
    for i in range(10):
        path = tmp_path / f"cute_softmax/kernels/{i}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 30_000)
    seconds = []
    for _ in range(10):
        cache.fingerprint.cache_clear()
        start = time.perf_counter()
        cache.fingerprint(tmp_path)
        seconds.append(time.perf_counter() - start)
    print(f"fingerprint over 300 KB of sources: {1e3 * min(seconds):.2f} ms")
    assert min(seconds) < 0.01  # 2 ms on an idle machine


# --------------------------------------------------------------------------------------------------- damage


def rewrite(path: Path, content: bytes) -> None:
    """A new file, as this process may have mapped the old one."""
    path.unlink()
    path.write_bytes(content)
    path.chmod(0o600)


def flip(position: float):
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(position * (len(content) - 1))] ^= 1
        rewrite(path, content)

    return damage


def truncate(part: float):
    return lambda path: rewrite(path, path.read_bytes()[: int(part * path.stat().st_size)])


def not_loadable(path: Path) -> None:
    payload = b"not a library, under a digest that fits"
    rewrite(path, payload + cache._digest(path.with_suffix(""), payload))


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def writable(path: Path) -> None:
    path.chmod(0o620)


DAMAGES = {
    **{f"flip at {position}": flip(position) for position in (0, 0.001, 0.3, 0.9, 1)},
    **{f"truncated to {part}": truncate(part) for part in (0, 0.0005, 0.5, 0.999)},
    "garbage": lambda path: rewrite(path, os.urandom(20_000)),
    "not loadable": not_loadable,
    "removed": Path.unlink,
    "symlink": linked,
    "writable by others": writable,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_rebuilt(damage, store, build):
    store.load("add_one", FIELDS, build)
    # Under another path, as `dlopen` knows a library that is in the process by its path.
    moved = Store(store.root.rename(store.root.with_name("moved")))
    damage(entry_of(moved))
    assert callable(moved.load("add_one", FIELDS, build))
    assert build.calls == 2
    assert callable(Store(moved.root).load("add_one", FIELDS, build))
    assert build.calls == 2
    assert not entry_of(moved).is_symlink()


def test_an_entry_under_anothers_name_is_rebuilt(store, build):
    store.load("add_one", FIELDS, build)
    other = FIELDS | {"threads": 256}
    shutil.copy(entry_of(store), store.root / f"add_one-{cache.entry_key('add_one', other)}.so")
    store.load("add_one", other, build)
    assert build.calls == 2


def test_an_entry_of_another_user_is_not_loaded(store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    fstat = os.fstat

    def foreign(fd: int) -> os.stat_result:
        fields = list(fstat(fd))
        fields[stat.ST_UID] += 1
        return os.stat_result(fields)

    monkeypatch.setattr(cache.os, "fstat", foreign)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("a foreign file was loaded"))
    assert cache.Store(store.root)._read(entry_of(store).with_suffix("")) is None


def test_an_entry_that_never_loads_is_compiled_in_memory(store, build, monkeypatch):
    def refuse(file: Path):
        raise RuntimeError("noexec")

    monkeypatch.setattr(cache, "_load", refuse)
    with one_warning("cannot be loaded"):
        assert callable(store.load("add_one", FIELDS, build))


# ------------------------------------------------------------------------------------------- private folder


def group_writable(root: Path) -> None:
    root.chmod(0o770)


def world_writable(root: Path) -> None:
    root.chmod(0o707)


def link(root: Path) -> None:
    root.rename(root.with_name("real"))
    root.symlink_to(root.with_name("real"))


def regular_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_text("")


@pytest.mark.parametrize("spoil", [group_writable, world_writable, link, regular_file])
def test_a_folder_that_is_not_private_is_refused(spoil, store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    spoil(store.root)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("loaded from a folder that is not private"))
    other = Store(store.root)
    with one_warning(f"{store.root} must be a folder, no link"):
        assert callable(other.load("add_one", FIELDS, build))
        assert callable(other.load("add_two", FIELDS, build))  # no second warning
    assert build.calls == 3


def test_the_folder_of_another_user_is_refused(store, build, monkeypatch):
    store.load("add_one", FIELDS, build)
    owner = os.geteuid()
    monkeypatch.setattr(cache.os, "geteuid", lambda: owner + 1)
    monkeypatch.setattr(cache, "_load", lambda file: pytest.fail("loaded from a foreign folder"))
    with one_warning(f"belongs to user {owner + 1}"):
        assert callable(Store(store.root).load("add_one", FIELDS, build))
    with pytest.raises(PermissionError):
        store.clear()
    assert build.calls == 2


def test_the_mask_of_the_user_does_not_matter(store, build):
    old = os.umask(0o002)
    try:
        store.load("add_one", FIELDS, build)
    finally:
        os.umask(old)
    Store(store.root).load("add_one", FIELDS, build)
    assert build.calls == 1
    assert stat.S_IMODE(store.root.stat().st_mode) == 0o700


# ------------------------------------------------------------------------------------------------- fallback


def test_a_read_only_folder_is_read_and_else_bypassed(compiled):
    build = Build(compiled)
    root = Path(tempfile.mkdtemp())
    try:
        with unprivileged(root):
            Store(root).load("add_one", FIELDS, build)
            root.chmod(0o500)
            store = Store(root)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert callable(store.load("add_one", FIELDS, build))
            assert build.calls == 1
            with one_warning("Permission denied"):
                assert callable(store.load("add_two", FIELDS, build))
                assert callable(store.load("add_three", FIELDS, build))
            assert build.calls == 3
            root.chmod(0o700)
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize("home", ["/proc/nowhere", None])
def test_no_home(home, build, monkeypatch, tmp_path):
    for variable in ("HOME", "XDG_CACHE_HOME", cache.ENVIRONMENT):
        monkeypatch.delenv(variable, raising=False)
    if home:
        monkeypatch.setenv("HOME", home)

    def nobody(user: int):
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    with one_warning(home or "not an absolute path"):
        assert callable(Store().load("add_one", FIELDS, build))
    assert not list(tmp_path.iterdir())


def test_the_default_folder(monkeypatch, tmp_path):
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store().root == tmp_path / "cute_softmax"
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "mine"))
    assert Store().root == tmp_path / "mine"
    assert not list(tmp_path.iterdir())


def test_no_cutlass(store, build, monkeypatch, fresh_fingerprint):
    monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: None)
    with one_warning("nvidia-cutlass-dsl is not installed"):
        assert callable(store.load("add_one", FIELDS, build))


# ------------------------------------------------------------------------------------------------- linkers


@pytest.mark.parametrize("linkers", ["absent", "failing"])
def test_without_a_linker_the_object_file_is_stored(linkers, store, build, monkeypatch, tmp_path):
    if linkers == "failing":
        for name in cache.LINKERS:
            (tmp_path / name).symlink_to(shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert callable(store.load("add_one", FIELDS, build))
    assert entry_of(store).suffix == ".o"
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 1
    flip(0.5)(entry_of(store))
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 2


@pytest.mark.parametrize("linker", [name for name in cache.LINKERS if shutil.which(name)])
def test_each_linker_makes_a_library(linker, store, build, monkeypatch):
    monkeypatch.setattr(cache, "LINKERS", (linker,))
    store.load("add_one", FIELDS, build)
    assert entry_of(store).suffix == ".so"
    assert callable(Store(store.root).load("add_one", FIELDS, build))
    assert build.calls == 1


# ----------------------------------------------------------------------------------------- runtime library


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


# ------------------------------------------------------------------------------------------ many processes

FORKS = f"""
import os, signal, sys, time, warnings
import tvm_ffi, filelock
from cute_softmax.runtime.cache import Store
from test_cache import compile_kernel
warnings.simplefilter("error")
root, log = sys.argv[1:] if len(sys.argv) > 2 else (os.environ["STORE"], os.environ["LOG"])
def note(word):
    with open(log, "a") as file:
        file.write(word + "\\n")
def wait_for(word, seconds=120):
    end = time.monotonic() + seconds
    while word not in open(log).read():
        assert time.monotonic() < end, word
        time.sleep(0.01)
def build():
    note("build")
    return compile_kernel("raw")
def hang():
    note("hang")
    time.sleep(1000)
def child(build):
    process = os.fork()
    if process == 0:
        status = 1
        try:
            assert callable(Store(root).load("raw", {FIELDS!r}, build))
            note("loaded")
            status = 0
        finally:
            os._exit(status)
    return process
"""


@pytest.fixture
def log(tmp_path) -> Path:
    path = tmp_path / "log"
    path.write_text("")
    return path


def test_many_processes_compile_once(store, log):
    script = FORKS + "children = [child(build) for _ in range(12)]\n"
    script += "assert [os.waitpid(c, 0)[1] for c in children] == [0] * 12\n"
    run_python(script, STORE=str(store.root), LOG=str(log))
    words = log.read_text().split()
    assert words.count("build") == 1
    assert words.count("loaded") == 12
    assert len(store.entries()) == 1


def test_a_killed_process_blocks_nobody(store, log):
    script = FORKS + (
        "victim = child(hang)\n"
        "wait_for('hang')\n"
        "others = [child(build) for _ in range(2)]\n"
        "time.sleep(0.3)\n"
        "assert 'build' not in open(log).read()  # they wait for the victim\n"
        "os.kill(victim, signal.SIGKILL)\n"
        "os.waitpid(victim, 0)\n"
        "assert [os.waitpid(c, 0)[1] for c in others] == [0, 0]\n"
    )
    start = time.monotonic()
    run_python(script, STORE=str(store.root), LOG=str(log))
    assert log.read_text().split().count("build") == 1
    assert time.monotonic() - start < cache.LOCK_TIMEOUT_S / 2


def test_a_holder_that_hangs_is_not_waited_for_forever(store, build, monkeypatch):
    import filelock

    store.load("add_one", FIELDS, build)
    entry = entry_of(store)
    entry.unlink()
    monkeypatch.setattr(cache, "LOCK_TIMEOUT_S", 0.2)
    with filelock.FileLock(entry.with_suffix(".lock")):
        process = run_python(
            f"""
from cute_softmax.runtime import cache
from test_cache import FIELDS, compile_kernel
cache.LOCK_TIMEOUT_S = 0.2
print(callable(cache.Store({str(store.root)!r}).load("add_one", FIELDS, lambda: compile_kernel("raw"))))
"""
        )
    assert process.split() == ["True"]
    assert entry.exists()


# --------------------------------------------------------------------------------------------- size and CLI


@pytest.fixture
def three(store, build) -> list[Path]:
    """Three entries, the first one used the longest ago."""
    paths = []
    for age, name in enumerate(("three", "two", "one")):
        store.load(name, FIELDS, build)
        (path,) = (entry.path for entry in store.entries() if entry.path.name.startswith(name))
        os.utime(path, (time.time() - 1000 * (age + 1),) * 2)
        paths.append(path)
    return paths[::-1]


def test_prune_removes_the_least_recently_used(store, three, build):
    other = Store(store.root)
    assert [entry.path for entry in other.entries()] == three
    size = other.size_bytes()
    assert other.prune(size) == 0
    assert other.prune(size - 1) == 1
    assert [entry.path for entry in other.entries()] == three[1:]
    other.load("two", FIELDS, build)  # now it is in use, and used last
    assert [entry.path for entry in other.entries()] == [three[2], three[1]]
    assert other.prune(0) == 1
    assert [entry.path for entry in other.entries()] == [three[1]]
    assert store.prune(0) == 0  # all loaded by that one


def test_a_new_kernel_prunes(store, three, build):
    bounded = Store(store.root, max_bytes=store.size_bytes())
    bounded.load("four", FIELDS, build)
    names = [entry.path.name.partition("-")[0] for entry in bounded.entries()]
    assert names == ["two", "three", "four"]
    assert bounded.size_bytes() <= bounded.max_bytes


def test_leftovers_go_and_other_files_stay(store, three):
    old = time.time() - 2 * cache.LEFTOVER_S
    leftover = store.root / ".cute_softmax-build-abc"
    leftover.mkdir()
    (leftover / "x.o").write_text("")
    fresh = store.root / ".cute_softmax-build-def"
    fresh.mkdir()
    mine = store.root / "notes.lock"
    mine.write_text("not the store's")
    for path in (leftover, mine, three[0].with_suffix(".lock")):
        os.utime(path, (old, old))
    store.prune()
    assert not leftover.exists()
    assert not three[0].with_suffix(".lock").exists()
    assert three[1].with_suffix(".lock").exists()
    assert fresh.exists()
    assert store.clear() == 3
    assert [path.name for path in store.root.iterdir()] == ["notes.lock"]


def test_clear_leaves_loaded_functions_valid(store, build):
    function = store.load("add_one", FIELDS, build)
    assert store.clear() == 1
    assert store.size_bytes() == 0
    with pytest.raises(TypeError, match="Mismatched type"):
        function("x", 0, 0, 0)
    store.load("add_one", FIELDS, build)
    assert build.calls == 2


def test_an_absent_folder_is_empty(store):
    assert store.entries() == []
    assert store.clear() == store.prune(0) == store.size_bytes() == 0
    assert not store.root.exists()


def test_command_line(store, three, monkeypatch, capsys):
    monkeypatch.setenv(cache.ENVIRONMENT, str(store.root))
    assert command.run("path") == 0
    assert capsys.readouterr().out == f"{store.root}\n"
    assert command.run("list") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [path.name for path in three] == [line.split()[-1] for line in lines[:3]]
    assert "3 kernels" in lines[3]
    store.root.chmod(0o777)
    assert command.run("clear") == 2
    assert "cannot clear" in capsys.readouterr().err
    store.root.chmod(0o700)
    assert command.run("clear") == 0
    assert capsys.readouterr().out == f"3 kernels removed from {store.root}\n"
    assert store.entries() == []
    monkeypatch.setenv(cache.ENVIRONMENT, str(store.root / "notes"))
    assert "0 kernels" in run_python("from cute_softmax.commands.cache import run; run('list')")


# ------------------------------------------------------------------------------------------------------ GPU


def architecture(torch, device: int) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@pytest.fixture
def torch_with_gpus(request):
    torch = pytest.importorskip("torch")
    wanted = request.param
    if torch.cuda.device_count() < wanted:
        pytest.skip(f"needs {wanted} GPUs, found {torch.cuda.device_count()}")
    return torch


@pytest.mark.gpu
@pytest.mark.parametrize(("torch_with_gpus", "device"), [(1, 0), (2, 1)], indirect=["torch_with_gpus"])
@pytest.mark.parametrize("linked", [True, False])
@pytest.mark.parametrize("name", ["raw", "tensors"])
def test_loaded_functions_compute(torch_with_gpus, device, name, linked, store, monkeypatch):
    torch = torch_with_gpus
    if not linked:
        monkeypatch.setattr(cache, "LINKERS", ())
    arch = architecture(torch, device)
    fields = FIELDS | {"arch": arch}
    store.load(name, fields, lambda: compile_kernel(name, arch))
    function = Store(store.root).load(name, fields, lambda: pytest.fail("built twice"))
    # `raw` runs on the current device, `tensors` on that of its arguments, whichever is the current one.
    for current in range(torch.cuda.device_count()) if name == "tensors" else [device]:
        x = torch.randn(1000, device=f"cuda:{device}")
        y = torch.full_like(x, torch.nan)
        stream = torch.cuda.Stream(device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(10_000_000)
            x.mul_(2)  # done before the kernel only if that runs on the same stream
            with torch.cuda.device(current):
                arguments = (
                    (x, y) if name == "tensors" else (x.data_ptr(), y.data_ptr(), 1000, stream.cuda_stream)
                )
                function(*arguments)
                assert torch.cuda.current_device() == current
        stream.synchronize()
        assert torch.equal(y, x + 1)


@pytest.mark.gpu
@pytest.mark.parametrize("torch_with_gpus", [1], indirect=True)
def test_a_failed_launch_raises(torch_with_gpus, store):
    arch = architecture(torch_with_gpus, 0)
    function = store.load("raw", FIELDS | {"arch": arch}, lambda: compile_kernel("raw", arch))
    with pytest.raises(Exception, match=r"(?i)cuda"):
        function(0, 0, 0, 0)  # a grid of no blocks
    x = torch_with_gpus.zeros(10, device="cuda")
    function(x.data_ptr(), x.data_ptr(), 10, torch_with_gpus.cuda.current_stream().cuda_stream)
    assert x.sum().item() == 10
