"""Where a CLIP may come from, and the heads that are built for it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import stores
from clips import CONFIG, make_clip, random_clip
from negmerge.errors import NegMergeError
from negmerge.runs.recipe import load_recipe, shipped
from negmerge.scenarios.clip.classifier import ClipClassifier, freeze_parts
from negmerge.scenarios.clip.config import check_config
from negmerge.scenarios.clip.heads import zero_shot_head
from negmerge.scenarios.clip.library import open_clip
from negmerge.scenarios.clip.pretrained import ASSETS, ClipSource
from negmerge.scenarios.clip.prompts import PLAIN, prompts_of
from negmerge.scenarios.clip.tokenizer import folder_tokenizer
from negmerge.training.weights import load_tensors, save_tensors

CLIPS = [name for name in shipped() if load_recipe(name).scenario == "clip"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_clip(tmp_path_factory.mktemp("clips") / "clip")


def test_a_folder_is_loaded_as_open_clip_loads_it(folder: Path):
    source = ClipSource(str(folder))
    theirs = open_clip().create_model(f"local-dir:{folder}").state_dict()
    ours = source.load().state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert source.size == 16
    assert source.mean == (0.5, 0.5, 0.5)
    assert source.has_text


def test_a_model_at_a_url_is_the_same_model(folder: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_SCRATCH", str(tmp_path / "scratch"))
    fs = stores.empty()
    stores.upload(folder, "watched://b/clip")
    fs.pipe_file("/b/clip/open_clip_pytorch_model.bin", b"a pickle")
    source = ClipSource("watched://b/clip")
    assert source.fingerprint == ClipSource(str(folder)).fingerprint
    assert "/b/clip/open_clip_pytorch_model.bin" not in {path for path, *_ in fs.reads}
    (weights,) = folder.glob("*model.safetensors")
    stores.upload(weights, "watched://b/weights.safetensors")
    given = ClipSource("ViT-B-32", "watched://b/weights.safetensors")
    assert given.weights.read_bytes() == weights.read_bytes()
    with pytest.raises(NegMergeError, match=r"^watched://b/missing: no such file or folder"):
        ClipSource("watched://b/missing").config  # noqa: B018


READING = """
import sys
from negmerge.scenarios.clip.pretrained import ClipSource
source = ClipSource(sys.argv[1])
print(source.size, source.mean, source.std, source.fit, source.interpolation, sep="|")
print("open_clip" in sys.modules)
"""


def test_reading_a_configuration_does_not_import_open_clip(tmp_path: Path):
    """Its import takes seconds, 10 on a busy machine; means that are not given are OpenAI's."""
    config = tmp_path / "open_clip_config.json"
    config.write_text(json.dumps({"model_cfg": CONFIG["model_cfg"]}))
    done = subprocess.run(
        [sys.executable, "-c", READING, str(tmp_path)], capture_output=True, text=True, check=True
    )
    told, imported = done.stdout.splitlines()
    library = open_clip()
    mean, std = library.OPENAI_DATASET_MEAN, library.OPENAI_DATASET_STD
    assert told == f"16|{mean}|{std}|crop|bicubic"
    assert imported == "False"


def test_the_head_is_open_clips(folder: Path):
    names = ["polka_dotted", "banded"]
    prompts = prompts_of("dtd")
    ours = zero_shot_head(ClipSource(str(folder)), "dtd", names, prompts)
    clip = open_clip().create_model(f"local-dir:{folder}").eval()
    tokenizer = open_clip().get_tokenizer(f"local-dir:{folder}")
    theirs = open_clip().build_zero_shot_classifier(
        clip, tokenizer, ["polka dotted", "banded"], prompts.templates
    )
    assert torch.allclose(ours, clip.logit_scale.exp() * theirs.T, atol=1e-4)


def test_only_the_image_tower_with_ready_heads(folder: Path, tmp_path: Path):
    """A folder may be without a text side; half precision becomes single."""
    copy = tmp_path / "image"
    shutil.copytree(folder, copy)
    weights, _ = load_tensors(folder / "open_clip_model.safetensors")
    image = {k: v.half() for k, v in weights.items() if k.startswith("visual.")}
    save_tensors(copy / "open_clip_model.safetensors", image, {})
    source = ClipSource(str(copy))
    assert not source.has_text
    with pytest.raises(NegMergeError, match=r"no text encoder .*'dtd'"):
        zero_shot_head(source, "dtd", ["a", "b"], PLAIN)
    heads = {"dtd": torch.randn(2, 16), "logit_scale": torch.tensor(2.0)}
    about = {"classes": json.dumps({"dtd": ["a", "b"]})}
    save_tensors(copy / "class_embeddings.safetensors", heads, about)
    source = ClipSource(str(copy))
    head = zero_shot_head(source, "dtd", ["a", "b"], PLAIN)
    assert torch.allclose(head.norm(dim=1), torch.tensor(2.0).exp())
    same = zero_shot_head(source, "a copy of it", ["a", "b"], PLAIN)
    assert torch.equal(head, same), "found by its classes"
    with pytest.raises(NegMergeError, match="has other classes"):
        zero_shot_head(source, "dtd", ["b", "a"], PLAIN)
    network = ClipClassifier(
        source.without_text(source.load()), {"forget": head}, (0.5,) * 3, (0.5,) * 3
    )
    assert {name.split(".")[0] for name in network.state_dict()} == {"visual"}
    assert {t.dtype for t in network.state_dict().values()} == {torch.float32}


def test_a_file_for_an_architecture(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(open_clip().factory._MODEL_CONFIGS, "tiny", CONFIG["model_cfg"])
    quick = CONFIG["model_cfg"] | {"quick_gelu": True}
    monkeypatch.setitem(open_clip().factory._MODEL_CONFIGS, "tiny-quickgelu", quick)
    weights = random_clip().state_dict()
    path = tmp_path / "own.safetensors"
    save_tensors(path, weights, {})
    loaded = ClipSource("tiny", str(path)).load().state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    openai = weights | {name: torch.tensor(1) for name in ("input_resolution", "vocab_size")}
    save_tensors(path, openai, {})
    with pytest.raises(NegMergeError, match=r"QuickGELU; set model\.name to tiny-quick"):
        ClipSource("tiny", str(path)).load()
    assert ClipSource("tiny-quickgelu", str(path)).load().visual is not None
    wrong = weights | {"visual.proj": torch.zeros(3, 3)}
    save_tensors(path, wrong, {})
    with pytest.raises(NegMergeError, match=r"'visual.proj': the file has shape \(3, 3\)"):
        ClipSource("tiny", str(path)).load()
    save_tensors(path, {k: v for k, v in weights.items() if k != "ln_final.bias"}, {})
    with pytest.raises(NegMergeError, match=r"'ln_final\.bias': the file has no such tensor"):
        ClipSource("tiny", str(path)).load()


def test_a_file_of_an_architecture_with_both_activations_is_warned_of():
    source = ClipSource("ViT-B-32", "own.safetensors")
    assert not source.quick_gelu
    assert "set model.name to ViT-B-32-quickgelu" in source.notes[0]
    assert not ClipSource("ViT-B-32", "laion2b_s34b_b79k").notes
    (switched,) = ClipSource("ViT-B-32", "openai").notes
    assert "uses QuickGELU" in switched
    sure = ClipSource("ViT-B-32-quickgelu", "own.safetensors")
    assert sure.quick_gelu
    assert not sure.notes


def test_a_coca(tmp_path: Path):
    """Its encoder gives tokens too, and it has a decoder of captions: neither is ours."""
    config = json.loads(json.dumps(CONFIG))
    del config["preprocess_cfg"]  # open_clip does without
    model = config["model_cfg"]
    model["vision_cfg"] |= {"output_tokens": True, "attentional_pool": True, "attn_pooler_heads": 2}
    model["text_cfg"] |= {"embed_cls": True, "output_tokens": True, "context_length": 31}
    model |= {"custom_text": True}
    model["multimodal_cfg"] = model["text_cfg"] | {"context_length": 32}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    source = ClipSource(str(tmp_path))
    save_tensors(tmp_path / "open_clip_model.safetensors", source.build().state_dict(), {})
    source = ClipSource(str(tmp_path))
    head = zero_shot_head(source, "dtd", ["a", "b"], PLAIN)
    clip = source.without_text(source.load())
    network = ClipClassifier(clip, {"forget": head}, source.mean, source.std)
    with torch.inference_mode():
        assert network.eval()(torch.rand(3, 3, 16, 16)).shape == (3, 2)
    assert {name.split(".")[0] for name in network.state_dict()} == {"visual", "logit_scale"}


@pytest.mark.parametrize("act", ["gelu", "quick_gelu"])
def test_a_folder_of_transformers(act, tmp_path: Path):
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "hidden_act": act}
    tower["num_attention_heads"] = 2
    config = CLIPConfig(
        text_config=tower | {"vocab_size": 49408, "eos_token_id": 49407},
        vision_config=tower | {"image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    torch.manual_seed(0)
    theirs = CLIPModel(config).eval()
    theirs.save_pretrained(tmp_path / "clip")
    source = ClipSource(str(tmp_path / "clip"))
    assert source.quick_gelu == (act == "quick_gelu")
    ours = source.load().eval()
    pixels = torch.rand(3, 3, 16, 16)
    tokens = source.tokenizer()(["a photo of a cat.", "a dog"])
    with torch.inference_mode():
        image = theirs.vision_model(pixels).pooler_output
        assert torch.allclose(ours.encode_image(pixels), theirs.visual_projection(image), atol=1e-5)
        mask = (torch.arange(77) <= tokens.argmax(1, keepdim=True)).long()
        text = theirs.text_model(tokens, attention_mask=mask).pooler_output
        assert torch.allclose(ours.encode_text(tokens), theirs.text_projection(text), atol=1e-5)


def own_vocabulary() -> Any:
    """A fast tokenizer of transformers whose vocabulary is not OpenAI's, its end not the last."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<unk>", "<s>", "</s>", "a", "photo", "of", "cat", "dog", "."]
    tokenizer = Tokenizer(models.WordLevel({w: k for k, w in enumerate(words)}, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("<s>", 2), ("</s>", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=ends
    )
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_a_folder_of_transformers_with_a_tokenizer_of_its_own(tmp_path: Path):
    """Its tokens, where it ends a sentence, and its layer norms are those of transformers."""
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "layer_norm_eps": 0.01}
    config = CLIPConfig(
        text_config=tower | {"vocab_size": 10, "eos_token_id": 3, "max_position_embeddings": 12},
        vision_config=tower | {"image_size": 16, "patch_size": 8},
        projection_dim=12,
    )
    torch.manual_seed(0)
    theirs, words = CLIPModel(config).eval(), own_vocabulary()
    theirs.save_pretrained(tmp_path / "clip")
    words.save_pretrained(tmp_path / "clip")
    texts, pixels = ["a photo of a cat .", "dog"], torch.rand(3, 3, 16, 16)
    wanted = words(texts, max_length=12, padding="max_length", return_tensors="pt").input_ids
    source = ClipSource(str(tmp_path / "clip"))
    (tmp_path / "saved").mkdir()
    source.save(tmp_path / "saved", {})
    with torch.inference_mode():
        image = theirs.visual_projection(theirs.vision_model(pixels).pooler_output)
        text = theirs.text_projection(theirs.text_model(wanted).pooler_output)
        for opened in (source, ClipSource(str(tmp_path / "saved"))):
            assert torch.equal(opened.tokenizer()(texts), wanted)
            clip = opened.load().eval()
            assert torch.allclose(clip.encode_image(pixels), image, atol=1e-5)
            assert torch.allclose(clip.encode_text(wanted), text, atol=1e-5)
    saved = open_clip().get_tokenizer(f"local-dir:{tmp_path / 'saved'}")
    assert torch.equal(saved(texts), wanted)


def test_a_vocabulary_without_its_rules_is_refused(tmp_path: Path):
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(NegMergeError, match=r"has no tokenizer.json, but .* save_pretrained"):
        ClipSource(str(tmp_path)).tokenizer()


def test_openais_own_vocabulary_in_a_folder_of_transformers(tmp_path: Path):
    """The usual tokenizer is taken where the folder's is the same one."""
    from transformers import CLIPConfig

    CLIPConfig().save_pretrained(tmp_path)
    usual = open_clip().SimpleTokenizer()
    model = {"type": "BPE", "vocab": usual.encoder, "merges": []}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    assert type(ClipSource(str(tmp_path)).tokenizer()) is type(usual)


def test_images_are_shown_as_transformers_shows_them(tmp_path: Path):
    from transformers import CLIPConfig, CLIPImageProcessor

    CLIPConfig().save_pretrained(tmp_path)
    source = ClipSource(str(tmp_path))
    assert (source.fit, source.interpolation) == ("crop", "bicubic")
    assert source.mean == pytest.approx((0.4815, 0.4578, 0.4082), abs=1e-4)
    own = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.5, 0.5], "resample": 2}
    CLIPImageProcessor(**own).save_pretrained(tmp_path)
    source = ClipSource(str(tmp_path))
    assert (source.mean, source.std) == ((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
    assert (source.fit, source.interpolation) == ("crop", "bilinear")
    CLIPImageProcessor(size={"height": 224, "width": 224}).save_pretrained(tmp_path)
    assert ClipSource(str(tmp_path)).fit == "squash"
    CLIPImageProcessor(size={"shortest_edge": 256}).save_pretrained(tmp_path)
    with pytest.raises(NegMergeError, match=r"size: got .*256.*, wanted the size of the crop"):
        ClipSource(str(tmp_path)).mean  # noqa: B018
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(NegMergeError, match="model_type: got 'bert', wanted 'clip'"):
        ClipSource(str(tmp_path)).mean  # noqa: B018


@pytest.mark.parametrize(
    ("name", "pretrained", "message"),
    [
        ("ViT-B-32-quickgelu", "laion2b_s34b_b79k", "wanted a tag"),
        ("ViT-B-32", "opnai", "wanted a tag of ViT-B-32 .*openai"),
        ("ViT-B-32", "weights.pt", "with `negmerge convert`"),
        ("nothing/here", None, "the Hub cannot be asked .* no such file or folder here"),
    ],
)
def test_sources_that_are_not_there(name, pretrained, message):
    with pytest.raises(NegMergeError, match=message):
        ClipSource(name, pretrained).fingerprint  # noqa: B018


def test_without_a_network_a_tag_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(NegMergeError, match=r"openai: cannot be downloaded: .*name a .safetensors"):
        ClipSource("ViT-B-32", "openai").weights  # noqa: B018


def test_a_resnet_has_no_attention_to_freeze():
    small = {"embed_dim": 8, "text_cfg": CONFIG["model_cfg"]["text_cfg"]}
    small["vision_cfg"] = {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 8}
    network = ClipClassifier(open_clip().CLIP(**small), {}, (0.5,) * 3, (0.5,) * 3)
    with pytest.raises(NegMergeError, match="no attention layers"):
        freeze_parts(network, "attention")
    freeze_parts(network, "nothing")


@pytest.mark.parametrize("name", CLIPS)
def test_every_shipped_clip_recipe_names_what_is_there(name):
    recipe = load_recipe(name)
    model, clip = recipe.settings.model, recipe.settings.clip
    assert recipe.criterion == "keep_retain"
    assert "retrain" not in yaml.safe_load(recipe.dump())
    if not name.startswith("desk_"):
        assert model.name in open_clip().list_models()
        assert open_clip().get_pretrained_cfg(model.name, clip.pretrained)
        assert clip.control.name == "imagenet"


def test_every_architecture_of_open_clip_may_be_said_by_a_folder():
    """All but those whose text side is a model of the Hub."""
    for name in open_clip().list_models():
        tree = {"model_cfg": open_clip().get_model_config(name)}
        if "hf_model_name" in tree["model_cfg"]["text_cfg"]:
            with pytest.raises(NegMergeError, match=r"text_cfg.hf_\w+: "):
                check_config(Path(name), tree)
        else:
            check_config(Path(name), tree)


def test_the_tokenizer_of_a_folder_is_that_of_transformers(tmp_path: Path):
    from transformers import AutoTokenizer, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "##s", "."]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "bert")
    desk = ASSETS / "desk_clip"
    for folder, texts in (
        (tmp_path / "bert", ["A photo of cats.", "photo dog"]),
        (desk, ["a photo of the cat.", "a photo of the number: 7."]),
    ):
        theirs = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        options = {"max_length": 12, "padding": "max_length", "truncation": True}
        wanted = theirs([text.lower() for text in texts], return_tensors="pt", **options).input_ids
        text = {"context_length": 12, "tokenizer_kwargs": {"clean": "lower"}}
        assert torch.equal(folder_tokenizer(folder, text)(texts), wanted)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("tokenizer.json", "{}", "tokenizer.json: is not a tokenizer"),
        ("tokenizer_config.json", "[", "tokenizer_config.json: content is not valid JSON"),
        (
            "tokenizer_config.json",
            "[]",
            "tokenizer_config.json: content is a list, wanted an object",
        ),
        ("tokenizer_config.json", '{"pad_token": 5}', "pad_token: got '5', wanted text"),
        ("special_tokens_map.json", '{"auto_map": ["a"]}', "auto_map: the folder names Python"),
    ],
)
def test_a_damaged_tokenizer_is_one_line(file, content, message, tmp_path: Path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ASSETS / "desk_clip" / name, tmp_path / name)
    (tmp_path / file).write_text(content)
    with pytest.raises(NegMergeError, match=message):
        folder_tokenizer(tmp_path, {})
