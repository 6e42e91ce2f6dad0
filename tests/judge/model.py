# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/consistency.md for one head, as a sequential specification, pure and without gRPC."""

from __future__ import annotations

from typing import Any

import history
from history import Event
from moments import CLOSED, MAYBE, PAST, PRESENT, YES, Applied, Moment, Saved, State, Under, names_another, reason_to_refuse


# The rules for calls that take effect at one moment: steps, heads and checkpoints; and what all calls share.

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
        applied = Applied(args["step"], args["momentum"], history.norm(state.gradient), microbatches, rows,
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
        if not history.near(result["norm"], last.norm):
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
        if result and not history.near(result["norm"], history.norm(state.gradient)):
            return f"the norm is {history.norm(state.gradient)}"
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


# The rules of docs/consistency.md for one head, as a sequential specification.
#
# Model.apply(state, moment) gives the states in which the head may be after the moment, or the reason why the moment
# cannot be now. It is pure. What the server may choose and no answer shows (which rows of a failed call were accumulated)
# is in the state as a choice still open (MAYBE), so that nearly every moment has one outcome.


class Model(Administration):
    def __init__(self, tolerated: frozenset[str] = frozenset()) -> None:
        """`tolerated`: rules that are not judged; see DEVIATIONS in moments.py."""
        self._tolerated = tolerated

    def apply(self, state: State, moment: Moment) -> Outcome:
        after = self._after(state, moment)
        if isinstance(after, list) and any(each.dead_end() for each in after):
            return "the gradients would become zero since a call began whose rows were accumulated later"
        return after

    def _after(self, state: State, moment: Moment) -> Outcome:
        event = moment.event
        if moment.what == "refused":
            return reason_to_refuse(state, event, moment.data) or self._refused(state, event)
        if event.call == "ApplyStep" and (problem := self._trainer_may(state, moment)):
            return problem
        if moment.what in ("do", "attempt"):
            outcome: Outcome = getattr(self, "_do_" + event.call)(state, event, moment.data)
            return outcome
        return getattr(self, "_" + moment.what.replace(" ", "_"))(state, moment)

    def _refused(self, state: State, event: Event) -> Outcome:
        """NOT_FOUND may end a call that has had effects, when the head is deleted; others may not."""
        if state.find("under", event.number) is not None and event.outcome != "NOT_FOUND" and (
                "closed-step-code" not in self._tolerated):
            return "a refused call has changed something"
        return [state.put("under", event.number, None)]

    @staticmethod
    def _stale(under: Under, *, weights: bool = True, generation: bool = False) -> str | None:
        if weights and not under.weights:
            return "the weights have changed since the call began"
        if generation and not under.generation:
            return "the gradients have become zero since the call began"
        return None

    @staticmethod
    def _note(state: State, event: Event, present: bool) -> State:
        known = PRESENT if present else PAST
        return state.put("notes", event.client, (event.args["step"], known)) if event.trainer else state

    # ---- ComputeLoss and Backward ----

    def _open(self, state: State, moment: Moment) -> Outcome:
        event, args = moment.event, moment.event.args
        accepted, goes_on = moment.data
        if problem := self._usable(state, args.get("step")):
            return problem
        if args.get("accumulate") and (problem := self._trainer_may(state, moment)):
            return problem
        named = self._as_named(state, event)
        if isinstance(named, str):
            return named
        state = named
        terms = None
        if event.call == "Backward":
            terms = state.find("retained", args["id"])
            if terms is None:
                return "nothing is retained under this id"
        elif args.get("retain"):
            terms = args["scale"]
            if problem := self._retained_otherwise(state, args["id"], terms):
                return problem
        repeated = (0, 0)
        if args.get("accumulate") and (event.trainer or not moment.told):  # it is not known when which rows are booked
            rows = range(*args["rows"])
            booked = state.book(args["id"], "microbatch", args["total"], rows, MAYBE)
            if booked is None:
                return "the id is a contribution's"
            state, repeated = booked
        if args.get("accumulate"):
            state = state.touched()
        after = self._answered(state, accepted and accepted["state"])
        if isinstance(after, str) or not goes_on:
            return after
        unbooked = (1 if event.trainer else len(event.result["slices"])) if args.get("accumulate") and moment.told else 0
        retaining = (args["id"], terms) if args.get("retain") and moment.told else terms
        return [after[0].put("under", event.number, Under(
            repeated=repeated, terms=retaining, stream=moment.told, unbooked=unbooked))]

    @staticmethod
    def _retained_otherwise(state: State, id: int, scale: float) -> str | None:
        kept = state.find("retained", id)
        if kept is not None and kept != scale:
            return f"rows of id {id} are retained with logit_scale {kept}"
        for _, under in state.under:
            if isinstance(under.terms, tuple) and under.terms[0] == id and under.terms[1] != scale:
                return f"rows of id {id} are being retained with logit_scale {under.terms[1]}"
        return None

    def _rows(self, state: State, moment: Moment) -> Outcome:
        event, piece = moment.event, moment.data
        if not state.exists:
            return "there is no such head"
        under = state.find("under", event.number)
        deferred = event.call == "Backward" or event.args.get("retain")
        one_call = not event.result.get("repeats")
        if one_call and (problem := self._stale(under, generation=bool(
                deferred or event.args.get("accumulate")))):
            return problem
        if event.call == "Backward":
            expected = history.lse_gradient(state.values, under.terms)
            seen, text = piece["dx"], "dx"
        elif event.args.get("embedding"):
            expected = history.GRID * state.values[history.EMBEDDED]
            seen, text = piece.get("dx", []), "the embedding"  # nothing comes back of gradients
        else:
            expected = history.lse(state.values, event.args.get("scale", 1.0))
            seen, text = piece["lse"], "lse"
        if all(history.near(value, expected) for value in seen):
            return [state]
        return (f"{text} of rows {piece['rows']} is {min(seen):.5f} to {max(seen):.5f}, "
                f"and these weights give {expected:.5f}")

    def _book(self, state: State, moment: Moment) -> Outcome:
        event, args = moment.event, moment.event.args
        under = state.find("under", event.number)
        if problem := self._stale(under, weights=not event.result.get("repeats"), generation=True):
            return problem
        booked = state.book(args["id"], "microbatch", args["total"], range(*moment.data), YES)
        if booked is None:
            return "the id is a contribution's"
        state, (least, most) = booked
        state = state.touched()
        # touched() has changed what is under way.
        under = state.find("under", event.number)._replace(unbooked=under.unbooked - 1)
        if not event.trainer:
            under = under._replace(repeated=(under.repeated[0] + least, under.repeated[1] + most))
        return [state.put("under", event.number, under)]

    def _close(self, state: State, moment: Moment) -> Outcome:
        event, args, result = moment.event, moment.event.args, moment.event.result
        under = state.find("under", event.number)
        state = state.put("under", event.number, None)
        if args.get("accumulate"):
            repeated, rows = result["repeated"], args["rows"][1] - args["rows"][0]
            if result["accumulated"] + repeated != rows:
                return f"of {rows} rows, {result['accumulated']} were accumulated and {repeated} repeated"
            least, most = under.repeated
            most = rows if moment.data else most
            if not least <= repeated <= most:
                return f"the answer says {repeated} rows were repeated, and {least} to {most} were"
            state = self._note(state, event, under.generation)
        if args.get("retain"):
            if problem := self._stale(under, generation=True):
                return problem
            state = state.put("retained", args["id"], args["scale"])
        return [state]

    def _abort(self, state: State, moment: Moment) -> Outcome:
        """ABORTED needs a reason: what the call was bound to has changed."""
        event = moment.event
        if event.outcome != "ABORTED" and not (
                event.outcome == "FAILED_PRECONDITION" and "closed-step-code" in self._tolerated):
            return f"a call that was accepted does not end with {event.outcome}"
        under = state.find("under", event.number)
        after = [state.put("under", event.number, None)]
        if event.trainer and state.zeroed:
            return after  # the client knows of more than it tells
        if event.call == "WriteTensor":
            if under is not None and event.number not in state.writing:
                return after
            return "nothing has ended the write"
        if under is None:
            return after if names_another(state, event) else "the call was not begun before a change"
        if event.call == "ReadTensor":
            # Rows of weight 0 leave the gradient as it is, and yet they are an accumulation.
            touched = event.args["role"] == "gradient" and under.touched
            stale: str | None = "rows were accumulated" if touched else self._read_stale(event, under)
        else:
            binding = event.call in ("AddGradient", "Backward") or bool(
                event.args.get("accumulate") or event.args.get("retain"))
            stale = self._stale(under, weights=event.call != "AddGradient", generation=binding)
        return after if stale else "nothing has changed since the call began"

    # ---- Tensors ----

    @staticmethod
    def _read_stale(event: Event, under: Under) -> str | None:
        if event.args["role"] == "gradient":
            return None if under.gradients else "the gradients have changed since the read began"
        return None if under.weights else "the weights have changed since the read began"

    def _read_open(self, state: State, moment: Moment) -> Outcome:
        if not state.exists:
            return "there is no such head"
        return [state.put("under", moment.event.number, Under(touched=state.unsettled()))]

    def _read(self, state: State, moment: Moment) -> Outcome:
        event, (piece, first, last) = moment.event, moment.data
        role = event.args["role"]
        if problem := self._usable(state, None, reads_weights=role != "gradient"):
            return problem
        under = Under(touched=state.unsettled()) if first else state.find("under", event.number)
        if problem := self._read_stale(event, under):
            return problem
        tensor = {"value": state.values, "gradient": state.gradient, "moment1": state.moment}[role]
        begin, end = piece["rows"]
        if tuple(piece["values"]) != tensor[begin:end]:
            return f"rows [{begin}, {end}) were read as {piece['values']}, and are {list(tensor[begin:end])}"
        after = self._versioned(state, piece["state"])
        if isinstance(after, str) or (first and last):
            return after
        return [after[0].put("under", event.number, None if last else under)]

    def _write(self, state: State, moment: Moment) -> Outcome:
        event, ((begin, end, values), first, last) = moment.event, moment.data
        if not state.exists:
            return "there is no such head"
        if not first and event.number not in state.writing:
            return "the write has been ended by a checkpoint that was loaded, or by a deletion"
        if first:
            state = state.new_weights().put("under", event.number, Under())
        state = state._replace(
            values=state.values[:begin] + tuple(values) + state.values[end:],
            writing=state.writing - {event.number} if last else state.writing | {event.number})
        if not last:
            return [state]
        state = state if first else state.new_weights()
        return self._versioned(state.put("under", event.number, None), event.result["state"] if moment.told else None)

    def _break(self, state: State, moment: Moment) -> Outcome:
        number = moment.event.number
        if number not in state.writing:
            return "the write is not under way"
        return [state.new_weights().put("under", number, None)._replace(writing=state.writing - {number})]

    def _add_open(self, state: State, moment: Moment) -> Outcome:
        if problem := self._usable(state, moment.event.args["step"], reads_weights=False):
            return problem
        named = self._as_named(state, moment.event)
        return named if isinstance(named, str) else [named.put("under", moment.event.number, Under())]

    def _add(self, state: State, moment: Moment) -> Outcome:
        event, ((begin, end, values), first, last) = moment.event, moment.data
        if problem := self._usable(state, event.args["step"], reads_weights=False) or self._trainer_may(state, moment):
            return problem
        under = state.find("under", event.number) or Under()
        if problem := self._stale(under, weights=False, generation=True):
            return problem
        if first:
            named = self._as_named(state, event)
            if isinstance(named, str):
                return named
            state = named
        before = state.find("ledger", event.args["id"])
        booked = state.book(event.args["id"], "contribution", len(state.values), range(begin, end), YES)
        if booked is None:
            return "the id is a microbatch's"
        state, (repeated, _) = booked
        gradient = list(state.gradient)
        for row in range(begin, end):
            if before is None or before.rows[row] != YES:
                gradient[row] += values[row - begin]
        state = state._replace(gradient=tuple(gradient)).new_gradients()
        under = under._replace(repeated=(under.repeated[0] + repeated,) * 2)
        if not last:
            return [state.put("under", event.number, under)]
        state = state.put("under", event.number, None)
        if not moment.told:
            return [state]
        if event.result["repeated"] != under.repeated[0] and not event.trainer:
            return f"the answer says {event.result['repeated']} rows were repeated, and {under.repeated[0]} were"
        return self._versioned(self._note(state, event, True), event.result["state"])
