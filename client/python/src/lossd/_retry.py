# SPDX-License-Identifier: Apache-2.0
"""When a call is sent again, and after how long. Stateless; only jitter() is not arithmetic.

The caller brings the time that is left and the random factor. client/cpp/core.h does the same;
tests/client/golden/waits.json holds both to it.
"""

from __future__ import annotations

import random

from lossd import errors
from lossd.types import RetryOptions


def jitter() -> float:
    """A random factor in [0.8, 1.2], so that clients that failed together do not come back together."""
    return random.uniform(0.8, 1.2)


def may_repeat(error: errors.LossdError, restartable: bool) -> bool:
    """Whether a call that ended with `error` may be sent again: errors.is_transient; Aborted if it is `restartable`.

    A call is restartable if nothing of it stays when it fails, so that it may begin again with what it finds.
    Restarted and StepDiscarded are for the trainer to deal with.
    """
    return errors.is_transient(error) or (restartable and type(error) is errors.Aborted)


def wait_before_repeat(retry: RetryOptions, error: errors.LossdError, attempt: int, left: float, factor: float,
                       restartable: bool = False) -> float | None:
    """Seconds between attempt number `attempt` (1, 2, ...), which ended with `error`, and the next one.

    None if there is no next one: the error may not be repeated, max_attempts were made, or the wait would outlast
    `left` seconds.
    """
    if not may_repeat(error, restartable) or attempt >= retry.max_attempts:
        return None
    wait = min(retry.initial_backoff * 4.0 ** min(attempt - 1, 16), retry.max_backoff) * factor
    return wait if wait < left else None


def with_attempts(error: errors.LossdError, attempts: int) -> errors.LossdError:
    """The error of a call after its last attempt, which says how often it was tried, if twice.

    One that may not be repeated says besides that an attempt before it, which had no answer, may have taken effect.
    """
    if attempts > 1:
        error.add(f"; tried {attempts} times")
        if not may_repeat(error, restartable=True):
            error.add(", and an earlier attempt may have taken effect")
    return error
