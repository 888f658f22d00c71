"""Write the pictures of README.md from the page of a run.

    negmerge unlearn demo --out runs/demo
    python scripts/make_pictures.py runs/demo    # needs Chromium with chromedriver

docs/figures/page.png is the first screen of the page, docs/figures/trade-off.png its figure of what
was retained against what was forgotten, with a legend.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
TRADE_OFF = ("trade-off-near.svg", "trade-off.svg")
"""The figure: without models that lost most of what they should keep, if the run has such ones."""
WIDTH, HEIGHT = 1100, 800
LARGEST = 150_000
"""Bytes of a picture: a README is read on telephones, too."""


def save(picture: bytes, name: str) -> None:
    """Write a picture with few colours, which is a third of the size; refuse one that is large."""
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    path = FIGURES / name
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > LARGEST:
        raise SystemExit(f"{path}: {path.stat().st_size} bytes; wanted at most {LARGEST}")
    print(f"{path.relative_to(FIGURES.parents[1])}: {path.stat().st_size / 1e3:.0f} kB")


def main() -> None:
    """Open the page and take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="a finished run")
    page = parser.parse_args().run.absolute() / "report" / "index.html"
    driver, browser = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or browser is None or not page.is_file():
        raise SystemExit(f"needs chromium, chromedriver and {page}")
    options = ChromeOptions()
    options.binary_location = browser
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    with Chrome(options, Service(driver)) as chrome:
        chrome.set_window_size(WIDTH, HEIGHT)
        chrome.get(page.as_uri())
        save(chrome.get_screenshot_as_png(), "page.png")
        figures = (page.parent / "figures" / name for name in TRADE_OFF)
        chrome.get(next(path for path in figures if path.is_file()).as_uri())
        save(chrome.find_element(By.TAG_NAME, "svg").screenshot_as_png, "trade-off.png")


if __name__ == "__main__":
    main()
