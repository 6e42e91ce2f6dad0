# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining that leave the server time for the head (torch 2.4 or later)."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import Schedule1F1B


class Overlapped1F1B(Schedule1F1B):
    """1F1B as if the server were one more stage behind the last one; takes Schedule1F1B's arguments.

    Schedule1F1B's last stage needs a loss's gradient as soon as it has the loss, and would wait for the server. Here
    every stage runs one forward more before its first backward, so that the server computes one microbatch's loss while
    the last stage works on another one. Each stage keeps activations of one microbatch more; losses and gradients are
    the same.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # What Schedule1F1B counts forwards before the first backward by; torch has no public name for it.
        self._num_stages: int = self._num_stages + 1
