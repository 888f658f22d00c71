"""The recipe: everything a run depends on, as checked data; no code, no import paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from negmerge.errors import FileError, NegMergeError, OptionError, printable, shown
from negmerge.hyperparameters import HELD_OUT, HyperParameters, Strict
from negmerge.merge.select import SELECTORS
from negmerge.models.prompts import prompts, prompts_of
from negmerge.parallel import MOST_WORKERS
from negmerge.reading import MAX_YAML, parse_yaml, read_text
from negmerge.registry import unknown
from negmerge.schema import (
    Clip,
    Data,
    Forget,
    Method,
    Model,
    Natural,
    Pool,
    Retrain,
    Search,
    Split,
    Subset,
    set_in,
)

__all__ = [
    "Clip",
    "Data",
    "Forget",
    "Method",
    "Model",
    "Pool",
    "Recipe",
    "Retrain",
    "Search",
    "Split",
    "Subset",
    "load_recipe",
    "shipped",
]

RECIPES = Path(str(resources.files("negmerge") / "recipes"))
DEFAULT = "demo"
PLAIN = {
    "extra_forbidden": "there is no such field; the recipe.yaml of any run lists all fields",
    "model_type": "has fields of its own; wanted a mapping, such as {FIELD: VALUE}",
}
"""What pydantic says in words of its own."""
RESERVED = ("original", "retrained", "image", "conflict")
"""What files and figures of a run call other things; `conflict` may be the rule itself."""
LONGEST_KEY = 200
"""Characters of a dotted key: more than that no field has."""
MOST_METHODS = 1000
LONGEST_TITLE = 100
"""Characters of what a method is called: files are named after it."""
MERGING = ("consensus", "uniform", "ties", "magmax", "single_best")


class Recipe(Strict):
    """A run of `negmerge unlearn`.

    >>> Recipe().model.name
    'resnet_small'
    """

    title: str = ""
    seed: Natural = 0
    data: Data = Data()
    split: Split = Split()
    model: Model = Model()
    clip: Clip | None = None
    """Given: a CLIP forgets a data set. Not given: a classifier forgets records or a class."""
    train: HyperParameters = HyperParameters()
    retrain: Retrain | None = Retrain()
    pool: Pool = Pool()
    buffers: Literal["keep", "merge"] = "keep"
    methods: Annotated[tuple[Method, ...], Field(max_length=MOST_METHODS)] = tuple(
        Method(name=name) for name in MERGING
    )
    """The first one makes the unlearned model."""
    search: Search = Search()
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] | None = None
    """Processes that train at once; the cores are shared among them."""
    save_every: Annotated[float, Field(ge=0)] = 15.0
    """Seconds between two saves of a training in progress."""

    @model_validator(mode="before")
    @classmethod
    def _clip_defaults(cls, tree: Any) -> Any:
        """A CLIP cannot be retrained; it keeps ImageNet, all of the validation images choose λ, and
        its pool has the paper's epochs for the data set."""
        if not isinstance(tree, dict) or tree.get("clip") is None:
            return tree
        tree = {"retrain": None, "pool": {}} | {k: _said(v) for k, v in tree.items()}
        data, pool = tree.get("data"), tree["pool"]
        name = data.get("name") if isinstance(data, dict) else None
        if data is None or (isinstance(data, dict) and name is None):
            raise ValueError("a CLIP forgets a data set: data.name is not given")
        clip, search = tree["clip"], tree.get("search", {})
        if isinstance(clip, dict) and isinstance(clip.get("control"), dict):
            tree["clip"] = clip | {"control": {"name": "imagenet"} | clip["control"]}
        if isinstance(search, dict):
            tree["search"] = {"samples": HELD_OUT} | search
        words = data.get("words") or name if isinstance(data, dict) else None
        epochs = prompts_of(words).epochs if isinstance(words, str) else None
        if epochs is not None and isinstance(pool, dict):
            settings, grid = pool.get("settings", {}), pool.get("grid", {})
            if isinstance(settings, dict) and isinstance(grid, dict) and "epochs" not in grid:
                tree["pool"] = pool | {"settings": {"epochs": epochs} | settings}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        titles = [method.title for method in self.methods]
        if not titles:
            raise ValueError("methods: wanted at least one")
        if len(set(titles)) < len(titles):
            raise ValueError("methods: two have the same name; give one a label")
        for title in titles:
            if not title.replace("_", "").replace("-", "").isalnum() or not title.isascii():
                raise ValueError(f"methods: {title!r} must be letters, digits, - and _")
            if len(title) > LONGEST_TITLE:
                raise ValueError(
                    f"methods: {shown(title, 40)} names files; wanted at most {LONGEST_TITLE} "
                    "characters"
                )
        for method in self.methods:
            own = method.title in RESERVED and method.title != method.name
            if own or method.title.startswith("member-"):
                raise ValueError(f"methods: the report calls something else {method.title!r}")
        if self.search.criterion == "oracle" and self.retrain is None:
            raise ValueError("search.criterion oracle needs the retrained model: retrain is off")
        for method in self.methods:
            if not self.pool.keep and (method.name in SELECTORS or method.subset is not None):
                raise ValueError(
                    f"{method.title} needs the members: set pool.keep to true or leave it out"
                )
        if self.clip is not None:
            self._fits_clip(self.clip.control)
        elif self.data.words is not None:
            raise ValueError("data.words: a classifier needs none; leave it out")
        return self

    def _fits_clip(self, control: Data) -> None:
        for field, data in (("data", self.data), ("clip.control", control)):
            if data.words is not None and data.words not in prompts:
                known = ", ".join(prompts)
                raise ValueError(f"{field}.words {data.words!r}: wanted one of {known}")
        for field, usual in (("split", Split()), ("retrain", None), ("train", HyperParameters())):
            if getattr(self, field) != usual:
                raise ValueError(
                    f"{field}: a CLIP is given, and forgets a whole data set; leave it out"
                )
        if self.model.weights is not None or self.model.init is not None:
            raise ValueError("model: clip.pretrained names the weights of a CLIP")
        if control.limit.train is not None:
            raise ValueError("clip.control.limit.train: nothing is trained on the control set")
        if control.name == self.data.name:
            raise ValueError(f"clip.control: {control.name} is what is forgotten; name another set")

    @property
    def criterion(self) -> str:
        """The criterion that is used."""
        if self.search.criterion is not None:
            return self.search.criterion
        if self.clip is not None:
            return "keep_retain"
        whole = self.split.forget.class_ is not None and self.split.forget.count is None
        return "keep_retain" if whole else "match_holdout"

    def dump(self) -> str:
        """The recipe as YAML, with every default written out."""
        tree = self.model_dump(mode="json", by_alias=True)
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def _said(part: Any) -> Any:
    """A part of a recipe as the tree of what was said, without the defaults."""
    return part.model_dump(exclude_unset=True, by_alias=True) if isinstance(part, Strict) else part


# -------------------------------------------------------------------------------------------- files


def load_recipe(name: str | Path | None = None, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe by path or shipped name, and change fields of it.

    >>> load_recipe(changes=["seed=3", "pool.keep=true"]).seed
    3

    changes: `key=value` with a dotted key; the value is YAML.
    """
    where, tree = read_recipe(name)
    before = deepcopy(tree)
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key or len(key) > LONGEST_KEY:
            raise OptionError(f"--set {shown(change)}: wanted key=value")
        try:
            set_in(tree, key, parse_yaml(text, f"--set {printable(key)}"))
        except FileError as error:
            raise OptionError(f"{error}; {shown(text)} is not a YAML value") from None
    return _titled(check_recipe(tree, where), before)


def _titled(recipe: Recipe, before: Mapping[str, Any]) -> Recipe:
    """A title that ends with the data set that is forgotten follows a change of it."""
    data = before.get("data")
    old = f"forgets {data['name']}" if isinstance(data, dict) and "name" in data else None
    if old is None or recipe.title != before.get("title") or not recipe.title.endswith(old):
        return recipe
    title = f"{recipe.title.removesuffix(old)}forgets {recipe.data.name}"
    return recipe.model_copy(update={"title": title})


def read_recipe(name: str | Path | None) -> tuple[str, dict[str, Any]]:
    """The tree of a recipe file, and what to call it in errors."""
    if name is None or (str(name) in shipped() and not Path(name).is_file()):
        path = RECIPES / f"{name or DEFAULT}.yaml"
        where = f"recipe {name or DEFAULT}"
    else:
        path, where = Path(name), str(name)
    try:
        text = read_text(path, MAX_YAML)
    except FileError as error:
        if os.path.lexists(path):
            raise
        raise FileError(f"{error}; {unknown('recipe', str(name), shipped())}") from None
    tree = parse_yaml(text, where)
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise FileError(f"{where}: wanted a mapping of settings, got {type(tree).__name__}")
    return where, tree


def check_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Validate a tree; the first mistake is told in one line."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the recipe"
        got = first.get("input")
        told = "" if isinstance(got, dict | list | tuple | Strict) else f", got {shown(got)}"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        message = PLAIN.get(first["type"], first["msg"].removeprefix("Value error, "))
        raise OptionError(printable(f"{where}: {place}: {message}{told}{more}")) from None
    except NegMergeError as error:
        raise OptionError(f"{where}: {error}") from None


def shipped() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
