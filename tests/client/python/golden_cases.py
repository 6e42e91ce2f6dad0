# SPDX-License-Identifier: Apache-2.0
"""What golden cases (tests/client/golden/README.md) have in common: their members, and the errors they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from lossd import errors
from lossd.v1 import types_pb2

Case = dict[str, Any]

CODES: dict[type[errors.LossdError], str] = {
    errors.Restarted: "RESTARTED", errors.StepDiscarded: "DISCARDED",
    **{kind: code.name for code, kind in errors._CLASSES.items()}, errors.Internal: "INTERNAL"}


def error_named(code: str, message: str, detail: types_pb2.ErrorDetail | None = None) -> errors.LossdError:
    kind = next(kind for kind, name in CODES.items() if name == code)
    return kind(message, detail)


def check_members(case: Case, required: Iterable[str], optional: Iterable[str] = ()) -> None:
    """Fails for a case with a member that is not looked at, or without one that is."""
    members = set(case) - {"name"}
    assert not members - set(required) - set(optional), f"unknown members {members - set(required) - set(optional)}"
    assert not set(required) - members, f"missing members {set(required) - members}"


def check_fails(expected: Case, error: errors.LossdError) -> None:
    check_members(expected, ("error", "says"), ("at", "before", "now"))
    assert CODES[type(error)] == expected["error"], error
    assert expected["says"] in str(error)
    if "now" in expected:
        assert error.incarnation == expected["now"]


def expect(expected: Case, action: Callable[[], Any]) -> Any:
    """Runs the action; the error must be `fails` if the case has it, else there must be none."""
    if "fails" not in expected:
        return action()
    try:
        action()
    except errors.LossdError as error:
        check_fails(expected["fails"], error)
    else:
        raise AssertionError(f"no error; expected {expected['fails']}")
    return None
