# SPDX-License-Identifier: Apache-2.0
"""HeadOptimizer: applies the steps of a server's head in a PyTorch training loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NoReturn

import torch

import lossd
from lossd import errors
from lossd.torch import _step_tracker
from lossd.torch._input import known_arguments
from lossd.torch._stand_in import Gradient, Notes, StandIn
from lossd.torch.embedding import ServedEmbedding
from lossd.torch.head import LossHead


class HeadOptimizer(torch.optim.Optimizer):
    """Applies optimizer steps on the server to the weights of a LossHead or a ServedEmbedding. It is used like a torch
    optimizer.

        optimizer = lossd.torch.HeadOptimizer(head, lr=1e-3, weight_decay=0.1)
        ...
        loss.backward()
        optimizer.step()

    Learning-rate schedulers work as with any optimizer: each step reads the hyper-parameters from param_groups[0].

    Gradient clipping and GradScaler work through `stand_in`, a scalar parameter that stands for all of the server's
    parameters. load_grad_norm() sets the stand-in's gradient to the norm of the server's gradient. If other code then
    multiplies the stand-in's gradient by a factor, step() multiplies the server's gradient by the same factor. So the norm
    over the trainer's parameters and the stand-in is the global norm, and clipping both clips the trunk and the head:

        head_optimizer.load_grad_norm()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), head_optimizer.stand_in], 1.0)
        optimizer.step(); head_optimizer.step()

    The step is refused if a microbatch is missing on the server. If there are several trainers, each trainer calls step(), and
    the server applies the step once. All trainers must have computed the same number of microbatches, unless
    `expected_microbatches` lists others. Trainers without a process_group (LossHead's world_size) must call step() only after
    all of them have finished their backward passes.
    """

    steps_a_head = True

    @known_arguments
    def __init__(self, head: LossHead | ServedEmbedding, *, lr: float, algorithm: Literal["adamw", "sgd"] = "adamw",
                 betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
                 momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False, decay_vectors: bool = False,
                 lazy_rows: bool = False, skip_non_finite: bool = False, device: torch.device | str | None = None,
                 continues: bool = False) -> None:
        """
        Args:
          head: a LossHead or a ServedEmbedding. A LossHead and a ServedEmbedding that was made from it share one optimizer:
            give either of them.
          lr, betas, eps, weight_decay: as in torch.optim.AdamW.
          lr, momentum, dampening, nesterov, weight_decay: as in torch.optim.SGD, with algorithm="sgd".
          decay_vectors: apply weight decay to bias and norm parameters, too.
          lazy_rows: rows of the weight whose gradient of the step is 0 in every element keep their values and moments, as in
            torch.optim.SparseAdam (docs/training/lazy-rows.md). It is a hyper-parameter: `param_groups[0]["lazy_rows"]`.
          skip_non_finite: if the gradient of a step is not finite, close the step without an update; then `last.skipped` is
            true. False: step() raises.
          device: the device of the stand-in. GradScaler needs it to be the model's device.
          continues: continue with the moments and the count of steps that another program left on the server. False: begin
            like a new torch optimizer at the first step, unless this program has restored a state of the head before, by
            load_state_dict() of this object or of the LossHead, or by Client.load_checkpoint.
        """
        if isinstance(head, ServedEmbedding):
            head = head.head
        if not isinstance(head, LossHead):
            raise TypeError(f"head is a {type(head).__name__}; it must be a LossHead or a ServedEmbedding: "
                            "HeadOptimizer(head, lr=...)")
        if algorithm not in ("adamw", "sgd"):
            raise ValueError(f"algorithm is {algorithm!r}; it must be 'adamw' or 'sgd'")
        self.stand_in = StandIn.on(device, self._gradient_now)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
                    "dampening": dampening, "nesterov": nesterov, "lazy_rows": lazy_rows}
        super().__init__([self.stand_in], defaults)
        self.head = head
        head.has_optimizer = True
        _step_tracker.optimizer_made(head.client.target, head.head_name)
        self.algorithm = algorithm
        self.decay_vectors = decay_vectors
        self.skip_non_finite = skip_non_finite
        self.last: lossd.StepResult | None = None  # the server's answer to the last step
        self._continues = continues
        self._notes: Notes | None = None  # the notes of the gradient that the stand-in got last

    def __repr__(self) -> str:
        group = self.param_groups[0]
        own = ("momentum", "dampening", "nesterov") if self.algorithm == "sgd" else ("betas", "eps")
        lazy = ("lazy_rows",) if group.get("lazy_rows", False) else ()
        values = ", ".join(f"{name}={group[name]}" for name in ("lr", *own, "weight_decay", *lazy))
        return f"HeadOptimizer({self.head.head_name!r}, {self.algorithm}, {values})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"HeadOptimizer of {self.head.head_name!r} steps weights of a server, so it cannot be copied or pickled: make "
            "another HeadOptimizer(head, lr=...), or save its state_dict(), which has the server save the weights")

    def load_grad_norm(self) -> float:
        """Sets the stand-in's gradient to the norm of the gradient of the open step, and returns the norm. The norm contains
        LossHead.grad_scale.

        Call it after the last backward. A read of the stand-in's gradient, as in clipping and GradScaler, loads the norm,
        too. If the stand-in's gradient was already multiplied, returns its present value instead. Collective if the LossHead
        has a process_group.
        """
        held = self.stand_in.held
        if not isinstance(held, Gradient) or held.notes.moment != self.head.steps.moment or not held.notes.touched:
            held = self.stand_in.held = self._load()
        return 0.0 if held is None else float(held)

    def _gradient_now(self, held: torch.Tensor | None) -> torch.Tensor | None:
        """The stand-in's gradient. `held`: the gradient that it has had until now. Returns `held` if other code has changed it,
        or if the open step has not changed since it was loaded. Else loads a new one."""
        head = self.head
        if not head.train_head or (held is not None and not isinstance(held, Gradient)):
            return held
        if isinstance(held, Gradient) and (held.notes.touched or held.notes.moment == head.steps.moment):
            return held
        if head.parallel.size == 1 and not head.steps.has_gradients:
            return None
        return self._load()

    def _load(self) -> Gradient | None:
        """The norm of the open step's gradient, as a new gradient of the stand-in. None, as for any parameter, if nothing was
        accumulated."""
        head = self.head
        if not head.train_head:
            return None
        with head.parallel.before_total(values=3 * head.parallel.size):
            self._check_settled("load_grad_norm()")
            has_gradients = head.steps.has_gradients or self._others_have_rows()
        _, scale, _ = self._together(has_gradients, head.gradient_scale)  # if only other ranks have rows, there is a gradient, too
        if scale is None:
            return None
        norm = head.client.grad_norm(head.head_name, head.step) * scale
        if not math.isfinite(norm):
            head.watch.excused()  # GradScaler skips this step, so step() will not be called
        self._notes = Notes(norm, head.steps.moment)
        return Gradient.of(torch.full((), norm, device=self.stand_in.device), self._notes)

    def _others_have_rows(self) -> bool:
        """Whether the open step has rows that this trainer has not sent, such as rows of trainers that it cannot ask."""
        head = self.head
        if head.parallel.rank > 0 or (head.parallel.size > 1 and head.steps.world_size == head.parallel.size):
            return False
        description = head.client.describe_head(head.head_name)
        if not head.steps.alone and description.state.step != head.step:
            return True  # another trainer has already applied the step
        return description.step_microbatches > 0 or description.step_contributions > 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discards what was accumulated in the open step, also what an interrupted loop left there.

        Afterwards, the backward of a loss that was computed before zero_grad() raises. So call zero_grad() before forward or
        after step(). Collective if the LossHead has a process_group.
        """
        if self.head.parallel.any(self.head.steps.sent > 0 or self.head.left_over > 0):
            self.head.watch.discarded()
            self.discard()
        self.stand_in.grad = self._notes = None

    def discard(self) -> None:
        """Discards everything that was accumulated in the open step, and forgets failed microbatches. The step stays open.

        Collective if the LossHead has a process_group.
        """
        head = self.head
        head.steps.discarded()
        if head.earlier is not None:
            head.earlier.taken_over()
        head.begin_again()
        head.parallel.barrier()  # after this, the other ranks send nothing more for the old contents
        if head.parallel.rank == 0:
            head.client.zero_gradients(head.head_name, head.step)
        head.parallel.barrier()  # before this, no rank sends anything new
        self.stand_in.grad = self._notes = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None, *,  # type: ignore[override]
             expected_microbatches: list[int] | None = None) -> float | None:
        """Applies the step on the server and opens the next one.

        Args:
          expected_microbatches: the wire ids that must be complete. None: the ids of this trainer, and the same number of ids
            of each other trainer. With a process_group, ranks that have computed no microbatch are left out.

        Returns the value of `closure`, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        head = self.head
        if not head.train_head:
            return loss
        with head.parallel.before_total(values=3 * head.parallel.size):
            self._check_settled("step()")
            multiplier = head.gradient_scale * self._multiplier()
            has_gradients = head.steps.has_gradients or self._others_have_rows()
            continues = self._continues or head.continuation.is_loaded or self._others_continue()
        # At this point the other ranks have sent their rows, and have read the norm if they need it.
        with_gradients, multiplier_of_all, continuing = self._together(has_gradients, multiplier, continues)
        if multiplier_of_all is None:
            return loss  # like a parameter without a gradient
        expected = expected_microbatches
        if expected is None:
            whole = head.steps.world_size == head.parallel.size  # else it is not known which trainers have microbatches
            expected = head.steps.expected(with_gradients if whole else None)
        self.last = self._apply(expected, multiplier_of_all, begins=not continuing)
        self._continues = True
        head.continuation.forget()
        head.watch.stepped()
        head.steps.advance(self.last.state.step)
        self.stand_in.grad = self._notes = None
        return loss

    def _together(self, has_gradients: bool, multiplier: float,
                  continues: bool = False) -> tuple[list[bool], float | None, bool]:
        """Exchanges these values with the other ranks. Returns for each rank whether it has gradients, the multiplier of the
        gradients (None: no rank has gradients), and whether any rank continues.

        A rank without gradients does not know the factor of the losses, so it takes the multiplier of the first rank that has
        gradients.
        """
        parallel = self.head.parallel
        totals = parallel.totals(*parallel.at_own_rank(has_gradients),
                                 *parallel.at_own_rank(multiplier if has_gradients else 0.0),
                                 *parallel.at_own_rank(continues))
        with_gradients = [total > 0 for total in totals[:parallel.size]]
        if not any(with_gradients):
            return with_gradients, None, False
        of_first = totals[parallel.size + with_gradients.index(True)]
        return with_gradients, multiplier if has_gradients else of_first, any(totals[2 * parallel.size:])

    def _apply(self, expected: list[int], multiplier: float, begins: bool) -> lossd.StepResult:
        head = self.head
        try:
            return head.client.apply_step(
                head.head_name, head.step, self._hyper_parameters(), grad_multiplier=multiplier,
                decay_vectors=self.decay_vectors, expected_microbatches=expected, skip_non_finite=self.skip_non_finite,
                expected_rows=head.steps.expected_rows(), begin_optimizer=begins)
        except errors.LossdError as error:
            if begins and error.field == "begin_optimizer" and head.steps.world_size > head.parallel.size:
                # Another trainer, which knew of a restored checkpoint, has sent this step first.
                return self._apply(expected, multiplier, begins=False)
            head.continuation.explain(error)
            raise

    def _others_continue(self) -> bool:
        """Whether training continues from a checkpoint that any client has restored. Only for trainers without a process
        group, which cannot ask each other: all of them must give the server the same answer at the first step."""
        head = self.head
        return head.steps.world_size > head.parallel.size and head.continuation.is_loaded_on_server()

    def state_dict(self) -> dict[str, Any]:
        """The hyper-parameters, and under "head" the result of LossHead.save_state(). The server saves the head for it."""
        begun = self._continues or self.head.continuation.is_loaded
        return {**super().state_dict(), "head": {**self.head.save_state(), "begun": begun}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the hyper-parameters, and the head on the server. KeyError if the state does not name the head.

        Accelerate's prepare() saves a state before the first step and restores it. After such a state this optimizer still
        begins at its first step, like a new one.
        """
        if "head" not in state_dict:
            raise KeyError(f"the state of this HeadOptimizer does not say where head {self.head.head_name!r} was saved: it "
                           "is of another kind of optimizer, or of an older lossd")
        self.head.load_state(state_dict["head"])
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "head"})
        self._continues = bool(state_dict["head"].get("begun", True))
        if not self._continues:
            self.head.continuation.forget()
        self.stand_in.grad = self._notes = None

    def _check_settled(self, what: str) -> None:
        """RuntimeError if the open step is not complete (StepTracker.check_settled).

        Failed microbatches are passed over, so that the step can be applied without them, if other microbatches have succeeded
        and the server has exactly the rows of those. apply_step checks this again. It is not possible with several trainers,
        which do not know each other's rows, nor with a deterministic server, which waits for the failed microbatch.
        """
        head = self.head
        head.row_gradients.settle()
        if head.steps.alone and head.steps.has_some_failures and not head.deterministic:
            if head.client.describe_head(head.head_name).step_rows == head.steps.rows:
                head.steps.pass_over_failures()
        head.steps.check_settled(what)

    def _hyper_parameters(self) -> lossd.AdamW | lossd.SGD:
        group: dict[str, Any] = self.param_groups[0]
        lazy_rows = bool(group.get("lazy_rows", False))  # states of earlier versions do not have it
        if self.algorithm == "sgd":
            return lossd.SGD(lr=float(group["lr"]), momentum=group["momentum"], dampening=group["dampening"],
                             nesterov=group["nesterov"], weight_decay=group["weight_decay"], lazy_rows=lazy_rows)
        return lossd.AdamW(lr=float(group["lr"]), betas=group["betas"], eps=group["eps"],
                           weight_decay=group["weight_decay"], lazy_rows=lazy_rows)

    def _multiplier(self) -> float:
        """The factor by which the stand-in's gradient was multiplied after it was loaded. RuntimeError if the factor is not
        known, or must not be applied to the server's gradient."""
        held, notes, name = self.stand_in.held, self._notes, self.head.head_name
        if held is None:
            return 1.0
        if notes is None:
            raise RuntimeError(f"the stand-in's gradient of head {name!r} was set, but never loaded: load_grad_norm() "
                               f"comes first, and then what is to multiply it. {_WAY_OUT}")
        if notes.loaded == 0.0 or (not math.isfinite(notes.loaded) and self.skip_non_finite):
            return 1.0  # a gradient of 0 needs no factor, and the server skips a step that is not finite
        multiplier = float(held) / notes.loaded
        if not math.isfinite(multiplier):
            raise ArithmeticError(
                f"the gradient norm of head {name!r} is {notes.loaded}, of the stand-in {float(held)}: skip the step with "
                "zero_grad()")
        refusal = notes.refusal(multiplier, isinstance(held, Gradient), self.head.steps.moment)
        if refusal is not None:
            raise RuntimeError(f"the stand-in's gradient of head {name!r} is the 2-norm of the head's, and it {refusal}, so "
                               f"it does not say what the head's is to be multiplied by. {_WAY_OUT}")
        return multiplier


_WAY_OUT = ("Clip by the 2-norm, torch.nn.utils.clip_grad_norm_([*model.parameters(), head_optimizer.stand_in], max_norm), "
            "or leave the stand-in out and clip the rest; zero_grad() discards the step")
