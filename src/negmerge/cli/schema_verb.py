"""The verb `schema`: the JSON schema of recipes, for editors."""

from __future__ import annotations

import json

from negmerge.cli.app import OptionalOut, app
from negmerge.errors import printable


@app.command
def schema(*, out: OptionalOut = None) -> None:
    """Print the JSON schema of recipes, or write it to a file for an editor.

    Args:
        out: The file to write, such as negmerge.schema.json.
    """
    from negmerge.runs.schema import recipe_schema
    from negmerge.support.files import write_file

    text = json.dumps(recipe_schema(), indent=1, ensure_ascii=False) + "\n"
    if out is None:
        print(text, end="")
        return
    write_file(out, text.encode())
    print(printable(f"{out}: written; the first line of a recipe names it:"))
    print(printable(f"# yaml-language-server: $schema={out}"))
