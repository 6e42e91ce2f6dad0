# SPDX-License-Identifier: Apache-2.0
"""Random clients of one head: every call, with pauses, cancellations, cut connections and restarts; all from a seed.

Calls race, so a seed gives the same calls, not the same history.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from history import Event, History, family
from clients import Message, Named, RawClient, TrainerClient, halves, sleeper, whole
from stage import Stage

ROWS = 6  # of every microbatch


@dataclass(frozen=True)
class Mix:
    """What the clients of a history do: weights of their calls, and what befalls them."""

    calls: dict[str, int]
    clients: int = 3
    trainers: int = 1
    calls_each: int = 12
    restarts: int = 0
    ranks: int = 1  # processes that are the server; a restart is of all, after any of them was killed
    pause: float = 0.004  # seconds at most, between messages of a call
    mean_bytes: int = 0  # after which a trainer's connection is cut; 0: never
    pieces: bool = True  # calls of several messages
    trainer_calls: dict[str, int] = field(default_factory=lambda: {
        "compute": 6, "contribute": 2, "apply": 3, "zero": 1})


_READS = {"value": 4, "gradient": 2, "moment1": 1, "describe": 2, "list": 1, "norm": 2}
_CHANGES = {"write": 3, "apply": 3, "zero": 1, "contribute": 3}
_STREAMS = {"loss": 5, "accumulate": 3, "retain": 2, "backward": 3, "release": 1, "embed": 3, "row_gradients": 2}
_HEADS = {"save": 2, "load": 2, "recreate": 1}

MIXES: dict[str, Mix] = {
    # All there is.
    "all": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}),
    "cuts": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 2}, trainers=2, mean_bytes=3000),
    "kills": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}, restarts=2, trainers=1, calls_each=10),
    # Servers of several processes, of which any one is killed.
    "ranks2": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}, restarts=1, ranks=2),
    "ranks4": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}, restarts=1, ranks=4),
    # The same without trainers, whose clients repeat calls by themselves: what the server alone answers for.
    "calls": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}, clients=4, trainers=0),
    "crashes": Mix({**_READS, **_CHANGES, **_STREAMS, **_HEADS, "cancel": 1}, restarts=2, trainers=0, calls_each=10),
    # Parts of it, whose histories go deeper in one respect: calls that change the weights never meet streams, and only
    # a trainer's own step ends its gradients.
    "administration": Mix({**_READS, **_CHANGES, "save": 2, "load": 2, "recreate": 1}, trainers=0, pieces=False),
    "ledger": Mix({"accumulate": 4, "row_gradients": 3, "cancel": 3, "contribute": 2, "zero": 1, "describe": 3, "list": 1, "norm": 1,
                   "value": 1, "gradient": 1, "save": 1}, trainers=0),
    "trainers": Mix({"accumulate": 2, "contribute": 2, "describe": 2, "gradient": 1, "norm": 1}, clients=1, trainers=2,
                    mean_bytes=4000, pieces=False, trainer_calls={"compute": 6, "contribute": 2}),
}


class _Common:
    """What the clients of a history know of each other's doings, roughly: enough for most calls to make sense."""

    def __init__(self, vocab: int, momentum: int) -> None:
        self.vocab = vocab
        self.momentum = momentum
        self.step = 0
        self.named: Named | None = None  # None: no answer has told it yet
        self.saves: list[str] = []
        self._lock = threading.Lock()
        self._numbers = 0

    def learn(self, event: Event) -> Event:
        state = event.result.get("state")
        if state:
            self.step = state["step"]
            self.named = (state["incarnation"], state["generation"])
        return event

    def next_number(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers


def _contribution(id: int, common: _Common) -> tuple[int, ...]:
    """The same whenever the id comes: a contribution is its id's."""
    return family(id % 7 - 2, common.vocab)


class _RandomClient:
    def __init__(self, seed: str, mix: Mix, common: _Common) -> None:
        self._random = random.Random(seed)
        self._mix = mix
        self._common = common

    def _pauses(self) -> Callable[[int], None]:
        return sleeper(*(self._random.choice((0.0, self._random.uniform(0, self._mix.pause))) for _ in range(3)))

    def _step(self) -> int:
        return max(0, self._common.step + self._random.choice((0, 0, 0, 0, 0, -1, 1)))

    def _draw(self, weights: dict[str, int]) -> str:
        return self._random.choices(list(weights), list(weights.values()))[0]


class _RawWorker(_RandomClient):
    def __init__(self, seed: str, mix: Mix, common: _Common, client: RawClient) -> None:
        super().__init__(seed, mix, common)
        self._client = client

    def run(self) -> None:
        for _ in range(self._mix.calls_each):
            event = getattr(self, "_" + self._draw(self._mix.calls))()
            self._common.learn(event)

    def _named(self) -> Named | None:
        return self._random.choice((None, self._common.named))

    def _slices(self) -> list[tuple[int, int]]:
        choices = [[(0, ROWS)]]
        if self._mix.pieces:
            choices += [[(0, 2), (2, ROWS)], [(0, 3), (3, 5), (5, ROWS)], [(2, ROWS)]]
        return self._random.choice(choices)

    def _messages(self, values: tuple[int, ...]) -> list[Message]:
        return self._random.choice((whole, halves if self._mix.pieces else whole))(values)

    def _loss(self) -> Event:
        step = self._random.choice((None, self._step()))
        return self._client.compute_loss(self._random.randrange(4), self._slices(), ROWS, step=step,
                                         scale=self._random.choice((1.0, 0.5)), pause=self._pauses(),
                                         on_slice=self._pauses())

    def _accumulate(self) -> Event:
        return self._client.compute_loss(self._random.randrange(4), self._slices(), ROWS, step=self._step(),
                                         accumulate=True, pause=self._pauses(),
                                         named=self._named())

    def _embed(self) -> Event:
        step = self._random.choice((None, self._step()))
        return self._client.compute_loss(0, self._slices(), ROWS, step=step, embedding=True, pause=self._pauses(),
                                         on_slice=self._pauses())

    def _row_gradients(self) -> Event:
        return self._client.compute_loss(50 + self._random.randrange(3), self._slices(), ROWS, step=self._step(),
                                         accumulate=True, embedding=True, pause=self._pauses(), named=self._named())

    def _cancel(self) -> Event:
        return self._client.compute_loss(
            self._random.randrange(4), self._slices(), ROWS, step=self._step(), accumulate=True, pause=self._pauses(),
            cancel_after=self._random.uniform(0.0005, 0.006))

    def _retain(self) -> Event:
        return self._client.compute_loss(self._random.randrange(2), [(0, 3), (3, ROWS)], ROWS, retain=True,
                                         scale=self._random.choice((1.0, 1.0, 2.0)), pause=self._pauses())

    def _backward(self) -> Event:
        return self._client.backward(self._random.randrange(2), ROWS, step=self._random.choice((None, self._step())))

    def _release(self) -> Event:
        return self._client.release(self._random.randrange(2))

    def _value(self) -> Event:
        return self._client.read("value")

    def _gradient(self) -> Event:
        return self._client.read("gradient")

    def _moment1(self) -> Event:
        return self._client.read("moment1")

    def _describe(self) -> Event:
        return self._client.describe()

    def _list(self) -> Event:
        return self._client.list_heads()

    def _norm(self) -> Event:
        return self._client.grad_norm(self._random.choice((None, self._step())))

    def _write(self) -> Event:
        values = family(self._random.randrange(20, 300), self._common.vocab)
        return self._client.write(self._messages(values), pause=self._pauses())

    def _contribute(self) -> Event:
        id = 100 + self._random.randrange(10)
        return self._client.add_gradient(self._step(), id, self._messages(_contribution(id, self._common)),
                                         pause=self._pauses(), named=self._named())

    def _apply(self) -> Event:
        expected = self._random.choice((None, None, None, [self._random.randrange(4)]))
        return self._client.apply_step(self._step(), self._common.momentum, expected, self._named())

    def _zero(self) -> Event:
        return self._client.zero_gradients(self._step())

    def _save(self) -> Event:
        name = f"s{self._common.next_number()}"
        event = self._client.save(name)
        self._common.saves.append(name)
        return event

    def _load(self) -> Event:
        return self._client.load(self._random.choice(self._common.saves or ["none"]))

    def _recreate(self) -> Event:
        self._client.delete()
        return self._client.create(self._common.vocab)


class _TrainerWorker(_RandomClient):
    def __init__(self, seed: str, mix: Mix, common: _Common, client: TrainerClient, number: int) -> None:
        super().__init__(seed, mix, common)
        self._client = client
        self._first_id = 10 * (number + 1)

    def run(self) -> None:
        """Starts its step again after every error that tells it to."""
        for _ in range(self._mix.calls_each):
            event = self._common.learn(getattr(self, "_" + self._draw(self._mix.trainer_calls))())
            if event.outcome == "ABORTED":
                self._client.acknowledge()

    def _compute(self) -> Event:
        return self._client.compute_loss(self._first_id + self._random.randrange(3), ROWS, step=self._step(),
                                         slice_rows=self._random.choice((1, 3, ROWS)))

    def _contribute(self) -> Event:
        id = 1000 + self._first_id + self._random.randrange(3)
        return self._client.add_gradient(self._step(), id, whole(_contribution(id, self._common)))

    def _apply(self) -> Event:
        expected = self._random.choice((None, [self._first_id]))
        return self._client.apply_step(self._step(), self._common.momentum, expected)

    def _zero(self) -> Event:
        return self._client.zero_gradients(self._step())


def run(stage: Stage, mix: Mix, seed: str) -> History:
    """One history."""
    chance = random.Random(seed)
    common = _Common(stage.vocab, chance.choice((0, 1)))
    admin = stage.raw("admin")
    admin.create(stage.vocab)
    admin.write(whole(family(50, stage.vocab)))
    first_shares = chance.choice((True, False))
    workers: list[_RawWorker | _TrainerWorker] = []
    for number in range(mix.clients):
        workers.append(_RawWorker(f"{seed}-{number}", mix, common, stage.raw(f"C{number}")))
    for number in range(mix.trainers):
        proxy = stage.proxy(mix.mean_bytes, chance.randrange(1 << 30)) if mix.mean_bytes else None
        # Every second one in shared memory: its rows do not pass through the proxy, its calls do.
        shares = first_shares == (number % 2 == 0)
        trainer = stage.trainer(f"T{number}", proxy, transport="auto" if shares else "grpc")
        workers.append(_TrainerWorker(f"{seed}-T{number}", mix, common, trainer, number))
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for _ in range(mix.restarts):
        threading.Event().wait(chance.uniform(0.03, 0.15))
        stage.restart()
        admin.create(stage.vocab) if chance.random() < 0.5 or not common.saves else admin.load(common.saves[-1])
    for thread in threads:
        thread.join()
    return stage.history()
