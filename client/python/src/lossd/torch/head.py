# SPDX-License-Identifier: Apache-2.0
"""LossHead: a torch module that computes linear + softmax cross-entropy on a lossd server. PendingHeadLoss: a loss that the
server is computing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd import errors
from lossd.torch import _data_parallel, _depths, _input, _modes, _step_tracker
from lossd.torch._depths import DepthLosses
from lossd.torch._input import known_arguments, listed
from lossd.torch._modes import outside_of_compile
from lossd.torch._row_gradients import RowGradients
from lossd.torch._job import EXTRAS, Extra, GradientScale, Job, LossOutput
from lossd.torch._step_tracker import StepTracker
from lossd.types import Gradients, Reduction, Rest

_PPO = lossd.Objective("ppo")
# The ignore_index of calls without targets. In these calls any class may become a row's target, also the class that has the
# number of the module's ignore_index. -1 is never a class.
_NO_CLASS = -1


class LossHead(torch.nn.Module):
    """Computes the loss of hidden states with a head that a lossd server owns.

        head = lossd.torch.LossHead(client, "lm")
        loss = head(hidden, targets)  # (..., D) and (...)
        loss.backward()

    The weights, their gradient and their optimizer are on the server, so the module has no parameters. HeadOptimizer applies
    the steps.

    Forward computes the loss and both gradients at once. The hidden states' gradient is returned in backward; the weights'
    gradient is accumulated on the server. If the loss is multiplied after this module (loss / 4), the factor is applied to
    the hidden states' gradient in backward, and to the weights' gradient at the step. So the factor must be the same for all
    losses of a step. With `deferred=True`, and always with reduction "none", the server keeps the hidden states. It then
    computes the gradients in backward, from the gradient of the loss, and computes the logits twice. For distill() and
    policy_loss() the server keeps nothing. This module keeps the hidden states, and sends them again in backward.

    Under torch.no_grad() only the loss is computed, and nothing is accumulated. Hidden states that need no gradient get none.
    Under autocast, hidden states are sent in autocast's dtype. The server computes in float32, or in the head's compute dtype.
    Second derivatives are not available.

    Not thread-safe, but several modules may share one client.
    """

    @known_arguments
    def __init__(
            self, client: lossd.Client, head: str, *, reduction: Reduction = "mean", class_weights: bool = False,
            shift: bool = False, normalizer: float | None = None, grad_output: float = 1.0, deferred: bool = False,
            train_head: bool = True, extras: Iterable[Extra] = (), process_group: Any = _data_parallel.UNSAID,
            averaged_over: int | None = None, rank: int | None = None, world_size: int | None = None,
            state: Literal["checkpoint", "none"] = "checkpoint",
            streams: int | None = None, slice_bytes: int | None = None, timeout: float | None = None,
            ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float = 0.0,
            logit_scale: float = 1.0, gradients: Gradients | None = None, filter_epsilon: float | None = None,
            sample_threshold: float | None = None, max_gradient_error: float | None = None,
            refuse_unlisted: bool = False) -> None:
        """
        Args:
          head: the head's name on the server.
          reduction: as in torch.nn.functional.cross_entropy.
          class_weights: use the head's class weights (Client.write_tensor sets them).
          shift: the hidden state of position i predicts the target of position i + 1 of the last dimension.
          normalizer: what a mean is divided by. None: the number (with class weights: the weight) of valid targets of the
            microbatch. For means over several microbatches or trainers, give the number for the whole batch.
          grad_output: the gradient that the loss will get in backward. It may be assigned between calls. It is needed only if
            losses of one step are multiplied by different factors, or if hidden states are float16 and the loss is multiplied
            by more than 1.
          deferred: compute gradients in backward. Then each loss of a step may be multiplied by a factor of its own.
          train_head: accumulate the head's gradients. False for a frozen head.
          extras: values that forward returns in addition to the loss. With extras it returns (loss, LossExtras). In deferred
            mode gradients flow through "lse" and "entropy", except with distill() and policy_loss().
          process_group: the ranks over which the trunk's gradients are averaged: a torch.distributed group, or a DeviceMesh
            of one dimension. Then trunk and head get the same gradients as in one process that has the rows of all ranks, and
            the average of the ranks' losses is the loss of that process. Forward in training, step(), load_grad_norm() and
            zero_grad() are collective then; with normalizer= forward needs no communication. None: gradients are not
            averaged. This argument must be given if torch.distributed has more than one rank.
          averaged_over: the number by which the sum of the trunk's gradients over process_group is divided. None: the number
            of ranks, as in DistributedDataParallel and fully_shard. 1: the gradients are added up, as over tensor-parallel
            ranks.
          rank, world_size: the number of this trainer among the trainers of the head, and the number of trainers. Each
            trainer numbers its own microbatches. None: the rank and the size of process_group, else 0 and 1.
          state: what the state_dict() of this module, and of its HeadOptimizer, contains of the head. "checkpoint": the name
            of a checkpoint, which the server writes in state_dict() and restores in load_state_dict(). "none": nothing.
          streams, slice_bytes, timeout: as in lossd.Client.compute_loss_async.
          ignore_index, label_smoothing: as in torch.nn.functional.cross_entropy.
          z_loss: this factor times lse^2 is added to the loss of every row; lse is the log-sum-exp of its logits.
          softcap: logits become softcap * tanh(logits / softcap). 0: no softcap.
          logit_scale: a factor of the logits, before the softcap (1 / temperature).
          gradients: "exact", "filtered", "sampled" or "auto". None: the kind with which the head was created.
          filter_epsilon, sample_threshold, max_gradient_error: options of gradients that are not exact; see
            lossd.LossOptions.
          refuse_unlisted: only for a head with a draft vocabulary (create_head(class_list=)): raise lossd.InvalidArgument for
            a target that is not among the head's classes. False: the row is ignored.
        """
        super().__init__()
        _input.check_words(client, head, reduction, state)
        _input.check_integer("ignore_index", ignore_index)
        _input.check_numbers(
            {"grad_output": grad_output, "label_smoothing": label_smoothing, "z_loss": z_loss, "softcap": softcap,
             "logit_scale": logit_scale},
            {"normalizer": normalizer, "timeout": timeout, "streams": streams, "slice_bytes": slice_bytes,
             "averaged_over": averaged_over, "rank": rank, "world_size": world_size, "filter_epsilon": filter_epsilon,
             "sample_threshold": sample_threshold, "max_gradient_error": max_gradient_error})
        _input.check_flags(class_weights=class_weights, shift=shift, deferred=deferred, train_head=train_head,
                           refuse_unlisted=refuse_unlisted)
        self.extras: tuple[Extra, ...] = _input.names_of_extras(extras, EXTRAS)
        self.client = client
        self.head_name = head
        self.reduction: Reduction = reduction
        self.options = lossd.LossOptions(
            ignore_index=ignore_index, label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap,
            logit_scale=logit_scale, use_class_weights=class_weights, gradients=gradients, filter_epsilon=filter_epsilon,
            sample_threshold=sample_threshold, max_gradient_error=max_gradient_error, refuse_unlisted=bool(refuse_unlisted))
        self.shift = shift
        self.normalizer = normalizer
        self.grad_output = grad_output
        self.has_optimizer = False  # whether a HeadOptimizer was made for this module
        # HeadOptimizer multiplies the head's gradient, and not the trunk's, by this factor at the step. The factors in
        # `scale` are applied in addition.
        self.grad_scale = 1.0
        if process_group is _data_parallel.UNSAID:
            _data_parallel.check_said(head)
            process_group = None
        self.parallel = _data_parallel.DataParallel(process_group, averaged_over)
        self.scale = GradientScale(self.parallel.size, self.parallel.averaged_over)
        self.deferred = deferred or reduction == "none"
        self.first_passes = _modes.FirstPasses()
        description = _describe(client, head)
        self.hidden_size: int = description.spec.hidden_size
        self.vocab_size: int = description.spec.vocab_size
        # If the head has a draft vocabulary (create_head(class_list=)): the numbers of its classes in the larger vocabulary,
        # which targets use.
        self._classes = np.array(description.spec.class_list, np.int32) if description.spec.class_list else None
        self.has_draft_vocabulary = self._classes is not None
        self._most_label = description.spec.full_vocab_size or self.vocab_size  # all labels must be smaller than this
        self.frozen_on_server = description.spec.frozen
        self.train_head = bool(train_head) and not description.spec.frozen
        self.deterministic = description.slice_limits.row_grid > 0
        self.steps = StepTracker(description.state.step, self.parallel.rank if rank is None else rank,
                                 self.parallel.size if world_size is None else world_size)
        self.continuation = _step_tracker.Continuation(client, head, self.steps, description)
        self.watch = _step_tracker.Watch(client.target, head)
        # The gradients that a ServedEmbedding of this module is sending.
        self.row_gradients = RowGradients(self.steps, self.continuation.explain)
        self.transport: dict[str, Any] = {"streams": streams, "slice_bytes": slice_bytes, "timeout": timeout}
        self._class_weights: NDArray[Any] | None = None
        self._states = _step_tracker.HeadStates(client, head, self.parallel, kept=state == "checkpoint")
        # left_over: the number of microbatches in the open step that this module has not sent. earlier: the tracker of the
        # earlier LossHead of this program that sent them, or None. With several trainers, left_over counts only microbatches
        # of an earlier LossHead with the same rank.
        self.left_over, self.earlier = self._left_over(description)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(
            f"LossHead of {self.head_name!r} has no weights of its own, so it cannot be copied, as AveragedModel or "
            "copy.deepcopy() of a model that holds it would: average or copy the rest of the model, "
            f"AveragedModel(model.trunk), and make another LossHead(client, {self.head_name!r}) for the copy; \"Averaged "
            "models (EMA)\" in docs/python.md shows how")

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"LossHead of {self.head_name!r} has no weights of its own, so it cannot be copied or pickled: make another "
            f"LossHead(client, {self.head_name!r}), or save its state_dict(), which has the server save the weights")

    def requires_grad_(self, requires_grad: bool = True) -> LossHead:
        """Sets whether the head is trained (train_head), like requires_grad_() of a module that has its weights itself.

        requires_grad_() of a module that contains this one has the same effect. A loop over the module's parameters does not
        reach the head, because it has no parameters here. ValueError if the head was created frozen.
        """
        if requires_grad and self.frozen_on_server:
            raise ValueError(f"head {self.head_name!r} was created with frozen=True: the server has no gradients for it")
        self.train_head = bool(requires_grad)
        return self

    def named_modules(self, memo: set[torch.nn.Module] | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
        """As in any module. If requires_grad_() of a module that contains this one calls it, then that requires_grad_()
        applies to this head, too."""
        _modes.heed_requires_grad(self)
        return super().named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        """The text in repr(): the head, its shape, and the options whose values are not the defaults."""
        own = {"reduction": (self.reduction, "mean"), "shift": (self.shift, False), "deferred": (self.deferred, False)}
        usual = lossd.LossOptions()
        options = {field.name: (getattr(self.options, field.name), getattr(usual, field.name)) for field in fields(usual)}
        unusual = [f"{name}={value!r}" for name, (value, default) in (own | options).items() if value != default]
        return ", ".join([f"{self.head_name!r} at {self.client.target}, D={self.hidden_size}, V={self.vocab_size}",
                          *unusual])

    @property
    def step(self) -> int:
        """The number of the open step, as this module knows it."""
        return self.steps.step

    def sync(self) -> None:
        """Reads the head's state from the server again. Call it after a checkpoint was loaded into the head, or another trainer
        has applied a step.

        The module forgets what it had accumulated in the open step, and begins the step that is open on the server.
        """
        self.begin_again()
        self.watch.excused()

    def begin_again(self) -> None:
        """Like sync(), for a step that this program discards itself. Unlike sync(), the warnings about steps that are never
        applied (Watch) go on counting."""
        self.row_gradients.drop()
        description = self.client.describe_head(self.head_name)  # if this call fails, nothing has changed
        self.client.acknowledge_restart(self.head_name)
        self.steps.advance(description.state.step)
        self.continuation.found(description)
        self._class_weights = None
        self.left_over, self.earlier = 0, None
        self.scale.forget_losses()

    @property
    def gradient_scale(self) -> float:
        """The factor by which the server's gradient of the open step must be multiplied to be the gradient of the loss. It
        contains grad_scale."""
        return self.grad_scale * self.scale.applied(self.step)

    def save_state(self) -> dict[str, Any]:
        """Has the server save the head, if it has changed since the last save. Returns a state for load_state()."""
        return self._states.save()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the head, its optimizer's moments and its step, or raises. Collective with process_group."""
        if self._states.restore(state):
            self.continuation.loaded()
        self.steps.discarded()
        with self.parallel.before_total():
            if self.steps.sent > 0:  # the contents of the open step do not belong to the state
                self.client.zero_gradients(self.head_name, self.client.describe_head(self.head_name).state.step)
        self.parallel.barrier()
        self.sync()

    def get_extra_state(self) -> torch.Tensor:
        """What state_dict() holds of the head: the result of save_state(), as a tensor."""
        return _step_tracker.as_tensor(self.save_state())

    def set_extra_state(self, state: torch.Tensor) -> None:
        """Calls load_state() with what state_dict() held."""
        self.load_state(_step_tracker.from_tensor(state))

    @outside_of_compile
    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """Returns the loss; see start() for the arguments."""
        return _waited(lambda: self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, self.options,
                                           shift=self.shift, is_waited_for=True))

    @outside_of_compile
    def start(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
              normalizer: float | None = None, microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation and returns at once, so that the trainer can do other work meanwhile. The result's wait()
        returns the loss.

        Args:
          hidden: (..., D), float32, float16 or bfloat16, on any device. It must not change before wait() returns, or with
            lazy() before backward has ended, because it is sent without a copy.
          targets: (...), integers. If the targets are on the CPU, the call does not wait for the GPU, even if the model is on
            a GPU.
          row_weights: (...), factors of the rows' losses and gradients. They do not change the normalizer.
          normalizer: replaces the module's normalizer. With process_group, it is the divisor for the rows of all ranks.
          microbatch: only to send a failed microbatch again: its number within the step.
        """
        return self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, self.options, shift=self.shift)

    @outside_of_compile
    def policy_loss(
            self, hidden: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor | None = None,
            old_logprobs: torch.Tensor | None = None, ref_logprobs: torch.Tensor | None = None, *,
            objective: lossd.Objective = _PPO, row_weights: torch.Tensor | None = None, normalizer: float | None = None,
            microbatch: int | None = None) -> LossOutput:
        """Returns the loss of an objective that replaces the cross-entropy; see start_policy()."""
        rows = {"row_weights": row_weights, "advantages": advantages, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        options = _with_objective(self, objective, rows)
        return _waited(lambda: self._start(hidden, actions, rows, normalizer, microbatch, options, is_waited_for=True))

    @outside_of_compile
    def start_policy(
            self, hidden: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor | None = None,
            old_logprobs: torch.Tensor | None = None, ref_logprobs: torch.Tensor | None = None, *,
            objective: lossd.Objective = _PPO, row_weights: torch.Tensor | None = None, normalizer: float | None = None,
            microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation of policy_loss, as start() does for forward.

        The loss of a row depends only on its action's log-probability and on the values that come with the row. So its
        gradient is known as soon as its logits are, and nothing is computed twice. The module's reduction and its other
        options apply, except label_smoothing, class_weights and shift, which an objective does not allow (ValueError).

        With reduction "none" or deferred=True, the gradients are computed in backward, from the gradient of each row's loss.
        The rows are sent twice, and their logits are computed twice. Extras have no gradient then. Until backward, the
        hidden states must not change, and neither must the head's weights (RuntimeError).

        Args:
          hidden: (..., D), as in start().
          actions: (...), the class that was sampled at each hidden state; ignore_index where there is none.
          advantages, old_logprobs, ref_logprobs: (...). Give exactly those that the objective needs (lossd.Objective). They
            get no gradient.
          objective: lossd.Objective(...); by default PPO's.
          row_weights, normalizer, microbatch: as in start(). Without `normalizer`, a mean is divided by the number of
            actions.
        """
        rows = {"row_weights": row_weights, "advantages": advantages, "old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
        return self._start(hidden, actions, rows, normalizer, microbatch, _with_objective(self, objective, rows))

    @outside_of_compile
    def distill(self, hidden: torch.Tensor, teacher_hidden: torch.Tensor, distillation: lossd.Distillation,
                targets: torch.Tensor | None = None, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """Returns the distillation loss of rows: it compares their softmax with that of a teacher, a frozen head on the same
        server.

            loss = head.distill(hidden, teacher_trunk(tokens).detach(), lossd.Distillation("teacher", temperature=2.0))
            loss.backward()

        With reduction "none" or deferred=True, the gradients are computed in backward, from the gradient of each row's loss.
        Both hidden states of the rows are sent twice, and their logits are computed twice. Extras have no gradient then.
        Until backward, the hidden states of both must not change, and neither must the weights of the head (RuntimeError).

        Args:
          teacher_hidden: (..., D of the teacher), on the device of `hidden`; it is sent in the dtype of `hidden`.
          targets: (...); rows whose target is ignore_index are ignored. None: no row is ignored, not even the last position
            of a module with shift=True. Required for distillation.target_weight and for the extras "accuracy" and "logprob".
            If distillation.target_weight is 0, the loss does not depend on the values of the targets. Then class weights are
            not used, and with a draft vocabulary a row counts even if its target is not among the head's classes.
          row_weights, normalizer, microbatch: as in start().
        """
        _input.check_teacher(teacher_hidden, hidden, distillation, targets, self.extras)
        options, shift = replace(self.options, distillation=distillation), self.shift
        if targets is None:
            targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
            options, shift = replace(options, ignore_index=_NO_CLASS), False
        return _waited(lambda: self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, options,
                                           teacher_hidden, shift=shift, is_waited_for=True))

    @outside_of_compile
    def soft_target_loss(
            self, hidden: torch.Tensor, target_classes: torch.Tensor, target_weights: torch.Tensor,
            targets: torch.Tensor | None = None, *, rest: Rest = "none", row_weights: torch.Tensor | None = None,
            normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """Returns the loss of rows that have several classes with a weight each, in place of one target.

            weights, classes = teacher_logits.softmax(-1).topk(64)
            loss = head.soft_target_loss(hidden, classes, weights, rest="one_class")
            loss.backward()

        The module's reduction and its other options apply, except label_smoothing, class_weights and shift, which soft
        targets do not allow (ValueError).

        Args:
          target_classes: (..., K), integers: classes of the vocabulary in any order; -1 marks an unused entry. K is at most
            256.
          target_weights: (..., K), finite and not negative, 0 where target_classes is -1. They get no gradient.
          targets: (...). Rows whose target is ignore_index are ignored, and extras such as "logprob" refer to the target of a
            row. None: the target of a row is the class with the largest weight, and rows without a class are ignored.
          rest: what is done if the weights of a row have a sum below 1: "none", "renormalized" or "one_class" (see
            lossd.LossOptions).
          row_weights, normalizer, microbatch: as in start().
        """
        if self.shift:
            raise ValueError("shift=True does not go with soft_target_loss: make a LossHead without it")
        classes, weights = _input.soft_targets(target_classes, target_weights, hidden)
        options = replace(self.options, rest=rest)
        if targets is None:
            named = np.where(classes < 0, -np.inf, weights)  # an unused entry does not count as the largest
            largest = np.take_along_axis(classes, named.argmax(-1)[:, None], -1)[:, 0]
            targets = torch.from_numpy(np.where(largest < 0, _NO_CLASS, largest)).reshape(hidden.shape[:-1])
            options = replace(options, ignore_index=_NO_CLASS)
        soft: dict[str, NDArray[Any]] = {"target_classes": classes, "target_weights": weights}
        return _waited(lambda: self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, options,
                                           soft=soft, is_waited_for=True))

    def depth_losses(self, hidden: torch.Tensor | Sequence[torch.Tensor], targets: torch.Tensor, *,
                     weights: Sequence[float] | None = None, row_weights: torch.Tensor | None = None,
                     normalizers: Sequence[float] | None = None, microbatch: int | None = None) -> DepthLosses:
        """Returns the losses for multi-token prediction, where each token has several hidden states (depths), in one call.

            found = head.depth_losses([main, mtp_1, mtp_2], next_tokens, weights=[1.0, 0.3, 0.3])
            found.loss.backward()  # losses[0] + 0.3 * losses[1] + 0.3 * losses[2]

        One pass over the weights computes all depths, and the gradients are the same as with separate calls. The module's
        options and reduction apply to each depth; deferred=True and reduction "none" are not allowed (RuntimeError).

        Args:
          hidden: (K, ..., D), or K tensors (..., D) of the same shape, dtype and device. K tensors are sent without being
            copied into one.
          targets: (K, ...), the targets of each depth. Or (...), the targets of depth 0: then depth k has the same targets,
            shifted by k positions along the last dimension, and its last k positions have no target.
          weights: K factors of the depths' losses, finite and not negative. None: 1 each.
          row_weights: (K, ...), or (...) for all depths; as in start().
          normalizers: K numbers by which the means of the depths are divided. None: the module's normalizer for each depth,
            or else the number (with class weights: the weight) of valid targets of the depth. With process_group, they are
            the divisors for the rows of all ranks.
          microbatch: as in start().
        """
        if self.deferred:
            raise RuntimeError("depth_losses() computes gradients at once: make the head without deferred=True, and with "
                               "reduction 'mean' or 'sum'")
        plan = _modes.plan(self.train_head, self.training, _depths.any_part(hidden))
        together = plan.counts_with_ranks
        asks = together and self._counted_together(None if normalizers is None else 1.0)
        with self.parallel.before_total(asks, len(hidden)):
            self.client.check_usable()
            rows = _depths.read(self.head_name, self.hidden_size, hidden, targets, row_weights, weights, shift=self.shift,
                                vocab_size=self._most_label, ignore_index=self.options.ignore_index)
            if normalizers is not None and len(normalizers) != len(rows.labels):
                raise ValueError(f"normalizers has {len(normalizers)} numbers for {len(rows.labels)} depths")
            if plan.joins_step:
                self.join_step()
        depths = rows.depths(self._normalizers(rows.labels, normalizers, together))
        job = Job(self, tuple(_input.autocast(part) for part in rows.parts), np.concatenate(rows.labels), rows.row_weights, plan,
                  self._number(plan, microbatch), self.options, {}, depths=depths, shift=self.shift)
        try:
            job.start()
            return _depths.losses_of(job)
        except BaseException:
            job.cancel()  # has an effect after an interrupt; after an error of the job, the job has ended
            raise

    def _number(self, plan: _modes.Plan, microbatch: int | None) -> int:
        """The number of the next microbatch. `microbatch`: the number of a failed one that is sent again, or None."""
        number = self.steps.number(microbatch) if plan.joins_step else self.steps.number_apart()
        if self.deterministic:
            self.steps.check_order(number)
        return number

    def _normalizers(self, labels: Sequence[NDArray[np.int32]], given: Sequence[float] | None, training: bool) -> list[float]:
        """The divisor for each depth, as _normalizer() computes it, with one communication for all depths."""
        ranks = self.parallel.averaged_over if training else 1
        if self.reduction != "mean":
            return [1.0 / ranks] * len(labels)
        if given is None and self.normalizer is not None:
            given = [self.normalizer] * len(labels)
        if given is not None:
            return [_input.number("normalizers", value) / ranks for value in given]
        with self.parallel.before_total(training, len(labels)):
            counts = [self._count(of_depth, self.options) for of_depth in labels]
        return [total / ranks for total in self.parallel.totals(*counts)] if training else counts

    def _start(self, hidden: torch.Tensor, targets: torch.Tensor, rows: dict[str, torch.Tensor | None],
               normalizer: float | None, microbatch: int | None, options: lossd.LossOptions,
               teacher_hidden: torch.Tensor | None = None, soft: dict[str, NDArray[Any]] | None = None,
               shift: bool = False, is_waited_for: bool = False) -> PendingHeadLoss:
        """Begins a computation.

        Args:
          rows: "row_weights", and the values that an objective needs, by name.
          options: its ignore_index applies to `targets`.
          teacher_hidden: the hidden states for the teacher of a distillation.
          soft: soft targets, by the argument names of Client.compute_loss.
          shift: whether to shift `targets`.
          is_waited_for: whether this thread calls wait() next.
        """
        _input.check_tensors(hidden, targets, rows)
        plan = _modes.plan(self.train_head, self.training, hidden)
        together = plan.counts_with_ranks
        with self.parallel.before_total(together and self._counted_together(normalizer)):
            self.client.check_usable()
            _input.check_shapes(self.head_name, self.hidden_size, shift, hidden, targets, rows)
            labels = _input.labels(targets, shift, options.ignore_index)
            _input.check_labels(labels, self._most_label, options.ignore_index)
            if plan.joins_step:
                self.join_step()
        total = self._normalizer(labels, options, normalizer, together)
        wire = _input.autocast(hidden)
        number = self._number(plan, microbatch)
        floats = {name: _input.weights(tensor) for name, tensor in rows.items()}
        weights = floats.pop("row_weights")
        numbers: dict[str, NDArray[Any]] = {name: values for name, values in floats.items() if values is not None}
        numbers.update(soft or {})
        taught = None if teacher_hidden is None else teacher_hidden.to(wire.dtype)
        job = Job(self, (wire,), labels, weights, plan, number, options, numbers, taught, shift=shift)
        job.normalizer = total
        job.is_waited_for = is_waited_for
        job.start()
        return PendingHeadLoss(job)

    def _normalizer(self, labels: NDArray[np.int32], options: lossd.LossOptions, given: float | None, training: bool) -> float:
        """The divisor of this rank's sum of losses. In training it is chosen so that the average of the ranks' losses is the
        loss of all rows."""
        ranks = self.parallel.averaged_over if training else 1
        if self.reduction != "mean":
            return 1.0 / ranks if self.reduction == "sum" else 1.0
        given = self.normalizer if given is None else given
        if given is not None:
            return _input.number("normalizer", given) / ranks
        with self.parallel.before_total(training):
            count = self._count(labels, options)
        return self.parallel.total(count) / ranks if training else count

    def _counted_together(self, given: float | None) -> bool:
        """Whether _normalizer() has to ask the other ranks in training."""
        return self.reduction == "mean" and given is None and self.normalizer is None

    def _count(self, labels: NDArray[np.int32], options: lossd.LossOptions) -> float:
        """The number of rows that are not ignored; with class weights, the sum of the class weights of their targets."""
        valid = self.has_target(labels, options)
        if not options.use_class_weights or not _uses_targets(options):
            return float(np.count_nonzero(valid))
        found = labels[valid]
        if self._class_weights is None:
            self._class_weights = self.client.read_tensor(self.head_name, "class_weights")
        if self._classes is not None:
            found = np.searchsorted(self._classes, found)
        return float(self._class_weights[found].sum(dtype=np.float64))

    def has_target(self, labels: NDArray[np.int32], options: lossd.LossOptions) -> NDArray[np.bool_]:
        """For each row, whether the server counts it. The server ignores a row whose label is ignore_index. With a draft
        vocabulary it also ignores a row whose label is no class of the head, unless the loss does not use labels."""
        valid: NDArray[np.bool_] = labels != options.ignore_index
        if self._classes is None or not _uses_targets(options):
            return valid
        return valid & listed(labels, self._classes)

    def _left_over(self, head: lossd.HeadDescription) -> tuple[int, StepTracker | None]:
        """The values of left_over and earlier for a new module."""
        earlier = _step_tracker.take_over(_step_tracker.Feeder(
            head.state.incarnation, self.head_name, self.steps.rank, self.steps.world_size), self.steps)
        sent = 0 if earlier is None else earlier.sent
        if not self.steps.alone:
            has_some = head.step_microbatches + head.step_contributions + head.retained_microbatches > 0  # false after a reset of the head
            return (sent, earlier) if has_some else (0, None)
        return max(head.step_microbatches + head.step_contributions, min(sent, head.retained_microbatches)), earlier

    def join_step(self) -> None:
        """Called before this trainer adds something to the open step.

        If an earlier LossHead of this program has left everything that is in the step, discards it with a warning.
        RuntimeError if something in the step may be another trainer's. Also warns if training continues a head that another
        program left (Continuation.begin).
        """
        if not self.left_over:
            return self.continuation.begin()
        if self.earlier is None or not self.steps.alone or self.left_over > self.earlier.sent:
            raise RuntimeError(
                f"step {self.step} of head {self.head_name!r} holds {self.left_over} microbatches of another LossHead: an "
                "earlier one of this program that did not end its step, or another trainer's. "
                "HeadOptimizer(head, ...).zero_grad() discards them. Several trainers of one head need process_group=, "
                "or rank= and world_size=")
        _modes.warn(f"what an earlier LossHead of {self.head_name!r} left in step {self.step} (microbatches: "
                      f"{self.left_over}) is discarded, and the new one begins the step again", RuntimeWarning)
        self.earlier.taken_over()
        self.client.zero_gradients(self.head_name, self.step)
        self.left_over, self.earlier = 0, None
        self.continuation.begin()


def _with_objective(head: LossHead, objective: Any, rows: dict[str, torch.Tensor | None]) -> lossd.LossOptions:
    """The options of the head with this objective. TypeError or ValueError if the objective does not go with the head, or with
    the numbers that are given for each row."""
    if not isinstance(objective, lossd.Objective):
        raise TypeError(f"objective is {objective!r}; it must be a lossd.Objective")
    if head.shift:
        raise ValueError("shift=True does not go with policy_loss: make a LossHead without it")
    for name in rows.keys() - {"row_weights"}:
        if (rows[name] is None) == (name in objective.numbers):
            raise ValueError(f"{name} is {'None' if rows[name] is None else 'given'}; {objective} "
                             f"{'needs one for each row' if rows[name] is None else 'does not use it'}")
    return replace(head.options, objective=objective)


def _uses_targets(options: lossd.LossOptions) -> bool:
    """Whether the loss depends on the values of targets. If not (distillation with target_weight 0), a target only shows
    whether its row is ignored: LossOptions.refuse_unlisted in loss.proto describes this."""
    return options.distillation is None or options.distillation.target_weight != 0


class PendingHeadLoss:
    """A loss that the server is computing. LossHead.start() and start_policy() return it; wait() gets the loss."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output: LossOutput | None = None

    def __repr__(self) -> str:
        return f"<lossd.torch.PendingHeadLoss, {'done' if self.done() else 'under way'}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a loss that is under way cannot be copied or pickled; copy what its wait() returns")

    def done(self) -> bool:
        """True if wait() will not block."""
        return self._job.pending is not None and self._job.pending.done()

    @outside_of_compile
    def wait(self) -> LossOutput:
        """Returns the loss, or (loss, LossExtras) if the module was made with extras. May be called again."""
        if self._output is None:
            self._output = self._job.output()
        return self._output

    def cancel(self) -> None:
        """Asks the computation to end early. Then wait() raises lossd.Cancelled, unless the computation was done before."""
        self._job.cancel()

    @outside_of_compile
    def lazy(self) -> torch.Tensor:
        """Returns the loss at once, as a tensor whose value is NaN until its backward. The backward waits for the server.

        Use it if the trainer does other work between a loss and its backward, as pipeline schedules do. If the loss needs no
        backward, lazy() waits like wait(). RuntimeError with extras and in deferred mode, because both need results of the
        server before backward.
        """
        if self._output is None:
            self._output = self._job.lazy_output()
        assert isinstance(self._output, torch.Tensor)
        return self._output


def _waited(begin: Callable[[], PendingHeadLoss]) -> LossOutput:
    """Begins a computation, waits for it, and returns its loss. If the wait is interrupted, cancels the computation."""
    pending: PendingHeadLoss | None = None
    try:
        pending = begin()
        return pending.wait()
    except BaseException:
        if pending is not None:
            pending.cancel()  # has an effect after an interrupt; after an error, the computation has ended
        raise


def _describe(client: lossd.Client, head: str) -> lossd.HeadDescription:
    try:
        return client.describe_head(head)
    except errors.NotFound as error:
        error.add(f"; create it with client.create_head({head!r}, hidden_size=..., vocab_size=...), or "
                  "restore it with client.load_checkpoint()")
        raise
