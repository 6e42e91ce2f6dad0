# SPDX-License-Identifier: Apache-2.0
"""DataParallel: the ranks of torch.distributed that train one head together, and the sums that they compute together.

DistributedDataParallel and fully_shard average the trunk's gradients over the ranks, but the server adds up the gradients of
the head. Trunk and head must both get the gradients of one process that has all rows. Therefore the loss of a rank is `size`
times its share of the loss of all rows. Then the average of the ranks' losses is the loss of all rows, and the averaged
gradients of the trunk are right. The head's gradient is `size` times too large, and is divided when the step is applied.

If the trunk's gradients are added up and not averaged, as over shards of one sequence under tensor parallelism, the loss of a
rank is only its share, and nothing is divided. A group may combine both: `averaged_over` is the number by which the sum of
the trunk's gradients over all its ranks is divided.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch


class _Unsaid:
    """The type of UNSAID, the value of an argument process_group that the caller has not given."""

    def __repr__(self) -> str:
        return "<not given>"


UNSAID: Any = _Unsaid()


class DataParallel:
    """A group of ranks; a single rank without torch.distributed. Its methods are collective: every rank must call them."""

    def __init__(self, group: Any, averaged_over: int | None = None) -> None:
        """
        Args:
          group: a ProcessGroup, a DeviceMesh of one dimension, or None for one rank alone.
          averaged_over: the number by which the sum of the trunk's gradients over the ranks is divided. None: the number of
            ranks.
        """
        if group is not None and hasattr(group, "mesh_dim_names"):  # a DeviceMesh
            if group.ndim != 1:
                raise ValueError(f"process_group is a mesh of {group.ndim} dimensions; give the dimension that the "
                                 "trunk's gradients are averaged over, mesh['dp'], or mesh['dp', 'cp']._flatten()")
            group = group.get_group()
        if isinstance(group, (str, int, list, tuple)):
            raise TypeError(f"process_group is {group!r}; it must be a torch.distributed group, a DeviceMesh of one "
                            "dimension, or None")
        self.group = group
        self.rank = 0 if group is None else torch.distributed.get_rank(group)
        self.size = 1 if group is None else torch.distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("process_group does not contain this rank")
        self.averaged_over = self.size if averaged_over is None else averaged_over
        if not 1 <= self.averaged_over <= self.size:
            raise ValueError(f"averaged_over is {averaged_over}; it must be in [1, {self.size}], the number of ranks of "
                             "process_group")

    @contextlib.contextmanager
    def before_total(self, total_follows: bool = True, values: int = 1) -> Iterator[None]:
        """A context for work before a call of total() or totals(). If the block fails in this rank, then that call fails in
        the other ranks, too, instead of waiting. `total_follows`: whether there is such a call. `values`: its number of
        values."""
        try:
            yield
        except BaseException:
            if total_follows:
                self._sum(math.nan for _ in range(values))
            raise

    def total(self, value: float) -> float:
        """The sum of the ranks' values. RuntimeError if another rank failed before it called total()."""
        return self.totals(value)[0]

    def totals(self, *values: float) -> list[float]:
        """The sums of several values over the ranks, in one communication. RuntimeError as in total()."""
        totals = self._sum(values)
        if math.isnan(totals[0]):
            raise RuntimeError(f"rank {self.rank} of {self.size} stops because another rank failed; its error says why")
        return totals

    def _sum(self, values: Iterable[float]) -> list[float]:
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(list(values), dtype=torch.float64, device=self._device())
        torch.distributed.all_reduce(tensor, group=self.group)
        found: list[float] = tensor.tolist()
        return found

    def at_own_rank(self, value: float) -> list[float]:
        """Arguments for totals(), one for each rank: `value` in this rank's place, else 0. Then totals() returns the value of
        each rank."""
        return [float(value) if rank == self.rank else 0.0 for rank in range(self.size)]

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        self.total(0.0)

    def any(self, value: bool) -> bool:
        """Whether the value is true in at least one rank."""
        return self.total(float(value)) > 0

    def _device(self) -> torch.device:
        nccl = torch.distributed.get_backend(self.group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


def check_said(head: str) -> None:
    """ValueError if several ranks run and LossHead was not told which of them train its head together."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    raise ValueError(
        f"torch.distributed has {distributed.get_world_size()} ranks, and LossHead of {head!r} was not told which of "
        "them train the head together. Under DistributedDataParallel or FSDP give "
        "process_group=torch.distributed.group.WORLD (or the group, or the mesh dimension, over which the trunk's "
        "gradients are averaged). Give process_group=None if the trunk's gradients are not averaged, as in a pipeline "
        "whose last stage is one rank")
