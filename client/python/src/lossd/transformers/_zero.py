# SPDX-License-Identifier: Apache-2.0
"""Steps under DeepSpeed, whose engine clips and steps inside backward().

ZeRO steps the trainer's optimizer once for each of its groups, and clips by a norm that it computes of its partitions. So the
head is stepped with ZeRO's own step, and its gradient joins ZeRO's norm.
"""

from __future__ import annotations

from typing import Any

import torch

from lossd.transformers._parameter_group import algorithm_of


def check(trainer: Any, tied: bool) -> None:
    """ValueError if a head on a server cannot take part in how the trainer shards its model."""
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ValueError("fsdp= of TrainingArguments shards the head's place in the model as well; use DistributedDataParallel "
                         "(torchrun without fsdp=), DeepSpeed's ZeRO 1 or 2, or fully_shard in a loop of your own")
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise ValueError("a model that from_pretrained has sharded over ranks clips by norms of its own, without the head; "
                         "load it without tp_plan= and use DistributedDataParallel")
    if trainer.args.n_gpu > 1:
        raise ValueError(f"the trainer would copy the model to {trainer.args.n_gpu} GPUs in one process (DataParallel); start it "
                         "with torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES")
    if not trainer.is_deepspeed_enabled:
        return
    stage = trainer.accelerator.state.deepspeed_plugin.zero_stage
    if stage == 3:
        raise ValueError("ZeRO 3 partitions the parameters that stand for the head; use ZeRO 1 or 2")
    if tied:
        raise ValueError('ZeRO steps its own copy of the embeddings that the head shares (tied="share"); use tied="part", or '
                         "train without DeepSpeed")


class ZeroSteps:
    """What the head's steps need of DeepSpeed's engine."""

    def __init__(self, engine: Any, norm: Any, apply: Any, discard: Any) -> None:
        """
        Args:
          norm: () -> the norm of the head's gradient, which is loaded into the stand-in.
          apply: (multiplier) steps the head with its gradient times that.
          discard: () forgets the gradient of a step that DeepSpeed skips.
        """
        self._optimizer, self._norm, self._apply, self._discard = engine.optimizer, norm, apply, discard
        self.base = engine.basic_optimizer
        algorithm_of(self.base)
        partitioned = hasattr(self._optimizer, "bit16_groups") and hasattr(self._optimizer, "scaled_global_norm")
        self.parameters = (self._optimizer.bit16_groups if partitioned
                           else [group["params"] for group in self.base.param_groups])
        self.clips = float(engine.gradient_clipping() or 0.0)
        if self.clips > 0.0 and not partitioned:
            raise ValueError(f"{type(self._optimizer).__name__} of DeepSpeed clips by a norm that lacks the head: use ZeRO 1 or 2, "
                             "or max_grad_norm=0")
        if partitioned:
            self._join_norm()
        step = self._optimizer.step
        self._optimizer.steps_a_head_of_lossd = True

        def step_both(*args: Any, **options: Any) -> Any:
            result = step(*args, **options)
            if getattr(self._optimizer, "overflow", False):
                self._discard()
            else:
                self._apply(self._multiplier() if partitioned else 1.0)
            return result

        self._optimizer.step = step_both

    @staticmethod
    def are_in(engine: Any) -> bool:
        """Whether this engine's steps include the head's already."""
        return getattr(engine.optimizer, "steps_a_head_of_lossd", False)

    def _join_norm(self) -> None:
        of_trunk = self._optimizer.scaled_global_norm

        def scaled_global_norm(*args: Any, **options: Any) -> Any:
            norm, head = of_trunk(*args, **options), self._norm() * float(self._optimizer.loss_scale)
            if float(norm) < 0.0:  # how DeepSpeed says that it is not finite
                return norm
            if isinstance(norm, torch.Tensor):
                return torch.sqrt(norm.double() ** 2 + head ** 2).to(norm.dtype)
            return (norm ** 2 + head ** 2) ** 0.5

        self._optimizer.scaled_global_norm = scaled_global_norm

    def _multiplier(self) -> float:
        """As unscale_and_clip_grads() of ZeRO."""
        norm = getattr(self._optimizer, "_global_grad_norm", None)
        if norm is None or self.clips <= 0.0:
            return 1.0
        return 1.0 / max((float(norm) + 1e-6) / self.clips, 1.0)
