"""Attacks with reference and shadow models, against plain loops and values computed by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.special import expit, logsumexp
from sklearn.metrics import roc_auc_score, roc_curve

from negmerge.errors import NegMergeError
from negmerge.evaluation.attacks import klom as klom_module
from negmerge.evaluation.attacks.klom import histogram_divergences, klom, normal_divergences
from negmerge.evaluation.attacks.margins import margin, probability_of
from negmerge.evaluation.attacks.operating_points import tpr_at, tpr_interval
from negmerge.evaluation.attacks.rmia import rmia_scores
from negmerge.evaluation.attacks.shadow_game import Role, draw_roles, likelihood_ratios, play
from negmerge.evaluation.attacks.unlearning_score import epsilons, final_score, forget_score
from negmerge.evaluation.attacks.weighted_ranks import WeightedRanks

seeds = st.integers(0, 2**32 - 1)


# ---------------------------------------------------------------------------------------- margins


@given(seeds, st.integers(2, 6), st.sampled_from([1.0, 30.0, 300.0]))
def test_the_margin_is_the_logit_of_the_probability(seed, classes, size):
    rng = np.random.default_rng(seed)
    logits, labels = rng.normal(0, size, (5, classes)), rng.integers(0, classes, 5)
    found = margin(logits, labels)
    for row, label, value in zip(logits, labels, found, strict=True):
        others = np.delete(row, label)
        assert value == pytest.approx(row[label] - logsumexp(others), rel=1e-12, abs=1e-12)
        p = math.exp(row[label] - logsumexp(row))
        assert probability_of(np.array([value]))[0] == pytest.approx(p, rel=1e-10, abs=1e-300)
    np.testing.assert_allclose(margin(logits + 7.5, labels), found, rtol=1e-9, atol=1e-9)


def test_the_margin_leaves_the_logits_and_keeps_digits_where_p_is_one():
    logits = np.array([[90.0, 0.0, 0.0]], np.float32)
    assert margin(logits, [0])[0] == pytest.approx(90 - math.log(2), rel=1e-15)
    assert logits[0, 0] == 90
    np.testing.assert_allclose(probability_of(np.array([-3.0, 3.0])), expit([-3.0, 3.0]))


@pytest.mark.parametrize(
    ("logits", "labels"), [([[1.0]], [0]), ([[1.0, 2.0]], [0, 1]), ([[1.0, np.nan]], [0])]
)
def test_bad_logits_are_one_line(logits, labels):
    with pytest.raises(NegMergeError, match="margin: "):
        margin(logits, labels)


# ------------------------------------------------------------------------------- operating points


@given(seeds, st.integers(200, 700), st.sampled_from([1, 8]), st.sampled_from([0.05, 0.1, 1.0]))
def test_the_rate_is_the_largest_on_the_curve(seed, size, digits, fpr):
    rng = np.random.default_rng(seed)
    members, others = rng.normal(1, 1, 80).round(digits), rng.normal(0, 1, size).round(digits)
    label = np.repeat([1, 0], [80, size])
    false, found, _ = roc_curve(label, np.concatenate([members, others]), drop_intermediate=False)
    assert tpr_at(members, others, fpr) == pytest.approx(100 * found[false <= fpr].max())


def test_a_rate_needs_ten_false_alarms():
    others = np.arange(1000.0)
    assert tpr_at(others, others, 0.01) == 1.0
    assert tpr_at(others, others[:999], 0.01) is None
    assert tpr_at(others, others, 0.00999) is None
    assert tpr_interval(others, others, 0.001) is None
    with pytest.raises(NegMergeError, match="false-positive rate: got 0; wanted a share above 0"):
        tpr_at(others, others, 0)


def test_the_interval_of_a_rate_covers_the_true_one():
    """Normal scores of means 1 and 0: above the upper 5 % of the others lie 1 − Φ(0.645)."""
    truth = 100 * stats.norm.sf(stats.norm.isf(0.05) - 1)
    rng = np.random.default_rng(1)
    inside = []
    for _ in range(60):
        found = tpr_interval(rng.normal(1, 1, 300), rng.normal(0, 1, 400), 0.05, draws=100)
        assert found is not None
        inside.append(found.low <= truth <= found.high)
    assert np.mean(inside) > 0.85


@given(seeds, st.integers(2, 30))
def test_weights_count_as_copies(seed, size):
    rng = np.random.default_rng(seed)
    scores, member = rng.integers(0, 6, size).astype(float), rng.random(size) < 0.5
    member[:2] = True, False
    weights = rng.integers(0, 4, size)
    weights[:2] += 1
    ranks, label = WeightedRanks(scores, member), np.repeat(member, weights)
    copies = np.repeat(scores, weights)
    assert ranks.auc(weights) == pytest.approx(roc_auc_score(label, copies))
    false, found, _ = roc_curve(label, copies, drop_intermediate=False)
    fprs = [0.0, 0.2, 0.5, 1.0]
    wanted = [found[false <= fpr + 1e-12].max() for fpr in fprs]
    assert ranks.tprs(weights, fprs) == pytest.approx(wanted)


# ------------------------------------------------------------------------------------------- RMIA


@given(seeds, st.integers(1, 3), st.sampled_from([0.0, 0.3, 1.0]), st.sampled_from([0.5, 1.0, 2.0]))
def test_rmia_counts_pairs(seed, models, a, gamma):
    rng = np.random.default_rng(seed)
    target, references = rng.random(7), rng.random((models, 7))
    z_target, z_references = rng.random(11), rng.random((models, 11))
    found = rmia_scores(target, references, z_target, z_references, a, gamma)
    for i in range(7):
        above = 0
        for j in range(11):
            x = target[i] / ((1 + a) / 2 * references[:, i].mean() + (1 - a) / 2)
            z = z_target[j] / ((1 + a) / 2 * z_references[:, j].mean() + (1 - a) / 2)
            above += x / z > gamma
        assert found[i] == pytest.approx(above / 11)


def test_rmia_by_hand():
    """a = 0.3: p = 0.65·0.4 + 0.35 = 0.61 and LR = 0.9/0.61 = 1.48 beat z's 0.8/0.74 = 1.08."""
    assert rmia_scores([0.9], [[0.4]], [0.8, 1.0], [[0.6, 0.2]]).tolist() == [0.5]
    assert 1.0 / (0.65 * 0.2 + 0.35) > 0.9 / 0.61 > 0.8 / (0.65 * 0.6 + 0.35)
    assert rmia_scores([0.5], [[0.5]], [0.5], [[0.5]]).tolist() == [0.0]  # not above itself


def test_rmia_of_one_distribution_is_chance():
    rng = np.random.default_rng(0)
    scores = rmia_scores(*(rng.random(shape) for shape in (4000, (2, 4000), 3000, (2, 3000))))
    assert 0.48 < roc_auc_score(np.arange(4000) % 2, scores) < 0.52
    assert scores.mean() == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.5], [[0.5]], [0.5], [[0.5]]), "not a probability"),
        (([np.nan], [[0.5]], [0.5], [[0.5]]), "not a probability"),
        (([0.5], [[0.5, 0.5]], [0.5], [[0.5]]), "shapes for x"),
        (([0.5], np.empty((0, 1)), [0.5], [[0.5]]), "got no reference model"),
        (([0.5], [[0.5]], [], np.empty((1, 0))), "shapes for z"),
        (([0.5], [[0.5]], [0.5], [[0.5]], 2.0), "offline_a from 0 to 1"),
    ],
)
def test_rmia_refuses(arguments, message):
    with pytest.raises(NegMergeError, match=message):
        rmia_scores(*arguments)


# ------------------------------------------------------------------------------------ shadow game


@pytest.mark.parametrize("shadows", [12, 66])
@given(seed=seeds)
@settings(max_examples=6)
def test_the_ratio_is_that_of_normal_densities_without_the_own_shadow(shadows, seed):
    rng = np.random.default_rng(seed)
    roles = draw_roles(shadows, 3, seed)
    margins = rng.normal(2, 1.5, (shadows, 3)) + roles
    member, other = roles == Role.UNLEARNED, roles == Role.OUT
    found = likelihood_ratios(margins, member, other)
    for s, x in zip(*np.nonzero(member | other), strict=True):
        rest = np.arange(shadows) != s
        a, b = margins[member[:, x] & rest, x], margins[other[:, x] & rest, x]
        squares = [((one - one.mean()) ** 2).sum() for one in (a, b)]
        if shadows < 64:
            sigmas = [math.sqrt(sum(squares) / (len(a) + len(b) - 2))] * 2
        else:
            sigmas = [one.std(ddof=1) for one in (a, b)]
        wanted = stats.norm.logpdf(margins[s, x], a.mean(), sigmas[0])
        wanted -= stats.norm.logpdf(margins[s, x], b.mean(), sigmas[1])
        assert found[s, x] == pytest.approx(wanted, rel=1e-6, abs=1e-6)


@given(seeds, st.sampled_from([12, 66]), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=15)
def test_the_game_does_not_depend_on_units(seed, shadows, factor, offset):
    rng = np.random.default_rng(seed)
    roles, margins = draw_roles(shadows, 6, seed), rng.normal(size=(shadows, 6))
    one = play(margins, roles, draws=5)
    other = play(margins * factor + offset, roles, draws=5)
    assert other.auc.value == pytest.approx(one.auc.value, abs=0.5)
    np.testing.assert_allclose(other.scores, one.scores, rtol=1e-6, atol=1e-6)


def test_the_game_by_hand():
    """One target; a = 4, 5, 6 and b = 0, 1, 2. Without 4: μ_a 5.5, v = (0.5 + 2)/3."""
    margins = np.array([4.0, 5.0, 6.0, 0.0, 1.0, 2.0, 9.0, 9.0, 9.0])[:, None]
    roles = np.repeat([Role.UNLEARNED, Role.OUT, Role.IN], 3)[:, None]
    game = play(margins, roles, draws=50)
    v = (0.5 + 2) / 3
    assert game.scores[0, 0] == pytest.approx(((4 - 1) ** 2 - (4 - 5.5) ** 2) / (2 * v))
    assert np.isnan(game.scores[6:]).all()
    assert (game.auc.value, game.success.tolist(), game.worst_decile) == (100.0, [100.0], 100.0)
    assert game.tpr == {0.01: None, 0.001: None}


def test_the_null_is_chance_and_what_is_known_is_found():
    rng = np.random.default_rng(0)
    roles = draw_roles(24, 400, seed=1)
    hardness = rng.normal(0, 5, 400)  # one threshold for all sees almost nothing
    null = hardness + rng.normal(size=(24, 400))
    known = null + 1.0 * (roles == Role.UNLEARNED) + 2.0 * (roles == Role.IN)
    chance, found, kept = play(null, roles), play(known, roles), play(known, roles, Role.IN)
    assert chance.auc.low < 50 < chance.auc.high + 2
    assert 45 < chance.auc.value < 51  # leaving one out pulls it a little below a half
    assert found.auc.low > 65
    assert kept.auc.value > found.auc.high
    one_threshold = roc_auc_score((roles == 2)[roles != 1], known[roles != 1])
    assert found.auc.value > 100 * one_threshold + 10
    assert found.worst_decile > found.success.mean()
    rate = found.tpr[0.01]
    assert rate is not None
    assert rate.low <= rate.value <= rate.high
    assert rate.value > 1.5
    assert found.tpr[0.001] is None  # 3,200 others


def test_the_interval_of_the_game_covers_the_truth():
    """Many small games of normal margins have the mean AUC of the truth; 95 % intervals hold it."""
    rng = np.random.default_rng(2)
    games = []
    for seed in range(40):
        roles = draw_roles(12, 40, seed)
        margins = rng.normal(size=(12, 40)) + 1.5 * (roles == Role.UNLEARNED)
        games.append(play(margins, roles, draws=100, seed=seed).auc)
    truth = np.mean([game.value for game in games])
    assert np.mean([game.low <= truth <= game.high for game in games]) > 0.9


@given(seeds, st.integers(2, 8), st.integers(1, 20))
def test_roles_are_balanced_and_repeatable(seed, third, targets):
    roles = draw_roles(3 * third, targets, seed)
    for role in Role:
        assert ((roles == role).sum(0) == third).all()
    assert (roles == draw_roles(3 * third, targets, seed)).all()


def test_too_few_shadows_are_refused():
    with pytest.raises(NegMergeError, match="shadows: got 10; wanted a multiple of 3"):
        draw_roles(10, 5, 0)
    with pytest.raises(NegMergeError, match="a role in 2 shadows; wanted at least 3"):
        play(np.zeros((6, 1)), draw_roles(6, 1, 0))
    with pytest.raises(NegMergeError, match="a margin is not finite"):
        play(np.full((12, 1), np.nan), draw_roles(12, 1, 0))


# ------------------------------------------------------------------------------------------- KLoM


def published_klom(p: np.ndarray, q: np.ndarray) -> float:
    """The published formula for one sample: shares of 20 half-open bins, entropy of scipy."""
    p, q = np.clip(p, -100, 100), np.clip(q, -100, 100)
    low, high = min(p.min(), q.min()), max(p.max(), q.max())
    edges = np.linspace(low, high if high > low else low + 1, 21)

    def shares(values):
        counts = [((values >= a) & (values < b)).sum() for a, b in pairwise(edges)]
        return np.array(counts) / sum(counts)

    ours, theirs = shares(p), shares(q)
    return float(stats.entropy(ours, np.where(ours > 0, np.maximum(theirs, 1e-5), theirs)))


@given(seeds, st.sampled_from([0.5, 5.0, 90.0]), st.integers(5, 60))
def test_histograms_are_those_published(seed, size, models):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(size, size, (models, 4)), rng.normal(0, size, (models + 3, 4))
    wanted = [published_klom(*pair) for pair in zip(p.T, q.T, strict=True)]
    np.testing.assert_allclose(histogram_divergences(p, q), wanted, rtol=1e-9, atol=1e-12)


def test_histograms_by_hand():
    """p in bins 0 and 9 of [0, 20], q in 0 only; 20 itself is outside: KL = Σ p ln(p/q)."""
    p, q = np.array([[0.5], [9.5]]), np.array([[0.0], [20.0]])
    q_share = np.array([1.0, 1e-5]) / (1 + 1e-5)
    wanted = 0.5 * math.log(0.5 / q_share[0]) + 0.5 * math.log(0.5 / q_share[1])
    assert histogram_divergences(p, q)[0] == pytest.approx(wanted)


def test_a_side_at_the_highest_margin_is_in_the_last_bin():
    top, spread = np.full((4, 1), 100.0), np.linspace(0, 10, 4)[:, None]
    assert histogram_divergences(top, top)[0] == 0
    assert histogram_divergences(top, spread)[0] == pytest.approx(math.log(1e5), rel=1e-4)
    assert histogram_divergences(spread, top)[0] > 8


@given(seeds, st.floats(-3, 3), st.floats(0.3, 3))
def test_normal_divergences_are_the_formula(seed, shift, width):
    rng = np.random.default_rng(seed)
    p, q = rng.normal(shift, width, (8, 5)), rng.normal(0, 1, (9, 5))
    found = normal_divergences(p, q)
    for k in range(5):
        (m1, s1), (m2, s2) = ((x[:, k].mean(), x[:, k].std(ddof=1)) for x in (p, q))
        s1, s2 = (max(s, math.sqrt(0.01 * np.median(q.var(0, ddof=1)))) for s in (s1, s2))
        wanted = math.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5
        assert found[k] == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    assert (found >= 0).all()
    np.testing.assert_allclose(normal_divergences(3 * p + 1, 3 * q + 1), found, rtol=1e-7)


@pytest.mark.parametrize(("models", "estimate"), [(24, "normal"), (128, "histogram")])
def test_klom_of_one_distribution_is_near_its_floor(models, estimate):
    rng = np.random.default_rng(0)
    hardness = rng.normal(0, 4, 300)
    same, one, two, far = (
        hardness + shift + rng.normal(size=(models, 300)) for shift in (0, 0, 0, 3)
    )
    null, floor, found = klom(same, two), klom(one, two), klom(far, two)
    assert null.estimate == found.estimate == estimate
    assert null.median == pytest.approx(floor.median, rel=0.3)
    assert found.median > 10 * floor.median
    assert found.high == np.quantile(found.values, 0.95) > found.median
    half = models // 2
    assert klom(one[:half], two[half:]).median > null.median  # fewer models, a higher floor


def test_models_that_agree_by_chance_are_not_infinitely_far(monkeypatch):
    q = np.random.default_rng(0).normal(size=(6, 9))
    p = q.copy()
    p[:, 0] = q[:, 0].mean()
    assert normal_divergences(p, q)[0] < 3
    monkeypatch.setattr(klom_module, "VARIANCE", 0.0)
    assert normal_divergences(p, q)[0] > 30


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        (np.zeros((1, 2)), np.zeros((5, 2)), "at least two models"),
        (np.zeros((4, 2)), np.zeros((4, 3)), "got 2 and 3 samples"),
        (np.full((4, 2), np.nan), np.zeros((4, 2)), "and numbers"),
    ],
)
def test_klom_refuses(p, q, message):
    with pytest.raises(NegMergeError, match=message):
        klom(p, q)


# ------------------------------------------------------------------------------- unlearning score


def rule_epsilon(fpr: float, fnr: float) -> float | None:
    if fpr == fnr == 0:
        return math.inf
    if fpr == 0 or fnr == 0:
        return None
    sides = [(1 - 1e-5 - fpr, fnr), (1 - 1e-5 - fnr, fpr)]
    return max([0.0, *(math.log(a / b) for a, b in sides if a > 0)])


def naive_epsilon(u: np.ndarray, r: np.ndarray) -> float:
    """Every rule by trying all thresholds of a fine grid of middles and ends."""
    if min(np.ptp(u), np.ptp(r)) / max(np.ptp(u), np.ptp(r)) < 0.01:
        return 50.0
    pos, neg = (r, u) if np.median(r) > np.median(u) else (u, r)
    found = [rule_epsilon((neg >= t).mean(), (pos < t).mean()) for t in np.concatenate([u, r])]
    pos, neg = (r, u) if np.ptp(u) >= np.ptp(r) else (u, r)
    width = np.ptp(pos)
    for right in np.arange(pos.max() - 2, pos.max() + 2.001, 0.125):
        for left in np.arange(right - width - 2, right - width + 2.001, 0.125):
            inside = [(side >= left) & (side <= right) for side in (pos, neg)]
            found.append(rule_epsilon(inside[1].mean(), (~inside[0]).mean()))
    left_over = [one for one in found if one is not None]
    return min(max(left_over), 50.0) if left_over else 50.0


@given(seeds, st.integers(3, 8), st.integers(3, 8), st.sampled_from([0.0, 1.0, 4.0]))
@settings(max_examples=25, deadline=None)
def test_epsilon_is_the_best_rule(seed, unlearned, retrained, shift):
    """Margins are multiples of a quarter, so that steps of an eighth try every interval."""
    rng = np.random.default_rng(seed)
    u = (rng.normal(shift, 1.5, unlearned) * 4).round() / 4
    r = (rng.normal(0, 1.5, retrained) * 4).round() / 4
    if max(np.ptp(u), np.ptp(r)) == 0:
        return
    found = epsilons(u[:, None], r[:, None])[0]
    assert found == pytest.approx(naive_epsilon(u, r), rel=1e-9, abs=1e-9)


def test_epsilon_by_hand():
    """Thresholds: 1 of 4 errs on both sides, ln((0.75 − 1e-5)/0.25); intervals are no better."""
    u, r = np.array([0.0, 10.0, 20.0, 30.0]), np.array([-30.0, -20.0, -10.0, 5.0])
    assert epsilons(u[:, None], r[:, None])[0] == pytest.approx(math.log((0.75 - 1e-5) / 0.25))


def test_epsilon_of_points_and_of_what_is_apart():
    u, r = np.linspace(5, 6, 8)[:, None], np.linspace(0, 1, 8)[:, None]
    assert epsilons(u, r)[0] == 50
    assert epsilons(np.zeros((8, 1)), r)[0] == 50  # one side is a point
    assert epsilons(np.zeros((8, 1)), np.zeros((8, 1)))[0] == 0


def test_alike_models_score_higher_than_different_ones():
    rng = np.random.default_rng(0)
    r, same, far = (rng.normal(shift, 1, (64, 40)) for shift in (0, 0, 3))
    alike, apart = (forget_score(epsilons(u, r), 64) for u in (same, far))
    assert alike > 5 * apart
    assert np.median(epsilons(same, r)) < 2.5


def test_the_forget_score_by_hand():
    """⌈ln 63⌉ = 5: 0.49 counts 1, 0.5 counts a half, 4.9 counts 2⁻⁹, from 5 on nothing."""
    values = np.array([0.0, 0.49, 0.5, 4.9, 5.0, 50.0])
    assert forget_score(values, 64) == pytest.approx((1 + 1 + 0.5 + 2**-9) / 6)
    assert final_score(0.5, (90, 100), (40, 80)) == pytest.approx(0.5 * 0.9 * 0.5)
    with pytest.raises(NegMergeError, match="on the test set is 0; wanted more than 0"):
        final_score(0.5, (90, 100), (40, 0))
    with pytest.raises(NegMergeError, match="at least 3 models"):
        forget_score(values, 2)


@pytest.mark.parametrize(
    ("u", "r", "message"),
    [
        (np.zeros((2, 1)), np.zeros((5, 1)), "wanted a row of each of at least 3 models"),
        (np.zeros((4, 1)), np.zeros((4, 2)), "got 1 and 2 samples"),
        (np.full((4, 1), np.inf), np.zeros((4, 1)), "and numbers"),
    ],
)
def test_epsilons_refuse(u, r, message):
    with pytest.raises(NegMergeError, match=message):
        epsilons(u, r)
