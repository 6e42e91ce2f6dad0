# SPDX-License-Identifier: Apache-2.0
"""Photographs the page of Prometheus that lists alerts, once one of them fires. scripts/screenshots calls it.

  alerts_page.py PROMETHEUS ALERT FILE.png     PROMETHEUS: HOST:PORT; waits up to ten minutes for ALERT
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "server" / "metrics" / "page"))

from browser import Browser  # noqa: E402
from prometheus_process import get  # noqa: E402

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


def main(address: str, name: str, file: Path) -> None:
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
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
