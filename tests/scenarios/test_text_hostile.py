"""The text scenario with bad or odd input: one line before any training, or right results."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_llama
from negmerge.errors import NegMergeError
from negmerge.runs.recipe import Recipe, load_recipe
from negmerge.scenarios.text.harness import check_tasks
from negmerge.scenarios.text.models import ModelFolder
from negmerge.scenarios.text.observing import greedy
from negmerge.scenarios.text.settings import Harness, TextSettings
from negmerge.support.bounds import bounded
from negmerge.text.documents import Record, load_records
from negmerge.text.encoding import Encoder, Sample
from negmerge.text.sets import make_sets
from negmerge.text.settings import Records, TextData, TextSplit, Tokens

FACTS = tiny_llama.FACTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.make_folder(tmp_path_factory.mktemp("llama"))


def changed(folder: Path, out: Path, **fields: Any) -> Path:
    """Copy a model folder with other fields in its config.json."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | fields))
    return out


def check(folder: Path, tmp_path: Path, rows: list[Any] = FACTS, **changes: Any) -> Any:
    tree: dict[str, Any] = {
        "scenario": "text",
        "model": {"name": str(folder)},
        "data": {"records": str(tiny_llama.write_jsonl(tmp_path / "facts.jsonl", rows))},
        "split": {"forget": {"column": "person", "values": ["Ada", "Bob"]}},
        "tokens": {"length": 64},
        "pool": {"grid": {"lr": [1e-3, 2e-3]}},
        "methods": ["consensus"],
    }
    scenario = Recipe.model_validate(tree | changes).make_scenario()
    scenario.check()
    return scenario


def refused(*arguments: Any, **changes: Any) -> str:
    with pytest.raises(NegMergeError) as caught:
        check(*arguments, **changes)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ records


def test_only_a_line_feed_ends_a_record(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    row = {"prompt": "a\x85b", "answer": "c\u2028d"}
    path.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", newline="")
    assert load_records(Records(name=str(path))) == [Record("a\x85b", "c\u2028d")]


@pytest.mark.parametrize("wrong", [3, {"a": "b"}, [["b"]], True])
def test_wrong_answers_of_other_types_are_refused(tmp_path: Path, wrong: Any):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "wrong": wrong}))
    with pytest.raises(NegMergeError, match=r"line 1: 'wrong' has .*; wanted texts"):
        load_records(Records(name=str(path)))


@pytest.mark.parametrize(("character", "name"), [("\ud800", "surrogate"), ("\0", "NUL")])
@pytest.mark.parametrize("column", ["prompt", "answer", "wrong"])
def test_what_is_no_character_is_refused(tmp_path: Path, column: str, character: str, name: str):
    path = tmp_path / "a.jsonl"
    row = {"prompt": "a", "answer": "b", "wrong": "c"} | {column: f"d{character}"}
    path.write_text(json.dumps(row))
    with pytest.raises(NegMergeError, match=f"line 1: '{column}' has a {name}"):
        load_records(Records(name=str(path)))


def test_a_missing_answer_is_called_empty(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "a", "answer": None}))
    with pytest.raises(NegMergeError, match="line 1: 'answer' is empty; remove the record"):
        load_records(Records(name=str(path)))


def test_a_column_has_one_meaning():
    with pytest.raises(ValueError, match="'answer' is named twice"):
        Records.model_validate({"name": "a.jsonl", "columns": {"prompt": "answer"}})


@pytest.mark.parametrize("value", [True, 2, 0.5, "x"])
def test_records_are_chosen_by_values_of_any_kind(tmp_path: Path, value: Any):
    rows = [row | {"old": value if k < 2 else None} for k, row in enumerate(FACTS)]
    records = Records(name=str(tiny_llama.write_jsonl(tmp_path / "facts.jsonl", rows)))
    split = TextSplit.model_validate({"forget": {"column": "old", "values": [value]}})
    sets = make_sets(TextData(records=records), split, 0)
    assert [record.values["person"] for record in sets.forget] == ["Ada", "Bob"]


def test_parquet_with_bytes_that_are_no_text_is_refused(tmp_path: Path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    binary = pa.array([b"\xff\xfe"])
    column = pa.StringArray.from_buffers(1, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(NegMergeError, match=r"a\.parquet: cannot be read as parquet"):
        load_records(Records(name=str(tmp_path / "a.parquet")))


def test_a_wrong_answer_that_is_too_long_is_told_before_any_training(folder: Path, tmp_path: Path):
    rows = [*FACTS[:5], FACTS[5] | {"wrong": ["very " * 100]}, *FACTS[6:]]
    assert "retain, a wrong answer: has" in refused(folder, tmp_path, rows)


def test_a_record_among_the_general_texts_is_an_error(folder: Path, tmp_path: Path):
    general = str(tiny_llama.write_jsonl(tmp_path / "general.jsonl", FACTS[:1]))
    data = {"records": str(tmp_path / "facts.jsonl"), "general": general}
    message = refused(folder, tmp_path, data=data)
    assert "1 records are both in the forget set and in the general set" in message


def test_at_least_one_general_text_is_measured(tmp_path: Path):
    records = Records(name=str(tiny_llama.write_jsonl(tmp_path / "facts.jsonl", FACTS)))
    general = Records(name=str(tiny_llama.write_jsonl(tmp_path / "g.jsonl", [{"text": "a b"}])))
    sets = make_sets(TextData(records=records, general=general), TextSplit(general=0.9), 0)
    assert [record.answer for record in sets.general] == ["a b"]


def test_a_drawn_holdout_set_never_takes_the_named_records_to_forget(tmp_path: Path):
    records = Records(name=str(tiny_llama.write_jsonl(tmp_path / "facts.jsonl", FACTS)))
    split = TextSplit.model_validate(
        {
            "forget": {"column": "person", "values": ["Ada", "Bob"]},
            "holdout": {"fraction": 0.5, "by": "person"},
        }
    )
    for seed in range(5):
        sets = make_sets(TextData(records=records), split, seed)
        assert [record.values["person"] for record in sets.forget] == ["Ada", "Bob"]
        assert len(sets.holdout) == len(sets.retain) == 3


# ------------------------------------------------------------------------------------------- tokens


def test_a_template_has_each_place_once():
    with pytest.raises(ValueError, match="ends with"):
        Tokens(template="{answer}{prompt}{answer}")


def test_texts_without_tokens_to_predict_are_refused(folder: Path):
    tokenizer = ModelFolder(str(folder)).tokenizer()
    tokenizer.backend_tokenizer.post_processor = None  # as a tokenizer without a begin token
    encoder = Encoder(tokenizer, Tokens(template="{prompt}{answer}"), "tiny")
    with pytest.raises(NegMergeError, match=r"forget, record 1: the text '</s>' has no token"):
        encoder.samples([Record(None, "</s>")], "forget")
    with pytest.raises(NegMergeError, match=r"the prompt 'T' has no token of its own"):
        encoder.sample(Record("T", "he end."), "forget, record 1")


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}</s>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_the_date_of_a_chat_template_is_the_same_every_day(folder: Path):
    tokenizer = ModelFolder(str(folder)).tokenizer()
    date = (
        "{% if not date_string is defined %}{% set date_string = strftime_now('%d') %}{% endif %}"
    )
    tokenizer.chat_template = date + "{{ date_string }}" + CHAT
    sample = Encoder(tokenizer, Tokens(template="chat"), "tiny").sample(Record("a", "b"), "x")
    assert tokenizer.decode(sample.ids) == "10 Apr 2025<user>a<assistant>b</s>\n"


ENDLESS = {
    "time": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "memory": "{% set own = namespace(x='a' * 999) %}{% for _ in range(60) %}"
    "{% set own.x = own.x ~ own.x %}{% endfor %}",
}


@pytest.mark.parametrize(("kind", "message"), [("time", "TimeoutError"), ("memory", "MemoryError")])
def test_a_chat_template_without_end_is_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
):
    own = changed(folder, tmp_path / "model")
    (own / "chat_template.jinja").write_text(ENDLESS[kind] + CHAT)
    monkeypatch.setattr("negmerge.text.encoding.bounded", partial(bounded, 0.5, 1 << 26))
    found = refused(own, tmp_path, tokens={"template": "chat", "length": 64})
    assert found.startswith(f"forget, record 1: the chat template fails: {message}")


def test_a_chat_template_with_another_date_is_another_run(folder: Path, tmp_path: Path):
    own = changed(folder, tmp_path / "model")
    (own / "chat_template.jinja").write_text(CHAT)
    scenario = check(own, tmp_path, FACTS, tokens={"template": "chat", "length": 64})
    today = scenario.identity
    scenario.encoded["forget"][0].ids[1] += 1
    assert scenario.identity != today


LLAMA = (
    "{% set system = '' %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}{% endif %}"
    "[{{ date_string }}]{{ system }}" + CHAT
)


def test_a_system_message_comes_before_the_prompt(folder: Path):
    tokenizer = ModelFolder(str(folder)).tokenizer()
    tokenizer.chat_template = LLAMA
    tokens = load_recipe("tofu_forget01").settings.tokens
    sample = Encoder(tokenizer, tokens, "tiny").sample(Record("a", "b"), "x")
    begin = "[10 Apr 2025]You are a helpful assistant.<user>a<assistant>"
    assert tokenizer.decode(sample.ids[: sample.first]) == begin
    assert tokenizer.decode(sample.answer) == "b</s>\n"


def test_a_system_message_that_would_not_be_written_is_an_error(folder: Path, tmp_path: Path):
    own = changed(folder, tmp_path / "model")
    (own / "chat_template.jinja").write_text(
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    tokens = {"template": "chat", "length": 64}
    check(own, tmp_path, tokens=tokens)
    message = refused(own, tmp_path, tokens=tokens | {"system": "Be kind."})
    assert message.startswith("tokens.system: the chat template of")
    for other in ({"system": "Be kind."}, {"template": "chat", "system": " "}):
        with pytest.raises(ValueError, match=r"system: got .*; wanted a text, and only with"):
            Tokens.model_validate(other)


def test_a_recipe_without_a_system_message_has_the_identity_of_before(folder: Path, tmp_path: Path):
    assert check(folder, tmp_path).identity[2] == {"template": "{prompt} {answer}", "length": 64}


def test_long_documents_do_not_warn(folder: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = ModelFolder(str(folder)).tokenizer()
    tokenizer.model_max_length = 16
    assert len(Encoder(tokenizer, Tokens(length=16), "a").samples([Record(None, "a b " * 40)], "x"))
    assert not caplog.records


# ------------------------------------------------------------------------------------------- models


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 0}, "cannot open the"),
        ({"max_position_embeddings": "x"}, "cannot open the"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "cannot open the model"),
        ({"hidden_size": 64}, "do not fit config.json: mismatched 'model"),
        ({"num_hidden_layers": 3}, "do not fit config.json: missing 'model"),
    ],
)
def test_a_hostile_configuration_is_one_line(
    folder: Path,
    tmp_path: Path,
    fields: dict[str, Any],
    message: str,
    capfd: pytest.CaptureFixture[str],
):
    assert message in refused(changed(folder, tmp_path / "model", **fields), tmp_path)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", b""),
        ("model.safetensors", b"x" * 99),
        ("tokenizer_config.json", b"[]"),
    ],
)
def test_a_broken_file_of_a_model_is_one_line(
    folder: Path, tmp_path: Path, file: str, content: bytes
):
    broken = changed(folder, tmp_path / "model")
    (broken / file).write_bytes(content)
    assert "transformers cannot open the" in refused(broken, tmp_path)


def test_a_model_with_nan_is_told_before_any_training(folder: Path, tmp_path: Path):
    own = changed(folder, tmp_path / "model")
    tensors = load_file(own / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, own / "model.safetensors", {"format": "pt"})
    assert "tensor 'model.norm.weight' has NaN" in refused(own, tmp_path)


def test_code_of_a_folder_never_runs(folder: Path, tmp_path: Path):
    names = {"AutoConfig": "evil.A", "AutoModelForCausalLM": "evil.B"}
    for kind in ("llama", "evil"):
        own = changed(folder, tmp_path / kind, auto_map=names, model_type=kind)
        (own / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
        if kind == "llama":
            check(own, tmp_path)
        else:
            assert "custom code" in refused(own, tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_broken_retrained_model_is_told_before_any_training(folder: Path, tmp_path: Path):
    broken = changed(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"x" * 99)
    assert "cannot open the model" in refused(folder, tmp_path, retrain={"name": str(broken)})
    (broken / "adapter_config.json").write_text("{}")
    message = refused(folder, tmp_path, retrain={"name": str(broken)})
    assert message.startswith("retrain.name ")
    message = refused(folder, tmp_path, model={"name": str(folder), "tokenizer": "/no/such"})
    assert message.startswith("model.tokenizer '/no/such': no such folder")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nope", "nope"),
        ("input_layernorm", "not supported"),
        ("lm_head", "'lm_head' has the same weights as another layer"),
        ("embed_tokens", "'embed_tokens' has the same weights as another layer"),
    ],
)
def test_wrong_targets_of_lora_are_told_before_any_training(
    folder: Path, tmp_path: Path, target: str, message: str
):
    found = refused(folder, tmp_path, lora={"targets": [target]})
    assert found.startswith("lora.targets: ")
    assert message in found


def small_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT2LMHeadModel(config).eval()


def test_greedy_answers_end_where_the_model_takes_no_more_tokens():
    ids = np.arange(16)
    samples = [Sample(ids, 1), Sample(ids, 15), Sample(ids[:8], 6), Sample(ids[:4], 1)]
    with torch.inference_mode():
        together = greedy(small_gpt2(), samples, 49)
        alone = [greedy(small_gpt2(), [sample], 49)[0] for sample in samples]
    assert [one.tolist() for one in together] == [one.tolist() for one in alone]
    assert [len(one) for one in together] == [15, 1, 3, 4]


# ------------------------------------------------------------------------------------------ harness


def test_tasks_are_checked_before_any_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Tasks:
        """Stands for the index of lm_eval, which takes many seconds."""

        def match_tasks(self, names: list[str]) -> list[str]:
            return names

        def load(self, names: list[str]) -> None:
            if names == ["broken"]:
                raise RuntimeError("no\ndata")

    monkeypatch.setattr("negmerge.scenarios.text.harness._index", lambda *_: Tasks())
    check_tasks(Harness(tasks=("a",), forget=("a",)))
    with pytest.raises(NegMergeError, match=r"harness.forget: 'b' is not among harness.tasks"):
        check_tasks(Harness(tasks=("a",), forget=("b",)))
    with pytest.raises(NegMergeError, match=r"cannot open 'broken': RuntimeError: no data"):
        check_tasks(Harness(tasks=("a", "broken")))
    with pytest.raises(NegMergeError, match=r"harness.folder: '/no/such': no such folder"):
        check_tasks(Harness(tasks=("a",), folder="/no/such"))


def test_tasks_to_forget_are_found_by_the_names_of_their_metrics():
    settings = TextSettings.model_validate(
        {"data": {"records": "persons"}, "harness": {"tasks": ["A-b"], "forget": ["A-b"]}}
    )
    assert settings.metric("a_b_acc").better == "lower"
