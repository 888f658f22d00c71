"""`unlearn`: make a model in memory forget, with datasets or with functions, in one call."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import Dataset

from negmerge.api.problem import check_request, classifier_problem, function_problem
from negmerge.errors import OptionError
from negmerge.evaluation.criteria import KEPT
from negmerge.evaluation.functions import Evaluate
from negmerge.evaluation.scales import Search
from negmerge.reports.page import report
from negmerge.runs.context import Context
from negmerge.runs.executors import InProcess
from negmerge.runs.methods import Pool
from negmerge.runs.pipeline import finished
from negmerge.runs.pipeline import unlearn as run_pipeline
from negmerge.runs.scores import NO_REFERENCE
from negmerge.runs.store import Run
from negmerge.scenarios.module.check import check_weights
from negmerge.scenarios.module.functions import FineTune
from negmerge.support.files import file_digest, link_or_copy, scratch_folder
from negmerge.support.progress import Progress, make_progress
from negmerge.training.weights import load_model, save_model

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Unlearned:
    """How a module was unlearned: the attribute `negmerge` of the module that `unlearn` returns.

    Args:
        method: the merge rule, selector or rival.
        scale: λ; None for a rival.
        scores: the rows of `scores.json` for the `original` and the `unlearned` model:
            `acc_forget`, `acc_retain` and `acc_test` in percent, None where a set was not given,
            with `intervals`; for the unlearned model also its cost.
        warnings: the warnings of the run.
        folder: the run directory, if `out` was given.
        page: the page of the run, if `out` and a forget set were given.
    """

    method: str
    scale: float | None
    scores: dict[str, dict[str, Any]]
    warnings: tuple[str, ...]
    folder: Path | None
    page: Path | None


def unlearn(
    model: M,
    splits: Mapping[str, Dataset[Any]] | None = None,
    method: str = "consensus",
    *,
    fine_tune: FineTune | None = None,
    evaluate: Evaluate | None = None,
    keep: float | None = None,
    lower: Collection[str] = (),
    pool: Pool | Mapping[str, Any] | None = None,
    search: Search | Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    seed: int = 0,
    progress: Progress | None = None,
    **options: Any,
) -> M:
    """Return a copy of a model that has forgotten some data; the model itself does not change.

    There are two ways to call it. With `splits`, the model is a classifier: any `nn.Module` whose
    output is one logit for each class, as a tensor of n × classes or as the attribute `.logits` of
    an object, as in Hugging Face models. `unlearn` trains and measures it. Before any work it tries
    one batch of each set and reads every label.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> import negmerge as nm
    >>> _ = torch.manual_seed(6)
    >>> data = TensorDataset(torch.randn(20, 4), torch.arange(20) % 2)
    >>> pool = nm.Pool(grid={"epochs": [1, 2]}, settings={"lr": 0.01, "batch": 8})
    >>> model = torch.nn.Linear(4, 2)
    >>> forgot = nm.unlearn(model, {"forget": data, "test": data}, pool=pool)
    >>> type(forgot).__name__, forgot.negmerge.method, sorted(forgot.negmerge.scores)
    ('Linear', 'consensus', ['original', 'unlearned'])

    With `fine_tune` and `evaluate`, the model is any module and the task any task: your code trains
    a copy on what must be forgotten, and your metric measures how much a model still knows.

    >>> def fine_tune(model, settings):
    ...     optimizer = torch.optim.SGD(model.parameters(), settings.lr)
    ...     for _ in range(settings.epochs):
    ...         optimizer.zero_grad()
    ...         (model(torch.eye(4)[:2]) - 1).square().mean().backward()
    ...         optimizer.step()
    >>> def evaluate(model):
    ...     with torch.no_grad():
    ...         outputs = model(torch.eye(4))
    ...     forget, retain = outputs[:2].mean(), 1 - outputs[2:].square().mean()
    ...     return {"forget": float(forget), "retain": float(retain)}
    >>> pool = nm.Pool(grid={"epochs": [5, 10], "lr": [0.1, 0.2]})
    >>> forgot = nm.unlearn(model, fine_tune=fine_tune, evaluate=evaluate, pool=pool, keep=0.9)
    >>> forgot.negmerge.scores["unlearned"]["forget"] < evaluate(model)["forget"]
    True

    Args:
        model: any module.
        splits: map-style Datasets: `forget`, and `retain` or `test` or both. A sample is
            (input, label), or a dictionary with `labels` or `label`; then the model is called with
            the other entries as keyword arguments. λ matches the accuracy on `test`, or, without
            `test`, keeps the accuracy on `retain`; `search` can choose another criterion. A rival
            is trained on the sets that it uses; the others are only scored.
        method: a merge rule, `single_best`, or, with `splits`, a rival
            (`negmerge list rivals`), such as `method="salun", keep=0.3, epochs=5`.
        fine_tune: fine_tune(model, settings) trains a copy of the model in place and returns
            nothing, or returns the trained module or its state dict. Random numbers are seeded
            before each call.
        evaluate: evaluate(model) returns `forget`, `retain` and any other numbers. A higher value
            means that the model knows more. The model is measured before anything is trained.
        keep: with `evaluate`, the share of the original's `retain` to keep; 0.95 if not given.
        lower: with `evaluate`, which of `forget` and `retain` are lower for a model that knows
            more, such as losses and errors; `retain` may then grow to the original's divided by
            `keep`.
        pool: the settings of the members; nine members if not given. `own` in the settings and
            `own.NAME` in the grid are for your training code, as `settings.own["NAME"]`.
        search: the λ to measure, and with `splits` the criterion that chooses one.
        out: the run directory, which keeps all files and a page (`report/index.html`); an
            interrupted run continues there. Without a forget set, which some rivals do not need,
            there is no page. Functions are identified by their source code; name another folder
            when the data that they read changes.
        seed: the seed of all random numbers in training, and of the samples that choose λ.
        progress: shows how much is done; a bar on a terminal, or lines, if not given.
        options: the options of the method; for a rival also its settings.

    Returns:
        The copy; its attribute `negmerge` is an `Unlearned`, which says how it was made.
    """
    request = check_request(model, method, pool, search, seed, options)
    if not isinstance(getattr(model, "negmerge", None), Unlearned | None):
        raise OptionError(
            "model: has an attribute 'negmerge' of its own, which the result needs; rename it"
        )
    if fine_tune is None and evaluate is None:
        if lower:
            raise OptionError("lower: goes with evaluate; leave it out")
        if keep is not None:  # an option of some rivals
            request = replace(request, options=options | {"keep": keep})
        make_problem = partial(classifier_problem, request, splits)
    else:
        if splits is not None:
            raise OptionError("splits: give either splits, or fine_tune and evaluate")
        share = KEPT if keep is None else keep
        make_problem = partial(function_problem, request, fine_tune, evaluate, share, lower)
    check_weights(model)
    with ExitStack() as stack:
        in_use = stack.enter_context(ExitStack())
        scratch = in_use.enter_context(scratch_folder(_disk_of(out)))
        saved = scratch / "given.safetensors"
        save_model(saved, model, {})
        store = Run(scratch / "run" if out is None else out)
        given = store.states / saved.name
        recipe, scenario = make_problem(file_digest(saved), given)
        done = finished(store, recipe, scenario)
        if not done:
            scenario.check()
        with_page = out is not None and (splits is None or "forget" in splits)
        shown = stack.enter_context(make_progress()) if progress is None else progress
        with store.locked():
            link_or_copy(saved, given)
            if out is not None:
                in_use.close()  # before hours of work
            if done:
                store.clear_state()
            else:
                executor = InProcess(scenario)
                run_pipeline(Context(recipe, scenario, store, executor, shown, with_page))
        if with_page and not store.has_page:
            report(store, shown)
        forgot = copy.deepcopy(model)
        load_model(store.unlearned, forgot)
        rows = {"original": store.result.original, "unlearned": store.result.first}
        result = Unlearned(
            method,
            rows["unlearned"].scale,
            {name: row.model_dump(exclude_unset=True) for name, row in rows.items()},
            tuple(text for text in store.result.warnings if text != NO_REFERENCE),
            None if out is None else store.folder,
            store.page if with_page else None,
        )
    for text in result.warnings:
        warnings.warn(text, stacklevel=2)
    forgot.negmerge = result  # pyright: ignore[reportArgumentType]
    return forgot


def _disk_of(out: str | Path | None) -> Path:
    """Return a folder on the disk of the run, whose own folder need not exist."""
    if out is None:
        return Path(tempfile.gettempdir())
    path = Path(out).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
