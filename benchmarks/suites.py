"""The suites: what is run, saved and shown together. A new one is an entry of `SUITES`."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from .cases import (
    AND_CAUSAL,
    BATCH_MASK,
    CAPPED,
    CAUSAL,
    CHOSEN,
    COLD_STORE,
    DEPTH,
    FLASHINFER,
    FORWARD_BACKWARD,
    GRAD,
    GROUP_BIAS,
    GROUP_MASK,
    IN_TURN,
    INVARIANT,
    LADDER,
    MASK,
    NAIVE,
    NEW_COLUMNS,
    NO_GRAD,
    PROVIDERS,
    RECOMPUTED,
    REDUCTIONS,
    RENORMALIZED,
    ROW_MASK,
    SCALED,
    SHARED_MASK,
    SLICE,
    SMOOTHED,
    T_A_ROW,
    TEMPERATURE,
    TO,
    TRANSPOSED,
    TRL,
    TWO_STEPS,
    WARM_STORE,
    WITH_ENTROPY,
    Case,
    Suite,
)

# For softmax_matmul the yardstick is the product alone; for few rows, which take what reading takes, a copy that moves
# as many bytes.
_PRODUCT = ("cute_softmax", "copy", "torch", "torch.compile", "quack")
# For its gradients a copy of the scores to theirs.
_GRADIENTS = ("cute_softmax", "copy", "torch", "torch.compile")
_EAGER = ("cute_softmax", "torch", "torch.compile", "liger", "quack")

# Within `batch_invariant`: the shapes of few rows, and an odd vocabulary; more rows, whose results must not cost more.
INVARIANT_SHAPES = (
    *((rows, columns) for columns in (32000, 50257, 128256, 151936) for rows in (1, 8, 64, 512)),
    (8, 1048576), (64, 1048576),
)  # fmt: skip
_LARGEST = ((4096, 131072), (4096, 32768), (64, 151936))  # of which the largest log-probabilities are wanted
# Experts and k of models in use (Mixtral, OLMoE, DeepSeek-V2 and V3, Kimi K2), and the most.
_EXPERTS = ((8, 2), (64, 8), (160, 6), (256, 8), (384, 8), (1024, 8), (1024, 32))
_FP32_EXPERTS = ((64, 8), (128, 8), (256, 8), (512, 8), (512, 32), (1024, 8), (1024, 32))
_FP32_ROUTED = (1, 64, 1024, 4096, 8192, 65536)
_ROUTED, _ROUTERS = (1, 64, 1024, 8192, 65536), ("topk_softmax", "topk_gradient")
# Scores of attention.
_SCORES = ((8, 32, 1024, 1024), (4, 32, 2048, 2048), (2, 16, 4096, 4096), (1, 16, 8192, 8192))

# Softmax over dim 0: wide matrices of short columns, tall ones of long columns.
_WIDE = ((128, 1048576), (1024, 262144), (4096, 65536))
_TALL = ((65536, 4096), (262144, 1024), (1048576, 64))
_ODD_IMAGES = ((32, 512, 55, 55), (8, 21, 513, 513))
_ODD_COLUMNS = ((128, 1048577), (4096, 65537))

# What language models have for vocabularies (Llama 3, DeepSeek, Qwen 2.5 and 2, GPT-4o and its like, Command R, Gemma),
# and what lies just past a power of two.
VOCABULARIES = (128256, 129280, 131080, 151936, 152064, 200064, 201088, 256000, 262144, 262152)
_TOKENS = (16, 128, 2048)
# What FlashInfer's own benchmark of its softmax has (benchmarks/bench_softmax.py).
_SAMPLED, _SAMPLED_FROM = (1, 4, 8, 16, 32, 64, 128, 256, 512, 1024), (32000, 64000, 128000, 256000)


def _cases(op: str, *shapes: tuple[int, ...], dim: int | tuple[int, ...] = -1) -> tuple[Case, ...]:
    dims = (dim,) if isinstance(dim, int) else dim
    return tuple(Case(op, shape, dim=dims) for shape in shapes)


def _over_vocabularies(op: str, mode: str = "") -> tuple[Case, ...]:
    return tuple(Case(op, (rows, n), mode=mode) for rows in _TOKENS for n in VOCABULARIES)


_PROBABILITIES = (
    *(
        Case("sampling", (tokens, n), mode=f"{TEMPERATURE}1")
        for tokens, n in product(_SAMPLED, _SAMPLED_FROM)
    ),
    *(Case("sampling", (tokens, n), mode=T_A_ROW) for tokens, n in product((1, 16, 128), (128000, 151936))),
)


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "rows-forward",
            "softmax over rows, forward",
            _cases(
                "softmax",
                *((32768, n) for n in (1024, 2048, 4096, 6144)),
                *((16384, n) for n in (8192, 16384)),
                *((8192, n) for n in (8192, 16384)),
                *((4096, n) for n in (8192, 16384, 32768, 65536, 131072)),
            ),
            PROVIDERS,
        ),
        Suite(
            "rows-backward",
            "softmax over rows, backward",
            _cases(
                "softmax_backward",
                (32768, 256),
                (32768, 1024),
                (16384, 4096),
                (8192, 8192),
                (4096, 32768),
                (4096, 65536),
                (2048, 131072),
                (8192, 262144),
            ),
            PROVIDERS,
        ),
        Suite(
            "small-rows",
            "softmax over short rows, forward",
            _cases("softmax", (262144, 64), (65536, 128), (32768, 256), (32768, 512)),
            PROVIDERS,
        ),
        Suite(
            "long-rows",
            "softmax over long rows, forward",
            _cases("softmax", (8192, 262144), (512, 1000000)),
            PROVIDERS,
        ),
        Suite(
            "odd-rows",
            "softmax over rows of odd length, forward",
            _cases("softmax", (32768, 1023), (8192, 50257), (4096, 151937)),
            PROVIDERS,
        ),
        Suite(
            "fp32-rows",
            "softmax over rows, forward, fp32",
            _cases(
                "softmax",
                *((32768, n) for n in (256, 512, 1024, 2048, 4096)),
                (16384, 8192),
                (8192, 16384),
                (4096, 32768),
                (4096, 65536),
                (2048, 131072),
            ),
            PROVIDERS,
            dtype="fp32",
        ),
        Suite(
            "columns-forward",
            "softmax over columns, forward",
            _cases("softmax", *_WIDE, dim=0),
            PROVIDERS,
        ),
        Suite(
            "columns-tall",
            "softmax over tall columns, forward",
            _cases("softmax", *_TALL, dim=0),
            PROVIDERS,
        ),
        Suite(
            "columns-backward",
            "softmax over columns, backward",
            _cases("softmax_backward", *_WIDE, *_TALL, dim=0),
            PROVIDERS,
        ),
        Suite(
            "any-dims",
            "softmax over inner dimensions, forward",
            (
                *_cases("softmax", (32, 512, 56, 56), (8, 1000, 128, 128), dim=1),
                *_cases("softmax", (64, 128, 32, 256), dim=(1, 3)),
                *_cases("softmax", (8, 16, 2048, 2048), dim=-2),
            ),
            PROVIDERS,
        ),
        Suite(
            "odd-columns",
            "softmax over columns that begin off vector boundaries, forward and backward",
            (
                *_cases("softmax", *_ODD_IMAGES, dim=1),
                *_cases("softmax", *_ODD_COLUMNS, dim=0),
                *_cases("softmax_backward", *_ODD_IMAGES, dim=1),
                *_cases("softmax_backward", *_ODD_COLUMNS, dim=0),
            ),
            PROVIDERS,
        ),
        Suite(
            "split-rows",
            "softmax over rows longer than a cluster holds, forward",
            _cases("softmax", (512, 1048576), (64, 3000001), (64, 16777216), (4, 268435456)),
            PROVIDERS,
        ),
        Suite(
            "few-rows",
            "softmax over few rows, forward",
            _cases("softmax", (1, 128256), (8, 151936), (64, 128256), (8, 1048576), (64, 1048576)),
            PROVIDERS,
            kind="graph",
        ),
        Suite(
            "sampling",
            "probabilities at a temperature, in float32",
            _PROBABILITIES,
            ("cute_softmax", "copy", "torch", "torch.compile", FLASHINFER),
            kind="graph",
        ),
        Suite(
            "sampling-fp32",
            "probabilities at a temperature, of float32 logits",
            _PROBABILITIES,
            ("cute_softmax", "copy", "torch", "torch.compile", "quack", FLASHINFER),
            kind="graph",
            dtype="fp32",
        ),
        Suite(
            "batch-invariant",
            "rows within batch_invariant and outside, forward",
            tuple(
                Case(op, shape, mode=mode)
                for op in ("softmax", "log_softmax", "logsumexp")
                for shape in INVARIANT_SHAPES
                for mode in ("", INVARIANT)
            ),
            ("cute_softmax", "copy"),
            kind="graph",
        ),
        Suite(
            "reductions",
            "reductions over rows",
            (
                *(Case(op, (32768, 50304)) for op in REDUCTIONS),
                *_cases("logsumexp", (1, 151936)),
                *_cases("softmax", (1, 151936)),
            ),
            PROVIDERS,
        ),
        Suite(
            "vocabularies",
            "rows of the vocabularies in use",
            (
                *_over_vocabularies("softmax"),
                *_over_vocabularies("softmax", f"{TO}fp32"),
                *_over_vocabularies("log_softmax"),
                *_over_vocabularies("log_softmax", f"{TO}fp32"),
                *_over_vocabularies("logsumexp"),
                *_over_vocabularies("softmax_backward"),
                *_over_vocabularies("log_softmax_backward"),
            ),
            ("cute_softmax", "copy", "torch", "quack"),
        ),
        Suite(
            "ladder",
            "softmax over 1024 rows by the rungs of the ladder, forward",
            _cases("softmax", *((1024, n) for n in range(512, 10241, 512))),
            ("cute_softmax", "copy", "torch", "cudnn", *LADDER),
        ),
        Suite(
            "directions",
            "softmax over rows and over columns, the naive form beside the others, forward",
            tuple(
                Case("softmax", shape, dim=(dim,))
                for shape in ((1024, 10240), (4096, 4096), (8192, 8192), (65536, 1024))
                for dim in (1, 0)
            ),
            ("cute_softmax", "copy", "torch", "cudnn", NAIVE),
        ),
        Suite(
            "family",
            "the softmax family over a vocabulary",
            (
                *(Case(op, (32768, 50304)) for op in ("softmax", "log_softmax", "logsumexp")),
                Case("log_softmax_backward", (16384, 50304)),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "selective",
            "log-probabilities of given tokens, and forward with backward",
            (
                *_cases("selective_log_softmax", (8192, 151936), (8192, 32768)),
                *_cases("selective_gradient", (8192, 151936), (8192, 32768)),
                *(
                    replace(case, mode=WITH_ENTROPY)
                    for op in ("selective_log_softmax", "selective_gradient")
                    for case in _cases(op, (4096, 151936), (8192, 32768), (512, 151936))
                ),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile", *TRL),
        ),
        Suite(
            "information",
            "entropies, divergences of a teacher, the largest log-probabilities",
            (
                *(
                    case
                    for op in ("entropy", "entropy_gradient", "kl_div", "kl_div_gradient")
                    for case in _cases(op, (4096, 151936), (8192, 32768), (512, 151936))
                ),
                *(
                    replace(case, mode=f"{CHOSEN}{k}")
                    for k in (8, 128)
                    for case in _cases("topk_log_softmax", *_LARGEST)
                ),
                *_cases("logsumexp", *_LARGEST),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "cross-entropy",
            "cross entropy of tokens, forward with backward",
            (
                *_cases("cross_entropy", (4096, 151936), (8192, 32768), (512, 151936)),
                *(
                    replace(case, mode=mode)
                    for mode in (SMOOTHED, CAPPED, RECOMPUTED)
                    for case in _cases("cross_entropy", (4096, 151936), (8192, 32768))
                ),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile", "liger", "quack"),
        ),
        Suite(
            "routers",
            "the largest of a softmax over experts, and forward with backward",
            tuple(
                Case(op, (tokens, experts), mode=f"{CHOSEN}{k}{among}")
                for op, among, (experts, k), tokens in product(
                    _ROUTERS, ("", RENORMALIZED), _EXPERTS, _ROUTED
                )
            ),
            ("cute_softmax", "copy", "torch", "torch.compile", "quack"),
        ),
        Suite(
            "routers-fp32",
            "the largest of float32 logits of experts",
            tuple(
                Case("topk_softmax", (tokens, experts), mode=f"{CHOSEN}{k}{RENORMALIZED}")
                for (experts, k), tokens in product(_FP32_EXPERTS, _FP32_ROUTED)
            ),
            ("cute_softmax", "copy", "torch", "torch.compile", "quack"),
            dtype="fp32",
        ),
        Suite(
            "masked",
            "masked and scaled softmax",
            (
                *_cases("softmax", (64, 4096, 4096), (32768, 4096), *_SCORES),
                Case("masked_softmax", (64, 4096, 4096), mode=CAUSAL),
                *(Case("masked_softmax", (32768, 4096), mode=mode) for mode in (SCALED, MASK, ROW_MASK)),
                *(
                    Case("masked_softmax", shape, mode=mode)
                    for shape in _SCORES
                    for mode in (BATCH_MASK, SHARED_MASK, CAUSAL)
                ),
            ),
            ("cute_softmax", "copy", "torch", "torch.compile"),
        ),
        Suite(
            "scores",
            "scores of columns and of long rows, beside the same softmax without",
            tuple(
                case
                for shape, dim in (
                    ((4, 1048584), 1),
                    ((64, 1048576), 1),
                    ((64, 1456104), 1),
                    ((4096, 65536), 0),
                    ((128, 1048576), 0),
                    ((128256, 1037), 0),
                    ((32, 512, 56, 56), 1),
                )
                for case in (
                    Case("softmax", shape, dim=(dim,)),
                    *(
                        Case("masked_softmax", shape, dim=(dim,), mode=mode)
                        for mode in (SCALED, GROUP_MASK, GROUP_BIAS, MASK)
                    ),
                )
            ),
            ("cute_softmax", "copy"),
        ),
        Suite(
            "fp32-any",
            "softmax over any dimension, fp32",
            (
                *_cases("softmax", (1024, 131072), (65536, 2048), dim=0),
                *_cases("softmax_backward", (1024, 131072), dim=0),
                *_cases("softmax", (32, 512, 56, 56), dim=1),
                *_cases("softmax", (64, 8388608)),
                *_cases("logsumexp", (16384, 50304)),
            ),
            PROVIDERS,
            dtype="fp32",
        ),
        Suite(
            "views",
            "softmax over slices, odd lengths and transposed tensors, forward",
            (
                Case("softmax", (16384, 4097), view=SLICE),
                Case("softmax", (16384, 8192), dim=(0,), view=TRANSPOSED),
                Case("softmax", (16384, 8192), dim=(1,), view=TRANSPOSED),
                Case("softmax", (8192, 50257)),
            ),
            PROVIDERS,
        ),
        Suite(
            "matmul",
            "softmax(S) @ V, forward; the yardstick is the product S @ V alone, for few rows a copy of as many bytes",
            (
                *(Case("softmax_matmul", (32, 4096, 4096), mode=f"{DEPTH}{d}") for d in (64, 128)),
                Case("softmax_matmul", (8, 8192, 8192), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (1, 16384, 16384), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (64, 2048, 2048), mode=f"{DEPTH}128"),
                Case("softmax_matmul", (16, 4097, 4095), mode=f"{DEPTH}128"),
                *(
                    Case("softmax_matmul", (32, 4096, 4096), mode=f"{DEPTH}128{way}")
                    for way in (AND_CAUSAL, TWO_STEPS)
                ),
                *(Case("softmax_matmul", (32, rows, 131072), mode=f"{DEPTH}128") for rows in (1, 16)),
            ),
            _PRODUCT,
        ),
        Suite(
            "matmul-backward",
            "gradients of softmax(S) @ V, backward alone; the yardstick copies S to its gradient",
            (
                *(Case("softmax_matmul_backward", (32, 4096, 4096), mode=f"{DEPTH}{d}") for d in (64, 128)),
                Case("softmax_matmul_backward", (8, 8192, 8192), mode=f"{DEPTH}128"),
                *(Case("softmax_matmul_backward", (4, 4096, 4096), mode=f"{DEPTH}{d}") for d in (256, 512)),
                Case("softmax_matmul_backward", (16, 4097, 4095), mode=f"{DEPTH}128"),
                Case("softmax_matmul_backward", (32, 4096, 4096), mode=f"{DEPTH}128{AND_CAUSAL}"),
            ),
            _GRADIENTS,
        ),
        Suite(
            "overhead",
            "host time of an eager call",
            tuple(
                Case("softmax", (128, 128), mode=mode) for mode in (NO_GRAD, GRAD, FORWARD_BACKWARD, IN_TURN)
            ),
            _EAGER,
            kind="host",
        ),
        Suite(
            "overhead-scores",
            "host time of an eager call on scores, of the family, of heads and of a product",
            (
                *(Case("masked_softmax", (128, 128), mode=mode) for mode in (SCALED, ROW_MASK, MASK, CAUSAL)),
                *(Case(op, (128, 128)) for op in ("log_softmax", "logsumexp", "selective_log_softmax")),
                Case("selective_gradient", (128, 128)),
                Case("softmax_matmul", (4, 128, 128), mode=f"{DEPTH}64"),
            ),
            ("cute_softmax", "torch", "torch.compile"),
            kind="host",
        ),
        Suite(
            "first-call",
            "first softmax of a fresh process",
            tuple(Case("softmax", (4096, 4096), mode=mode) for mode in (COLD_STORE, WARM_STORE, NEW_COLUMNS)),
            _EAGER,
            kind="process",
        ),
    )
}
