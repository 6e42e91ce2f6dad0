# SPDX-License-Identifier: Apache-2.0
"""The rules for calls that take effect at one moment: steps, heads and checkpoints; and what all calls share."""

from __future__ import annotations

from typing import Any

import encoding
from history import Event
from moments import Moment
from state import CLOSED, PRESENT, Applied, Saved, State

Outcome = list[State] | str  # the states after, or why not

_VERSIONS = ("generation", "weights_version")  # fields of HeadState; absent in some histories made by hand


class Administration:
    """A method for each call: the states in which the head may be after it, or the reason why it cannot be now.
    `result` is what the client was told; None if it was told nothing."""

    # ---- What calls have in common ----

    def _answered(self, state: State, seen: dict[str, Any] | None) -> Outcome:
        """The HeadState of an answer is that of this moment."""
        if seen is None:
            return [state]
        if seen["incarnation"] != state.incarnation:
            return f"the answer names incarnation {seen['incarnation']:016x}, and it is {state.incarnation:016x}"
        if seen["step"] != state.step:
            return f"the answer says step {seen['step']}, and step {state.step} is open"
        for name in _VERSIONS:
            if name not in seen:
                continue
            if seen[name] == 0:
                return f"the answer says no {name}"
            numbered = self._numbered(state, name, seen[name])
            if numbered is None:
                return f"the answer says {name} {seen[name]}, which is another one's or not what it was"
            state = numbered
        return [state]

    @staticmethod
    def _numbered(state: State, name: str, number: int) -> State | None:
        """With this as the number of the present version; None if that has another one, or the number is another's."""
        if any(known == name and present != (other == number) for known, present, other in state.numbers):
            return None
        return state._replace(numbers=state.numbers | {(name, True, number)})

    def _as_named(self, state: State, event: Event) -> State | str:
        """The generation that the call names, if it does, is the head's."""
        args = event.args
        if "generation" not in args:
            return state
        if args.get("incarnation", state.incarnation) != state.incarnation:
            return f"the call names incarnation {args['incarnation']:016x}, and it is {state.incarnation:016x}"
        named = self._numbered(state, "generation", args["generation"])
        return named or f"the call names generation {args['generation']}, which is not the head's"

    def _versioned(self, state: State, seen: dict[str, Any] | None) -> Outcome:
        """Of tensor calls: the answer's HeadState is that of this moment if it says a version, which is the tensor's;
        without one nothing ties it to the tensor."""
        return self._answered(state, seen if seen and "weights_version" in seen else None)

    @staticmethod
    def _usable(state: State, step: int | None, *, reads_weights: bool = True) -> str | None:
        if not state.exists:
            return "there is no such head"
        if step is not None and step != state.step:
            return f"step {step} is not open, but {state.step}"
        if reads_weights and state.writing:
            return "a WriteTensor is between its first and its last row"
        return None

    @staticmethod
    def _trainer_may(state: State, moment: Moment) -> str | None:
        """A trainer goes on with a step only in the generation that it knows."""
        event = moment.event
        note = state.find("notes", event.client) if event.trainer and moment.told else None
        if note is None or note[0] != event.args["step"] or note[1] == PRESENT:
            return None
        if note[1] == CLOSED and event.result.get("repeated") is True:  # of ApplyStep
            return None
        return (f"{event.client} was told of rows in the step's gradients, which have become zero since; "
                "it has to get ABORTED")

    # ---- Steps ----

    def _do_ApplyStep(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        args = event.args
        if result is not None and result["repeated"]:
            if state.last is None or state.last.step != args["step"] or state.step != args["step"] + 1:
                return f"step {args['step']} is not the one just applied"
            if state.last.applied_another(args.get("generation")):
                return f"the step was not applied with generation {args['generation']}"
            return self._same_answer(state, event, result)
        if problem := self._usable(state, args["step"]):
            return problem
        named = self._as_named(state, event)
        if isinstance(named, str):
            return named
        state = named
        for id in args.get("expected") or ():
            entry = state.find("ledger", id)
            if entry is None or 0 in entry.rows:
                return f"rows of id {id} are missing"
        microbatches, rows = state.counted("microbatch")
        contributions, _ = state.counted("contribution")
        applied = Applied(args["step"], args["momentum"], encoding.norm(state.gradient), microbatches, rows,
                          contributions, state.number("generation"))
        moment = state.moment
        update = state.gradient
        if args["momentum"]:
            update = moment = tuple(m * (state.updates > 0) + g for m, g in zip(state.moment, state.gradient))
        values = tuple(value - change for value, change in zip(state.values, update))
        state = state.closed()._replace(values=values, moment=moment, updates=state.updates + 1, last=applied)
        return [state] if result is None else self._same_answer(state, event, result)

    def _same_answer(self, state: State, event: Event, result: dict[str, Any]) -> Outcome:
        """The answer is that of the last step; where it could be several, it is this one from now on."""
        last = state.last
        assert last is not None
        for name in ("microbatches", "rows", "contributions"):
            least, most = getattr(last, name)
            if not least <= result[name] <= most:
                return f"the answer says {result[name]} {name}, and there were {least} to {most}"
            last = last._replace(**{name: (result[name],) * 2})
        if not encoding.near(result["norm"], last.norm):
            return f"the answer says a gradient norm of {result['norm']}, and it was {last.norm}"
        if event.trainer:  # it is done with the step
            state = state.put("notes", event.client, None)
        return self._answered(state._replace(last=last), result["state"])

    def _do_ZeroGradients(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if problem := self._usable(state, event.args["step"], reads_weights=False):
            return problem
        return self._answered(state.new_generation().put("notes", event.client, None), result and result["state"])

    def _do_Acknowledge(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        return [state.put("notes", event.client, None)]

    def _do_GradNorm(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if problem := self._usable(state, event.args.get("step"), reads_weights=False):
            return problem
        if result and not encoding.near(result["norm"], encoding.norm(state.gradient)):
            return f"the norm is {encoding.norm(state.gradient)}"
        return self._answered(state, result and result["state"])

    # ---- Heads and checkpoints ----

    def _do_CreateHead(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if state.exists:
            return "the head exists"
        zeros = (0,) * event.args["vocab"]
        state = state.gone()._replace(exists=True, values=zeros, gradient=zeros, moment=zeros)
        return self._answered(state, result and result["state"])

    def _do_DeleteHead(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if not state.exists:
            return "there is no such head"
        if any(under.stream for _, under in state.under):
            return "a ComputeLoss is open on it"
        return [state.gone()]

    def _do_Restart(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        return [state.gone()._replace(incarnation=event.result["incarnation"], numbers=frozenset())]

    def _do_DescribeHead(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if result is None:
            return [state]
        if state.exists != result["exists"]:
            return "there is no such head" if not state.exists else "the head exists"
        if not state.exists:
            return [state]
        _, (least, most) = state.counted("microbatch")
        if not least <= result["step_rows"] <= most:
            return f"{least} to {most} rows are accumulated"
        return self._answered(state, result["state"])

    _do_ListHeads = _do_DescribeHead

    def _do_ReleaseMicrobatch(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if not state.exists:
            return "there is no such head"
        if result and result["released"] and state.find("retained", event.args["id"]) is None:
            return "nothing is retained under this id"
        return self._answered(state.put("retained", event.args["id"], None), result and result["state"])

    def _do_SaveCheckpoint(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        if problem := self._usable(state, None):
            return problem
        if state.find("checkpoints", event.args["name"]) is not None:
            return "there is such a checkpoint"
        saved = Saved(state.values, state.moment, state.step, state.updates, state.last)
        return self._answered(state.put("checkpoints", event.args["name"], saved), result and result["state"])

    def _do_LoadCheckpoint(self, state: State, event: Event, result: dict[str, Any] | None) -> Outcome:
        saved = state.find("checkpoints", event.args["name"])
        if saved is None:
            return "there is no such checkpoint"
        state = state.new_weights()._replace(
            exists=True, values=saved.values, moment=saved.moment, step=saved.step, updates=saved.updates,
            last=saved.last, writing=frozenset()).new_generation().put("notes", event.client, None)
        return self._answered(state, result and result["state"])
