# SPDX-License-Identifier: Apache-2.0
"""The rules of docs/consistency.md for one head, as a sequential specification.

Model.apply(state, moment) gives the states in which the head may be after the moment, or the reason why the moment
cannot be now. It is pure. What the server may choose and no answer shows (which rows of a failed call were accumulated)
is in the state as a choice still open (MAYBE), so that nearly every moment has one outcome.
"""

from __future__ import annotations

import encoding
from administration import Administration, Outcome
from history import Event
from moments import Moment
from refusals import names_another, reason_to_refuse
from state import MAYBE, PAST, PRESENT, YES, State, Under


class Model(Administration):
    def __init__(self, tolerated: frozenset[str] = frozenset()) -> None:
        """`tolerated`: rules that are not judged; see DEVIATIONS in refusals.py."""
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
            expected = encoding.lse_gradient(state.values, under.terms)
            seen, text = piece["dx"], "dx"
        else:
            expected = encoding.lse(state.values, event.args.get("scale", 1.0))
            seen, text = piece["lse"], "lse"
        if all(encoding.near(value, expected) for value in seen):
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
