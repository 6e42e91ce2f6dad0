# SPDX-License-Identifier: Apache-2.0
"""The checker and its model: with histories made by hand, and against a plain search. No server runs."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import checker
import history
import pytest
from checker import Limits, Verdict, check, minimise
from history import Event, History, family
from model import Model
from moments import Moment, State, expand


# Histories made by hand: what is not said of a call is what a good server would answer.

V, ROWS = 4, 2
SERVER = 7


class Made:
    """A history in the making. Calls are at [start, end]; what is not given is what a good server would say."""

    def __init__(self, incarnation: int = SERVER) -> None:
        self.events: list[Event] = []
        self.incarnation = incarnation
        self.versions: dict[str, int] = {}  # added to every state

    def call(self, call: str, at: tuple[float, float | None], client: str = "A", outcome: str = "OK",
             args: dict[str, Any] | None = None, trainer: bool = False, **result: Any) -> Event:
        event = Event(len(self.events), client, call, args or {}, at[0], at[1], outcome, result, trainer)
        self.events.append(event)
        return event

    def state(self, step: int = 0) -> dict[str, int]:
        return {"incarnation": self.incarnation, "step": step, **self.versions}

    def create(self, at: tuple[float, float] = (0, 1), **more: Any) -> Made:
        self.call("CreateHead", at, args={"vocab": V}, state=self.state(), **more)
        return self

    def write(self, c: int, at: tuple[float, float | None], client: str = "A", sent: tuple[float, ...] | None = None,
              outcome: str = "OK") -> Event:
        values = list(family(c, V))
        messages = [[0, V, values]] if sent is None or len(sent) < 2 else [[0, 2, values[:2]], [2, V, values[2:]]]
        return self.call("WriteTensor", at, client, outcome, {"messages": messages}, sent=list(sent or at[:1]),
                         state=self.state())

    def read(self, values: tuple[int, ...], at: tuple[float, float], client: str = "B", role: str = "value",
             got: tuple[float, ...] = (), outcome: str = "OK") -> Event:
        times = got or (at[1],)
        size = V // len(times)
        slices = [{"rows": [n * size, (n + 1) * size], "values": list(values[n * size:(n + 1) * size]),
                   "state": self.state(), "got": time} for n, time in enumerate(times)]
        return self.call("ReadTensor", at, client, outcome, {"role": role}, slices=slices)

    def loss(self, cs: tuple[int, ...], at: tuple[float, float | None], client: str = "B", *, id: int = 1,
             step: int | None = None, accumulate: bool = False, retain: bool = False, scale: float = 1.0,
             accepted: float | None = None, slices: tuple[tuple[float, float], ...] = (), repeated: int = 0,
             outcome: str = "OK", trainer: bool = False, told_step: int = 0, **more: Any) -> Event:
        """A slice of ROWS rows for each c; `slices`: when each was sent and answered."""
        times = slices or ((at[0], at[1]),) * len(cs)
        total = max(len(cs), 2 if accumulate else 1) * ROWS
        rows = len(cs) * ROWS
        pieces = [{"rows": [n * ROWS, (n + 1) * ROWS], "sent": sent, "got": got,
                   "lse": [history.lse(family(c, V), scale)] * ROWS} for n, (c, (sent, got)) in enumerate(
                       zip(cs, times))]
        args = {"id": id, "rows": (0, rows), "total": total, "step": step, "accumulate": accumulate,
                "retain": retain, "scale": scale}
        return self.call("ComputeLoss", at, client, outcome, args, trainer, slices=pieces, repeated=repeated,
                         accumulated=rows - repeated if accumulate else 0,
                         accepted={"time": accepted or at[1], "state": self.state(told_step)}, **more)

    def embed(self, cs: tuple[int, ...], at: tuple[float, float], **more: Any) -> Event:
        """As loss, of rows of the embedding."""
        event = self.loss(cs, at, **more)
        event.args["embedding"] = True
        for c, piece in zip(cs, event.result["slices"]):
            del piece["lse"]
            if not event.args["accumulate"]:
                piece["dx"] = [history.GRID * c * history.EMBEDDED] * ROWS
        return event

    def backward(self, c: int, at: tuple[float, float], scale: float = 1.0, outcome: str = "OK") -> Event:
        if outcome != "OK":
            return self.call("Backward", at, "B", outcome, {"id": 1, "step": None, "rows": (0, ROWS)})
        piece = {"rows": [0, ROWS], "sent": at[0], "got": at[1],
                 "dx": [history.lse_gradient(family(c, V), scale)] * ROWS}
        return self.call("Backward", at, "B", outcome, {"id": 1, "step": None, "rows": (0, ROWS)}, slices=[piece],
                         accepted={"time": at[1], "state": self.state()})

    def add(self, a: int, at: tuple[float, float | None], client: str = "A", *, step: int = 0, id: int = 100,
            sent: tuple[float, ...] = (), repeated: int = 0, outcome: str = "OK",
            trainer: bool = False, **more: Any) -> Event:
        values = list(family(a, V))
        messages = [[0, V, values]] if len(sent) < 2 else [[0, 2, values[:2]], [2, V, values[2:]]]
        return self.call("AddGradient", at, client, outcome, {"id": id, "step": step, "messages": messages}, trainer,
                         sent=list(sent or at[:1]), added=V - repeated, repeated=repeated, state=self.state(step), **more)

    def apply(self, step: int, a: int, at: tuple[float, float | None], client: str = "A", *, momentum: int = 0,
              repeated: bool = False, rows: int = 0, microbatches: int = 0, contributions: int = 1,
              outcome: str = "OK", expected: list[int] | None = None, trainer: bool = False,
              **more: Any) -> Event:
        args = {"step": step, "momentum": momentum, "expected": expected}
        result = {"norm": history.norm(family(a, V)), "microbatches": microbatches, "rows": rows,
                  "contributions": contributions, "repeated": repeated, "state": self.state(step + 1)}
        return self.call("ApplyStep", at, client, outcome, args, trainer, **(result if outcome == "OK" else {}), **more)

    def zero(self, at: tuple[float, float | None], client: str = "C", step: int = 0, trainer: bool = False) -> Event:
        return self.call("ZeroGradients", at, client, "OK", {"step": step}, trainer, state=self.state(step))

    def save(self, at: tuple[float, float], name: str = "s", step: int = 0) -> Event:
        return self.call("SaveCheckpoint", at, args={"name": name}, state=self.state(step))

    def load(self, at: tuple[float, float], name: str = "s", step: int = 0, outcome: str = "OK") -> Event:
        return self.call("LoadCheckpoint", at, "C", outcome, {"name": name}, state=self.state(step))

    def describe(self, at: tuple[float, float], rows: int = 0, step: int = 0, outcome: str = "OK",
                 call: str = "DescribeHead", exists: bool = True) -> Event:
        return self.call(call, at, "C", outcome, exists=exists, step_rows=rows, state=self.state(step))

    def history(self) -> History:
        return History("h", V, SERVER, self.events)

    def verdict(self, **options: Any) -> Verdict:
        return check(self.history(), Model(**options)).verdict


# What the checker should say of a history made by hand.


def possible(made: Made) -> None:
    result = check(made.history(), Model())
    assert result.verdict is Verdict.POSSIBLE, result.stuck and result.stuck.refused


def impossible(made: Made, why: str) -> None:
    """The reason is among those that the counter-example gives."""
    history = made.history()
    assert check(history, Model()).verdict is Verdict.IMPOSSIBLE
    text = checker.counter_example(minimise(history, Model()))
    assert why in text, text


def begun(c: int = 5) -> Made:
    """A head of weights c, from 3 on."""
    made = Made().create()
    made.write(c, (2, 3))
    return made


# The checker and its model, with histories made by hand: of each rule of docs/consistency.md one that keeps it and one
# that breaks it. No server runs.


def test_a_call_takes_effect_between_call_and_answer() -> None:
    for seen, at, fine in ((5, (4, 7), True), (9, (4, 7), True), (5, (6.5, 8), False)):
        made = begun(5)
        made.write(9, (5, 6))
        made.read(family(seen, V), at)
        possible(made) if fine else impossible(made, "were read as [0, 5, 10, 15], and are [0, 9, 18, 27]")


def test_the_state_of_an_answer_is_that_of_the_moment() -> None:
    for step, fine in ((1, True), (0, False)):
        made = begun()
        made.apply(0, 0, (4, 5), contributions=0)
        made.describe((6, 7), step=step)
        possible(made) if fine else impossible(made, "the answer says step 0, and step 1 is open")


def test_a_head_that_is_being_created_does_not_exist() -> None:
    made = Made().create((0, 10))
    made.describe((1, 2), outcome="NOT_FOUND")
    made.describe((3, 4), call="ListHeads", exists=False)
    made.call("CreateHead", (5, 6), "B", "ALREADY_EXISTS", {"vocab": V})
    possible(made)
    made.describe((7, 8))
    made.describe((8.5, 9), outcome="NOT_FOUND")
    impossible(made, "DescribeHead")


def test_a_step_expects_whole_microbatches() -> None:
    for cs, fine in (((5, 5), True), ((5,), False)):
        made = begun()
        made.loss(cs, (4, 5), step=0, accumulate=True)
        made.apply(0, 0, (6, 7), contributions=0, microbatches=1, rows=ROWS * len(cs), expected=[1])
        possible(made) if fine else impossible(made, "rows of id 1 are missing")


def test_a_repeated_step_answers_the_same_and_changes_nothing() -> None:
    for contributions, seen, fine in ((1, 3, True), (2, 3, False), (1, 1, False)):
        made = begun(5)
        made.add(2, (4, 5))
        made.apply(0, 2, (6, 7))
        made.apply(0, 2, (8, 9), repeated=True, contributions=contributions)
        made.read(family(seen, V), (10, 11))
        possible(made) if fine else impossible(made, "")


def test_momentum() -> None:
    for c, moment, fine in ((-6, 5, True), (-1, 3, False)):
        made = begun(2)
        made.add(2, (4, 5))
        made.apply(0, 2, (6, 7), momentum=1)
        made.add(3, (8, 9), step=1)
        made.apply(1, 3, (10, 11), momentum=1)
        made.read(family(moment, V), (12, 13), role="moment1")
        made.read(family(2 - 2 - 5 if fine else c, V), (14, 15))
        possible(made) if fine else impossible(made, "were read")


# ---- A microbatch has one version of the weights, and one generation ----


def test_a_microbatch_is_of_one_version() -> None:
    for cs, outcome, fine in (((5, 5), "OK", False), ((5, 9), "OK", False), ((5,), "ABORTED", True)):
        made = begun(5)
        made.loss(cs, (4, 12), accepted=5, slices=((4, 6), (10, 11))[:len(cs)], outcome=outcome)
        made.write(9, (7, 8))
        possible(made) if fine else impossible(made, "")


def test_rows_of_an_embedding_are_of_one_version() -> None:
    for cs, fine in (((5, 5), True), ((9, 9), True), ((5, 9), False)):
        made = begun()
        made.embed(cs, (3, 10), accepted=3.2, slices=((3, 4), (8, 9)))
        made.write(9, (2.5, 7))
        possible(made) if fine else impossible(made, "the weights have changed since the call began")
    made = begun()
    made.embed((7,), (3, 4))
    impossible(made, "rows [0, 2) dx 0.08203")  # no weights ever gave these


def test_gradients_of_an_embedding_are_rows_of_the_step() -> None:
    for rows, fine in ((ROWS, True), (0, False)):
        made = begun()
        made.embed((5,), (3, 4), id=50, step=0, accumulate=True)
        made.describe((5, 6), rows=rows)
        possible(made) if fine else impossible(made, "rows are accumulated")


def test_zeroed_gradients_do_not_concern_a_microbatch_of_losses_only() -> None:
    for accumulate in (False, True):
        made = begun(5)
        made.loss((5, 5), (4, 12), accepted=5, slices=((4, 6), (10, 11)), step=0, accumulate=accumulate)
        made.zero((7, 8))
        if accumulate:
            impossible(made, "become zero since")
        else:
            possible(made)


def test_aborted_needs_a_reason() -> None:
    for zeroed in (True, False):
        made = begun(5)
        made.loss((5,), (4, 12), accepted=5, slices=((4, 6),), step=0, accumulate=True, outcome="ABORTED")
        if zeroed:
            made.zero((7, 8))
            possible(made)
        else:
            impossible(made, "nothing has changed since the call began")


def test_rows_of_a_failed_microbatch_are_any_and_stay_in_its_generation() -> None:
    for zeroed, repeated, fine in ((False, 0, True), (False, 1, True), (False, 4, True), (True, 0, True),
                                   (True, 1, False)):
        made = begun(5)
        made.loss((5, 5), (4, 5), step=0, accumulate=True, outcome="CANCELLED")
        if zeroed:
            made.describe((6, 7), rows=1)  # so it had begun before the zero
            made.zero((7.5, 8))
        made.loss((5, 5), (9, 10), step=0, accumulate=True, repeated=repeated)
        possible(made) if fine else impossible(made, "")


def test_each_row_counts_once() -> None:
    for repeated, fine in ((4, True), (0, False), (2, False)):
        made = begun(5)
        made.loss((5, 5), (4, 5), step=0, accumulate=True)
        made.loss((5, 5), (6, 7), step=0, accumulate=True, repeated=repeated)
        possible(made) if fine else impossible(made, "rows were repeated, and 4 to 4 were")


def test_a_named_generation_is_the_heads() -> None:
    for named, outcome, fine in ((3, "OK", True), (4, "OK", False), (4, "ABORTED", True), (3, "ABORTED", False)):
        made = begun(5)
        made.versions = {"generation": 3, "weights_version": 8}
        made.describe((4, 5))
        event = made.loss((5,), (6, 7), step=0, accumulate=True, outcome=outcome)
        event.args["generation"] = named
        if outcome == "ABORTED":
            event.result.clear()
        possible(made) if fine else impossible(made, "ComputeLoss")


def test_versions_are_those_of_the_moment() -> None:
    for version, fine in ((9, True), (8, False)):
        made = begun(5)
        made.versions = {"weights_version": 8}
        made.describe((4, 5))
        made.versions = {"weights_version": version}
        made.write(9, (6, 7))
        made.describe((8, 9))
        possible(made) if fine else impossible(made, "the answer says weights_version 8")


def test_numbers_of_versions_are_there_and_not_used_again() -> None:
    for numbers, fine in (((3, 4), True), ((3, 3), False), ((0, 4), False)):
        made = begun(5)
        made.versions = {"generation": numbers[0], "weights_version": 8}
        made.describe((4, 5))
        made.versions["generation"] = numbers[1]
        made.zero((6, 7))
        made.describe((8, 9))
        possible(made) if fine else impossible(made, "generation")


def test_another_process_draws_its_own_numbers() -> None:
    made = begun(5)
    made.versions = {"generation": 3, "weights_version": 8}
    made.describe((4, 5))
    made.zero((6, 7)).result["state"]["generation"] = 4
    made.call("Restart", (8, 9), "admin", incarnation=SERVER + 1)
    made.incarnation = SERVER + 1
    made.create((10, 11))
    made.describe((12, 13))
    possible(made)


def test_a_step_names_the_generation_that_it_closes() -> None:
    # Both ask for step 0, which was applied with generation 3; the head's gradients are those of generation 5 by now.
    for named, outcome, fine in ((3, "OK", True), (5, "OK", False), (5, "ABORTED", True), (3, "ABORTED", False)):
        made = begun(5)
        made.versions = {"generation": 3, "weights_version": 8}
        made.describe((4, 5))
        made.versions = {"generation": 5, "weights_version": 9}
        made.apply(0, 0, (6, 7), contributions=0)
        repeat = made.apply(0, 0, (8, 9), contributions=0, repeated=True, outcome=outcome)
        repeat.args["generation"] = named
        possible(made) if fine else impossible(made, "ApplyStep")


# ---- A trainer's step ----


def test_all_rows_of_a_trainers_step_are_in_one_generation() -> None:
    for acknowledged in (True, False):
        made = begun(5)
        made.loss((5, 5), (4, 5), step=0, accumulate=True, trainer=True)
        made.zero((6, 7))
        if acknowledged:
            made.call("Acknowledge", (7.2, 7.4), "B", trainer=True)
        made.loss((5, 5), (8, 9), id=2, step=0, accumulate=True, trainer=True)
        possible(made) if acknowledged else impossible(made, "it has to get ABORTED")


def test_a_trainers_repeat_stays_in_the_generation_of_its_first_answer() -> None:
    for answered, fine in ((9.0, True), (5.0, False)):
        made = begun(5)
        made.loss((5, 5), (4, 10), step=0, accumulate=True, trainer=True, accepted=answered, repeats=1, resent=8.0)
        made.zero((6, 7))
        possible(made) if fine else impossible(made, "become zero since")


def test_a_trainer_gets_aborted() -> None:
    made = begun(5)
    made.loss((5, 5), (4, 5), step=0, accumulate=True, trainer=True)
    made.zero((6, 7))
    made.apply(0, 0, (8, 9), "B", outcome="ABORTED", trainer=True)
    possible(made)
    made.events.pop()
    made.apply(0, 0, (8, 9), "B", contributions=0, trainer=True)
    impossible(made, "it has to get ABORTED")


def test_an_attempt_that_was_broken_off_may_have_taken_effect() -> None:
    """Whatever the last attempt says: that the step is not open any more, since it was applied meanwhile."""
    for broken, fine in (([6.0], True), ([], False)):
        made = begun(5)
        made.add(3, (4, 12), "B", outcome="FAILED_PRECONDITION", trainer=True, broken=broken)
        made.apply(0, 3, (7, 8), contributions=1)
        possible(made) if fine else impossible(made, "there were 0 to 0")

        made = begun(5)
        refused = made.loss((5, 5), (4, 12), step=0, accumulate=True, trainer=True, outcome="FAILED_PRECONDITION",
                            broken=broken)
        del refused.result["accepted"], refused.result["slices"]
        made.apply(0, 0, (7, 8), microbatches=1, rows=4, contributions=0)
        possible(made) if fine else impossible(made, "there were 0 to 0")

        made = begun(5)
        made.apply(0, 0, (4, 12), "B", contributions=0, outcome="FAILED_PRECONDITION", trainer=True, broken=broken)
        made.describe((7, 8), step=1)
        made.apply(1, 0, (9, 10), contributions=0)
        possible(made) if fine else impossible(made, "")


def test_an_attempt_that_was_broken_off_may_have_been_accepted() -> None:
    for broken, fine in (([6.0], True), ([], False)):
        made = begun(5)
        made.loss((5, 5), (4, 12), step=0, accumulate=True, trainer=True, outcome="FAILED_PRECONDITION", accepted=5.0,
                  broken=broken)
        made.apply(0, 0, (7, 8), microbatches=1, rows=4, contributions=0)
        possible(made) if fine else impossible(made, "does not end with FAILED_PRECONDITION")


def test_every_attempt_that_was_broken_off_may_have_taken_effect() -> None:
    for broken, fine in (([5.5, 8.0], True), ([5.5], False)):
        made = begun(5)
        made.add(3, (4, 20), "B", outcome="FAILED_PRECONDITION", trainer=True, broken=broken)
        made.read(family(3, V), (5, 6), role="gradient")
        made.zero((6.5, 7))
        made.read(family(3, V), (9, 10), role="gradient")
        made.apply(0, 3, (15, 16), contributions=1)
        possible(made) if fine else impossible(made, "")


def test_what_a_restart_broke_off_ends_with_the_old_server() -> None:
    for read, fine in ((6.0, True), (11.0, False)):
        made = begun(5)
        made.add(3, (4, 20), "B", outcome="FAILED_PRECONDITION", trainer=True)
        made.read(family(3, V), (read, read + 1), role="gradient")
        made.events[-1].result["slices"][0]["state"]["incarnation"] = SERVER if fine else SERVER + 1
        made.call("Restart", (8, 9), incarnation=SERVER + 1)
        made.incarnation = SERVER + 1
        made.create((9.5, 10))
        made.apply(0, 0, (15, 16), contributions=0)
        possible(made) if fine else impossible(made, "")


def test_a_repeat_of_a_step_is_answered_also_after_its_generation() -> None:
    made = begun(5)
    made.loss((5, 5), (4, 5), step=0, accumulate=True, trainer=True)
    made.apply(0, 0, (6, 12), "B", contributions=0, microbatches=1, rows=4, repeated=True, trainer=True, broken=[7.0])
    made.describe((7, 8), step=1)
    made.zero((8, 9), step=1)
    possible(made)


# ---- Tensors ----


def test_a_read_is_of_one_version() -> None:
    for seen, fine in (((0, 5, 10, 15), True), ((0, 9, 18, 27), True), ((0, 5, 18, 27), False)):
        made = begun(5)
        made.read(seen, (4, 10), got=(8, 9))
        made.write(9, (5, 7))
        possible(made) if fine else impossible(made, "")


def test_a_read_of_a_gradient_is_of_one_state() -> None:
    for seen, fine in (((0, 0, 0, 0), True), ((0, 2, 4, 6), True), ((0, 0, 4, 6), False)):
        made = begun(5)
        made.read(seen, (4, 10), role="gradient", got=(8, 9))
        made.add(2, (5, 7))
        possible(made) if fine else impossible(made, "")


def test_a_read_of_a_deleted_head_ends_with_not_found() -> None:
    for outcome in ("NOT_FOUND", "OUT_OF_RANGE", "INTERNAL"):
        made = begun(5)
        made.read(family(5, V), (4, 10), got=(5,), outcome=outcome)
        made.call("DeleteHead", (6, 7))
        made.create((8, 9))
        possible(made) if outcome == "NOT_FOUND" else impossible(made, f"no rule allows {outcome}")


def test_a_write_is_one_change() -> None:
    for seen, fine in (((0, 5, 10, 15), True), ((0, 9, 18, 27), True), ((0, 9, 10, 15), False)):
        made = begun(5)
        made.write(9, (4, 10), sent=(5, 8))
        made.read(seen, (6, 11))
        possible(made) if fine else impossible(made, "")


def test_a_write_that_breaks_off_leaves_its_rows() -> None:
    for seen, fine in (((0, 5, 10, 15), True), ((0, 9, 10, 15), True), ((0, 5, 18, 27), False)):
        made = begun(5)
        made.write(9, (4, 8), sent=(5, 6), outcome="CANCELLED")
        made.read(seen, (9, 10))
        possible(made) if fine else impossible(made, "were read")


def test_a_contribution_message_is_added_whole_and_in_one_generation() -> None:
    for seen, outcome, fine in (((0, 2, 4, 6), "OK", True), ((0, 2, 0, 0), "ABORTED", False),
                                ((0, 0, 0, 0), "OK", False), ((0, 0, 0, 0), "ABORTED", True)):
        made = begun(5)
        made.add(2, (4, 10), sent=(5, 9), outcome=outcome)
        if outcome == "ABORTED":
            made.zero((7, 8))
        made.read(seen, (11, 12), role="gradient")
        possible(made) if fine else impossible(made, "were read")


def test_a_contribution_that_is_refused_has_added_nothing() -> None:
    for seen, fine in (((0, 0, 0, 0), True), ((0, 2, 0, 0), False)):
        made = begun(5)
        made.add(2, (4, 10), sent=(5, 9), outcome="FAILED_PRECONDITION")
        made.read(seen, (6, 7), role="gradient")
        made.apply(0, 0, (8, 8.5), contributions=0)
        possible(made) if fine else impossible(made, "")


# ---- The checker itself ----


def test_a_search_that_is_given_up_is_no_pass() -> None:
    made = begun(5)
    for number in range(8):
        made.write(20 + number, (10, 30), client=f"W{number}")
    made.read(family(1, V), (31, 32))
    assert check(made.history(), Model(), Limits(nodes=5)).verdict is Verdict.UNDECIDED
    assert check(made.history(), Model()).verdict is Verdict.IMPOSSIBLE


def test_a_counter_example_is_small() -> None:
    made = begun(5)
    for number in range(10):
        made.write(10 + number, (4 + number, 4.5 + number))
        made.read(family(10 + number, V), (4.6 + number, 4.9 + number))
    made.read(family(3, V), (20, 21))
    made.read(family(19, V), (22, 23))
    assert len(minimise(made.history(), Model()).visible) == 1


def test_histories_can_be_kept(tmp_path: Path) -> None:
    made = begun(5)
    made.loss((5, 5), (4, 5), step=0, accumulate=True)
    made.history().save(tmp_path / "one.jsonl")
    loaded = History.load(tmp_path / "one.jsonl")
    assert check(loaded, Model()).verdict is Verdict.POSSIBLE
    assert [event.call for event in loaded.events] == ["CreateHead", "WriteTensor", "ComputeLoss"]


def test_a_tolerated_answer() -> None:
    made = begun(5)
    made.loss((5,), (4, 12), accepted=5, slices=((4, 6),), step=0, accumulate=True, outcome="FAILED_PRECONDITION")
    made.apply(0, 0, (7, 8), contributions=0, rows=2, microbatches=1)
    assert made.verdict() is Verdict.IMPOSSIBLE
    assert made.verdict(tolerated=frozenset({"closed-step-code"})) is Verdict.POSSIBLE


# The checker on what outlives a call or a server: retained rows, checkpoints, refused and unanswered calls, restarts. As
# in test_checker.py, each rule of docs/consistency.md has a history that keeps it and one that breaks it.


def test_backward_computes_from_what_was_retained() -> None:
    for c, scale, fine in ((5, 1.0, True), (9, 1.0, False), (5, 2.0, False)):
        made = begun(5)
        made.loss((5,), (4, 5), retain=True)
        made.backward(c, (6, 7), scale)
        possible(made) if fine else impossible(made, "dx of rows")


def test_what_changes_the_weights_releases() -> None:
    for outcome, fine in (("NOT_FOUND", True), ("OK", False)):
        made = begun(5)
        made.loss((5,), (4, 5), retain=True)
        made.write(9, (6, 7))
        made.backward(9, (8, 9), outcome=outcome)
        possible(made) if fine else impossible(made, "Backward")


def test_other_terms_for_retained_rows_are_refused() -> None:
    for outcome, fine in (("FAILED_PRECONDITION", True), ("OK", False)):
        made = begun(5)
        made.loss((5,), (4, 6), "A", retain=True)
        second = made.loss((5,), (5, 7), "B", retain=True, scale=2.0, outcome=outcome)
        if outcome != "OK":
            second.result.clear()
        possible(made) if fine else impossible(made, "retained with logit_scale")


# ---- Checkpoints ----


def test_a_checkpoint_holds_one_version() -> None:
    for seen, fine in ((family(5, V), True), (family(9, V), True), ((0, 9, 10, 15), False)):
        made = begun(5)
        made.write(9, (4, 8), sent=(5, 7))
        made.save((6, 7.5))
        made.load((9, 10))
        made.read(seen, (11, 12))
        possible(made) if fine else impossible(made, "were read")


def test_load_restores_the_step() -> None:
    for step, fine in ((0, True), (1, False)):
        made = begun(5)
        made.save((4, 5))
        made.apply(0, 0, (6, 7), contributions=0)
        made.load((8, 9), step=step)
        possible(made) if fine else impossible(made, "the answer says step 1, and step 0 is open")


# ---- Refused and unanswered calls, restarts ----


def test_a_refusal_needs_its_reason() -> None:
    for step, fine in ((1, True), (0, False)):
        made = begun(5)
        made.apply(step, 0, (4, 5), outcome="FAILED_PRECONDITION")
        possible(made) if fine else impossible(made, "FAILED_PRECONDITION has no reason now")


def test_an_unanswered_call_takes_effect_at_most_once() -> None:
    for seen, fine in (((5, 9, 9), True), ((5, 5, 5), True), ((5, 9, 5), False)):
        made = begun(5)
        made.write(9, (4, 5), outcome="UNAVAILABLE")
        for number, c in enumerate(seen):
            made.read(family(c, V), (6 + 2 * number, 7 + 2 * number))
        possible(made) if fine else impossible(made, "were read")


def test_after_a_restart_nothing_of_before_takes_effect() -> None:
    for seen, fine in ((5, True), (9, False)):
        made = begun(5)
        made.save((4, 5))
        made.write(9, (6, 7), outcome="UNAVAILABLE")
        made.incarnation = SERVER + 1
        made.call("Restart", (8, 9), "admin", incarnation=SERVER + 1)
        made.load((10, 11))
        made.read(family(seen, V), (12, 13))
        possible(made) if fine else impossible(made, "were read")


def test_a_head_with_open_streams_is_not_deleted() -> None:
    for outcome, fine in (("FAILED_PRECONDITION", True), ("OK", False)):
        made = begun(5)
        made.loss((5, 5), (4, 12), accepted=5, slices=((4, 6), (10, 11)))
        made.call("DeleteHead", (7, 8), "A", outcome)
        possible(made) if fine else impossible(made, "")


# Whether answers tell versions apart.


@pytest.mark.parametrize("vocab", [8, 16])
def test_neighbouring_versions_can_be_told_apart(vocab: int) -> None:
    for c in range(0, 400):
        for other in (c - 1, c + 1):
            assert not history.near(history.lse(family(c, vocab), 1.0), history.lse(family(other, vocab), 1.0))
            assert not history.near(history.lse_gradient(family(c, vocab), 1.0),
                                     history.lse_gradient(family(other, vocab), 1.0))
        assert history.decode_lse(history.lse(family(c, vocab), 1.0), vocab) == f"c={c}"


# The search's shortcuts change no verdict: small random histories, judged also by trying every order.


def tried(moments: list[Moment], model: Model, done: frozenset[int], state: State) -> bool:
    """Whether some order of the moments that are left is allowed, without any shortcut."""
    left = [number for number in range(len(moments)) if number not in done]
    if all(moments[number].optional for number in left):
        return True
    first_end = min(moments[number].end for number in left if not moments[number].optional)
    latest = max((moments[number].start for number in done), default=0)
    for number in left:
        moment = moments[number]
        if moment.start > first_end or moment.end < latest:
            continue
        if not done.issuperset(moment.needs) or done.intersection(moment.before):
            continue
        after = model.apply(state, moment)
        if not isinstance(after, str) and any(tried(moments, model, done | {number}, each) for each in after):
            return True
    return False


def drawn(chance: random.Random) -> History:
    """Calls at random times with answers drawn from what was ever there: about half of the histories are possible."""
    made = Made().create((0, 1))
    made.write(1, (2, 3))
    for number in range(chance.randrange(2, 5)):
        start = chance.uniform(4, 10)
        at = (start, start + chance.uniform(0.5, 5))
        outcome = chance.choice(("OK", "OK", "OK", "CANCELLED"))
        client, kind = f"C{number}", chance.randrange(8)
        if kind == 0:
            made.write(chance.choice((2, 3)), at, client, outcome=outcome, sent=chance.choice(
                (at[:1], (at[0], (at[0] + at[1]) / 2))))
        elif kind == 1:
            made.add(1, at, client, outcome=outcome, id=100 + chance.randrange(2), repeated=chance.choice((0, 0, V)))
        elif kind == 2:
            made.zero(at, client)
        elif kind == 3:
            added = chance.randrange(2)
            made.apply(0, added, at, client, contributions=added, outcome=outcome)
        elif kind == 4:
            made.loss((chance.choice((1, 2)),) * 2, at, client, step=0, accumulate=True, outcome=outcome,
                      repeated=chance.choice((0, 0, 2, 4)))
        elif kind == 5:
            made.loss((chance.choice((1, 2, 3)),), at, client)
        elif kind == 6:
            made.read(family(chance.randrange(2), V), at, client, role="gradient")
        else:
            made.read(family(chance.choice((0, 1, 2, 3)), V), at, client)
    return made.history()


@pytest.mark.parametrize("seed", range(2))
def test_shortcuts_change_no_verdict(seed: int) -> None:
    chance = random.Random(seed)
    verdicts: Counter[Verdict] = Counter()
    for _ in range(80):
        history = drawn(chance)
        hidden = frozenset(event.number for event in history.events if chance.random() < 0.1)
        plain = tried(expand(history, hidden), Model(), frozenset(), State(history.incarnation))
        verdict = check(history, Model(), hidden=hidden).verdict
        assert verdict is (Verdict.POSSIBLE if plain else Verdict.IMPOSSIBLE), history.events
        verdicts[verdict] += 1
    assert min(verdicts[Verdict.POSSIBLE], verdicts[Verdict.IMPOSSIBLE]) > 10, verdicts
