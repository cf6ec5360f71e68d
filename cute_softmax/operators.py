"""Registers `torch.ops.cute_softmax`: what a process imports that runs an exported or saved graph of these operators.

A program that calls a function of the package does not need it: the function's own operators come with it.
"""

from .dispatch.heads import calls as heads
from .dispatch.heads import divergence, largest, reductions, sinks
from .dispatch.matmul import calls as matmul
from .dispatch.matmul import stats
from .dispatch.sharded import calls as sharded
from .dispatch.softmax import calls as softmax
from .dispatch.topk import calls as topk

REGISTERED_BY = (softmax, reductions, sinks, heads, largest, divergence, matmul, stats, sharded, topk)
