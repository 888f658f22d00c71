"""The membership attack compared with scikit-learn's SVC: seconds, and decisions that differ.

    python benchmarks/mia.py

Both run on one thread and are timed from the confidences to the decisions on 5,000 forget images.
The results are written to benchmarks/results/mia.json and mia.md.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
from machine import describe, markdown_table
from numpy.typing import NDArray
from sklearn.exceptions import ConvergenceWarning
from sklearn.svm import SVC
from threadpoolctl import threadpool_limits

from negmerge.evaluation.attacks import svm

RESULTS = Path(__file__).parent / "results"
FORGET = 5_000
PATIENCE = 1_000_000  # iterations of libsvm at tolerance 1e-6; it needs about one per point at 1e-3

Confidence = NDArray[np.float32]


# ------------------------------------------------------------------------------------ confidences


def mixture(rng: np.random.Generator, size: int, sharp: float, hard: float, exact: float):
    """Mostly near 1, a share `hard` anywhere, a share `exact` rounded to 1."""
    x = np.where(rng.random(size) < hard, rng.beta(0.6, 1.5, size), rng.beta(sharp, 0.4, size))
    return np.where(rng.random(size) < exact, 1.0, x).astype(np.float32)


def overfit(rng: np.random.Generator, n: int) -> tuple[Confidence, Confidence, Confidence]:
    """Members almost all at 1; a fifth of the rest is hard."""
    forget = mixture(rng, FORGET, 8, 0.4, 0.05)
    return mixture(rng, n, 60, 0.0, 0.3), mixture(rng, n, 8, 0.2, 0.1), forget


def mild(rng: np.random.Generator, n: int) -> tuple[Confidence, Confidence, Confidence]:
    """Members a little surer than the rest, much overlap."""
    forget = mixture(rng, FORGET, 6, 0.3, 0.0)
    return mixture(rng, n, 8, 0.05, 0.0), mixture(rng, n, 8, 0.12, 0.0), forget


def alike(rng: np.random.Generator, n: int) -> tuple[Confidence, Confidence, Confidence]:
    """Nothing to learn: one distribution for both."""
    forget = mixture(rng, FORGET, 4, 0.1, 0.0)
    return mixture(rng, n, 4, 0.1, 0.0), mixture(rng, n, 4, 0.1, 0.0), forget


def collapsed(rng: np.random.Generator, n: int) -> tuple[Confidence, Confidence, Confidence]:
    """A model that answers one class, so surely that the rest is 0; a tenth fewer non-members."""
    members, rest, forget = (rng.random(s) < 0.1 for s in (n, n * 9 // 10, FORGET))
    return members.astype(np.float32), rest.astype(np.float32), forget.astype(np.float32)


RUNS = {
    2_000: (overfit, mild, alike, collapsed),
    10_000: (overfit, mild, alike, collapsed),
    20_000: (overfit, mild, alike),  # SVC takes a minute for each
}


# ------------------------------------------------------------------------------------ measurements


def measure(make: Callable[..., tuple[Confidence, ...]], points: int) -> dict[str, Any]:
    members, rest, forget = make(np.random.default_rng(points), points // 2)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        attack = svm.fit(members, rest)
        ours = attack.predict_member(forget)
        seconds.append(time.perf_counter() - begin)
    row: dict[str, Any] = {
        "confidences": make.__name__,
        "points": len(members) + len(rest),
        "seconds": statistics.median(seconds),
        "error_bound": attack.error,
        "score": 100 * float(np.mean(~ours)),
    }
    decision = attack.decision(forget)
    for name, tol, cache, limit in [
        ("svc", 1e-3, 200, -1),
        ("svc_cache_2000", 1e-3, 2000, -1),
        ("svc_tol_1e-6", 1e-6, 2000, PATIENCE),
    ]:
        spent, svc, theirs = with_svc(members, rest, forget, tol=tol, cache_size=cache, limit=limit)
        value = svc.decision_function(forget.astype(np.float64)[:, None])
        differ = ours != theirs
        row[name] = {
            "seconds": spent,
            "ratio": spent / row["seconds"],
            "iterations": int(svc.n_iter_[0]),
            "converged": not svc.fit_status_,
            "decisions_that_differ": int(differ.sum()),
            "largest_decision_value_where_they_differ": float(
                np.abs(decision[differ]).max(initial=0.0)
            ),
            "largest_difference_of_decision_values": float(np.abs(decision - value).max()),
            "score_minus_ours": 100 * float(np.mean(~theirs)) - row["score"],
        }
    return row


def with_svc(
    members: Confidence,
    rest: Confidence,
    forget: Confidence,
    tol: float,
    cache_size: int,
    limit: int,
) -> tuple[float, SVC, NDArray[np.bool_]]:
    x = np.concatenate([members, rest]).astype(np.float64)[:, None]
    label = np.repeat([1, 0], [len(members), len(rest)])
    svc = SVC(C=3, kernel="rbf", gamma="auto", tol=tol, cache_size=cache_size, max_iter=limit)
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # recorded as not converged
        svc.fit(x, label)
    predicted = svc.predict(forget.astype(np.float64)[:, None]) == 1
    return time.perf_counter() - begin, svc, predicted


# ------------------------------------------------------------------------------------------ report


TOLERANCES = {"1e-3": "svc", "1e-6": "svc_tol_1e-6"}


def as_markdown(found: dict[str, Any]) -> str:
    lines = [
        "# The membership attack, measured",
        "",
        f"`{found['command']}` on {found['machine']} (one core used), scikit-learn "
        f"{sklearn.__version__}, NumPy {np.__version__}, {found['minutes']:.1f} minutes. "
        "Confidences are synthetic. Seconds from them to "
        f"{FORGET:,} decisions: ours the median of five, SVC's once.",
        "",
        markdown_table([speed_row(row) for row in found["rows"]]),
        "",
        "The error bound is on our decision values. The next table has the decisions that differ "
        f"among {FORGET:,}, our largest |decision value| among those, the largest difference of "
        "decision values, and SVC's score less ours in percentage points. Times faster is to the "
        "quicker of the two SVCs.",
        "",
        markdown_table([difference_row(row, tol) for row in found["rows"] for tol in TOLERANCES]),
    ]
    return "\n".join(lines) + "\n"


def speed_row(row: dict[str, Any]) -> dict[str, str]:
    times = [row[name]["seconds"] for name in ("svc", "svc_cache_2000")]
    return {
        "confidences": row["confidences"],
        "points": f"{row['points']:,}",
        "ours, s": f"{row['seconds']:.3f}",
        "SVC, s": f"{times[0]:.2f}",
        "SVC, cache 2 GB, s": f"{times[1]:.2f}",
        "times faster": f"{min(times) / row['seconds']:.0f}",
        "error bound": f"{row['error_bound']:.0e}",
    }


def difference_row(row: dict[str, Any], tolerance: str) -> dict[str, str]:
    svc = row[TOLERANCES[tolerance]]
    stopped = "" if svc["converged"] else f", stopped after {svc['iterations']:,} iterations"
    return {
        "confidences": row["confidences"],
        "points": f"{row['points']:,}",
        "SVC's tolerance": tolerance + stopped,
        "differ": str(svc["decisions_that_differ"]),
        "at most at": f"{svc['largest_decision_value_where_they_differ']:.1e}",
        "difference": f"{svc['largest_difference_of_decision_values']:.1e}",
        "score": f"{svc['score_minus_ours']:+.2f}",
    }


def main() -> None:
    begun = time.perf_counter()
    rows = []
    with threadpool_limits(1):
        for points, makers in RUNS.items():
            for make in makers:
                rows.append(measure(make, points))
                print(json.dumps(rows[-1]), flush=True)
    found = {
        "command": "python benchmarks/mia.py",
        "machine": describe(),
        "minutes": (time.perf_counter() - begun) / 60,
        "rows": rows,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "mia.json").write_text(json.dumps(found, indent=2) + "\n")
    (RESULTS / "mia.md").write_text(as_markdown(found))
    print(f"written to {RESULTS}")


if __name__ == "__main__":
    main()
