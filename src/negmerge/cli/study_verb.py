"""The verb `study`: a recipe over several seeds, and what its methods' differences decide."""

from __future__ import annotations

import json

from negmerge.cli.app import Json, OptionalOut, RecipeName, Seeds, Set, app
from negmerge.errors import printable
from negmerge.support.progress import make_progress
from negmerge.support.terminal import print_tables


@app.command
def study(
    recipe: RecipeName,
    /,
    *,
    seeds: Seeds,
    out: OptionalOut = None,
    against: str | None = None,
    set_: Set = None,
    json_: Json = False,
) -> None:
    """Compare the methods of a recipe over several seeds, paired by seed.

    A second call continues an interrupted study; more seeds are added to those that are done.

    Args:
        recipe: A YAML file or the name of a shipped recipe (`negmerge list recipes`).
        seeds: The seeds, such as 0-11 or 0,3,5; they replace the seed of the recipe.
        out: The folder of the study; by default runs/study-NAME.
        against: The method that the others are compared with; by default the first of the recipe.
        set_: Change a field of the recipe, as key=value with a dotted key; may be repeated.
        json_: Print progress and result as JSON lines.
    """
    from negmerge.studies.study import study as make

    with make_progress("json" if json_ else "auto") as progress:
        made = make(recipe, seeds, out, set_ or [], against, progress)
    if json_:
        print(json.dumps({"event": "result"} | made.tree()))
        return
    from negmerge.studies.tables import rendered

    print_tables(rendered(made))
    print(printable(f"page: {made.page}"))
