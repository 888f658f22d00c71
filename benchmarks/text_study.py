"""Do language models forget records by NegMerge? Five models, three forget sets each.

    python benchmarks/text_study.py [--seeds 0 1 2 3 4] [--ablations 0 1 2] [--runs FOLDER]
                                    [--resume]

Each run is the recipe `demo_text` with other persons (`seed`) and one of three disjoint groups of
six persons to forget, with the rules that the paper compares and with rivals, whose learning rates
were chosen by hand on another run. `--ablations` adds other ways to train members, for some seeds
on the first forget set. The paper's claims are compared one by one. An interrupted command resumes
when it is repeated in the same folder; `--resume` also keeps the runs that the record has. Writes
benchmarks/results/text_study.json and .md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from machine import describe, markdown_table
from scipy.stats import linregress, t

from negmerge.runs.context import Context
from negmerge.runs.executors.choose import make_executor
from negmerge.runs.pipeline import open_recipe, unlearn
from negmerge.runs.result import RunResult
from negmerge.support.progress import make_progress
from negmerge.text.library import PERSONS
from negmerge.text.persons import invented_persons
from negmerge.vectors.task_vector import TaskVector

RESULTS = Path(__file__).parent / "results"
FORGET, UNSEEN = 6, 6
SETS = 3
METHODS = """[consensus, uniform, ties, magmax, conflict, single_best,
 {name: consensus, subset: {count: 2}}, {name: consensus, subset: {count: 4}},
 {name: gradient_difference, options: {lr: 2.0e-5}}, {name: kl_ascent, options: {lr: 2.0e-5}},
 {name: npo, options: {lr: 2.0e-5}}, {name: gradient_ascent, options: {lr: 1.0e-5}},
 {name: state_arithmetic, options: {lr: 5.0e-5, epochs: 1}},
 {name: finetune, options: {lr: 1.0e-4, epochs: 1}}]"""
SHORT = "[consensus, uniform]"
ABLATIONS = {
    "all rows of the embeddings": ["embeddings=all"],
    "no rows of the embeddings": ["embeddings=none"],
    "LoRA, one A": ["lora={rank: 8}", "pool.grid.lr=[2.5e-4, 5.0e-4, 1.0e-3]"],
    "LoRA, different A": [
        "lora={rank: 8, share: false}",
        "pool.grid.lr=[2.5e-4, 5.0e-4, 1.0e-3]",
    ],
    "learning rates within 1.2 times": ["pool.grid.lr=[2.25e-5, 2.5e-5, 2.75e-5]"],
    "learning rates within 16 times": ["pool.grid.lr=[6.25e-6, 2.5e-5, 1.0e-4]"],
}
MEASURED = {
    "exact_forget": "forget exact %",
    "exact_retain": "retain exact %",
    "probability_forget": "forget probability %",
    "auc_loss": "AUC %",
    "avg_gap": "Avg. Gap",
    "matched_gap": "gap at equal forgetting",
    "forget_quality": "forget quality",
    "rouge_forget": "forget ROUGE %",
    "perplexity_general": "general perplexity",
    "scale": "λ",
    "sparsity_body": "zeros of the body, %",
    "agreement": "agreement %",
}


def persons(seed: int) -> list[str]:
    """The names of the persons of a seed, in their order."""
    return [*dict.fromkeys(record["person"] for record in invented_persons(PERSONS, seed))]


def splits(seed: int, group: int) -> list[str]:
    """The changes of the recipe for a seed and a forget set."""
    names = persons(seed)
    forget, unseen = names[FORGET * group : FORGET * (group + 1)], names[-UNSEEN:]
    return [
        f"seed={seed}",
        f"split.forget={json.dumps({'column': 'person', 'values': forget})}",
        f"split.holdout={json.dumps({'column': 'person', 'values': unseen})}",
    ]


def run(
    folder: Path, name: str, changes: Sequence[str], reuse: Sequence[Path] = ()
) -> dict[str, Any]:
    """Run once without what only a page shows; return the result, the minutes, and the zeros."""
    kept = folder / f"{name}.json"
    if not kept.exists():
        begun = time.monotonic()
        recipe, store = open_recipe("demo_text", folder / name, changes, reuse)
        with ExitStack() as stack:
            progress = stack.enter_context(make_progress())
            scenario = recipe.make_scenario(progress)
            scenario.check()
            stack.enter_context(store.locked())
            executor = stack.enter_context(make_executor(recipe, scenario, store, progress))
            unlearn(Context(recipe, scenario, store, executor, progress, illustrated=False))
        zeros = TaskVector.load(store.patch("consensus")).sparsity(by="depth")
        found = {
            "minutes": (time.monotonic() - begun) / 60,
            "zeros_by_depth": {depth: 100 * own.element_weighted for depth, own in zeros.items()},
            "result": store.result.tree(),
        }
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def rows_of(result: RunResult) -> dict[str, dict[str, Any]]:
    """The numbers of a run, by method."""
    rows = {"original": result.original, "retrained": result.retrain}
    rows |= {row.method: row for row in result.methods}
    trees = {name: row.model_dump(mode="json") for name, row in rows.items() if row is not None}
    for tree in trees.values():
        tree["sparsity_body"] = tree.get("sparsity_parts", {}).get("body")
        tree["matched_gap"] = tree.get("matched", {}).get("matched_gap")
    return {name: {k: tree.get(k) for k in MEASURED} for name, tree in trees.items()}


def by_seed(runs: Mapping[str, dict[str, Any]], method: str, metric: str) -> list[float]:
    """The mean over the forget sets of each seed, where all of them have a value."""
    found: dict[int, list[float]] = {}
    for own in runs.values():
        value = own["rows"].get(method, {}).get(metric)
        if value is not None:
            found.setdefault(own["seed"], []).append(value)
    return [statistics.mean(values) for _, values in sorted(found.items())]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its 95 % t-interval."""
    mean = statistics.mean(values)
    if len(values) < 2:
        return mean, mean, mean
    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / len(values) ** 0.5
    return mean, mean - half, mean + half


def difference(runs: Mapping[str, dict[str, Any]], other: str, metric: str) -> str:
    """The mean of consensus minus another method, paired by seed, with its interval."""
    ours, theirs = by_seed(runs, "consensus", metric), by_seed(runs, other, metric)
    mean, low, high = interval([a - b for a, b in zip(ours, theirs, strict=True)])
    mark = "" if low <= 0 <= high else " *"
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]{mark}"


def table(runs: Mapping[str, dict[str, Any]]) -> str:
    """The means over seeds of every method."""
    methods = next(iter(runs.values()))["rows"]
    lines: list[dict[str, str]] = []
    for method in methods:
        line = {"method": method}
        for metric, heading in MEASURED.items():
            values = by_seed(runs, method, metric)
            line[heading] = f"{statistics.mean(values):.3g}" if values else ""
        lines.append(line)
    return markdown_table(lines)


FORGOTTEN = ("exact_forget", "probability_forget", "auc_loss")
CLAIMS = (
    ("consensus forgets most of all merge rules",
     ("uniform", "ties", "magmax"), (*FORGOTTEN, "matched_gap")),
    ("the conflicting elements forget least",
     ("conflict",), (*FORGOTTEN, "matched_gap")),
    ("consensus forgets more than the single best member",
     ("single_best",), (*FORGOTTEN, "matched_gap")),
    ("more members are better",
     ("consensus-2-0", "consensus-4-0"), (*FORGOTTEN, "matched_gap")),
    ("consensus is nearest to the retrained model",
     ("uniform", "ties", "magmax", "single_best", "gradient_difference", "kl_ascent", "npo",
      "gradient_ascent", "state_arithmetic", "finetune"), ("avg_gap",)),
)  # fmt: skip
"""What the paper claims: the words, the other methods, and the metrics, of which less is better."""


def verdict(low: float, high: float) -> str:
    """What an interval of consensus minus another method says, where less is better.

    >>> verdict(-2.0, -1.0), verdict(-1.0, 1.0), verdict(1.0, 2.0)
    ('supported', 'undecided', 'contradicted')
    """
    return "supported" if high < 0 else "contradicted" if low > 0 else "undecided"


def claims(runs: Mapping[str, dict[str, Any]]) -> str:
    """The claims of the paper, each with its paired difference, interval and verdict."""
    lines: list[dict[str, str]] = []
    for words, others, metrics in CLAIMS:
        for other in others:
            for metric in metrics:
                ours, theirs = by_seed(runs, "consensus", metric), by_seed(runs, other, metric)
                mean, low, high = interval([a - b for a, b in zip(ours, theirs, strict=True)])
                line = {"claim": words, "consensus minus": other, "metric": MEASURED[metric]}
                line["difference"] = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
                lines.append(line | {"verdict": verdict(low, high)})
    more = interval([
        a - b
        for a, b in zip(
            by_seed(runs, "consensus-2-0", "sparsity_body"),
            by_seed(runs, "consensus", "sparsity_body"),
            strict=True,
        )
    ])  # fmt: skip
    line = {"claim": "more members make the consensus sparser", "consensus minus": "consensus-2-0"}
    line |= {"metric": MEASURED["sparsity_body"]}
    line["difference"] = f"{-more[0]:+.2f} [{-more[2]:+.2f}, {-more[1]:+.2f}]"
    lines.append(line | {"verdict": verdict(more[1], more[2])})
    slopes: dict[int, list[float]] = {}
    for own in runs.values():
        depths = sorted((int(k), v) for k, v in own["zeros_by_depth"].items() if k.isdigit())
        slope = linregress([k for k, _ in depths], [v for _, v in depths]).slope
        slopes.setdefault(own["seed"], []).append(float(slope))
    mean, low, high = interval([statistics.mean(own) for _, own in sorted(slopes.items())])
    line = {"claim": "shallow layers are sparser", "consensus minus": ""}
    line |= {"metric": "zeros, points for each layer further up"}
    line["difference"] = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"
    lines.append(line | {"verdict": verdict(low, high)})
    return markdown_table(lines)


def ablation_table(runs: Mapping[str, Any], ablations: Mapping[str, Any]) -> str:
    """Means over the seeds of other ways to train members."""
    first = {name: own for name, own in runs.items() if own["group"] == 0}
    lines: list[dict[str, str]] = []
    for name, own in {"as in the recipe": first, **ablations}.items():
        for method in ("consensus", "uniform"):
            line = {"members": name, "method": method, "seeds": str(len(own))}
            for metric, heading in MEASURED.items():
                values = by_seed(own, method, metric)
                line[heading] = f"{statistics.mean(values):.3g}" if values else ""
            line["warnings"] = str(sum(bool(one["warnings"]) for one in own.values()))
            lines.append(line)
    return markdown_table(lines)


def ablation_differences(runs: Mapping[str, Any], ablations: Mapping[str, Any]) -> str:
    """Consensus of other members minus consensus of the recipe, paired by seed."""
    lines: list[dict[str, str]] = []
    for name, own in ablations.items():
        seeds = {one["seed"] for one in own.values()}
        same = {k: one for k, one in runs.items() if one["group"] == 0 and one["seed"] in seeds}
        line = {"members": name}
        for metric in (*FORGOTTEN, "avg_gap", "matched_gap"):
            pairs = zip(
                by_seed(own, "consensus", metric), by_seed(same, "consensus", metric), strict=True
            )
            mean, low, high = interval([a - b for a, b in pairs])
            mark = "" if low <= 0 <= high else " *"
            line[MEASURED[metric]] = f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]{mark}"
        lines.append(line)
    return markdown_table(lines)


def write(found: dict[str, Any]) -> None:
    runs, ablations = found["runs"], found["ablations"]
    seeds = sorted({own["seed"] for own in runs.values()})
    others = [m for m in next(iter(runs.values()))["rows"] if m not in ("original", "consensus")]
    metrics = ("exact_forget", "exact_retain", "probability_forget", "auc_loss", "avg_gap")
    compared = markdown_table(
        [
            {"consensus minus": other}
            | {MEASURED[metric]: difference(runs, other, metric) for metric in metrics}
            for other in others
        ]
    )
    minutes = sum(one["minutes"] for own in (runs, *ablations.values()) for one in own.values())
    parts = [
        f"""# Forgetting records of a language model, measured

`python benchmarks/text_study.py --ablations 0 1 2` on {found["machine"]}; the runs took
{minutes:.0f} minutes, with other work on the machine. The recipe `demo_text`: {len(runs)} runs,
{len(seeds)} seeds (other persons) × {SETS} disjoint forget sets of six of thirty persons, 18
reported records each; every run trains an original of its own. λ is chosen on other records: the
least probability of the answers to forget that keeps 95 % of the exact answers of the retain set.
The gap at equal forgetting is the mean distance of the other metrics from the retrained model where
the forget probability is that of the retrained model, on the samples that choose λ. Rivals have no
λ; their learning rates were chosen by hand on another run: they may keep more or less than 95 %.
`consensus-2-0` and `consensus-4-0` merge two and four of the six members. Means over seeds:

{table(runs)}

Differences are paired: the mean over the forget sets of a seed is one value, the interval is the
95 % t-interval over {len(seeds)} seeds, * marks intervals without 0; none is corrected for the
number of comparisons. Less is better except for the retain set.

{compared}

## The paper's claims, for a language model

Difference: consensus minus the other method; the verdict is that of the interval.

{claims(runs)}
"""
    ]
    if ablations:
        parts.append(
            f"""## Other ways to train the members

On the first forget set of each seed; the originals are the same. The last column is the number of
runs with a warning about members.

{ablation_table(runs, ablations)}

Consensus of these members minus consensus of the members of the recipe, paired by seed:

{ablation_differences(runs, ablations)}
"""
        )
    (RESULTS / "text_study.md").write_text("\n".join(parts))
    (RESULTS / "text_study.json").write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, default=Path("runs/text_study"))
    parser.add_argument("--ablations", type=int, nargs="*", default=[], help="their seeds")
    parser.add_argument("--resume", action="store_true", help="keep the runs of the record")
    given = parser.parse_args()
    given.runs.mkdir(parents=True, exist_ok=True)
    recorded: dict[str, Any] = {"runs": {}, "ablations": {}}
    if given.resume:
        recorded = json.loads((RESULTS / "text_study.json").read_text())
    runs: dict[str, Any] = recorded["runs"]
    ablations: dict[str, Any] = recorded["ablations"]

    def taken(found: dict[str, Any], seed: int, group: int) -> dict[str, Any]:
        result = RunResult.model_validate(found["result"])
        return {
            "seed": seed,
            "group": group,
            "minutes": found["minutes"],
            "rows": rows_of(result),
            "zeros_by_depth": found["zeros_by_depth"],
            "warnings": relevant(result),
        }

    for group in range(SETS):
        for seed in given.seeds:
            if (name := f"{seed}-{group}") not in runs:
                changes = [*splits(seed, group), f"methods={METHODS}"]
                runs[name] = taken(run(given.runs, name, changes), seed, group)
        write({"machine": describe(), "runs": runs, "ablations": ablations})
    for label, changed in ABLATIONS.items() if given.ablations else ():
        for seed in given.ablations:
            changes = [*splits(seed, 0), f"methods={SHORT}", *changed]
            name = f"{seed}-0-{label.replace(' ', '_').replace(',', '')}"
            if name not in (own := ablations.setdefault(label, {})):
                found = run(given.runs, name, changes, [given.runs / f"{seed}-0"])
                own[name] = taken(found, seed, 0)
        write({"machine": describe(), "runs": runs, "ablations": ablations})


def relevant(result: RunResult) -> list[str]:
    """The warnings that checks of members gave."""
    words = ("its loss on the forget set", "the signs of two members")
    return [text for text in result.warnings if any(word in text for word in words)]


if __name__ == "__main__":
    main()
