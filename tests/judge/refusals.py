# SPDX-License-Identifier: Apache-2.0
"""When a call may be refused: a refusal changes nothing, and has to have its reason in the state of that moment."""

from __future__ import annotations

from typing import Any

from history import Event, History
from state import YES, State

# Where a server answers otherwise than docs/consistency.md says, a run can go on judging the rest of the rules. Each
# name is one such answer; a server that keeps the page needs none of them.
DEVIATIONS = {
    "closed-step-code": "a stream that accumulates and whose step was closed ends with FAILED_PRECONDITION, and not "
                        "with ABORTED",
}

_STREAMS = ("ComputeLoss", "Backward")


def rivals(event: Event, history: History) -> bool:
    """Whether another call at the same time, or an unanswered one before, may be the reason of a refusal that leaves
    no trace in the state: a creation or a save under way, an open stream, a retaining call of the same id."""
    def rival(other: Event) -> bool:
        if event.call == "DeleteHead":
            return other.call in _STREAMS
        if event.call == "ComputeLoss":
            return bool(other.args.get("retain")) and other.args["id"] == event.args["id"]
        if event.call == "CreateHead":
            return other.call in ("CreateHead", "LoadCheckpoint")
        return other.call == event.call and other.args.get("name") == event.args.get("name")

    return any(rival(other) for other in history.events if other is not event and
               (other.overlaps(event) or (other.lingers and other.start < event.start)))


def reason_to_refuse(state: State, event: Event, data: Any) -> str | None:
    """None if the refusal is right, else why it is not. `data`: whether the call had rivals."""
    code = event.outcome
    judge = _JUDGES.get(code)
    if judge is None:
        return f"no rule allows {code}"
    return None if judge(state, event, bool(data)) else f"{code} has no reason now"


def names_another(state: State, event: Event) -> bool:
    """Whether the call names a generation other than the head's, as far as that is known."""
    return "generation" in event.args and ("generation", True, event.args["generation"]) not in state.numbers


def _not_found(state: State, event: Event, _: bool) -> bool:
    if event.call == "Backward":  # what is retained may be released at any time
        return True
    if event.call == "LoadCheckpoint":
        return state.find("checkpoints", event.args["name"]) is None
    return not state.exists


def _already_exists(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call == "CreateHead":
        return state.exists or has_rivals
    if event.call == "SaveCheckpoint":
        return state.find("checkpoints", event.args["name"]) is not None or has_rivals
    return event.call == "ComputeLoss" and _retained_otherwise(state, event, has_rivals)


def _failed_precondition(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call == "DeleteHead":
        return has_rivals
    if event.call == "LoadCheckpoint":
        saved = state.find("checkpoints", event.args["name"])
        return state.exists and saved is not None and len(saved.values) != len(state.values)
    step = event.args.get("step")
    if event.args.get("incarnation", state.incarnation) != state.incarnation:
        return True
    if not state.exists:
        return False
    if event.call == "ApplyStep":
        return _refusable_step(state, event)
    return (step is not None and step != state.step) or _retained_otherwise(state, event, has_rivals)


def _refusable_step(state: State, event: Event) -> bool:
    """Not the open one, or not whole; a repeat that asks for something else than what was applied."""
    step, last = event.args["step"], state.last
    expected = event.args.get("expected") or ()
    if last is not None and last.step == step and state.step == step + 1:
        return last.momentum != event.args["momentum"] or bool(expected)
    if step != state.step:
        return True
    kept = dict(state.ledger)
    wanted = [kept.get(id) for id in expected]
    if any(entry is None or any(row != YES for row in entry.rows) for entry in wanted):
        return True
    return bool(expected) and any(id not in expected and any(row != YES for row in entry.rows) and any(entry.rows)
                                  for id, entry in kept.items())


def _retained_otherwise(state: State, event: Event, has_rivals: bool) -> bool:
    if event.call != "ComputeLoss" or not event.args.get("retain"):
        return False
    kept = state.find("retained", event.args["id"])
    return has_rivals or (kept is not None and kept != event.args["scale"])


def _aborted(state: State, event: Event, _: bool) -> bool:
    """The call names another generation. What a trainer's client names, or knows itself, is not recorded."""
    repeats = event.call == "ApplyStep" and state.last is not None and state.last.step == event.args["step"]
    if repeats and "generation" in event.args:
        return event.args["generation"] != state.last.generation
    return names_another(state, event) or (event.trainer and state.zeroed)


def _no_room(state: State, event: Event, _: bool) -> bool:
    return True


_JUDGES = {
    "NOT_FOUND": _not_found,
    "ALREADY_EXISTS": _already_exists,
    "FAILED_PRECONDITION": _failed_precondition,
    "ABORTED": _aborted,
    "RESOURCE_EXHAUSTED": _no_room,
}
