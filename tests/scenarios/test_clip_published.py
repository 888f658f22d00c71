"""What the paper's numbers and the protocol fix about CLIP, from the architecture alone."""

from __future__ import annotations

import pytest
import torch

from negmerge.errors import NegMergeError
from negmerge.runs.recipe import load_recipe
from negmerge.scenarios.clip.classifier import ClipClassifier, count_frozen, freeze_parts
from negmerge.scenarios.clip.library import open_clip
from negmerge.scenarios.clip.pretrained import ClipSource
from negmerge.scenarios.clip.prompts import SIGNS, prompts, prompts_of
from negmerge.vision.datasets import datasets
from negmerge.vision.splits import held_out_of


@pytest.mark.parametrize(
    ("name", "frozen", "elements", "percent"),
    [
        ("ViT-B-32", 53_947_905, 113_448_705, 47.55),
        ("ViT-B-16", 53_947_905, 111_792_129, 48.26),
        ("ViT-L-14", 139_357_441, 342_562_049, 40.68),
    ],
)
def test_the_untouched_share_is_the_papers(name, frozen, elements, percent):
    """Table C2 has 47.55 % zeros for every dense rule on ViT-B/32: what training leaves."""
    with torch.device("meta"):
        clip = open_clip().CLIP(**open_clip().get_model_config(name))
        network = ClipClassifier(clip, {}, (0.5,) * 3, (0.5,) * 3)
    freeze_parts(network, "attention")
    assert count_frozen(network) == {"elements": elements, "frozen": frozen}
    assert round(100 * frozen / elements, 2) == percent


def test_without_freezing_only_the_text_side_stays():
    with torch.device("meta"):
        clip = open_clip().CLIP(**open_clip().get_model_config("ViT-B-32"))
        network = ClipClassifier(clip, {}, (0.5,) * 3, (0.5,) * 3)
    freeze_parts(network, "nothing")
    assert count_frozen(network)["frozen"] == 25_599_489


@pytest.mark.parametrize(
    ("size", "held_out"),
    [(8_144, 814), (3_760, 376), (60_000, 5_000), (73_257, 5_000), (1_281_167, 5_000)],
)
def test_the_validation_rule(size, held_out):
    rest, validation = held_out_of(size)
    assert (len(rest), len(validation)) == (size - held_out, held_out)
    assert len({*rest.tolist(), *validation.tolist()}) == size


def test_it_is_the_published_split_of_mnist():
    assert held_out_of(60_000)[0][0] == 36_044  # the protocol's own sanity check


@pytest.mark.parametrize(
    ("name", "templates", "epochs", "first"),
    [
        ("cars", 8, (70, 35), "a photo of a Audi A5 Coupe 2012."),
        ("dtd", 8, (100, 76), "a photo of a polka dotted texture."),
        ("eurosat", 3, (40, 12), "a centered satellite photo of lake or sea."),
        ("gtsrb", 3, (40, 11), 'a zoomed in photo of a "stop" traffic sign.'),
        ("mnist", 1, (30, 5), 'a photo of the number: "7".'),
        ("resisc45", 18, (40, 15), "satellite imagery of dense residential."),
        ("sun397", 2, (40, 14), "a photo of a bamboo forest."),
        ("svhn", 1, (30, 4), 'a photo of the number: "7".'),
        ("imagenet", 80, None, "a bad photo of a great white shark."),
    ],
)
def test_prompts_are_the_protocols(name, templates, epochs, first):
    spelt = {
        "cars": "Audi_A5_Coupe_2012",
        "dtd": "polka_dotted",
        "eurosat": "SeaLake",
        "gtsrb": "00014",
        "resisc45": "dense_residential",
        "sun397": "b_bamboo_forest",
        "imagenet": "great white shark, white shark, man-eater",
    }
    (sentences,) = prompts_of(name).words([spelt.get(name, "7")])
    assert len(sentences) == len(set(sentences)) == templates
    assert sentences[0] == first
    assert prompts_of(name).epochs == epochs


def test_imagenets_thousand_names():
    words = prompts_of("imagenet").words([f"n{k:08}" for k in range(1000)])
    assert len(words) == 1000
    assert words[0][0] == "a bad photo of a tench."
    assert words[999][0] == "a bad photo of a toilet paper."


def test_imagenets_names_are_not_mixed_up():
    words = [one[0] for one in prompts_of("imagenet").words([str(k) for k in range(1000)])]
    as_text = sorted(map(str, range(1000)))  # how an image folder lists them: 0, 1, 10, 100, …
    found = prompts_of("imagenet").words(as_text)
    assert [sentences[0] for sentences in found] == [words[int(name)] for name in as_text]
    padded = prompts_of("imagenet").words([f"{k:04}" for k in range(1000)])
    assert [one[0] for one in padded] == words
    with pytest.raises(NegMergeError, match="only if all 1,000 classes are there"):
        prompts_of("imagenet").words(["0", "1", "2"])
    names = list(open_clip().IMAGENET_CLASSNAMES)
    named = [f"{name}, as the Hub has it" for name in names]
    assert [one[0] for one in prompts_of("imagenet").words(named)] == words
    with pytest.raises(NegMergeError, match="wanted WordNet ids, numbers, or names in ImageNet's"):
        prompts_of("imagenet").words(sorted(names))


@pytest.mark.parametrize("name", ["cars", "dtd", "eurosat", "resisc45", "sun397", "cifar10"])
def test_numbers_are_no_words(name):
    with pytest.raises(NegMergeError, match="a zero-shot head needs words"):
        prompts_of(name).words([str(k) for k in range(12)])


def test_wordnet_ids_of_an_unknown_set_are_no_words():
    with pytest.raises(NegMergeError, match=r"names 'n01440764'.*needs words"):
        prompts_of("someone/pictures").words([f"n{k:08}" for k in range(1440764, 1440784)])


@pytest.mark.parametrize("name", sorted({*prompts}))
def test_a_set_has_its_words_by_hub_id_and_by_path(name):
    own = prompts_of(name)
    assert prompts_of(str(datasets.get(name).hub)) is own
    assert prompts_of(f"/mirrors/{name}/") is own


def test_every_sign_is_another():
    assert len(set(SIGNS)) == 43
    assert {"mnist", "svhn", "imagenet"} <= {*prompts}


def test_openai_weights_switch_quickgelu_on_and_say_so():
    source = ClipSource("ViT-B-32", "openai")
    assert source.quick_gelu
    assert source.notes == ["ViT-B-32: uses QuickGELU, because the openai weights need it"]
    same = ClipSource("ViT-B-32-quickgelu", "openai")
    assert same.quick_gelu
    assert not same.notes
    assert not ClipSource("ViT-B-32", "laion2b_s34b_b79k").quick_gelu
    assert ClipSource("roberta-ViT-B-32", "laion2b_s12b_b32k").quick_gelu  # by its configuration


PLAIN_POOLS = ("clip_pool2", "clip_pool3", "clip_pool4")
"""The pools without RandAugment."""


@pytest.mark.parametrize(
    ("name", "members"),
    [
        ("clip_vit_b32", 30),
        ("clip_pool2", 16),
        ("clip_pool3", 8),
        ("clip_pool4", 6),
        ("clip_pool5", 64),
        ("clip_pool6", 32),
        ("clip_pool7", 8),
    ],
)
def test_the_pools_of_table_d3(name, members):
    recipe = load_recipe(name)
    pool = recipe.pool.members()
    assert len(pool) == len(set(pool)) == members
    assert {(m.batch, m.optimizer, m.schedule, m.warmup, m.clip) for m in pool} == {
        (128, "adamw", "cosine", 500, 1.0)
    }
    assert {m.epochs for m in pool} == {35 if name in PLAIN_POOLS else 70}
    assert recipe.search.grid() == tuple(round(k / 20, 10) for k in range(21))


def test_what_a_clip_recipe_leaves_out_is_the_protocols(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("{data: {name: mnist}, model: {name: ViT-B-32}, clip: {pretrained: openai}}")
    recipe = load_recipe(path, ["clip.control.root=/mirrors"])
    assert recipe.scenario == "clip"
    assert recipe.settings.clip.control.name == "imagenet"
    assert recipe.search.samples == 5000
    assert load_recipe(path, ["search.stop=2"]).search.samples == 5000
    assert load_recipe(path, ["search.samples=7"]).search.samples == 7
    path.write_text("{data: {root: /mirrors}, model: {name: ViT-B-32}, clip: {}}")
    with pytest.raises(NegMergeError, match=r"data\.name: is missing"):
        load_recipe(path)


def test_pixels_are_what_a_tag_was_trained_on():
    source = ClipSource("ViT-B-16-SigLIP", "webli")
    assert (source.fit, source.interpolation) == ("squash", "bicubic")
    source = ClipSource("ViT-L-14-CLIPA", "datacomp1b")
    assert (source.fit, source.interpolation) == ("squash", "bilinear")
    source = ClipSource("ViT-B-32", "openai")
    assert (source.fit, source.interpolation) == ("crop", "bicubic")


def test_epochs_follow_the_data_set_unless_given():
    assert load_recipe("clip_vit_l14", ["data.name=dtd"]).pool.members()[0].epochs == 100
    assert load_recipe("clip_pool2", ["data.name=dtd"]).pool.members()[0].epochs == 76
    given = ["data.name=svhn", "pool.settings.epochs=2"]
    assert load_recipe("clip_vit_l14", given).pool.members()[0].epochs == 2
