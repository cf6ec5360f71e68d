"""The examples, in small: what they compute, through simulated launches and through torch's operations."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import reinforce
import sample
import sharded_reinforce
import tensor_parallel
import torch
import train

import cute_softmax

FOLDER = Path(__file__).resolve().parents[1] / "examples"
TRAIN = shlex.split("--steps 6 --batch 2 --length 16 --width 32 --layers 1")


@pytest.mark.parametrize("module", [train, sample, reinforce, tensor_parallel, sharded_reinforce])
def test_help_and_size(module, capsys):
    with pytest.raises(SystemExit, match="0"):
        module.main(["--help"])
    assert module.__doc__.partition("\n")[0] in " ".join(capsys.readouterr().out.split())
    assert len(Path(module.__file__).read_text().splitlines()) <= 100


def test_every_example_is_tested():
    alone, together = {"train", "sample", "reinforce"}, {"tensor_parallel", "sharded_reinforce"}
    assert {path.stem for path in FOLDER.glob("*.py")} == alone | together


def test_losses_of_training_agree(launched, capsys, tmp_path):
    assert train.main([*TRAIN, "--plot", str(tmp_path / "curves.svg")]) == 0
    said = capsys.readouterr().out
    *steps, last = said.splitlines()[1:]
    curves = torch.tensor([[float(number) for number in line.split()[1:]] for line in steps])
    assert curves.shape == (6, 2) and curves[-1].max() < curves[0].min()
    assert float(re.search(r"differ by (\S+) at most", last)[1]) < 1e-4
    assert "<svg" in (tmp_path / "curves.svg").read_text()
    assert launched is None or [launch.math for launch in launched].count("softmax") == 6


def test_a_wrong_loss_fails_the_training(monkeypatch, capsys):
    class Wrong(torch.nn.CrossEntropyLoss):
        def forward(self, input, target):
            return super().forward(2 * input, target)

    monkeypatch.setattr(cute_softmax.nn, "CrossEntropyLoss", Wrong)
    assert train.main(TRAIN) == 1


LOGITS = torch.tensor([[0.0, 3.0, 1.0, 2.0], [5.0, 5.0, 4.0, -1.0]])


def test_sampling_at_temperatures(launched):
    found = sample.at_temperature(LOGITS, torch.tensor([0.0, 2.0]))
    assert found[0].tolist() == [0, 1, 0, 0]
    assert torch.allclose(found[1], torch.softmax(LOGITS[1] / 2, -1))


def test_sampling_among_k(launched):
    found = sample.among_k(LOGITS, torch.tensor([0.5, 1.0]), 2)
    assert torch.allclose(found[0, [1, 3]], torch.softmax(2 * LOGITS[0, [1, 3]], -1))
    assert torch.equal(found > 0, torch.tensor([[False, True, False, True], [True, True, False, False]]))


@pytest.mark.parametrize(("p", "kept"), [(0.05, 1), (0.5, 1), (0.500001, 2), (0.79, 2), (0.95, 3), (1.0, 4)])
def test_sampling_among_a_share(p, kept):
    probabilities = torch.tensor([[0.15, 0.5, 0.05, 0.3]])
    found = sample.among_share(probabilities, p)
    assert (found > 0).sum() == kept and torch.allclose(found.sum(), torch.ones(()))
    order = probabilities.argsort(-1, descending=True)[0, :kept]
    assert torch.allclose(found[0, order], probabilities[0, order] / probabilities[0, order].sum())


def test_texts_are_sampled(launched, capsys):
    words = ["--tokens", "5", "--prompt", "import ", "--temperature", "0", "0", "1"]
    assert sample.main([*words, "--top-k", "3", "--top-p", "0.9"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == second != third and "'import " in first  # the likeliest is the same every time
    logp = [float(re.search(r"0?, (-\S+) nats", line)[1]) for line in (first, third)]
    assert all(number < 0 for number in logp)
    for wrong in (["--prompt", "x"], ["--top-k", "300"], ["--top-p", "0"]):
        with pytest.raises(SystemExit, match="2"):
            sample.main(wrong)


def test_a_policy_learns(launched, capsys):
    assert reinforce.main(shlex.split("--steps 25 --group 32 --length 8 --words 16 --rate 0.05")) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    rewards = [float(reward) for _, reward, _ in lines]
    entropies = [float(entropy) for *_, entropy in lines]
    assert rewards[0] < 0.6 and rewards[-1] > 0.75 and entropies[-1] < entropies[0]
    if launched is not None:
        assert {"selective_entropy", "softmax"} <= {launch.math for launch in launched}


def test_the_gradient_of_a_step_is_that_of_a_written_matrix(launched):
    """By hand, with torch.log_softmax, from the same sample."""
    asked = argparse.Namespace(group=8, length=5, temperature=0.7, updates=1, entropy=0.1)
    torch.manual_seed(0)
    policy = reinforce.Policy(6, 4)
    plain = torch.optim.SGD(policy.parameters(), lr=0.0)
    torch.manual_seed(1)
    reinforce.step(policy, plain, asked)
    found = [p.grad.clone() for p in policy.parameters()]
    torch.manual_seed(1)
    tokens = policy.sample(8, 5, 0.7)
    rewards = reinforce.reward_of(tokens)
    advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    every = torch.log_softmax(policy(tokens) / 0.7, -1)
    logp = every.gather(-1, tokens[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    loss = -(advantages[:, None] * (logp - logp.detach()).exp()).mean() - 0.1 * entropy.mean()
    for ours, right in zip(found, torch.autograd.grad(loss, list(policy.parameters())), strict=True):
        assert torch.allclose(ours, right, atol=1e-6)


def torchrun(ranks: int, *command: str) -> subprocess.CompletedProcess:
    """An example as torchrun starts it."""
    environment = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(FOLDER.parent),
    }
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [*start, str(FOLDER / command[0]), *command[1:]]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


ENDS = """
import sys, weakref
import torch.distributed as dist
import {module} as example

groups, end = [], dist.destroy_process_group

def ended():
    groups.append(weakref.ref(dist.group.WORLD))
    end()

dist.destroy_process_group = ended
example.main(["--steps", "2"])
assert groups and groups[0]() is None, "something holds the group of a process that ends"
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs it takes one for each rank")
@pytest.mark.parametrize("module", ["tensor_parallel", "sharded_reinforce"])
def test_no_group_outlives_its_process(module):
    alone = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    where = {"PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(module=module)],
        env=os.environ | alone | where,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs it takes one for each rank")
def test_a_vocabulary_that_ranks_share_is_learnt_as_by_one():
    done = torchrun(3, "tensor_parallel.py", "--steps", "12")
    assert done.returncode == 0, done.stderr
    first, last = re.search(r"3 ranks: loss (\S+) to (\S+)", done.stdout).groups()
    assert float(last) < float(first) - 1
    assert float(re.search(r"differ by (\S+) at most", done.stdout)[1]) < 1e-4


@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs it takes one for each rank")
def test_a_policy_learns_over_ranks():
    done = torchrun(2, "sharded_reinforce.py", "--steps", "16")
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    rewards, entropies = [float(line[1]) for line in lines], [float(line[2]) for line in lines]
    assert rewards[-1] > rewards[0] + 0.2 and entropies[-1] < entropies[0]
