# SPDX-License-Identifier: Apache-2.0
"""What deploy/prometheus and deploy/grafana ask for is there: Prometheus, with the configuration as it stands, scrapes a server
that trains, two ranks on the CPU, and every query of rules and dashboard gives something.

Prometheus is Debian's. Scrapes and rules run every second instead of as often as the files say; nothing else is changed.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import pictures
import prometheus_process
import lossd
from prometheus_process import DASHBOARD, PATIENCE, RULES, Prometheus

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from servers import ServerProcess, free_port  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CONNECTIONS = 16
RANKED = os.environ.get("LOSSD_TEST_RANKED") == "1"  # the build has what ranks on CPUs exchange by

if shutil.which("prometheus") is None:
    pytest.skip("prometheus is not installed", allow_module_level=True)


def groups() -> list[dict[str, Any]]:
    return [group for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]


def needs_a_gpu(query: str) -> bool:
    return "lossd_gpu_" in query or "joules" in query or "gpu_utilization" in query


def is_asked(query: str) -> bool:
    """Whether a server here has an answer."""
    if RANKED and ("lossd_head_pool_" in query or "lossd_head_on_device" in query):
        return False  # several processes take no heads in host memory
    return not needs_a_gpu(query) and (RANKED or "lossd_rank_" not in query)


class Training:
    """Steps of a head, with all that a panel shows."""

    def __init__(self, client: lossd.Client) -> None:
        self._client = client
        self._rng = np.random.default_rng(1)
        self.started = time.monotonic()
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.errors: list[float] = []  # of the sampled rows of each step
        self.dropped: list[float] = []  # by a filtered row of each step
        self.tokens = 0
        client.create_head("lm", hidden_size=16, vocab_size=64, split="rows")
        client.create_head("divided", hidden_size=16, vocab_size=64, split="vocabulary")
        self._teachers = () if RANKED else ("maths", "code")
        for name in self._teachers:
            client.create_head(name, hidden_size=16, vocab_size=64, frozen=True, residency="host")

    def step(self) -> None:
        step = self._client.describe_head("lm").state.step
        total = 0.0
        for id, gradients in enumerate(("exact", "filtered", "sampled")):
            hidden = self._rng.standard_normal((32, 16), dtype=np.float32)
            targets = self._rng.integers(0, 64, 32)
            targets[:4] = -100  # are ignored
            result = self._client.compute_loss("lm", hidden, targets, step=step, id=id, accumulate=True,
                                               grad_hidden=True, reduction="sum",
                                               options=lossd.LossOptions(gradients=gradients))
            total += result.loss
            self.tokens += result.valid_rows
            if gradients == "sampled":
                self.errors.append(result.gradient_error)
            elif gradients == "filtered":
                self.dropped.append(result.dropped_mass / result.valid_rows)
        hidden = self._rng.standard_normal((8, 16), dtype=np.float32)
        self.tokens += self._client.compute_loss("lm", hidden, self._rng.integers(0, 64, 8)).valid_rows  # takes no part in the step
        self.norms.append(self._client.apply_step("lm", step, lossd.SGD(lr=0.125)).grad_norm)
        self.losses.append(total / 84)
        hidden = self._rng.standard_normal((8, 16), dtype=np.float32)
        self._client.compute_loss("divided", hidden, self._rng.integers(0, 64, 8), grad_hidden=True)
        for name in self._teachers:
            self._client.compute_loss(name, hidden, self._rng.integers(0, 64, 8))
        self._client.save_checkpoint("lm", keep=2)
        with pytest.raises(lossd.LossdError):
            self._client.describe_head("there is none")


@pytest.fixture(scope="module")
def monitored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, Training, Prometheus]]:
    flags = ["--http=127.0.0.1:0", f"--max_connections={CONNECTIONS}"]
    worker = None
    if RANKED:
        together = ["--backend=cpu", "--ranks=2", f"--leader=127.0.0.1:{free_port()}"]
        flags += ["--rank=0", *together]
        with (tmp_path_factory.mktemp("worker") / "log").open("wb") as log:
            worker = subprocess.Popen([os.environ["LOSSD_BINARY"], "--rank=1", *together], stdout=log, stderr=log)
    process = ServerProcess(*flags)
    ports = json.loads((process.folder / "ports").read_text())
    prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), ports["http"])
    with lossd.Client(process.target) as client:
        yield process, Training(client), prometheus
    prometheus.stop()
    process.stop()
    assert worker is None or worker.wait(PATIENCE) == 0


def test_every_query_has_an_answer(monitored: tuple[ServerProcess, Training, Prometheus]) -> None:
    process, training, prometheus = monitored
    host, port = process.target.split(":")
    # A limit is reached. Not closed before it is counted: the server accepts them when it comes to it.
    idle = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS + 1)]
    recorded = [rule["record"] for group in groups() for rule in group["rules"] if "record" in rule]
    wanted = {query for query in [*prometheus_process.queries(), *recorded] if is_asked(query)}
    assert len(wanted) > 40
    deadline = time.monotonic() + PATIENCE
    while wanted and time.monotonic() < deadline:
        training.step()
        wanted -= {query for query in wanted if prometheus.query(query)}
    for connection in idle:
        connection.close()
    assert not wanted, "no answer to " + "\n".join(sorted(wanted))
    for query in prometheus_process.queries():  # also those of a GPU can be read
        prometheus.query(query)


def test_the_figures_are_those_of_the_trainer(monitored: tuple[ServerProcess, Training, Prometheus]) -> None:
    _, training, prometheus = monitored
    training.step()

    def value(family: str) -> float:
        return float(prometheus.query(f'{family}{{head="lm"}}')[0]["value"][1])

    deadline = time.monotonic() + PATIENCE
    while value("lossd_head_step") != len(training.losses) - 1 and time.monotonic() < deadline:
        time.sleep(0.5)
    assert value("lossd_head_loss") == pytest.approx(training.losses[-1], rel=1e-5)
    assert value("lossd_head_gradient_norm") == pytest.approx(training.norms[-1], rel=1e-6)
    assert value("lossd_head_learning_rate") == 0.125
    assert value("lossd_head_step_rows") == 84
    assert value("lossd_head_gradient_error_ratio") == pytest.approx(training.errors[-1], rel=1e-6)
    assert value("lossd_head_dropped_probability") == pytest.approx(training.dropped[-1], rel=1e-6)
    assert value("lossd_valid_rows_total") == training.tokens
    busy = float(prometheus.query("lossd_device_busy_seconds_total")[0]["value"][1])
    assert 0 < busy < time.monotonic() - training.started


def test_the_picture_is_drawn_from_every_query(monitored: tuple[ServerProcess, Training, Prometheus]) -> None:
    _, training, prometheus = monitored
    training.step()
    panels = pictures.collect(prometheus.address, 60)
    assert [panel.title for panel in panels] == [panel["title"] for panel in prometheus_process.panels()]
    without = {"GPUs", "Heads in host memory"} if RANKED else {"GPUs", "Ranks"}
    empty = {panel.title for panel in panels if not panel.series and panel.row not in without}
    assert not empty
    for panel in panels:
        for name, times, values in panel.series:
            assert name and "{" not in name and len(times) == len(values) > 0, panel.title
    named = {panel.title: [name for name, _, _ in panel.series] for panel in panels}
    assert named["Loss by head"] == ["lm"]
    if RANKED:
        assert set(named["Ranks: computing"]) == {"rank 0", "rank 1"}
        assert {f"rank {rank} {what}" for rank in (0, 1) for what in ("sum_gradients", "spread_values", "row_statistics", "hidden_gradients")} == set(
            named["Ranks: exchanging"])
    assert set(named["Chunks per second by gradients"]) == {"exact", "filtered", "sampled"}


def test_the_picture_in_the_manual_is_of_this_dashboard() -> None:
    """It is drawn anew, by scripts/screenshots, when panels or queries change."""
    picture = (ROOT / "docs" / "figures" / "grafana-board.png").read_bytes()
    texts, at = {}, 8  # the chunks of PNG: length, kind, data, checksum
    while at < len(picture):
        length, kind = struct.unpack(">I4s", picture[at:at + 8])
        if kind == b"tEXt":
            keyword, _, text = picture[at + 8:at + 8 + length].partition(b"\0")
            texts[keyword.decode()] = text.decode()
        at += 12 + length
    assert texts[pictures.DIGEST] == prometheus_process.digest()


@pytest.mark.parametrize(("value", "unit", "text"), [
    (0.5, "percentunit", "50%"), (0.0123, "s", "12.3 ms"), (4.2e-5, "s", "42 µs"), (90.0, "s", "90 s"), (1536.0, "bytes", "1.5 KiB"),
    (2e6, "Bps", "2 MB/s"), (12345.0, "short", "12.3 K"), (0.0, "bool_yes_no", "No"), (float("nan"), "short", "-")])
def test_the_picture_has_units(value: float, unit: str, text: str) -> None:
    assert pictures.shown(value, unit) == text


def test_rules_are_in_order_on_a_server_that_is_well(monitored: tuple[ServerProcess, Training, Prometheus]) -> None:
    _, training, prometheus = monitored
    training.step()
    rules = [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [(rule["name"], rule.get("lastError")) for rule in rules]
    firing = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"] if alert["state"] == "firing"}
    assert firing <= {"LossdLimitReached"}  # max_connections was


def test_every_family_that_is_asked_for_is_documented() -> None:
    """A misspelt family of a rule or a panel would be silent on a GPU, where no test looks."""
    documented = set(re.findall(r"`((?:lossd|process)_\w+)`", (ROOT / "docs" / "reference" / "metrics.md").read_text()))
    texts = [rule["expr"] for group in groups() for rule in group["rules"]] + prometheus_process.queries()
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for text in texts for name in re.findall(r"\b(?:lossd|process)_\w+\b", text)}
    assert asked - documented - {"lossd_rows", "lossd_chunk_rows"} == set()


def test_each_alert_is_tested() -> None:
    names = [rule["alert"] for group in groups() for rule in group["rules"] if "alert" in rule]
    assert len(names) == len(set(names)) >= 20
    silent, _, recorded, *_ = tests = yaml.safe_load((Path(__file__).with_name("alerts_test.yml")).read_text())["tests"]
    assert {case["alertname"] for case in silent["alert_rule_test"]} == set(names)
    assert {case["alertname"] for test in tests for case in test.get("alert_rule_test", []) if case["exp_alerts"]} == set(names)
    asked = " ".join(case["expr"] for case in recorded["promql_expr_test"])
    for record in ("lossd:rows:rate1m", "lossd:device_busy:ratio1m", "lossd:device_seconds_per_row:rate5m", "lossd:joules_per_row:rate5m"):
        assert record in asked


def test_the_pages_count_the_alerts() -> None:
    names = [rule["alert"] for group in groups() for rule in group["rules"] if "alert" in rule]
    for page in ("docs/watching.md", "README.md"):
        counts = re.findall(r"(\d+) alerts", (ROOT / page).read_text())
        assert counts == [str(len(names))], page


def test_the_page_lists_each_alert() -> None:
    names = [rule["alert"] for group in groups() for rule in group["rules"] if "alert" in rule]
    assert re.findall(r"^\| `(Lossd\w+)` \|", (ROOT / "docs/watching.md").read_text(), re.MULTILINE) == names


def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(Path(__file__).with_name("alerts_test.yml"))], capture_output=True,
                          text=True, check=False, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr


def test_panels_have_room_and_numbers_of_their_own() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
