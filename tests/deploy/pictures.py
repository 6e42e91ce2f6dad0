# SPDX-License-Identifier: Apache-2.0
"""The pictures of monitoring in the manual: the board of Grafana, and Prometheus's page of alerts. scripts/screenshots calls it.

  pictures.py board PROMETHEUS SECONDS FILE.png     PROMETHEUS: HOST:PORT; SECONDS: how far back the panels go
  pictures.py alerts PROMETHEUS ALERT FILE.png      waits up to ten minutes until ALERT fires
"""

from __future__ import annotations

import io
import math
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "server" / "metrics" / "page"))

import prometheus_process  # noqa: E402
from browser import Browser  # noqa: E402
from prometheus_process import get  # noqa: E402


# The board of deploy/grafana/lossd.json, drawn from what Prometheus answers to its queries, with matplotlib while a server trains: the
# same figures at the same places, not a screenshot of Grafana.
#
# Rows of the board without a single value, as those of GPUs where there is none, are left out. The picture says of which panels it was drawn
# (DIGEST); test_monitoring.py compares that with the dashboard.

DIGEST = "lossd-dashboard"  # keyword of the picture's text chunk
POINTS = 240  # of a series
COLUMNS, UNIT = 24, 0.62  # of the board's grid; inches of a cell's width
HEIGHT = 0.30  # inches of a cell
COLOURS = ["#3274d9", "#ff9830", "#56a64b", "#e02f44", "#8f3bb8", "#37872d", "#c4162a", "#1f60c4", "#fa6400", "#b877d9"]


@dataclass
class Panel:
    title: str
    row: str
    kind: str  # timeseries or stat
    unit: str
    place: dict[str, float]
    least: float | None = None  # where the axis begins
    series: list[tuple[str, list[float], list[float]]] = field(default_factory=list)  # name, times, values


def collect(address: str, seconds: float) -> list[Panel]:
    """All panels with what Prometheus has of the last `seconds`."""
    now = time.time()
    found = []
    for each in prometheus_process.panels():
        defaults = each["fieldConfig"]["defaults"]
        panel = Panel(each["title"], each["row"], each["type"], defaults.get("unit", "short"), each["gridPos"], defaults.get("min"))
        for target in each["targets"]:
            answer = get(address, "query_range", query=prometheus_process.expression(target), start=str(now - seconds), end=str(now),
                         step=str(max(1.0, seconds / POINTS)))
            for series in answer["result"]:
                times, values = zip(*((float(at), float(value)) for at, value in series["values"]))
                panel.series.append((prometheus_process.legend(target, series["metric"]), list(times), list(values)))
        found.append(panel)
    return found


def shown(value: float, unit: str) -> str:
    """As Grafana shows a value of the unit."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.3g}%"
    if unit == "bool_yes_no":
        return "Yes" if value else "No"
    if unit == "s" and 0 < abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    if unit in ("bytes", "Bps"):
        size, prefixes = abs(value), ["", "Ki", "Mi", "Gi", "Ti"] if unit == "bytes" else ["", "k", "M", "G", "T"]
        base = 1024 if unit == "bytes" else 1000
        while size >= base and len(prefixes) > 1:
            size, prefixes = size / base, prefixes[1:]
        return f"{math.copysign(size, value):.3g} {prefixes[0]}B" + ("/s" if unit == "Bps" else "")
    if unit == "short" and abs(value) >= 1000:
        return f"{value / 1000:.3g} K" if abs(value) < 1e6 else f"{value / 1e6:.3g} Mil"
    return f"{value:.3g}" + {"s": " s", "watt": " W", "celsius": " °C", "joule": " J"}.get(unit, "")


def draw(panels: list[Panel], heading: str) -> bytes:
    """The picture, as PNG."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image, PngImagePlugin

    alive = {panel.row for panel in panels if panel.series}
    panels = [panel for panel in panels if panel.row in alive]
    tops, y = {}, 1.1  # of rows and lines of panels, in cells
    for row in dict.fromkeys(panel.row for panel in panels):
        tops[row] = y
        y += 1.4
        for line in sorted({panel.place["y"] for panel in panels if panel.row == row}):
            members = [panel for panel in panels if panel.row == row and panel.place["y"] == line]
            for panel in members:
                panel.place = {**panel.place, "y": y}
            y += max(panel.place["h"] for panel in members)
    width, height = COLUMNS * UNIT, y * HEIGHT
    pyplot.rcParams.update({"font.size": 7, "axes.edgecolor": "#ccccdc", "xtick.color": "#55565c", "ytick.color": "#55565c"})
    figure = pyplot.figure(figsize=(width, height), facecolor="#f4f5f5")
    figure.text(0.008, 1 - 0.5 / y, heading, fontsize=9, va="top", color="#24292e")
    for row, top in tops.items():
        figure.text(0.008, 1 - (top + 0.95) / y, row, fontsize=10, weight="bold", va="bottom", color="#24292e")
    for panel in panels:
        left, top = panel.place["x"] / COLUMNS, panel.place["y"] / y
        box = (left + 0.004, 1 - top - panel.place["h"] / y + 0.12 / y, panel.place["w"] / COLUMNS - 0.008, (panel.place["h"] - 0.24) / y)
        figure.add_artist(pyplot.Rectangle(box[:2], box[2], box[3], transform=figure.transFigure, facecolor="white", edgecolor="#dcdde0",
                                           linewidth=0.7, zorder=-1))
        figure.text(box[0] + 0.006, box[1] + box[3] - 0.3 / y, panel.title, fontsize=8, weight="bold", va="top", color="#24292e")
        if not panel.series:
            figure.text(box[0] + box[2] / 2, box[1] + box[3] / 2.4, "No data", ha="center", va="center", color="#7b8087", fontsize=9)
        elif panel.kind == "stat":
            _draw_stat(figure, panel, box)
        else:
            _draw_lines(figure, panel, box, y)
    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=100, facecolor=figure.get_facecolor())
    text = PngImagePlugin.PngInfo()
    text.add_text(DIGEST, prometheus_process.digest())
    small = io.BytesIO()
    Image.open(buffer).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True, pnginfo=text)
    return small.getvalue()


def _draw_stat(figure: Any, panel: Panel, box: tuple[float, float, float, float]) -> None:
    values = [(name, shown(values[-1], panel.unit)) for name, _, values in panel.series]
    for place, (name, value) in enumerate(values):
        x = box[0] + box[2] * (place + 0.5) / len(values)
        figure.text(x, box[1] + box[3] * 0.42, value, ha="center", va="center", fontsize=17 if len(values) == 1 else 12, color="#37872d")
        if len(values) > 1:
            figure.text(x, box[1] + box[3] * 0.16, name, ha="center", va="center", fontsize=7, color="#55565c")


def _draw_lines(figure: Any, panel: Panel, box: tuple[float, float, float, float], rows: float) -> None:
    from matplotlib.dates import DateFormatter, date2num
    from matplotlib.ticker import FuncFormatter, MaxNLocator
    import datetime

    lines = (len(panel.series) + 3) // 4
    bottom = box[1] + (0.95 + 0.45 * lines) / rows
    axes = figure.add_axes((box[0] + 0.035, bottom, box[2] - 0.043, box[1] + box[3] - 1.15 / rows - bottom), facecolor="white")
    for (name, times, values), colour in zip(panel.series, COLOURS * 9):
        dates = date2num([datetime.datetime.fromtimestamp(at, datetime.timezone.utc) for at in times])
        axes.plot(dates, values, linewidth=1, color=colour, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(DateFormatter("%H:%M:%S"))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: shown(value, panel.unit)))
    if panel.least is not None:
        axes.set_ylim(bottom=panel.least)
    axes.grid(color="#ebecee", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, labelsize=6.5)
    axes.legend(loc="upper left", bbox_to_anchor=(box[0] + 0.002, bottom - 0.5 / rows), bbox_transform=figure.transFigure, ncols=4,
                frameon=False, fontsize=6.5, handlelength=1.2, columnspacing=1, borderaxespad=0.3)


def board(address: str, seconds: float, file: Path) -> None:
    heading = ("lossd under load: the panels of deploy/grafana/lossd.json, drawn by matplotlib from Prometheus' answers to their queries "
               "(not a screenshot of Grafana)")
    picture = draw(collect(address, seconds), heading)
    file.write_bytes(picture)
    print(f"{file}: {len(picture) / 1024:.0f} KiB")


# The page of Prometheus that lists alerts, photographed once one of them fires.

WIDTH = 1200


def await_alert(address: str, name: str, patience: float = 600) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        states = {alert["labels"]["alertname"]: alert["state"] for alert in get(address, "alerts")["alerts"]}
        if states.get(name) == "firing":
            return
        time.sleep(1)
    raise AssertionError(f"{name} does not fire")


def page(address: str) -> str:
    """Where this Prometheus lists alerts: Debian's 2.x has the classic page only, others have /alerts."""
    for path in ("/classic/alerts", "/alerts"):
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=30):
                return f"http://{address}{path}"
        except urllib.error.HTTPError:
            continue
    raise AssertionError("this Prometheus has no page of alerts")


def alerts(address: str, name: str, file: Path) -> None:
    await_alert(address, name)
    browser = Browser()
    browser.look(WIDTH, 900)
    browser.open(page(address))
    browser.wait_for(name, lambda: browser.evaluate(f"document.body.innerText.includes('{name}')"))
    # Opens what fires, as a click on its line does.
    browser.run(f"for (const each of document.querySelectorAll('.alert_header')) if (each.innerText.includes('{name} ')) each.click();")
    time.sleep(1)
    browser.look(WIDTH, int(browser.evaluate("document.documentElement.scrollHeight")))
    time.sleep(1)
    small = subprocess.run(["pngquant", "--strip", "--speed=1", "128", "-"], input=browser.screenshot(), stdout=subprocess.PIPE,
                           check=True).stdout
    browser.close()
    file.write_bytes(small)
    print(f"{file}: {len(small) / 1024:.0f} KiB")


if __name__ == "__main__":
    if sys.argv[1] == "board":
        board(sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
    else:
        alerts(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
