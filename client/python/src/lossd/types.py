# SPDX-License-Identifier: Apache-2.0
"""What the client takes and gives besides arrays: options, results, and the names of the protocol's enumerations."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from lossd import _native, errors
from lossd.descriptions import Shown
from lossd.v1 import head_pb2, loss_pb2, types_pb2

DType = Literal["fp32", "fp16", "bf16"]
Reduction = Literal["sum", "mean", "none"]
Logits = Literal["stored", "recomputed", "none"]
Split = Literal["any", "rows", "vocabulary"]
Residency = Literal["device", "host"]
Gradients = Literal["exact", "filtered", "sampled", "auto"]
ObjectiveKind = Literal["reinforce", "importance_sampling", "ppo", "cispo", "dft"]
Kl = Literal["k1", "k2", "k3"]
Divergence = Literal["forward_kl", "reverse_kl", "jensen_shannon", "total_variation"]
Rest = Literal["none", "renormalized", "one_class"]
Param = Literal["weight", "bias", "norm_gain", "norm_shift", "class_weights"]
Role = Literal["value", "gradient", "moment1", "moment2"]
Norm = Literal["none", "layernorm", "rmsnorm"]
OptimizerState = Literal["none", "momentum", "adam"]
SavePhase = Literal["waiting", "reading", "writing"]
StreamWait = Literal["open", "client", "server", "send", "end"]
# Results per row. Natural logarithms; 0 for ignored rows (argmax: -1).
RowOutput = Literal["loss", "lse", "entropy", "logprob", "argmax"]
ROW_OUTPUTS: tuple[RowOutput, ...] = get_args(RowOutput)


def numbers_of(words: Any, kind: Any) -> Mapping[str, Any]:
    """The protocol's numbers of words, which are a Literal: "rmsnorm" is NORM_RMSNORM."""
    prefix = kind.Name(0).removesuffix("UNSPECIFIED")
    return {word: kind.Value(prefix + word.upper()) for word in get_args(words)}


DTYPES = numbers_of(DType, types_pb2.DType)
REDUCTIONS = numbers_of(Reduction, loss_pb2.Reduction)
LOGITS = numbers_of(Logits, head_pb2.Logits)
SPLITS = {"any": head_pb2.SPLIT_UNSPECIFIED, "rows": head_pb2.SPLIT_ROWS, "vocabulary": head_pb2.SPLIT_VOCABULARY}
RESIDENCIES = numbers_of(Residency, head_pb2.Residency)
GRADIENTS = numbers_of(Gradients, loss_pb2.Gradients)
OBJECTIVES = numbers_of(ObjectiveKind, loss_pb2.ObjectiveKind)
KLS = numbers_of(Kl, loss_pb2.KlEstimator)
DIVERGENCES = numbers_of(Divergence, loss_pb2.Divergence)
RESTS = numbers_of(Rest, loss_pb2.Rest)
PARAMS = numbers_of(Param, head_pb2.Param)
ROLES = numbers_of(Role, head_pb2.Role)
NORMS = numbers_of(Norm, head_pb2.Norm)
OPTIMIZER_STATES = numbers_of(OptimizerState, head_pb2.OptimizerState)

# How elements lie in NumPy's memory. NumPy has no bf16: its bits are uint16, the upper half of a float32.
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


def enum_value(field_name: str, names: Mapping[str, Any], name: str) -> Any:
    """The protocol's number of a name; InvalidArgument lists the names there are."""
    if name in names:
        return names[name]
    raise errors.InvalidArgument(f"{field_name} is {name!r}; it must be one of {', '.join(names)}")


def whole_number(field_name: str, value: Any, least: int, bits: int) -> int:
    """The value. InvalidArgument, naming the field, unless it is a whole number in [least, 2^bits)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= int(value) < 1 << bits:
        raise errors.InvalidArgument(f"{field_name} is {value!r}; it must be a whole number in [{least}, 2^{bits})",
                                     types_pb2.ErrorDetail(field=field_name, value=str(value)))
    return int(value)


def checked(field_name: str, value: Any, kind: Literal["number", "bool"] = "number") -> Any:
    """The value. TypeError, naming the field, unless it is a number or a bool; ranges are the server's to check."""
    if isinstance(value, (bool, np.bool_)) != (kind == "bool") or isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{field_name} is {value!r}; it must be a {kind}")
    return bool(value) if kind == "bool" else float(value)


_KINDS: Mapping[str, tuple[Any, str]] = {"float": ((int, float, np.integer, np.floating), "a number"), "str": (str, "a str"),
                                         "int": ((int, np.integer), "an int"), "bool": ((bool, np.bool_), "a bool")}
_WORDS = {"Gradients": GRADIENTS, "Rest": RESTS, "ObjectiveKind": OBJECTIVES, "Kl": KLS, "Divergence": DIVERGENCES}


class _Options:
    """Options that are checked when they are made, and that a message has under the same names."""

    _MESSAGE: ClassVar[Any]
    _PART: ClassVar[str] = ""  # the field of lossd.v1.LossOptions that they are; "": all of it

    def __post_init__(self: Any) -> None:
        """TypeError or InvalidArgument, naming field and value. The rules for numbers are the server's; it takes those that are the
        defaults."""
        unusual = False
        for each in fields(self):
            name, value, kind = f"{self._PART}.{each.name}".lstrip("."), getattr(self, each.name), each.type.removesuffix(" | None")
            if value is None and each.default is None:
                continue
            classes, said = _KINDS["str"] if kind in _WORDS else _KINDS.get(kind) or (globals()[kind], f"a lossd.{kind}")
            if not isinstance(value, classes) or (isinstance(value, bool) and kind != "bool"):
                raise TypeError(f"{name} is {value!r}; it must be {said}")
            if kind in _WORDS:
                enum_value(name, _WORDS[kind], value)
            elif kind == "int":
                whole_number(name, value, -2**31, 31)
            unusual = unusual or bool(kind not in _WORDS and value != each.default)
        if unusual:
            message = self.to_proto()
            _check((loss_pb2.LossOptions(**{self._PART: message}) if self._PART else message).SerializeToString())

    def to_proto(self: Any) -> Any:
        """The message; None is absent."""
        return self._MESSAGE(**{each.name: _sent(getattr(self, each.name), each.type.removesuffix(" | None")) for each in fields(self)})


@functools.lru_cache(maxsize=256)
def _check(message: bytes) -> None:
    _native.Call().run("lossd_check_options", message, len(message))


def _sent(value: Any, kind: str) -> Any:
    if isinstance(value, _Options):
        return value.to_proto()
    if kind in _WORDS and value is not None:
        return _WORDS[kind][value]
    return bool(value) if kind == "bool" else value


@dataclass(frozen=True)
class Objective(_Options):
    """What takes the place of the cross-entropy in a row's loss, of reinforcement learning and of fine-tuning.

        lossd.LossOptions(objective=lossd.Objective("ppo", clip_high=0.28, kl_coef=0.04))  # GRPO's loss of a token

    With l the log-probability of the target, A the advantage and rho = exp(l - old_logprob) the loss of a row is

        policy part + kl_coef * divergence from the reference - entropy_bonus * entropy

    | kind | policy part | numbers of each row |
    |---|---|---|
    | "reinforce" | -A l | advantages |
    | "importance_sampling" | -rho A | advantages, old_logprobs |
    | "ppo" | max(-rho A, -clip(rho) A) | advantages, old_logprobs |
    | "cispo" | -sg(clip(rho)) A l, where sg has no gradient | advantages, old_logprobs |
    | "dft" | -sg(exp l) l | none |

    and ref_logprobs with kl_coef. docs/training/policy-objectives.md has an example of each, docs/math.md the papers.
    InvalidArgument, naming field and value, if a number is out of range or has no meaning for the kind.
    """

    kind: ObjectiveKind
    # "ppo" and "cispo": rho is clipped to [1 - clip_low, 1 + clip_high]. clip_low in [0, 1], where 1 leaves rho free below;
    # clip_high finite and not negative. None: 0.2 and 0.2 ("ppo"), 1 and 4 ("cispo").
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float = 0.0  # "ppo": where A < 0, the policy part is at most -dual_clip A; above 1; 0: no such bound
    # The divergence from the reference, with d = ref_logprob - l: -d ("k1"), d^2 / 2 ("k2") or exp(d) - 1 - d ("k3").
    kl: Kl = "k3"
    kl_coef: float = 0.0  # finite and not negative; 0: no reference
    entropy_bonus: float = 0.0  # finite

    _MESSAGE, _PART = loss_pb2.Objective, "objective"

    @property
    def numbers(self) -> tuple[str, ...]:
        """What has to be given with each row: arguments of compute_loss."""
        needed = {"advantages": self.kind != "dft", "old_logprobs": self.kind in ("importance_sampling", "ppo", "cispo"),
                  "ref_logprobs": self.kl_coef != 0}
        return tuple(name for name, is_needed in needed.items() if is_needed)


@dataclass(frozen=True)
class Distillation(_Options):
    """Rows are compared with the softmax of a teacher, another head of the server; "Distillation" in docs/math.md.

    The loss of a row is weight * divergence + target_weight * (the loss with its target, as LossOptions say). Gradients
    are those of the head that is trained: exact, or sampled (LossOptions.gradients).

    InvalidArgument, naming field and value, if an option is out of range; TypeError if it is no number or word.
    """

    teacher: str  # a frozen head of the server, with the same vocab_size
    # Of the teacher's softmax p and the student's q: "forward_kl", KL(p || q); "reverse_kl", KL(q || p);
    # "jensen_shannon", beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q; "total_variation".
    divergence: Divergence = "forward_kl"
    beta: float = 0.5  # jensen_shannon: in (0, 1)
    # Divides the logits of both; finite and at least 1.18e-38. The divergence is not multiplied by its square.
    temperature: float = 1.0
    weight: float = 1.0  # of the divergence; finite and not negative
    target_weight: float = 0.0  # of the loss with the targets; finite and not negative
    teacher_logit_scale: float = 1.0  # as LossOptions.logit_scale, of the teacher
    teacher_softcap: float = 0.0  # as LossOptions.softcap, of the teacher

    _MESSAGE, _PART = loss_pb2.Distillation, "distillation"


@dataclass(frozen=True, repr=False)
class LossOptions(Shown, _Options):
    """The loss of a row and how its gradients are computed; docs/math.md has the formulas.

    InvalidArgument, naming field and value, if an option is out of range; TypeError if it is no number, word or flag.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0  # in [0, 1]
    z_loss: float = 0.0  # weight of lse^2, which is added to every row's loss; >= 0
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: none; otherwise >= 1.18e-38
    logit_scale: float = 1.0  # multiplies the logits before the softcap (1 / temperature); finite and not 0
    use_class_weights: bool = False  # the head must have them
    # Losses and results per row do not depend on what follows ("Filtered gradients" and "Sampled gradients" in
    # docs/math.md). "exact"; "filtered": without small probabilities, save the target's; "sampled": small probabilities
    # take part by chance, so that the gradient is the exact one on average; "auto": sampled where the predicted error is
    # small, else exact. None: as the head was created with, which is exact unless it was said.
    gradients: Gradients | None = None
    # filtered: smaller probabilities add nothing to gradients; in [0, 1). None: 2^-12.
    filter_epsilon: float | None = None
    # sampled, auto: smaller probabilities take part by chance; in [1e-30, 1]. A smaller threshold costs time and makes a
    # smaller error. None: 2^-10.
    sample_threshold: float | None = None
    # auto: the largest predicted relative error of gradients that are sampled; rows that are computed together and would
    # have a larger one are computed exactly. Finite and not negative. None: 0.01.
    max_gradient_error: float | None = None
    # In the place of the cross-entropy; None: nothing is. Then label_smoothing is 0 and use_class_weights False.
    objective: Objective | None = None
    # Of rows with soft targets (compute_loss(target_classes=, target_weights=)): what becomes of the probability that a row's
    # weights leave over. "none": weights count as they are; "renormalized": they are divided by their sum; "one_class": 1 less
    # their sum is the weight of all other classes together. None: rows have one target each. Otherwise label_smoothing is 0,
    # use_class_weights False, objective and distillation None.
    rest: Rest | None = None
    distillation: Distillation | None = None  # of rows that have a teacher, which gradients "filtered" do not go with
    # Of heads with a draft vocabulary (create_head(class_list=)): targets that are not in the list are refused. False: their
    # rows are ignored, and counted (LossResult.unlisted_rows).
    refuse_unlisted: bool = False

    _MESSAGE = loss_pb2.LossOptions


@dataclass(frozen=True)
class Depth:
    """A run of rows of a microbatch with a part of its own in the loss, such as the rows that predict the token after the next.

    The loss of the microbatch is the sum over its depths of weight * (sum of the depth's row losses / normalizer).
    InvalidArgument, naming field and value, if a number is out of range.
    """

    rows: int  # not negative; the depths of a microbatch have all of its rows, in order
    weight: float = 1.0  # of the depth's loss and gradients; finite and not negative
    # What a mean divides by. None: the number of the depth's valid targets; with class weights it must be given.
    normalizer: float | None = None

    def __post_init__(self) -> None:
        whole_number("depth.rows", self.rows, 0, 63)
        for name, value in (("weight", self.weight), ("normalizer", self.normalizer)):
            if value is not None and not 0 <= value < math.inf:
                raise errors.InvalidArgument(f"depth.{name} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class RetryOptions:
    """How calls are sent again: those that break, and those that may begin again when what they look at changes."""

    max_attempts: int = 3  # of one call (or one stream of a loss computation), the first included; at least 1
    initial_backoff: float = 0.25  # seconds; grows fourfold with every attempt, with jitter
    max_backoff: float = 5.0  # seconds


@dataclass(frozen=True)
class AdamW:
    """One step as torch.optim.AdamW takes it. The head needs optimizer_state="adam".

    lazy_rows: rows of the weight [V, D] whose gradient of this step is 0 in every element keep their values and moments bit
    for bit, as in torch.optim.SparseAdam; other rows, bias and norm are updated as always (docs/training/lazy-rows.md).
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    lazy_rows: bool = False

    def to_proto(self) -> head_pb2.Optimizer:
        if not isinstance(self.betas, (tuple, list)) or len(self.betas) != 2:
            raise TypeError(f"betas is {self.betas!r}; it must be two numbers")
        beta1, beta2 = (checked("betas", each) for each in self.betas)
        return head_pb2.Optimizer(adamw=head_pb2.AdamW(
            learning_rate=checked("lr", self.lr), beta1=beta1, beta2=beta2, epsilon=checked("eps", self.eps),
            weight_decay=checked("weight_decay", self.weight_decay)), lazy_rows=checked("lazy_rows", self.lazy_rows, "bool"))


@dataclass(frozen=True)
class SGD:
    """One step as torch.optim.SGD takes it. Momentum needs optimizer_state="momentum" or "adam".

    lazy_rows: as of AdamW.
    """

    lr: float
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    lazy_rows: bool = False

    def to_proto(self) -> head_pb2.Optimizer:
        values = {name: checked(name, getattr(self, name)) for name in ("momentum", "dampening", "weight_decay")}
        return head_pb2.Optimizer(
            sgd=head_pb2.Sgd(learning_rate=checked("lr", self.lr), nesterov=checked("nesterov", self.nesterov, "bool"), **values),
            lazy_rows=checked("lazy_rows", self.lazy_rows, "bool"))


@dataclass(frozen=True)
class TensorFile:
    """Where Client.create_head finds initial values: safetensors below the server's checkpoint directory.

    `path` is a file, an index of files (".json"), or a folder with a model.safetensors(.index.json); the others are names
    of tensors in it. Heads that have a bias or a norm need the names of theirs.
    """

    path: str
    weight: str  # [V, D], e.g. "lm_head.weight", or the embedding's of a model whose head is tied to it
    bias: str = ""  # [V]
    norm_gain: str = ""  # [D]
    norm_shift: str = ""  # [D]
    class_weights: str = ""  # [V]; optional
    # False: InvalidArgument, naming the first, if a value is NaN or infinite; a bias may be -infinity all the same.
    allow_non_finite: bool = False

    def to_proto(self) -> head_pb2.TensorFile:
        return head_pb2.TensorFile(**asdict(self))


@dataclass
class ObjectiveSums:
    """Sums over the rows of a loss computation that have a target and a weight that is not 0, whatever the weights are."""

    rows: int = 0
    clipped_rows: int = 0  # whose ratio was clipped
    ratio: float = 0.0  # rho; 0 if the objective has none
    old_kl: float = 0.0  # rho - 1 - log rho: estimates the divergence of the policy from the old one
    ref_kl: float = 0.0  # the estimate of the divergence from the reference; 0 without kl_coef

    def mean(self, name: Literal["clipped_rows", "ratio", "old_kl", "ref_kl"]) -> float:
        """Of a row; 0 if there is none."""
        return float(getattr(self, name)) / self.rows if self.rows else 0.0


@dataclass
class DepthResult:
    """The sums over the rows of one depth; each field means what it means in LossResult."""

    loss: float = 0.0  # before Depth.weight
    loss_sum: float = 0.0
    z_loss_sum: float = 0.0
    entropy_sum: float = 0.0
    normalizer: float = 1.0
    valid_rows: int = 0
    correct_rows: int = 0
    accumulated_rows: int = 0
    repeated_rows: int = 0
    grad_hidden: NDArray[Any] | None = field(default=None, repr=False)  # [rows of the depth, D], if wanted


@dataclass(repr=False)
class LossResult(Shown):
    """What a loss computation gave. Counts and sums are over valid rows (target not ignore_index)."""

    # loss_sum / normalizer; with depths the sum of Depth.weight * DepthResult.loss. 0 if no row is valid.
    loss: float = 0.0
    loss_sum: float = 0.0  # z-loss included, row weights applied
    z_loss_sum: float = 0.0  # the z-loss part of loss_sum
    entropy_sum: float = 0.0  # nats; only if the entropy of rows was wanted
    dropped_mass: float = 0.0  # probability that filtered gradients left out, summed over valid rows
    # Of sampled gradients, summed over valid rows: the expected square of what sampling adds to the gradient of the
    # logits, and the square of that gradient.
    sampling_variance: float = field(default=0.0, repr=False)
    squared_gradient: float = field(default=0.0, repr=False)
    objective: ObjectiveSums = field(default_factory=ObjectiveSums, repr=False)  # of LossOptions.objective; 0 without one
    # With LossOptions.distillation, row weights applied: loss_sum is weight * divergence_sum + target_weight *
    # target_loss_sum. 0 without, and target_loss_sum with target_weight 0.
    divergence_sum: float = field(default=0.0, repr=False)
    target_loss_sum: float = field(default=0.0, repr=False)
    normalizer: float = 1.0  # as used; 1 unless the reduction is mean, and with depths, which have their own
    depths: list[DepthResult] = field(default_factory=list, repr=False)  # one for each depth of the call

    valid_rows: int = 0
    unlisted_rows: int = 0  # ignored since their target is not among the head's classes of a larger vocabulary
    correct_rows: int = 0  # largest logit is the target's
    accumulated_rows: int = 0  # added to the accumulators by this call
    repeated_rows: int = 0  # added before already (a repeat after a broken call)

    # [N, D] of the hidden states' dtype (bf16: uint16), if wanted; 0 for ignored rows. None if the hidden states were given
    # as one array for each depth: then each DepthResult has its part.
    grad_hidden: NDArray[Any] | None = None
    # [N] each, those that were wanted: float32, argmax int32.
    rows: dict[RowOutput, NDArray[Any]] = field(default_factory=dict)
    # With `classes`: their log-probabilities [N, K], float32; 0 for ignored rows.
    class_logprobs: NDArray[np.float32] | None = None
    # With `top_k`: the most probable classes [N, k], int32, the most probable first, and their log-probabilities,
    # float32; -1 and 0 for ignored rows.
    top_classes: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    incarnation: int = field(default=0, repr=False)  # where the server stood
    step: int = 0
    weights_version: int = field(default=0, repr=False)  # of the weights that were used; 0 from servers that do not say

    queue_seconds: float = field(default=0.0, repr=False)  # summed over slices: waiting for the device
    compute_seconds: float = field(default=0.0, repr=False)  # summed over slices: on the device
    wall_seconds: float = 0.0
    sent_bytes: int = field(default=0, repr=False)  # payload only, repeats included
    received_bytes: int = field(default=0, repr=False)
    streams: int = field(default=0, repr=False)
    repeats: int = 0  # streams that were sent again

    @property
    def gradient_error(self) -> float:
        """The predicted relative error of sampled gradients; 0 if nothing was sampled.

        Of rows in several results: the square root of the sum of their `sampling_variance` over that of their
        `squared_gradient`.
        """
        return math.sqrt(self.sampling_variance / self.squared_gradient) if self.squared_gradient > 0 else 0.0


@dataclass(repr=False)
class EmbedResult(Shown):
    """Rows of a head's weight, and the weights that they are of."""

    rows: Any  # [N, D]: row n is that of id n. Of the dtype that was asked for (bf16: uint16); `out` if that was given
    step: int = 0  # that was open
    incarnation: int = field(default=0, repr=False)  # of the server process
    # Another number whenever the weights have changed within the server process; 0 from servers that do not say.
    weights_version: int = field(default=0, repr=False)

    wall_seconds: float = 0.0
    received_bytes: int = field(default=0, repr=False)  # of rows, repeats included
    streams: int = field(default=0, repr=False)
    repeats: int = 0  # streams that were sent again
