"""Torch's private names: each is looked up in a way that survives its absence, and calls are right without it."""

import re
import subprocess
import sys
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import simulated
import test_states as states
import torch
from checking import example
from test_accelerate import forget, restored, same, tables

import cute_softmax
from cute_softmax import accelerate
from cute_softmax.acceleration import originals
from cute_softmax.dispatch.common import forms, state
from cute_softmax.dispatch.sharded import states as sharded
from cute_softmax.runtime import private

_ = restored  # a fixture
PACKAGE = Path(cute_softmax.__file__).parent
# What a version of torch may lack, and what is None then.
NAMES = {
    "_C._functorch.peek_interpreter_stack": (state, "_interpreters"),
    "_C._functorch.is_functorch_wrapped_tensor": (state, "_is_wrapped"),
    "_C._functorch.unwrap_if_dead": (state, "_unwrap_if_dead"),
    "_C._functorch._unwrap_for_grad": (state, "_unwrap_for_grad"),
    "autograd.forward_ad._set_fwd_grad_enabled": (state, "_with_forward_mode"),
    "_C._len_torch_dispatch_stack": (state, "_modes"),
    "_C._functorch.is_legacy_batchedtensor": (state, "_is_batched"),
    "_C._dynamo.guards.TensorGuards": (forms, "_TensorGuards"),
    "_C._dispatch_has_computed_kernel_for_dispatch_key": (originals, "_has_kernel"),
}
# Those with another way in their place: what is used then.
REPLACED = {
    "_C._cuda_getDevice", "_C._cuda_getCurrentRawStream", "_C._dynamo.guards._empty_strided_cuda", "_C._dispatch_dump",
    "library._impls", "_C.DispatchKeySet", "_C.DispatchKey",
    "_native.cutedsl_utils._CUTEDSL_REQUIRED_VERSIONS",
    "distributed.distributed_c10d._resolve_process_group",
    "distributed.tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info",
}  # fmt: skip
# A reduction, scores, two heads with a gradient of their own, several results, a product.
SOME = (
    "softmax", "softmax of scores", "softmax_", "logsumexp", "cross_entropy", "softmax_matmul of halves",
)  # fmt: skip
some = pytest.mark.parametrize("f", [pytest.param(states.FUNCTIONS[name], id=name) for name in SOME])
without = pytest.mark.parametrize(
    "name", sorted(name for name, (at, _) in NAMES.items() if at is not originals)
)


@pytest.fixture
def lacking(name, monkeypatch):
    monkeypatch.setattr(*NAMES[name], None)
    return name


@pytest.fixture
def launches(monkeypatch):
    return simulated.install(monkeypatch)


def test_every_private_name_is_looked_up():
    """Nowhere else: a name of torch that begins with _ and is no operator."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r'look_up\("([\w.]+)"\)', text))
        code = re.sub(r"torch\.ops\.aten\._\w+|torch\._softmax_backward_data|look_up\(.*\)", "", text)
        used = re.findall(
            r"\b(?:torch(?:\.\w+)*|DTensor|Library)\._[a-zA-Z]\w*|from torch\S* import _(?!_).*", code
        )
        # Whatever goes wrong there, ranks are then as if they did not reach each other's memory.
        guarded = ["from torch.distributed import _symmetric_memory as symmetric"] * (path.name == "peers.py")
        assert used == guarded, (path, used)
    assert found == NAMES.keys() | REPLACED


def test_looked_up():
    assert private.look_up("_C.DispatchKey") is torch._C.DispatchKey
    assert private.look_up("_C._functorch.nothing.more") is None


FORWARD = {"_interpreters", "_is_wrapped", "_unwrap_for_grad", "_with_forward_mode"}


@some
@without
def test_every_state(f, lacking, launches):
    """As with the name, but that calls may take another way."""
    for _ in range(2):
        assert f.close(f.ours(example(states.SHAPE)), f.torchs(example(states.SHAPE)))
    states.test_a_dispatch_mode_sees_the_operator(f, launches)
    states.test_a_subclass_sees_the_operator(f, launches)
    launches.clear()
    states.test_fake_tensors(f, launches)
    states.test_vmap(f, launches)
    if f.out:
        for state_of_torch in ("mode", "subclass", "vmap"):
            states.test_out(f, state_of_torch, launches)
    if f.in_place:
        states.test_gradients_in_place(launches)
    elif f.records:
        states.test_gradients(f, "tensor", launches)
        states.test_functional_gradients(f, launches)


@some
@without
def test_forward_mode(f, lacking, launches):
    """Right, or refused: never a derivative of zero."""
    if f.in_place or not f.records:
        return
    try:
        states.test_forward_mode(f, launches)
    except NotImplementedError as error:
        assert NAMES[lacking][1] in FORWARD and "forward mode" in str(error)


@pytest.mark.parametrize("name", ["_C._functorch.is_legacy_batchedtensor"])
def test_batched_gradients(lacking, launches):
    """What stands for several tensors has no memory of its own."""
    x, upstream = example((4, 8)).requires_grad_(), example((3, 4, 8))
    (found,) = torch.autograd.grad(cute_softmax.softmax(x), x, upstream, is_grads_batched=True)
    (expected,) = torch.autograd.grad(torch.softmax(x, -1), x, upstream, is_grads_batched=True)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["_C._dynamo.guards.TensorGuards"])
def test_no_form_is_found_without_guards(lacking, launches):
    for rows in (2, 3, 2):
        x = example((rows, 64))
        assert torch.allclose(cute_softmax.softmax(x), torch.softmax(x, -1), atol=1e-6)
    assert len(launches) == 3


def test_groups(monkeypatch):
    """They are known by the calls that name them, as long as they live."""
    monkeypatch.setattr(sharded, "_resolve", None)
    monkeypatch.setattr(sharded, "_seen", WeakValueDictionary())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = example((4, 8)).requires_grad_()
        lse = cute_softmax.logsumexp(x, -1, group=torch.distributed.group.WORLD)
        lse.sum().backward()
        assert torch.allclose(lse, torch.logsumexp(x, -1)) and torch.allclose(x.grad, torch.softmax(x, -1))
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ValueError, match="is gone"):
        sharded.group_of("another")


def test_accelerate(monkeypatch, launches):
    """ATen's kernels are reached around, and what was registered goes with its library."""
    monkeypatch.setattr(sys.modules["cute_softmax.acceleration.switch"], "KEY", "CPU")
    monkeypatch.setattr(originals, "_has_kernel", None)
    monkeypatch.setattr(originals, "REACHABLE", False)
    monkeypatch.delattr(torch.library.Library, "_destroy")
    forget()
    before, x = tables(), example((4, 8))
    with accelerate() as acceleration:
        same(torch.softmax(x, -1), torch.softmax(x.double(), -1).float())
        assert acceleration.report().served == {"aten::_softmax": 1}
        assert sum(acceleration.report().handed_on.values()) == 1
    assert tables() == before
    forget()


PROGRAM = """
import sys
import torch
import torch._dynamo
for path in {names!r}:
    *owners, name = path.split(".")
    owner = torch
    for part in owners:
        owner = getattr(owner, part)
    if hasattr(owner, name):
        delattr(owner, name)
sys.path[:0] = {folders!r}
import pytest
import simulated
from test_private import SOME, states
with pytest.MonkeyPatch.context() as patch:
    launches = simulated.install(patch)
    for f in (states.FUNCTIONS[name] for name in SOME):
        for _ in range(2):
            assert f.close(f.ours(states.example()), f.torchs(states.example()))
        if f.records and not f.in_place:
            x = states.example().requires_grad_()
            y, z = f.ours(x), f.torchs(x)
            upstream = torch.randn(y.shape)
            found, expected = (torch.autograd.grad(t, x, upstream)[0] for t in (y, z))
            assert f.close(found, expected, atol=1e-5)
print("right")
"""


@pytest.mark.long
def test_without_any():
    """Deleted from torch before the package is imported: all that torch itself can do without."""
    kept = {"_C.DispatchKeySet", "_C.DispatchKey", "library._impls"}
    kept |= {name for name in REPLACED if "DTensor" in name}  # it is DTensor's own; see test_sharded
    names = sorted({*NAMES, *REPLACED} - kept)
    here = Path(__file__).resolve().parent
    program = PROGRAM.format(names=names, folders=[str(here), str(here.parent)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["right"], done.stderr
