"""Kernels that are launched before what precedes them has ended: they are, and see all that it has written."""

import os
import subprocess
import sys

import pytest
import torch
from checking import DEVICE, equal_bits, random

import cute_softmax as c

# A mean that one CTA takes microseconds for, and a kernel that reads it. Without its wait it would read what was there
# before.
PROGRAM = """
import cutlass.cute as cute
import torch
import cute_softmax as c

if {mutant}:
    cute.arch.griddepcontrol_wait = lambda: None
x = torch.randn(65536, 8, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
target, wrong = torch.zeros(65536, dtype=torch.int64, device="cuda"), 0
for i in range(20):
    scaled = x * (i + 1)
    torch.cuda.synchronize()
    torch.cuda._sleep(1 << 21)  # until all is launched
    mean = c.cross_entropy(scaled, target)
    found = c.logsumexp(mean.view(1, 1), -1)  # of one number: itself
    torch.cuda.synchronize()
    wrong += found.item() != mean.item()
print("wrong", wrong)
"""


@pytest.mark.timed
@pytest.mark.parametrize("mutant", [False, True])
def test_what_precedes_has_ended(mutant, tmp_path):
    environment = os.environ | {"CUTE_SOFTMAX_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-c", PROGRAM.format(mutant=mutant)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    wrong = int(done.stdout.split()[-1])
    assert (wrong > 0) == mutant, f"{wrong} of 20 calls read too early"


def chain(x: torch.Tensor, target: torch.Tensor, pause) -> list[torch.Tensor]:
    """Small calls of every movement, each of what the one before it has written."""
    found = [c.softmax(x)]
    for step in (
        lambda y: c.log_softmax(y, 0),
        lambda y: c.softmax(y.view(-1, 16), scale=30.0).view(x.shape),
        lambda y: y + c.logsumexp(y, -1, keepdim=True),
        lambda y: c.topk_log_softmax(y, 8).values,
        lambda y: c.topk_softmax(y, 4)[0],
        lambda y: c.softmax(y.expand(4, *y.shape).reshape(-1, 256)),
        lambda y: c.softmax_matmul(y, x[: y.shape[1], :64].to(torch.bfloat16)),
        lambda y: c.selective_log_softmax(y, target[: len(y)]),
        lambda y: torch.autograd.grad(
            c.cross_entropy(z := (x + y.mean()).requires_grad_(), target), z
        )[0],
    ):  # fmt: skip
        pause()
        found.append(step(found[-1]))
    return found


def test_small_calls_after_each_other():
    """As if the device ended each of them before the next one, eager and in a graph."""
    x, target = random((1024, 1024), torch.bfloat16, 1), torch.arange(1024, device=DEVICE) % 64
    right = chain(x, target, torch.cuda.synchronize)
    for _ in range(50):
        assert all(map(equal_bits, chain(x, target, lambda: None), right))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(x, target, lambda: None)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(equal_bits, found, right))


def test_a_graph_begins_them_early():
    from cuda.bindings import runtime

    x = random((16, 4096), torch.bfloat16, 1)
    c.softmax(c.softmax(x))
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        c.softmax(c.softmax(x))
    error, _, _, edges, count = runtime.cudaGraphGetEdges(graph.raw_cuda_graph(), 1)
    programmatic = runtime.cudaGraphDependencyType.cudaGraphDependencyTypeProgrammatic
    assert not int(error) and count == 1 and int(edges[0].type) == programmatic
