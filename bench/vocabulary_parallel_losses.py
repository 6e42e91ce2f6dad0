# SPDX-License-Identifier: Apache-2.0
"""Linear cross-entropy whose classes are divided among ranks, of PyTorch, Megatron, Liger and Cut Cross-Entropy.

A method is a function of (hidden [N, D], weight [V/G, D], targets [N], factor). Every rank gives the same hidden states
and targets, and the weight of its classes. The function adds the gradients of factor * mean loss to weight.grad and to
hidden.grad, which is that of all classes, and returns the mean loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

Method = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class ClassParallelLinear(torch.autograd.Function):
    """Logits [N, V/G] of this rank's classes. The gradient of the hidden states is summed over the ranks in their dtype,
    while that of the weight is computed, as Megatron's column-parallel linear layer does."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        of_hidden = gradient @ weight
        sum_over_ranks = dist.all_reduce(of_hidden, async_op=True)
        of_weight = gradient.T @ hidden
        sum_over_ranks.wait()
        return of_hidden, of_weight


def torch_loss_parallel(device: str) -> Method:
    """Logits as a DTensor, and the cross-entropy of torch.distributed.tensor.parallel.loss_parallel, in float32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.parallel import loss_parallel
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
        logits = ClassParallelLinear.apply(hidden, weight).float()
        with loss_parallel():
            loss = F.cross_entropy(DTensor.from_local(logits, mesh, [Shard(1)], run_check=False), targets)
            (loss * factor).backward()
        return loss.detach().to_local()

    return run


def of_logits(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Method:
    """loss_of: losses [N, 1] of logits [N, 1, V/G] and targets [N, 1]."""
    def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
        loss = loss_of(ClassParallelLinear.apply(hidden, weight)[:, None], targets[:, None]).mean()
        (loss * factor).backward()
        return loss.detach()

    return run


def megatron() -> dict[str, Method]:
    """Megatron-core's loss, and the one whose steps are compiled, which gives gradients of logits in bf16."""
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    group = parallel_state.get_tensor_model_parallel_group()
    return {"megatron": of_logits(vocab_parallel_cross_entropy),
            "megatron_fused": of_logits(lambda logits, targets: fused_vocab_parallel_cross_entropy(logits, targets, group))}


def liger() -> dict[str, Method]:
    from liger_kernel.transformers.vocab_parallel_cross_entropy import LigerVocabParallelCrossEntropy
    loss = LigerVocabParallelCrossEntropy()
    return {"liger": of_logits(lambda logits, targets: loss(logits, targets, dist.group.WORLD))}


def cut_cross_entropy() -> dict[str, Method]:
    """Without logits. It has VocabParallelOptions in its repository; 25.1.1, which is on PyPI, does not."""
    from cut_cross_entropy import VocabParallelOptions, linear_cross_entropy

    def method(implementation: str) -> Method:
        def run(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, factor: float) -> torch.Tensor:
            begin = dist.get_rank() * weight.shape[0]
            options = VocabParallelOptions(begin, begin + weight.shape[0], group=dist.group.WORLD)
            loss = linear_cross_entropy(hidden, weight, targets, impl=implementation, vocab_parallel_options=options)
            (loss * factor).backward()
            return loss.detach()
        return run

    return {"cce": method("cce"), "cce_exact": method("cce_exact")}


def methods(device: str) -> tuple[dict[str, Method], dict[str, str]]:
    """Those that can be imported, and why others cannot. Collective; torch.distributed is initialized."""
    found, without = {"torch": torch_loss_parallel(device)}, {}
    for name, make in (("megatron", megatron), ("liger", liger), ("cce", cut_cross_entropy)):
        try:
            found.update(make())
        except ImportError as error:
            without[name] = str(error)
    return found, without
