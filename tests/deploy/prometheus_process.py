# SPDX-License-Identifier: Apache-2.0
"""A Prometheus of one's own, Debian's, with deploy/prometheus as it stands: only the target and how often things happen are others.

With what the dashboard deploy/grafana/lossd.json asks it.

  prometheus_process.py TARGET FOLDER [SECONDS]     scrapes TARGET (HOST:PORT) every SECONDS (default 5) until it gets SIGTERM;
                                                    FOLDER/address says where it listens
"""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any


# What deploy/grafana/lossd.json asks Prometheus, panel by panel, with every variable at "All".

FILE = Path(__file__).resolve().parents[2] / "deploy" / "grafana" / "lossd.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())
VARIABLES = {"$job": ".*", "$instance": ".*", "$head": ".*"}


def panels() -> list[dict[str, Any]]:
    """Those with queries, in the order of the board, each with the title of its row as "row"."""
    found, row = [], ""
    for panel in sorted(DASHBOARD["panels"], key=lambda each: (each["gridPos"]["y"], each["gridPos"]["x"])):
        if panel["type"] == "row":
            row = panel["title"]
        else:
            found.append({**panel, "row": row})
    return found


def expression(target: dict[str, Any]) -> str:
    """The query of a panel's target."""
    query: str = target["expr"]
    for variable, value in VARIABLES.items():
        query = query.replace(variable, value)
    assert "$" not in query, query
    return query


def queries() -> list[str]:
    return [expression(target) for panel in panels() for target in panel["targets"]]


def legend(target: dict[str, Any], labels: dict[str, str]) -> str:
    """A series' name as the board shows it."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda name: labels.get(name[1], ""), target["legendFormat"])


def digest() -> str:
    """Of what a picture of the board shows: panels, their places and their queries."""
    shown = [[panel["title"], panel["type"], panel["gridPos"], panel["targets"], panel["fieldConfig"]["defaults"].get("unit")]
             for panel in panels()]
    return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()


# The process.

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
RULES = [DEPLOY / "prometheus" / name for name in ("lossd-recording.yml", "lossd-alerts.yml")]
PATIENCE = 240.0  # seconds


class Prometheus:
    """Runs until stop(), on a loopback port that it chooses."""

    def __init__(self, folder: Path, scraped: str, seconds: float = 1) -> None:
        import yaml  # here, because pictures.py runs where there is none

        interval = f"{int(seconds * 1000)}ms"
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
        for path in RULES:
            quick = yaml.safe_load(path.read_text())
            for group in quick["groups"]:
                group["interval"] = interval
            (folder / path.name).write_text(yaml.safe_dump(quick))
        config["global"] = {"evaluation_interval": interval}
        for job in config["scrape_configs"]:
            job["scrape_interval"] = interval
            job["static_configs"] = [{"targets": [scraped]}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = open(folder / "log", "wb")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
             "--web.listen-address=127.0.0.1:0"], stderr=self._log, stdout=self._log)
        self.address = self._await_address(folder / "log")

    def _await_address(self, log: Path) -> str:
        # With port 0 it says "Listening on address=127.0.0.1:0"; the kernel knows better.
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            assert self._process.poll() is None, log.read_text()
            for port in self._listening_ports():
                return f"127.0.0.1:{port}"
            time.sleep(0.2)
        raise AssertionError("prometheus does not listen:\n" + log.read_text())

    def _listening_ports(self) -> Iterator[int]:
        sockets = set()
        for descriptor in Path(f"/proc/{self._process.pid}/fd").iterdir():
            try:
                match = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            except FileNotFoundError:
                continue
            if match:
                sockets.add(match.group(1))
        for line in Path(f"/proc/{self._process.pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:  # listens
                yield int(fields[1].split(":")[1], 16)

    def get(self, path: str, **parameters: str) -> Any:
        return get(self.address, path, **parameters)

    def query(self, expression: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._log.close()


def get(address: str, path: str, **parameters: str) -> Any:
    """What /api/v1/PATH of the Prometheus at `address` answers."""
    url = f"http://{address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{parameters}: {error.read().decode()}") from error


def main(target: str, folder: Path, seconds: float) -> None:
    folder.mkdir(exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    prometheus = Prometheus(folder, target, seconds)
    (folder / "address.new").write_text(prometheus.address)
    (folder / "address.new").rename(folder / "address")
    signal.sigwait([signal.SIGTERM, signal.SIGINT])
    prometheus.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]) if len(sys.argv) > 3 else 5)
