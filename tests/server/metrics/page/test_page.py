# SPDX-License-Identifier: Apache-2.0
"""The pages of a server that trains, in a headless Chromium: they draw, they live, and they break no rule of their own.

Skipped where Chromium or Selenium is missing (scripts/install-deps browser installs them where the distribution has them).
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lossd

sys.path.append(str(Path(__file__).resolve().parents[3] / "client" / "python"))

from servers import ServerProcess  # noqa: E402

sys.path.append(str(Path(__file__).resolve().parent))

from browser import Browser, missing  # noqa: E402

if reason := missing():
    pytest.skip(reason, allow_module_level=True)

HEADS = ("lm", "draft.v2")


class Training(threading.Thread):
    """Steps of two heads, one after the other, until it is stopped."""

    def __init__(self, target: str) -> None:
        super().__init__()
        self._target = target
        self._stop_asked = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error

    def _train(self) -> None:
        rng = np.random.default_rng(1)
        with lossd.Client(self._target) as client:
            for head in HEADS:
                client.create_head(head, hidden_size=16, vocab_size=64)
            client.save_checkpoint("lm")
            step = 0
            while not self._stop_asked.is_set():
                for head in HEADS:
                    client.compute_loss(head, rng.standard_normal((32, 16), dtype=np.float32), rng.integers(0, 64, 32), step=step, id=0,
                                        accumulate=True, grad_hidden=True)
                    client.apply_step(head, step, lossd.SGD(lr=0.125))
                step += 1
                self._stop_asked.wait(0.05)

    def stop(self) -> None:
        self._stop_asked.set()
        self.join()
        if self.error is not None:
            raise self.error


class Site:
    """A server that trains, and a browser."""

    def __init__(self) -> None:
        self.server = ServerProcess("--http=127.0.0.1:0")
        self.url = "http://" + json.loads((self.server.folder / "ports").read_text())["http"]
        self.training = Training(self.server.target)
        self.training.start()
        self.browser = Browser()

    def close(self) -> None:
        self.browser.close()
        if self.training.is_alive():
            self.training.stop()
        self.server.stop()

    def open(self, path: str = "/") -> None:
        self.browser.open(self.url + path)

    def text(self, selector: str) -> str:
        text: str = self.browser.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")
        return text

    def fact(self, name: str) -> str:
        facts = self.browser.evaluate("Array.from(document.querySelectorAll('.facts div'), (fact) => [fact.children[1].innerText, "
                                      "fact.children[0].innerText])")
        return dict(facts)[name]

    def drawn(self) -> dict[str, int]:
        """How many lines with two points or more each chart has."""
        drawn: dict[str, int] = self.browser.evaluate(
            "Object.fromEntries(Array.from(document.querySelectorAll('.chart'), (chart) => [chart.dataset.chart, "
            "Array.from(chart.querySelectorAll('path')).filter((path) => path.getAttribute('d').includes('L')).length]))")
        return drawn

    def await_charts(self, expected: dict[str, int]) -> None:
        self.browser.wait_for(f"the lines {expected}", lambda: self.drawn() == expected)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    opened = Site()
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def nothing_breaks_the_rules(site: Site) -> Iterator[None]:
    """No error on the console, nothing that the policy forbids, nothing from elsewhere."""
    site.browser.look(1200, 900)
    site.browser.console()
    yield
    assert site.browser.console() == []
    assert site.browser.evaluate("window.violations") == []
    loaded = site.browser.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(site.url + "/") for name in loaded), loaded


def test_charts_draw_what_the_server_does(site: Site) -> None:
    site.open()
    site.await_charts({"rows": 1, "loss": 2, "latency": 3, "phases": 4, "memory": 3, "queue": 2,
                       "busy": 1, "bytes": 2, "norm": 2})
    assert "lm" in site.text("[data-chart=loss] .legend") and "draft.v2" in site.text("[data-chart=loss] .legend")
    assert site.browser.evaluate("document.querySelector('[data-chart=rows] svg text').textContent") != ""


def test_values_change_without_a_reload(site: Site) -> None:
    site.open()
    site.browser.run("window.marker = 'not reloaded'")
    before = site.fact("rows computed")
    line = "document.querySelector('[data-chart=rows] path')?.getAttribute('d')"
    site.browser.wait_for("a line", lambda: site.browser.evaluate(line))
    drawn = site.browser.evaluate(line)
    site.browser.wait_for("another number of rows", lambda: site.fact("rows computed") != before)
    site.browser.wait_for("another line", lambda: site.browser.evaluate(line) != drawn)
    assert site.fact("rows/s") != "0"
    assert site.browser.evaluate("window.marker") == "not reloaded"


def test_errors_of_calls_appear_as_events(site: Site) -> None:
    site.open()
    assert "head_created: " not in site.text("#events") and "head created" in site.text("#events")
    with lossd.Client(site.server.target) as client, pytest.raises(lossd.LossdError):
        client.describe_head("there-is-none")
    site.browser.wait_for("the event", lambda: "DescribeHead ended with NOT_FOUND" in site.text("#events"))


def test_a_head_has_a_page(site: Site) -> None:
    site.open()
    assert site.browser.evaluate("document.querySelector('#heads a').getAttribute('href')") == "/heads/draft.v2"
    site.open("/heads/lm")
    site.await_charts({"head-rows": 1, "head-loss": 1, "head-norm": 1, "head-rate": 1})
    step = site.fact("step")
    site.browser.wait_for("another step", lambda: site.fact("step") != step)
    assert "0.125" in site.text("#steps")
    assert "lm/step-" in site.text("#checkpoints") and " ms" in site.text("#checkpoints"), "which took so long to save"
    assert "weights" in site.text("#memory")
    assert site.text("#choices") != ""


@pytest.mark.parametrize("path", ["/", "/heads/lm", "/heads/there-is-none"])
def test_a_phone_needs_no_sideways_scrolling(site: Site, path: str) -> None:
    site.browser.look(390, 844)
    site.open(path)
    if path != "/heads/there-is-none":
        site.browser.wait_for("charts", lambda: sum(site.drawn().values()) > 0)
    assert site.browser.evaluate("window.innerWidth") == 390
    wide = site.browser.evaluate(
        "Array.from(document.querySelectorAll('body *')).filter((part) => part.closest('.wide') === null && "
        "part.getBoundingClientRect().right > 391).map((part) => part.outerHTML.slice(0, 80))")
    assert wide == []
    assert site.browser.evaluate("document.documentElement.scrollWidth") <= 390
    site.browser.console()  # of a page that is not there the browser says so


def seen(site: Site, selector: str) -> list[dict[str, float]]:
    """Where the elements are in the window."""
    boxes: list[dict[str, float]] = site.browser.evaluate(
        f"Array.from(document.querySelectorAll({json.dumps(selector)}), (part) => part.getBoundingClientRect().toJSON())")
    return boxes


def test_a_phone_shows_loss_and_step_first(site: Site) -> None:
    site.browser.look(375, 667)
    site.open()
    names = site.browser.evaluate("Array.from(document.querySelectorAll('#heads th'), (name) => name.innerText)")
    for name in ("Step", "Loss"):
        for box in seen(site, f"#heads td:nth-child({names.index(name) + 1})"):
            assert 0 <= box["left"] and box["right"] <= 375 and box["bottom"] <= 667, (name, box)
    assert seen(site, "h1")[0]["bottom"] < seen(site, "#heads")[0]["top"] < seen(site, ".facts")[0]["top"]
    site.open("/heads/lm")
    facts = site.browser.evaluate("Array.from(document.querySelectorAll('.facts span'), (fact) => fact.innerText)")
    for name in ("step", "loss"):
        assert seen(site, ".facts div")[facts.index(name)]["bottom"] <= 667 / 2


@pytest.mark.parametrize("path", ["/", "/heads/lm"])
def test_a_phone_shows_events_whole(site: Site, path: str) -> None:
    site.browser.look(375, 667)
    site.open(path)
    texts = seen(site, "#events .text")
    assert texts and all(0 <= box["left"] and box["right"] <= 375 for box in texts), texts
    for section in ("#events", "#choices"):
        for wide in site.browser.evaluate(f"Array.from(document.querySelectorAll('{section} .wide'), (box) => box.scrollWidth)"):
            assert wide <= 375


def test_checkpoints_that_are_gone_are_not_listed(site: Site) -> None:
    with lossd.Client(site.server.target) as client:
        client.create_head("saved", hidden_size=8, vocab_size=8)
        try:
            gone, left = (client.save_checkpoint("saved", name).checkpoint for name in ("gone", "left"))
            site.open("/heads/saved")
            lists = "Array.from(document.querySelectorAll('main > section:not(#events)'), (part) => part.innerText).join()"
            site.browser.wait_for("both", lambda: all(name in site.browser.evaluate(lists) for name in (gone, left)))
            shutil.rmtree(site.server.folder / "checkpoints" / gone)
            site.browser.wait_for("one to go", lambda: gone not in site.browser.evaluate(lists), patience=20)
            assert left in site.browser.evaluate(lists)
        finally:
            site.open()  # the page of a head that is gone makes the console complain
            client.delete_head("saved")


def test_curves_end_at_the_last_step(site: Site) -> None:
    rng = np.random.default_rng(4)
    end = "Number(document.querySelector('[data-chart={}] path')?.getAttribute('d').match(/([0-9.]+) [0-9.]+(h.01)?$/)[1] ?? 0)"
    with lossd.Client(site.server.target) as client:
        client.create_head("idle", hidden_size=8, vocab_size=8)
        try:
            for step in range(3):
                client.compute_loss("idle", rng.standard_normal((4, 8), dtype=np.float32), rng.integers(0, 8, 4), step=step, id=0,
                                    accumulate=True)
                client.apply_step("idle", step, lossd.SGD(lr=0.125))
                time.sleep(5)  # some samples without a step lie between
            site.open("/heads/idle")
            site.await_charts({"head-rows": 1, "head-loss": 1, "head-norm": 1, "head-rate": 1})
            for chart in ("head-loss", "head-norm", "head-rate"):
                site.browser.wait_for(f"{chart} to stay behind", lambda chart=chart: site.browser.evaluate(end.format(chart)) < (
                    site.browser.evaluate(end.format("head-rows")) - 10), patience=20)
                line = site.browser.evaluate(f"document.querySelector('[data-chart={chart}] path').getAttribute('d')")
                assert line.count("M") == 1 and line.count("L") == 2, "one line through three steps"
            assert site.fact("loss") in site.text("[data-chart=head-loss] .legend"), "the value of the last step"
        finally:
            site.open()  # the page of a head that is gone makes the console complain
            client.delete_head("idle")


def test_a_head_says_how_its_last_gradients_were_computed(site: Site) -> None:
    rng = np.random.default_rng(5)
    with lossd.Client(site.server.target) as client:
        client.create_head("sampled", hidden_size=16, vocab_size=64)
        try:
            client.compute_loss("sampled", rng.standard_normal((32, 16), dtype=np.float32), rng.integers(0, 64, 32), step=0, id=0,
                                accumulate=True, options=lossd.LossOptions(gradients="sampled", sample_threshold=0.02))
            site.open("/heads/sampled")
            assert "gradients of the last chunk sampled, by default exact" in site.text("#summary p:nth-of-type(2)")
            assert site.fact("gradient error").endswith(" %")
        finally:
            site.open()  # the page of a head that is gone makes the console complain
            client.delete_head("sampled")


def test_the_page_of_a_missing_head_asks_less_and_less_often(site: Site) -> None:
    site.open("/heads/not-yet")
    assert "There is no head of this name" in site.text("#summary")
    assert site.browser.evaluate("Array.from(document.querySelectorAll('#summary a'), (link) => link.getAttribute('href'))") == ["/", "/"]
    asked = "performance.getEntriesByType('resource').map((entry) => new URL(entry.name).pathname)"
    time.sleep(11)
    names = site.browser.evaluate(asked)
    assert "/history.json" not in names, "it has no charts"
    assert 2 <= names.count("/heads/not-yet") <= 3, names
    with lossd.Client(site.server.target) as client:
        client.create_head("not-yet", hidden_size=8, vocab_size=8)
        try:
            site.browser.wait_for("the head", lambda: site.text("h1") == "not-yet", patience=30)
            site.browser.wait_for("its charts", lambda: site.drawn().get("head-rows") == 1)
        finally:
            client.delete_head("not-yet")
        site.browser.wait_for("the head to go", lambda: "There is no head of this name" in site.text("#summary"))
        site.browser.run("performance.clearResourceTimings()")
        time.sleep(11)
        assert site.browser.evaluate(asked).count("/heads/not-yet") <= 3
    site.open()
    site.browser.console()  # of a page that is not there the browser says so


def test_many_heads_with_long_names(site: Site) -> None:
    """The charts have eight colours: the heads that compute get them, and a phone shows the rest of the page."""
    names = [f"a-head-of-an-experiment-with-a-name-as-long-as-they-may-be-of-{i:02}" for i in range(15)]
    rng = np.random.default_rng(2)
    with lossd.Client(site.server.target) as client:
        client.create_head("untrained", hidden_size=8, vocab_size=8)
        for name in names:
            client.create_head(name, hidden_size=8, vocab_size=8)
            client.compute_loss(name, rng.standard_normal((4, 8), dtype=np.float32), rng.integers(0, 8, 4), step=0, id=0, accumulate=True)
            client.apply_step(name, 0, lossd.SGD(lr=0.125))
        try:
            site.browser.look(390, 844)
            site.open()
            site.browser.wait_for("all heads", lambda: f"and {len(names) + len(HEADS) - 8} more" in site.text("[data-chart=loss] .legend"))
            for head in HEADS:
                assert head in site.text("[data-chart=loss] .legend")
            assert names[-1] in site.text("#heads")
            assert "untrained" in site.text("#heads") and "untrained" not in site.text("[data-chart=loss]")
            assert site.browser.evaluate("document.documentElement.scrollWidth") <= 390
        finally:
            for name in ["untrained", *names]:
                client.delete_head(name)


def test_a_head_that_diverges_does_not_flatten_the_others(site: Site) -> None:
    rng = np.random.default_rng(3)
    with lossd.Client(site.server.target) as client:
        client.create_head("diverges", hidden_size=16, vocab_size=64)
        try:
            client.compute_loss("diverges", 1e25 * rng.standard_normal((4, 16), dtype=np.float32), rng.integers(0, 64, 4), step=0, id=0)
            client.compute_loss("diverges", 1e25 * rng.standard_normal((4, 16), dtype=np.float32), rng.integers(0, 64, 4), step=0, id=1,
                                accumulate=True)
            client.apply_step("diverges", 0, lossd.SGD(lr=1e-30))
            site.open()
            site.browser.wait_for("the note", lambda: "above the chart: up to " in site.text("[data-chart=loss] .legend"))
            axis = site.browser.evaluate("Array.from(document.querySelectorAll('[data-chart=loss] text'), (text) => text.textContent)")
            assert not any("e+" in label for label in axis), axis
        finally:
            client.delete_head("diverges")


def luminance(colour: str) -> float:
    red, green, blue = (int(part) / 255 for part in colour[colour.index("(") + 1:-1].split(",")[:3])
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_can_be_read(site: Site, dark: bool) -> None:
    site.browser.look(1200, 900, dark=dark)
    site.open()
    site.browser.wait_for("charts", lambda: sum(site.drawn().values()) > 0)
    paper = luminance(site.browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (paper < 0.05) == dark
    for selector in ("h1", "main p", "td", "th", "a", ".legend", ".state", "figcaption"):
        ink = luminance(site.browser.evaluate(f"getComputedStyle(document.querySelector('{selector}')).color"))
        contrast = (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05)
        assert contrast > 4.5, f"{selector}: {contrast:.1f}"


def test_the_policy_holds(site: Site) -> None:
    """What the other tests find nothing of is noticed."""
    site.open()
    site.browser.run("const script = document.createElement('script'); script.textContent = 'window.ran = true'; "
                     "document.body.append(script); document.body.setAttribute('style', 'color: red');")
    violations: list[Any] = site.browser.wait_for("violations", lambda: site.browser.evaluate("window.violations"))
    assert any("script-src" in violation for violation in violations), violations
    assert site.browser.evaluate("window.ran") is None
    assert any("Content Security Policy" in message for message in site.browser.console())
    site.browser.run("window.violations = []")


def test_a_head_that_goes_takes_its_charts_along(site: Site) -> None:
    site.training.stop()
    site.open()
    site.browser.wait_for("its line", lambda: "draft.v2" in site.text("[data-chart=loss] .legend"))
    with lossd.Client(site.server.target) as client:
        client.delete_head("draft.v2")
    site.browser.wait_for("a chart without it", lambda: "draft.v2" not in site.text("[data-chart=loss] .legend"))
    assert "draft.v2" not in site.text("#heads")
    assert "head deleted" in site.text("#events")


def test_a_server_that_is_gone_is_said_to_be(site: Site) -> None:
    site.open()
    site.server.kill()
    assert site.browser.wait_for("the message", lambda: site.text("#trouble")).startswith("No answer from the server for ")
    site.server.start()  # at another port of HTTP
    site.browser.console()
