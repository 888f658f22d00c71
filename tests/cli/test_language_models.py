"""Models and adapters as transformers and peft write them: merged, applied, inspected, loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import negmerge as nm
from running import negmerge

pytestmark = [  # warnings of transformers and peft about each other
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SIZES = {"vocab_size": 60, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 2}
LLAMA = SIZES | HEADS | {"num_key_value_heads": 1, "max_position_embeddings": 32}
TOKENS = torch.arange(12)[None]


def llama(seed: int = 0, **more) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**LLAMA, **more)).eval()


def gpt2(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 60, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes)).eval()


def with_adapter(model, folder: Path, seed: int, **fields) -> torch.nn.Module:
    """Save a random adapter of a model; return the model with the adapter merged."""
    torch.manual_seed(7)  # A is the same for all
    tuned = get_peft_model(model, LoraConfig(**({"r": 4, "lora_alpha": 8} | fields)))
    draw = torch.Generator().manual_seed(seed)
    for name, weight in tuned.named_parameters():
        if "lora_B" in name or "embedding_A" in name:
            weight.data = 0.1 * torch.randn(weight.shape, generator=draw, dtype=weight.dtype)
        elif weight.requires_grad and "lora" not in name:
            weight.data += 0.1
    tuned.save_pretrained(folder)
    return tuned.merge_and_unload()


def make_pool(place: Path, make, dtype=torch.float32, **fields) -> tuple[list[str], list[str]]:
    """A base, three adapters and the models that peft makes of them."""
    make().to(dtype).save_pretrained(place / "base")
    for k in range(3):
        model = with_adapter(make().to(dtype).float(), place / f"adapter{k}", k, **fields)
        model.save_pretrained(place / f"model{k}")
    return [f"adapter{k}" for k in range(3)], [f"model{k}" for k in range(3)]


def close(one: nm.TaskVector, two: nm.TaskVector, tolerance: float) -> bool:
    assert sorted(one) == sorted(two)
    return all(torch.allclose(one[name], two[name], rtol=0, atol=tolerance) for name in one)


FORMS = {
    "all": (llama, {"target_modules": "all-linear"}),
    "rslora": (llama, {"target_modules": ["q_proj", "v_proj"], "use_rslora": True}),
    "patterns": (
        llama,
        {
            "target_modules": ["q_proj", "up_proj"],
            "rank_pattern": {"up_proj": 2},
            "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": 3},
        },
    ),
    "saved": (llama, {"target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]}),
    "embedding": (llama, {"target_modules": ["embed_tokens", "q_proj"]}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True, "bias": "all"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_adapters_mean_what_peft_makes_of_them(tmp_path, form):
    make, fields = FORMS[form]
    adapters, models = make_pool(tmp_path, make, **fields)
    one = nm.merge(tmp_path / "base", [tmp_path / a for a in adapters], "uniform")
    two = nm.merge(tmp_path / "base", [tmp_path / m for m in models], "uniform")
    assert one.nonzero
    assert close(one, two, 1e-6)


def test_a_bfloat16_base(tmp_path):
    adapters, models = make_pool(tmp_path, llama, torch.bfloat16, target_modules="all-linear")
    assert load_file(tmp_path / "base/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    one = nm.merge(tmp_path / "base", [tmp_path / a for a in adapters], "uniform")
    two = nm.merge(tmp_path / "base", [tmp_path / m for m in models], "uniform")
    assert one.nonzero
    assert close(one, two, 1e-6)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("pool")
    make_pool(place, lambda: llama(tie_word_embeddings=True), target_modules="all-linear")
    pool = [f"adapter{k}" for k in range(3)]
    negmerge(place, "merge", "base", *pool, "--rule", "uniform", "-o", "p.safetensors")
    return place


def test_inspect_explains_an_adapter(place):
    found = json.loads(negmerge(place, "inspect", "adapter0", "--json")[0])
    assert found["kind"] == "adapter"
    module = found["modules"]["model.layers.0.mlp.up_proj"]
    wanted = {"rank": 4, "alpha": 8, "scaling": 2.0, "inputs": 16, "outputs": 24, "dtype": "F32"}
    assert module == wanted
    assert len(found["modules"]) == 14
    text, _ = negmerge(place, "inspect", "adapter0")
    assert "model.layers.1.self_attn.q_proj" in text
    assert "LoRA" in text


def test_one_pass_to_a_model_that_transformers_loads(place):
    pool = [f"adapter{k}" for k in range(3)]
    words = ["merge", "base", *pool, "--rule", "uniform", "--negate", "0.5", "-o", "out"]
    negmerge(place, *words)
    negmerge(place, "apply", "base", "p.safetensors", "--negate", "0.5", "-o", "out2")
    weights = [(place / o / "model.safetensors").read_bytes() for o in ("out", "out2")]
    assert weights[0] == weights[1]
    model = LlamaForCausalLM.from_pretrained(place / "out").eval()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert (place / "out" / "generation_config.json").exists()


@pytest.mark.parametrize("rank", [2, 12, 16])
def test_a_patch_as_an_adapter(place, rank):
    out = f"lora{rank}"
    words = ["adapter", "p.safetensors", "--rank", str(rank), "--negate", "0.5", "-o", out]
    done = json.loads(negmerge(place, *words, "--json")[0])
    tau = nm.TaskVector.load(place / "p.safetensors")
    negmerge(place, "apply", "base", "p.safetensors", "--negate", "0.5", "-o", f"full{rank}")
    wanted = LlamaForCausalLM.from_pretrained(place / f"full{rank}").state_dict()
    base = LlamaForCausalLM.from_pretrained(place / "base")
    original = {name: value.clone() for name, value in base.state_dict().items()}
    loaded = PeftModel.from_pretrained(base, place / out).merge_and_unload().state_dict()
    lost = whole = 0.0
    for name in tau:
        missing = float((loaded[name].double() - wanted[name].double()).norm())
        size = float((wanted[name].double() - original[name].double()).norm())
        lost, whole = lost + missing**2, whole + size**2
        if size:
            assert missing / size == pytest.approx(done["errors"][name], abs=2e-6)
    assert (lost / whole) ** 0.5 == pytest.approx(done["error"], abs=2e-6)
    # The mean of three adapters with one A of rank 4 has rank 4.
    assert done["error"] > 0.1 if rank == 2 else done["error"] < 1e-5
    assert not done["left_out"]


def test_an_adapter_forgets_as_the_model_does(place):
    negmerge(place, "adapter", "p.safetensors", "--rank", "4", "--add", "1", "-o", "added")
    again = nm.merge(place / "base", [place / "added"], "uniform")
    tau = nm.TaskVector.load(place / "p.safetensors")
    assert close(again, tau, 1e-6)


def test_gpt2_as_an_adapter(tmp_path):
    gpt2().save_pretrained(tmp_path / "base")
    state = load_file(tmp_path / "base/model.safetensors")
    changed = {n: v + 0.01 if n.endswith("c_attn.weight") else v for n, v in state.items()}
    changed["transformer.wpe.weight"] = changed["transformer.wpe.weight"] + 0.01
    tau = nm.merge(state, [changed])
    done = nm.save_adapter(tau, tmp_path / "lora", 2)
    assert done.error < 1e-5
    loaded = PeftModel.from_pretrained(gpt2(), tmp_path / "lora").merge_and_unload().state_dict()
    for name, value in changed.items():
        assert torch.allclose(loaded[name], value, atol=1e-6)


def test_what_cannot_be_an_adapter_is_left_out_and_counted(tmp_path):
    base = {"q.weight": torch.zeros(4, 4), "norm.weight": torch.zeros(4)}
    model = {"q.weight": torch.eye(4), "norm.weight": torch.full((4,), 2.0)}
    nm.merge(base, [model], out=tmp_path / "p.safetensors")
    words = ["adapter", "p.safetensors", "--rank", "3", "--add", "1", "-o", "lora"]
    text, said = negmerge(tmp_path, *words)
    # Missing: one of four equal singular values, and the norm: (1 + 16) of (4 + 16).
    assert "relative error 0.922 (at most 1, norm.weight)" in text
    assert "1 tensors are no matrices of modules and are left out, first norm.weight" in said


@pytest.mark.parametrize("bad", [["--rank", "0"], ["--rank", "-1"]])
def test_a_bad_rank(place, bad):
    words = ["adapter", "p.safetensors", *bad, "--negate", "1", "-o", "bad"]
    _, said = negmerge(place, *words, code=2)
    assert "rank: got" in said
    assert not (place / "bad").exists()


def test_an_adapter_for_a_tied_head(place):
    tied = llama(tie_word_embeddings=True)
    with_adapter(tied, place / "head", 1, target_modules=["lm_head", "q_proj"])
    _, said = negmerge(place, "merge", "base", "head", "-o", "q.safetensors", code=2)
    assert "lm_head" in said


# ------------------------------------------------------------------------------ images and text


def clip(seed: int = 0) -> CLIPModel:
    torch.manual_seed(seed)
    text = SIZES | HEADS | {"max_position_embeddings": 16}
    vision = SIZES | HEADS | {"image_size": 8, "patch_size": 4}
    del vision["vocab_size"]
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=12)
    return CLIPModel(config).eval()


def llava(seed: int = 0) -> LlavaForConditionalGeneration:
    torch.manual_seed(seed)
    vision = SIZES | HEADS | {"image_size": 8, "patch_size": 4}
    del vision["vocab_size"]
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**vision),
        text_config=LlamaConfig(**LLAMA),
        image_token_index=59,
        image_seq_length=4,
    )
    return LlavaForConditionalGeneration(config).eval()


@pytest.mark.parametrize("left_out", ["vision", None])
@pytest.mark.parametrize("make", [clip, llava])
def test_models_of_images_and_text(tmp_path, make, left_out):
    make().save_pretrained(tmp_path / "base")
    for k in range(3):
        model, other = make(), make(k + 1).state_dict()
        for name, value in model.state_dict().items():
            if value.is_floating_point():
                value += 0.1 * other[name]
        model.save_pretrained(tmp_path / f"m{k}")
    given = [] if left_out is None else ["--exclude", f"*{left_out}*"]
    pool = [f"m{k}" for k in range(3)]
    negmerge(tmp_path, "merge", "base", *pool, *given, "-o", "p.safetensors")
    found = json.loads(negmerge(tmp_path, "inspect", "p.safetensors", "--json")[0])
    assert found["nonzero"]
    towers = {
        part for part in ("vision", "text", "language") for n in found["tensors"] if part in n
    }
    assert ("vision" in towers) == (left_out is None)
    assert towers & {"text", "language"}
    assert json.loads(negmerge(tmp_path, "inspect", "base", "--json")[0])["kind"] == "checkpoint"
    negmerge(tmp_path, "apply", "base", "p.safetensors", "--negate", "0.5", "-o", "out")
    before, after = make().state_dict(), type(make()).from_pretrained(tmp_path / "out").state_dict()
    assert before.keys() == after.keys()
    for name, value in before.items():
        if value.is_floating_point() and value.ndim == 2:
            assert torch.equal(value, after[name]) == ("vision" in name and bool(left_out)), name


def test_an_adapter_of_a_model_of_images_and_text(tmp_path):
    fields = {"target_modules": r".*language_model.*\.(q|v)_proj"}
    adapters, models = make_pool(tmp_path, llava, **fields)
    one = nm.merge(tmp_path / "base", [tmp_path / a for a in adapters], "uniform")
    two = nm.merge(tmp_path / "base", [tmp_path / m for m in models], "uniform")
    assert close(one, two, 1e-6)
    assert one.nonzero


def test_a_whole_model_beside_an_adapter_configuration(place):
    shutil.copytree(place / "base", place / "both")
    shutil.copy(place / "adapter0/adapter_config.json", place / "both")
    found = json.loads(negmerge(place, "inspect", "both", "--json")[0])
    assert found["kind"] == "checkpoint"
