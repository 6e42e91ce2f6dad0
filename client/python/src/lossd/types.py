# SPDX-License-Identifier: Apache-2.0
"""The types that the client takes and returns, apart from arrays: options, results, and the names of the protocol's enumerators."""

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
# Results for each row. Logarithms are natural. Ignored rows have 0 (argmax: -1).
RowOutput = Literal["loss", "lse", "entropy", "logprob", "argmax"]
ROW_OUTPUTS: tuple[RowOutput, ...] = get_args(RowOutput)


def numbers_of(words: Any, kind: Any) -> Mapping[str, Any]:
    """The protocol's numbers of the words of a Literal type: "rmsnorm" is NORM_RMSNORM."""
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

# The NumPy type of the elements. NumPy has no bf16, so its bits are stored as uint16: the upper half of a float32.
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "fp16": np.dtype("<f2"), "bf16": np.dtype("<u2")}


def enum_value(field_name: str, names: Mapping[str, Any], name: str) -> Any:
    """The protocol's number of a name. InvalidArgument lists the known names."""
    if name in names:
        return names[name]
    raise errors.InvalidArgument(f"{field_name} is {name!r}; it must be one of {', '.join(names)}")


def whole_number(field_name: str, value: Any, least: int, bits: int) -> int:
    """Returns the value. InvalidArgument, naming the field, if it is not a whole number in [least, 2^bits)."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= int(value) < 1 << bits:
        raise errors.InvalidArgument(f"{field_name} is {value!r}; it must be a whole number in [{least}, 2^{bits})",
                                     types_pb2.ErrorDetail(field=field_name, value=str(value)))
    return int(value)


def checked(field_name: str, value: Any, kind: Literal["number", "bool"] = "number") -> Any:
    """Returns the value. TypeError, naming the field, if it is not a number (or a bool, as `kind` says). The server checks ranges."""
    if isinstance(value, (bool, np.bool_)) != (kind == "bool") or isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"{field_name} is {value!r}; it must be a {kind}")
    return bool(value) if kind == "bool" else float(value)


_KINDS: Mapping[str, tuple[Any, str]] = {"float": ((int, float, np.integer, np.floating), "a number"), "str": (str, "a str"),
                                         "int": ((int, np.integer), "an int"), "bool": ((bool, np.bool_), "a bool")}
_WORDS = {"Gradients": GRADIENTS, "Rest": RESTS, "ObjectiveKind": OBJECTIVES, "Kl": KLS, "Divergence": DIVERGENCES}


class _Options:
    """Options that are checked when they are created. The protocol's message has fields of the same names."""

    _MESSAGE: ClassVar[Any]
    _PART: ClassVar[str] = ""  # the field of lossd.v1.LossOptions for these options; "": the message itself

    def __post_init__(self: Any) -> None:
        """TypeError or InvalidArgument, naming field and value. The library checks ranges, by the server's rules, of unusual numbers."""
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

    @functools.lru_cache(maxsize=256)
    def to_proto(self: Any) -> Any:
        """The message, which nobody changes. Fields that are None are left out."""
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
    """Replaces the cross-entropy in a row's loss by an objective of reinforcement learning or fine-tuning.

        lossd.LossOptions(objective=lossd.Objective("ppo", clip_high=0.28, kl_coef=0.04))  # GRPO's loss of a token

    With l the log-probability of the target, A the advantage and rho = exp(l - old_logprob), the loss of a row is

        policy part + kl_coef * divergence from the reference - entropy_bonus * entropy

    | kind | policy part | needed for each row |
    |---|---|---|
    | "reinforce" | -A l | advantages |
    | "importance_sampling" | -rho A | advantages, old_logprobs |
    | "ppo" | max(-rho A, -clip(rho) A) | advantages, old_logprobs |
    | "cispo" | -sg(clip(rho)) A l, where sg has no gradient | advantages, old_logprobs |
    | "dft" | -sg(exp l) l | none |

    With kl_coef, ref_logprobs is needed, too. docs/training/policy-objectives.md has an example of each kind; docs/math.md
    names the papers. InvalidArgument, naming field and value, if a number is out of range or has no meaning for the kind.
    """

    kind: ObjectiveKind
    # "ppo" and "cispo": rho is clipped to [1 - clip_low, 1 + clip_high]. clip_low is in [0, 1]; 1 means no lower bound.
    # clip_high is finite and not negative. None: 0.2 and 0.2 ("ppo"), 1 and 4 ("cispo").
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float = 0.0  # only "ppo", above 1: if A < 0, the policy part is at most -dual_clip A; 0: no such bound
    # The divergence from the reference, with d = ref_logprob - l: -d ("k1"), d^2 / 2 ("k2") or exp(d) - 1 - d ("k3").
    kl: Kl = "k3"
    kl_coef: float = 0.0  # finite and not negative; 0: no reference
    entropy_bonus: float = 0.0  # finite

    _MESSAGE, _PART = loss_pb2.Objective, "objective"

    @property
    def numbers(self) -> tuple[str, ...]:
        """The arguments of compute_loss that the objective needs for each row."""
        needed = {"advantages": self.kind != "dft", "old_logprobs": self.kind in ("importance_sampling", "ppo", "cispo"),
                  "ref_logprobs": self.kl_coef != 0}
        return tuple(name for name, is_needed in needed.items() if is_needed)


@dataclass(frozen=True)
class Distillation(_Options):
    """Compares rows with the softmax of a teacher, another head of the server ("Distillation" in docs/math.md).

    The loss of a row is weight * divergence + target_weight * (the loss with its target, as LossOptions say). Only the head
    that is trained gets gradients: exact, or sampled (LossOptions.gradients).

    InvalidArgument, naming field and value, if an option is out of range; TypeError if it has the wrong type.
    """

    teacher: str  # a frozen head of the server, with the same vocab_size
    # The divergence of the teacher's softmax p and the student's q. "forward_kl": KL(p || q). "reverse_kl": KL(q || p).
    # "jensen_shannon": beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q. "total_variation".
    divergence: Divergence = "forward_kl"
    beta: float = 0.5  # jensen_shannon: in (0, 1)
    # Divides the logits of teacher and student; finite and at least 1.18e-38. The divergence is not multiplied by its square.
    temperature: float = 1.0
    weight: float = 1.0  # factor of the divergence; finite and not negative
    target_weight: float = 0.0  # factor of the loss with the targets; finite and not negative
    teacher_logit_scale: float = 1.0  # LossOptions.logit_scale of the teacher
    teacher_softcap: float = 0.0  # LossOptions.softcap of the teacher

    _MESSAGE, _PART = loss_pb2.Distillation, "distillation"


@dataclass(frozen=True, repr=False)
class LossOptions(Shown, _Options):
    """The loss of a row and how its gradients are computed; docs/math.md has the formulas.

    InvalidArgument, naming field and value, if an option is out of range; TypeError if it has the wrong type.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0  # in [0, 1]
    z_loss: float = 0.0  # weight of lse^2, which is added to every row's loss; >= 0
    softcap: float = 0.0  # logits become softcap * tanh(logits / softcap); 0: none; otherwise >= 1.18e-38
    logit_scale: float = 1.0  # multiplies the logits before the softcap (1 / temperature); finite and not 0
    use_class_weights: bool = False  # the head must have them
    # The kind of gradients. Losses and results for rows do not depend on it, nor on the three fields below ("Filtered gradients" and
    # "Sampled gradients" in docs/math.md). "exact". "filtered": without classes of small probability, except the target. "sampled": classes
    # of small probability count by chance, so that the expectation of the gradient is the exact one. "auto": sampled where the predicted
    # error is small, else exact. None: the kind with which the head was created, by default exact.
    gradients: Gradients | None = None
    # For "filtered": classes with a smaller probability add nothing to gradients; in [0, 1). None: 2^-12.
    filter_epsilon: float | None = None
    # For "sampled" and "auto", in [1e-30, 1]: less probable classes count by chance. Smaller: slower, less error. None: 2^-10.
    sample_threshold: float | None = None
    # For "auto": the largest predicted relative error of sampled gradients. Rows that are computed together and would have a
    # larger error are computed exactly. Finite and not negative. None: 0.01.
    max_gradient_error: float | None = None
    # Replaces the cross-entropy; then label_smoothing must be 0 and use_class_weights False. None: the cross-entropy.
    objective: Objective | None = None
    # For rows with soft targets (compute_loss(target_classes=, target_weights=)): where the probability that a row's weights
    # leave over goes. "none": weights count as they are. "renormalized": weights are divided by their sum. "one_class": 1
    # minus their sum is the weight of all other classes together. None: rows have one target each. With a value,
    # label_smoothing must be 0, use_class_weights False, objective and distillation None.
    rest: Rest | None = None
    distillation: Distillation | None = None  # for rows that have a teacher; not with gradients "filtered"
    # For heads with a draft vocabulary (create_head(class_list=)): True: a target that is not in the list is an error. False:
    # its row is ignored, and counted (LossResult.unlisted_rows).
    refuse_unlisted: bool = False

    _MESSAGE = loss_pb2.LossOptions


@dataclass(frozen=True)
class Depth:
    """A run of rows of a microbatch with its own part in the loss, such as the rows that predict the token after the next.

    The loss of the microbatch is the sum over its depths of weight * (sum of the depth's row losses / normalizer).
    InvalidArgument, naming field and value, if a number is out of range.
    """

    rows: int  # not negative; the depths of a microbatch have all of its rows, in order
    weight: float = 1.0  # factor of the depth's loss and gradients; finite and not negative
    # What a mean is divided by. None: the number of the depth's valid targets; with class weights it must be given.
    normalizer: float | None = None

    def __post_init__(self) -> None:
        whole_number("depth.rows", self.rows, 0, 63)
        for name, value in (("weight", self.weight), ("normalizer", self.normalizer)):
            if value is not None and not 0 <= value < math.inf:
                raise errors.InvalidArgument(f"depth.{name} is {value}; it must be finite and not negative")


@dataclass(frozen=True)
class RetryOptions:
    """How often and when calls are repeated: calls that break, and reads that begin again because what they read has changed."""

    max_attempts: int = 3  # of one call (or one stream of a loss computation), with the first; at least 1
    initial_backoff: float = 0.25  # seconds; grows fourfold with every attempt, with jitter
    max_backoff: float = 5.0  # seconds


@dataclass(frozen=True)
class AdamW:
    """One optimizer step as torch.optim.AdamW computes it. The head needs optimizer_state="adam".

    lazy_rows: rows of the weight [V, D] whose gradient of this step is 0 in every element keep their values and moments bit
    for bit, as in torch.optim.SparseAdam. Other rows, bias and norm are updated as usual (docs/training/lazy-rows.md).
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
    """One optimizer step as torch.optim.SGD computes it. Momentum needs optimizer_state="momentum" or "adam".

    lazy_rows: as in AdamW.
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
    """Names the initial values of a head in safetensors files below the server's checkpoint directory.

    `path` is a file, an index of files (".json"), or a folder with a model.safetensors(.index.json). The other fields are
    names of tensors in it. If the head has a bias or a norm, their names must be given.
    """

    path: str
    weight: str  # [V, D], e.g. "lm_head.weight"; for a tied head the name of the model's embedding
    bias: str = ""  # [V]
    norm_gain: str = ""  # [D]
    norm_shift: str = ""  # [D]
    class_weights: str = ""  # [V]; optional
    # False: InvalidArgument, naming the first such value, if a value is NaN or infinite. A bias may always be -infinity.
    allow_non_finite: bool = False

    def to_proto(self) -> head_pb2.TensorFile:
        return head_pb2.TensorFile(**asdict(self))


@dataclass
class ObjectiveSums:
    """Sums over the rows of a loss computation that have a target and a weight that is not 0. The sums are not weighted."""

    rows: int = 0
    clipped_rows: int = 0  # rows whose ratio was clipped
    ratio: float = 0.0  # rho; 0 if the objective has none
    old_kl: float = 0.0  # rho - 1 - log rho: estimates the divergence of the policy from the old one
    ref_kl: float = 0.0  # the estimate of the divergence from the reference; 0 without kl_coef

    def mean(self, name: Literal["clipped_rows", "ratio", "old_kl", "ref_kl"]) -> float:
        """The mean over the rows; 0 if there are none."""
        return float(getattr(self, name)) / self.rows if self.rows else 0.0


@dataclass
class DepthResult:
    """The sums over the rows of one depth. Each field means the same as in LossResult."""

    loss: float = 0.0  # not multiplied by Depth.weight
    loss_sum: float = 0.0
    z_loss_sum: float = 0.0
    entropy_sum: float = 0.0
    normalizer: float = 1.0
    valid_rows: int = 0
    correct_rows: int = 0
    accumulated_rows: int = 0
    repeated_rows: int = 0
    grad_hidden: NDArray[Any] | None = field(default=None, repr=False)  # [rows of the depth, D], if asked for


@dataclass(repr=False)
class LossResult(Shown):
    """The result of a loss computation. Counts and sums are over valid rows (target not ignore_index)."""

    # loss_sum / normalizer; with depths, the sum of Depth.weight * DepthResult.loss. 0 if no row is valid.
    loss: float = 0.0
    loss_sum: float = 0.0  # with the z-loss, and with row weights
    z_loss_sum: float = 0.0  # the z-loss part of loss_sum
    entropy_sum: float = 0.0  # nats; only if the entropy of rows was asked for
    dropped_mass: float = 0.0  # probability that filtered gradients left out, summed over valid rows
    # Sampled gradients, summed over valid rows: the expected square of what sampling adds to the logits' gradient, and its square.
    sampling_variance: float = field(default=0.0, repr=False)
    squared_gradient: float = field(default=0.0, repr=False)
    objective: ObjectiveSums = field(default_factory=ObjectiveSums, repr=False)  # if LossOptions.objective is given, else 0
    # For LossOptions.distillation, with row weights: loss_sum is weight * divergence_sum + target_weight * target_loss_sum.
    # Both are 0 without distillation; target_loss_sum is 0 if target_weight is 0.
    divergence_sum: float = field(default=0.0, repr=False)
    target_loss_sum: float = field(default=0.0, repr=False)
    normalizer: float = 1.0  # the divisor of the mean; 1 for other reductions, and with depths, which have their own
    depths: list[DepthResult] = field(default_factory=list, repr=False)  # one for each depth of the call

    valid_rows: int = 0
    unlisted_rows: int = 0  # rows that are ignored because their target is not in the head's draft vocabulary
    correct_rows: int = 0  # rows whose largest logit is that of the target
    accumulated_rows: int = 0  # rows that this call added to the head's gradients
    repeated_rows: int = 0  # rows that were already added (sent again after a broken connection)

    # [N, D] with the dtype of the hidden states (bf16: uint16), if asked for; 0 for ignored rows. None if the hidden states
    # were given as one array for each depth; then each DepthResult has its part.
    grad_hidden: NDArray[Any] | None = None
    # [N] for each result that was asked for: float32, argmax int32.
    rows: dict[RowOutput, NDArray[Any]] = field(default_factory=dict)
    # With the argument `classes`: their log-probabilities [N, K], float32; 0 for ignored rows.
    class_logprobs: NDArray[np.float32] | None = None
    # With `top_k`: the most probable classes [N, k], int32, in that order; their log-probabilities, float32. Ignored rows: -1 and 0.
    top_classes: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None

    incarnation: int = field(default=0, repr=False)  # of the server that computed the loss
    step: int = 0
    # The version of the weights that were used; 0 if an older server does not say it.
    weights_version: int = field(default=0, repr=False)

    queue_seconds: float = field(default=0.0, repr=False)  # summed over slices: the wait for the device
    compute_seconds: float = field(default=0.0, repr=False)  # summed over slices: the computation on the device
    wall_seconds: float = 0.0
    sent_bytes: int = field(default=0, repr=False)  # only payloads; with repeats
    received_bytes: int = field(default=0, repr=False)
    streams: int = field(default=0, repr=False)
    repeats: int = 0  # streams that were sent again

    @property
    def gradient_error(self) -> float:
        """The predicted relative error of sampled gradients; 0 if nothing was sampled.

        For the rows of several results: the square root of the sum of `sampling_variance` divided by the sum of `squared_gradient`.
        """
        return math.sqrt(self.sampling_variance / self.squared_gradient) if self.squared_gradient > 0 else 0.0


@dataclass(repr=False)
class EmbedResult(Shown):
    """Rows of a head's weight, and the version of the weights to which they belong."""

    rows: Any  # [N, D]: row n belongs to id n. In the dtype that was asked for (bf16: uint16); `out` if it was given
    step: int = 0  # the open step
    incarnation: int = field(default=0, repr=False)  # of the server process
    # Changes whenever the weights change within the server process; 0 if an older server does not say it.
    weights_version: int = field(default=0, repr=False)

    wall_seconds: float = 0.0
    received_bytes: int = field(default=0, repr=False)  # of rows, with repeats
    streams: int = field(default=0, repr=False)
    repeats: int = 0  # streams that were sent again
