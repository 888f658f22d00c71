"""The desk study: which rule to take, for records, a class and a zero-shot data set.

    NEGMERGE_DATA=FOLDER python benchmarks/desk_study.py ARM [ARM …] [--seeds 0-11] [--runs FOLDER]

An arm is a recipe and how a seed changes it (`ARMS`). Each seed is a run; its result is written to
benchmarks/results/desk_study/ARM-SEED.json when it is finished, and a seed that has such a file is
not run again, so that a study goes on where it was stopped, on any machine. The seeds below
`CONFIRMED` choose among many rules; the others confirm those that were chosen (`CHOSEN`). Models
that an arm trained are used again by the later arms of its seed. Without an arm, only the page is
made: benchmarks/results/desk_study.md.

The CLIP of the arms `clip` and `linear` saw 2,000 of the 60,000 images of the set that it forgets:
scripts/make_desk_clip.py benchmarks/models/transfer_clip --few 2000.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from machine import describe, markdown_table

from negmerge.runs.context import Context
from negmerge.runs.executors.choose import make_executor
from negmerge.runs.pipeline import checked_scenario, open_recipe, unlearn
from negmerge.runs.recipe import load_recipe
from negmerge.runs.result import RunResult
from negmerge.studies.comparison import MATCHED_GAP, Comparison, Difference
from negmerge.studies.statistics import Mean, mean_of
from negmerge.support.files import write_file
from negmerge.support.progress import make_progress
from negmerge.support.seeds import parse_seeds
from negmerge.vectors.task_vector import TaskVector

RESULTS = Path(__file__).parent / "results"
FOLDER = RESULTS / "desk_study"
CLIP = Path(__file__).parent / "models" / "transfer_clip"
CONFIRMED = 3
"""The first seed that confirms; those before it choose."""
PAPER = ["consensus", "uniform", "ties", "magmax", "conflict", "single_best"]
FEWER = [
    *({"name": "consensus", "subset": {"count": count}} for count in (2, 3, 5)),
    {"name": "uniform", "subset": {"count": 3}},
    {"name": "ties", "subset": {"count": 3}},
]
CHOSEN = [
    {"name": "shrink", "options": {"by": "james_stein"}, "label": "james-stein"},
    {"name": "uniform", "equalise": True},
    {"name": "ties", "equalise": True},
    {"name": "consensus", "groups": "depth"},
    {"name": "uniform", "groups": "depth"},
    {"name": "ties", "groups": "depth"},
]
"""What the choosing seeds left: rules that were not worse than uniform there, and with factors of
depth, which helped consensus, the two best rules."""


@dataclass(frozen=True)
class Arm:
    """A recipe, and the changes that a seed makes beside the seed itself."""

    title: str
    recipe: str
    changes: Callable[[int], Sequence[str]] = lambda seed: []
    original_of: str | None = None
    """The arm whose original model of the same seed is used again, for another forget set."""
    models_of: str | None = None
    """The arm whose models of the same seed are used again where their settings are the same."""
    against: str = "consensus"


def _pool(**fields: Any) -> str:
    settings = {"batch": 128, "lr": 0.05, "augment": {"crop": 0, "flip": False}}
    return f"pool={json.dumps({**fields, 'settings': settings | fields.get('settings', {})})}"


def _methods(seed: int) -> list[str]:
    """The methods of a seed: many choose, the chosen ones are confirmed."""
    methods = [*PAPER, *CHOSEN, *FEWER]
    return [f"methods={json.dumps(methods)}"] if seed >= CONFIRMED else []


def _class_of(seed: int) -> list[str]:
    return [
        "title=A class of Fashion-MNIST on a desk, small ResNet",
        f"split.forget={{class: {seed % 10}}}",
        "search.matched=5",
        *_methods(seed),
    ]


def _recalibrated(seed: int) -> list[str]:
    return [
        "title=BatchNorm statistics computed again",
        "buffers=recalibrate",
        "methods=[consensus, uniform, ties]",
    ]


def _clip(linear: bool) -> Callable[[int], list[str]]:
    def changes(seed: int) -> list[str]:
        """Another 6,000 images to forget in each seed, and the whole test sets."""
        fields = {"epochs": 4, "batch": 128, "lr": 2e-4, "optimizer": "adamw"}
        fields |= {"weight_decay": 0.1, "schedule": "cosine", "warmup": 50, "clip": 1.0}
        grid = {"augment.randaugment.n": [1, 2, 3], "augment.randaugment.m": [1, 4, 7, 10]}
        return [
            f"title=A CLIP that saw few images of Fashion-MNIST forgets it{', linearly' * linear}",
            f"model.name={CLIP}",
            "data.limit={train: 6000}",
            "clip.control.limit={}",
            f"clip.linear={json.dumps(linear)}",
            f"pool={json.dumps({'settings': fields, 'grid': grid})}",
            f"methods={json.dumps([*PAPER, *CHOSEN, *FEWER])}",
            "search={samples: 5000}",
        ]

    return changes


CHECKPOINTS = [
    "title=Checkpoints of one training as members",
    _pool(settings={"epochs": 12}, checkpoints=[3, 6, 9, 12]),
    "methods=[{name: consensus, label: consensus-checkpoints}, "
    "{name: uniform, label: uniform-checkpoints}]",
]
RATES = [
    "title=Learning rates within a factor of 16",
    _pool(
        settings={"epochs": 9},
        grid={
            "lr": [0.0125, 0.05, 0.2],
            "weight_decay": [1e-4, 1e-5],
            "label_smoothing": [0.0, 0.1],
        },
    ),
    "methods=[{name: consensus, label: consensus-rates}, {name: uniform, label: uniform-rates}]",
]

ARMS = {
    "records": Arm("10 % of the records of Fashion-MNIST", "desk_fashion", _methods),
    "class": Arm("a class of Fashion-MNIST", "desk_fashion", _class_of, "records"),
    "recalibrated": Arm(
        "records, with the BatchNorm statistics computed again",
        "desk_fashion",
        _recalibrated,
        models_of="records",
    ),
    "checkpoints": Arm(
        "records, with the checkpoints of one training as members",
        "desk_fashion",
        lambda seed: CHECKPOINTS,
        models_of="records",
        against="consensus-checkpoints",
    ),
    "rates": Arm(
        "records, with members of different learning rates",
        "desk_fashion",
        lambda seed: RATES,
        models_of="records",
        against="consensus-rates",
    ),
    "clip": Arm("a CLIP forgets Fashion-MNIST", "desk_clip_fashion", _clip(linear=False)),
    "linear": Arm(
        "a linearised CLIP forgets Fashion-MNIST", "desk_clip_fashion", _clip(linear=True)
    ),
}


def given_models(arm: Arm, seed: int, folder: Path) -> list[str]:
    """The field that names the original model of another arm, where this machine has it."""
    place = folder / f"{arm.original_of}-{seed}" / "base.safetensors"
    return [f"model.weights={place}"] if place.exists() else []


def run(name: str, seed: int, folder: Path) -> None:
    """Run one seed of an arm, and keep what is compared."""
    arm, begun = ARMS[name], time.monotonic()
    changes = [f"seed={seed}", *arm.changes(seed), *given_models(arm, seed, folder)]
    others = [folder / f"{arm.models_of}-{seed}"] if arm.models_of else []
    recipe, store = open_recipe(arm.recipe, folder / f"{name}-{seed}", changes, others)
    with make_progress() as progress:
        scenario = checked_scenario(recipe, progress)
        with store.locked(), make_executor(recipe, scenario, store, progress) as executor:
            unlearn(Context(recipe, scenario, store, executor, progress, illustrated=False))
    zeros = TaskVector.load(store.patch(arm.against)).sparsity(by="depth")
    tree = store.result.tree() | {"pool": [], "geometry": None, "evidence": None}
    found = {
        "arm": name,
        "seed": seed,
        "machine": describe(),
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "zeros_by_depth": {depth: 100 * own.element_weighted for depth, own in zeros.items()},
        "result": tree,
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    write_file(FOLDER / f"{name}-{seed}.json", (json.dumps(found, indent=1) + "\n").encode())


def remove_pools(seed: int, folder: Path) -> None:
    """Remove the members of the runs of a seed, which later arms of the seed used again."""
    for name, part in product(ARMS, ("pool", ".state")):
        shutil.rmtree(folder / f"{name}-{seed}" / part, ignore_errors=True)


def kept(name: str) -> dict[int, dict[str, Any]]:
    """The records of the seeds of an arm, by seed."""
    files = FOLDER.glob(f"{name}-*.json")
    found = {int(path.stem.removeprefix(f"{name}-")): path for path in files}
    return {seed: json.loads(found[seed].read_text()) for seed in sorted(found)}


def compared(name: str, records: Mapping[int, Mapping[str, Any]]) -> Comparison:
    """The methods of some seeds of an arm, compared with consensus."""
    results = {s: RunResult.model_validate(one["result"]) for s, one in records.items()}
    arm = ARMS[name]
    return Comparison(load_recipe(arm.recipe, arm.changes(min(records))), results, arm.against)


# --------------------------------------------------------------------------------------- the claims


def _text(mean: Mean) -> str:
    if mean.low is None or mean.high is None:
        return f"{mean.mean:+.2f}"
    return f"{mean.mean:+.2f} [{mean.low:+.2f}, {mean.high:+.2f}]"


def _claim(words: str, what: str, mean: Mean, sign: int) -> dict[str, str]:
    """A row of the table of claims; `sign` is that of the differences that support the claim."""
    low, high = mean.low, mean.high
    verdict = "undecided"
    if low is not None and high is not None and (low > 0 or high < 0):
        verdict = "supported" if (low > 0) == (sign > 0) else "contradicted"
    return {"claim": words, "difference": what, "mean": _text(mean), "verdict": verdict}


def _less(study: Comparison, metric: str, ours: str, theirs: str) -> Mean | None:
    """The mean of one method less another, paired by seed."""
    found = study.compared(metric) if metric in study.values else {}
    own, other = found.get(ours, {}), found.get(theirs, {})
    seeds = [seed for seed in own if seed in other]
    return mean_of([own[s] - other[s] for s in seeds]) if seeds else None


CLAIMS = (
    ("consensus is the best merge", "consensus", ("uniform", "ties", "magmax")),
    ("the conflicting elements are the worst", "consensus", ("conflict",)),
    ("consensus is better than the single best member", "consensus", ("single_best",)),
    ("more members are better", "consensus",
     ("consensus-2-0", "consensus-3-0", "consensus-5-0")),
)  # fmt: skip


def claims(study: Comparison, records: Mapping[int, Mapping[str, Any]]) -> list[dict[str, str]]:
    """The claims of the paper, each with its paired difference, interval and verdict."""
    rows: list[dict[str, str]] = []
    metrics = [name for name in ("avg_gap", MATCHED_GAP) if name in study.values]
    metrics = metrics or [study.recipe.settings.forget_metric]
    for words, ours, others in CLAIMS:
        for metric in metrics:
            for theirs in others:
                if (mean := _less(study, metric, ours, theirs)) is not None:
                    what = f"{ours} − {theirs}, {study.metrics[metric].label}"
                    rows.append(_claim(words, what, mean, -1))
    if (mean := _less(study, "sparsity", "consensus", "consensus-3-0")) is not None:
        rows.append(_claim("zeros rise with n", "12 − 3 members, zero %", mean, 1))
    slopes = [slope(one["zeros_by_depth"]) for one in records.values()]
    what = "zero %, points for each layer further up"
    rows.append(_claim("shallow layers have more zeros", what, mean_of(slopes), -1))
    return rows


def slope(zeros: Mapping[str, float]) -> float:
    """The least-squares slope of zeros over depth."""
    points = sorted((int(depth), value) for depth, value in zeros.items() if depth.isdigit())
    x0, y0 = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((x - x0) * (y - y0) for x, y in points) / sum((x - x0) ** 2 for x, _ in points)


# ----------------------------------------------------------------------------------------- the page


def rules_table(study: Comparison) -> str:
    """The means of every method, and its differences from consensus."""
    rows: list[dict[str, str]] = []
    names = [name for name in study.main if name in study.values]
    titles = ["original", "retrained", *study.methods]
    found = {(one.metric, one.method): one for one in study.differences}
    for title in titles:
        row = {"method": title}
        for name in names:
            mean, metric = study.means(name).get(title), study.metrics[name]
            row[metric.heading] = "" if mean is None else metric.number(mean.mean)
            row[metric.heading] += _mark(found.get((name, title)))
        rows.append(row)
    return markdown_table(rows)


def _mark(one: Difference | None) -> str:
    """+ or − for a method that is better or worse than consensus, after Holm's correction."""
    return {"better": " +", "worse": " −"}.get(one.verdict if one else "", "")


def page() -> str:
    """The record as Markdown."""
    lines = [
        "# The desk study, measured",
        "",
        "`python benchmarks/desk_study.py ARM --seeds …`; one file for each seed in "
        "`benchmarks/results/desk_study`, with the machine and the minutes. + and − mark methods "
        "that are better or worse than consensus by a paired t test at 5 % after Holm's correction "
        "for the methods of a column; metrics of which values near the retrained model are better "
        "are compared by their distance from it. Claims are judged by the 95 % interval of the "
        "paired difference, without a correction.",
    ]
    for name, arm in ARMS.items():
        if not (records := kept(name)):
            continue
        minutes = sum(one["minutes"] for one in records.values())
        seeds = ", ".join(map(str, records))
        lines += ["", f"## {arm.title[0].upper()}{arm.title[1:]}", ""]
        lines += [f"Recipe `{arm.recipe}`, seeds {seeds}, {minutes:.0f} minutes.", ""]
        parts = {
            "choosing": {s: one for s, one in records.items() if s < CONFIRMED},
            "confirming": {s: one for s, one in records.items() if s >= CONFIRMED},
        }
        for part, own in parts.items():
            if own:
                count = "one seed" if len(own) == 1 else f"{len(own)} seeds"
                lines += [f"The {part} seeds ({count}):", "", rules_table(compared(name, own)), ""]
        lines += ["The paper's claims, over all seeds:", ""]
        lines += [markdown_table(claims(compared(name, records), records))]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arms", nargs="*", choices=[[], *ARMS], metavar="ARM")
    parser.add_argument("--seeds", default="0-11")
    parser.add_argument("--runs", type=Path, default=Path("runs/desk_study"))
    given = parser.parse_args()
    for seed in parse_seeds([given.seeds]):
        for name in given.arms:
            if not (FOLDER / f"{name}-{seed}.json").exists():
                print(f"{name}, seed {seed}", flush=True)
                run(name, seed, given.runs)
        remove_pools(seed, given.runs)
    if any(kept(name) for name in ARMS):
        (RESULTS / "desk_study.md").write_text(page())


if __name__ == "__main__":
    main()
