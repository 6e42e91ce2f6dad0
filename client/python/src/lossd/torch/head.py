# SPDX-License-Identifier: Apache-2.0
"""LossHead: linear + softmax cross-entropy on a lossd server as a torch module."""

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
_NO_CLASS = -1  # an ignore_index for calls without targets, in which every class may be a row's: the caller's may be one


class LossHead(torch.nn.Module):
    """The loss of hidden states under a head that a lossd server owns.

        head = lossd.torch.LossHead(client, "lm")
        loss = head(hidden, targets)  # (..., D) and (...)
        loss.backward()

    The weights, their gradient and their optimizer live on the server: the module has no parameters. HeadOptimizer
    applies the steps.

    Forward computes the loss and both gradients at once; the hidden states' is handed out in backward, the weights'
    is accumulated on the server. What multiplies the loss after this module (loss / 4) is applied in backward to the
    hidden states' gradient and at the step to the weights', so it has to be the same for all losses of a step. With
    `deferred=True`, and always with reduction "none", the server keeps the hidden states and computes gradients in
    backward from whatever arrives there, at the price of computing the logits twice.

    Under torch.no_grad() only the loss is computed and nothing is accumulated. Hidden states that need no gradient get
    none. Under autocast hidden states travel in autocast's dtype.

    Not thread-safe; a client may serve several modules. The computation on the server is float32 or as the head says;
    second derivatives are not available.
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
          reduction: as torch.nn.functional.cross_entropy.
          class_weights: use the head's class weights (Client.write_tensor sets them).
          shift: hidden states of position i predict targets of position i + 1 of the last dimension.
          normalizer: what a mean divides by. None: the number (with class weights: weight) of valid targets of the
            microbatch. For means over several microbatches or trainers give the number of the whole batch.
          grad_output: the gradient that the loss will get in backward; may be assigned between calls. Only losses of
            one step that are multiplied by different factors need it, and float16 with a loss that is scaled up.
          deferred: compute gradients in backward.
          train_head: accumulate the head's gradients. False for a frozen head.
          extras: what forward returns besides the loss; then it returns (loss, LossExtras).
          process_group: the ranks over which the trunk's gradients are averaged: a torch.distributed group, or a
            DeviceMesh of one dimension. Trunk and head then get the gradients of one process on the rows of all ranks,
            and the ranks' losses average to its loss. Forward in training, step(), load_grad_norm() and zero_grad()
            are collective then; normalizer= spares forward its communication. None: there is no averaging. It has to
            be given if torch.distributed has more than one rank.
          averaged_over: by how many ranks the sum of the trunk's gradients over process_group is divided. None: by all,
            as DistributedDataParallel and fully_shard do. 1: they are added up, as over tensor-parallel ranks.
          rank, world_size: of this trainer among those that feed the head; each counts its microbatches apart. Those
            of process_group, else 0 of 1.
          state: what state_dict() holds of the head, this module's and its HeadOptimizer's. "checkpoint": the name of a
            checkpoint, which it has the server write; load_state_dict() restores that one. "none": nothing.
          streams, slice_bytes, timeout: as lossd.Client.compute_loss_async.
          ignore_index, label_smoothing: as torch.nn.functional.cross_entropy.
          z_loss: weight of lse^2, which is added to the loss of every row.
          softcap: logits become softcap * tanh(logits / softcap). 0: they do not.
          logit_scale: multiplies the logits before the softcap (1 / temperature).
          gradients: "exact", "filtered", "sampled" or "auto". None: as the head was created.
          filter_epsilon, sample_threshold, max_gradient_error: of gradients that are not exact; see lossd.LossOptions.
          refuse_unlisted: of a head with a draft vocabulary (create_head(class_list=)): lossd.InvalidArgument for a target
            that is not among its classes. False: its row is ignored.
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
        self.has_optimizer = False  # a HeadOptimizer was made for it
        # Multiplies the head's gradient alone, when HeadOptimizer applies the step; besides what process_group does.
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
        # Of a head with a draft vocabulary (create_head(class_list=)): its classes, as targets name them.
        self._classes = np.array(description.spec.class_list, np.int32) if description.spec.class_list else None
        self.has_draft_vocabulary = self._classes is not None
        self._most_label = description.spec.full_vocab_size or self.vocab_size  # labels are below
        self.frozen_on_server = description.spec.frozen
        self.train_head = bool(train_head) and not description.spec.frozen
        self.deterministic = description.slice_limits.row_grid > 0
        self.steps = StepTracker(description.state.step, self.parallel.rank if rank is None else rank,
                                 self.parallel.size if world_size is None else world_size)
        self.continuation = _step_tracker.Continuation(client, head, self.steps, description)
        self.watch = _step_tracker.Watch(client.target, head)
        self.row_gradients = RowGradients(self.steps, self.continuation.explain)  # of a ServedEmbedding, on their way
        self.transport: dict[str, Any] = {"streams": streams, "slice_bytes": slice_bytes, "timeout": timeout}
        self._class_weights: NDArray[Any] | None = None
        self._states = _step_tracker.HeadStates(client, head, self.parallel, kept=state == "checkpoint")
        # Microbatches in the open step that are not this module's, and the tracker of the LossHead of this program that
        # has left them, if one has. Several trainers see those of their own alone.
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
        """Whether the head is trained (train_head), as for a module whose weights are its own.

        requires_grad_() of a module that holds this one does the same; a loop over its parameters does not reach the
        head, which has none here. ValueError if the head was created frozen.
        """
        if requires_grad and self.frozen_on_server:
            raise ValueError(f"head {self.head_name!r} was created with frozen=True: the server has no gradients for it")
        self.train_head = bool(requires_grad)
        return self

    def named_modules(self, memo: set[torch.nn.Module] | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
        """As of any module; requires_grad_() of one that holds this one is noticed here."""
        _modes.heed_requires_grad(self)
        return super().named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        """What repr() shows: the head, its shape and the options that are not as usual."""
        own = {"reduction": (self.reduction, "mean"), "shift": (self.shift, False), "deferred": (self.deferred, False)}
        usual = lossd.LossOptions()
        options = {field.name: (getattr(self.options, field.name), getattr(usual, field.name)) for field in fields(usual)}
        unusual = [f"{name}={value!r}" for name, (value, default) in (own | options).items() if value != default]
        return ", ".join([f"{self.head_name!r} at {self.client.target}, D={self.hidden_size}, V={self.vocab_size}",
                          *unusual])

    @property
    def step(self) -> int:
        """The open step, as far as this module knows."""
        return self.steps.step

    def sync(self) -> None:
        """Takes the head as the server has it now: after a checkpoint was loaded, or another trainer applied a step.

        What this module has accumulated in the open step counts as lost, and the step starts again.
        """
        self.begin_again()
        self.watch.excused()

    def begin_again(self) -> None:
        """sync(), where nobody has applied a step."""
        self.row_gradients.drop()
        description = self.client.describe_head(self.head_name)  # if this fails, nothing has changed
        self.client.acknowledge_restart(self.head_name)
        self.steps.advance(description.state.step)
        self.continuation.found(description)
        self._class_weights = None
        self.left_over, self.earlier = 0, None
        self.scale.forget_losses()

    @property
    def gradient_scale(self) -> float:
        """What the server's gradient of the open step is multiplied by to be that of the loss, grad_scale included."""
        return self.grad_scale * self.scale.applied(self.step)

    def save_state(self) -> dict[str, Any]:
        """Has the server save the head, if it has changed since, and returns what load_state() restores it from."""
        return self._states.save()

    def load_state(self, state: dict[str, Any]) -> None:
        """Restores the head, its optimizer's moments and its step, or raises. Collective with process_group."""
        if self._states.restore(state):
            self.continuation.loaded()
        self.steps.discarded()
        with self.parallel.before_total():
            if self.steps.sent > 0:  # what the open step has is not of the state
                self.client.zero_gradients(self.head_name, self.client.describe_head(self.head_name).state.step)
        self.parallel.barrier()
        self.sync()

    def get_extra_state(self) -> torch.Tensor:
        """What state_dict() holds of the head: save_state(), as a tensor."""
        return _step_tracker.as_tensor(self.save_state())

    def set_extra_state(self, state: torch.Tensor) -> None:
        """load_state() for load_state_dict()."""
        self.load_state(_step_tracker.from_tensor(state))

    @outside_of_compile
    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """The loss; see start()."""
        return _waited(lambda: self.start(hidden, targets, row_weights=row_weights, normalizer=normalizer, microbatch=microbatch))

    @outside_of_compile
    def start(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
              normalizer: float | None = None, microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation, so that the trainer can go on meanwhile; wait() of the result is the loss.

        Args:
          hidden: (..., D), float32, float16 or bfloat16, on any device. Must not change before wait(), or with lazy()
            before the end of backward: it is sent meanwhile, from where it lies.
          targets: (...), integers. On the CPU, for a CUDA model too, they do not wait for the GPU.
          row_weights: (...), multiply the rows' losses and gradients; they do not enter the normalizer.
          normalizer: overrides the module's. With process_group, that of all ranks.
          microbatch: the number, within the step, of a microbatch that failed and is sent again.
        """
        return self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, self.options, shift=self.shift)

    @outside_of_compile
    def policy_loss(
            self, hidden: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor | None = None,
            old_logprobs: torch.Tensor | None = None, ref_logprobs: torch.Tensor | None = None, *,
            objective: lossd.Objective = _PPO, row_weights: torch.Tensor | None = None, normalizer: float | None = None,
            microbatch: int | None = None) -> LossOutput:
        """The loss of an objective in the place of the cross-entropy, with both gradients in one pass; see start_policy()."""
        return _waited(lambda: self.start_policy(
            hidden, actions, advantages, old_logprobs, ref_logprobs, objective=objective, row_weights=row_weights,
            normalizer=normalizer, microbatch=microbatch))

    @outside_of_compile
    def start_policy(
            self, hidden: torch.Tensor, actions: torch.Tensor, advantages: torch.Tensor | None = None,
            old_logprobs: torch.Tensor | None = None, ref_logprobs: torch.Tensor | None = None, *,
            objective: lossd.Objective = _PPO, row_weights: torch.Tensor | None = None, normalizer: float | None = None,
            microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation of policy_loss, as start() that of forward.

        The loss of a row is a function of its action's log-probability and of the numbers that come with the row, so its
        gradient is known when its logits are: nothing is computed twice. The module's reduction and its other options hold,
        but for label_smoothing, class_weights, shift and deferred, which do not go with an objective (ValueError).

        Args:
          hidden: (..., D), as in start().
          actions: (...), the classes that were sampled after each hidden state; ignore_index where none was.
          advantages, old_logprobs, ref_logprobs: (...), what the objective needs of them (lossd.Objective); they get no
            gradient.
          objective: lossd.Objective(...); PPO's if it is not said.
          row_weights, normalizer, microbatch: as in start(). A mean divides by the number of actions unless `normalizer` is
            given.
        """
        if not isinstance(objective, lossd.Objective):
            raise TypeError(f"objective is {objective!r}; it must be a lossd.Objective")
        for name in ("shift", "deferred"):
            if getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)} does not go with policy_loss: make a LossHead without it"
                                 + (", and with reduction 'mean' or 'sum'" if name == "deferred" else ""))
        rows = {"row_weights": row_weights, "advantages": advantages, "old_logprobs": old_logprobs,
                "ref_logprobs": ref_logprobs}
        for name in rows.keys() - {"row_weights"}:
            if (rows[name] is None) == (name in objective.numbers):
                raise ValueError(f"{name} is {'None' if rows[name] is None else 'given'}; {objective} "
                                 f"{'needs one for each row' if rows[name] is None else 'does not use it'}")
        return self._start(hidden, actions, rows, normalizer, microbatch, replace(self.options, objective=objective))

    @outside_of_compile
    def distill(self, hidden: torch.Tensor, teacher_hidden: torch.Tensor, distillation: lossd.Distillation,
                targets: torch.Tensor | None = None, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """The loss of rows that are compared with the softmax of a teacher, a frozen head of the same server.

            loss = head.distill(hidden, teacher_trunk(tokens).detach(), lossd.Distillation("teacher", temperature=2.0))
            loss.backward()

        Args:
          teacher_hidden: (..., D of the teacher), on the device of `hidden`; travels in the dtype of `hidden`.
          targets: (...); those that are ignore_index mark rows that are left out. None: no row is, the last position of a
            module with shift=True included. Needed for distillation.target_weight and for the extras "accuracy" and
            "logprob". If the weight is 0, the loss does not depend on them: class weights are not used, and of a head with
            a draft vocabulary rows with any target count.
          row_weights, normalizer, microbatch: as in start().
        """
        if self.deferred:
            raise RuntimeError("distill() computes gradients at once: make the head without deferred=True, and with "
                               "reduction 'mean' or 'sum'")
        _input.check_teacher(teacher_hidden, hidden, distillation, targets, self.extras)
        options, shift = replace(self.options, distillation=distillation), self.shift
        if targets is None:
            targets = torch.zeros(hidden.shape[:-1], dtype=torch.int64)
            options, shift = replace(options, ignore_index=_NO_CLASS), False
        return _waited(lambda: self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, options,
                                           teacher_hidden, shift=shift))

    @outside_of_compile
    def soft_target_loss(
            self, hidden: torch.Tensor, target_classes: torch.Tensor, target_weights: torch.Tensor,
            targets: torch.Tensor | None = None, *, rest: Rest = "none", row_weights: torch.Tensor | None = None,
            normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """The loss of rows that have several classes with a weight each in the place of one target.

            weights, classes = teacher_logits.softmax(-1).topk(64)
            loss = head.soft_target_loss(hidden, classes, weights, rest="one_class")
            loss.backward()

        The module's reduction and its other options hold, but for label_smoothing, class_weights and shift, which do not go
        with soft targets (ValueError).

        Args:
          target_classes: (..., K), integers: classes of the vocabulary in any order, or -1 in an entry that names none. K is
            at most 256.
          target_weights: (..., K), finite and not negative, 0 where target_classes is -1. They get no gradient.
          targets: (...); those that are ignore_index mark rows that are left out, and extras such as "logprob" are the
            others'. None: the class of the largest weight; rows that name no class are left out, and no others.
          rest: what becomes of the probability that a row's weights leave over (lossd.LossOptions): "none", "renormalized"
            or "one_class".
          row_weights, normalizer, microbatch: as in start().
        """
        if self.shift:
            raise ValueError("shift=True does not go with soft_target_loss: make a LossHead without it")
        classes, weights = _input.soft_targets(target_classes, target_weights, hidden)
        options = replace(self.options, rest=rest)
        if targets is None:
            named = np.where(classes < 0, -np.inf, weights)  # an entry that names no class is not the largest one
            largest = np.take_along_axis(classes, named.argmax(-1)[:, None], -1)[:, 0]
            targets = torch.from_numpy(np.where(largest < 0, _NO_CLASS, largest)).reshape(hidden.shape[:-1])
            options = replace(options, ignore_index=_NO_CLASS)
        soft: dict[str, NDArray[Any]] = {"target_classes": classes, "target_weights": weights}
        return _waited(lambda: self._start(hidden, targets, {"row_weights": row_weights}, normalizer, microbatch, options,
                                           soft=soft))

    def depth_losses(self, hidden: torch.Tensor | Sequence[torch.Tensor], targets: torch.Tensor, *,
                     weights: Sequence[float] | None = None, row_weights: torch.Tensor | None = None,
                     normalizers: Sequence[float] | None = None, microbatch: int | None = None) -> DepthLosses:
        """The losses of several hidden states per token under this head, in one call: multi-token prediction.

            found = head.depth_losses([main, mtp_1, mtp_2], next_tokens, weights=[1.0, 0.3, 0.3])
            found.loss.backward()  # losses[0] + 0.3 * losses[1] + 0.3 * losses[2]

        One pass over the weights serves all depths, and their gradients are those of separate calls. The module's options
        and reduction hold for each depth; deferred=True and reduction "none" do not go with depths (RuntimeError).

        Args:
          hidden: (K, ..., D), or K tensors (..., D) of one shape, dtype and device, which are not copied together.
          targets: (K, ...), those of each depth. Or (...), those of depth 0: then depth k has the target k positions further
            along the last dimension, and none at its last k positions.
          weights: K factors of the depths' losses, finite and not negative. None: 1 each.
          row_weights: (K, ...), or (...) for all depths; as in start().
          normalizers: K numbers that the depths' means divide by. None: the module's for each, or else the number (with
            class weights: weight) of valid targets of the depth. With process_group, those of all ranks.
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
            job.cancel()  # after an interrupt; else it has ended
            raise

    def _number(self, plan: _modes.Plan, microbatch: int | None) -> int:
        """Of the next microbatch."""
        number = self.steps.number(microbatch) if plan.joins_step else self.steps.number_apart()
        if self.deterministic:
            self.steps.check_order(number)
        return number

    def _normalizers(self, labels: Sequence[NDArray[np.int32]], given: Sequence[float] | None, training: bool) -> list[float]:
        """_normalizer() of several depths, with one communication for all of them."""
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
               shift: bool = False) -> PendingHeadLoss:
        """`rows`: the row weights and what the objective takes, by name. `soft`: soft targets, likewise. `targets` are those of
        the options' ignore_index, and are shifted if `shift` says so."""
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
        job.start()
        return PendingHeadLoss(job)

    def _normalizer(self, labels: NDArray[np.int32], options: lossd.LossOptions, given: float | None, training: bool) -> float:
        """What this rank's sum is divided by. In training the ranks' losses average to the loss of all rows."""
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
        """Whether _normalizer() asks the other ranks, in training."""
        return self.reduction == "mean" and given is None and self.normalizer is None

    def _count(self, labels: NDArray[np.int32], options: lossd.LossOptions) -> float:
        """The number of rows that are not ignored; with class weights the sum of the weights of their targets."""
        found = labels[self.has_target(labels, options)]
        if not options.use_class_weights or not _uses_targets(options):
            return float(len(found))
        if self._class_weights is None:
            self._class_weights = self.client.read_tensor(self.head_name, "class_weights")
        if self._classes is not None:
            found = np.searchsorted(self._classes, found)
        return float(self._class_weights[found].sum(dtype=np.float64))

    def has_target(self, labels: NDArray[np.int32], options: lossd.LossOptions) -> NDArray[np.bool_]:
        """Which rows the server does not ignore: their label is a class of the head, or any where no loss is taken of it."""
        valid: NDArray[np.bool_] = labels != options.ignore_index
        if self._classes is None or not _uses_targets(options):
            return valid
        return valid & listed(labels, self._classes)

    def _left_over(self, head: lossd.HeadDescription) -> tuple[int, StepTracker | None]:
        earlier = _step_tracker.succeed(_step_tracker.Feeder(
            head.state.incarnation, self.head_name, self.steps.rank, self.steps.world_size), self.steps)
        sent = 0 if earlier is None else earlier.sent
        if not self.steps.alone:
            has_some = head.step_microbatches + head.step_contributions + head.retained_microbatches > 0  # not after a reset
            return (sent, earlier) if has_some else (0, None)
        return max(head.step_microbatches + head.step_contributions, min(sent, head.retained_microbatches)), earlier

    def join_step(self) -> None:
        """Before something of this trainer joins the open step.

        Begins the step again if all that is in it is an earlier LossHead's of this program; RuntimeError if it is another's. Says
        what is continued.
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
        self.earlier.succeeded()
        self.client.zero_gradients(self.head_name, self.step)
        self.left_over, self.earlier = 0, None
        self.continuation.begin()


def _uses_targets(options: lossd.LossOptions) -> bool:
    """False if a target that is not ignore_index only says that its row counts (LossOptions.refuse_unlisted in loss.proto)."""
    return options.distillation is None or options.distillation.target_weight != 0


class PendingHeadLoss:
    """A loss that is being computed."""

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
        """The loss, or (loss, LossExtras) if the module was made with extras. May be repeated."""
        if self._output is None:
            self._output = self._job.output()
        return self._output

    def cancel(self) -> None:
        """Asks for an early end with lossd.Cancelled; no effect when done. wait() says when it has ended."""
        self._job.cancel()

    @outside_of_compile
    def lazy(self) -> torch.Tensor:
        """The loss at once, as a tensor whose value is NaN until its backward, which waits for the server.

        For trainers that do other work between a loss and its backward, as pipeline schedules do. Without gradients
        there is no backward to wait in: then this is wait(). RuntimeError with extras and in deferred mode, whose
        results are needed before.
        """
        if self._output is None:
            self._output = self._job.lazy_output()
        assert isinstance(self._output, torch.Tensor)
        return self._output


def _waited(begin: Callable[[], PendingHeadLoss]) -> LossOutput:
    """The loss of what `begin` begins, which ends too if this is interrupted."""
    pending: PendingHeadLoss | None = None
    try:
        pending = begin()
        return pending.wait()
    except BaseException:
        if pending is not None:
            pending.cancel()  # after an interrupt; else it has ended
        raise


def _describe(client: lossd.Client, head: str) -> lossd.HeadDescription:
    try:
        return client.describe_head(head)
    except errors.NotFound as error:
        error.add(f"; create it with client.create_head({head!r}, hidden_size=..., vocab_size=...), or "
                  "restore it with client.load_checkpoint()")
        raise
