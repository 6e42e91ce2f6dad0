# SPDX-License-Identifier: Apache-2.0
"""HeadOptimizer: the steps of a server's head in a PyTorch training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

import lossd
from lossd._arguments import known_arguments
from lossd.torch.head import LossHead


class HeadOptimizer(torch.optim.Optimizer):
    """Applies optimizer steps to a LossHead's weights on the server; looks like a torch optimizer.

        optimizer = lossd.torch.HeadOptimizer(head, lr=1e-3, weight_decay=0.1)
        ...
        loss.backward()
        optimizer.step()

    Learning-rate schedulers work on it as on any optimizer: each step reads the hyper-parameters from param_groups[0].

    Gradient clipping and GradScaler work through `stand_in`, a scalar parameter that stands for all of the server's:
    load_grad_norm() sets its gradient to the norm of the server's gradient, and whatever multiplies the stand-in's
    gradient afterwards multiplies the server's at step(). So a norm over the trainer's parameters and the stand-in is
    the global norm, and clipping them clips both:

        head_optimizer.load_grad_norm()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), head_optimizer.stand_in], 1.0)
        optimizer.step(); head_optimizer.step()

    The step is refused if a microbatch is missing on the server. With several trainers (LossHead's process_group) each
    calls step(), and the server applies it once. All must have computed the same number of microbatches;
    `expected_microbatches` says otherwise. Without a group (LossHead's world_size) each calls step() after all have had
    their backward passes.
    """

    @known_arguments
    def __init__(self, head: LossHead, *, lr: float, algorithm: Literal["adamw", "sgd"] = "adamw",
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, decay_vectors: bool = False,
                 skip_non_finite: bool = False, device: torch.device | str | None = None) -> None:
        """
        Args:
          lr, betas, eps, weight_decay: as torch.optim.AdamW.
          lr, momentum, dampening, nesterov, weight_decay: as torch.optim.SGD, with algorithm="sgd".
          decay_vectors: weight decay for bias and norm parameters too.
          skip_non_finite: a step whose gradient is not finite is closed without an update instead of refused;
            `last.skipped` says so.
          device: of the stand-in; GradScaler wants the model's.
        """
        if algorithm not in ("adamw", "sgd"):
            raise ValueError(f"algorithm is {algorithm!r}; it must be 'adamw' or 'sgd'")
        self.stand_in = torch.nn.Parameter(torch.zeros((), device=device))
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
                    "dampening": dampening, "nesterov": nesterov}
        super().__init__([self.stand_in], defaults)
        self.head = head
        head.has_optimizer = True
        self.algorithm = algorithm
        self.decay_vectors = decay_vectors
        self.skip_non_finite = skip_non_finite
        self.last: lossd.StepResult | None = None  # what the server said of the last step
        self._loaded_norm: float | None = None

    def __repr__(self) -> str:
        group = self.param_groups[0]
        own = ("momentum", "dampening", "nesterov") if self.algorithm == "sgd" else ("betas", "eps")
        values = ", ".join(f"{name}={group[name]}" for name in ("lr", *own, "weight_decay"))
        return f"HeadOptimizer({self.head.head_name!r}, {self.algorithm}, {values})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"HeadOptimizer of {self.head.head_name!r} steps weights of a server, so it cannot be copied or pickled: make "
            "another HeadOptimizer(head, lr=...), or save its state_dict(), which has the server save the weights")

    def load_grad_norm(self) -> float:
        """Fetches the norm of the gradient of the open step, LossHead.grad_scale included, for the stand-in's gradient.

        Call it after the last backward, before anything that scales, clips or inspects gradients. Collective if the
        LossHead has a process_group.
        """
        head = self.head
        self._check_settled("load_grad_norm()")
        head.parallel.barrier()  # the others' rows count too
        self._loaded_norm = head.client.grad_norm(head.head_name, head.step) * head.gradient_scale
        self.stand_in.grad = torch.full_like(self.stand_in, self._loaded_norm)
        return self._loaded_norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards what was accumulated in the open step, if anything was; what an interrupted loop left, too.

        The backward of a loss that was computed before raises then. So zero_grad() comes before forward or after
        step(). Collective if the LossHead has a process_group.
        """
        if self.head.parallel.any(self.head.steps.sent > 0 or self.head.left_over > 0):
            self.discard()
        self.stand_in.grad = None
        self._loaded_norm = None

    def discard(self) -> None:
        """Discards what was accumulated in the open step, failed microbatches and all. The step stays open.

        Collective if the LossHead has a process_group.
        """
        head = self.head
        head.steps.discarded()
        if head.earlier is not None:
            head.earlier.succeeded()
        head.sync()
        head.parallel.barrier()  # nothing of the others arrives any more
        if head.parallel.rank == 0:
            head.client.zero_gradients(head.head_name, head.step)
        head.parallel.barrier()  # nothing new arrives before
        self.stand_in.grad = None
        self._loaded_norm = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *,  # type: ignore[override]
             expected_microbatches: list[int] | None = None) -> float | None:
        """Applies the step on the server and opens the next one.

        Args:
          expected_microbatches: wire ids that must be complete. None: those of this trainer, and as many of each
            other one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        head = self.head
        self._check_settled("step()")
        head.parallel.barrier()  # the others have sent their rows, and read the norm if they do
        expected = head.steps.expected() if expected_microbatches is None else expected_microbatches
        self.last = head.client.apply_step(
            head.head_name, head.step, self._hyper_parameters(), grad_multiplier=head.gradient_scale * self._multiplier(),
            decay_vectors=self.decay_vectors, expected_microbatches=expected, skip_non_finite=self.skip_non_finite,
            expected_rows=head.steps.expected_rows())
        head.steps.advance(self.last.state.step)
        self.stand_in.grad = None
        self._loaded_norm = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Hyper-parameters, and under "head" what LossHead.save_state() says: the server saves the head."""
        return {**super().state_dict(), "head": self.head.save_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the head too. KeyError if the state does not name it."""
        if "head" not in state_dict:
            raise KeyError(f"the state of this HeadOptimizer does not say where head {self.head.head_name!r} was saved: it "
                           "is of another kind of optimizer, or of an older lossd")
        self.head.load_state(state_dict["head"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "head"})
        self.stand_in.grad = None
        self._loaded_norm = None

    def _check_settled(self, what: str) -> None:
        """RuntimeError if the open step is not what the trainer means it to be.

        A microbatch that failed is passed over if others succeeded and nothing of it was accumulated: if the server has
        no rows but theirs, which apply_step makes sure of. Several trainers cannot tell, and a deterministic server waits
        for it.
        """
        head = self.head
        if head.steps.alone and head.steps.has_some_failures and not head.deterministic:
            if head.client.describe_head(head.head_name).step_rows == head.steps.rows:
                head.steps.pass_over_failures()
        head.steps.check_settled(what)

    def _hyper_parameters(self) -> lossd.AdamW | lossd.SGD:
        group: dict[str, Any] = self.param_groups[0]
        if self.algorithm == "sgd":
            return lossd.SGD(lr=float(group["lr"]), momentum=group["momentum"], dampening=group["dampening"],
                             nesterov=group["nesterov"], weight_decay=group["weight_decay"])
        return lossd.AdamW(lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                           weight_decay=group["weight_decay"])

    def _multiplier(self) -> float:
        """What the stand-in's gradient was multiplied by since it was loaded."""
        if self._loaded_norm is None or self._loaded_norm == 0.0 or self.stand_in.grad is None:
            return 1.0
        multiplier = float(self.stand_in.grad) / self._loaded_norm
        if not math.isfinite(self._loaded_norm) and self.skip_non_finite:
            return 1.0  # the server skips the step
        if not math.isfinite(multiplier):
            raise ArithmeticError(
                f"the gradient norm of head {self.head.head_name!r} is {self._loaded_norm}, of the stand-in "
                f"{float(self.stand_in.grad)}: skip the step with zero_grad()")
        return multiplier
