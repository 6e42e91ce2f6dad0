# SPDX-License-Identifier: Apache-2.0
"""What frameworks written for GPUs need before their code runs on a CPU, by the page of docs/training that uses them."""

import torch


def megatron() -> None:
    """Allocates buffers on the current CUDA device, and draws dropout from the random numbers of that device."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    torch.cuda.current_device = lambda: torch.device("cpu")
    initialize_rng_tracker(inference_rng_tracker=True)  # one that leaves the random numbers alone


def deepspeed() -> None:
    """Would compile an extension for shared memory, which takes minutes."""
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


PREPARATIONS = {"megatron.md": megatron, "deepspeed.md": deepspeed, "deepspeed-zero.md": deepspeed}
