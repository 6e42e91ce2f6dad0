# SPDX-License-Identifier: Apache-2.0
"""Schedules of torch.distributed.pipelining that leave the server time for the head (torch 2.4 or later)."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import Schedule1F1B


class Overlapped1F1B(Schedule1F1B):
    """1F1B as if the server were `slack` more stages behind the last one; takes Schedule1F1B's arguments besides.

    Schedule1F1B's last stage needs a loss's gradient as soon as it has the loss, and would wait for the server. Here
    every stage runs `slack` forwards more before its first backward, so that the server computes a microbatch's loss while
    the last stage works on `slack` other ones: its answer may take that many times a stage's time for a microbatch before
    the last stage waits. Each stage keeps activations of `slack` microbatches more; losses and gradients are the same.
    """

    def __init__(self, *args: Any, slack: int = 1, **options: Any) -> None:
        """ValueError if `slack` is not a positive integer."""
        if isinstance(slack, bool) or not isinstance(slack, int) or slack < 1:
            raise ValueError(f"slack is {slack!r}; it must be a positive integer, the microbatches that hide the server")
        super().__init__(*args, **options)
        # What Schedule1F1B counts forwards before the first backward by; torch has no public name for it.
        self._num_stages: int = self._num_stages + slack
