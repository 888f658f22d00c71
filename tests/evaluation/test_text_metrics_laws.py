"""Metrics of answers: by hand, against plain loops, and as open-unlearning defines them."""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import exp, log

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import hmean, ks_2samp

from negmerge.errors import NegMergeError
from negmerge.evaluation.criteria import choose, criteria, nearest_to_reference
from negmerge.evaluation.metrics import metrics
from negmerge.evaluation.metrics.truth import forget_quality, model_utility
from negmerge.evaluation.observations import Observations
from negmerge.evaluation.scores import Scores, columns_to_compare, compared, score
from negmerge.evaluation.text_columns import answer_columns, rouge_recall, truth_ratio

log_probabilities = st.floats(-30, 0)
answers = st.lists(
    st.lists(st.tuples(log_probabilities, st.booleans()), min_size=1, max_size=12),
    min_size=1,
    max_size=6,
)


def padded(found, before=0):
    """Arrays of a batch, with positions that belong to no answer."""
    longest = max(map(len, found))
    logs = np.full((len(found), before + longest), np.nan)
    hit, answer = np.ones(logs.shape, bool), np.zeros(logs.shape, bool)
    for row, own in enumerate(found):
        place = slice(before, before + len(own))
        logs[row, place], hit[row, place] = zip(*own, strict=True)
        answer[row, place] = True
    return logs, hit, answer


def value(name: str, **sets: dict) -> float | None:
    """A metric of sets, given by their columns."""
    found = {
        part: Observations({k: np.asarray(v) for k, v in own.items()}) for part, own in sets.items()
    }
    return score(found, [metrics.get(name)]).values[name]


# ------------------------------------------------------------------------------------------ columns


@given(answers, st.integers(0, 3))
def test_the_columns_are_those_of_plain_loops(found, before):
    columns = answer_columns(*padded(found, before))
    for row, own in enumerate(found):
        logs, hits = [one for one, _ in own], [hit for _, hit in own]
        count = len(own)
        loss = -sum(logs) / count
        k = next((k for k in range(count) if all(hits[k:])), count)
        least = sorted(logs)[: max(1, int(count * 0.2))]
        expected = {
            "loss": loss,
            "tokens": count,
            "right": sum(hits),
            "matched_from": k,
            "mink": sum(least) / len(least),
            "probability": exp(-loss),
        }
        assert {name: column[row] for name, column in columns.items()} == pytest.approx(expected)
    assert columns["loss"].dtype == columns["mink"].dtype == np.float64


@given(answers)
def test_an_answer_is_exact_where_greedy_decoding_writes_it(found):
    """Greedy decoding stops being the answer at the first token that is not the most probable."""
    columns = answer_columns(*padded(found))
    written = [all(hit for _, hit in own) for own in found]
    assert (columns["right"] == columns["tokens"]).tolist() == written
    assert (columns["matched_from"] == 0).tolist() == written
    assert value("exact_forget", forget=columns) == pytest.approx(100 * np.mean(written))


def test_an_answer_without_tokens_and_a_broken_model_are_told():
    logs, hit, answer = padded([[(-1.0, True)], [(-1.0, True)]])
    answer[1] = False
    with pytest.raises(NegMergeError, match="sample 1 of a batch has no answer token"):
        answer_columns(logs, hit, answer)
    for bad in (np.nan, -np.inf):
        logs[0, 0] = bad
        with pytest.raises(NegMergeError, match="broken, not unlearned"):
            answer_columns(logs[:1], hit[:1], answer[:1])


# ---------------------------------------------------------------------------------- values by hand


def test_values_by_hand():
    own = {
        "tokens": [4, 2, 1],
        "right": [4, 1, 0],
        "matched_from": [0, 1, 1],
        "loss": [0.0, log(2), log(16)],
        "probability": [1.0, 0.5, 0.0625],
        "rouge": [1.0, 0.5, np.nan],
    }
    assert value("exact_retain", retain=own) == pytest.approx(100 / 3)
    assert value("extraction_retain", retain=own) == pytest.approx(100 * (1 + 0.5 + 0) / 3)
    assert value("memorised_retain", retain=own) == pytest.approx(100 * (1 + 0.5 + 0) / 3)
    assert value("loss_retain", retain=own) == pytest.approx(5 * log(2) / 3)
    # two tokens of loss log 2 and one of 4 log 2, of seven: exp(6/7 · log 2)
    assert value("perplexity_retain", retain=own) == pytest.approx(2 ** (6 / 7))
    assert value("probability_retain", retain=own) == pytest.approx(100 * 1.5625 / 3)
    assert value("rouge_retain", retain=own) == pytest.approx(75.0)


def test_a_destroyed_model_has_a_finite_perplexity():
    found = value("perplexity_forget", forget={"tokens": [1, 3], "loss": [1e5, 2e4]})
    assert 1e300 < found < np.inf


def test_better_is_what_a_model_that_forgot_and_kept_the_rest_has():
    for name, forget in (("exact", "lower"), ("loss", "higher"), ("perplexity", "higher")):
        other = {"lower": "higher", "higher": "lower"}[forget]
        assert metrics.get(f"{name}_forget").better == forget
        for part in ("retain", "holdout", "general"):
            assert metrics.get(f"{name}_{part}").better == other


@pytest.mark.parametrize("name", ["exact_forget", "loss_forget", "perplexity_forget"])
def test_an_empty_set_is_told(name):
    empty = {column: np.empty(0) for column in metrics.get(name).columns}
    with pytest.raises(NegMergeError, match="the forget set is empty"):
        value(name, forget=empty)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), min_size=2, max_size=30))
def test_perplexity_is_that_of_all_tokens_together(samples):
    """As if every token were a sample of its own."""
    losses, tokens = map(np.array, zip(*samples, strict=True))
    found = value("perplexity_general", general={"loss": losses, "tokens": tokens})
    assert found == pytest.approx(exp(np.repeat(losses, tokens).mean()))


# -------------------------------------------------------------------- as open-unlearning defines it


@given(answers)
def test_extraction_strength_is_theirs_but_for_a_wrong_last_token(found):
    """Their loop over k ends at T - 1, so that a wrong last token still gives 1/T."""
    columns = answer_columns(*padded(found))
    theirs = []
    for own in found:
        hits = [hit for _, hit in own]
        count = len(hits)
        k = next((k for k in range(count) if all(hits[k:])), count - 1)
        theirs.append(1 - k / count if hits[-1] else 0.0)
    assert value("extraction_forget", forget=columns) == pytest.approx(100 * np.mean(theirs))
    share = np.mean([np.mean([hit for _, hit in own]) for own in found])
    assert value("memorised_forget", forget=columns) == pytest.approx(100 * share)


losses = st.floats(0.0, 8.0)


@given(st.lists(st.tuples(losses, st.lists(losses, min_size=3, max_size=3)), min_size=1))
def test_truth_ratios_are_theirs(samples):
    right = np.array([own for own, _ in samples])
    wrong = np.array([own for _, own in samples])
    theirs = np.exp(-wrong.mean(1)) / (np.exp(-right) + 1e-10)
    own = {"tokens": np.ones(len(right)), "truth_ratio": truth_ratio(right, wrong)}
    assert own["truth_ratio"] == pytest.approx(theirs, rel=1e-5)
    forget = 100 * np.mean(np.minimum(theirs, 1 / (theirs + 1e-10)))
    assert value("truth_ratio_forget", forget=own) == pytest.approx(forget, rel=1e-4)
    other = 100 * np.mean(np.maximum(0, 1 - theirs))
    assert value("truth_ratio_retain", retain=own) == pytest.approx(other, rel=1e-4, abs=1e-3)


def test_samples_without_wrong_answers_are_left_out_and_a_set_without_any_has_no_ratio():
    wrong = np.array([[1.0, 3.0], [np.nan, np.nan], [np.nan, 1.0]])
    ratios = truth_ratio(np.array([2.0, 5.0, 2.0]), wrong)
    assert ratios == pytest.approx([1.0, np.nan, exp(1)], nan_ok=True)
    own = {"tokens": np.ones(3), "truth_ratio": ratios}
    assert value("truth_ratio_forget", forget=own) == pytest.approx(100 * (1 + exp(-1)) / 2)
    none = {"tokens": np.ones(2), "truth_ratio": np.full(2, np.nan)}
    assert value("truth_ratio_forget", forget=none) is None
    destroyed = truth_ratio(np.array([5000.0]), np.array([[1.0]]))
    assert np.isfinite(destroyed).all()


ratios = st.lists(st.floats(0.01, 100), min_size=1, max_size=30).map(np.array)


def p_value(ours, theirs) -> float:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return ks_2samp(ours, theirs).pvalue


@settings(max_examples=50)
@given(ratios, ratios)
@example(np.ones(7), np.array([1.0] * 6 + [2.0]))  # scipy has no exact p-value of these
def test_forget_quality_is_the_p_value_of_the_test(ours, theirs):
    assert forget_quality(ours, theirs) == p_value(ours, theirs)
    assert forget_quality(ours, ours) == 1.0
    both = np.concatenate([ours, [np.nan]])
    assert forget_quality(both, theirs) == p_value(ours, theirs)
    assert forget_quality(np.full(2, np.nan), theirs) is None


def test_forget_quality_needs_the_ratios_of_the_reference():
    wanted = [metrics.get("forget_quality")]
    ours, theirs = (
        {"forget": Observations({"tokens": np.ones(3), "truth_ratio": np.array(own)})}
        for own in ([0.5, 2.0, np.nan], [0.5, 2.0, 8.0])
    )
    first, second = (
        replace(score(one, wanted), kept=columns_to_compare(one, wanted)) for one in (ours, theirs)
    )
    assert first.values == {"forget_quality": None}
    assert first.kept == {"forget_quality": [0.5, 2.0]}
    same = compared(second, second, wanted)
    assert same.values == {"forget_quality": 1.0}
    assert same.intervals == {}
    found = compared(first, second, wanted).values["forget_quality"]
    assert found == p_value(np.array([0.5, 2.0]), np.array([0.5, 2.0, 8.0]))
    assert compared(first, Scores({}), wanted) == first  # there is nothing to compare with


shares = st.lists(st.tuples(*3 * [st.floats(0.01, 0.99)]), min_size=2, max_size=20)


def utility_set(samples) -> Observations:
    probability, rouge, ratio = map(np.array, zip(*samples, strict=True))
    return Observations({"probability": probability, "rouge": rouge, "truth_ratio": ratio})


@given(shares, shares)
def test_utility_is_the_harmonic_mean_of_six(retain, general):
    sets = utility_set(retain), utility_set(general)
    found = model_utility(*sets)
    means = [s[n].mean() for s in sets for n in ("probability", "rouge")]
    means += [(1 - s["truth_ratio"]).mean() for s in sets]
    assert found.value == pytest.approx(100 * hmean(means))
    assert 0 <= found.low <= found.value <= found.high <= 100


def test_the_interval_of_utility_is_that_of_a_bootstrap():
    rng = np.random.default_rng(0)
    sets = [utility_set(rng.beta(2, 2, (400, 3)).tolist()) for _ in range(2)]
    found, drawn = model_utility(*sets), []
    for _ in range(1000):
        picked = []
        for own in sets:
            rows = rng.integers(0, 400, 400)
            picked.append(Observations({k: v[rows] for k, v in own.columns.items()}))
        drawn.append(model_utility(*picked).value)
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.15 * (high - low))


def test_utility_without_truth_ratios_on_one_set_and_with_a_zero():
    retain = utility_set([(0.5, 0.5, 0.5)] * 3)
    general = utility_set([(1.0, 0.5, np.nan)] * 3)
    assert model_utility(retain, general).value == pytest.approx(100 * 5 / (4 * 2 + 1))
    assert model_utility(retain, utility_set([(1.0, 0.0, np.nan)] * 3)).value == 0.0


# -------------------------------------------------------------------------------------------- ROUGE

words = st.text("ab c1.,É-", max_size=25)


@pytest.mark.parametrize(
    ("answer", "written", "recall"),
    [
        ("the cat sat", "the cat sat", 1.0),
        ("the cat sat", "The cats, sitting.", 2 / 3),
        ("running quickly home", "home he runs quickly", 2 / 3),
        ("a b c d", "a x c y", 0.5),
        ("a b", "", 0.0),
    ],
)
def test_rouge_by_hand(answer, written, recall):
    assert rouge_recall([answer], [written]) == pytest.approx([recall])


@settings(max_examples=50)
@given(words, words)
def test_rouge_is_the_longest_common_subsequence_of_stems(answer, written):
    from nltk.stem.porter import PorterStemmer

    stem = PorterStemmer().stem

    def stems(text: str) -> list[str]:
        kept = "".join(
            c if c in "abcdefghijklmnopqrstuvwxyz0123456789" else " " for c in text.lower()
        )
        return [stem(word) if len(word) > 3 else word for word in kept.split()]

    def longest(a: list[str], b: list[str]) -> int:
        table = np.zeros((len(a) + 1, len(b) + 1), int)
        for i, x in enumerate(a):
            for j, y in enumerate(b):
                table[i + 1, j + 1] = (
                    table[i, j] + 1 if x == y else max(table[i, j + 1], table[i + 1, j])
                )
        return int(table[-1, -1])

    a, b = stems(answer), stems(written)
    expected = longest(a, b) / len(a) if a else np.nan
    assert rouge_recall([answer], [written]) == pytest.approx([expected], nan_ok=True)


# ----------------------------------------------------------------------------------------- criteria


def test_the_perplexity_may_grow_by_a_twentieth():
    rows = [
        {"scale": s, "probability_forget": f, "perplexity_retain": p}
        for s, f, p in ((0.0, 100.0, 9.5), (0.5, 60.0, 9.9), (1.0, 20.0, 10.0), (2.0, 0.0, 10.1))
    ]
    criterion = criteria.get("keep_perplexity")
    assert choose(rows, criterion).scale == 1.0
    assert criterion.limits
    assert criterion.aim("perplexity_retain", rows[0], None)[0] == pytest.approx(10.0)


def test_nearest_to_the_reference_reads_the_metrics_of_answers():
    rows = [
        {"scale": s, "exact_forget": f, "exact_retain": r, "auc_loss": a}
        for s, f, r, a in ((0.0, 99.0, 99.0, 99.0), (0.5, 10.0, 90.0, 60.0), (1.0, 0.0, 40.0, 20.0))
    ]
    retrained = {"exact_forget": 2.0, "exact_retain": 99.0, "auc_loss": 51.0}
    found = choose(rows, nearest_to_reference(tuple(retrained)), retrained)
    assert (found.scale, found.loss) == (0.5, pytest.approx((8 + 9 + 9) / 3))
