"""The recipe: all settings of a run, as checked data without code or import paths."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from negmerge.errors import FileError, NegMergeError, OptionError, printable, quoted
from negmerge.evaluation.scales import Search
from negmerge.evidence.findings import Tier
from negmerge.merging.select import SELECTORS
from negmerge.registry import unknown_name
from negmerge.runs.executors.settings import ExecutorSettings
from negmerge.runs.methods import Method, Pool
from negmerge.runs.shadow_settings import ShadowSettings
from negmerge.runs.terms import Policy, Terms
from negmerge.scenarios.settings import ScenarioSettings, Setup, scenarios
from negmerge.support.mistakes import NO_FIELD, first_mistake
from negmerge.support.parallel import MAX_WORKERS
from negmerge.support.progress import Progress
from negmerge.support.reading import MAX_YAML, parse_yaml, read_text
from negmerge.support.settings import Natural, Strict, set_dotted
from negmerge.training.hyperparameters import HyperParameters

if TYPE_CHECKING:
    from negmerge.scenarios.base import Scenario

RECIPES = Path(str(resources.files("negmerge") / "recipes"))
DEFAULT = "demo"
DEFAULT_SCENARIO = "classify"
RESERVED = ("original", "retrained", "image", "conflict")
"""Names that files and figures of a run use; only the rule `conflict` may be called conflict."""
LONGEST_KEY = 200
"""The largest number of characters of a dotted key; no field has more."""
MOST_METHODS = 1000
LONGEST_TITLE = 100
"""The largest number of characters of the title of a method; files are named after it."""
MERGING = ("consensus", "uniform", "ties", "magmax", "single_best")


class Recipe(Strict):
    """The settings of a run.

    In a file, and as arguments, the fields of the scenario are beside the common fields.

    >>> Recipe(model={"name": "resnet18"}).settings.model.name
    'resnet18'
    """

    title: str = ""
    """The title of the page."""
    seed: Natural = 0
    """The seed of the splits and of all trainings."""
    scenario: str = DEFAULT_SCENARIO
    """The kind of data and model (`negmerge list scenarios`)."""
    settings: ScenarioSettings = None  # pyright: ignore (set by the validator)
    """The fields of the scenario."""
    pool: Pool = Pool()
    buffers: Policy = "keep"
    """BatchNorm statistics of the unlearned model: `keep` those of the original model, `merge` them
    like weights, or `recalibrate` them at each λ on held-out samples without labels, or on the
    forget set if there are none."""
    methods: Annotated[tuple[Method, ...], Field(max_length=MOST_METHODS)] = tuple(
        Method(name=name) for name in MERGING
    )
    """The methods to compare; the first one makes the unlearned model."""
    search: Search = Search()
    evidence: Tier = "basic"
    """Tests of forgetting beside the metrics (`negmerge list evidence`): `standard` takes minutes
    and trains a second retrained model, `full` trains many models."""
    shadows: ShadowSettings = ShadowSettings()
    workers: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    """The number of processes, which share the cores."""
    threads: Annotated[int, Field(ge=1, le=MAX_WORKERS)] | None = None
    """The number of threads of each training and measurement, on which the last bits of results
    depend. None: the steps of a stage share the cores of the machine or cluster that begins the
    run; a run that continues elsewhere keeps the number."""
    executor: ExecutorSettings = ExecutorSettings()
    track: Literal["trackio", "wandb", "mlflow", "tensorboard"] | None = None
    """The experiment tracker that gets losses, sweeps, scores and the page (docs/tracking.md);
    results do not depend on it, and the recipe of a run does not record it."""
    feed_workers: Annotated[int, Field(ge=0, le=MAX_WORKERS)] | None = None
    """The number of further processes that decode and augment for each training; results do not
    depend on it. None: as many as cores are left for a training on a GPU, none without a GPU."""
    save_every: Annotated[float, Field(ge=0)] = 15.0
    """The least seconds between two saves of a training in progress; more if saving would take over
    1 % of the time, 0 for a save after every step."""

    @model_validator(mode="before")
    @classmethod
    def _split_fields(cls, tree: Any) -> Any:
        """Move the fields of the scenario to `settings`."""
        if not isinstance(tree, Mapping):
            return tree
        tree = {  # without the defaults of sections that are objects
            str(k): v.model_dump(exclude_unset=True, by_alias=True) if isinstance(v, Strict) else v
            for k, v in tree.items()
        }
        kind = tree.get("scenario")
        if kind is None:
            kind = "clip" if tree.get("clip") is not None else DEFAULT_SCENARIO
        if not isinstance(kind, str):
            raise PydanticCustomError("settings", "scenario: wanted a name")
        scenario = scenarios.get(kind)
        if "clip" in tree and tree["clip"] is None:  # as older versions wrote it
            del tree["clip"]
        tree = dict(scenario.defaults(tree))
        given = tree.pop("settings", {})
        if not isinstance(given, Mapping):
            raise PydanticCustomError("settings", "settings: wanted the fields of the scenario")
        common = {k: v for k, v in tree.items() if k in cls.model_fields}
        own = {k: v for k, v in tree.items() if k not in cls.model_fields} | {**given}
        try:
            settings = scenario.model_validate(own)
        except ValidationError as error:
            common_fields = [name for name in cls.model_fields if name != "settings"]
            mistake = {"text": first_mistake(error, scenario, common_fields)}
            raise PydanticCustomError("settings", "{text}", mistake) from None
        return common | {"scenario": kind, "settings": settings}

    @model_validator(mode="after")
    def _check_titles(self) -> Recipe:
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
                    f"methods: {quoted(title, 40)} names files; wanted at most {LONGEST_TITLE} "
                    "characters"
                )
        for method in self.methods:
            own = method.title in RESERVED and method.title != method.name
            if own or method.title.startswith("member-"):
                raise ValueError(
                    f"methods: the name {method.title!r} is reserved; use another label"
                )
            if not self.pool.keep and (
                method.name in SELECTORS or method.subset is not None or method.equalise
            ):
                raise ValueError(
                    f"methods: {method.title} needs the members; set pool.keep to true, or leave "
                    "it out"
                )
        return self

    @model_validator(mode="after")
    def _check_members(self) -> Recipe:
        self.settings.check_members(self.pool.trainings())
        return self

    @field_serializer("settings")
    def _dump_settings(self, settings: Any) -> Any:
        return settings.model_dump(mode="json", by_alias=True)

    @property
    def terms(self) -> Terms:
        """What all merges of the run have in common; a method may equalise its own."""
        pool = self.pool
        return Terms(self.buffers, pool.include, pool.exclude, pool.equalise)

    def terms_of(self, method: Method) -> Terms:
        """What the merge of one method has in common with the others, or has by its own fields."""
        return replace(self.terms, equalise=True) if method.equalise else self.terms

    @property
    def member_notes(self) -> list[str]:
        """Warnings of the scenario about the settings of the members."""
        return self.settings.member_notes(self.pool.trainings())

    @property
    def retain_training(self) -> HyperParameters | None:
        """The training on the retain set that methods with `retain` need; None without any."""
        needed = any(method.retain is not None for method in self.methods)
        return self.pool.settings.model_copy(update={"epochs": 1}) if needed else None

    @property
    def criterion(self) -> str:
        """The criterion that chooses λ."""
        given = self.search.criterion
        return self.settings.default_criterion if given is None else given

    def setup(self, progress: Progress | None = None) -> Setup:
        """Return the values that the recipe gives to its scenario."""
        uses_reported_data = self.settings.criterion(self.criterion).uses_reported_data
        recalibrates = self.buffers == "recalibrate"
        tunes = any(method.groups is not None for method in self.methods)
        samples = self.search.samples
        return Setup(self.seed, samples, uses_reported_data, progress, recalibrates, tunes)

    def make_scenario(self, progress: Progress | None = None) -> Scenario:
        """Return the scenario of the recipe; it opens its data when they are first needed."""
        return self.settings.scenario(self.setup(progress))

    def dump(self) -> str:
        """Return the recipe as YAML, with all defaults, but without `executor` and `track`.

        A run may begin on one machine and continue on a cluster: it is the same run. `threads`,
        `evidence` and `shadows` are there only if they are used: the recipes of older runs have no
        such fields.
        """
        tree: dict[str, Any] = {}
        left_out = {"executor", "track"} | ({"threads"} if self.threads is None else set[str]())
        left_out |= {"evidence"} if self.evidence == "basic" else set[str]()
        left_out |= set[str]() if self.evidence == "full" else {"shadows"}
        dumped = self.model_dump(mode="json", by_alias=True, exclude=left_out)
        for name, value in dumped.items():
            tree |= value if name == "settings" else {name: value}
        return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)


def load_recipe(name: str | Path | None = None, changes: Sequence[str] = ()) -> Recipe:
    """Read a recipe and change some of its fields.

    >>> load_recipe(changes=["seed=3", "pool.keep=true"]).seed
    3

    Args:
        name: a path or the name of a shipped recipe; the demo if not given.
        changes: `key=value` with a dotted key; the value is YAML.
    """
    where, tree = read_recipe(name)
    before = deepcopy(tree)
    change_fields(tree, changes)
    return _update_title(check_recipe(tree, where), before)


def named_recipe(
    recipe: Recipe | str | Path | None, changes: Sequence[str] = ()
) -> tuple[Recipe, str]:
    """Return a recipe, and the name of the folder that a run of it has by default.

    >>> named_recipe("demo")[1], named_recipe(Recipe(seed=3))[1]
    ('demo', 'recipe')

    Args:
        recipe: a Recipe, or what `load_recipe` takes.
        changes: only for a name or a path.
    """
    if not isinstance(recipe, Recipe):
        return load_recipe(recipe, changes), Path(recipe or DEFAULT).stem
    if changes:
        raise OptionError("changes: need the name or path of a recipe; got a Recipe")
    return recipe, "recipe"


def change_fields(tree: dict[str, Any], changes: Sequence[str]) -> None:
    """Change fields of a tree, as `--set` does."""
    for change in changes:
        key, equals, text = change.partition("=")
        if not equals or not key or len(key) > LONGEST_KEY:
            raise OptionError(f"--set {quoted(change)}: wanted key=value")
        try:
            set_dotted(tree, key, parse_yaml(text, f"--set {printable(key)}"))
        except FileError as error:
            raise OptionError(f"{error}; {quoted(text)} is not a YAML value") from None


def _update_title(recipe: Recipe, before: Mapping[str, Any]) -> Recipe:
    """Update a title that ends with the name of the forgotten data set, if that has changed."""
    data = before.get("data")
    old = f"forgets {data['name']}" if isinstance(data, dict) and "name" in data else None
    if old is None or recipe.title != before.get("title") or not recipe.title.endswith(old):
        return recipe
    settings: Any = recipe.settings
    title = f"{recipe.title.removesuffix(old)}forgets {settings.data.name}"
    return recipe.model_copy(update={"title": title})


def read_recipe(name: str | Path | None) -> tuple[str, dict[str, Any]]:
    """Return the name of a recipe for errors, and its tree."""
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
        raise FileError(f"{error}; {unknown_name('recipe', str(name), shipped())}") from None
    tree = parse_yaml(text, where)
    tree = {} if tree is None else tree
    if not isinstance(tree, dict):
        raise FileError(f"{where}: wanted a mapping of settings, got {type(tree).__name__}")
    return where, tree


def check_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Return the recipe of a tree; raise an error of one line if the tree is not valid."""
    if "settings" in tree:  # a field for Python only
        raise OptionError(f"{where}: settings: {NO_FIELD}")
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise OptionError(printable(f"{where}: {first_mistake(error, Recipe)}")) from None
    except NegMergeError as error:
        raise OptionError(f"{where}: {error}") from None


def shipped() -> list[str]:
    """Return the names of the recipes of the package."""
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))
