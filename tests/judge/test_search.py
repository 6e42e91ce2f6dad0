# SPDX-License-Identifier: Apache-2.0
"""The search's shortcuts change no verdict: small random histories, judged also by trying every order."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from checker import Verdict, check
from encoding import family
from history import History
from made import Made, V
from model import Model
from moments import Moment, expand
from state import State


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
