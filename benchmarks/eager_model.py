"""A decoder as Hugging Face writes one, with eager attention: plain torch, random weights, no word of this package."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Config:
    """Sizes of a model and of what it is trained on."""

    layers: int = 4
    hidden: int = 1024
    heads: int = 16
    vocabulary: int = 32000
    batch: int = 4
    length: int = 2048


SMALL = Config(layers=2, hidden=32, heads=4, vocabulary=101, batch=2, length=12)


def eager_attention_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """(batch, heads, length, width) each; the scores and their softmax are tensors of their own."""
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    weights = weights + mask[:, :, :, : key.shape[-2]]
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2).contiguous()


def causal_lm_loss(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Of float32 logits; token t + 1 is the target of position t."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[..., 1:]
    return nn.functional.cross_entropy(logits.float().view(-1, vocab_size), targets.reshape(-1))


class Attention(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden, config.hidden, bias=False) for _ in range(4)
        )

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = eager_attention_forward(query, key, value, mask, self.head_dim**-0.5)
        return self.o_proj(attended.reshape(hidden_states.shape))


class Layer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.self_attn = Attention(config)
        self.input_layernorm, self.post_attention_layernorm = (nn.LayerNorm(config.hidden) for _ in range(2))
        self.up_proj = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down_proj = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, hidden_states: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), mask)
        inner = nn.functional.silu(self.up_proj(self.post_attention_layernorm(hidden_states)))
        return hidden_states + self.down_proj(inner)


class Model(nn.Module):
    """``forward(input_ids, labels)`` gives the loss of the next token; both are the tokens themselves."""

    loss_type = "ForCausalLM"
    loss_function = staticmethod(causal_lm_loss)

    def __init__(self, config: Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden_states = self.embed_tokens(input_ids)
        length, dtype = input_ids.shape[1], hidden_states.dtype
        mask = torch.full((length, length), torch.finfo(dtype).min, dtype=dtype, device=input_ids.device)
        mask = mask.triu(1)[None, None]
        for layer in self.layers:
            hidden_states = layer(hidden_states, mask)
        logits = self.lm_head(self.norm(hidden_states))
        return self.loss_function(logits, labels, logits.shape[-1])


def made(config: Config, device: str, dtype: torch.dtype) -> tuple[Model, torch.Tensor, torch.Tensor]:
    """(model, input_ids, labels), the same each time."""
    torch.manual_seed(0)
    model = Model(config).to(device, dtype)
    tokens = torch.randint(config.vocabulary, (config.batch, config.length)).to(device)
    return model, tokens, tokens


def step(
    model: Model, input_ids: torch.Tensor, labels: torch.Tensor
) -> tuple[float, dict[str, torch.Tensor]]:
    """Forward and backward: the loss, and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids, labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}
