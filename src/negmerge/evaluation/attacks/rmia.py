"""RMIA, the robust membership attack of Zarifzadeh et al. (ICML 2024), in its offline form.

The attack compares how much likelier a sample is under the attacked model than under reference
models that never saw it, and how many samples of the population it beats in that. One or two
reference models are enough; a model retrained without the forget set is one.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from negmerge.errors import ValueRangeError
from negmerge.evaluation.attacks.margins import Floats


def rmia_scores(
    target: ArrayLike,
    references: ArrayLike,
    population_target: ArrayLike,
    population_references: ArrayLike,
    offline_a: float = 0.3,
    gamma: float = 1.0,
) -> Floats:
    """Return a score of each sample from 0 to 1; higher means rather a member.

    With LR(x) = p_target(x) / p(x), the score is the share of the population z for which
    LR(x) / LR(z) > γ. All arguments are probabilities of the true class.

    >>> rmia_scores([0.9, 0.1], [[0.5, 0.5]], [0.5, 0.6, 0.9], [[0.5, 0.5, 0.5]]).tolist()
    [0.6666666666666666, 0.0]

    Args:
        target: of the attacked model on each sample x.
        references: a row of each reference model on each x, on which none of them was trained.
        population_target: of the attacked model on samples z that no model was trained on; members
            and non-members must not be among them.
        population_references: a row of each reference model on each z.
        offline_a: a in p(x) = (1 + a)/2 · p_out(x) + (1 − a)/2, which stands for the models that
            were trained on x and do not exist; p_out is the mean of the reference models.
        gamma: γ.
    """
    if not (0 <= offline_a <= 1 and gamma > 0):
        raise ValueRangeError(
            f"RMIA: got offline_a {offline_a:g} and gamma {gamma:g}; wanted offline_a from 0 to 1, "
            "gamma above 0"
        )
    ratios = membership_ratios(target, references, offline_a, of="x")
    population = membership_ratios(population_target, population_references, offline_a, of="z")
    beaten = np.searchsorted(np.sort(gamma * population), ratios, "left")
    return beaten / len(population)


def membership_ratios(
    target: ArrayLike, references: ArrayLike, offline_a: float = 0.3, *, of: str = "x"
) -> Floats:
    """Return LR(x) = p_target(x) / p(x).

    With γ = 1 the score of a sample rises with its ratio, and samples between which there is no
    sample of the population have the same score but different ratios.

    >>> membership_ratios([0.9, 0.1], [[0.5, 0.5]]).round(3).tolist()
    [1.333, 0.148]

    Args:
        target, references, offline_a: as in `rmia_scores`.
        of: the samples in messages.
    """
    own = np.asarray(target, dtype=np.float64)
    others = np.asarray(references, dtype=np.float64)
    if own.ndim != 1 or not len(own) or others.ndim != 2 or others.shape[1:] != own.shape:
        raise ValueRangeError(
            f"RMIA: the shapes for {of} are {own.shape} and {others.shape}; wanted one number per "
            "sample, and a row of them for each reference model"
        )
    if not len(others):
        raise ValueRangeError("RMIA: got no reference model, wanted at least one")
    for values in (own, others):
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueRangeError(f"RMIA: a number for {of} is not a probability from 0 to 1")
    prior = (1 + offline_a) / 2 * others.mean(0) + (1 - offline_a) / 2
    with np.errstate(divide="ignore", invalid="ignore"):  # p is 0 only with a = 1 and p_out = 0
        ratios = own / prior
    return np.where(prior > 0, ratios, np.where(own > 0, np.inf, 1.0))
