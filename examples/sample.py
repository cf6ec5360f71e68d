"""Sample the next token with a temperature, top-k and top-p.

The model is a table of which byte follows which two in Python's own sources: a language model's logits in small.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import cute_softmax

WORDS = 256  # bytes


class Trigrams:
    """How often each byte follows two others: logits of the next byte."""

    def __init__(self, device: str) -> None:
        text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
        contexts = text[:-2] * WORDS + text[1:-1]
        counts = torch.zeros(WORDS * WORDS, WORDS).index_put_(
            (contexts, text[2:]), torch.ones(()), accumulate=True
        )
        self.logits = (counts + 1e-4).log().to(device)

    def __call__(self, text: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> (batch, WORDS), for what comes next."""
        return self.logits[text[:, -2] * WORDS + text[:, -1]]


def at_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Probabilities of all tokens, with a temperature of each row; at 0 the likeliest has them all."""
    return cute_softmax.sampling.softmax(logits, temperature, greedy_at_zero=True)


def among_k(logits: torch.Tensor, temperature: torch.Tensor, k: int) -> torch.Tensor:
    """The same among the k likeliest of each row (of at most 1,024 tokens on a GPU): all others have none."""
    _, chosen = cute_softmax.topk_softmax(logits, k)
    probabilities = at_temperature(logits.gather(-1, chosen), temperature)
    return torch.zeros_like(logits).scatter(-1, chosen, probabilities)


def among_share(probabilities: torch.Tensor, p: float) -> torch.Tensor:
    """The same among the fewest tokens that hold at least p of the probability (top-p, nucleus)."""
    ordered, places = probabilities.sort(-1, descending=True)
    before = (
        ordered.cumsum(-1) - ordered
    )  # what likelier tokens hold; the first has none before it, and stays
    kept = torch.where(before < p, ordered, 0.0)
    return torch.zeros_like(probabilities).scatter(-1, places, kept / kept.sum(-1, keepdim=True))


def sample(
    model: Trigrams, text: torch.Tensor, tokens: int, temperature: torch.Tensor, k: int, p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The text with so many tokens more, and the mean log-probability that the model itself gives them, a row each."""
    logp = torch.zeros(len(text), device=text.device)
    for _ in range(tokens):
        logits = model(text)
        probabilities = among_k(logits, temperature, k) if k else at_temperature(logits, temperature)
        if p < 1:
            probabilities = among_share(probabilities, p)
        chosen = torch.multinomial(probabilities, 1)
        logp += logits.gather(-1, chosen)[:, 0] - cute_softmax.logsumexp(logits, -1)
        text = torch.cat([text, chosen], -1)
    return text, logp / tokens


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prompt", default="def ", help='at least two characters ("def ")')
    parser.add_argument("--tokens", type=int, default=60, help="how many to sample (60)")
    parser.add_argument(
        "--temperature", type=float, nargs="+", default=[0.0, 0.5, 1.0], help="one text for each (0 0.5 1)"
    )
    parser.add_argument("--top-k", type=int, default=0, help="sample among the k likeliest; 0: all (0)")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample among those with this share (1)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    asked = parser.parse_args(arguments)
    prompt = list(asked.prompt.encode())
    if len(prompt) < 2 or not (0 <= asked.top_k <= WORDS and 0 < asked.top_p <= 1):
        parser.error("a prompt has at least two characters, k is at most 256, p more than 0 and at most 1")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(asked.seed)
    temperature = torch.tensor(asked.temperature, device=device)
    text = torch.tensor([prompt] * len(temperature), device=device)
    text, likely = sample(Trigrams(device), text, asked.tokens, temperature, asked.top_k, asked.top_p)
    for row, t, logp in zip(text.tolist(), asked.temperature, likely.tolist(), strict=True):
        print(f"temperature {t:g}, {logp:.2f} nats per token: {bytes(row).decode(errors='replace')!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
