# SPDX-License-Identifier: Apache-2.0
"""attach(): makes a transformers.Trainer train the head on the server together with its model. Rotation keeps the checkpoints
of the trainer and those of the server together."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import lossd
from lossd.torch import HeadOptimizer
from lossd.torch._input import known_arguments
from lossd.transformers import _remote
from lossd.transformers._head_module import ServedHead, base_of, served_head
from lossd.transformers._patch import summed_loss, wrap_forward
from lossd.transformers._remote import ParameterGroup, algorithm_of


def serve_losses(trainer: Any, served: ServedHead) -> None:
    """Changes a trainer in two ways: label smoothing of TrainingArguments is computed on the server, and an evaluation that
    needs only a loss gets no logits (prediction_loss_only)."""
    if trainer.label_smoother is not None:
        trainer.label_smoother = _Smoother(served, trainer.label_smoother.epsilon, trainer.label_smoother.ignore_index)
    compute, predict = trainer.compute_loss, trainer.prediction_step

    def compute_loss(*args: Any, **options: Any) -> Any:
        served.keeps_hidden = isinstance(trainer.label_smoother, _Smoother)
        try:
            return compute(*args, **options)
        finally:
            served.keeps_hidden, served.kept = False, None

    def prediction_step(model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **options: Any) -> Any:
        before, served.evaluation_logits = served.evaluation_logits, not prediction_loss_only
        try:
            return predict(model, inputs, prediction_loss_only, *args, **options)
        finally:
            served.evaluation_logits = before

    trainer.compute_loss, trainer.prediction_step = compute_loss, prediction_step


class _Smoother:
    """Replaces the LabelSmoother of transformers. It computes the smoothed loss on the server, from the hidden states that the
    forward before it has kept (ServedHead.kept)."""

    def __init__(self, served: ServedHead, epsilon: float, ignore_index: int) -> None:
        self.served, self.epsilon, self.ignore_index = served, epsilon, ignore_index

    def __call__(self, model_output: Any, labels: torch.Tensor, shift_labels: bool = False,
                 num_items_in_batch: Any = None) -> torch.Tensor:
        hidden, self.served.kept = self.served.kept, None
        if hidden is None:
            raise RuntimeError("label_smoothing_factor smooths the loss of the forward before, and there was none with this head")
        options = dataclasses.replace(self.served.loss_head.options, label_smoothing=self.epsilon,
                                      ignore_index=self.ignore_index)
        return summed_loss(self.served, hidden, labels, shift_labels, num_items_in_batch, options=options)


# A checkpoint of the trainer names a checkpoint of the server. Both are saved, restored and removed together.

FILE = "lossd_head.json"  # a file in each checkpoint of the trainer; it has the result of LossHead.save_state() as JSON


class Rotation:
    """Records in each checkpoint of a trainer which checkpoint of the server belongs to it.

    When the trainer removes checkpoints (save_total_limit), the server's checkpoints that they name are removed, too, unless
    a remaining checkpoint also names them.
    """

    def __init__(self, trainer: Any, served: ServedHead) -> None:
        # The head's state that was saved with the optimizer for the present checkpoint. None: not saved for it yet.
        self.saved: dict[str, Any] | None = None
        self.restored: dict[str, Any] | None = None  # the head's state from which training continues; None: it begins
        self._trainer, self._served = trainer, served
        # Checkpoints of the server that a folder outside of the trainer's output_dir names. They are never removed.
        self._elsewhere: set[str] = set()
        save, finalize = trainer._save_checkpoint, getattr(trainer, "_finalize_training", None)  # None in old versions
        save_optimizer, load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

        def save_checkpoint(model: Any, trial: Any) -> Any:
            with self._following(trial):
                return save(model, trial)

        def finalize_training(trial: Any, *args: Any, **options: Any) -> Any:
            assert finalize is not None
            with self._following(trial):
                return finalize(trial, *args, **options)

        def save_optimizer_and_scheduler(output_dir: str) -> Any:
            self.saved = None
            result = save_optimizer(output_dir)
            if trainer.is_world_process_zero():
                state = self.saved or served.loss_head.save_state()  # DeepSpeed saves an optimizer without calling its hooks
                Path(output_dir, FILE).write_text(json.dumps(state))
            return result

        def load_optimizer_and_scheduler(checkpoint: str | None) -> Any:
            self.restored = None
            result = load(checkpoint)
            if checkpoint is not None:
                self._restore(Path(checkpoint))
            return result

        trainer._save_checkpoint = save_checkpoint
        if finalize is not None:
            trainer._finalize_training = finalize_training
        trainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
        trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler

    def _restore(self, checkpoint: Path) -> None:
        """Restores the head for a checkpoint of the trainer, unless the state of the optimizer has restored it already."""
        if self.restored is None and (checkpoint / FILE).exists():
            self.restored = json.loads((checkpoint / FILE).read_text())
            self._served.loss_head.load_state(self.restored)
        if self.restored is not None and checkpoint.resolve().parent != Path(self._trainer.args.output_dir).resolve():
            self._elsewhere.add(self.restored["checkpoint"])

    @contextlib.contextmanager
    def _following(self, trial: Any) -> Iterator[None]:
        """If the trainer removes checkpoints within the block, then the server's checkpoints that they name are removed after
        it. Only the trainer's first rank does this."""
        folder = Path(self._trainer._get_output_dir(trial=trial))
        before = _named(folder)
        yield
        if self._trainer.is_world_process_zero():
            self._remove(before, folder)

    def _remove(self, before: dict[Path, str], folder: Path) -> None:
        left = set(_named(folder).values()) | self._elsewhere
        gone = {name for path, name in before.items() if not path.exists()} - left
        for name in sorted(gone):
            try:
                self._served.loss_head.client.delete_checkpoint(name)
            except lossd.NotFound:
                pass  # another client has already removed the checkpoint
            except lossd.LossdError as error:
                warnings.warn(f"checkpoint {name!r} stays on the server, although the trainer has removed its own: {error}",
                              RuntimeWarning, stacklevel=2)


def _named(folder: Path) -> dict[Path, str]:
    """For each checkpoint of a trainer in a folder, by path: the name of the server's checkpoint."""
    found = {}
    for path in folder.glob(f"checkpoint-*/{FILE}"):
        try:
            name = json.loads(path.read_text())["checkpoint"]
        except (OSError, ValueError, KeyError):
            continue  # the trainer is just writing or removing the file
        if name:
            found[path.parent] = name
    return found


_STATE_KEY = "lossd_head"  # the key of the head's state in the state_dict of the trainer's optimizer
_logger = logging.getLogger(__name__)


@known_arguments
def attach(trainer: Any, *, head_lr: float | None = None, head_weight_decay: float | None = None,
           skip_non_finite: bool = False) -> HeadOptimizer | None:
    """Makes a transformers.Trainer, or a subclass of it, train the head of a model that patch() was called with.

    Call it after making the trainer and before train(). Returns the head's optimizer, or None if the head is frozen. A second
    call returns the same optimizer.

    The head is stepped once with each step of the trainer's optimizer (torch's AdamW or SGD), with the hyper-parameters of
    the parameter group that has the head's weight. Gradients are clipped by the global norm of model and head. Each
    checkpoint of the trainer comes with a checkpoint of the head on the server. Both are restored together, and removed
    together (save_total_limit).

    Trainers of trl get log-probabilities and entropies of tokens from the server, for logits at the trainer's temperature.

    Args:
      head_lr: the learning rate of the head. The trainer's scheduler scales it like the learning rate of the parameter group
        that has the head's weight. None: the group's learning rate.
      head_weight_decay: the weight decay of the head. None: the group's weight decay.
      skip_non_finite: as in HeadOptimizer.
    """
    wanted = (head_lr, head_weight_decay, skip_non_finite)
    earlier: _Attached | None = getattr(trainer, "_lossd_attached", None)
    if earlier is not None:
        if wanted not in ((None, None, False), earlier.wanted):
            raise ValueError(f"attach() was called before with head_lr={earlier.wanted[0]}, head_weight_decay="
                             f"{earlier.wanted[1]}, skip_non_finite={earlier.wanted[2]}; a trainer is attached once")
        return earlier.optimizer
    served = served_head(trainer.model)
    _check(trainer, served, head_lr, head_weight_decay)
    # Again after patch(), because trl's trainers replace model.forward.
    wrap_forward(base_of(trainer.model), served, getattr(trainer, "temperature", 1.0))
    serve_losses(trainer, served)
    served.settle()
    attached = _Attached(trainer, served, wanted)
    trainer._lossd_attached = attached
    if attached.optimizer is not None:
        attached.wrap(attached.optimizer)
        trainer.add_callback(attached)
    elif served.could_train:
        _logger.warning("the head %r is frozen, as the model's parameters are that stand for it, and is not trained: "
                        "model.get_output_embeddings().requires_grad_(True) before attach() trains it",
                        served.loss_head.head_name)
    return attached.optimizer


def _check(trainer: Any, served: ServedHead, head_lr: float | None, head_weight_decay: float | None) -> None:
    """ValueError if head_lr or head_weight_decay is not finite or is negative, or if the trainer needs something that the
    server does not compute."""
    for name, value in (("head_lr", head_lr), ("head_weight_decay", head_weight_decay)):
        if value is not None and not 0.0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")
    if trainer.args.fp16:
        raise ValueError("fp16=True scales losses, and the scale is not known to the server; use bf16=True")
    if getattr(trainer, "use_weighting", False):
        raise ValueError("use_weighting=True takes the sum of squared probabilities of each token, which the server does "
                         "not compute")
    if getattr(trainer, "compute_loss_func", None) is not None:
        raise ValueError("compute_loss_func is given logits, and these are on the server: leave it out (label smoothing, z-loss "
                         "and class weights are options of patch() and LossHead), or write a loop with LossHead")
    _remote.check(trainer, served.tied is not None)


class _Attached(TrainerCallback):
    """What attach() adds to a trainer. It alone steps the head: once in each global step of the trainer, however often the
    trainer's optimizer is stepped."""

    def __init__(self, trainer: Any, served: ServedHead, wanted: tuple[float | None, float | None, bool]) -> None:
        self.trainer, self.served, self.wanted = trainer, served, wanted
        self.optimizer: HeadOptimizer | None = None
        if served.trains:
            self.optimizer = HeadOptimizer(served.loss_head, lr=0.0, skip_non_finite=wanted[2], device=served.device)
            self.rotation = Rotation(trainer, served)
        self.armed = False  # whether the trainer is within train(). Only then the head is stepped and is part of the state
        self._group: ParameterGroup | None = None
        self._zero: _remote.ZeroSteps | None = None
        self._applied = -1  # the trainer's global step in which the head was last stepped; -1: it was not

    def wrap(self, head_optimizer: HeadOptimizer) -> None:
        """Changes the trainer so that its optimizer steps the head, and its clipping includes the head's norm."""
        trainer = self.trainer
        if trainer.is_deepspeed_enabled:
            return  # train() creates DeepSpeed's engine, and on_train_begin() then calls bind_engine()
        if trainer.optimizer is not None:
            self.bind(trainer.optimizer)
        create, clip = trainer.create_optimizer, trainer.accelerator.clip_grad_norm_

        def create_optimizer(*args: Any, **kwargs: Any) -> torch.optim.Optimizer:
            exists = trainer.optimizer is not None
            optimizer = create(*args, **kwargs)
            if not exists:
                self.bind(optimizer)
            return optimizer

        def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Any:
            if not (self.armed and self.served.trains):
                return clip(parameters, *args, **kwargs)
            self.load_norm()
            return clip([*parameters, head_optimizer.stand_in], *args, **kwargs)

        trainer.create_optimizer = create_optimizer
        trainer.accelerator.clip_grad_norm_ = clip_grad_norm_

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes the trainer's optimizer step the head before its own step, and save and restore the head with its state."""
        assert self.optimizer is not None
        self.optimizer.algorithm = algorithm_of(optimizer)
        parameters = [group["params"] for group in optimizer.param_groups]
        self._group = ParameterGroup(self.served, optimizer, parameters, *self.wanted[:2])
        if self.served.tied is not None:
            self._leave_out(optimizer, self.served.tied.weight)
        optimizer.register_step_pre_hook(lambda *_: self.step())
        optimizer.register_state_dict_post_hook(self.add_state)
        optimizer.register_load_state_dict_pre_hook(self.take_state)

    def bind_engine(self, engine: Any) -> None:
        """Makes DeepSpeed's engine step the head. Under DeepSpeed this takes the place of bind()."""
        assert self.optimizer is not None
        self._zero = _remote.ZeroSteps(engine, self.load_norm, self.step, self.optimizer.discard)
        self.optimizer.algorithm = algorithm_of(self._zero.base)
        self._group = ParameterGroup(self.served, self._zero.base, self._zero.parameters, *self.wanted[:2])

    @staticmethod
    def _leave_out(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
        """Removes the embeddings' weight from the trainer's optimizer. With tied="share" the server steps it."""
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not weight]

    def load_norm(self) -> float:
        """Returns the norm of the head's gradient. Called after the last backward of a step. With tied="share", first adds the
        gradient of the embeddings to the head's."""
        assert self.optimizer is not None
        if self.served.tied is not None:
            self.served.tied.add_gradient()
        return self.optimizer.load_grad_norm()

    def step(self, multiplier: float = 1.0) -> None:
        """Steps the head with its gradient times `multiplier`, unless it was already stepped in this global step of the
        trainer."""
        now = self.trainer.state.global_step
        if not self.armed or not self.served.trains or self._applied == now:
            return
        assert self.optimizer is not None and self._group is not None
        self._group.copy_to(self.optimizer)
        if self.served.tied is not None:
            self.served.tied.add_gradient()
        if multiplier != 1.0 and self.optimizer.stand_in.grad is not None:
            self.optimizer.stand_in.grad.mul_(multiplier)
        self.optimizer.step()
        if self.served.tied is not None:
            self.served.tied.pull()
        self._applied = now

    def add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A hook of the trainer's optimizer: adds the head's state to its state_dict."""
        if self.armed:
            self.rotation.saved = state[_STATE_KEY] = self.served.loss_head.save_state()
        return state

    def take_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """A hook of the trainer's optimizer: restores the head from a state_dict, and returns the state_dict without it."""
        if _STATE_KEY in state:
            self.served.loss_head.load_state(state[_STATE_KEY])
            self.rotation.restored = state[_STATE_KEY]
        return {key: value for key, value in state.items() if key != _STATE_KEY}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self.optimizer is not None
        if state.global_step > 0 and self.rotation.restored is None:
            raise RuntimeError(
                f"training resumes at step {state.global_step}, but the optimizer's state does not say where the head "
                f"{self.served.loss_head.head_name!r} is: it was saved without lossd.transformers.attach()")
        if self.trainer.is_deepspeed_enabled and not _remote.ZeroSteps.are_in(self.trainer.model_wrapped):
            self.bind_engine(self.trainer.model_wrapped)
        self.served.forget_copies()
        self.optimizer.zero_grad()
        self._applied = -1
        self.armed = self.served.armed = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.armed = self.served.armed = False
        self.rotation.restored = None
