"""Copies the records of benchmarks/results into docs/measurements.md.

    python benchmarks/results_page.py

A record replaces the text between `<!-- record: NAME.md -->` and `<!-- end -->`, without its title
and with its headings one level down. Other text stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "measurements.md"
PLACE = re.compile(r"(<!-- record: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def refreshed(text: str, results: Path = RESULTS) -> str:
    """The page with the current records."""

    def filled(place: re.Match[str]) -> str:
        _, _, body = (results / place[2]).read_text().partition("\n")
        deeper = re.sub(r"^#", "##", body.strip(), flags=re.MULTILINE)
        return f"{place[1]}\n{deeper}\n\n{place[3]}"

    return PLACE.sub(filled, text)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text()))
