"""MIA-efficacy as SalUn measures it, with a faster solver than that of libsvm.

The attack is an SVM (RBF kernel, gamma 1, C 3) on one number per image, the probability of its true
class. On [0, 1] eighteen features represent this kernel to double precision, so an interior-point
method needs a tenth of a second for 20,000 images, and computes a bound of its error; libsvm needs
ten to twenty seconds (`benchmarks/results/mia.md`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import ValueRangeError

Array = NDArray[np.float64]
Confidence = NDArray[np.floating[Any]]
"""The probability of the true class of each image."""

C = 3.0
GOAL = 1e-5  # the solver stops at this error of the decision values
ACCEPTED = 1e-4  # a tenth of the tolerance of libsvm, 1e-3; at a larger error libsvm is used
ITERATIONS = 200  # usually twenty to thirty are enough
BLOCK = 512  # the number of rows of a QR decomposition that fits into the cache

# With c = x - 1/2: exp(-(x-y)²) = exp(-c²) exp(-d²) Σ (2cd)ᵏ/k!, and |2cd| <= 1/2: the first term
# left out is 0.5¹⁸/18! < 1e-21.
TAYLOR = np.sqrt([2.0**k / math.factorial(k) for k in range(18)])


def mia_efficacy(retain: Confidence, test: Confidence, forget: Confidence) -> float:
    """Return the percentage of the forget set that the attack classifies as never trained on.

    >>> retain, test = np.array([0.99, 0.98, 1.0, 0.97]), np.array([0.3, 0.6, 0.2, 0.5])
    >>> mia_efficacy(retain, test, forget=np.array([0.1, 0.4, 0.95, 0.2]))
    75.0

    Args:
        retain: in the order of the data set; the first len(test) of them, or all if there are
            fewer, are the members.
        test: the non-members.
    """
    members = _checked("retain", retain)[: len(test)]
    attack = fit(members, _checked("test", test))
    return 100.0 * float(np.mean(~attack.predict_member(_checked("forget", forget))))


@dataclass(frozen=True)
class Attack:
    """The fitted SVM: a decision value of at least zero means member.

    >>> attack = fit(np.array([0.9, 1.0]), np.array([0.1, 0.2]))
    >>> attack.predict_member(np.array([0.0, 0.95]))
    array([False,  True])

    Args:
        weights: one for each feature of the kernel.
        intercept: added to weights · features.
        error: the largest distance of a decision value from that of the exact SVM; infinite if
            libsvm solved it.
    """

    weights: Array
    intercept: float
    error: float

    def decision(self, confidence: Confidence) -> Array:
        """Return the signed distance to the boundary in units of the margin.

        >>> fit(np.array([1.0]), np.array([0.0])).decision(np.array([0.0, 0.5, 1.0])).round(3) + 0.0
        array([-1.,  0.,  1.])
        """
        return _features(_checked("confidence", confidence)) @ self.weights + self.intercept

    def predict_member(self, confidence: Confidence) -> NDArray[np.bool_]:
        """Return whether each image is classified as a member; ties are members, as in libsvm.

        >>> fit(np.array([0.5]), np.array([0.5])).predict_member(np.array([0.1]))
        array([ True])
        """
        return self.decision(confidence) >= 0


def fit(members: Confidence, non_members: Confidence) -> Attack:
    """Train the attack on the probabilities of the true class of seen and of unseen images.

    >>> fit(np.array([0.9, 1.0]), np.array([0.1, 0.2])).error < 1e-4
    True
    """
    members, non_members = _checked("members", members), _checked("non_members", non_members)
    # For matrices of eighteen columns, a second thread takes more time than it saves.
    with _threads().limit(limits=1, user_api="blas"):
        attack = _solve(_gather(members, non_members))
    return attack if attack.error <= ACCEPTED else _libsvm(members, non_members)


@cache
def _threads() -> Any:
    from threadpoolctl import ThreadpoolController  # an extra; listing metrics does not need it

    return ThreadpoolController()


def _checked(name: str, confidence: Confidence) -> Array:
    values = np.asarray(confidence, dtype=np.float64)
    if values.ndim != 1:
        raise ValueRangeError(f"{name}: got shape {values.shape}, wanted one number per image")
    if not len(values):
        raise ValueRangeError(f"{name}: no images, wanted at least one")
    wrong = ~((values >= 0) & (values <= 1))
    if wrong.any():
        raise ValueRangeError(
            f"{name}: got {values[wrong][0]} for image {int(wrong.argmax())}, "
            "wanted a probability between 0 and 1"
        )
    return values


def _features(x: Array) -> Array:
    """Return rows whose dot products are the kernel: φ(x)·φ(y) = exp(-(x-y)²)."""
    c = x - 0.5
    return np.exp(-c * c)[:, None] * np.vander(c, len(TAYLOR), increasing=True) * TAYLOR


class _Points(NamedTuple):
    """The distinct values of each class; a point has one multiplier of at most C·copies.

    A value of both classes is two points with the same row of features.
    """

    features: Array  # one row for each distinct value
    row: NDArray[np.intp]  # the row of each point
    sign: Array  # +1 member, -1 non-member
    copies: Array

    def spread(self, per_point: Array) -> Array:
        """Sum the values of the points of each row."""
        sums = np.bincount(self.row, per_point, minlength=len(self.features))
        return sums.astype(np.float64, copy=False)


def _gather(members: Array, non_members: Array) -> _Points:
    classes = [np.unique(x, return_counts=True) for x in (members, non_members)]
    x, row = np.unique(np.concatenate([values for values, _ in classes]), return_inverse=True)
    sign = np.repeat([1.0, -1.0], [len(values) for values, _ in classes])
    copies = np.concatenate([count for _, count in classes]).astype(np.float64)
    return _Points(_features(x), row, sign, copies)


# -------------------------------------------------------------------------- the error of a solution


def _certified(points: _Points, alpha: Array, slack: Array, weights: Array) -> Attack:
    """Return the best intercept for some weights, and a bound of the distance from the optimum.

    alpha, in [0, C·copies], and slack = C·copies - alpha need not be optimal, or balanced.
    """
    decision = (points.features @ weights)[points.row]

    # For given weights the hinge loss is piecewise linear in the intercept. It breaks at
    # sign - decision and is smallest between break P and the next, P the number of members. The
    # intercept is the midpoint, as in libsvm; mostly the two breaks coincide.
    breaks = points.sign - decision
    order = np.argsort(breaks)
    upto = np.cumsum(points.copies[order])
    members = points.copies[points.sign > 0].sum()
    low, high = (order[np.searchsorted(upto, members, side)] for side in ("left", "right"))
    intercept = float(breaks[low] + breaks[high]) / 2

    # The duality gap as a sum of non-negative terms, so that nothing cancels:
    # ½|w - w(α)|² + Σ α·(margin excess) + Σ (C - α)·(margin deficit).
    excess = points.sign * (decision + intercept) - 1
    residual = weights - points.features.T @ points.spread(points.sign * alpha)
    gap = residual @ residual / 2 + np.where(excess >= 0, alpha * excess, -slack * excess).sum()

    # With d = |w - w*|: ½d² <= gap + |b - b*||Σ±α| by strong convexity; |b - b*| <= d as order
    # statistics move no further than their values; |φ| = 1. So a decision is off by 2d at most.
    balance = abs(points.sign @ alpha)
    error = 2 * (balance + math.sqrt(balance**2 + 2 * gap))
    return Attack(weights, intercept, float(error))


# -------------------------------------------------------------------------------------- the solvers


class _State(NamedTuple):
    """The state of the interior-point method."""

    solution: Array  # weights in the principal axes, then the intercept
    alpha: Array  # one for each point, strictly between 0 and C·copies
    slack: Array  # C·copies - alpha, stored separately to keep the digits of both near zero
    at_zero: Array  # the multiplier of alpha >= 0
    at_c: Array  # the multiplier of slack >= 0

    def complementarity(self) -> float:
        return float(self.alpha @ self.at_zero + self.slack @ self.at_c)


def _solve(points: _Points) -> Attack:
    """Iterate until the error bound is small enough or stops falling."""
    box = C * points.copies
    axes, basis = _principal(points.features, points.spread(points.copies))
    columns = np.column_stack([basis, np.ones(len(basis))])

    # Begin with an alpha that is balanced between the classes and away from its bounds, a solution
    # of zeros, and multipliers that fit it: sign·0 - 1 = 1 - 2.
    held = [box[points.sign == s].sum() for s in (1, -1)]
    alpha = box * min(held) / np.where(points.sign > 0, *held) / 2
    zero = np.zeros(columns.shape[1])
    state = _State(zero, alpha, box - alpha, np.ones_like(box), np.full_like(box, 2.0))

    best = Attack(np.zeros(len(TAYLOR)), 0.0, math.inf)
    for _ in range(ITERATIONS):
        if state.complementarity() <= 1e-4:  # before that, the bound is not worth the sort
            attack = _certified(points, state.alpha, state.slack, state.solution[:-1] @ axes)
            if not attack.error <= 10 * best.error:  # rounding errors dominate
                break
            best = min(best, attack, key=lambda a: a.error)
            if best.error <= GOAL:
                break
        try:
            with np.errstate(divide="raise", over="raise", invalid="raise"):
                state = _advanced(points, columns, state)
        except (np.linalg.LinAlgError, FloatingPointError):
            break
    return best


def _advanced(points: _Points, columns: Array, state: _State) -> _State:
    """Do one step of Mehrotra's predictor-corrector method on the dual of the SVM."""
    solution, alpha, slack, at_zero, at_c = state
    row, sign = points.row, points.sign
    ridge = np.append(np.ones(columns.shape[1] - 1), 0.0)  # the intercept is not regularised

    # Newton's equations for ridge·solution = columnsᵀ(sign·alpha) and for the two products that
    # must become zero. All unknowns except the solution are eliminated; the matrix is
    # ridge + columnsᵀ scale columns. The last condition, sign·decision - 1 = at_zero - at_c, holds
    # from the start.
    scale = 1 / (at_zero / alpha + at_c / slack)
    root = np.sqrt(points.spread(scale))[:, None]
    inverse = np.linalg.inv(_triangle(np.vstack([columns * root, np.diag(ridge)])))

    def newton(to_zero: Array, to_c: Array) -> tuple[Array, Array, Array, Array]:
        step = np.zeros_like(solution)
        d_alpha = scale * (to_zero / alpha - to_c / slack)
        for _ in range(2):  # the second round removes the rounding error of the first
            wanted = columns.T @ points.spread(sign * (alpha + d_alpha))
            more = inverse @ (inverse.T @ (wanted - ridge * (solution + step)))
            step = step + more
            d_alpha = d_alpha - scale * sign * (columns @ more)[row]
        return step, d_alpha, (to_zero - at_zero * d_alpha) / alpha, (to_c + at_c * d_alpha) / slack

    def longest(d_alpha: Array, d_zero: Array, d_c: Array) -> float:
        ratios = -d_alpha / alpha, d_alpha / slack, -d_zero / at_zero, -d_c / at_c
        return 1 / max(1.0, *(float(r.max()) for r in ratios))

    def moved(far: float, step: Array, d_alpha: Array, d_zero: Array, d_c: Array) -> _State:
        return _State(
            solution + far * step,
            alpha + far * d_alpha,
            slack - far * d_alpha,
            at_zero + far * d_zero,
            at_c + far * d_c,
        )

    # The predictor steps towards the optimum. The corrector aims at a central point, the nearer to
    # the optimum the better the predictor was, and compensates the curvature of the predictor.
    step, d_alpha, d_zero, d_c = newton(-alpha * at_zero, -slack * at_c)
    before = state.complementarity()
    after = moved(longest(d_alpha, d_zero, d_c), step, d_alpha, d_zero, d_c).complementarity()
    centre = (after / before) ** 3 * before / (2 * len(alpha))
    step, d_alpha, d_zero, d_c = newton(
        centre - alpha * at_zero - d_alpha * d_zero, centre - slack * at_c + d_alpha * d_c
    )
    return moved(0.995 * longest(d_alpha, d_zero, d_c), step, d_alpha, d_zero, d_c)


def _principal(features: Array, copies: Array) -> tuple[Array, Array]:
    """Return the principal axes of the weighted rows, and the rows in these axes.

    Axes below rounding are omitted. The powers of x are nearly linearly dependent on any data;
    their combinations in these axes are not.
    """
    root = np.sqrt(copies)[:, None]
    q, triangle = np.linalg.qr(features * root)
    u, size, axes = np.linalg.svd(triangle, full_matrices=False)
    kept = size > 1e-8
    return axes[kept], q @ (u * size)[:, kept] / root


def _triangle(rows: Array) -> Array:
    """Return R of the QR decomposition of rows, block by block; RᵀR would lose half the digits."""
    width = rows.shape[1]
    blocks = len(rows) // BLOCK
    cut = blocks * BLOCK
    tops = cast(Array, np.linalg.qr(rows[:cut].reshape(blocks, BLOCK, width), mode="r"))
    rest = np.concatenate([tops.reshape(-1, width), rows[cut:]])
    return cast(Array, np.linalg.qr(rest, mode="r"))


def _libsvm(members: Array, non_members: Array) -> Attack:
    """Fit with libsvm, for data on which the error bound is too large."""
    from sklearn.svm import SVC

    x = np.concatenate([members, non_members])[:, None]
    label = np.repeat([1, 0], [len(members), len(non_members)])
    svc = SVC(C=C, kernel="rbf", gamma="auto", cache_size=2000).fit(x, label)
    weights = _features(svc.support_vectors_[:, 0]).T @ np.ravel(svc.dual_coef_)
    return Attack(weights, float(svc.intercept_[0]), math.inf)
