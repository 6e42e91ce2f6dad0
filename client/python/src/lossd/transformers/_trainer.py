# SPDX-License-Identifier: Apache-2.0
"""attach(): a Trainer that trains the head on the server along with its model."""

from __future__ import annotations

from typing import Any, Literal

import torch
from transformers import TrainerCallback

from lossd._arguments import known_arguments
from lossd.torch import HeadOptimizer
from lossd.transformers._head_module import ServedHead, served_head
from lossd.transformers._patch import wrap_forward

_STATE_KEY = "lossd_head"  # in the state of the trainer's optimizer


@known_arguments
def attach(trainer: Any, *, skip_non_finite: bool = False) -> HeadOptimizer | None:
    """Makes a transformers.Trainer, or one derived from it, train the head of a model that patch() was called with.

    Call it after making the trainer and before train(). The head is stepped with the trainer's optimizer (torch's AdamW
    or SGD), with its learning rate and other hyper-parameters; it is clipped by the global norm of model and head; it is
    saved and restored with the optimizer's state, as a checkpoint on the server. Returns the head's optimizer; None if
    the head is frozen.

    Trainers of trl get log-probabilities and entropies of tokens from the server, at their temperature.
    """
    if trainer.args.fp16:
        raise ValueError("fp16=True scales losses, and the scale is not known to the server; use bf16=True")
    if getattr(trainer, "use_weighting", False):
        raise ValueError("use_weighting=True takes the sum of squared probabilities of each token, which the server does "
                         "not compute")
    served = served_head(trainer.model)
    base = trainer.model.get_base_model() if hasattr(trainer.model, "get_base_model") else trainer.model
    wrap_forward(base, served, getattr(trainer, "temperature", 1.0))  # trl's trainers have put theirs in its place
    if not served.loss_head.train_head:
        return None
    attached = _Attached(served, skip_non_finite)
    trainer.add_callback(attached)
    attached.wrap(trainer)
    return attached.optimizer


class _Attached(TrainerCallback):
    def __init__(self, served: ServedHead, skip_non_finite: bool) -> None:
        self.served = served
        self.optimizer = HeadOptimizer(served.loss_head, lr=0.0, skip_non_finite=skip_non_finite, device=served._device)
        self.armed = False  # the trainer's optimizer is complete: its state includes the head
        self.restored = False

    def wrap(self, trainer: Any) -> None:
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
            self.finish_gradient()
            return clip([*parameters, self.optimizer.stand_in], *args, **kwargs)

        trainer.create_optimizer = create_optimizer
        trainer.accelerator.clip_grad_norm_ = clip_grad_norm_

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        kinds: dict[type, Literal["adamw", "sgd"]] = {torch.optim.AdamW: "adamw", torch.optim.SGD: "sgd"}
        if type(optimizer) not in kinds:
            raise ValueError(f"the trainer's optimizer is {type(optimizer).__name__}; a head on a server steps with "
                             "torch's AdamW (optim='adamw_torch') or SGD (optim='sgd')")
        self.optimizer.algorithm = kinds[type(optimizer)]
        if self.served.tied is not None:
            self._leave_out(optimizer, self.served.tied.weight)
        optimizer.register_step_pre_hook(self.step)
        optimizer.register_state_dict_post_hook(self.add_state)
        optimizer.register_load_state_dict_pre_hook(self.take_state)

    @staticmethod
    def _leave_out(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> None:
        """The server steps the shared matrix."""
        for group in optimizer.param_groups:
            group["params"] = [each for each in group["params"] if each is not weight]

    def finish_gradient(self) -> None:
        if self.served.tied is not None:
            self.served.tied.add_gradient()
        self.optimizer.load_grad_norm()

    def step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Before the trainer's optimizer steps: with the hyper-parameters of its decayed parameters."""
        if not self.armed:
            return
        group = max(optimizer.param_groups, key=lambda group: group["weight_decay"])
        ours = self.optimizer.param_groups[0]
        for name in ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov"):
            if name in group:
                ours[name] = group[name]
        if self.served.tied is not None:
            self.served.tied.add_gradient()
        self.optimizer.step()
        if self.served.tied is not None:
            self.served.tied.pull()

    def add_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if self.armed:
            state[_STATE_KEY] = self.served.loss_head.save_state()
        return state

    def take_state(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if _STATE_KEY in state:
            self.served.loss_head.load_state(state[_STATE_KEY])
            self.restored = True
        return {key: value for key, value in state.items() if key != _STATE_KEY}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step > 0 and not self.restored:
            raise RuntimeError(
                f"training resumes at step {state.global_step}, but the optimizer's state does not say where the head "
                f"{self.served.loss_head.head_name!r} is: it was saved without lossd.transformers.attach()")
        self.served.forget_copies()
        self.optimizer.zero_grad()
        self.armed = self.served.armed = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.armed = self.served.armed = self.restored = False
