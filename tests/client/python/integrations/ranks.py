# SPDX-License-Identifier: Apache-2.0
"""Functions that run in several processes, the ranks of a torch.distributed group (gloo) on the CPU."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


# Runs a function in several processes.

JOIN_SECONDS = int(os.environ.get("LOSSD_TEST_JOIN_SECONDS", "1200"))


def run_ranks(world_size: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What work(rank, *arguments) returned in each rank; AssertionError if one failed.

    `work` is a function of a module, and what it returns can be saved by torch.save.
    """
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.get_context("spawn")
        processes = [context.Process(target=_run, args=(rank, world_size, folder, work, arguments))
                     for rank in range(world_size)]
        for process in processes:
            process.start()
        for rank, process in enumerate(processes):
            process.join(JOIN_SECONDS)
            if process.exitcode != 0:
                for each in processes:
                    each.kill()
                raise AssertionError(f"rank {rank} of {world_size} ended with {process.exitcode}")
        return [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(world_size)]


def _run(rank: int, world_size: int, folder: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(0.5 * JOIN_SECONDS)
    torch.distributed.init_process_group("gloo", f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    result = work(rank, *arguments)
    torch.distributed.barrier()
    faulthandler.cancel_dump_traceback_later()
    torch.save(result, Path(folder, str(rank)))
    torch.distributed.destroy_process_group()


# What frameworks written for GPUs need before their code runs on a CPU, by the page of docs/training that uses them.


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
