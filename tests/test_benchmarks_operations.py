"""The benchmarks' operations, with their checks against float64, and their providers as far as a CPU has them."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from benchmarks import (
    gradients,
    information,
    losses,
    masked,
    operations,
    providers,
    report,
    results,
    routers,
    sampling,
    selective,
)
from benchmarks.cases import (
    AND_CAUSAL,
    BATCH_MASK,
    CAPPED,
    CAUSAL,
    GROUP_BIAS,
    GROUP_MASK,
    LADDER,
    MASK,
    PROVIDERS,
    RECOMPUTED,
    REDUCTIONS,
    ROW_MASK,
    SCALED,
    SHARED_MASK,
    SLICE,
    SMOOTHED,
    SPECIALISTS,
    T_A_ROW,
    TRANSPOSED,
    WITH_ENTROPY,
    Case,
)

CPU = torch.device("cpu")
MODES = (SCALED, CAUSAL, MASK, ROW_MASK, SHARED_MASK, BATCH_MASK, GROUP_MASK, GROUP_BIAS)


# ---- checks against float64

SMALL = [
    Case("softmax", (8, 256)),
    Case("softmax", (8, 1023), "fp16"),
    Case("softmax", (6, 4096), "fp32"),
    Case("softmax", (64, 9), dim=(0,)),
    Case("softmax", (2, 3, 4), dim=(0, 2)),
    Case("softmax_backward", (8, 256)),
    Case("softmax_backward", (8, 1023), "fp16"),
    Case("softmax_backward", (6, 4096), "fp32"),
    Case("softmax_backward", (64, 9), dim=(0,)),
    Case("softmax", (3, 64, 5), dim=(1,)),
    Case("softmax", (8, 129), view=SLICE),
    Case("softmax", (64, 9), dim=(0,), view=TRANSPOSED),
    Case("softmax_backward", (9, 64), dim=(1,), view=TRANSPOSED),
    Case("log_softmax", (8, 1023)),
    Case("log_softmax", (6, 4096), "fp32"),
    Case("log_softmax_backward", (8, 256)),
    Case("log_softmax_backward", (8, 256), "fp32"),
    *(Case("masked_softmax", (2, 3, 40, 64), mode=mode) for mode in MODES),
    *(Case("masked_softmax", (64, 9), dim=(0,), mode=mode) for mode in (MASK, GROUP_MASK, GROUP_BIAS)),
    Case("masked_softmax", (40, 64), "fp32", mode=CAUSAL),
]
REDUCED = [
    Case("logsumexp", (8, 1023)),
    Case("logsumexp", (6, 4096), "fp32"),
    Case("logsumexp", (1, 2048), "fp16"),
    Case("logsumexp", (64, 9, 8), dim=(0, -1)),
    Case("amax", (8, 1023)),
    Case("amax", (64, 9), "fp32", dim=(0,)),
    Case("sum", (8, 1023)),
    Case("sum", (6, 4096), "fp32"),
    Case("sum", (9, 64), "fp16", view=TRANSPOSED),
]


def exact(case: Case, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The result in float64, rounded once."""
    wide = [t.double() for t in inputs]
    if case.op in REDUCTIONS:
        y = getattr(torch, case.op)(wide[0], case.dim)
    elif case.op == "masked_softmax":
        y = torch.softmax(masked.scores(case)(wide[0], *inputs[1:]), case.dim[0])
    elif case.op == "log_softmax":
        y = torch.log_softmax(wide[0], case.dim[0])
    elif case.op == "log_softmax_backward":
        y = wide[0] - wide[1].exp() * wide[0].sum(case.dim, True)
    elif case.op == "softmax":
        e = (wide[0] - wide[0].amax(case.dim, True)).exp()
        y = e / e.sum(case.dim, True)
    else:
        y = wide[1] * (wide[0] - (wide[0] * wide[1]).sum(case.dim, True))
    return y.to(inputs[0].dtype)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_right_results_pass_and_mutants_fail(case):
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    right = exact(case, inputs)
    assert operation.check(case, inputs, right) <= operations.TOLERANCE[case.dtype]
    one_nan = right.clone()
    one_nan[1, 2] = float("nan")
    last = case.dim[-1]
    half = right.shape[last] // 2
    dropped = right.clone()
    dropped.narrow(last, half, right.shape[last] - half).zero_()
    mutants = {
        "zeros": torch.zeros_like(right),
        "uniform": torch.full_like(right, 1 / right.shape[last]),
        "shifted": right.roll(1, last),
        "dropped": dropped,
        "denominator": (right * 1.03).to(right.dtype),
        "nan": one_nan,
        "dtype": right.double(),
        "shape": right.flatten(),
    }
    for mutant in mutants.values():
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant)


@pytest.mark.parametrize("case", REDUCED, ids=str)
def test_right_reductions_pass_and_mutants_fail(case):
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    right = exact(case, inputs)
    assert right.shape == case.output_shape
    assert operation.check(case, inputs, right) <= 1e-6
    (x,) = inputs
    last = case.dim[-1]
    # What is missing must matter for what is asked.
    big = x.clone()
    big.select(last, -1).fill_(20.0 if case.op != "sum" else 60.0)
    without = big.narrow(last, 0, x.shape[last] - 1)
    mutants = {
        "zeros": (x, torch.zeros_like(right)),
        "half": (x, exact(case, (x.narrow(last, 0, x.shape[last] // 2),))),
        "dropped": (big, exact(case, (without,))),
        "off": (x, right * 1.1 + 0.1),
        "nan": (x, torch.full_like(right, float("nan"))),
        "dtype": (x, right.double()),
        "kept": (x, right.unsqueeze(last)),
    }
    for tensor, mutant in mutants.values():
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, (tensor,), mutant)


def test_the_maximum_is_exact():
    case = Case("amax", (4, 64))
    inputs = operations.OPERATIONS["amax"].inputs(case, CPU)
    right = exact(case, inputs)
    off = torch.nextafter(right, torch.full_like(right, 9.0))
    with pytest.raises(operations.WrongResult):
        operations.OPERATIONS["amax"].check(case, inputs, off)


@pytest.mark.parametrize("case", [c for c in SMALL + REDUCED if c.elements > 500], ids=str)
def test_checking_parts_of_rows_is_checking_them(case, monkeypatch):
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    whole = operation.check(case, inputs, exact(case, inputs))
    monkeypatch.setattr(operations, "_PIECE", 50)
    again = operation.inputs(case, CPU)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(inputs, again, strict=True))
    assert operation.check(case, inputs, exact(case, inputs)) == pytest.approx(whole, rel=1e-6, abs=1e-12)


def test_one_long_row_is_checked_to_its_end(monkeypatch):
    monkeypatch.setattr(operations, "_PIECE", 100)
    for op in ("softmax", "softmax_backward"):
        case = Case(op, (1, 1234))
        inputs = operations.OPERATIONS[op].inputs(case, CPU)
        right = exact(case, inputs)
        operations.OPERATIONS[op].check(case, inputs, right)
        wrong = right.clone()
        wrong[0, -1] *= 1.5
        with pytest.raises(operations.WrongResult):
            operations.OPERATIONS[op].check(case, inputs, wrong)


def test_views_lie_in_memory_as_they_are_named():
    def made(**how) -> torch.Tensor:
        return operations.OPERATIONS["softmax"].inputs(Case("softmax", **how), CPU)[0]

    odd = made(shape=(4, 4097), view=SLICE)
    assert odd.shape == (4, 4097) and odd.stride() == (8192, 1) and odd.storage_offset() == 1
    turned = made(shape=(16, 8), view=TRANSPOSED)
    assert turned.shape == (16, 8) and turned.stride() == (1, 16)
    assert made(shape=(2, 1), view=SLICE).shape == (2, 1)


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_checking_in_pieces_sees_every_row(op, monkeypatch):
    monkeypatch.setattr(operations, "_PIECE", 100)
    case = Case(op, (37, 33), "fp32")
    inputs = operations.OPERATIONS[op].inputs(case, CPU)
    right = exact(case, inputs)
    operations.OPERATIONS[op].check(case, inputs, right)
    for row in (0, 20, 36):
        wrong = right.clone()
        wrong[row, 32] *= 1.5
        with pytest.raises(operations.WrongResult):
            operations.OPERATIONS[op].check(case, inputs, wrong)


def test_inputs_are_the_same_every_time_and_not_constant():
    case = Case("softmax_backward", (16, 64))
    one, two = (operations.OPERATIONS[case.op].inputs(case, CPU) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert all(t.float().std() > 0 for t in one)
    assert not torch.equal(one[0], one[1])


# ---- providers


TAKEN = [c for c in SMALL + REDUCED if len(c.dim) == 1 or c.op in REDUCTIONS]


@pytest.mark.parametrize("case", TAKEN, ids=str)
def test_torch_as_provider_is_right(case):
    inputs = operations.OPERATIONS[case.op].inputs(case, CPU)
    output = providers.build("torch", case.op, case)(*inputs)
    operations.OPERATIONS[case.op].check(case, inputs, output)


def test_copy_reads_and_writes_what_an_operation_does():
    x = torch.randn(4, 5)
    out = providers.build("copy", "softmax", Case("softmax", (4, 5)))(x)
    assert torch.equal(out, x) and out.data_ptr() != x.data_ptr()
    both = providers.build("copy", "softmax_backward", Case("softmax_backward", (4, 5)))(x, x)
    assert torch.equal(both, x + x)


def test_the_yardstick_of_a_reduction_reads_it_once():
    x = torch.randn(4, 5, 6)
    out = providers.build("copy", "logsumexp", Case("logsumexp", (4, 5, 6), dim=(0, 2)))(x)
    assert torch.equal(out, x.sum((0, 2)))


def test_the_copy_of_a_view_is_a_tensor_like_it():
    case = Case("softmax", (64, 9), view=TRANSPOSED)
    (x,) = operations.OPERATIONS["softmax"].inputs(case, CPU)
    assert providers.build("copy", "softmax", case)(x).stride() == x.stride()


@pytest.mark.parametrize("op", REDUCTIONS)
def test_ours_is_asked_for_at_the_call_with_one_dim_or_several(op, monkeypatch):
    import cute_softmax

    asked = []
    monkeypatch.setattr(cute_softmax, op, lambda x, dim: asked.append(dim), raising=False)
    for dims in ((0,), (0, 2)):
        providers.build("cute_softmax", op, Case(op, (2, 3, 4), dim=dims))(torch.ones(2, 3, 4))
    assert asked == [0, (0, 2)]


@pytest.mark.parametrize("case", [c for c in SMALL if c.op == "softmax"], ids=str)
def test_quack_is_given_contiguous_rows(case):
    def rows(x: torch.Tensor) -> torch.Tensor:
        assert x.is_contiguous() or case.view == SLICE
        return torch.softmax(x, -1)

    if len(case.shape) > 2:
        with pytest.raises(providers.Refusal, match="last dimension of two"):
            providers.Quack()._over_rows(case, rows)
        return
    inputs = operations.OPERATIONS["softmax"].inputs(case, CPU)
    output = providers.Quack()._over_rows(case, rows)(*inputs)
    operations.OPERATIONS["softmax"].check(case, inputs, output)
    # Rows that QuACK must be handed contiguous come back contiguous.
    turned_over_dim_0 = case.view == TRANSPOSED and case.dim == (0,)
    assert output.is_contiguous() != turned_over_dim_0


@pytest.mark.parametrize(
    ("case", "takes"),
    [
        (Case("softmax", (512, 1 << 20)), True),
        (Case("softmax", (64, 1 << 24)), False),
        (Case("softmax", (1 << 20, 64), dim=(0,)), True),
        (Case("softmax", (1 << 20, 64), dim=(0,), dtype="fp32"), False),
        (Case("softmax_backward", (1 << 20, 64), dim=(0,)), False),
    ],
    ids=str,
)
def test_quack_is_not_given_rows_longer_than_a_cluster_holds(case, takes):
    if takes:
        assert providers.Quack()._over_rows(case, torch.softmax)
    else:
        with pytest.raises(providers.Refusal, match="shared memory of a cluster"):
            providers.Quack()._over_rows(case, torch.softmax)


@pytest.mark.parametrize(
    ("case", "shape", "modes"),
    [
        (Case("softmax", (32, 64)), (32, 64, 1, 1), ["instance", "channel"]),
        (Case("softmax", (32, 64), dim=(0,)), (1, 32, 1, 64), ["channel"]),
        (Case("softmax", (2, 3, 4, 5), dim=(1,)), (2, 3, 1, 20), ["channel"]),
        (Case("softmax", (2, 3, 4, 5), dim=(-2,)), (6, 4, 1, 5), ["channel"]),
    ],
    ids=str,
)
def test_cudnn_is_told_of_channels(case, shape, modes, monkeypatch):
    described = []

    def softmax(*arguments):
        described.append(arguments)
        return lambda x: x

    monkeypatch.setattr(providers.cudnn, "softmax", softmax)
    providers.build("cudnn", "softmax", case)
    assert described == [(shape, torch.bfloat16, mode) for mode in modes]


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("liger", Case("softmax", (4, 5), dim=(0,)), "last dimension only"),
        ("liger", Case("softmax_backward", (4, 5), dim=(0,)), "last dimension only"),
        ("liger", Case("softmax", (4, 5), dim=(0, 1)), "one dimension"),
        ("cudnn", Case("softmax", (4, 5), dim=(0, 1)), "one dimension"),
        ("cudnn", Case("softmax", (4, 5), view=SLICE), "contiguous"),
        ("quack", Case("logsumexp", (4, 5)), "has no logsumexp"),
        ("liger", Case("amax", (4, 5)), "has no amax"),
        ("cudnn", Case("sum", (4, 5)), "has no sum"),
    ],
    ids=str,
)
def test_peers_refuse_what_they_cannot_do(name, case, reason):
    with pytest.raises(providers.Refusal, match=reason):
        providers.build(name, case.op, case)


def test_every_provider_is_registered_and_refuses_what_it_has_not():
    assert tuple(providers.REGISTRY) == (*PROVIDERS, *SPECIALISTS, *LADDER)
    with pytest.raises(providers.Refusal, match="has no entry"):
        providers.build("copy", "entry", Case("softmax", (4, 5)))
    with pytest.raises(providers.Refusal, match="one dimension"):
        providers.build("torch", "softmax", Case("softmax", (2, 3, 4), dim=(0, 2)))


def test_the_fastest_way_is_kept(monkeypatch):
    tried = []

    def slow(x):
        return x + 1

    def fails(x):
        raise RuntimeError("no")

    def clock(call):
        tried.append(call())
        return 9.0 if tried[-1] == 2 else 1.0

    def fast(x):
        return x + 2

    monkeypatch.setattr(providers, "event_us", clock)
    chosen = providers.Fastest({"slow": slow, "fails": fails, "fast": fast})
    assert chosen(1) == 3 and chosen.note == "fast"
    count = len(tried)
    assert chosen(2) == 4 and len(tried) == count
    with pytest.raises(RuntimeError, match="no"):
        providers.Fastest({"fails": fails})(1)


def written_as_trl(logits, index):
    """What TRL's kernel returns."""
    every = torch.log_softmax(logits.float(), -1)
    return every.gather(-1, index.unsqueeze(-1)).squeeze(-1), -(every.exp() * every).sum(-1)


@pytest.mark.parametrize("op", ["selective_log_softmax", "selective_gradient"])
@pytest.mark.parametrize("mode", ["", WITH_ENTROPY])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_chosen_tokens(op, mode, dtype, monkeypatch):
    kernels = ModuleType("trl.kernels")
    kernels.selective_log_softmax_and_entropy = written_as_trl
    for name, module in (("trl", ModuleType("trl")), ("trl.kernels", kernels)):
        monkeypatch.setitem(sys.modules, name, module)
    case = Case(op, (40, 300), dtype, mode=mode)
    operation = operations.OPERATIONS[op]
    inputs = operation.inputs(case, CPU)
    logits, tokens, upstream = inputs
    assert tokens.shape == upstream.shape == (40,) and tokens.max() < 300
    right = selective.expected(logits, tokens, mode)
    mutants = {"next token": selective.expected(logits, (tokens + 1) % 300, mode), "no maximum": right + 1}
    if op == "selective_gradient":
        right, _ = selective.expected_gradient(*inputs, mode)
        mutants = {
            "next token": selective.expected_gradient(logits, (tokens + 1) % 300, upstream, mode)[0],
            "no share": torch.where(right.abs() > 0.2, right, 0.0),
            "sign": -right,
        }
    if mode:
        forward = op == "selective_log_softmax"
        without = selective.expected(*inputs[:2]) if forward else selective.expected_gradient(*inputs)[0]
        mutants["no entropy"] = without
    right = right.to(logits.dtype)
    assert right.shape == case.output_shape
    assert operation.check(case, inputs, right) <= operations.TOLERANCE[dtype]
    for mutant in (*mutants.values(), torch.zeros_like(right), right.roll(1, 0)):
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant.to(logits.dtype))
    for name in ("cute_softmax", "torch", "trl"):
        call = providers.build(name, op, case)
        assert operation.check(case, inputs, call(*inputs)) <= operations.TOLERANCE[dtype]
    assert providers.build("copy", op, case)(*inputs).shape == case.output_shape


def test_without_trl_its_kernel_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(ModuleNotFoundError) as refused:
        providers.build("trl", "selective_gradient", Case("selective_gradient", (4, 5)))
    error = results.describe(refused.value)
    assert "trl" in error and report.failure_word(error) == "absent"


@pytest.mark.parametrize("mode", ["T = 1", "T = 0.7", T_A_ROW])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_probabilities_at_a_temperature(dtype, mode, monkeypatch):
    peer = ModuleType("flashinfer.sampling")
    peer.softmax = sampling.torchs
    for name, module in (("flashinfer", ModuleType("flashinfer")), ("flashinfer.sampling", peer)):
        monkeypatch.setitem(sys.modules, name, module)
    case = Case("sampling", (40, 300), dtype, mode=mode)
    operation = operations.OPERATIONS["sampling"]
    inputs = operation.inputs(case, CPU)
    temperatures = inputs[1] if mode == T_A_ROW else float(mode[4:])
    right = sampling.expected(inputs[0], temperatures).float()
    assert right.shape == case.output_shape and case.result == "fp32"
    assert operation.check(case, inputs, right) <= operations.TOLERANCE["fp32"]
    hotter = sampling.expected(inputs[0], 1.01 * temperatures)
    for mutant in (hotter, right * 1.0001, right.roll(1, 0), torch.zeros_like(right)):
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant.float())
    with pytest.raises(operations.WrongResult, match="wrong result"):
        operation.check(case, inputs, right.bfloat16())
    for name in ("cute_softmax", "torch", "flashinfer"):
        call = providers.build(name, "sampling", case)
        assert operation.check(case, inputs, call(*inputs)) <= operations.TOLERANCE["fp32"]
    if dtype == "fp32":
        copied = providers.build("copy", "sampling", case)(*inputs)
        assert 2 * copied.numel() * copied.itemsize == case.traffic
    if mode != "T = 1":
        with pytest.raises(providers.Refusal, match="no temperature"):
            providers.build("quack", "sampling", case)


@pytest.mark.parametrize("op", ["entropy", "kl_div", "topk_log_softmax"])
@pytest.mark.parametrize("gradient", ["", "_gradient"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_numbers_of_rows(op, gradient, dtype):
    if gradient and op.startswith("topk"):
        pytest.skip("the gradient is that of chosen log-probabilities")
    case = Case(op + gradient, (40, 300), dtype, mode="k = 5" if op.startswith("topk") else "")
    operation = operations.OPERATIONS[case.op]
    logits, target, upstream = inputs = operation.inputs(case, CPU)
    assert torch.equal(target, logits) == (op != "kl_div") and upstream.shape == (40,)
    right = (
        information.expected_gradient(case, *inputs)[0]
        if gradient
        else information.expected(case, logits, target)
    )
    right = right.to(logits.dtype)
    assert right.shape == case.output_shape
    for name in ("cute_softmax", "torch"):
        found = providers.build(name, case.op, case)(*inputs)
        assert operation.check(case, inputs, found) <= operations.TOLERANCE[dtype]
    for mutant in (torch.zeros_like(right), right.roll(1, 0), -right):
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant)
    assert len(providers.build("copy", case.op, case)(*inputs)) == 40


@pytest.mark.parametrize("op", ["topk_softmax", "topk_gradient"])
@pytest.mark.parametrize("mode", ["k = 6", "k = 6, renormalized"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_routers(op, mode, dtype):
    case = Case(op, (40, 60), dtype, mode=mode)
    operation = operations.OPERATIONS[op]
    logits, upstream = inputs = operation.inputs(case, CPU)
    assert upstream.shape == (40, 6) and all(len(row.unique()) == 60 for row in logits)
    forward = op == "topk_softmax"
    right = routers.expected(case, logits)[0] if forward else routers.expected_gradient(case, *inputs)[0]
    right = right.to(logits.dtype)
    assert right.shape == case.output_shape
    for name in ("cute_softmax", "torch"):
        found = providers.build(name, op, case)(*inputs)
        assert operation.check(case, inputs, found) <= 2 * operations.TOLERANCE[dtype]
    other = Case(op, (40, 60), dtype, mode="k = 6" if "," in mode else "k = 6, renormalized")
    confused = routers.expected(other, logits) if forward else routers.expected_gradient(other, *inputs)
    for mutant in (confused[0], right.roll(1, -1), torch.zeros_like(right), -right):
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant.to(logits.dtype))
    assert len(providers.build("copy", op, case)(*inputs)) == 40


def test_what_quack_does_not_route():
    for case in (
        Case("topk_softmax", (4, 64), mode="k = 8"),
        Case("topk_gradient", (4, 60), mode="k = 8, renormalized"),
        Case("topk_gradient", (4, 64), mode="k = 6, renormalized"),
    ):
        with pytest.raises(providers.Refusal):
            providers.build("quack", case.op, case)


@pytest.mark.parametrize("mode", ["", SMOOTHED, CAPPED, RECOMPUTED])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_cross_entropy_of_tokens(dtype, mode):
    case = Case("cross_entropy", (40, 300), dtype, mode=mode)
    operation = operations.OPERATIONS[case.op]
    logits, tokens = inputs = operation.inputs(case, CPU)
    right = losses.expected(logits, tokens, 40, mode)
    for name in ("cute_softmax", "torch"):
        assert (
            operation.check(case, inputs, providers.build(name, case.op, case)(*inputs))
            <= operations.TOLERANCE[dtype]
        )
    for mutant in (
        losses.expected(logits, (tokens + 1) % 300, 40, mode),
        losses.expected(logits, tokens, 30, mode),
        losses.expected(logits, tokens, 40, "" if losses.evenly(mode) or mode == CAPPED else SMOOTHED),
        torch.where(right > 0, right, 0.0),
        torch.zeros_like(right),
    ):
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant.to(logits.dtype))


def test_a_loss_that_writes_over_the_logits():
    """The first calls are right, later ones copy nothing."""
    case = Case("cross_entropy", (4, 30), "fp32")
    logits, tokens = operations.OPERATIONS[case.op].inputs(case, CPU)
    before = logits.clone()

    class Over(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits, tokens):
            ctx.save_for_backward(logits.copy_(losses.expected(logits, tokens, 4)))
            return logits.new_zeros(())

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0], None

    call = losses.OverTheLogits(Over.apply)
    right = losses.expected(logits, tokens, 4).float()
    for renewed in (True, True, False):
        assert torch.equal(call(logits, tokens), right) == renewed
    assert torch.equal(logits, before)


@pytest.mark.parametrize("mode", ["D = 16", f"D = 16{AND_CAUSAL}"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_gradients_of_a_product(mode, dtype):
    case = Case("softmax_matmul_backward", (2, 40, 56), dtype, mode=mode)
    operation = operations.OPERATIONS[case.op]
    inputs = operation.inputs(case, CPU)
    assert [t.shape for t in inputs] == [(2, 40, 56), (2, 56, 16), (2, 40, 16)]
    each = [gradients.expected(case, *three)[0] for three in zip(*inputs, strict=True)]
    right = tuple(torch.stack(parts).to(inputs[0].dtype) for parts in zip(*each, strict=True))
    assert operation.check(case, inputs, right) <= operations.TOLERANCE[dtype]
    scores, values = right
    mutants = [
        (torch.zeros_like(scores), values),
        (scores, torch.zeros_like(values)),
        (scores.roll(1, -1), values),
        (scores, values.roll(1, -2)),
        (scores * 1.1, values),
        (scores, values * 1.1),
        (scores, torch.full_like(values, float("nan"))),
        (scores.double(), values),
        (scores, values.double()),
        (scores.flatten(), values),
        (scores, values.flatten(0, 1)),
    ]
    for mutant in mutants:
        with pytest.raises(operations.WrongResult, match="wrong result"):
            operation.check(case, inputs, mutant)
    for name in ("cute_softmax", "torch"):
        call = providers.build(name, case.op, case)
        first, again = call(*inputs), call(*inputs)
        assert operation.check(case, inputs, first) <= 2 * operations.TOLERANCE[dtype]
        pairs = zip(first, again, strict=True)
        assert all(torch.equal(a, b) and a.data_ptr() != b.data_ptr() for a, b in pairs)
    copied = providers.build("copy", case.op, case)(*inputs)
    assert torch.equal(copied, inputs[0]) and copied.data_ptr() != inputs[0].data_ptr()


def test_the_forward_of_gradients_runs_once_for_its_inputs():
    count = []

    def product(s, v):
        count.append(s.shape)
        return torch.softmax(s, -1) @ v

    call = gradients.Backward(product)
    for columns in (5, 7):
        inputs = torch.randn(2, 3, columns), torch.randn(2, columns, 4), torch.randn(2, 3, 4)
        for _ in range(3):
            assert [t.shape for t in call(*inputs)] == [t.shape for t in inputs[:2]]
    assert count == [(2, 3, 5), (2, 3, 7)]
