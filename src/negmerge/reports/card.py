"""The model card of a run: README.md of the unlearned model, or of its patch on the Hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from negmerge.evaluation.metrics import Metric, metric_of
from negmerge.evidence.findings import Finding
from negmerge.reports.page_data import PageData
from negmerge.reports.questions import questions
from negmerge.reports.ranking import interval_text
from negmerge.reports.summary import not_measured, scale
from negmerge.runs.result import Scored
from negmerge.scenarios.settings import Description
from negmerge.support.markdown import code, front_matter, plain, table
from negmerge.support.remote.hub import is_repo
from negmerge.vectors.card import LIMIT
from negmerge.vectors.patch import PATCH_FILE

What = Literal["model", "patch", "both"]
"""What a repository has: the unlearned model, the patch that makes it, or both."""
PAPER = "https://arxiv.org/abs/2410.05583"
LIBRARIES = {"open_clip_config.json": "open_clip", "config.json": "transformers"}
"""The library that opens a folder, by a file that it has."""
VERSIONS = ("negmerge", "torch", "numpy", "python")
"""The versions of the manifest that a card has."""
UNTITLED = "An unlearned model"
ROUNDED = 4
"""The decimals of the numbers in the YAML block."""


def card_of(
    page: PageData, files: Sequence[str], what: What = "model", repo: str | None = None
) -> str:
    """Return the model card of a finished run, as Markdown that begins with a YAML block.

    The card has neither times nor folders: the same run gives the same text.

    Args:
        files: the names of the files beside the card, which tell the library that opens them.
        what: what the card is for.
        repo: the id USER/NAME on the Hub; None for the folder of the run.
    """
    name = (page.recipe.title or UNTITLED) if repo is None else repo.rpartition("/")[2]
    about, first = public(page.result.splits), page.result.first
    forgotten, verb = page.recipe.settings.forgotten(about), "learn" if first.added else "forget"
    lines = [
        f"# {plain(name)}",
        "",
        f"{_kind(what, plain(_base(page, about)))} {verb}: {plain(forgotten)}. It was made with "
        f"negmerge, by the method {code(first.method)}"
        f"{f' ([NegMerge]({PAPER}))' if first.method == 'consensus' else ''}.",
        "",
        "## Result",
        "",
        *verdicts(page),
        "",
        *scores(page),
        "",
        "Numbers in brackets are 95 % intervals; they reflect only the number of samples.",
        "",
        "## What was not measured",
        "",
        *(f"- {plain(text)}" for text in [*not_measured(page), *_tests_not_run(page)]),
        "",
        "## Limits",
        "",
        f"- {LIMIT}",
        *(f"- {plain(text)}" for text in page.result.warnings),
        *_sum_of_both(what, page),
        "",
        "## How it was made",
        "",
        *table(["", ""], facts(page, about)),
        *_commands(page, about, PATCH_FILE if repo is None or what == "model" else repo),
    ]
    return front_matter(metadata(page, about, name, what, files)) + "\n" + "\n".join(lines) + "\n"


def verdicts(page: PageData) -> list[str]:
    """The questions of the page that have a verdict, each with the number behind it.

    What it is compared with is in the table of scores; on the page there are also times, which
    differ between equal runs.
    """
    return [
        f"- **{plain(one.question)}** {plain(one.answer.word)}. {plain(one.numbers.rstrip('.;'))}: "
        f"{plain(one.answer.text.rstrip('.'))}."
        for one in questions(page)
        if one.answer is not None
    ]


def folder_card(page: PageData) -> str:
    """Return the card of the folder of the unlearned model."""
    return card_of(page, sorted(path.name for path in page.run.card.parent.iterdir()))


def public(about: Description) -> Description:
    """Return a description without the folders of this machine.

    >>> about = Description(data="/home/me/faces", sizes={}, chosen_on={})
    >>> public(about).data, public(about.model_copy(update={"data": "someone/faces"})).data
    ('faces', 'someone/faces')
    """
    changed: dict[str, Any] = {"data": _last_part(about.data)}
    if about.control is not None:
        changed["control"] = _last_part(about.control)
    if about.model is not None and isinstance(about.model.get("name"), str):
        changed["model"] = about.model | {"name": _last_part(about.model["name"])}
    return about.model_copy(update=changed)


def _last_part(name: str) -> str:
    return name if is_repo(name) and not Path(name).exists() else Path(name).name


def _kind(what: What, base: str) -> str:
    patch = f"This is a patch that makes {base}"
    return patch if what == "patch" else f"This is {base} after it was made to"


def _base(page: PageData, about: Description) -> str:
    network = page.recipe.settings.network()
    return about.base_model or ("a model" if network is None else f"a {_last_part(network)}")


def scores(page: PageData) -> list[str]:
    """The table of all metrics of the original, the unlearned and the retrained model."""
    result = page.result
    models = {"original": result.original, "unlearned": result.first}
    models |= {"retrained": result.retrain} if result.retrain is not None else {}
    rows: list[list[str]] = []
    for metric in reported(page):
        cells = [_cell(metric, row) for row in models.values()]
        rows.append([plain(metric.axis), *cells, _samples(metric, result.first)])
    if result.first.avg_gap is not None:
        gaps = ["" if row.avg_gap is None else f"{row.avg_gap:.2f}" for row in models.values()]
        rows.append(["Avg. Gap to retraining, points", *gaps, ""])
    rows += [[plain(label), *cells] for label, cells in _findings(page, [*models])]
    return table(["metric", *models, "samples"], rows)


def _findings(page: PageData, models: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The first number of every test of forgetting, for these models, and the samples."""
    evidence, rows = page.result.evidence, list[tuple[str, list[str]]]()
    for test in evidence.tests.values() if evidence is not None else ():
        quantity = test.quantities[0]
        metric = replace(metric_of(quantity.name), label=quantity.label, unit=quantity.unit)
        if quantity.of is not None:
            own = page.forget if quantity.of == "forget" else page.retain
            label = quantity.label.replace("{metric}", own.label)
            metric = replace(metric, label=label, unit=own.unit)
        titles = [page.first if model == "unlearned" else model for model in models]
        found = [test.finding(title, quantity.name) for title in titles]
        if not any(one is not None and one.value is not None for one in found):
            continue
        counts = {one.n for one in found if one is not None and one.n is not None}
        samples = ", ".join(f"{count:,}" for count in sorted(counts))
        rows.append((metric.axis, [*(_finding(metric, one) for one in found), samples]))
    return rows


def _finding(metric: Metric, found: Finding | None) -> str:
    if found is None or found.value is None:
        return ""
    bounds = () if found.low is None or found.high is None else (found.low, found.high)
    interval = f" {interval_text(bounds, metric)}" if bounds else ""
    bound = "≥ " if found.least else "≤ " if found.most else ""
    return plain(f"{bound}{metric.number(found.value)}{interval}")


def _tests_not_run(page: PageData) -> list[str]:
    evidence = page.result.evidence
    if evidence is None:
        return ["tests of forgetting: the run has none"]
    return [f"{test.title} {test.missing}" for test in evidence.tests.values() if test.missing]


def reported(page: PageData) -> list[Metric]:
    """The metrics of the unlearned model; those of the forget and the retain set come first."""
    first = page.result.first
    order = dict.fromkeys((page.forget.name, page.retain.name, *page.metrics))
    return [page.metrics[name] for name in order if first.value(name) is not None]


def _cell(metric: Metric, row: Scored) -> str:
    value, bounds = row.value(metric.name), row.intervals.get(metric.name)
    if value is None:
        return ""
    interval = "" if bounds is None else f" {interval_text(bounds, metric)}"
    return plain(f"{metric.number(value)}{interval}")


def _samples(metric: Metric, row: Scored) -> str:
    found = {row.samples.get(name) for name in metric.sets} - {None}
    return ", ".join(f"{count:,}" for count in sorted(count for count in found if count))


def _sum_of_both(what: What, page: PageData) -> list[str]:
    if page.result.first.scale is None:
        return []
    sign = "minus" if page.result.first.added else "plus"
    text = (
        f"The unlearned model {sign} λ times the patch is the original model, up to rounding: "
        "whoever has both can undo the forgetting"
    )
    return [f"- {text}. This repository has both." if what == "both" else f"- {text}."]


def facts(page: PageData, about: Description) -> list[list[str]]:
    """The rows of the table about the making: base, method, λ, versions."""
    result, first = page.result, page.result.first
    base = about.base_model and code(
        about.base_model + (f"@{about.base_commit}" if about.base_commit else "")
    )
    network, method = page.recipe.settings.network(), page.recipe.methods[0]
    options = ", ".join(f"{key}={value}" for key, value in method.options.items())
    pool = f"{len(result.pool)} fine-tuned models" if first.merged else ""
    zeros = "" if first.sparsity is None else f"{first.sparsity:.2f} % of its elements are zero"
    versions = page.run.read_manifest().versions
    rows = {
        "base model": base or "",
        "network": "" if network is None else code(_last_part(network)),
        "licence of the base": "" if about.licence is None else code(about.licence),
        "scenario": code(page.recipe.scenario),
        "method": code(first.method) + (f" ({plain(options)})" if options else ""),
        "pool": pool,
        "λ": "" if first.scale is None else plain(scale(page)),
        "patch": zeros,
        "seed": str(result.seed),
        "versions": ", ".join(f"{name} {versions[name]}" for name in VERSIONS if name in versions),
        "hash of the run": code(page.run.read_manifest().result),
    }
    return [[name, text] for name, text in rows.items() if text]


def _commands(page: PageData, about: Description, patch: str) -> list[str]:
    first = page.result.first
    if first.scale is None or page.recipe.buffers == "recalibrate":
        return []
    known = about.base_model if about.base_fits else None
    base = f"{known}@{about.base_commit}" if known and about.base_commit else known or "BASE"
    sign = "--add" if first.added else "--negate"
    command = ["negmerge", "apply", base, patch, sign, repr(first.scale), "-o", "OUT"]
    text = "The patch was made with `negmerge unlearn`; this command applies it"
    where = "" if known else ", with BASE the original model of the run"
    return ["", f"{text}{where}:", "", "    " + " ".join(map(quote, command))]


# ----------------------------------------------------------------------------------------- the YAML


def metadata(
    page: PageData, about: Description, name: str, what: What, files: Sequence[str]
) -> dict[str, Any]:
    """The fields of the YAML block, as the Hub defines them, with the scores as `model-index`.

    https://huggingface.co/docs/hub/model-cards#model-card-metadata has the fields.
    """
    from huggingface_hub import ModelCardData

    task, first = page.recipe.settings.task, page.result.first
    opens = (library for file, library in LIBRARIES.items() if file in files)
    library = (about.model or {}).get("library") or next(opens, "negmerge")
    ids = (page.recipe.settings.hub_data(part) for part in ("forget", "retain"))
    data = ModelCardData(
        base_model=about.base_model,
        datasets=list(dict.fromkeys(one for one in ids if one)) or None,
        library_name="negmerge" if what == "patch" else library,
        license=about.licence,
        pipeline_tag=task if what != "patch" else None,
        tags=["machine-unlearning", "negmerge"],
        model_name=name,
        eval_results=_eval_results(page, about) or None,
    )
    tree = data.to_dict()
    if first.scale is not None:
        direction = "add" if first.added else "negate"
        tree["negmerge"] = {"rule": first.method, "scale": first.scale, "direction": direction}
    return tree


def _eval_results(page: PageData, about: Description) -> list[Any]:
    from huggingface_hub import EvalResult

    found: list[Any] = []
    for metric in reported(page):
        part = metric.sets[0] if metric.sets else ""
        kind = "accuracy" if metric.name.startswith("acc_") else metric.name
        hub = page.recipe.settings.hub_data(part)
        bounds = page.result.first.intervals.get(metric.name)
        interval = "" if bounds is None else f", 95 % interval {interval_text(bounds, metric)}"
        found.append(
            EvalResult(
                task_type=page.recipe.settings.task or "other",
                dataset_type=hub or slug(about.data),
                dataset_name=f"{hub or about.data}, {part} set" if part else hub or about.data,
                dataset_split=part or None,
                metric_type=kind,
                metric_name=f"{metric.axis}{interval}",
                metric_value=round(page.result.first.value(metric.name) or 0.0, ROUNDED),
            )
        )
    return found


def slug(text: str) -> str:
    """Return a text as an identifier.

    >>> slug("My faces (2024)")
    'my-faces-2024'
    """
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.") or "data"
