"""Take GRPO steps with a vocabulary split over ranks: log-probabilities under a policy and a reference, and entropies.

Run by ``torchrun --nproc-per-node=2 examples/sharded_reinforce.py``,
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


def sampled(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """(batch,) tokens of the softmax of whole rows, the same on every rank: the largest of the scores and Gumbel noise.
    Two numbers a row are exchanged, however long rows are."""
    noise = -torch.empty(logits.shape).exponential_(generator=generator).log().to(logits)
    score, place = (logits / temperature + noise).max(-1)
    best = [torch.empty_like(score) for _ in range(dist.get_world_size())]
    at = [torch.empty_like(place) for _ in best]
    dist.all_gather(best, score)
    dist.all_gather(at, place + dist.get_rank() * logits.shape[-1])
    return torch.stack(at).gather(0, torch.stack(best).argmax(0, keepdim=True))[0]


def step(
    head: nn.Parameter, reference: torch.Tensor, hidden: torch.Tensor, asked: argparse.Namespace, generator
):
    """Sample, reward, and one gradient step on this rank's rows of the head: (mean reward, entropy, divergence)."""
    logits = hidden @ head.T
    tokens = sampled(logits.detach(), asked.temperature, generator)
    rewards = (tokens % 2 == 0).float()  # even tokens are liked
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    how = {"scale": 1 / asked.temperature, "group": dist.group.WORLD}
    logp, entropy = cute_softmax.selective_log_softmax(logits, tokens, return_entropy=True, **how)
    with torch.no_grad():
        old = cute_softmax.selective_log_softmax(hidden @ reference.T, tokens, **how)
    gain = (logp - logp.detach()).exp() * advantages
    divergence = (old - logp).exp() - (old - logp) - 1  # from the reference, as GRPO estimates it
    loss = -gain.mean() + asked.beta * divergence.mean() - asked.entropy * entropy.mean()
    (head.grad,) = torch.autograd.grad(loss, head)
    return rewards.mean().item(), entropy.mean().item(), divergence.mean().item()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("steps", 40), ("batch", 256), ("words", 64), ("width", 16)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    sizes = (("temperature", 1.0), ("rate", 0.05), ("beta", 0.01), ("entropy", 0.001))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=float, default=default, help=f"({default})")
    asked = parser.parse_args(arguments)
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if asked.words % ranks:
        parser.error(f"--words {asked.words}: {ranks} ranks have equal shares of them here")
    torch.manual_seed(0)
    hidden, whole = torch.randn(asked.batch, asked.width), torch.randn(asked.words, asked.width)
    reference = whole.chunk(ranks)[rank].to(device)
    head = nn.Parameter(reference.clone())
    optimizer = torch.optim.Adam([head], lr=asked.rate)
    generator = torch.Generator().manual_seed(rank)  # noise of a rank's own
    said = []
    for _ in range(asked.steps):
        said.append(step(head, reference, hidden.to(device), asked, generator))
        optimizer.step()
    if rank == 0:
        print("step  reward  entropy  divergence")
        for number in range(0, asked.steps, max(asked.steps // 8, 1)):
            print("{:4}  {:6.3f}  {:7.3f}  {:10.4f}".format(number, *said[number]))
    dist.destroy_process_group()
    return int(not said[-1][0] > said[0][0])


if __name__ == "__main__":
    sys.exit(main())
