"""The words on top of the page: what was forgotten, how well, at what cost, and what is unknown."""

from __future__ import annotations

from typing import Any

import pandas as pd

from negmerge.criteria import criteria
from negmerge.recipe import Recipe
from negmerge.report.ranking import gap_interval, listed, nearest
from negmerge.report.tables import COLUMNS

WORDS = {
    "acc_forget": "accuracy on the forget set, %",
    "acc_retain": "accuracy on the retain set, %",
    "acc_test": "accuracy on the test set, %",
    "mia": "forget set taken for unseen by membership inference, %",
    "avg_gap": "Avg. Gap to retraining, points",
}


def forgotten(scores: dict[str, Any]) -> str:
    """What was to be forgotten.

    >>> sizes = {"forget": 100, "retain": 900}
    >>> forgotten({"splits": {"data": "cifar10", "forgotten_class": None, "sizes": sizes}})
    '100 of the 1,000 training records of cifar10 (10.0 %)'
    """
    about = scores["splits"]
    sizes, data = about["sizes"], about["data"]
    if about.get("scenario") == "clip":
        return (
            f"what {about['model']['name']} knows of {data}, by fine-tuning on {sizes['train']:,} "
            f"of its images; {about['control']} is to be kept"
        )
    count = sizes["forget"]
    if about.get("forgotten_class") is not None:
        return f"the class “{about['forgotten_class']}” of {data}, {count:,} training records"
    if "retain" not in sizes:
        return f"{count:,} training records of {data}"
    total = count + sizes["retain"]
    return f"{count:,} of the {total:,} training records of {data} ({100 * count / total:.1f} %)"


def how_well(scores: dict[str, Any]) -> pd.DataFrame:
    """The measured numbers of the unlearned model between the original and the retrained one."""
    first = scores["methods"][0]
    rows: list[dict[str, Any]] = []
    for metric, words in WORDS.items():
        if first.get(metric) is None:
            continue
        row: dict[str, Any] = {"measured": words, "original": scores["original"].get(metric)}
        row["unlearned"] = first[metric]
        if metric in first["intervals"]:
            row["unlearned_low"], row["unlearned_high"] = first["intervals"][metric]
        if scores["retrain"] is not None:
            row["retrained"] = scores["retrain"][metric]
            if metric == "avg_gap":
                row["unlearned_low"], row["unlearned_high"] = gap_interval(first, scores["retrain"])
        rows.append(row)
    return pd.DataFrame(rows)


def sentence(scores: dict[str, Any]) -> str:
    """How well it forgot, in one sentence."""
    first, original, retrain = scores["methods"][0], scores["original"], scores["retrain"]
    told = (
        f"Accuracy on what was to be forgotten went from {original['acc_forget']:.2f} % to "
        f"{first['acc_forget']:.2f} %"
    )
    if retrain is not None:
        told += f" (a model retrained without it has {retrain['acc_forget']:.2f} %)"
    if first["acc_retain"] is not None:
        told += (
            f"; on what was to be kept from {original['acc_retain']:.2f} % to "
            f"{first['acc_retain']:.2f} %"
        )
        if retrain is not None:
            told += f" ({retrain['acc_retain']:.2f} %)"
    told += "."
    return told


def nearness(scores: dict[str, Any]) -> str:
    """Which method came nearest to retraining, as far as the intervals tell them apart."""
    found = nearest(scores)
    if found is None:
        return ""
    (best, alike), first = found, scores["methods"][0]["method"]
    gaps = {row["method"]: row["avg_gap"] for row in scores["methods"]}
    told = f"Of {len(gaps)} methods {best} "
    if not alike:
        told += f"came nearest to retraining, with an Avg. Gap of {gaps[best]:.2f} points"
    else:
        told += (
            f"has the smallest Avg. Gap to retraining, {gaps[best]:.2f} points, but is not "
            f"distinguishable from {listed(alike)}: their 95 % intervals overlap"
        )
    if first not in (best, *alike):
        told += f"; {first} has {gaps[first]:.2f}"
    return told + "."


def strength(scores: dict[str, Any]) -> str:
    """λ and how it was chosen."""
    first = scores["methods"][0]
    if first["scale"] is None:
        tried = len(first.get("tried") or [])
        how = f"the best of {tried} tries by {first['criterion']}" if tried else "not tuned"
        return f"No λ: {first['method']} trains the model itself; {how}."
    if first["criterion"] is None:
        return f"λ = {first['scale']:g}, given by the recipe; the task vector is added."
    summary = criteria.get(first["criterion"]).summary
    told = f"λ = {first['scale']:g}, by {first['criterion']}: {summary}"
    if first["looked"]:
        told += ". It was chosen on the reported data, so the scores flatter it"
    else:
        chosen = scores["splits"]["chosen_on"]
        told += ", on " + ", ".join(f"{n:,} {k}" for k, n in chosen.items())
        told += " samples that are not reported"
    count = first["evaluations"]
    told += f"; {count} evaluation{'' if count == 1 else 's'}."
    if first["edge"]:
        told += " A λ larger than all that were tried may be better."
    return told


def against_retraining(scores: dict[str, Any], recipe: Recipe) -> str:
    """What the unlearning cost beside retraining, in one sentence."""
    first, retrain, sizes = scores["methods"][0], scores["retrain"], scores["splits"]["sizes"]
    ratio, told = first["cost_ratio"], "of"
    if ratio is None and recipe.clip is None and recipe.model.weights is None:
        ratio = first["samples_processed"] / (recipe.train.epochs * sizes["retain"])
        told = "that the recipe's own training would take for"
    if ratio is None:
        return (
            f"{first['samples_processed']:,} samples processed in training, "
            f"{first['seconds']:.0f} s; there is no retraining to compare with."
        )
    text = f"{ratio:.2f} × the samples {told} retraining"
    if retrain is not None and retrain["seconds"]:
        text += f", {first['seconds']:.0f} s against {retrain['seconds']:.0f} s"
    return f"{text}{'; retraining would have been cheaper' if ratio > 1 else ''}."


def cost(scores: dict[str, Any]) -> str:
    """What the unlearning took."""
    first = scores["methods"][0]
    return (
        f"{first['samples_processed']:,} samples processed in training and "
        f"{first['seconds']:.0f} s in all, {first['seconds_search']:.0f} s of it for the search "
        "of λ. The seconds of trainings, merges and searches are added up, although several may "
        "have run at once."
    )


def not_measured(scores: dict[str, Any]) -> list[str]:
    """What a reader might take for measured and is not."""
    first = scores["methods"][0]
    found = [
        f"{WORDS[m].removesuffix(', %')}: not measured in this scenario"
        for m in COLUMNS
        if first.get(m) is None
    ]
    if scores["retrain"] is None:
        found.append("distance to a model that never saw the data: there is no retrained reference")
    found.append(
        f"spread over seeds: one run with seed {scores['seed']}; the 95 % intervals "
        "are from the number of samples alone"
    )
    if first.get("mia") is not None:
        found.append(
            "other attacks: one confidence attack was run; where it fails, others may succeed"
        )
    return found
