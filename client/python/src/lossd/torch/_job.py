# SPDX-License-Identifier: Apache-2.0
"""Job: the computation of one microbatch for a LossHead. It sends the microbatch, puts the loss into the autograd graph, and
returns the gradients in backward. GradientScale has the factors of the head's gradient, LossExtras the values that a LossHead
returns beside the loss."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd import errors
from lossd.torch import _input
from lossd.torch._modes import Anchor, Deferred, Direct, FirstPasses, Pass, Plan, refuse_evaluation
from lossd.torch._step_tracker import Continuation, StepTracker, Watch
from lossd.types import DType, LossResult, Reduction, RowOutput


class GradientScale:
    """The factors by which HeadOptimizer multiplies the server's gradient of a head when it applies a step: for the ranks, for
    the schedule of a pipeline, and for the factor of the losses after forward. Not thread-safe."""

    def __init__(self, ranks: int, averaged_over: int) -> None:
        self.replicas = 1.0 / averaged_over  # the ranks' losses are averaged, but the server adds up their gradients
        self._copies = ranks  # how often a finished gradient is added: once by each rank
        self.schedule = 1.0  # the factor of a pipeline schedule, which divides the trunk's gradients after the step
        self._step = -1  # the step that _loss belongs to
        self._loss: float | None = None  # the factor of the losses after forward; None: no loss had its backward

    def meet_loss(self, step: int, factor: float) -> bool:
        """Records that a loss of `step` was multiplied by `factor` after forward. False if an earlier loss of the step had
        another factor."""
        if self._step != step:
            self.forget_losses()
        if self._loss is not None and not math.isclose(self._loss, factor, rel_tol=1e-6):
            return False
        self._step, self._loss = step, factor
        return True

    def forget_losses(self) -> None:
        """Forgets the factor of the losses. Called when the gradients of the step are discarded."""
        self._loss = None

    def of_losses(self, step: int) -> float:
        """The factor by which losses of `step` were multiplied after forward; 1 if it is not known."""
        return self._loss if self._loss is not None and self._step == step else 1.0

    def applied(self, step: int) -> float:
        """The product of all factors, by which HeadOptimizer multiplies the server's gradient of `step`."""
        return self.replicas * self.schedule * self.of_losses(step)

    def of_rows(self, step: int) -> float:
        """By what to multiply a gradient of embedding rows before the server adds it to its own. A gradient of rows already
        has the factor by which losses were multiplied after forward, which the server's gradient gets only at the step. So
        this is the inverse of that factor, and later losses of the step must have the same factor.

        0 if the losses of the step were multiplied by 0: then a gradient of rows cannot be added.
        """
        factor = self.of_losses(step)
        self.meet_loss(step, factor)
        return 1.0 / factor if factor else 0.0

    def of_finished_gradient(self, step: int) -> float:
        """By what to multiply a complete gradient, which every rank adds, before the server adds it to its own. RuntimeError
        if the losses of the step were multiplied by 0."""
        undone = self._copies * self.replicas * self.schedule * self.of_losses(step)
        if undone == 0:
            raise RuntimeError("the losses of this step were multiplied by 0, so no other gradient can be added to theirs")
        return 1.0 / undone


Extra = Literal["z_loss", "accuracy", "dropped_mass", "gradient_error", "ratio", "clipped", "old_kl", "ref_kl", "lse",
                "entropy", "logprob", "argmax"]
EXTRAS: tuple[Extra, ...] = (
    "z_loss", "accuracy", "dropped_mass", "gradient_error", "ratio", "clipped", "old_kl", "ref_kl", "lse", "entropy",
    "logprob", "argmax")
_ROW_EXTRAS: tuple[RowOutput, ...] = ("lse", "entropy", "logprob", "argmax")
# Extras of objectives, and the fields of lossd.ObjectiveSums that have them.
_OBJECTIVE_EXTRAS: dict[Extra, Literal["clipped_rows", "ratio", "old_kl", "ref_kl"]] = {
    "ratio": "ratio", "clipped": "clipped_rows", "old_kl": "old_kl", "ref_kl": "ref_kl"}
_DIFFERENTIABLE: tuple[RowOutput, ...] = ("loss", "lse", "entropy")


@dataclass
class LossExtras:
    """The values that LossHead(extras=) asked for; all other fields are None. The first eight are scalars; lse, entropy,
    logprob and argmax are tensors of the targets' shape."""

    z_loss: torch.Tensor | None = None  # the z-loss that is contained in the loss, scaled like the loss
    accuracy: torch.Tensor | None = None  # the share of valid rows whose largest logit is the target's
    # The probability of the classes that filtered gradients left out, averaged over valid rows; 0 if no gradient was computed.
    # If gradients are computed in backward (deferred, or reduction "none"), the value is NaN before backward.
    dropped_mass: torch.Tensor | None = None
    # The predicted relative error of sampled gradients; 0 if nothing was sampled. NaN before backward, like dropped_mass.
    gradient_error: torch.Tensor | None = None
    # The next four are only for policy_loss. They are means over the rows that have a target and a weight that is not 0. They
    # are 0 if the objective does not have them. ratio: the probability ratio. clipped: the share of rows whose ratio was
    # clipped. old_kl: ratio - 1 - log ratio, which estimates the divergence from the policy that sampled the actions. ref_kl:
    # the estimate of the divergence from the reference policy.
    ratio: torch.Tensor | None = None
    clipped: torch.Tensor | None = None
    old_kl: torch.Tensor | None = None
    ref_kl: torch.Tensor | None = None
    lse: torch.Tensor | None = None  # the log-sum-exp of the logits
    entropy: torch.Tensor | None = None  # the entropy of the softmax, in nats
    logprob: torch.Tensor | None = None  # the log-probability of the target
    argmax: torch.Tensor | None = None  # int32: the class with the largest logit; -1 for ignored rows


LossOutput: TypeAlias = "torch.Tensor | tuple[torch.Tensor, LossExtras]"


class Module(Protocol):
    """The members of LossHead that a Job uses."""

    client: lossd.Client
    head_name: str
    hidden_size: int
    reduction: Reduction
    options: lossd.LossOptions
    deferred: bool
    extras: tuple[Extra, ...]
    steps: StepTracker
    scale: GradientScale
    grad_output: float
    first_passes: FirstPasses
    watch: Watch
    continuation: Continuation
    transport: dict[str, Any]  # arguments of Client.compute_loss_async

    def has_target(self, labels: NDArray[np.int32], options: lossd.LossOptions) -> NDArray[np.bool_]:
        """For each row, whether it is not ignored."""


class Job:
    """The computation of one microbatch, from start() to the end of backward. start() sends it, output() waits for the result
    and returns the loss, and the autograd functions Direct and Deferred call the Job in backward.

    A deferred loss gets its gradients in backward, in one of two ways. The server has retained the hidden states, and backward
    sends the upstream gradients of the rows. Or backward sends the rows again (`resends`), with the upstream gradients as
    factors of the row weights.
    """

    def __init__(self, module: Module, parts: tuple[torch.Tensor, ...], labels: NDArray[np.int32],
                 row_weights: NDArray[np.float32] | None, plan: Plan, number: int, options: lossd.LossOptions,
                 numbers: Mapping[str, Any], taught: torch.Tensor | None = None, depths: Sequence[lossd.Depth] = (),
                 shift: bool = False) -> None:
        """
        Args:
          parts: the hidden states in the dtype in which they are sent: one tensor, or one tensor for each of `depths`, all of
            the same shape.
          number: the microbatch's number in the StepTracker.
          numbers: the arrays that options.objective or options.rest needs, by the argument names of Client.compute_loss.
          taught: the hidden states for the teacher of options.distillation, (..., D of the teacher), in the same dtype.
          shift: whether `labels` were shifted. Then the last position predicts nothing.
        """
        self.module = module
        self.options = options
        self.shift = shift
        # Whether backward of a deferred loss sends the rows again, because the server can retain neither a teacher's hidden
        # states nor the numbers of an objective.
        self.resends = module.deferred and (taught is not None or options.objective is not None)
        if self.resends:  # the caller may change its arrays before backward
            labels, row_weights = labels.copy(), None if row_weights is None else row_weights.copy()
            numbers = {name: values.copy() for name, values in numbers.items()}
        self.numbers = numbers
        self.taught = taught
        self.parts = parts  # these tensors are in the autograd graph
        self.depths = depths
        self.hidden = parts[0]
        self.labels = labels
        self.row_weights = row_weights
        self.shape = self.hidden.shape[:-1]  # the shape of the targets
        if len(parts) > 1:
            self.shape = torch.Size((len(parts), *self.shape))
        self.plan = plan
        self.number = number
        self.step = module.steps.step
        self.discards = module.steps.discards
        self.grad_output = module.grad_output
        self.normalizer = 1.0
        self.is_waited_for = False  # whether the thread that calls start() waits for the result directly afterwards
        computes = plan.computes(module.deferred)
        self.deferred = module.deferred and computes
        self.row_losses = module.deferred
        self.writes_hidden = plan.hidden and computes
        self.pending: lossd.PendingLoss | None = None
        self._anchor = Anchor(plan.head or plan.evaluates)
        self._known: LossResult | None = None  # the result, from the first result() on; in a repeated pass, that of the first pass
        # For each part of the hidden states, the memory into which the client writes the part's gradient.
        self._gradient: list[torch.Tensor] | None = None
        self._lazy_loss: torch.Tensor | None = None  # the loss that _loss_without_value() made, while the loss has no value
        # The extras dropped_mass and gradient_error that the caller got; backward fills them in deferred mode.
        self._dropped_mass: torch.Tensor | None = None
        self._gradient_error: torch.Tensor | None = None

    @functools.cached_property
    def counted(self) -> NDArray[np.bool_]:
        """For each row, whether it can have a gradient: it is not ignored, and its weight is not 0."""
        return self._valid if self.row_weights is None else self._valid & (self.row_weights != 0)

    @property
    def _valid(self) -> NDArray[np.bool_]:
        return self.module.has_target(self.labels, self.options)

    @property
    def dtype(self) -> DType:
        return _input.DTYPES[self.hidden.dtype]

    @property
    def wire_id(self) -> int:
        return self.module.steps.wire_id(self.number)

    def _pass_key(self) -> bytes:
        """The key under which FirstPasses has the result of this computation."""
        options = self.options
        text = f"{options.objective} {options.distillation} {options.rest} {options.ignore_index} {self.depths}"
        return FirstPasses.key(self.labels, self.hidden, text)

    def start(self) -> None:
        """Sends the microbatch. In a repeated pass whose result is known, sends nothing."""
        if self.plan.repeats:
            self._known, normalizer = self.module.first_passes.find(self._pass_key())
            self.normalizer = self.normalizer if normalizer is None else normalizer
            if self._known is not None:
                return
        accumulates = self.plan.joins_step and not self.row_losses
        with self.module.steps.sending(self.number, accumulates):
            self.pending = self._send(accumulates, self.row_weights)

    def _send(self, accumulates: bool, row_weights: NDArray[np.float32] | None, in_backward: bool = False) -> lossd.PendingLoss:
        """Begins the call that sends the rows. `in_backward`: it only computes the gradients of a loss that is known."""
        module = self.module
        place = _input.place_of(self.hidden, module.client)
        gradient: Any = False
        if self.writes_hidden and (in_backward or not self.row_losses):
            gradient = self._gradient_memory(place)
        sent = [_input.to_send(part.detach().reshape(-1, module.hidden_size), place) for part in self.parts]
        hidden = sent[0].array if len(sent) == 1 else [part.array for part in sent]
        teacher, ready = None, _input.both(*(part.ready for part in sent))
        if self.taught is not None:
            beside = _input.to_send(self.taught.reshape(-1, self.taught.shape[-1]), place)
            teacher, ready = beside.array, _input.both(ready, beside.ready)
        if (self.is_waited_for or in_backward) and ready is not None:
            ready = _input.Ready(ready.events, by_caller=True)
        rows: list[RowOutput] = [name for name in _ROW_EXTRAS if name in module.extras and not in_backward]
        if self.row_losses and not in_backward:
            rows.insert(0, "loss")
        reduction: Reduction = module.reduction
        if self.row_losses:
            reduction = "sum" if self.resends else "none"
        elif self.normalizer != 1.0 or self.depths:
            reduction = "mean"
        return module.client.compute_loss_async(
            module.head_name, hidden, self.labels, dtype=self.dtype, options=self.options,
            step=self.step if accumulates or self.deferred else None, id=self.wire_id, row_weights=row_weights,
            reduction=reduction, normalizer=self.normalizer if reduction == "mean" and not self.depths else None,
            grad_output=1.0 if self.row_losses else self.grad_output, accumulate=accumulates,
            retain=self.deferred and not self.resends, grad_hidden=gradient, rows=rows, ready=ready, teacher_hidden=teacher,
            depths=self.depths, **self.numbers, **module.transport)

    def _gradient_memory(self, place: _input.Place) -> Any:
        self._gradient = [_input.empty(part.shape, part.dtype, part.device, place) for part in self.parts]
        sent = [_input.as_sent(gradient.view(-1, self.module.hidden_size)) for gradient in self._gradient]
        return sent[0] if len(sent) == 1 else sent

    def result(self) -> LossResult:
        """Waits for the result and returns it."""
        if self._known is not None:
            return self._known
        assert self.pending is not None
        with self._failure_noted():
            result = self.pending.wait()
        if self.plan.joins_step and not self.row_losses:
            self.module.steps.arrived(self.number, result.valid_rows, waits_for_backward=True)
        if self.plan.checkpoint is Pass.FIRST:
            self.module.first_passes.note(self.step, self._pass_key(), result, self.normalizer)
        self._known = result
        return result

    @contextmanager
    def _failure_noted(self) -> Iterator[None]:
        steps = self.module.steps
        try:
            yield
        except BaseException as error:
            if self.step == steps.step:  # else the step is over, and the tracker has forgotten its microbatches
                steps.failed(self.number)
                if isinstance(error, (lossd.Restarted, lossd.StepDiscarded)):
                    steps.lost(str(error))
            if isinstance(error, (errors.FailedPrecondition, errors.StepDiscarded)):
                self.module.continuation.explain(error)
            if isinstance(error, errors.ResourceExhausted):
                self.module.watch.explain(error)
            raise

    def cancel(self) -> None:
        """Asks the computation to end early; no effect when it has ended."""
        if self.pending is not None:
            self.pending.cancel()

    def lazy_output(self) -> torch.Tensor:
        """The loss without a value; see PendingHeadLoss.lazy()."""
        if self.module.extras or self.row_losses:
            raise RuntimeError("extras and deferred losses are needed before backward: use wait() instead of lazy()")
        if not self.plan.has_graph or self.plan.repeats or self.plan.evaluates:
            loss = self.output()
            assert isinstance(loss, torch.Tensor)
            return loss
        return self._loss_without_value()

    def _loss_without_value(self) -> torch.Tensor:
        lazy: torch.Tensor = Direct.apply(self._anchor.tensor, self, None, *self.parts)
        self._lazy_loss = lazy.detach()
        return lazy

    def fill_lazy_loss(self, result: LossResult | None = None) -> None:
        """If there is a loss without a value, writes the value into that loss. Waits for the result if it is not given."""
        if self._lazy_loss is not None:
            self._lazy_loss.fill_((result or self.result()).loss)
            self._lazy_loss = None

    def output(self) -> LossOutput:
        """Waits for the result and returns the loss, with extras if the module has them."""
        with torch.set_grad_enabled(self.plan.has_graph):
            # The loss and `counted` are made while the server computes, so that the caller does not wait for them afterwards.
            # An activation checkpoint may keep the loss of its first pass, which must not be written to then.
            loss: torch.Tensor | None = None
            if not self.row_losses and self.plan.has_graph and self.plan.checkpoint is Pass.ORDINARY:
                loss = self._loss_without_value()
                _ = self.counted
            result = self.result()
            rows = {name: torch.from_numpy(values).to(self.hidden.device) for name, values in result.rows.items()}
            if self.row_losses:
                loss = self._deferred_loss(rows)
            elif loss is None:
                loss = Direct.apply(self._anchor.tensor, self, result.loss, *self.parts)
            self.fill_lazy_loss(result)
        if not self.module.extras:
            return loss
        return loss, self._extras(result, rows)

    def _deferred_loss(self, rows: dict[RowOutput, torch.Tensor]) -> torch.Tensor:
        """The loss of a job whose gradients are computed in backward. Replaces loss, lse and entropy in `rows` by tensors
        through which gradients flow; only the loss if backward sends the rows again."""
        names = [name for name in _DIFFERENTIABLE if name in rows and (name == "loss" or not self.resends)]
        rows.update(zip(names, Deferred.apply(self._anchor.tensor, self.hidden, self, names,
                                                [rows[name] for name in names])))
        if self.module.reduction == "none":
            return self._shaped(rows["loss"])
        total = rows["loss"].sum()
        return total / self.normalizer if self.normalizer else total

    @property
    def kept(self) -> list[torch.Tensor]:
        """The tensors that autograd keeps for backward, so that it raises if the caller has changed them in place."""
        tensors = (self.hidden, self.taught) if self.resends else ()
        return [tensor for tensor in tensors if tensor is not None and not tensor.is_inference()]

    def check_backward(self) -> None:
        """RuntimeError if backward needs a gradient that was not computed."""
        if self.plan.evaluates and (self.module.deferred or self._anchor.is_asked_for()):
            refuse_evaluation(self.module.head_name, self.module.deferred)

    def had_backward(self) -> None:
        """Notes that backward has delivered the gradients of the hidden states and of the head."""
        self.module.steps.had_backward(self.number)
        if self.plan.head:
            self.module.watch.had_backward(head_alone=not self.plan.hidden or self.hidden.is_leaf)

    def meet(self, got: float) -> float:
        """The factor by which backward multiplies the gradients that were computed in forward for `grad_output`. `got`: the
        gradient of the loss that backward brings. RuntimeError if such a factor is not possible."""
        self._check_not_discarded("the weight gradient that the server had accumulated in forward")
        if not self.counted.any():
            return 1.0  # all gradients of the microbatch are 0, so the factor does not matter
        if math.isclose(got, self.grad_output, rel_tol=1e-6):
            factor = 1.0
        else:
            factor = got / self.grad_output if self.grad_output else math.nan
        if not math.isfinite(factor) or (factor > 1 and self.hidden.dtype is torch.float16):
            raise RuntimeError(
                f"the gradient of this loss is {got}, but {self.grad_output} was announced, and the gradients are "
                f"computed already in {self.hidden.dtype}. Set head.grad_output = {got} before forward, or make the "
                "head with deferred=True")
        if self.plan.head and not self.module.scale.meet_loss(self.step, factor):
            raise RuntimeError(
                f"the gradient of this loss is {got}, {factor} times the announced {self.grad_output}; earlier losses of "
                f"step {self.step} met {self.module.scale.of_losses(self.step)} times theirs, and the server has added "
                f"up their weight gradients. Set head.grad_output = {got} before forward, or make the head with "
                "deferred=True")
        return factor

    def _check_not_discarded(self, what: str) -> None:
        if self.plan.head and self.discards != self.module.steps.discards:
            raise RuntimeError(
                "zero_grad() or discard(), or another LossHead that begins the step again, came between forward and "
                f"backward of this loss, and discarded {what}. Call zero_grad() before forward or after step()")

    def gradients(self, factor: float = 1.0) -> list[torch.Tensor | None]:
        """The gradients, times `factor`, that backward returns for each part of the hidden states."""
        if self._gradient is None:
            return [None] * len(self.parts)
        written, self._gradient = self._gradient, None
        if factor != 1.0:
            for gradient in written:
                gradient.mul_(factor)
        return [_input.to_device(gradient, part.device) for gradient, part in zip(written, self.parts)]

    def run_backward(self, upstream: dict[RowOutput, torch.Tensor | None]) -> None:
        """Has the server compute the gradients of a deferred microbatch. `upstream`: the gradients of its row outputs that
        backward brings."""
        module, steps = self.module, self.module.steps
        if steps.step != self.step:
            raise RuntimeError(
                f"backward of a loss of step {self.step}, but step {steps.step} is open: "
                f"{'the head has changed' if self.resends else 'the server let go of its hidden states'}. Call backward() before "
                "the optimizer's step()")
        self._check_not_discarded("its microbatch" if self.resends else "the hidden states that the server had kept")
        values = {name: None if gradient is None else _where(self.counted if name == "loss" else self._valid, gradient)
                  for name, gradient in upstream.items()}
        loss, rows = values.get("loss"), 0
        if loss is None:
            loss = np.zeros(math.prod(self.shape), np.float32)
        if math.prod(self.shape) > 0:
            result = self._send_again(loss) if self.resends else self._send_upstream(loss, values)
            rows = result.valid_rows
            if self._dropped_mass is not None:
                self._dropped_mass.fill_(_per_valid_row(result, result.dropped_mass))
            if self._gradient_error is not None:
                self._gradient_error.fill_(result.gradient_error)
        elif self.writes_hidden:  # if there are no rows, the server does not know the microbatch
            self._gradient_memory("host")
        if self.plan.head:
            steps.arrived(self.number, rows, waits_for_backward=False)
        self.had_backward()

    def _send_upstream(self, loss: NDArray[np.float32], values: dict[RowOutput, NDArray[np.float32] | None]) -> LossResult:
        """Has the server compute the gradients of the rows that it retains, and release the rows."""
        module = self.module
        gradient: Any = False
        if self.writes_hidden:
            gradient = self._gradient_memory(_input.place_of(self.hidden, module.client))
            _input.settle(self._gradient[0] if self._gradient else None)
        with module.steps.sending(self.number, self.plan.head):
            pending = module.client.backward_async(
                module.head_name, self.wire_id, loss,
                grad_lse=values.get("lse"), grad_entropy=values.get("entropy"), hidden_size=module.hidden_size,
                dtype=self.dtype, step=self.step, accumulate=self.plan.head, grad_hidden=gradient,
                streams=module.transport["streams"], timeout=module.transport["timeout"])
        with self._failure_noted():
            result = pending.wait()
        module.client.release_microbatch(module.head_name, self.wire_id)
        return result

    def _send_again(self, loss: NDArray[np.float32]) -> LossResult:
        """Sends the rows again, with the upstream gradient of each row's loss as a factor of its weight. Then the gradients of
        their sum are those of the loss."""
        assert self.pending is not None
        forward = self.pending.wait()
        weights = loss if self.row_weights is None else loss * self.row_weights
        with self.module.steps.sending(self.number, self.plan.head):
            pending = self._send(self.plan.head, weights, in_backward=True)
        with self._failure_noted():
            try:
                result = pending.wait()
            except errors.InvalidArgument as error:
                if not np.isfinite(weights).all():
                    row = int(np.isfinite(weights).argmin())
                    error.reword(f"the gradient of the loss of row {row} is {loss[row]}; it must be finite, also after it is "
                                 "multiplied by the row's weight")
                raise
            if (result.incarnation, result.weights_version) != (forward.incarnation, forward.weights_version):
                raise RuntimeError(
                    f"the weights of head {self.module.head_name!r} have changed between forward and backward of this loss, so the "
                    "gradients are not those of the loss. Discard the step with HeadOptimizer.discard(), and compute the loss again")
        return result

    def _extras(self, result: LossResult, rows: dict[RowOutput, torch.Tensor]) -> LossExtras:
        extras = LossExtras()
        for name in _ROW_EXTRAS:
            if name in rows:
                setattr(extras, name, self._shaped(rows[name]))
        if "z_loss" in self.module.extras:
            extras.z_loss = self.scalar(self._z_loss(result))
        if "accuracy" in self.module.extras:
            extras.accuracy = self.scalar(_per_valid_row(result, result.correct_rows))
        for extra, sums in _OBJECTIVE_EXTRAS.items():
            if extra in self.module.extras:
                setattr(extras, extra, self.scalar(result.objective.mean(sums)))
        later = self.deferred and result.valid_rows > 0
        if "gradient_error" in self.module.extras:
            self._gradient_error = self.scalar(math.nan if later else result.gradient_error)
            extras.gradient_error = self._gradient_error
        if "dropped_mass" in self.module.extras:
            self._dropped_mass = self.scalar(math.nan if later else _per_valid_row(result, result.dropped_mass))
            extras.dropped_mass = self._dropped_mass
        return extras

    def _z_loss(self, result: LossResult) -> float:
        if not self.depths:
            return result.z_loss_sum / self.normalizer if self.normalizer else 0.0
        return sum(depth.weight * found.z_loss_sum / found.normalizer
                   for depth, found in zip(self.depths, result.depths) if found.normalizer)

    def scalar(self, value: float) -> torch.Tensor:
        # Unlike torch.tensor, torch.full does not wait for the device.
        return torch.full((), value, dtype=torch.float32, device=self.hidden.device)

    def _shaped(self, rows: torch.Tensor) -> torch.Tensor:
        """Values of rows in the shape of the targets. With shift, the last position predicts nothing and is cut off."""
        shaped = rows.reshape(self.shape)
        return shaped[..., :-1] if self.shift else shaped


def _per_valid_row(result: LossResult, total: float) -> float:
    return total / result.valid_rows if result.valid_rows else 0.0


def _where(counts: NDArray[np.bool_], gradient: torch.Tensor) -> NDArray[np.float32]:
    """The upstream gradient as an array, with 0 for rows that do not count. The results of such rows are constants, and their
    upstream gradient may be NaN, as from a mean over no rows."""
    values: NDArray[np.float32] = gradient.detach().to("cpu", torch.float32).numpy()
    return values if counts.all() else np.where(counts, values, np.float32(0))
