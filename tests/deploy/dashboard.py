# SPDX-License-Identifier: Apache-2.0
"""What deploy/grafana/lossd.json asks Prometheus, panel by panel, with every variable at "All"."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

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
