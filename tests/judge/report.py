# SPDX-License-Identifier: Apache-2.0
"""A history and a verdict as text, for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import encoding
from history import Event
from minimise import Least
from moments import OBSERVERS
from state import State


def _time(nanoseconds: float) -> str:
    return "      ..." if nanoseconds == float("inf") else f"{nanoseconds / 1e6:9.2f}"


def _spread(lses: list[float], vocab: int, scale: float) -> str:
    low, high = min(lses), max(lses)
    seen = [low] if encoding.near(low, high) else [low, high]
    return " to ".join(encoding.decode_lse(value, vocab, scale) for value in seen)


def _rows(begin_end: list[int]) -> str:
    return f"[{begin_end[0]}, {begin_end[1]})"


def _piece(event: Event, piece: dict[str, Any], vocab: int) -> str:
    rows = _rows(piece["rows"])
    if "lse" in piece:
        return f"rows {rows} with {_spread(piece['lse'], vocab, event.args.get('scale', 1.0))}"
    if "dx" in piece:
        return f"rows {rows} dx {piece['dx'][0]:.5f}"
    return f"rows {rows} {encoding.describe(tuple(piece['values']), piece['rows'][0])}"


def _joined(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring pieces with the same lse as one."""
    joined: list[dict[str, Any]] = []
    for piece in sorted(pieces, key=lambda piece: piece["rows"]):
        before = joined[-1] if joined else None
        if before and "lse" in piece and all(encoding.near(lse, before["lse"][0]) for lse in piece["lse"]):
            joined[-1] = {**before, "rows": [before["rows"][0], piece["rows"][1]]}
        else:
            joined.append(piece)
    return joined


def _arguments(event: Event) -> str:
    parts = []
    for name, value in event.args.items():
        if name == "messages":
            parts += [f"{_rows(message)} {encoding.describe(tuple(message[2]), message[0])}" for message in value]
        elif name in ("accumulate", "retain"):
            parts += [name] if value else []
        elif value not in (None, ()) and name not in ("total", "vocab"):
            parts.append(f"{name}={value}")
    return ", ".join(parts)


def _told(event: Event, vocab: int) -> str:
    result = event.result
    parts = ["no answer yet" if event.outcome == "PENDING" else event.outcome]
    accepted = result.get("accepted")
    if accepted:
        state = accepted["state"]
        parts.append(f"accepted by {_time(accepted['time']).strip()}" + (f" in step {state['step']}" if state else ""))
    parts += [_piece(event, piece, vocab) for piece in _joined(result.get("slices", ()))]
    for name in ("accumulated", "repeated", "repeats", "added", "rows", "microbatches", "contributions", "norm",
                 "step_rows", "exists", "released"):
        if name in result:
            parts.append(f"{name} {result[name]}")
    if result.get("state"):
        parts.append(f"step {result['state']['step']}")
    if not event.ok and result.get("message"):
        parts.append(f'"{result["message"][:110]}"')
    return "; ".join(parts)


def line(event: Event, vocab: int) -> str:
    return (f"{_time(event.start)} -{_time(event.last)} ms  {event.client + ('*' if event.trainer else ''):4} "
            f"{event.call}({_arguments(event)})\n{'':27}-> {_told(event, vocab)}")


def _state(state: State) -> str:
    if not state.exists:
        return "the head does not exist"
    parts = [f"step {state.step}", encoding.describe(state.values), f"gradient {encoding.describe(state.gradient)}"]
    parts += [f"id {id}: {sum(row == 2 for row in entry.rows)} rows of {len(entry.rows)} in the ledger"
              for id, entry in state.ledger if entry.kind == "microbatch"]
    parts += [f"id {id} retained" for id, _ in state.retained]
    return ", ".join(parts)


def counter_example(least: Least) -> str:
    """The events that contradict each other, what else was under way meanwhile, and where the search got stuck."""
    history, shown = least.history, least.events()
    first = min(event.start for event in shown)
    last = max((event.last for event in shown if event.end is not None), default=float("inf"))
    lines = ["These answers contradict each other, whatever became of all other calls:"]
    lines += [line(event, history.vocab) for event in shown]
    changes = [event for event in history.events if event.number not in least.visible and event.start <= last and
               event.call not in OBSERVERS | {"Acknowledge"}]
    meanwhile = [event for event in changes if event.last >= first]
    earlier = [event for event in changes if event.last < first][-4:]
    if earlier or meanwhile:
        lines.append("What else was called, just before or meanwhile:")
        lines += [line(event, history.vocab) for event in earlier + meanwhile]
    if least.stuck is not None:
        lines.append(f"No order explains them. The longest begun comes to this: {_state(least.stuck.state)}; then")
        lines += dict.fromkeys(f"  {moment.event.client} {moment.event.call}, {moment.what}: {why}"
                               for moment, why in least.stuck.refused if moment.event.number in least.visible)
    return "\n".join(lines)
