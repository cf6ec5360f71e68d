"""What happens to a score before the softmax, and to its result: plain values, part of a Plan class."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache

from .maths import OF_SINKS, Math, NotPlanned, math_of

FORMS = ("", "number", "groups")
TARGETS = ("", "found", "loss")
AGAINST = ("", "loss", "input", "target", "weights")
# Of rows that ranks share: this rank's workspace, a word of the host's that is set when a peer did not come, an array
# of all ranks' workspaces, bytes of a half of these (see `kernels.ranks`), this rank, how many there are, and for how
# many nanoseconds one waits for another.
OF_RANKS = ("workspace", "alarm", "peers", "half", "rank", "ranks", "patience")
OF_SLICES = ("start", "size")  # where a rank's slice begins in whole rows, and how long these are
WHOLE = ("offset", "ignore", *OF_RANKS, *OF_SLICES)  # numbers that are integers
STATES = ("", "alone", "chosen")
FROM_ABOVE = ("alpha", "more", "down", "even")  # operands that are upstream gradients
# What each row math takes of a prologue: what it looks at, and what changes nothing for it. A gradient needs no mask
# of its own: where the softmax was masked it is 0, and its logarithm -inf.
_TAKES = {
    "softmax": (
        {
            *("scale", "softcap", "bias", "mask", "causal", "alpha", "zero", "sink"),
            *("target", "squares", "more", "entropy", "even", "against", "ranks", "factor"),
        },
        set(),
    ),
    "softmax_backward": ({"scale", "causal", "alpha", "sink", "state", "ranks"}, {"bias", "mask", "zero"}),
    "log_softmax": ({"scale", "bias", "mask", "causal", "zero", "sink", "ranks"}, set()),
    "log_softmax_backward": ({"scale", "mask", "causal", "sink", "ranks"}, {"bias", "zero"}),
    "logsumexp": (
        {
            "scale",
            "softcap",
            "bias",
            "mask",
            "causal",
            "against",
            "sink",
            "target",
            "squares",
            "even",
            "state",
        },
        {"zero"},
    ),
    "entropy": ({"scale", "softcap", "bias", "mask", "causal", "zero", "state"}, set()),
    "selective": ({"scale", "softcap", "even", "state"}, set()),
    "selective_entropy": ({"scale", "softcap", "state"}, set()),
}


@dataclass(frozen=True)
class Prologue:
    """``score = x * scale + bias``, -inf where masked; ``result = alpha * softmax(score)``.

    scale: "" (none), "number" or "groups" (a tensor with one element per group); alpha: likewise, of the result.
    softcap: the score is ``softcap * tanh(x * scale / softcap)``, with a positive number. Of "softmax" the results are
        gradients then, and multiplied by that of the tanh.
    bias: a full operand of a float dtype; mask: a full operand "bool", True = keep. Either may have stride 0.
    causal: element j of a group counts if j <= position + offset; the position is the index in the problem's last
        kept mode (see `problem.canonical`), the offset a number.
    zero: a group of which nothing is left gives zeros (a log_softmax -inf) instead of NaN.
    target: ``alpha * (softmax(score) - 1)`` at one element of each group, which an operand "index" names. "found": an
        operand of that name has the logarithm of the softmax there. "loss": it is made here, with the cross entropy of
        each group as a result of its own; groups whose index is the number "ignore" count nothing. For an `alpha` of
        "groups". Of "logsumexp": these cross entropies and nothing else.
    squares: of that loss the square of the logsumexp is a part, times the number "squares".
    more: at the target an operand of that name is added, once for each group.
    entropy: ``softmax(score) * (alpha + down * (log softmax(score) + entropy))``, with operands "down" and "entropy" of
        one element per group; the alpha of none is 0 here. The gradient of functions of the group's entropy.
    even: the mean over a group of the logarithm of the softmax has a part, as in label smoothing. Of "selective" it is
        one more result, "even"; in a loss it has the share "smoothing", a number; in the gradient with the target
        "found" its part is an operand "even" of one element per group, added to every result.
    factor: upstream gradients, operands "alpha", "more", "down" and "even", are multiplied by a number "factor" first.

    against: of two softmaxes, that of the input and that of a full operand "target", both times a positive scale.
        "loss": of "logsumexp", whose result is the Kullback-Leibler divergence KL(target || input) then, "loss". Of
        "softmax" "input" or "target": its gradient in that operand, times an `alpha` of "groups"; that in the target
        takes an operand "loss" of one element per group. "weights": the target has no logits, but weights of the
        negative logarithms of the input's softmax; their sum, a cross entropy, or its gradient in the input.
    sink: one more score, an operand "sink" of one element per group, joins the sum of the exponentials and has no
        result among the others. Where these are written its own logarithm in the softmax is, too: "sink_log".
    state: a group is a part of a row, and its results are the numbers of its state, for a merge with other parts: the
        maximum, the sum of exponentials relative to it and, of an entropy, the sum of these times the differences to
        the maximum; with `even` the sum of the differences, and how many elements there are. Of a gradient it is the
        sum, and nothing else is written. "chosen": the operand "index" is one into whole rows, in which the group
        begins at the number "start"; one more result is the score there, -inf where that is not in this part.
    ranks: rows are slices of longer ones, whose states the ranks that share them exchange while their slices stay on
        chip: by so many threads of so many CTAs of each rank, such as "512x4", alike on all of them. An "index" is that
        of an element of the whole row.

    The gradients: scale is a factor on the result, and alpha is the *inverse* of the forward's. They have neither
    bias nor mask operands; with `mask`, log_softmax_backward takes no part of a gradient where y is -inf. With `sink`
    the operand of that name is what the forward wrote as "sink_log", and "sink_grad" is written, the sink's gradient.
    """

    scale: str = ""
    bias: bool = False
    mask: bool = False
    causal: bool = False
    alpha: str = ""
    zero: bool = False
    target: str = ""
    squares: bool = False
    more: bool = False
    entropy: bool = False
    softcap: bool = False
    even: bool = False
    against: str = ""
    sink: bool = False
    state: str = ""
    ranks: str = ""
    factor: bool = False

    def __post_init__(self):
        if self.sink and self.of_rows:
            raise ValueError(
                "a sink beside a target, an entropy, a softcap or another softmax: no kernel has both"
            )
        if self.target not in TARGETS:
            raise ValueError(f"target is {self.target!r}: it is one of {', '.join(map(repr, TARGETS))}")
        if self.state not in STATES:
            raise ValueError(f"state is {self.state!r}: it is one of {', '.join(map(repr, STATES))}")
        if self.against not in AGAINST:
            raise ValueError(f"against is {self.against!r}: it is one of {', '.join(map(repr, AGAINST))}")
        for name in ("scale", "alpha"):
            if getattr(self, name) not in FORMS:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: it is one of {', '.join(map(repr, FORMS))}"
                )

    def __bool__(self) -> bool:
        return self != NO_PROLOGUE

    @property
    def numbers(self) -> tuple[str, ...]:
        """The numbers of a call, in their order."""
        return (
            *["scale"] * (self.scale == "number"),
            *["softcap"] * self.softcap,
            *["alpha"] * (self.alpha == "number"),
            *["factor"] * self.factor,
            *["offset"] * self.causal,
            *["ignore"] * (self.target == "loss"),
            *["squares"] * self.squares,
            *["smoothing"] * (self.even and self.target == "loss"),
            *["start"] * (self.state == "chosen"),
            *(OF_RANKS if self.ranks else ()),
            *(OF_SLICES if self.ranks and self.target == "loss" else ()),
        )

    @property
    def rescores(self) -> bool:
        """Whether scores are not the elements themselves."""
        return bool(self.scale or self.softcap or self.bias or self.mask or self.causal)

    @property
    def packs(self) -> bool:
        """Whether elements become scores by being negated or left out alone: scaled they are by the exponentials."""
        if self.scale and self.sink:  # which is a score, not an element
            return False
        return bool(self.scale or self.mask) and not (self.softcap or self.bias or self.causal)

    @property
    def sweeps(self) -> bool:
        """Whether all it has, if any, are numbers that scores and results are multiplied by, a bias and a mask."""
        rest = replace(self, scale="", alpha="", bias=False, mask=False, zero=False)
        return rest == NO_PROLOGUE and "groups" not in (self.scale, self.alpha)

    @property
    def of_rows(self) -> bool:
        """Whether movements of rows alone have it all."""
        parts = (
            self.target,
            self.more,
            self.entropy,
            self.softcap,
            self.even,
            self.against,
            self.state,
            self.factor,
        )
        return any(parts) or bool(self.ranks)

    @property
    def long_rows(self) -> bool:
        """Whether the row movement alone has it all: of two full tensors, or of rows that come in parts."""
        return bool(self.against or self.state or self.ranks)

    @property
    def averages(self) -> bool:
        """Whether a mean over the group is reduced, too."""
        return self.even and self.target != "found"

    @property
    def groups(self) -> tuple[str, ...]:
        """The tensors with one element per group, in their order."""
        forms = tuple(n for n in ("scale", "alpha") if getattr(self, n) == "groups")
        return (
            *forms,
            *{"found": ("index", "found"), "loss": ("index",)}.get(self.target, ()),
            *["more"] * self.more,
            *["down", "entropy"] * self.entropy,
            *["even"] * (self.even and self.target == "found"),
            *["loss"] * (self.against == "target"),
            *["sink"] * self.sink,
        )

    @property
    def name(self) -> str:
        """A readable name; empty for none."""
        return "_".join(
            f.name + (f"_{value}" if isinstance(value, str) else "")
            for f in fields(self)
            if (value := getattr(self, f.name))
        )

    @property
    def told(self) -> str:
        """The prologue in words, for `explain`; empty for none."""
        how = {"number": "a number", "groups": "one number per row"}
        parts = [
            self.scale and f"scores times {how[self.scale]}",
            self.softcap and "capped by a tanh",
            self.bias and "a bias added",
            self.mask and "masked",
            self.causal and "causal",
            self.sink and "an extra score per row in the sum",
            self.ranks and "rows that continue on other ranks",
            self.alpha and f"results times {how[self.alpha]}",
            self.factor and "upstream gradients times a number",
            self.zero and "zeros in empty rows",
            self.target and "one less at the target" * bool(self.alpha),
            self.target == "loss" and "the cross entropy of each row",
            self.squares and "the square of the logsumexp added",
            self.more and "a number per row added at the target",
            self.entropy and "the gradient of the entropies added",
            self.even and "the mean of the log-probabilities has a share",
            self.against == "loss" and "the divergence of another softmax from it",
            self.against == "weights" and "logarithms weighted by another tensor",
            self.against in ("input", "target") and f"the gradient of a divergence in its {self.against}",
            self.state and "the state of a part of each row",
        ]
        return "; ".join(filter(None, parts))

    def of(self, math_name: str) -> Prologue:
        """What of it a row math looks at. Raises NotPlanned for what would change the math and is not there."""
        if not self:
            return self
        takes, without_effect = _TAKES.get(math_name, (set(), set()))
        given = {f.name for f in fields(self) if getattr(self, f.name)}
        if wrong := given - takes - without_effect:
            raise NotPlanned(f"{math_name} with {' and '.join(sorted(wrong))}: no kernel does this")
        return replace(self, **{n: f.default for f in fields(self) if (n := f.name) in without_effect})


NO_PROLOGUE = Prologue()


@lru_cache
def facts_of(math_name: str, online: bool, prologue: Prologue) -> Math:
    """The facts of a row math with the tensors of its prologue."""
    facts = math_of(math_name, online)
    if prologue.state:
        return _of_states(math_name, facts, prologue)
    if prologue.averages:
        facts = replace(facts, state_bytes=16)
        if facts.group_outputs:
            facts = replace(facts, group_outputs=(*facts.group_outputs, "even"))
    if prologue.against:
        stages, results = 2 if prologue.against == "loss" else 1, () if facts.outputs else ("loss",)
        inputs = (*facts.inputs, "target")
        return replace(
            facts,
            inputs=inputs,
            stages=stages,
            state_bytes=16,
            group_inputs=prologue.groups,
            group_outputs=results,
        )
    backward = math_name.endswith("_backward")
    inputs = () if backward else ("bias",) * prologue.bias + ("mask",) * prologue.mask
    results = facts.group_outputs
    if prologue.target == "loss":
        results = ("loss",)
    if prologue.sink and facts.outputs:
        results = OF_SINKS[backward : backward + 1]
    return replace(
        facts,
        inputs=facts.inputs + inputs,
        group_inputs=facts.group_inputs + prologue.groups,
        group_outputs=results,
    )


def _of_states(math_name: str, facts: Math, prologue: Prologue) -> Math:
    """The facts of a math whose results are states."""
    if facts.outputs:  # a gradient
        return replace(facts, outputs=(), group_outputs=("sum",))
    more = ("weighted",) * math_name.endswith("entropy") + ("score",) * bool(facts.group_inputs)
    more += ("fallen", "count") * prologue.even
    return replace(
        facts,
        state_bytes=16 if prologue.even else facts.state_bytes,
        group_inputs=facts.group_inputs + prologue.groups,
        group_outputs=("max", "sum", *more),
    )
