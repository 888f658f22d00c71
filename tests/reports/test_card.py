"""The model card of a run: valid for the Hub, honest about what is missing, safe for any name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from huggingface_hub import EvalResultEntry, ModelCard, parse_eval_result_entries
from markdown_it import MarkdownIt

from negmerge.errors import printable
from negmerge.reports.card import card_of
from negmerge.reports.eval_results import eval_results
from negmerge.reports.page_data import PageData
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.runs.result import RunResult
from negmerge.runs.store import Run, write_json
from negmerge.support.remote.hub import hub_url, pinned

HOSTILE = "x\n---\nlicense: stolen\n<script>alert(1)</script> | [a](b) ![c](d) `e`"


def scored(**more):
    values = {"acc_retain": 98.0, "acc_forget": 40.0, "acc_test": 80.0, "mia": 31.5}
    bounds = {"acc_forget": [35.0, 45.0]}
    sets = {"retain": 900, "forget": 100, "test": 500}
    return values | {"intervals": bounds, "samples": sets, "seconds": 1.0} | more


@pytest.fixture
def page(tmp_path: Path) -> PageData:
    """A run of a recipe with a data set of the Hub, and no retrained model."""
    run = Run(tmp_path / "run")
    run.unlearned.parent.mkdir(parents=True)
    run.unlearned.write_bytes(b"weights")
    recipe = Recipe(data={"name": "cifar10"}, retrain=None, title=HOSTILE, methods=["consensus"])
    method = {"method": "consensus", "splits": "forget", "scale": 0.45, "sparsity": 90.0}
    method |= {"cost_ratio": None, "evaluations": 9, "criterion": "match_holdout"}
    about = {
        "data": "cifar10",
        "sizes": {"forget": 100, "retain": 900},
        "chosen_on": {"forget": 50},
    }
    tree = {
        "title": HOSTILE,
        "seed": 3,
        "original": scored(acc_forget=99.0, intervals={}),
        "retrain": None,
        "methods": [scored(**method, looked=False, edge=False)],
        "splits": about | {"base_model": "someone/base", "base_commit": "0" * 40, "licence": "mit"},
        "pool": [],
        "warnings": [HOSTILE],
    }
    result = RunResult.model_validate(tree)
    run.recipe.write_text(recipe.dump())
    write_json(run.scores, result.tree())
    run.finish("problem", [run.recipe, run.scores, run.unlearned])
    return PageData(run, load_recipe(run.recipe), run.result)


def test_the_hub_reads_the_card(page):
    card = ModelCard(card_of(page, ["config.json", "model.safetensors"], repo="me/forgot"))
    data = card.data
    assert data.base_model == "someone/base"
    assert data.license == "mit"
    assert data.library_name == "transformers"
    assert data.pipeline_tag == "image-classification"
    assert data.datasets == ["uoft-cs/cifar10"]
    assert data.model_name == "forgot"
    found = {result.metric_name.partition(",")[0]: result for result in data.eval_results}
    forget = found["accuracy on the forget set"]
    assert forget.metric_value == 40.0
    assert forget.dataset_type == "uoft-cs/cifar10"
    assert forget.metric_type == "accuracy"
    assert "95 % interval [35.0–45.0]" in forget.metric_name
    assert data.to_dict()["negmerge"] == {
        "rule": "consensus", "scale": 0.45, "direction": "negate",
    }  # fmt: skip


def test_the_card_says_what_is_known_and_what_is_not(page):
    text = card_of(page, [])
    assert "40.00 \\[35.0–45.0\\]" in text
    assert "λ = 0.45, chosen by the criterion match\\_holdout" in text
    assert "there is no retrained reference" in text
    assert "it certifies no deletion" in text
    assert "tests of forgetting: the run has none" in text
    assert "    negmerge apply BASE patch.safetensors --negate 0.45 -o OUT" in text
    about = page.result.splits.model_copy(update={"base_fits": True})
    fitting = replace(page, result=page.result.model_copy(update={"splits": about}))
    assert "library_name: negmerge" in text
    both = card_of(fitting, ["model.safetensors"], "both", "me/forgot")
    assert "This repository has both." in both
    assert f"negmerge apply someone/base@{'0' * 40} me/forgot --negate 0.45 -o OUT" in both
    assert "pipeline_tag" not in card_of(page, [], "patch", "me/forgot")


def test_names_of_data_are_only_names(page):
    about = page.result.splits.model_copy(update={"forgotten_class": HOSTILE})
    hostile = replace(page, result=page.result.model_copy(update={"splits": about}))
    text = card_of(hostile, [])
    head, body = re.fullmatch(r"---\n(.*?)\n---\n(.*)", text, re.DOTALL).groups()
    metadata = yaml.safe_load(head)
    assert metadata["license"] == "mit"
    assert metadata["model-index"][0]["name"] == printable(HOSTILE)
    kinds = set[str]()
    for token in MarkdownIt("commonmark").enable("table").parse(body):
        kinds |= {token.type, *(one.type for one in token.children or [])}
        links = [one for one in token.children or [] if one.type == "link_open"]
        assert all(one.attrs["href"].startswith("https://arxiv.org") for one in links)
    assert not kinds & {"html_block", "html_inline", "image", "hr"}


def test_paths_of_this_machine_are_not_in_the_card(page):
    about = page.result.splits.model_copy(update={"data": "/home/me/faces", "base_model": None})
    text = card_of(replace(page, result=page.result.model_copy(update={"splits": about})), [])
    assert "faces" in text
    assert "/home" not in text


def test_results_are_in_the_format_of_the_hub(page):
    entries = parse_eval_result_entries(yaml.safe_load(eval_results(page)))
    assert EvalResultEntry(
        dataset_id="uoft-cs/cifar10",
        task_id="acc_forget",
        value=40.0,
        notes="accuracy on the forget set, %; unlearned by consensus; 95 % interval [35.0–45.0]",
    ) in [replace(entry) for entry in entries]
    assert {entry.task_id for entry in entries} == {"acc_forget", "acc_retain", "acc_test", "mia"}
    local = page.recipe.model_copy(update={"settings": Recipe().settings})
    assert eval_results(replace(page, recipe=local)) is None


def test_what_can_be_an_id_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub_url("a/b") == "hf://a/b"
    assert hub_url(Path("a/b@refs/pr/1")) == "hf://a/b@refs%2Fpr%2F1"
    for other in ("a", "a/b/c", "./a/b", "/a/b", "~/a", "a/b.safetensors", "a/b.pt", "a//b", "a/b@",
                  "../b", "a/..", "datasets/b", {"w": 1}, None, "s3://a/b", "a/b\n"):  # fmt: skip
        assert hub_url(other) is None, other
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").symlink_to("nowhere")
    assert hub_url("a/b") is None
    assert pinned(f"hf://a/b@{'1' * 40}/c") == f"hf://a/b@{'1' * 40}/c"
    assert pinned("hf://datasets/a/b") == "hf://datasets/a/b"
