"""Check the built documentation: nothing of a page is loaded from elsewhere.

    python scripts/check_site.py

`mkdocs build --strict` has checked the links between the pages before.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

SITE = Path(__file__).parents[1] / "site"
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}
"""Attributes of elements whose targets a browser loads by itself."""


class Loads(HTMLParser):
    """Collects what a page loads from other servers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep the targets of one element."""
        target = dict(attrs).get(LOADED.get(tag, ""))
        if target and target.startswith(("http:", "https:", "//")):
            self.found.append(target)


def main() -> None:
    """Look at every page; end with 1 if one loads something."""
    pages = sorted(SITE.rglob("*.html"))
    if not pages:
        raise SystemExit(f"{SITE}: no pages; run `make docs`")
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text())
        if loads.found:
            raise SystemExit(f"{page}: loads {', '.join(loads.found)}; wanted nothing from outside")
    print(f"{SITE}: {len(pages)} pages, none loads anything from elsewhere")


if __name__ == "__main__":
    main()
