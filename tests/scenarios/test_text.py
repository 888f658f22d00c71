"""The text scenario with a tiny model: sets, tokens, tied weights, members, a whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import tiny_llama
from negmerge.errors import NegMergeError, OptionError
from negmerge.evaluation.criteria import choose
from negmerge.evaluation.search import read_rows
from negmerge.reports.page import report
from negmerge.runs.pipeline import run
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.scenarios.text.models import ModelFolder
from negmerge.scenarios.text.observing import answers_of, greedy
from negmerge.text.documents import Record
from negmerge.text.encoding import Encoder
from negmerge.text.settings import Tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("texts")
    tiny_llama.write_jsonl(made / "facts.jsonl", tiny_llama.FACTS)
    tiny_llama.write_jsonl(made / "stories.jsonl", tiny_llama.STORIES)
    return made


def tree(folder: Path, files: Path, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "scenario": "text",
        "model": {"name": str(folder)},
        "data": {"records": str(files / "facts.jsonl"), "general": str(files / "stories.jsonl")},
        "split": {
            "forget": {"column": "person", "values": ["Ada", "Bob"]},
            "holdout": {"column": "person", "values": ["Gus", "Hana"]},
        },
        "tokens": {"length": 64},
        "train": {"epochs": 40, "batch": 4, "lr": 0.005},
        "pool": {"settings": {"batch": 2, "epochs": 2}, "grid": {"lr": [1e-3, 2e-3, 3e-3]}},
        "methods": ["consensus", "uniform"],
        "workers": 1,
        "threads": 1,
    }
    return found | changes


def scenario_of(folder: Path, files: Path, **changes: Any) -> Any:
    return Recipe.model_validate(tree(folder, files, **changes)).make_scenario()


def test_answer_tokens_are_those_with_characters_of_the_answer(folder: Path):
    tokenizer = ModelFolder(str(folder)).tokenizer()
    encoder = Encoder(tokenizer, Tokens(), "tiny")
    sample = encoder.sample(Record("Where does Ada live?", "In a red house."), "forget")
    assert tokenizer.decode(sample.ids[: sample.first]) == "<s>Where does Ada live?"
    assert tokenizer.decode(sample.answer) == " In a red house.</s>"
    assert sample.ids[-1] == tokenizer.eos_token_id


def test_greedy_answers_are_right_where_all_tokens_are_predicted(folder: Path, files: Path):
    scenario = scenario_of(folder, files)
    model = scenario.model()
    scenario.train(model, "train", scenario.training, 0)
    model.eval()
    samples = [one for part in ("retain", "forget") for one in scenario.encoded[part]]
    with torch.inference_mode():
        found = answers_of(model, samples)
        told = greedy(model, samples, scenario.encoder.tokenizer.eos_token_id)
    exact = (found["right"] == found["tokens"]).tolist()
    assert exact.count(True) > len(samples) // 2
    assert exact == [list(t) == list(s.answer[:-1]) for t, s in zip(told, samples, strict=True)]


def test_losses_are_those_of_transformers_one_by_one(folder: Path, files: Path):
    scenario = scenario_of(folder, files)
    model, sample = scenario.model().eval(), scenario.encoded["retain"][0]
    ids = torch.from_numpy(sample.ids)[None]
    labels = ids.clone()
    labels[:, : sample.first] = -100
    with torch.inference_mode():
        wanted = model(input_ids=ids, labels=labels).loss.item()
        found = answers_of(model, [sample])
        objective = scenario.loss(scenario.training)
        batch = scenario.train_set("retain").test_batch(np.array([0]))
        assert objective(model, batch, 0).item() == pytest.approx(wanted, rel=1e-5)
    assert found["loss"][0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("policy", ["touched", "none", "all"])
def test_members_change_only_the_rows_that_the_policy_allows(
    folder: Path, files: Path, policy: str
):
    scenario = scenario_of(folder, files, embeddings=policy)
    before, model = scenario.model(), scenario.model()
    scenario.train(model, "forget", scenario.training, 0)
    name = "model.embed_tokens.weight"
    moved = (model.state_dict()[name] != before.state_dict()[name]).any(1).numpy()
    tokens = np.unique(np.concatenate([one.ids for one in scenario.encoded["forget"]]))
    allowed = np.isin(np.arange(len(moved)), tokens)
    if policy == "all":
        assert moved[~allowed].any()
    else:
        assert not moved[~allowed].any()
        assert moved[allowed].any() == (policy == "touched")


def test_tied_weights_have_one_name(tmp_path: Path):
    for tied in (True, False):
        model = ModelFolder(str(tiny_llama.make_folder(tmp_path / str(tied), tied))).model()
        names = {*model.state_dict()}
        assert ("lm_head.weight" in names) == (not tied)
        assert "model.embed_tokens.weight" in names
        state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
        assert all(torch.equal(model.state_dict()[name], state[name]) for name in names)


def test_members_by_lora_share_their_start(folder: Path, files: Path):
    scenario = scenario_of(folder, files, lora={"rank": 2})
    before, members = scenario.model(), []
    for seed in (1, 2):
        model = scenario.model()
        settings = scenario.training.model_copy(update={"epochs": 1})
        scenario.train(model, "forget", settings, seed)
        members.append(model.state_dict())
    assert {*members[0]} == {*before.state_dict()}  # merged into the weights, no adapters left
    name = "model.layers.0.self_attn.q_proj.weight"
    changes = [member[name] - before.state_dict()[name] for member in members]
    spaces = [torch.linalg.svd(change)[2][:2] for change in changes]
    overlap = torch.linalg.svdvals(spaces[0] @ spaces[1].T)
    assert overlap.min() > 0.9  # the rows of both are combinations of the rows of the same A


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_a_checkpoint_of_a_training_is_the_model_of_one_that_is_stopped(
    folder: Path, files: Path, lora: dict[str, int] | None
):
    """The adapters are merged into a copy, and the training goes on as if nothing had happened."""
    scenario = scenario_of(folder, files, lora=lora)
    settings = scenario.training.model_copy(update={"epochs": 2, "schedule": "constant"})
    found: dict[str, torch.Tensor] = {}

    def write(network: torch.nn.Module, trained: object) -> None:
        found.update({name: value.clone() for name, value in network.state_dict().items()})

    model, plain, stopped = (scenario.model() for _ in range(3))
    scenario.train(model, "forget", settings, 1, checkpoints={1: write})
    scenario.train(plain, "forget", settings, 1)
    scenario.train(stopped, "forget", settings.model_copy(update={"epochs": 1}), 1)
    for one, two in ((model.state_dict(), plain.state_dict()), (found, stopped.state_dict())):
        assert {*one} == {*two}
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_whole_run_forgets_and_transformers_opens_the_result(
    folder: Path, files: Path, tmp_path: Path
):
    recipe = Recipe.model_validate(tree(folder, files))
    store = run(recipe, tmp_path / "run")
    scores = json.loads(store.scores.read_text())
    assert scores["original"]["exact_retain"] > 50
    row = {one["method"]: one for one in scores["methods"]}["consensus"]
    assert row["loss_forget"] > scores["original"]["loss_forget"]
    assert 0 <= row["sparsity_parts"]["body"] < row["sparsity_parts"]["embeddings"] <= 100
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = AutoModelForCausalLM.from_pretrained(store.unlearned.parent, local_files_only=True)
    assert made.dtype is torch.float32  # as it was measured, whatever the base was stored in
    assert made.lm_head.weight is made.model.embed_tokens.weight
    AutoTokenizer.from_pretrained(store.unlearned.parent, local_files_only=True)
    answers = json.loads((store.data / "answers.json").read_text())
    assert answers["columns"][:2] == ["original", "retrained"]
    assert len(answers["rows"]) == 6 + 1  # two of forget and holdout, three of retain
    (store.data / "answers.json").write_text(json.dumps(answers).replace("Ada", "<b>Ada"))
    page = report(store).read_text()
    section = page[page.index('<section id="answers"') :].partition("</section>")[0]
    assert "Where does &lt;b&gt;Ada live?" in section
    assert "In a red house." in section
    assert "is damaged" not in page


def test_the_loss_decides_where_few_answers_are_exact():
    criterion = load_recipe("text_records").settings.criterion("keep_retain")
    for exact, scale in ((60.0, 1.0), (40.0, 0.5)):
        rows = [
            {"scale": s, "probability_forget": f, "exact_retain": exact, "loss_retain": loss}
            for s, f, loss in ((0.0, 90.0, 0.2), (0.5, 50.0, 0.25), (1.0, 10.0, 0.26))
        ]
        assert choose(rows, criterion).scale == scale
        aims = [criterion.aim(name, rows[0], None) for name in ("exact_retain", "loss_retain")]
        assert [aim is None for aim in aims] == [exact < 50, exact >= 50]


def test_documents_are_forgotten_while_the_loss_of_the_others_is_kept(
    folder: Path, files: Path, tmp_path: Path
):
    rows = [row | {"animal": row["text"].split()[4]} for row in tiny_llama.STORIES]
    documents = tiny_llama.write_jsonl(tmp_path / "documents.jsonl", rows)
    changes = {
        "data": {"records": str(documents)},
        "split": {"forget": {"column": "animal", "values": ["dog"]}},
        "methods": ["uniform"],
        "retrain": None,
    }
    for criterion, metric, limit in (
        (None, "loss_retain", lambda value: value + 0.0513),
        ("keep_perplexity", "perplexity_retain", lambda value: value / 0.95),
    ):
        own = tree(folder, files, **changes) | {"search": {"criterion": criterion}}
        store = run(Recipe.model_validate(own), tmp_path / "run")
        scale = json.loads(store.scores.read_text())["methods"][0]["scale"]
        sweep = {row["scale"]: row for row in read_rows(store.sweep("uniform"))}
        zero, chosen = sweep[0.0], sweep[scale]
        assert zero["exact_retain"] < 50
        assert chosen["probability_forget"] < zero["probability_forget"]
        assert chosen[metric] <= limit(zero[metric])
        assert any(row[metric] > limit(zero[metric]) for row in sweep.values())


BAD: list[tuple[dict[str, Any], str]] = [
    ({"data": {"records": "no_such_file.jsonl"}}, "no_such_file.jsonl: no such file"),
    ({"split": {"forget": {"column": "author", "values": ["x"]}}}, "no column 'author'"),
    ({"split": {"forget": {"column": "person", "values": ["Zoe"]}}}, "person = 'Zoe'"),
    ({"split": {"forget": {"fraction": 0.5, "column": "person"}}}, "either fraction, or column"),
    ({"tokens": {"length": 8}}, "tokens, wanted at most 8"),
    ({"tokens": {"length": 1000}}, "takes at most 128 tokens"),
    ({"tokens": {"template": "chat"}}, "has no chat template"),
    ({"tokens": {"template": "{answer} {prompt}"}}, "ends with {answer}"),
    ({"model": {"name": "/no/such/model"}}, "no such folder"),
    ({"pool": {"settings": {"augment": {"flip": True}}}}, "texts are not augmented"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_input_is_one_line_before_any_training(
    folder: Path, files: Path, changes: dict[str, Any], message: str
):
    path = files / "recipe.yaml"
    path.write_text(yaml.safe_dump(tree(folder, files, **changes)))
    with pytest.raises(NegMergeError) as caught:
        load_recipe(path).make_scenario().check()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": "a", "answer": " "}], "line 1: 'answer' is empty"),
        ([{"prompt": "a"}], "has no column 'text' or 'answer'"),
        ([{"prompt": "a", "answer": 3}], "'answer' is a int; wanted a text"),
        ([{"prompt": "a", "answer": "b", "wrong": ["b"]}], "is among the wrong ones"),
        ([], "has no records"),
    ],
)
def test_bad_records_are_named(folder: Path, files: Path, rows: list[Any], message: str):
    path = tiny_llama.write_jsonl(files / "bad.jsonl", rows)
    with pytest.raises(NegMergeError, match=message):
        scenario_of(folder, files, data={"records": str(path)}).check()


def test_a_record_in_two_sets_is_an_error(folder: Path, files: Path):
    own = {"forget": str(files / "facts.jsonl"), "retain": str(files / "stories.jsonl")}
    data = own | {"holdout": str(files / "facts.jsonl")}
    with pytest.raises(OptionError, match="both in the forget set and in the holdout set"):
        scenario_of(folder, files, data=data, split={}).check()


TASK = """task: tiny_facts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{prompt}}}}"
doc_to_choice: "{{{{[answer] + wrong}}}}"
doc_to_target: 0
target_delimiter: " "
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def make_task(folder: Path, tmp_path: Path) -> Path:
    rows = [fact | {"wrong": ["In a blue boat.", "On a hill."]} for fact in tiny_llama.FACTS[:8]]
    tiny_llama.write_jsonl(tmp_path / "task.jsonl", rows)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/tiny_facts.yaml").write_text(TASK.format(file=tmp_path / "task.jsonl"))
    return tmp_path / "tasks"


@pytest.mark.slow
def test_tasks_of_lm_eval_are_metrics_of_every_reported_model(
    folder: Path, files: Path, tmp_path: Path
):
    tasks = make_task(folder, tmp_path)
    harness = {"tasks": ["tiny_facts"], "forget": ["tiny_facts"], "folder": str(tasks)}
    scenario = scenario_of(folder, files, harness=harness)
    scenario.check()
    model = scenario.model()
    assert "tiny_facts_acc" not in scenario.measure(model, "choose").values
    scenario.train(model, "train", scenario.training, 0)
    found = scenario.measure(model, "report")
    # The same choice by the sums of log-probabilities, one by one.
    tokenizer, right = scenario.encoder.tokenizer, 0
    model.eval()
    for line in (tmp_path / "task.jsonl").read_text().splitlines():
        row = json.loads(line)
        sums: list[float] = []
        for answer in (row["answer"], *row["wrong"]):
            asked = tokenizer(row["prompt"])["input_ids"]
            ids = tokenizer(f"{row['prompt']} {answer}")["input_ids"]
            with torch.inference_mode():
                logs = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
            sums.append(sum(logs[i - 1, ids[i]].item() for i in range(len(asked), len(ids))))
        right += sums.index(max(sums)) == 0
    assert found.values["tiny_facts_acc"] == pytest.approx(right / 8)
    assert scenario.settings.metric("tiny_facts_acc").better == "lower"
    unchanged = scenario_of(folder, files)
    assert unchanged.scored_on != scenario.scored_on
    assert unchanged.identity == scenario.identity  # no model is trained again
    wrong = scenario_of(folder, files, harness=harness | {"tasks": ["no_such_task"]})
    with pytest.raises(OptionError, match=r"harness.tasks: lm_eval has no task 'no_such_task'"):
        wrong.check()


@pytest.mark.slow
def test_lm_eval_opens_the_unlearned_folder(folder: Path, files: Path, tmp_path: Path):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    store = run(Recipe.model_validate(tree(folder, files, retrain=None)), tmp_path / "run")
    manager = TaskManager(include_path=str(make_task(folder, tmp_path)))
    arguments = f"pretrained={store.unlearned.parent},dtype=float32"
    found = simple_evaluate(
        "hf", model_args=arguments, tasks=["tiny_facts"], task_manager=manager, device="cpu"
    )
    assert found is not None
    assert 0 <= found["results"]["tiny_facts"]["acc,none"] <= 1


def test_rivals_of_texts_run_with_the_others(folder: Path, files: Path, tmp_path: Path):
    rivals = ["gradient_ascent", "gradient_difference", "kl_ascent", "npo", "state_arithmetic"]
    methods = ["consensus", *({"name": name, "options": {"lr": 3e-4}} for name in rivals)]
    methods.append({"name": "finetune", "tune": True})
    changed = tree(folder, files, methods=methods, search={"tries": 2})
    result = run(Recipe.model_validate(changed), tmp_path / "run").result
    rows = {row.method: row for row in result.methods}
    original = result.original.value("loss_forget")
    for name in rivals:
        assert rows[name].value("loss_forget") > original, name
    assert rows["finetune"].value("loss_retain") < 1.5 * result.original.value("loss_retain")
    assert rows["gradient_difference"].splits == "all"
    assert rows["npo"].value("forget_quality") is None  # these records have no wrong answers
    assert 50 < rows["consensus"].agreement <= 100
    recipe = Recipe.model_validate(tree(folder, files, methods=["salun"]))
    with pytest.raises(OptionError, match="'salun': needs a classifier"):
        run(recipe, tmp_path / "salun")


def test_members_that_unlearn_are_told(folder: Path, files: Path, tmp_path: Path):
    pool = {
        "settings": {"batch": 2, "epochs": 3, "label_smoothing": 0.6, "weight_decay": 0.1},
        "grid": {"lr": [1e-3, 2e-3]},
    }
    changed = tree(folder, files, pool=pool, methods=["consensus"], retrain=None)
    warnings = run(Recipe.model_validate(changed), tmp_path / "run").result.warnings
    text = "\n".join(warnings)
    assert "label_smoothing raises the loss" in text
    assert "weight_decay moves weights" in text
    assert "member 1 of 2: its loss on the forget set is" in text


def test_a_retrained_model_and_a_tokenizer_may_be_given(folder: Path, files: Path, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    scenario = scenario_of(folder, files)
    for name in ("train", "retain"):
        model = scenario.model()
        scenario.train(model, name, scenario.training, 0)
        model.save_pretrained(tmp_path / name)
        if name == "retain":
            scenario.encoder.tokenizer.save_pretrained(tmp_path / name)
    given = {
        "model": {"name": str(tmp_path / "train"), "tokenizer": str(folder), "knows": True},
        "retrain": {"name": str(tmp_path / "retain")},
        "search": {"criterion": "oracle", "strategy": "grid", "scales": [0, 0.5, 1]},
    }
    store = run(Recipe.model_validate(tree(folder, files, **given)), tmp_path / "run")
    result = store.result
    assert result.retrain.value("exact_retain") > 50
    assert result.retrain.value("loss_forget") > result.original.value("loss_forget")
    assert (store.unlearned.parent / "tokenizer.json").is_file()
    AutoModelForCausalLM.from_pretrained(store.unlearned.parent)
    other = tiny_llama.make_folder(tmp_path / "untied", tied=False)
    wrong = scenario_of(folder, files, retrain={"name": str(other)})
    with pytest.raises(OptionError, match=r"retrain.name .*'lm_head.weight'"):
        wrong.check()
    no_reference = tree(folder, files, **(given | {"retrain": {}}))
    with pytest.raises(OptionError, match=r"give retrain\.name"):
        run(Recipe.model_validate(no_reference), tmp_path / "none")
