"""Write the pages of docs/reference that are made from the source.

    python scripts/reference_pages.py
    python scripts/reference_pages.py --check    # writes nothing; 1 if a page is old

The Python page lists `negmerge.__all__`; mkdocstrings fills in signatures and docstrings when the
site is built. The page of the command line has the help of every verb, and the page of names has
what `negmerge list` prints.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import negmerge
from negmerge.cli.listing import KINDS, Entry, Table
from negmerge.cli.verbs import app

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MADE = "This page is made from the source by `scripts/reference_pages.py`."
GROUPS = {
    "Whole jobs": ("unlearn", "Unlearned", "run", "report", "study"),
    "Merging": ("merge", "apply", "merge_and_apply", "TaskVector", "Accumulator", "save_adapter"),
    "Choosing λ": ("find_scale", "FoundScale"),
    "Settings": ("Recipe", "Pool", "HyperParameters", "Search"),
    "Errors": ("NegMergeError",),
}
"""The order of the public names; names that are not listed come last."""
TITLES = {
    "rules": "Merge rules",
    "selectors": "Selectors",
    "rivals": "Rivals",
    "metrics": "Metrics",
    "evidence": "Tests of forgetting",
    "criteria": "Criteria for λ",
    "scenarios": "Scenarios",
    "datasets": "Data sets of images",
    "texts": "Sets of texts",
    "models": "Models",
    "recipes": "Recipes",
    "tables": "The paper's tables",
}
LEFT_OUT = {
    "datasets": ("config", "columns", "splits"),
    "tables": ("recipes", "runs", "data", "hours", "memory", "disk", "desk_recipes", "desk_data",
               "stands_in", "on_a_desk"),
}  # fmt: skip
"""Columns that `--json` has and the page has not."""


def python_page() -> str:
    """Return the page of the public API; the directives are those of mkdocstrings."""
    listed = {name for names in GROUPS.values() for name in names}
    others = tuple(name for name in negmerge.__all__ if name not in listed)
    parts = ["# Python", f"`import negmerge as nm`. {MADE}"]
    for title, names in (GROUPS | ({"Others": others} if others else {})).items():
        parts += [f"## {title}", *(f"::: negmerge.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def command_page() -> str:
    """Return the page of the command line."""
    found = app.generate_docs(output_format="markdown", heading_level=2)
    _, *verbs = re.split(r"^### negmerge ", found, flags=re.MULTILINE)
    common = verbs[0].rpartition("**Parameters of every command**:")[2].strip()
    parts = [
        "# Command line",
        "Bad input ends with exit code 2 and one line on standard error that says what is wrong "
        "and what to do. An interrupted command ends with 130; repeat it, and it goes on. "
        f"`negmerge VERB --help` prints the text of a verb. {MADE}",
        f"**Every command takes**\n\n{common}",
    ]
    for verb in sorted(verbs):
        name, _, text = verb.partition("\n")
        text = text.partition("**Parameters of every command**")[0].strip()
        text = re.sub(r"'([^'\n]*\*[^'\n]*)'", r"`'\1'`", text)  # a pattern is no emphasis
        text = re.sub(r" \*\[default: (False|\"\")\]\*", "", text)
        parts += [f"## negmerge {name}", re.sub(r"\n    (?=\S)", " ", text)]
    return "\n\n".join(parts) + "\n"


def names_page() -> str:
    """Return the page of registered names."""
    parts = [
        "# Rules, metrics and other names",
        "Recipes, options and `nm.merge` take these names. `negmerge list KIND` prints one table, "
        "with `--json` as data; plug-ins add rows ([Adding to negmerge](../extend.md)). " + MADE,
    ]
    for kind, find in KINDS.items():
        parts += [f"## {TITLES.get(kind, kind.capitalize())}", f"`negmerge list {kind}`"]
        parts.append(table(kind, find()))
    return "\n\n".join(parts) + "\n"


def table(kind: str, found: Table) -> str:
    """Return a listing as a Markdown table."""
    fields = [field for field in next(iter(found.values())) if field not in LEFT_OUT.get(kind, ())]
    lines = ["| name | " + " | ".join(field.replace("_", " ") for field in fields) + " |"]
    lines.append("|---" * (len(fields) + 1) + "|")
    for name, entry in found.items():
        cells = [f"`{name}`", *(cell(entry, field) for field in fields)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(entry: Entry, field: str) -> str:
    """Return a value as the text of a cell."""
    value: Any = entry.get(field)
    if isinstance(value, dict):
        shown = [f"`{k}={v['takes']}` ({str(v['default']).lower()})" for k, v in value.items()]
        text = ", ".join(shown)
    elif isinstance(value, bool):
        text = "yes" if value else "no"
    else:
        text = "" if value is None else " ".join(str(value).split())
    return text.replace("|", "\\|")


PAGES = {
    FOLDER / "python.md": python_page,
    FOLDER / "command-line.md": command_page,
    FOLDER / "registries.md": names_page,
}


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    for path, make in PAGES.items():
        text = make()
        if check and (not path.exists() or path.read_text() != text):
            raise SystemExit(f"{path}: is not that of the source; run `make pages`")
        if not check:
            path.write_text(text)


if __name__ == "__main__":
    main()
