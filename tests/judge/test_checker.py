# SPDX-License-Identifier: Apache-2.0
"""The checker and its model, with histories made by hand: of each rule of docs/consistency.md one that keeps it and one
that breaks it. No server runs."""

from __future__ import annotations

from pathlib import Path

from checker import Limits, Verdict, check
from encoding import family
from history import History
from made import ROWS, SERVER, Made, V
from minimise import minimise
from model import Model
from verdicts import begun, impossible, possible


# ---- Administration is linearizable ----


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
