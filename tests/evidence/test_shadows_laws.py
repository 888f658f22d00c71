"""The tests of shadow models on margins that are known: the record, the roles, what is found."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from negmerge.errors import NegMergeError
from negmerge.evaluation.attacks.shadow_game import Role, draw_roles
from negmerge.evidence.findings import ORIGINAL, RETRAINED
from negmerge.evidence.registry import ShadowTest, forgetting_tests
from negmerge.evidence.shadow_margins import (
    KINDS,
    SETS,
    ShadowMargins,
    read_shadows,
    record,
    recorded_id,
)
from negmerge.evidence.shadows import over_samples
from negmerge.evidence.verdicts import verdict

SIZES = {"targets": 60, "retain": 20, "test": 20}
TESTS = ("shadow_attack", "klom", "unlearning_score")


def made(shadows: int = 24, unlearned: float = 0.0, seed: int = 0) -> ShadowMargins:
    """Margins of models: trained records gain 3, unlearned ones keep a share of it."""
    rng = np.random.default_rng(seed)
    roles = draw_roles(shadows, SIZES["targets"], seed)
    margins, correct = {}, {}
    for name, size in SIZES.items():
        hardness = rng.normal(0, 4, size)
        for kind in KINDS:
            own = hardness + rng.normal(size=(shadows, size))
            if name == "targets":
                gain = {"original": 3.0, "unlearned": 3.0 * unlearned, "retrained": 0.0}[kind]
                own += 3.0 * (roles == Role.IN) + gain * (roles == Role.UNLEARNED)
            margins[kind, name], correct[kind, name] = own, own > 0
    return ShadowMargins("consensus", roles, margins, correct)


def found(name: str, shadows: ShadowMargins):
    test = forgetting_tests.get(name)
    assert isinstance(test, ShadowTest)
    findings = test.find(shadows)
    for own in findings.values():
        assert list(own) == [quantity.name for quantity in test.quantities]
    assert list(findings) == [ORIGINAL, RETRAINED, "consensus"]
    return findings


def test_the_file_of_a_shadow_holds_what_was_observed(tmp_path):
    rng = np.random.default_rng(0)
    observed = {
        kind: {
            name: {"margin": rng.normal(size=4), "correct": rng.random(4) < 0.5} for name in SETS
        }
        for kind in KINDS
    }
    path = tmp_path / "shadow-1.safetensors"
    assert recorded_id(path) is None
    path.write_bytes(record(observed, "key", 0.5))
    assert recorded_id(path) == "key"
    assert record(observed, "key", 0.5) == path.read_bytes()
    read = read_shadows("ties", draw_roles(3, 4, 0), [path, path])
    for kind in KINDS:
        for name in SETS:
            np.testing.assert_array_equal(
                read.margins[kind, name][1], observed[kind][name]["margin"]
            )
            np.testing.assert_array_equal(
                read.correct[kind, name][0], observed[kind][name]["correct"]
            )
    path.write_bytes(b"damaged")
    assert recorded_id(path) is None
    with pytest.raises(NegMergeError, match=r"shadow-1.safetensors: cannot be read: .*run again"):
        read_shadows("ties", draw_roles(3, 4, 0), [path])


@given(st.integers(0, 2**32 - 1), st.integers(2, 6))
@settings(max_examples=20)
def test_margins_of_a_role_are_those_of_its_shadows(seed, third):
    shadows = made(3 * third, seed=seed)
    for roles in ((Role.UNLEARNED,), (Role.UNLEARNED, Role.OUT), (Role.IN,)):
        own = shadows.of_role("unlearned", *roles)
        assert own.shape == (third * len(roles), SIZES["targets"])
        for x in range(SIZES["targets"]):
            chosen = np.isin(shadows.roles[:, x], roles)
            assert own[:, x].tolist() == shadows.margins["unlearned", "targets"][chosen, x].tolist()


def test_perfect_unlearning_is_found_alike_and_none_is_found_out():
    perfect, nothing = made(unlearned=0.0, seed=1), made(unlearned=1.0, seed=1)
    attack = found("shadow_attack", perfect)
    assert attack[ORIGINAL]["auc"].low > 80
    for title in (RETRAINED, "consensus"):
        assert attack[title]["auc"].low - 2 < 50 < attack[title]["auc"].high + 2
    assert found("shadow_attack", nothing)["consensus"]["auc"].low > 80
    assert attack[RETRAINED]["retain_auc"].low > 80  # kept records were learned
    klom = found("klom", perfect)
    assert verdict(klom["consensus"]["klom"], klom[RETRAINED]["klom"]) == "alike"
    assert klom[ORIGINAL]["klom"].low > klom[RETRAINED]["klom"].high
    score = found("unlearning_score", perfect)
    assert score["consensus"]["score"].high > score[RETRAINED]["score"].low
    assert score[ORIGINAL]["score"].high < score[RETRAINED]["score"].low
    assert score[ORIGINAL]["epsilon"].value > score["consensus"]["epsilon"].value


def test_a_rate_that_cannot_be_resolved_has_a_reason():
    """24 shadows and 60 targets have 480 pairs of targets that were never seen."""
    rate = found("shadow_attack", made())["consensus"]["tpr"]
    assert (rate.value, rate.why) == (None, "not resolvable with 480 non-members")


@pytest.mark.parametrize("name", TESTS)
def test_every_finding_is_repeatable_and_inside_its_interval(name):
    one, two = (found(name, made(12)) for _ in range(2))
    assert one == two
    for own in one.values():
        for finding in own.values():
            if finding.low is not None:
                assert finding.low <= finding.value <= finding.high


def test_intervals_over_samples_narrow_with_their_number():
    rng = np.random.default_rng(0)
    few, many = (over_samples(rng.normal(size=size), np.median) for size in (30, 3000))
    assert many.high - many.low < (few.high - few.low) / 4
    assert many.low < many.value < many.high
