"""The same job from Python: a classifier in memory, map-style Datasets, one call."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import Dataset

from negmerge.checking import check_methods
from negmerge.criteria import criteria
from negmerge.errors import MismatchError, OptionError, shown
from negmerge.executors import InProcess
from negmerge.files import file_digest, take_over, told_plainly
from negmerge.hyperparameters import HyperParameters
from negmerge.model_check import check_weights
from negmerge.models.classifiers import final_linear
from negmerge.models.weights import load_model, save_model
from negmerge.outcome import NO_REFERENCE
from negmerge.own_model import OwnModel
from negmerge.pipeline import Pipeline, problem_of
from negmerge.progress import Progress, make_progress
from negmerge.recipe import Data, Model, Pool, Recipe, Search, check_recipe
from negmerge.registry import unknown
from negmerge.report.page import report
from negmerge.rivalry import INHERITED
from negmerge.rivals import Rival, rivals
from negmerge.rivals.registry import PARTS
from negmerge.rundir import Run

M = TypeVar("M", bound=nn.Module)

SETS = ("forget", "retain", "test")
USUAL = {"epochs": [5, 10, 15], "label_smoothing": [0.0, 0.05, 0.1]}
"""The pool if none is given: nine members."""


@dataclass(frozen=True)
class Unlearned:
    """How a module was unlearned; `unlearn` leaves it in the module's attribute `negmerge`.

    Args:
        method: the merge rule, selector or rival.
        scale: λ; None for a rival, which has none.
        scores: of the `original` and the `unlearned` model, as in `scores.json`: `acc_forget`,
            `acc_retain` and `acc_test` in percent, None where a set was not given, with
            `intervals`; and of the unlearned one what it cost.
        warnings: what the run warned of.
        folder: the run, if `out` was given.
        page: its page, if `out` and a forget set were given.
    """

    method: str
    scale: float | None
    scores: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    folder: Path | None
    page: Path | None


def unlearn(
    model: M,
    splits: Mapping[str, Dataset[Any]],
    method: str = "consensus",
    *,
    pool: Pool | Mapping[str, Any] | None = None,
    search: Search | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> M:
    """A copy of a classifier that has forgotten some data; the model itself is left as it is.

    The model is any `nn.Module` whose output is one logit for each class: a tensor of n × classes,
    or an object that has it as `.logits`, as the classifiers of Hugging Face return. The sets are
    map-style Datasets whose labels are integers. Regression, multi-label and segmentation are not
    supported. One batch of each set is tried, and every label read, before any work.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> _ = torch.manual_seed(2)
    >>> data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    >>> pool = Pool(grid={"epochs": [1, 2]}, settings={"lr": 0.01, "batch": 8})
    >>> forgot = unlearn(nn.Linear(4, 2), {"forget": data, "test": data}, pool=pool)
    >>> type(forgot).__name__, forgot.negmerge.method, sorted(forgot.negmerge.scores)
    ('Linear', 'consensus', ['original', 'unlearned'])

    splits: `forget`, and `retain` or `test` or both. Samples are (input, label), or dictionaries
        with `labels` or `label`; then the model is called with the other entries by name. λ matches
        the accuracy on `test`, or without one keeps that on `retain` (`search` says otherwise).
        A rival is trained on those it uses; the others are scored, and change nothing else.
    method, options: a merge rule with its options, `single_best`, or a rival with its options and
        settings (`negmerge list rivals`), such as `method="salun", keep=0.3, epochs=5`.
    pool: how members are fine-tuned; nine members if not given. search: which λ are tried and how
        one is chosen. Both may be mappings, as in a recipe.
    out: keep everything in this folder with a page (`report/index.html`), and go on there after an
        interruption. Without a forget set, which some rivals do not need, there is no page: it is
        about that set.

    The module that is returned has the result as its attribute `negmerge`, an `Unlearned`.
    """
    pool, search = _check_arguments(model, splits, method, seed, pool, search)
    if not isinstance(getattr(model, "negmerge", None), Unlearned | None):
        raise OptionError(
            "model: has an attribute 'negmerge' of its own, where the result goes; rename it"
        )
    check_weights(model)
    rival = rivals.get(method) if method in rivals else None
    if rival is None:
        search = _check_merge(splits, search)
        trained, depends, samples = ("forget",), tuple(splits), search.samples
    else:
        trained = depends = _check_rival(rival, splits, options, pool or search)
        samples = None
    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch(out))
        save_model(scratch / "given.safetensors", model, {})
        digest = file_digest(scratch / "given.safetensors")
        own = OwnModel(model, splits, digest, seed, trained, depends, samples)
        folder = Run(scratch / "run" if out is None else out)
        given = folder.states / "given.safetensors"
        recipe = Recipe(
            title=f"{type(model).__name__}: {method}",
            seed=seed,
            data=Data(name=own.name),
            model=Model(name=type(model).__name__, weights=given),
            retrain=None,
            train=_inherited(rival),
            pool=pool or Pool.model_validate({"grid": USUAL}),
            methods=[{"name": method, "options": options}],  # pyright: ignore[reportArgumentType]
            search=search or Search(),
        )
        if rival is None:
            check_methods(recipe)
        else:
            _check_head(own, method)
        paged = out is not None and "forget" in splits
        shows = stack.enter_context(make_progress()) if progress is None else progress
        with folder.working():
            take_over(scratch / given.name, given)
            if folder.finished_with(recipe.dump(), problem_of(recipe, own)):
                folder.clear()
            else:
                kind = Pipeline if rival is None else OneRival
                kind(recipe, folder, own, InProcess(own), shows, illustrated=paged).run()
        if paged and not folder.reported:
            report(folder, shows)
        forgot = copy.deepcopy(model)
        load_model(folder.unlearned, forgot)
        result = _result(method, folder, out is not None, paged)
    for text in result.warnings:
        warnings.warn(text, stacklevel=2)
    forgot.negmerge = result  # pyright: ignore[reportArgumentType]
    return forgot


@contextmanager
def _scratch(out: str | Path | None) -> Iterator[Path]:
    """A temporary folder on the disk of the run, whose own folder is made only when all fits."""
    place = None
    if out is not None:
        where = Path(out).absolute()
        place = next(path for path in (where, *where.parents) if path.is_dir())
    with told_plainly(place or Path(tempfile.gettempdir())):
        made = tempfile.TemporaryDirectory(prefix=".negmerge-", dir=place)
    with made as name:
        yield Path(name)


class OneRival(Pipeline):
    """A run of one rival from the module itself; its training is named by the module's weights."""

    def start(self) -> tuple[Path, str]:
        assert isinstance(self.problem, OwnModel)
        return self.folder.base, self.problem.weights


def _result(method: str, folder: Run, kept: bool, paged: bool) -> Unlearned:
    scores = folder.scores
    row = scores["methods"][0]
    return Unlearned(
        method,
        row["scale"],
        {"original": scores["original"], "unlearned": row},
        tuple(text for text in scores["warnings"] if text != NO_REFERENCE),
        folder.folder if kept else None,
        folder.page if paged else None,
    )


def _check_arguments(
    model: object, splits: object, method: object, seed: object, pool: object, search: object
) -> tuple[Pool | None, Search | None]:
    """The pool and the search, if all arguments are of the kinds they must be."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"model: is a {type(model).__name__}; wanted a torch.nn.Module")
    if not isinstance(splits, Mapping):
        raise OptionError(
            f"splits: is a {type(splits).__name__}; wanted a mapping of datasets by name: forget, "
            "and retain or test or both"
        )
    if not isinstance(method, str):
        raise OptionError(
            f"method: is a {type(method).__name__}; wanted the name of a merge rule, a selector or "
            "a rival"
        )
    given = {"pool": pool, "search": search}
    given = {name: value for name, value in given.items() if value is not None}
    checked = check_recipe({"seed": seed, "methods": [method], **given}, "nm.unlearn")
    return (
        checked.pool if "pool" in given else None,
        checked.search if "search" in given else None,
    )


def _check_merge(splits: Mapping[str, Any], search: Search | None) -> Search:
    """The search with its criterion, which the splits must have a set for."""
    _check_names(splits, "forget" in splits and len(splits) > 1)
    search = search or Search(limit=16.0)
    if search.criterion is None:
        criterion = "match_holdout" if "test" in splits else "keep_retain"
        search = search.model_copy(update={"criterion": criterion})
    needs = criteria.get(search.criterion or "").needs
    if needs not in splits:
        raise OptionError(f"search.criterion {search.criterion!r} needs the {needs} set")
    return search


def _check_names(splits: Mapping[str, Any], enough: bool) -> None:
    for name in splits:
        if name not in SETS:
            raise OptionError(f"splits: {unknown('set', str(name), SETS)}")
    if not enough:
        raise OptionError(
            f"splits: got {', '.join(map(str, splits)) or 'nothing'}; wanted forget, and test "
            "(samples that the model never saw) or retain (samples that it keeps) or both"
        )


def _check_rival(
    rival: Rival, splits: Mapping[str, Any], options: Mapping[str, Any], merging: object
) -> tuple[str, ...]:
    """The sets that a rival is trained on."""
    if merging is not None:
        raise OptionError(
            f"{rival.name}: pool and search are for merged task vectors; leave them out"
        )
    parts = PARTS[rival.used(rival.resolve(options)[1])]
    _check_names(splits, True)
    missing = [part for part in parts if part not in splits]
    if missing:
        hint = ", or use_retain=False" if "use_retain" in rival.defaults else ""
        raise OptionError(
            f"{rival.name}: splits has no {missing[0]} set; wanted {' and '.join(parts)}: give "
            f"it{hint}"
        )
    return parts


def _inherited(rival: Rival | None) -> HyperParameters:
    """What a recipe's rivals take from the training of the original: here the rival's own."""
    if rival is None:
        return HyperParameters()
    return HyperParameters(**{name: getattr(rival.settings, name) for name in INHERITED})


def _check_head(own: OwnModel, method: str) -> None:
    """Rivals that draw, add or remove classes do so in the last linear layer."""
    name, layer = final_linear(own.model)
    if layer.out_features != own.classes:
        raise MismatchError(
            f"{method}: the model's last linear layer, {shown(name)}, has {layer.out_features} "
            f"outputs, and the model {own.classes} classes; wanted the layer that gives the logits "
            "to be defined last"
        )
