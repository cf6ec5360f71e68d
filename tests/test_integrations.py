"""Other libraries on our functions: results and gradients beside theirs, and that a patch is taken back.

Where a library is not installed, a stand-in has the names and signatures that it documents.
"""

import importlib.util
import inspect
import math
import sys
from types import ModuleType

import pytest
import torch
from checking import example

from cute_softmax import accelerated, integrations, sampling

NAN = math.nan


def written(logits, index, temperature=1.0, row_mask=None):
    """What TRL documents of selective_log_softmax."""
    every = torch.log_softmax(logits.float() / temperature, -1)
    found = every.gather(-1, index if index.dim() == logits.dim() else index.unsqueeze(-1))
    found = found if index.dim() == logits.dim() else found.squeeze(-1)
    return found if row_mask is None else found.masked_fill(row_mask == 0, 0.0)


def written_entropy(logits, chunk_size=128):
    every = torch.log_softmax(logits.float(), -1)
    return -(every.exp() * every).sum(-1)


def module(monkeypatch, path: str, **names) -> ModuleType:
    """A module of that path that counts as imported."""
    made = ModuleType(path)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, path, made)
    return made


def stand_in(monkeypatch, home: str, **names) -> ModuleType:
    """A library in which one module has these names."""
    parts = home.split(".")
    for i in range(1, len(parts)):
        module(monkeypatch, ".".join(parts[:i]), __path__=[])
    return module(monkeypatch, home, **names)


def is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


@pytest.fixture
def trl(monkeypatch) -> ModuleType:
    """trl.trainer.utils."""
    if is_installed("trl"):
        return importlib.import_module("trl.trainer.utils")
    return stand_in(
        monkeypatch, "trl.trainer.utils", selective_log_softmax=written, entropy_from_logits=written_entropy
    )


def test_a_patch_of_trl_is_everywhere_and_taken_back(trl, monkeypatch):
    names = [n for n in ("selective_log_softmax", "entropy_from_logits") if hasattr(trl, n)]
    theirs = {name: getattr(trl, name) for name in names}
    trainer = module(monkeypatch, "trl.trainer.grpo_of_a_test", **theirs)
    bystander = module(monkeypatch, "trlx_of_a_test", **theirs)
    with integrations.patch_trl() as patch:
        later = module(monkeypatch, "trl.trainer.later_of_a_test", **{n: getattr(trl, n) for n in names})
        for holder in (trl, trainer, later):
            assert all(getattr(holder, name) is getattr(integrations, name) for name in names)
        again = integrations.patch_trl()
        again.undo()
        assert all(getattr(trl, name) is getattr(integrations, name) for name in names)
        assert {n: vars(bystander)[n] for n in names} == theirs
    for holder in (trl, trainer, later):
        assert {name: getattr(holder, name) for name in names} == theirs
    patch.undo()
    x, index = example((2, 5, 9)), torch.arange(10).view(2, 5) % 9
    assert torch.allclose(trl.selective_log_softmax(x, index), written(x, index), atol=1e-6)


def test_libraries_that_lack_the_name_are_told(monkeypatch):
    stand_in(monkeypatch, "trl.trainer.utils")
    with pytest.raises(
        ImportError, match=r"this version of trl\.trainer\.utils has no selective_log_softmax"
    ):
        integrations.patch_trl()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_and_gradients_are_those_that_trl_documents(temperature, several, dtype, launched):
    x = example((2, 5, 33), dtype).requires_grad_()
    index = torch.randint(33, (2, 5, 3) if several else (2, 5), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(index.shape, dtype=torch.int64)
    mask[0, 2:] = 0
    outside = index.masked_fill(mask == 0, -100)
    found = integrations.selective_log_softmax(x, outside, temperature, mask)
    right = written(x, index, temperature, mask)
    tolerance = {"atol": 1e-6 if dtype is torch.float32 else 2e-2}
    assert found.dtype is dtype and torch.allclose(found.float(), right, **tolerance)
    weight = torch.rand(index.shape)
    grads = [torch.autograd.grad((y.float() * weight).sum(), x)[0] for y in (found, right)]
    assert torch.allclose(*grads, **tolerance) and not grads[0][0, 2:].any() and grads[0][0, :2].any()
    assert launched is None or {"selective"} <= {launch.math for launch in launched}


def test_entropies_beside_log_probabilities(launched):
    x, index = example((2, 5, 33)).requires_grad_(), torch.zeros(2, 5, dtype=torch.int64)
    mask = torch.tensor([1, 1, 0, 1, 1]).expand(2, 5)
    logp, entropies = integrations.selective_log_softmax_and_entropy(x, index, True, 0.5, mask)
    right = written_entropy(x / 0.5).masked_fill(mask == 0, 0.0)
    assert torch.allclose(logp, written(x, index, 0.5, mask), atol=1e-5)
    assert torch.allclose(entropies, right, atol=1e-5)
    grads = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in (entropies, right)]
    assert torch.allclose(*grads, atol=1e-5)
    assert not integrations.selective_log_softmax_and_entropy(x, index, False)[1].requires_grad
    assert torch.allclose(integrations.entropy_from_logits(x, 7), written_entropy(x), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
def test_a_temperature_is_above_zero(temperature):
    for function in (integrations.selective_log_softmax, integrations.selective_log_softmax_and_entropy):
        with pytest.raises(ValueError, match="it must be above 0"):
            function(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), temperature=temperature)


class StandIn(torch.nn.Module):
    """A causal language model of transformers, as far as its loss goes."""

    loss_type = "ForCausalLM"

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 33)

    @property
    def loss_function(self):
        return getattr(self, "_loss_function", their_loss)

    @loss_function.setter
    def loss_function(self, value):
        self._loss_function = value


def their_loss(
    logits, labels, vocab_size, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **_
):
    """What transformers documents of ForCausalLMLoss."""
    if shift_labels is None:
        shift_labels = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = torch.nn.functional.cross_entropy(
        logits.float().view(-1, vocab_size),
        shift_labels.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


@pytest.fixture
def model() -> torch.nn.Module:
    """A model of transformers with 33 words."""
    if not is_installed("transformers"):
        return StandIn()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 33}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_implementation": "eager"}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def test_a_patch_of_transformers_is_taken_back(model):
    theirs, torchs = model.loss_function, torch.nn.functional.cross_entropy
    with integrations.patch_transformers(model):
        assert model.loss_function is integrations.causal_lm_loss and accelerated().active
        assert torch.nn.functional.cross_entropy is not torchs
    assert model.loss_function is theirs and not accelerated().active
    assert torch.nn.functional.cross_entropy is torchs
    patch = integrations.patch_transformers()
    assert model.loss_function is theirs and accelerated().active
    patch.undo()
    assert not accelerated().active
    model.loss_type = "ForMaskedLM"
    with integrations.patch_transformers(model):
        assert model.loss_function is not integrations.causal_lm_loss
    with pytest.raises(TypeError, match="Linear has no loss_function"):
        integrations.patch_transformers(torch.nn.Linear(2, 2))
    assert not accelerated().active


@pytest.mark.skipif(not is_installed("transformers"), reason="transformers is not installed")
def test_a_step_of_a_model_of_transformers(model):
    tokens = torch.randint(33, (2, 7), generator=torch.Generator().manual_seed(0))
    labels = tokens.masked_fill(tokens < 5, -100)

    def step() -> list[torch.Tensor]:
        loss = model(input_ids=tokens, labels=labels).loss
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    theirs = step()
    with integrations.patch_transformers(model):
        ours = step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("items", [None, 11, torch.tensor(11)], ids=["mean", "number", "tensor"])
@pytest.mark.parametrize("shifted", [False, True])
def test_the_loss_of_a_causal_model(shifted, items, dtype, launched):
    logits = example((2, 6, 33), dtype).requires_grad_()
    labels = torch.randint(33, (2, 6), generator=torch.Generator().manual_seed(0))
    labels[0, 3] = -100
    how = {"labels": None, "shift_labels": labels} if shifted else {"labels": labels}
    losses = [
        f(logits, vocab_size=33, num_items_in_batch=items, output_attentions=False, **how)
        for f in (integrations.causal_lm_loss, their_loss)
    ]
    assert losses[0].dtype is torch.float32 and torch.allclose(*losses, atol=1e-5)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in losses]
    assert torch.allclose(*grads, atol=1e-6 if dtype is torch.float32 else 1e-3) and grads[0].any()
    if launched is not None:  # in one visit, of the logits as they are
        (softmax,) = (launch for launch in launched if launch.math == "softmax")
        assert softmax.dtypes[0] is dtype


@pytest.fixture
def flashinfer(monkeypatch) -> ModuleType:
    """flashinfer.sampling."""
    if is_installed("flashinfer"):
        return importlib.import_module("flashinfer.sampling")

    def softmax(logits, temperature=None, enable_pdl=None): ...

    return stand_in(monkeypatch, "flashinfer.sampling", softmax=softmax)


def test_a_patch_of_flashinfer_is_everywhere_and_taken_back(flashinfer, monkeypatch):
    home, softmax = flashinfer, flashinfer.softmax
    user = module(monkeypatch, "flashinfer.user_of_a_test", softmax=softmax)
    theirs, ours = (inspect.signature(f).parameters for f in (softmax, sampling.softmax))
    assert [(p.name, p.default) for p in theirs.values()] == [(p.name, p.default) for p in ours.values()][:3]
    with integrations.patch_flashinfer():
        assert home.softmax is user.softmax is sampling.softmax
        assert torch.allclose(home.softmax(torch.ones(2, 4), 0.5), torch.full((2, 4), 0.25))
    assert home.softmax is user.softmax is softmax
