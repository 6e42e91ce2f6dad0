# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium for tests and screenshots of the server's pages: Debian's, driven by Selenium.

Thread-compatible.
"""

from __future__ import annotations

import os
import shutil
import time
from typing import Any, Callable

# Before the page's own script, so that nothing is missed.
WATCH = """
window.violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.violations.push(`${event.violatedDirective} ${event.blockedURI}`));
"""


def missing() -> str:
    """Why there is no browser here; empty: there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "python3-selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    return ""


class Browser:
    def __init__(self) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-default-browser-check"]
        if os.geteuid() == 0:  # the sandbox does not work for root; what is opened is a server of ours
            flags.append("--no-sandbox")
        for flag in flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self._driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self._command("Page.addScriptToEvaluateOnNewDocument", source=WATCH)
        self.look(1200, 900)

    def _command(self, name: str, **parameters: Any) -> Any:
        return self._driver.execute_cdp_cmd(name, parameters)

    def look(self, width: int, height: int, dark: bool = False, scale: float = 1.0) -> None:
        """Sets the size of the window and what the user prefers."""
        self._command("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)
        self._command("Emulation.setEmulatedMedia",
                      features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, url: str) -> None:
        self._driver.get(url)

    def evaluate(self, expression: str) -> Any:
        return self._driver.execute_script(f"return {expression};")

    def run(self, statements: str) -> None:
        self._driver.execute_script(statements)

    def wait_for(self, what: str, condition: Callable[[], Any], patience: float = 120.0) -> Any:
        """Waits for something true, and returns it."""
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if found := condition():
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come:\n{self.evaluate('document.body.innerText')}")

    def console(self) -> list[str]:
        """What the console said since the last call, without what is merely informative."""
        return [entry["message"] for entry in self._driver.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")]

    def screenshot(self) -> bytes:
        """The window, as PNG."""
        picture: bytes = self._driver.get_screenshot_as_png()
        return picture

    def close(self) -> None:
        self._driver.quit()
