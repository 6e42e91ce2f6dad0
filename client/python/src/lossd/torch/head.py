"""LossHead: linear + softmax cross-entropy on a lossd server as a torch module."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd.torch import _memory
from lossd.torch._step_book import StepBook
from lossd.types import Algorithm, DType, LossResult, Reduction, RowOutput

Extra = Literal["z_loss", "accuracy", "dropped_mass", "lse", "entropy", "logprob", "argmax"]
EXTRAS: tuple[Extra, ...] = ("z_loss", "accuracy", "dropped_mass", "lse", "entropy", "logprob", "argmax")
_ROW_EXTRAS: tuple[RowOutput, ...] = ("lse", "entropy", "logprob", "argmax")
_DIFFERENTIABLE: tuple[RowOutput, ...] = ("loss", "lse", "entropy")


@dataclass
class LossExtras:
    """What was asked for besides the loss; the rest is None. Scalars, or tensors of the targets' shape."""

    z_loss: torch.Tensor | None = None  # the z-loss part of the loss, scaled as the loss is
    accuracy: torch.Tensor | None = None  # share of valid rows whose largest logit is the target's
    # Probability that filtered gradients left out, mean over valid rows; 0 if no gradient was computed. What computes
    # gradients in backward (deferred, reduction none) fills it there; before that it is NaN.
    dropped_mass: torch.Tensor | None = None
    lse: torch.Tensor | None = None  # log sum exp of the logits
    entropy: torch.Tensor | None = None  # of the softmax, nats
    logprob: torch.Tensor | None = None  # log p of the target
    argmax: torch.Tensor | None = None  # int32; -1 for ignored rows


LossOutput: TypeAlias = "torch.Tensor | tuple[torch.Tensor, LossExtras]"


class LossHead(torch.nn.Module):
    """The loss of hidden states under a head that a lossd server owns.

        head = lossd.torch.LossHead(client, "lm")
        loss = head(hidden, targets)  # (..., D) and (...)
        loss.backward()

    The weights, their gradient and their optimizer live on the server: the module has no parameters. HeadOptimizer
    applies the steps.

    Forward computes the loss and both gradients at once; the hidden states' is handed out in backward, the weights'
    is accumulated on the server. So what multiplies the loss after this module has to be known in forward:
    `grad_output` (1, unless the loss is scaled or divided). Backward raises if it meets another value. With
    `deferred=True`, and always with reduction "none", the server keeps the hidden states and computes gradients in
    backward from whatever arrives there, at the price of computing the logits twice.

    Under torch.no_grad() only the loss is computed and nothing is accumulated. Hidden states that need no gradient get
    none. Under autocast hidden states travel in autocast's dtype.

    Not thread-safe; a client may serve several modules. The computation on the server is float32 or as the head says;
    second derivatives are not available.
    """

    def __init__(
            self, client: lossd.Client, head: str, *, reduction: Reduction = "mean", ignore_index: int = -100,
            label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0, logit_scale: float = 1.0,
            class_weights: bool = False, algorithm: Algorithm = "exact", filter_epsilon: float = 2.0**-12,
            max_dropped_mass: float = 0.05, shift: bool = False, normalizer: float | None = None,
            grad_output: float = 1.0, deferred: bool = False, train_head: bool = True, extras: Iterable[Extra] = (),
            rank: int = 0, world_size: int = 1, streams: int | None = None, slice_bytes: int = 1 << 20,
            timeout: float | None = None) -> None:
        """
        Args:
          head: the head's name on the server.
          reduction, ignore_index, label_smoothing: as torch.nn.functional.cross_entropy.
          z_loss: weight of lse^2, added to every row's loss.
          softcap: logits become softcap * tanh(logits / softcap); 0: none.
          logit_scale: multiplies the logits before the softcap.
          class_weights: use the head's class weights (Client.write_tensor sets them).
          algorithm: how gradients are computed: "exact"; "filtered": without probabilities below `filter_epsilon`,
            save the target's; "auto": filtered where that leaves out at most `max_dropped_mass` per valid row, else
            exact. The loss is the same.
          filter_epsilon: in [0, 1).
          max_dropped_mass: in [0, 1].
          shift: hidden states of position i predict targets of position i + 1 of the last dimension.
          normalizer: what a mean divides by. None: the number (with class weights: weight) of valid targets of the
            microbatch. For means over several microbatches or trainers give the number of the whole batch.
          grad_output: the gradient that the loss will get in backward; may be assigned between calls.
          deferred: compute gradients in backward.
          train_head: accumulate the head's gradients. False for a frozen head.
          extras: what forward returns besides the loss; then it returns (loss, LossExtras).
          rank, world_size: of this trainer among those that feed the head; each counts its microbatches apart.
          streams, slice_bytes, timeout: as lossd.Client.compute_loss_async.
        """
        super().__init__()
        self.client = client
        self.head_name = head
        self.reduction: Reduction = reduction
        self.options = lossd.LossOptions(
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            logit_scale=logit_scale, use_class_weights=class_weights, algorithm=algorithm,
            filter_epsilon=filter_epsilon, max_dropped_mass=max_dropped_mass)
        self.shift = shift
        self.normalizer = normalizer
        self.grad_output = grad_output
        self.grad_scale = 1.0  # multiplies the weights' gradient alone, when HeadOptimizer applies the step
        self.deferred = deferred or reduction == "none"
        self.extras = tuple(extras)
        for name in self.extras:
            if name not in EXTRAS:
                raise ValueError(f"extras names {name!r}; there are {', '.join(EXTRAS)}")
        description = client.describe_head(head)
        self.hidden_size: int = description.spec.hidden_size
        self.vocab_size: int = description.spec.vocab_size
        self.train_head = train_head and not description.spec.frozen
        self.steps = StepBook(description.state.step, rank, world_size)
        self._transport: dict[str, Any] = {"streams": streams, "slice_bytes": slice_bytes, "timeout": timeout}
        self._class_weights: NDArray[Any] | None = None

    def extra_repr(self) -> str:
        return f"{self.head_name!r} at {self.client.target}, D={self.hidden_size}, V={self.vocab_size}"

    @property
    def step(self) -> int:
        """The open step, as far as this module knows."""
        return self.steps.step

    def sync(self) -> None:
        """Asks the server for the open step: after a checkpoint was loaded, or another trainer applied a step."""
        self.steps.advance(self.client.describe_head(self.head_name).state.step)
        self._class_weights = None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """The loss; see start()."""
        return self.start(hidden, targets, row_weights=row_weights, normalizer=normalizer,
                          microbatch=microbatch).wait()

    def start(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
              normalizer: float | None = None, microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation, so that the trainer can go on meanwhile; wait() of the result is the loss.

        Args:
          hidden: (..., D), float32, float16 or bfloat16, on any device. Must not change before wait().
          targets: (...), integers. On the CPU, for a CUDA model too, they do not wait for the GPU.
          row_weights: (...), multiply the rows' losses and gradients; they do not enter the normalizer.
          normalizer: overrides the module's.
          microbatch: the number, within the step, of a microbatch that failed and is sent again.
        """
        self._check(hidden, targets, row_weights)
        wire = _autocast(hidden)
        labels = _labels(targets, self.shift, self.options.ignore_index)
        needs_hidden = torch.is_grad_enabled() and hidden.requires_grad
        needs_head = torch.is_grad_enabled() and self.train_head
        number = self.steps.number(microbatch) if needs_head else self.steps.number_apart()
        job = _Job(self, wire, targets.shape, needs_hidden, needs_head, number, self.grad_output)
        weights = None if row_weights is None else row_weights.detach().reshape(-1).to("cpu", torch.float32).numpy()
        if self.reduction == "mean":
            job.normalizer = self._normalizer(labels, normalizer)
        job.start(labels, weights)
        return PendingHeadLoss(job)

    def _normalizer(self, labels: NDArray[np.int32], given: float | None) -> float:
        given = self.normalizer if given is None else given
        if given is not None:
            return given
        valid = labels != self.options.ignore_index
        if not self.options.use_class_weights:
            return float(np.count_nonzero(valid))
        if self._class_weights is None:
            self._class_weights = self.client.read_tensor(self.head_name, "class_weights")
        inside = valid & (labels >= 0) & (labels < self.vocab_size)  # the server names what is not
        return float(self._class_weights[labels[inside]].sum(dtype=np.float64))

    def _check(self, hidden: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
        self.client.check_usable()
        if hidden.dtype not in _memory.DTYPES:
            raise TypeError(f"hidden is {hidden.dtype}; lossd takes float32, float16 and bfloat16: use hidden.float()")
        if hidden.dim() == 0 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}; head {self.head_name!r} needs "
                             f"(..., {self.hidden_size})")
        for name, tensor in (("targets", targets), ("row_weights", row_weights)):
            if tensor is None:
                continue
            if tensor.shape != hidden.shape[:-1]:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; hidden of shape {tuple(hidden.shape)} needs "
                                 f"{tuple(hidden.shape[:-1])}")
            if tensor.requires_grad:
                raise ValueError(f"{name} requires a gradient, but lossd computes none for it: use {name}.detach()")
        if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype is torch.bool:
            raise TypeError(f"targets is {targets.dtype}; it must hold class indices: use targets.long()")
        if self.shift and targets.dim() == 0:
            raise ValueError("shift=True needs targets with at least one dimension")


class PendingHeadLoss:
    """A loss that is being computed."""

    def __init__(self, job: _Job) -> None:
        self._job = job
        self._output: LossOutput | None = None

    def done(self) -> bool:
        """True if wait() will not block."""
        return self._job.pending is not None and self._job.pending.done()

    def wait(self) -> LossOutput:
        """The loss, or (loss, LossExtras) if the module was made with extras. May be repeated."""
        if self._output is None:
            self._output = self._job.output()
        return self._output


class _Job:
    """One microbatch from start() to the end of backward."""

    def __init__(self, module: LossHead, hidden: torch.Tensor, shape: torch.Size, needs_hidden: bool,
                 needs_head: bool, number: int, grad_output: float) -> None:
        self.module = module
        self.hidden = hidden  # as it travels; part of the graph
        self.shape = shape  # of the targets
        self.needs_hidden = needs_hidden
        self.needs_head = needs_head
        self.number = number
        self.step = module.steps.step
        self.grad_output = grad_output
        self.normalizer = 1.0
        self.deferred = module.deferred and (needs_hidden or needs_head)
        self.row_losses = module.deferred
        self.pending: lossd.PendingLoss | None = None
        self._gradient: torch.Tensor | None = None  # in host memory
        self._dropped_mass: torch.Tensor | None = None  # the caller's, if wanted

    @property
    def dtype(self) -> DType:
        return _memory.DTYPES[self.hidden.dtype]

    @property
    def wire_id(self) -> int:
        return self.module.steps.wire_id(self.number)

    def start(self, labels: NDArray[np.int32], row_weights: NDArray[np.float32] | None) -> None:
        module = self.module
        host, ready = _memory.to_host(self.hidden.detach().reshape(-1, module.hidden_size))
        accumulates = self.needs_head and not self.row_losses
        gradient: bool | NDArray[Any] = False
        if self.needs_hidden and not self.row_losses:
            gradient = self._gradient_memory()
        rows: list[RowOutput] = [name for name in _ROW_EXTRAS if name in module.extras]
        if self.row_losses:
            rows.insert(0, "loss")
        if accumulates:
            module.steps.sent(self.number)
        try:
            self.pending = module.client.compute_loss_async(
                module.head_name, _memory.as_array(host), labels, dtype=self.dtype, options=module.options,
                step=self.step if accumulates or self.deferred else None, id=self.wire_id, row_weights=row_weights,
                reduction="none" if self.row_losses else module.reduction,
                normalizer=self.normalizer if module.reduction == "mean" and not self.row_losses else None,
                grad_output=1.0 if self.row_losses else self.grad_output, accumulate=accumulates,
                retain=self.deferred, grad_hidden=gradient, rows=rows, ready=ready, **module._transport)
        except BaseException:
            module.steps.unsent(self.number)
            raise

    def _gradient_memory(self) -> NDArray[Any]:
        shape = torch.Size((math.prod(self.shape), self.module.hidden_size))
        self._gradient = _memory.empty_host(shape, self.hidden.dtype, self.hidden.device)
        return _memory.as_array(self._gradient)

    def output(self) -> LossOutput:
        assert self.pending is not None
        result = self.pending.wait()
        if self.needs_head and not self.row_losses:
            self.module.steps.arrived(self.number, waits_for_backward=True)
        rows = {name: self._tensor(values) for name, values in result.rows.items()}
        anchor = torch.zeros((), requires_grad=self.needs_head)
        with torch.set_grad_enabled(self.needs_hidden or self.needs_head):
            if self.row_losses:
                loss = self._deferred_loss(anchor, rows)
            else:
                loss = _Direct.apply(anchor, self.hidden, self, result.loss)
        if not self.module.extras:
            return loss
        return loss, self._extras(result, rows)

    def _deferred_loss(self, anchor: torch.Tensor, rows: dict[RowOutput, torch.Tensor]) -> torch.Tensor:
        """Replaces lse and entropy in `rows` by tensors that carry gradients."""
        names = [name for name in _DIFFERENTIABLE if name in rows]
        rows.update(zip(names, _Deferred.apply(anchor, self.hidden, self, names, [rows[name] for name in names])))
        if self.module.reduction == "none":
            return self._shaped(rows["loss"])
        total = rows["loss"].sum()
        return total / self.normalizer if self.normalizer else total

    def gradient(self) -> torch.Tensor | None:
        """What backward hands to the hidden states."""
        if self._gradient is None:
            return None
        gradient = _memory.to_device(self._gradient, self.hidden.device).reshape(self.hidden.shape)
        self._gradient = None
        return gradient

    def run_backward(self, upstream: dict[RowOutput, torch.Tensor | None]) -> None:
        """Deferred mode: the rows' upstream gradients have come."""
        module, steps = self.module, self.module.steps
        if steps.step != self.step:
            raise RuntimeError(
                f"backward of a loss of step {self.step}, but step {steps.step} is open: the server let go of its "
                "hidden states. Call backward() before the optimizer's step()")
        values = {name: None if gradient is None else gradient.detach().to("cpu", torch.float32).numpy()
                  for name, gradient in upstream.items()}
        loss = values.get("loss")
        if self.needs_head:
            steps.sent(self.number)
        if math.prod(self.shape) > 0:
            result = module.client.backward(
                module.head_name, self.wire_id, np.zeros(math.prod(self.shape), np.float32) if loss is None else loss,
                grad_lse=values.get("lse"), grad_entropy=values.get("entropy"), hidden_size=module.hidden_size,
                dtype=self.dtype, step=self.step, accumulate=self.needs_head,
                grad_hidden=self._gradient_memory() if self.needs_hidden else False,
                streams=module._transport["streams"], timeout=module._transport["timeout"])
            module.client.release_microbatch(module.head_name, self.wire_id)
            if self._dropped_mass is not None:
                self._dropped_mass.fill_(_per_valid_row(result, result.dropped_mass))
        elif self.needs_hidden:
            self._gradient_memory()
        if self.needs_head:
            steps.arrived(self.number, waits_for_backward=False)

    def _extras(self, result: LossResult, rows: dict[RowOutput, torch.Tensor]) -> LossExtras:
        extras = LossExtras()
        for name in _ROW_EXTRAS:
            if name in rows:
                setattr(extras, name, self._shaped(rows[name]))
        if "z_loss" in self.module.extras:
            extras.z_loss = self.scalar(result.z_loss_sum / self.normalizer if self.normalizer else 0.0)
        if "accuracy" in self.module.extras:
            extras.accuracy = self.scalar(_per_valid_row(result, result.correct_rows))
        if "dropped_mass" in self.module.extras:
            later = self.deferred and result.valid_rows > 0
            self._dropped_mass = self.scalar(math.nan if later else _per_valid_row(result, result.dropped_mass))
            extras.dropped_mass = self._dropped_mass
        return extras

    def scalar(self, value: float) -> torch.Tensor:
        return torch.tensor(value, dtype=torch.float32, device=self.hidden.device)

    def _tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(values).to(self.hidden.device)

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """As the targets; with shift the last position, which predicts nothing, is cut off."""
        shaped = rows.reshape(self.shape)
        return shaped[..., :-1] if self.module.shift else shaped


def _per_valid_row(result: LossResult, total: float) -> float:
    return total / result.valid_rows if result.valid_rows else 0.0


class _Direct(torch.autograd.Function):
    """Gradients that are known already."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: _Job, loss: float) -> torch.Tensor:
        ctx.job = job
        return job.scalar(loss)

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        job: _Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        got = float(grad_loss)
        if not math.isclose(got, job.grad_output, rel_tol=1e-6):
            raise RuntimeError(
                f"the gradient of this loss is {got}, but {job.grad_output} was announced and the gradients are "
                f"computed already. Set head.grad_output = {got} before forward, or make the head with deferred=True")
        ctx.job = None
        job.module.steps.had_backward(job.number)
        return torch.zeros(()), _once_differentiable(job.gradient()), None, None


class _Deferred(torch.autograd.Function):
    """Gradients that the server computes when the upstream gradients of the rows are known."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, job: _Job, names: list[RowOutput],
                rows: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        ctx.job, ctx.names = job, names
        ctx.set_materialize_grads(False)
        return tuple(rows)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        job: _Job | None = ctx.job
        if job is None:
            raise RuntimeError(_SECOND_BACKWARD)
        ctx.job = None
        job.run_backward(dict(zip(ctx.names, upstream)))
        return torch.zeros(()), _once_differentiable(job.gradient()), None, None, None


_SECOND_BACKWARD = (
    "backward ran twice on one loss; the server accumulated its weight gradient once. Compute the loss again, or add "
    "losses up before backward()")


class _NotTwice(torch.autograd.Function):
    """Passes a gradient on and raises if somebody differentiates it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        raise RuntimeError("lossd has no second derivatives: the gradient of its loss cannot be differentiated")


def _once_differentiable(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None or not torch.is_grad_enabled():  # enabled with create_graph=True only
        return gradient
    marked: torch.Tensor = _NotTwice.apply(torch.zeros((), requires_grad=True), gradient)
    return marked


def _labels(targets: torch.Tensor, shift: bool, ignore_index: int) -> NDArray[np.int32]:
    """One label a row of hidden states. Shifted ones are ignored at the last position; hidden states stay in place."""
    array: NDArray[Any] = targets.detach().to("cpu").numpy()
    if shift:
        shifted = np.full(array.shape, ignore_index, array.dtype)
        shifted[..., :-1] = array[..., 1:]
        array = shifted
    return array.reshape(-1)


def _autocast(hidden: torch.Tensor) -> torch.Tensor:
    """As a linear layer would take it."""
    find = _autocast_dtype if hasattr(torch, "get_autocast_dtype") else _old_autocast_dtype
    dtype = find(hidden.device.type)
    return hidden if dtype is None or hidden.dtype is dtype else hidden.to(dtype)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _old_autocast_dtype(kind: str) -> torch.dtype | None:
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
