"""Every rule a second time, naively: all task vectors stacked in memory, plain numpy, no tricks."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np

Stack = np.ndarray  # float64, one row for each member
Model = dict[str, np.ndarray]


def merge(deltas: list[Model], rule: str, **options) -> Model:
    """Merge task vectors given as name → float64 array."""
    names = sorted(deltas[0])
    sizes = [deltas[0][name].size for name in names]
    flat = np.stack([np.concatenate([d[name].reshape(-1) for name in names]) for d in deltas])
    ends = np.cumsum(sizes)[:-1]
    if options.pop("scope", "model") == "tensor":
        # Only the trimming is by tensor: the majority sign is always that of the whole vector.
        options["parts"] = ends
    merged = np.split(RULES[rule](flat, **options), ends)
    return {n: m.reshape(deltas[0][n].shape) for n, m in zip(names, merged, strict=True)}


def equalised(deltas: list[Model], counted=lambda name: True) -> list[Model]:
    """Task vectors scaled to their mean norm, over the counted tensors."""
    squares = [[np.sum(d[name] ** 2) for name in d if counted(name)] for d in deltas]
    norms = [np.sqrt(sum(own)) for own in squares]
    factors = [sum(norms) / len(norms) / norm for norm in norms]
    return [{n: f * v for n, v in d.items()} for f, d in zip(factors, deltas, strict=True)]


def uniform(stack: Stack) -> np.ndarray:
    return sum(stack, np.zeros(stack.shape[1])) / len(stack)


def agreement(stack: Stack, quorum: float = 1.0, zeros: str = "strict") -> np.ndarray:
    kept = np.zeros(stack.shape[1], bool)
    for i, column in enumerate(stack.T):
        signs = [np.sign(x) for x in column if x != 0 or zeros == "strict"]
        needed = ceil(Fraction(str(quorum)) * len(signs))
        kept[i] = any(signs.count(s) >= needed for s in (1, -1) if signs)
    return kept


def consensus(stack: Stack, reduce="mean", signed=False, quorum=1.0, zeros="strict") -> np.ndarray:
    kept = agreement(stack, quorum, zeros)
    if reduce == "mean":
        return np.where(kept, uniform(stack), 0)
    choose = min if reduce == "min" else max
    if signed:
        values = [choose(column) for column in stack.T]
    else:  # of two equal magnitudes the positive one
        sign = -1 if reduce == "min" else 1
        values = [choose(column, key=lambda x: (abs(x), sign * x)) for column in stack.T]
    return np.where(kept, np.array(values, float).reshape(-1), 0)


def conflict(stack: Stack, **options) -> np.ndarray:
    return np.where(agreement(stack, **options), 0, uniform(stack))


def magmax(stack: Stack) -> np.ndarray:
    values = [max(column, key=lambda x: (abs(x), x)) for column in stack.T]
    return np.array(values, float).reshape(-1)


def trimmed(vector: np.ndarray, density: float, parts=()) -> np.ndarray:
    """The published code: k = int(density · d), keep what is at least the (d − k)-th smallest."""
    if len(parts):
        return np.concatenate([trimmed(part, density) for part in np.split(vector, parts)])
    d = vector.size
    k = int(density * d)
    if k >= d:
        return vector
    least = np.sort(np.abs(vector))[d - k - 1]
    return np.where(np.abs(vector) >= least, vector, 0)


def ties(stack: Stack, density: float = 0.2, parts=()) -> np.ndarray:
    kept = np.stack([trimmed(vector, density, parts) for vector in stack])
    signs = np.sign(sum(kept, np.zeros(stack.shape[1])))
    majority = np.sign(signs.sum())
    signs[signs == 0] = majority
    agreeing = np.where(signs > 0, kept > 0, kept < 0)
    count = agreeing.sum(0)
    return sum(kept * agreeing, np.zeros(stack.shape[1])) / np.maximum(count, 1)


def localize(stack: Stack, density: float = 0.1, parts=()) -> np.ndarray:
    return trimmed(uniform(stack), density, parts)


def tall(stack: Stack, factor: float = 0.4, agree: int = 2) -> np.ndarray:
    mean = uniform(stack)
    active = (np.abs(stack) >= factor * np.abs(mean - stack)).sum(0)
    return np.where(active >= agree, mean, 0)


def soft(stack: Stack, power: int = 2) -> np.ndarray:
    agreement = np.abs(np.sign(stack).sum(0)) / len(stack)
    weight = agreement
    for _ in range(power - 1):
        weight = weight * agreement
    return sum(stack, np.zeros(stack.shape[1])) * weight / len(stack)


def shrink(stack: Stack, by: str = "threshold", errors: float = 3.0) -> np.ndarray:
    """In rational numbers, element by element, from the distances to the mean."""
    found = []
    for column in stack.T:
        values = [Fraction(float(x)) for x in column]
        n = len(values)
        mean = sum(values) / n
        error = sum((x - mean) ** 2 for x in values) / (n - 1) / n  # its square
        if by == "threshold":
            found.append(float(mean) if mean**2 > Fraction(errors) ** 2 * error else 0.0)
        else:
            found.append(float(mean * (1 - error / mean**2)) if mean**2 > error else 0.0)
    return np.array(found)


RULES = {
    "uniform": uniform,
    "consensus": consensus,
    "conflict": conflict,
    "magmax": magmax,
    "ties": ties,
    "localize": localize,
    "tall": tall,
    "soft": soft,
    "shrink": shrink,
}
