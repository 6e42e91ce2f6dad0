# SPDX-License-Identifier: Apache-2.0
"""Runs a server for an hour under everything that a bad day brings, and says whether anything grew.

    LOSSD_BINARY=build/cpu-only/bin/lossd python3 tests/soak/soak.py --seconds=3600 --report=soak.json

Two trainers, each a process with a head of its own, train through a network that cuts their connections; they are killed
in turn, all the time. The server is killed in the first quarter of the run, five times, and its heads come back from
checkpoints. Meanwhile others read slowly, fall silent, abandon what they began, ask for what is refused (neighbours.py), and
scrape /metrics every second. A client that sends 64 rows every half a second measures latency. verdict.py decides.

Exit status 1 if something grew, the server ended by itself or did not answer, or a step did not have every row once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

import neighbours  # noqa: E402
import verdict  # noqa: E402
from servers import CutProxy, ServerProcess  # noqa: E402

import lossd  # noqa: E402


# What a fixed piece of work takes another process on this machine now: what latencies are compared with.
#
# The machine of a soak run may do other work too; then this takes as much longer as an answer of the server does.

_WORK = """
import sys
import numpy as np
a = np.ones((64, 256), np.float32)
b = np.ones((256, 256), np.float32)
for line in sys.stdin:
    for _ in range(4):
        a @ b
    print("done", flush=True)
"""


class Control:
    """A process that computes about as much as the server does for one measured call. For one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         text=True, bufsize=1)
        self.seconds()  # it has started

    def seconds(self) -> float:
        assert self._process.stdin is not None and self._process.stdout is not None
        begin = time.monotonic()
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError("the process that latencies are compared with has ended")
        return time.monotonic() - begin

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


# The process of a trainer (trainer.py), killed and started again.


class Trainer:
    """One trainer at a time; its log goes on over restarts. For one thread at a time."""

    def __init__(self, target: str, head: str, log: Path) -> None:
        self._command = [sys.executable, str(Path(__file__).with_name("trainer.py")), target, head, str(log)]
        self._log = log
        self.ended_by_themselves = 0  # which none does unless something is wrong; it says what on its standard error
        self._process = subprocess.Popen(self._command)

    def restart(self) -> None:
        """kill -9, at whatever moment this is, and a new one."""
        self.kill()
        self._process = subprocess.Popen(self._command)

    def kill(self) -> None:
        if self._process.poll() is not None:
            self.ended_by_themselves += 1
        self._process.kill()
        self._process.wait()

    def lines(self) -> list[str]:
        """What all trainers so far have written; kill -9 leaves no half lines, they are written at once."""
        return self._log.read_text().splitlines() if self._log.exists() else []


# Calls that wait for their client end after 1.5 s, so that a run has thousands of them.
FLAGS = ("--http=127.0.0.1:0", "--slice_bytes=1MiB", "--staging_bytes=32MiB", "--workspace_bytes=32MiB",
         "--open_timeout=1500ms", "--idle_timeout=1500ms", "--send_timeout=1500ms", "--retained_timeout=5s",
         "--checkpoint_limit_bytes=1GiB", "--log_level=off")
SERVER_KILLS = (0.04, 0.08, 0.12, 0.16, 0.20)  # parts of the run
SECONDS_BETWEEN_TRAINER_KILLS = 40.0  # at most; and at least two in a run
MEAN_BYTES_BETWEEN_CUTS = 20 << 20
LONGEST_SILENCE = 600.0  # seconds without any loss computed: a server that does not answer


class Soak:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.counts: Counter[str] = Counter()
        self.samples: list[verdict.Sample] = []
        self.latencies: list[verdict.Latency] = []
        self.problems: list[str] = []
        self._begin = time.monotonic()
        self._over = threading.Event()
        self._server_up = threading.Lock()  # held while the server is killed and started
        self._folder = tempfile.TemporaryDirectory(prefix="lossd-soak.")  # removed with this object
        self._server = ServerProcess(*FLAGS)
        self._proxies = [CutProxy(self._server.target, MEAN_BYTES_BETWEEN_CUTS, seed) for seed in range(2)]
        self._trainers = [Trainer(proxy.target, f"trained-{i}", Path(self._folder.name) / f"trainer-{i}")
                          for i, proxy in enumerate(self._proxies)]

    def run(self) -> None:
        work: list[Callable[[], None]] = [self._kill_servers, self._kill_trainers]
        work += [lambda once=once: self._again(once, 0.2) for once in neighbours.NEIGHBOURS]
        work += [lambda: self._again(lambda _: neighbours.half_a_request(self._http()), 0.5, "half_a_request"),
                 lambda: self._again(lambda target: neighbours.half_a_request(target), 2.0, "half_a_request_grpc"),
                 lambda: self._again(lambda _: neighbours.scrape(self._http()), 1.0, "scrape"),
                 self._measure_latency]
        threads = [threading.Thread(target=each, daemon=True) for each in work]
        for each in threads:
            each.start()
        self._sample()
        self._over.set()
        for each in threads:  # first, since one of them starts trainers
            each.join(timeout=90)
        for trainer in self._trainers:
            trainer.kill()
        for proxy in self._proxies:
            proxy.close()
        self._server.stop()

    def now(self) -> float:
        return time.monotonic() - self._begin

    def _http(self) -> str:
        return str(json.loads((self._server.folder / "ports").read_text())["http"])

    def _again(self, once: Callable[[str], None], pause: float, name: str = "") -> None:
        """Runs a neighbour until the end."""
        name = name or once.__name__
        while not self._over.wait(pause):
            try:
                once(self._server.target)
                self.counts[name] += 1
            except (*neighbours.EXPECTED_ERRORS, ValueError, StopIteration):
                self.counts[f"{name}, ended early"] += 1

    # ---- Kills ----

    def _wait_until(self, part: float) -> bool:
        """False: the run is over."""
        return not self._over.wait(max(0.0, part * self.seconds - self.now()))

    def _kill_servers(self) -> None:
        for part in SERVER_KILLS:
            if not self._wait_until(part):
                return
            with self._server_up:
                self._server.kill()
                self._server.start()
            self.counts["server killed"] += 1

    def _kill_trainers(self) -> None:
        number = 0
        while not self._over.wait(min(SECONDS_BETWEEN_TRAINER_KILLS, 0.4 * self.seconds)):
            self._trainers[number % len(self._trainers)].restart()
            self.counts["trainer killed"] += 1
            number += 1

    # ---- Measures ----

    def _sample(self) -> None:
        """Reads what the server takes, until the end of the run or of the server."""
        while self.now() < self.seconds and not self.problems:
            with self._server_up:
                if (status := self._server.ended()) is not None:
                    self.problems.append(f"the server ended by itself, with status {status}")
                    return
                self.samples.append(self._look())
            newest = self.latencies[-1].time if self.latencies else 0.0
            if self.now() - newest > LONGEST_SILENCE:
                self.problems.append(f"no loss was computed for {LONGEST_SILENCE:.0f} s")
            time.sleep(min(1.0, self.seconds / 200))

    def _look(self) -> verdict.Sample:
        folder = Path("/proc") / str(self._server.pid)
        fields = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return verdict.Sample(time=self.now(), process=self._server.pid, memory=int(fields["VmRSS"].split()[0]) << 10,
                              descriptors=len(os.listdir(folder / "fd")), threads=int(fields["Threads"]))

    def _measure_latency(self) -> None:
        hidden, targets = np.ones((64, neighbours.HIDDEN), np.float32), [1] * 64
        control = Control()
        while not self._over.is_set():
            try:
                with lossd.Client(self._server.target, channels=1, wait_for_server=True) as client:
                    neighbours.make_heads(client)
                    client.create_head("measured", hidden_size=neighbours.HIDDEN, vocab_size=256, if_exists="keep")
                    while not self._over.wait(min(0.5, self.seconds / 200)):
                        other = control.seconds()
                        begin = time.monotonic()
                        client.compute_loss("measured", hidden, targets, grad_hidden=True)
                        self.latencies.append(verdict.Latency(self.now(), time.monotonic() - begin, other))
            except lossd.LossdError:
                self.counts["latency, ended early"] += 1
                self._over.wait(0.2)
        control.close()

    # ---- The end ----

    def findings(self) -> list[verdict.Finding]:
        findings = verdict.judge(self.samples, self.latencies, self.seconds)
        for number, trainer in enumerate(self._trainers):
            lines = trainer.lines()
            kinds = Counter(line.split(" ", 1)[0] for line in lines)
            self.counts["steps"] += kinds["step"]
            self.counts["steps begun again"] += kinds["again"]
            wrong = [line for line in lines if line.startswith("wrong")]
            figures = f"{kinds['step']} steps, {trainer.ended_by_themselves} trainers ended by themselves"
            findings.append(verdict.Finding(f"trainer {number}", "; ".join([figures, *wrong]),
                                            kinds["step"] > 0 and not wrong and not trainer.ended_by_themselves))
        self.counts["connections cut"] = sum(proxy.cuts for proxy in self._proxies)
        return findings + [verdict.Finding("server", problem, False) for problem in self.problems]


def main() -> int:
    parser = argparse.ArgumentParser(description="Looks for what grows in a server over a long and bad day.")
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--report", type=Path, help="a JSON file: findings, what was done, all samples")
    options = parser.parse_args()
    soak = Soak(options.seconds)
    soak.run()
    findings = soak.findings()
    for name, count in sorted(soak.counts.items()):
        print(f"{count:8d} {name}")
    for finding in findings:
        print(f"{'passed' if finding.passed else 'FAILED'}  {finding.what}: {finding.figures}")
    if options.report:
        options.report.write_text(json.dumps({
            "seconds": options.seconds, "findings": [asdict(each) for each in findings], "done": soak.counts,
            "samples": [list(asdict(each).values()) for each in soak.samples],
            "latencies": [[round(each.time, 2), round(each.seconds, 5), round(each.control, 5)] for each in soak.latencies]}))
    return 0 if all(finding.passed for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main())
