"""Train a small language model twice, with torch's cross entropy and with ours, and show that the losses agree.

The model reads bytes of Python's own sources, so that nothing is downloaded. Runs on a GPU if there is one; on the CPU
both losses are torch's operations.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

import cute_softmax

WORDS = 256  # bytes


class Model(nn.Module):
    """A causal transformer over bytes: (batch, length) -> logits, (batch, length, WORDS)."""

    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, max(width // 32, 1), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        length = text.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        x = self.words(text) + self.places(torch.arange(length, device=text.device))
        return self.head(self.body(x, mask=causal, is_causal=True))


def corpus(device: str) -> torch.Tensor:
    """Bytes of a long module of the standard library."""
    return torch.tensor(list(Path(argparse.__file__).read_bytes()), device=device)


def train(loss_of: nn.Module, asked: argparse.Namespace, device: str) -> list[float]:
    """The losses of all steps; the same seed gives the same model and the same batches."""
    torch.manual_seed(asked.seed)
    model = Model(asked.width, asked.layers, asked.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=asked.rate)
    text, losses = corpus(device), []
    for _ in range(asked.steps):
        starts = torch.randint(len(text) - asked.length - 1, (asked.batch, 1)).to(device)
        taken = text[starts + torch.arange(asked.length + 1, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = loss_of(model(taken[:, :-1]).flatten(0, 1), taken[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()  # one wait for the device, at the end


def plot(curves: dict[str, list[float]], path: str) -> None:
    """Both curves in a PNG or SVG file."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), line in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(losses, line, label=name)
    axes.set(xlabel="step", ylabel="cross entropy (nats a byte)")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name, default in (("steps", 200), ("batch", 16), ("length", 128), ("width", 128), ("layers", 2)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"({default})")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate (0.001)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    parser.add_argument("--plot", metavar="FILE", help="a PNG or SVG of both curves; needs matplotlib")
    asked = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    losses = {"torch": nn.CrossEntropyLoss(), "cute_softmax": cute_softmax.nn.CrossEntropyLoss()}
    curves = {name: train(loss, asked, device) for name, loss in losses.items()}
    print("step  " + "  ".join(f"{name:>12}" for name in curves))
    for step in dict.fromkeys([*range(0, asked.steps, max(asked.steps // 10, 1)), asked.steps - 1]):
        print(f"{step:4}  " + "  ".join(f"{losses[step]:12.6f}" for losses in curves.values()))
    apart = max(abs(a - b) / abs(a) for a, b in zip(*curves.values(), strict=True))
    print(f"On {device} the losses differ by {apart:.1e} at most, relative to torch's.")
    if asked.plot:
        plot(curves, asked.plot)
    return int(apart > 0.05)  # two runs drift apart as rounding errors grow, above all in bfloat16


if __name__ == "__main__":
    sys.exit(main())
