"""The attacks with reference models compared with the code that their authors published.

    python benchmarks/attacks.py --sources FOLDER

FOLDER has these files, as their repositories have them; those that are missing are skipped:

    rmia.py                         privacytrustlab/ml_privacy_meter, modules/mia/attacks
    test_klom_implementations.py    RoyRin/data-unlearning-bench
    metric.py                       google-deepmind/unlearning_evaluation

None of them can be installed: the releases of privacy-meter (1.0.1) and LeakPro (0.0.1) on PyPI are
older than RMIA, or empty. The numbers are synthetic. The results are written to
benchmarks/results/attacks.json and attacks.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from machine import describe, markdown_table

from negmerge.evaluation.attacks.klom import histogram_divergences
from negmerge.evaluation.attacks.margins import margin
from negmerge.evaluation.attacks.rmia import rmia_scores
from negmerge.evaluation.attacks.unlearning_score import epsilons, forget_score

RESULTS = Path(__file__).parent / "results"


def load(path: Path) -> ModuleType | None:
    """Run a source file as a module, without its asserts: one of them fails for any array."""
    if not path.is_file():
        print(f"{path}: not there, skipped")
        return None
    module = ModuleType(path.stem)
    exec(compile(path.read_text(), str(path), "exec", optimize=1), vars(module))  # noqa: S102
    return module


def difference(ours: Any, theirs: Any) -> dict[str, float]:
    gap = np.abs(np.asarray(ours) - np.asarray(theirs))
    return {"numbers": gap.size, "median": float(np.median(gap)), "largest": float(gap.max())}


def compare_rmia(theirs: ModuleType) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    rows = []
    for models in (1, 2, 4):
        target, z_target = rng.beta(4, 1, 2000), rng.beta(4, 1, 3000)
        x, z = rng.beta(4, 1, (models, 2000)), rng.beta(4, 1, (models, 3000))
        for a in (0.0, 0.3, 1.0):
            ours = rmia_scores(target, x, z_target, z, a)
            never = np.zeros((2000, models), bool)
            found = theirs.run_rmia(target, x.T, never, z_target, z.T, a, models)
            about = f"RMIA, reference models: {models}, a = {a:g}"
            row = {"number": about, "peer": "ml_privacy_meter"}
            rows.append(row | difference(ours, found))
    return rows


def compare_klom(theirs: ModuleType) -> list[dict[str, Any]]:
    rng = np.random.default_rng(1)
    rows = []
    for name, shift, width in (("alike", 0.0, 1.0), ("apart", 3.0, 1.0), ("clipped", 80.0, 30.0)):
        q = rng.normal(0, 5, 500) + rng.normal(0, width, (100, 500))
        p = q.mean(0) + shift + rng.normal(0, width, (100, 500))
        original = theirs.compute_binned_KL_div_original
        found = [original(*pair) for pair in zip(p.T, q.T, strict=True)]
        row = {"number": f"KLoM, margins {name}", "peer": "data-unlearning-bench"}
        rows.append(row | difference(histogram_divergences(p, q), found))
    return rows


def compare_score(theirs: ModuleType) -> list[dict[str, Any]]:
    torch.Tensor.cuda = lambda self: self  # their code moves every tensor to a GPU
    rng = np.random.default_rng(2)
    rows = []
    logits, labels = rng.normal(0, 4, (1000, 10)), rng.integers(0, 10, 1000)
    found = theirs.compute_logit_scaled_confidence(logits.copy(), labels)[1]
    row = {"number": "margin", "peer": "unlearning_evaluation"}
    rows.append(row | difference(margin(logits, labels), found))
    for name, shift, width in (("alike", 0.0, 1.0), ("near", 1.0, 1.0), ("narrower", 0.0, 0.3)):
        r = rng.normal(3, 1, 6) + rng.normal(0, 1.5, (64, 6))
        u = r.mean(0) + shift + rng.normal(0, 1.5 * width, (64, 6))
        ours = epsilons(u, r)
        find = theirs._get_epsilons
        higher = np.median(r, 0) > np.median(u, 0)
        sides = np.where(higher, r, u), np.where(higher, u, r)
        with np.errstate(all="ignore"):
            found = find(*sides, theirs.DELTA)
            theirs._get_epsilons = lambda *_, delta, found=found: found  # once is enough
            score = theirs.compute_forget_score_from_confs(u, r)
        theirs._get_epsilons = find
        row = {"number": f"ε, margins {name}", "peer": "unlearning_evaluation"}
        rows.append(row | difference(ours, found))
        row = {"number": f"F, margins {name}", "peer": "unlearning_evaluation"}
        rows.append(row | difference([forget_score(ours, 64)], [score]))
    return rows


COMPARISONS = {
    "rmia.py": compare_rmia,
    "test_klom_implementations.py": compare_klom,
    "metric.py": compare_score,
}


def as_markdown(found: dict[str, Any]) -> str:
    rows = [
        {
            "number": row["number"],
            "published code": row["peer"],
            "compared": str(row["numbers"]),
            "median difference": f"{row['median']:.1e}",
            "largest difference": f"{row['largest']:.1e}",
        }
        for row in found["rows"]
    ]
    return "\n".join([
        "# Attacks with reference models, beside the published code",
        "",
        f"`{found['command']}` on {found['machine']}. The numbers are synthetic. KLoM is in nats. "
        "The published score of 2023 takes thresholds from a grid of a hundredth and computes in "
        "float32 in part; ours are all thresholds that divide the margins differently, so that our "
        "ε may be larger, but not smaller except by rounding.",
        "",
        markdown_table(rows),
        "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sources", type=Path, required=True)
    sources = parser.parse_args().sources
    rows: list[dict[str, Any]] = []
    for name, compare in COMPARISONS.items():
        if (module := load(sources / name)) is not None:
            rows += compare(module)
    found = {
        "command": "python benchmarks/attacks.py --sources FOLDER",
        "machine": describe(),
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "attacks.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "attacks.md").write_text(as_markdown(found))
    print(as_markdown(found))


if __name__ == "__main__":
    main()
