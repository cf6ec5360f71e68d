"""Train a policy from rewards alone: log-probabilities of its samples, their ratio to the old ones, and its entropy.

The gradient step is that of PPO and GRPO: texts with more than their group's mean reward become likelier,
within a clipped ratio. The reward here counts tokens that are larger than the one before.
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

import cute_softmax


class Policy(nn.Module):
    """Logits of the next token, given the last one."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = words
        self.net = nn.Sequential(nn.Embedding(words + 1, width), nn.Tanh(), nn.Linear(width, words))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, length) sampled -> the logits that each was sampled from, (batch, length, words)."""
        start = torch.full_like(tokens[:, :1], self.words)
        return self.net(torch.cat([start, tokens[:, :-1]], -1))

    @torch.no_grad()
    def sample(self, batch: int, length: int, temperature: float) -> torch.Tensor:
        """(batch, length) tokens."""
        token, tokens = torch.full((batch,), self.words, device=self.net[0].weight.device), []
        for _ in range(length):
            probabilities = cute_softmax.sampling.softmax(self.net(token), temperature)
            token = torch.multinomial(probabilities, 1)[:, 0]
            tokens.append(token)
        return torch.stack(tokens, -1)


def reward_of(tokens: torch.Tensor) -> torch.Tensor:
    """(batch,): the share of tokens that are larger than the one before."""
    return (tokens[:, 1:] > tokens[:, :-1]).float().mean(-1)


def step(policy: Policy, optimizer: torch.optim.Optimizer, asked: argparse.Namespace) -> tuple[float, float]:
    """Sample a group and take a few gradient steps on it: its mean reward and entropy."""
    tokens = policy.sample(asked.group, asked.length, asked.temperature)
    rewards = reward_of(tokens)
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-6))[:, None]
    old = None
    for _ in range(asked.updates):
        # One read of the logits gives both; no matrix of log-probabilities is written, forward or backward.
        logp, entropy = cute_softmax.selective_log_softmax(
            policy(tokens), tokens, scale=1 / asked.temperature, return_entropy=True
        )
        old = logp.detach() if old is None else old
        ratio = (logp - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain.mean() - asked.entropy * entropy.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rewards.mean().item(), entropy.mean().item()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    sizes = (("steps", 100), ("group", 64), ("length", 16), ("words", 64), ("updates", 2), ("seed", 0))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--temperature", type=float, default=1.0, help="(1)")
    parser.add_argument("--entropy", type=float, default=0.003, help="weight of the entropy, per nat (0.003)")
    parser.add_argument("--rate", type=float, default=0.02, help="learning rate (0.02)")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(asked.seed)
    policy = Policy(asked.words, 32).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=asked.rate)
    print("step  reward  entropy")
    for number in range(asked.steps):
        reward, entropy = step(policy, optimizer, asked)
        if number % max(asked.steps // 10, 1) == 0 or number == asked.steps - 1:
            print(f"{number:4}  {reward:6.3f}  {entropy:7.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
