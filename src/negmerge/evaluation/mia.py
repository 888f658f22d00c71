"""MIA-efficacy as SalUn measures it, by an exact solver instead of libsvm's.

The attack is an SVM (RBF kernel, gamma 1, C 3) on one number per image, the probability of its true
class. On [0, 1] that kernel has eighteen features to double precision, so an interior-point method
needs a tenth of a second for 20,000 images, where libsvm needs ten to twenty, and bounds its error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

from negmerge.errors import ValueRangeError

Array = NDArray[np.float64]

C = 3.0
GOAL = 1e-5  # the solver stops at this error of the decision values
ACCEPTED = 1e-4  # above a tenth of libsvm's own tolerance, 1e-3, libsvm has to do the work
ITERATIONS = 200  # twenty to thirty are usual
BLOCK = 512  # rows of a QR that stay in the cache

# With c = x - 1/2: exp(-(x-y)²) = exp(-c²) exp(-d²) Σ (2cd)ᵏ/k!, and |2cd| <= 1/2: the first term
# left out is 0.5¹⁸/18! < 1e-21.
TAYLOR = np.sqrt([2.0**k / math.factorial(k) for k in range(18)])


def mia_efficacy(
    retain: NDArray[np.floating[Any]],
    test: NDArray[np.floating[Any]],
    forget: NDArray[np.floating[Any]],
) -> float:
    """Percentage of the forget set that the attack takes for images never trained on.

    >>> retain, test = np.array([0.99, 0.98, 1.0, 0.97]), np.array([0.3, 0.6, 0.2, 0.5])
    >>> mia_efficacy(retain, test, forget=np.array([0.1, 0.4, 0.95, 0.2]))
    75.0

    retain  probability of the true class, in the order of the data set; the attack learns what
            members look like from the first len(test) of them, or from all if there are fewer
    test    the same of every test image: the non-members
    forget  the same of every image to be forgotten
    """
    members = _checked("retain", retain)[: len(test)]
    attack = fit(members, _checked("test", test))
    return 100.0 * float(np.mean(~attack.predict_member(_checked("forget", forget))))


@dataclass(frozen=True)
class Attack:
    """The fitted SVM: positive decisions, and zero, mean member.

    >>> attack = fit(np.array([0.9, 1.0]), np.array([0.1, 0.2]))
    >>> attack.predict_member(np.array([0.0, 0.95]))
    array([False,  True])

    weights    one per feature of the kernel
    intercept  what is added to weights · features
    error      no decision is further than this from the exact SVM's; infinite if libsvm solved it
    """

    weights: Array
    intercept: float
    error: float

    def decision(self, confidence: NDArray[np.floating[Any]]) -> Array:
        """Signed distance to the boundary in units of the margin.

        >>> fit(np.array([1.0]), np.array([0.0])).decision(np.array([0.0, 0.5, 1.0])).round(3) + 0.0
        array([-1.,  0.,  1.])
        """
        return _features(_checked("confidence", confidence)) @ self.weights + self.intercept

    def predict_member(self, confidence: NDArray[np.floating[Any]]) -> NDArray[np.bool_]:
        """Whether each image looks trained on; libsvm gives a tie to the second class, members.

        >>> fit(np.array([0.5]), np.array([0.5])).predict_member(np.array([0.1]))
        array([ True])
        """
        return self.decision(confidence) >= 0


def fit(members: NDArray[np.floating[Any]], non_members: NDArray[np.floating[Any]]) -> Attack:
    """Train the attack on all given images, none held out.

    >>> fit(np.array([0.9, 1.0]), np.array([0.1, 0.2])).error < 1e-4
    True

    members      probability of the true class of images trained on
    non_members  the same of images never seen
    """
    members, non_members = _checked("members", members), _checked("non_members", non_members)
    # Matrices of eighteen columns: a second thread costs more in waiting than it computes.
    with _threads().limit(limits=1, user_api="blas"):
        attack = _solve(_gather(members, non_members))
    return attack if attack.error <= ACCEPTED else _libsvm(members, non_members)


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()


def _checked(name: str, confidence: NDArray[np.floating[Any]]) -> Array:
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
    """Rows whose dot products are the kernel: φ(x)·φ(y) = exp(-(x-y)²)."""
    c = x - 0.5
    return np.exp(-c * c)[:, None] * np.vander(c, len(TAYLOR), increasing=True) * TAYLOR


class _Points(NamedTuple):
    """Equal values of one class are one point with copies: it has one multiplier, up to C·copies.

    A value found in both classes is two points with the same row of features.
    """

    features: Array  # one row per distinct value
    row: NDArray[np.intp]  # of each point
    sign: Array  # +1 member, -1 non-member
    copies: Array

    def spread(self, per_point: Array) -> Array:
        """Sum what the points of each row hold."""
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
    """The best intercept for these weights, and how far the two can be from the optimum.

    alpha, in [0, C·copies], and slack = C·copies - alpha need not be optimal, or even balanced.
    """
    decision = (points.features @ weights)[points.row]

    # Given the weights, the hinge loss is piecewise linear in the intercept, breaks at
    # sign - decision, and is least between the P-th and the next of them, P the number of members.
    # The midpoint is libsvm's choice as well; mostly the two coincide.
    breaks = points.sign - decision
    order = np.argsort(breaks)
    upto = np.cumsum(points.copies[order])
    members = points.copies[points.sign > 0].sum()
    low, high = (order[np.searchsorted(upto, members, side)] for side in ("left", "right"))
    intercept = float(breaks[low] + breaks[high]) / 2

    # The duality gap as a sum of terms none of which is negative, so that nothing cancels:
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
    """Where the interior-point method stands."""

    solution: Array  # weights in the principal axes, then the intercept
    alpha: Array  # of each point, strictly inside its box
    slack: Array  # C·copies - alpha, kept apart so that neither loses its digits near zero
    at_zero: Array  # multiplier of alpha >= 0
    at_c: Array  # multiplier of slack >= 0

    def complementarity(self) -> float:
        return float(self.alpha @ self.at_zero + self.slack @ self.at_c)


def _solve(points: _Points) -> Attack:
    """Interior-point iterations until the certificate is good or stops getting better."""
    box = C * points.copies
    axes, basis = _principal(points.features, points.spread(points.copies))
    columns = np.column_stack([basis, np.ones(len(basis))])

    # Alpha balanced between the classes, off its bounds; a solution of zeros, and multipliers that
    # fit it: sign·0 - 1 = 1 - 2.
    held = [box[points.sign == s].sum() for s in (1, -1)]
    alpha = box * min(held) / np.where(points.sign > 0, *held) / 2
    zero = np.zeros(columns.shape[1])
    state = _State(zero, alpha, box - alpha, np.ones_like(box), np.full_like(box, 2.0))

    best = Attack(np.zeros(len(TAYLOR)), 0.0, math.inf)
    for _ in range(ITERATIONS):
        if state.complementarity() <= 1e-4:  # earlier, the certificate is not worth its sort
            attack = _certified(points, state.alpha, state.slack, state.solution[:-1] @ axes)
            if not attack.error <= 10 * best.error:  # rounding has the upper hand
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
    """One step of Mehrotra's predictor-corrector method on the SVM's dual."""
    solution, alpha, slack, at_zero, at_c = state
    row, sign = points.row, points.sign
    ridge = np.append(np.ones(columns.shape[1] - 1), 0.0)  # the intercept is not regularised

    # Newton's equations for ridge·solution = columnsᵀ(sign·alpha) and for the two products that are
    # to vanish, with all but the solution eliminated; its matrix is ridge + columnsᵀ scale columns.
    # The last condition, sign·decision - 1 = at_zero - at_c, holds from the start.
    scale = 1 / (at_zero / alpha + at_c / slack)
    root = np.sqrt(points.spread(scale))[:, None]
    inverse = np.linalg.inv(_triangle(np.vstack([columns * root, np.diag(ridge)])))

    def newton(to_zero: Array, to_c: Array) -> tuple[Array, Array, Array, Array]:
        step = np.zeros_like(solution)
        d_alpha = scale * (to_zero / alpha - to_c / slack)
        for _ in range(2):  # the second time takes off the rounding of the first, times the scale
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

    # The predictor goes straight for the optimum; the corrector aims at a point as central as the
    # predictor's success allows, and makes up for the predictor's curvature.
    step, d_alpha, d_zero, d_c = newton(-alpha * at_zero, -slack * at_c)
    before = state.complementarity()
    after = moved(longest(d_alpha, d_zero, d_c), step, d_alpha, d_zero, d_c).complementarity()
    centre = (after / before) ** 3 * before / (2 * len(alpha))
    step, d_alpha, d_zero, d_c = newton(
        centre - alpha * at_zero - d_alpha * d_zero, centre - slack * at_c + d_alpha * d_c
    )
    return moved(0.995 * longest(d_alpha, d_zero, d_c), step, d_alpha, d_zero, d_c)


def _principal(features: Array, copies: Array) -> tuple[Array, Array]:
    """Principal axes of the weighted rows, and the rows in them, without those below rounding.

    The powers of x are nearly dependent on any data; their combinations in these axes are not.
    """
    root = np.sqrt(copies)[:, None]
    q, triangle = np.linalg.qr(features * root)
    u, size, axes = np.linalg.svd(triangle, full_matrices=False)
    kept = size > 1e-8
    return axes[kept], q @ (u * size)[:, kept] / root


def _triangle(rows: Array) -> Array:
    """R of the rows' QR, first block by block; forming RᵀR instead would lose half the digits."""
    width = rows.shape[1]
    blocks = len(rows) // BLOCK
    cut = blocks * BLOCK
    tops = cast(Array, np.linalg.qr(rows[:cut].reshape(blocks, BLOCK, width), mode="r"))
    rest = np.concatenate([tops.reshape(-1, width), rows[cut:]])
    return cast(Array, np.linalg.qr(rest, mode="r"))


def _libsvm(members: Array, non_members: Array) -> Attack:
    """The protocol to the letter, for data on which the certificate fails."""
    from sklearn.svm import SVC

    x = np.concatenate([members, non_members])[:, None]
    label = np.repeat([1, 0], [len(members), len(non_members)])
    svc = SVC(C=C, kernel="rbf", gamma="auto", cache_size=2000).fit(x, label)
    weights = _features(svc.support_vectors_[:, 0]).T @ np.ravel(svc.dual_coef_)
    return Attack(weights, float(svc.intercept_[0]), math.inf)
