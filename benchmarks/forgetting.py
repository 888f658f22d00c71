"""Which methods only look good: the tests of forgetting on desk recipes, over a few seeds.

    NEGMERGE_DATA=FOLDER python benchmarks/forgetting.py [STUDY …] [--seeds 0-2] [--runs FOLDER]

Each study (`STUDIES`; all if none is named) is `negmerge study` with `evidence: standard`. Its part
of the record is benchmarks/results/forgetting/STUDY.json, and studies that were recorded before
stay in it. An interrupted command resumes when it is repeated. Writes
benchmarks/results/forgetting.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from machine import describe

import negmerge as nm
from negmerge.studies.evidence import Found, evidence_table, found_in, only_look_good, sentences
from negmerge.studies.tables import differences_table, means_table
from negmerge.support.seeds import parse_seeds

RESULTS = Path(__file__).parent / "results"
PARTS = RESULTS / "forgetting"
EVIDENCE = "evidence=standard"
STUDIES: dict[str, tuple[str, str, list[str]]] = {
    "demo": ("Records: the demo", "demo", [EVIDENCE]),
    "class": (
        "A class: CIFAR-10 on a desk",
        "desk_cifar10_class",
        [
            EVIDENCE,
            "search.criterion=keep_retain",
            "methods=[consensus, uniform, ties, single_best, "
            "{name: random_label, options: {epochs: 5}}, {name: salun, options: {epochs: 5}}, "
            "{name: finetune, options: {epochs: 5}}, gradient_ascent, boundary_shrink]",
        ],
    ),
    "clip": (
        "A data set: a CLIP on a desk, without a retrained model",
        "desk_clip_fashion",
        [
            EVIDENCE,
            "search.samples=1000",
            "methods=[consensus, uniform, ties, magmax, conflict, single_best]",
        ],
    ),
}


def alone(results: dict[int, Any]) -> str:
    """What tests found where there is no retrained model: the mean over seeds of each model."""
    values: dict[tuple[str, str], dict[str, list[float]]] = {}
    for result in results.values():
        for test in (result.evidence.tests if result.evidence else {}).values():
            first = test.quantities[0]
            for model, found in test.models.items():
                if (one := found.get(first.name)) is not None and one.value is not None:
                    key = (test.title, first.short)
                    values.setdefault(key, {}).setdefault(model, []).append(one.value)
    lines = [
        f"- “{title}”, {short}: "
        + ", ".join(f"{model} {sum(own) / len(own):.3g}" for model, own in found.items())
        for (title, short), found in values.items()
    ]
    return "\n".join(lines)


def part(name: str, seeds: list[int], folder: Path) -> tuple[str, list[Found]]:
    """One study: its means, its differences, and what the tests of forgetting say."""
    title, recipe, changes = STUDIES[name]
    study = nm.study(recipe, seeds, folder / name, changes)
    rows, given = found_in(study), " ".join(f"--set '{change}'" for change in changes)
    spent = [result.evidence.seconds for result in study.results.values() if result.evidence]
    lines = [
        f"## {title}",
        "",
        f"`negmerge study {recipe} --seeds {seeds[0]}-{seeds[-1]} {given}`; the tests took "
        f"{sum(spent) / len(spent) / 60:.0f} minutes of processor time a seed.",
        "",
        means_table(study).markdown(),
        "",
        f"Less {study.against}, paired by seed:",
        "",
        differences_table(study).markdown(),
        "",
    ]
    if rows:
        lines += ["Tests of forgetting, less the retrained model of the same seed:", ""]
        lines += [evidence_table(study, rows).markdown(), ""]
        lines += [f"- {text}" for text in sentences(rows)]
        looks = only_look_good(study, rows)
        lines += ["", f"Only look good ({len(looks)} of {len(study.methods)} methods):", ""]
        lines += [f"- {text}" for text in looks] or ["- none"]
    else:
        lines += ["There is no retrained model to compare with. Means over the seeds:", ""]
        lines += [alone(study.results)]
    return "\n".join(lines), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", choices=[[], *STUDIES], metavar="STUDY")
    parser.add_argument("--seeds", default="0-2")
    parser.add_argument("--runs", type=Path, default=Path("runs/forgetting"))
    given = parser.parse_args()
    PARTS.mkdir(exist_ok=True)
    for name in given.studies or STUDIES:
        text, rows = part(name, parse_seeds([given.seeds]), given.runs)
        record = {"machine": describe(), "text": text, "rows": [row.tree() for row in rows]}
        (PARTS / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    kept = [PARTS / f"{name}.json" for name in STUDIES]
    parts = [json.loads(path.read_text()) for path in kept if path.exists()]
    head = (
        "# Which methods only look good\n\n`python benchmarks/forgetting.py`, with other work on "
        f"the machine ({parts[0]['machine']}). * marks a model that a test tells apart from the "
        "retrained one (t test at 5 % after Holm's correction for the models); three seeds find "
        "only large differences."
    )
    texts = [head, *(one["text"] for one in parts)]
    (RESULTS / "forgetting.md").write_text("\n\n".join(texts) + "\n")


if __name__ == "__main__":
    main()
