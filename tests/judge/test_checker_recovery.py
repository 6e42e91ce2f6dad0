# SPDX-License-Identifier: Apache-2.0
"""The checker on what outlives a call or a server: retained rows, checkpoints, refused and unanswered calls, restarts. As
in test_checker.py, each rule of docs/consistency.md has a history that keeps it and one that breaks it."""

from __future__ import annotations

from encoding import family
from made import SERVER, V
from verdicts import begun, impossible, possible

# ---- Deferred microbatches ----


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
