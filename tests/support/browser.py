"""Debian's chromium without a window, on a page that is a file; what the tests and the benchmark measure in it."""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = None if BROWSER and DRIVER else "needs chromium and chromedriver: apt install chromium chromium-driver"

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1600,1000",
)

# From a mouse that moves to the task after the next frame: what a person who drags sees as one step.
_PAN = """
const [num, done] = [arguments[0], arguments[1]];
const plot = document.getElementById("plot"), box = plot.getBoundingClientRect();
const mouse = (type, x) => {
  const at = { bubbles: true, clientX: x, clientY: box.top + box.height / 2, button: 0, buttons: 1 };
  (type === "mousedown" ? plot : window).dispatchEvent(new MouseEvent(type, at));
};
const frame = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve, 0)));
(async () => {
  const times = [];
  let x = box.left + box.width / 2;
  mouse("mousedown", x);
  for (let i = 0; i < num; i++) {
    await new Promise((resolve) => setTimeout(resolve, 5 + (i * 7) % 16));
    const began = performance.now();
    x += i % 10 < 5 ? 17 : -17;
    mouse("mousemove", x);
    await frame();
    times.push(performance.now() - began);
  }
  mouse("mouseup", x);
  done(times);
})();
"""


@dataclass(frozen=True)
class Browser:
    """A page that is open."""

    driver: webdriver.Chrome

    def open(self, path: Path) -> float:
        """Opens a file; seconds to its first paint."""
        self.driver.get(path.as_uri())
        wait = "const done = arguments[0]; const look = () => window.treadle?.firstPaint ? done(treadle.firstPaint) : "
        return float(self.driver.execute_async_script(wait + "setTimeout(look, 5); look();")) / 1000

    def js(self, expression: str, *arguments: Any) -> Any:
        """The value of an expression in the page."""
        return self.driver.execute_script(f"return {expression};", *arguments)

    def pan_ms(self, num: int = 25) -> float:
        """The median of so many pan steps."""
        return float(statistics.median(self.driver.execute_async_script(_PAN, num)))

    def requests(self) -> list[str]:
        """What pages that are files asked for since the last call, but themselves. (A new tab is a page too.)"""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        sent = [message["params"] for message in messages if message["method"] == "Network.requestWillBeSent"]
        mine = [(each["documentURL"], each["request"]["url"]) for each in sent]
        return [url for page, url in mine if page.startswith("file:") and url not in (page, "data:,")]

    def complaints(self) -> list[str]:
        """What the console got since the last call."""
        return [entry["message"] for entry in self._log("browser")]

    def _log(self, name: str) -> list[dict[str, Any]]:
        return list(self.driver.get_log(name))  # type: ignore[no-untyped-call]


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, closed in the end."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(60)
    try:
        yield Browser(driver)
    finally:
        driver.quit()


@dataclass(frozen=True)
class Speed:
    """How fast a page is."""

    first_paint_s: float
    pan_full_ms: float
    pan_zoomed_ms: float


def speed(window: Browser, path: Path) -> Speed:
    """Opens a page three times, then pans it: all of it, and zoomed in until boxes have labels."""
    first = statistics.median(window.open(path) for _ in range(3))
    full = window.pan_ms()
    window.js(
        "(() => { const s = treadle.state(), m = (s.from + s.to) / 2; treadle.show(m, m + (s.to - s.from) / 200); })()"
    )
    return Speed(first, full, window.pan_ms())
