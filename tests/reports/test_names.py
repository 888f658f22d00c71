"""The names of methods: those of the paper, for every rule, selector and rival that it has."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from negmerge.merging.rule import rules
from negmerge.merging.select import SELECTORS
from negmerge.reports.names import ADDED, MERGED, PAPER, RIVALS, groups_of, name_of
from negmerge.rivals.registry import rivals
from negmerge.runs.methods import Method
from negmerge.runs.result import MethodRow


def test_names_are_those_of_the_published_tables():
    published = json.loads(files("negmerge.paper").joinpath("published.json").read_text())
    printed = published["names"]["method"] | {"consensus": published["names"]["method"]["negmerge"]}
    ours = {*rules, *SELECTORS, *rivals} - {"retrain"}  # the retrained model is no method
    assert {name: printed[name] for name in ours & printed.keys()} == PAPER


@pytest.mark.parametrize(
    ("method", "label", "note"),
    [
        ({"name": "salun"}, "SalUn", "salun"),
        ({"name": "tall"}, "tall", ""),  # the paper has no name for it
        ({"name": "consensus", "subset": {"count": 4, "seed": 1}}, "NegMerge (4-1)", None),
        ({"name": "uniform", "add": 1.0}, "Uniform Merge (added)", "uniform-added"),
        ({"name": "finetune", "options": {"epochs": 3}}, "Finetune", "finetune, epochs = 3"),
        ({"name": "salun", "label": "mine"}, "mine", "SalUn"),
    ],
)
def test_what_a_page_calls_a_method(method: dict, label: str, note: str | None):
    found = name_of(Method.model_validate(method))
    assert found.label == label
    assert found.title == Method.model_validate(method).title
    assert note is None or found.note == note


def test_methods_are_grouped_by_the_data_they_use():
    common = {"intervals": {}, "samples": {}, "seconds": 0, "sparsity": None, "cost_ratio": None}
    common |= {"evaluations": 0, "criterion": None, "looked": False, "edge": False}

    def row(title: str, splits: str, scale: float | None, **more: str) -> MethodRow:
        fields = {"method": title, "splits": splits, "scale": scale}
        return MethodRow.model_validate(common | fields | more)

    rows = [
        row("salun", "all", None), row("ties", "forget", 0.5), row("ascent", "forget", None),
        row("learnt", "forget", 1.0, direction="add"), row("consensus", "forget", 0.1),
    ]  # fmt: skip
    assert groups_of(rows) == {
        MERGED: ["ties", "consensus"],
        RIVALS["all"]: ["salun"],
        RIVALS["forget"]: ["ascent"],
        ADDED: ["learnt"],
    }
