"""Train a small model whose last layer, and so its vocabulary, is split over ranks: no rank ever has a whole row.

Run by ``torchrun --nproc-per-node=2 examples/tensor_parallel.py``,
on the CPU with gloo, or with NCCL on one GPU per rank.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn  # while there is no group: it would hold that, and threads of gloo, to the end
from torch import nn

import cute_softmax


class ToAll(torch.autograd.Function):
    """What all ranks have alike goes into each rank's part: its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Model(nn.Module):
    """Logits of the next token, given the last one: a trunk that all ranks have alike, and a rank's rows of the head.

    whole: instead the head of all ranks, to compare with.
    """

    def __init__(self, words: int, width: int, device: str, whole: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)  # the same numbers on every rank
        self.trunk = nn.Sequential(nn.Embedding(words, width), nn.Linear(width, width), nn.Tanh()).to(device)
        head = torch.randn(words, width) / width**0.5
        mine = head if whole else head.tensor_split(dist.get_world_size())[dist.get_rank()]
        self.head, self.whole = nn.Parameter(mine.clone().to(device)), whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(tokens)
        return (hidden if self.whole else ToAll.apply(hidden)) @ self.head.T


def batch_of(step: int, words: int, size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, the ones that follow): each is three times the one before, and some that are not."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(words, (size,), generator=generator)
    follows = torch.where(torch.rand(size, generator=generator) < 0.9, 3 * tokens % words, 0)
    return tokens.to(device), follows.to(device)


def train(model: Model, asked: argparse.Namespace, device: str) -> list[float]:
    """The losses of all steps."""
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=asked.rate), []
    # Where this rank's slice begins, and how long rows are: the last slices may be shorter.
    sizes = [len(part) for part in torch.arange(asked.words).tensor_split(dist.get_world_size())]
    shared = dict(group=dist.group.WORLD, vocab_start=sum(sizes[: dist.get_rank()]), vocab_size=asked.words)
    for step in range(asked.steps):
        tokens, follows = batch_of(step, asked.words, asked.batch, device)
        loss = cute_softmax.cross_entropy(
            model(tokens), follows, label_smoothing=asked.smoothing, **({} if model.whole else shared)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("steps", 60), ("batch", 64), ("words", 101), ("width", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate (0.02)")
    parser.add_argument("--smoothing", type=float, default=0.1, help="label smoothing (0.1)")
    asked = parser.parse_args(arguments)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    losses = train(Model(asked.words, asked.width, device), asked, device)
    alone = train(Model(asked.words, asked.width, device, whole=True), asked, device)
    apart = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks: loss {losses[0]:.3f} to {losses[-1]:.3f}")
        print(f"from one rank's, that has the whole vocabulary, they differ by {apart:.1e} at most")
    dist.destroy_process_group()
    return int(not apart < 1e-3)


if __name__ == "__main__":
    sys.exit(main())
