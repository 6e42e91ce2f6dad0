# SPDX-License-Identifier: Apache-2.0
"""The losses that a Trainer computes itself, and what its evaluations need besides a loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from lossd.transformers._head_module import ServedHead
from lossd.transformers._patch import summed_loss


def serve_losses(trainer: Any, served: ServedHead) -> None:
    """Smoothed labels of TrainingArguments go to the server; predictions get logits, and evaluations without them do not."""
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
    """As transformers' LabelSmoother, of the hidden states of the forward before."""

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
