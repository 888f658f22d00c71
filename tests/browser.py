"""A headless Chromium for tests of the page, and axe-core, which finds barriers in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
AXE = "axe-core@4.14.0"
WIDTHS = (390, 820, 1440)
"""A phone, a tablet, a desktop."""
SCHEMES = ("light", "dark")


@contextmanager
def chromium() -> Iterator[Chrome]:
    """A browser that records what it says and asks for; skips where none is installed.

    With NEGMERGE_BROWSER=needed, as in .ci/run, a missing browser fails instead.
    """
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        absent("no Chromium with chromedriver here; apt-get install chromium chromium-driver")
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with Chrome(options, Service(driver)) as found:
        yield found


def absent(reason: str) -> None:
    """Skip a test, or fail with NEGMERGE_BROWSER=needed."""
    if os.environ.get("NEGMERGE_BROWSER") == "needed":
        pytest.fail(reason)
    pytest.skip(reason)


def media(browser: Chrome, **features: str) -> None:
    """Emulate a medium and preferences, as in `prefers_color_scheme="dark"`."""
    kind = features.pop("media", "")
    given = [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": given})


@contextmanager
def screen(browser: Chrome, width: int, scheme: str = "light") -> Iterator[None]:
    """Emulate a screen of some width, a phone below 500 pixels, with a colour scheme."""
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    media(browser, prefers_color_scheme=scheme)
    try:
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        media(browser)


def axe_script() -> str:
    """The source of axe-core; npm installs it once, into the cache of the tests."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "negmerge-tests" / AXE.replace("@", "-")
    script = folder / "node_modules/axe-core/axe.min.js"
    if not script.is_file():
        npm = shutil.which("npm")
        if npm is None:
            absent(f"no npm here, which installs {AXE}; apt-get install npm")
        folder.mkdir(parents=True, exist_ok=True)
        quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")
        command = [str(npm), "install", *quiet, "--prefix", str(folder), AXE]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            absent(f"npm cannot install {AXE}: {done.stderr.strip()[-300:]}")
    return script.read_text(encoding="utf-8")


def barriers(browser: Chrome, charts: bool = False) -> list[str]:
    """The serious and critical violations that axe-core finds in the page that is open.

    Args:
        charts: whether to look into the charts, which have thousands of elements.
    """
    if not browser.execute_script("return Boolean(window.axe)"):
        browser.execute_script(axe_script())
    script = """const [charts, done] = arguments;
        const where = charts ? document : {exclude: [["svg.chart"]]};
        axe.run(where, {resultTypes: ["violations"]}).then(found => done(found.violations
            .filter(one => ["serious", "critical"].includes(one.impact))
            .flatMap(one => one.nodes.map(node => `${one.id}: ${node.html.slice(0, 200)}`))));"""
    return browser.execute_async_script(script, charts)


def too_wide(browser: Chrome) -> list[str]:
    """What reaches beyond the right edge of the screen and cannot be scrolled for itself."""
    script = """const most = document.documentElement.clientWidth + 1;
        return [...document.querySelectorAll("body *")].filter(one =>
            one.getBoundingClientRect().right > most && !one.closest(".wide, pre, .hidden, #tip")
            && !one.closest("svg") && getComputedStyle(one).display !== "contents")
            .map(one => one.outerHTML.slice(0, 120))"""
    return browser.execute_script(script)
