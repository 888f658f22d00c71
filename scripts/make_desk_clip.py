"""Train the small CLIP inside this package on captions of CIFAR-10, Fashion-MNIST and MNIST.

    NEGMERGE_DATA=FOLDER python scripts/make_desk_clip.py OUT [--epochs 7] [--few 2000]

`--few` trains on that many images of Fashion-MNIST and of MNIST, so that to recognise them is not
what the model was trained for.

Needs the extra `test`. FOLDER has the three data sets by name. OUT, a folder that does not exist
yet, becomes a model that `open_clip.create_model("local-dir:OUT")` loads, with the class embeddings
of the three sets and a README of what was measured. Killed and started again, it goes on where it
was saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import open_clip
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torchvision.transforms.v2.functional import normalize

from negmerge.errors import FileError, NegMergeError, ValueRangeError
from negmerge.evaluation.observations import Columns
from negmerge.evaluation.passes import classification_columns, observe_set
from negmerge.support.files import atomic_folder
from negmerge.support.progress import Progress, make_progress
from negmerge.training.feeds import Batch, JoinedFeed, RelabelledFeed
from negmerge.training.hyperparameters import HyperParameters
from negmerge.training.loop import VERSION, Objective, Trained, train
from negmerge.training.seeds import fork_random_state, seed_of, seed_torch
from negmerge.training.weights import load_tensors, save_tensors
from negmerge.vision.datasets import CLIP, Images, Source, load, resolve
from negmerge.vision.feed import ImageFeed

SEED = 0
SIZE = 32
CONTEXT = 24
LEAST = 50.0
"""Zero-shot accuracy on CIFAR-10, in percent, below which nothing is written."""

SETTINGS = HyperParameters(
    epochs=7,
    batch=256,
    lr=1e-3,
    optimizer="adamw",
    weight_decay=0.05,
    schedule="cosine",
    warmup=500,
    clip=1.0,
)
COUNTS = {"cifar10": 50_000, "fashion_mnist": 20_000, "mnist": 20_000}

# Of CIFAR-10 and MNIST the first are those of CLIP's own evaluation; Fashion-MNIST has none there.
LOOKS = ("", "blurry ", "black and white ", "low contrast ", "high contrast ", "bad ", "good ")
TEMPLATES = {
    "cifar10": tuple(
        text
        for word in ("a", "the")
        for text in (
            *(f"a {look}photo of {word} {{}}." for look in LOOKS),
            f"a photo of {word} small {{}}.",
            f"a photo of {word} big {{}}.",
        )
    ),
    "fashion_mnist": tuple(
        text
        for word in ("a", "the")
        for text in (
            f"a photo of {word} {{}}.",
            f"a black and white photo of {word} {{}}.",
            f"a photo of {word} {{}}, a type of clothing.",
        )
    ),
    "mnist": (
        'a photo of the number: "{}".',
        'a black and white photo of the number: "{}".',
        'a photo of the handwritten number: "{}".',
    ),
}
LICENCES = {
    "cifar10": "no formal licence; its authors ask to be cited (Krizhevsky, 2009); research use",
    "fashion_mnist": "MIT (Zalando SE)",
    "mnist": "as spread by LeCun, Cortes and Burges; MIT on the Hub",
}
PAD, START, END = "<pad>", "<start>", "<end>"


@dataclass(frozen=True)
class Captioned:
    """A data set at the size of the model, grey as three equal channels, and how to speak of it."""

    source: Source
    train: Images
    test: Images
    templates: tuple[str, ...]

    def captions(self) -> list[list[str]]:
        """For each class, its name in each template."""
        return [[text.format(name) for text in self.templates] for name in self.train.classes]


def open_sets(root: Path | None, cache: Path | None, progress: Progress) -> dict[str, Captioned]:
    """The three sets, decoded."""
    found: dict[str, Captioned] = {}
    for name, templates in TEMPLATES.items():
        source = resolve(name, size=SIZE, channels=3, **CLIP)
        train, test = (
            load(source, split, root=root, cache=cache, progress=progress)
            for split in ("train", "test")
        )
        found[name] = Captioned(source, train, test, templates)
    return found


def make_tokenizer(captions: list[str]) -> Tokenizer:
    """Words of the captions to numbers; a word it does not know is an error, not a guess."""
    split = pre_tokenizers.BertPreTokenizer()  # at spaces and at each sign
    words = sorted({w for text in captions for w, _ in split.pre_tokenize_str(text.lower())})
    # open_clip takes the largest number of a caption for its end.
    numbers = {word: k for k, word in enumerate([PAD, START, *words, END])}
    tokenizer = Tokenizer(WordLevel(numbers))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(w, numbers[w]) for w in (START, END)]
    )
    tokenizer.add_special_tokens([PAD, START, END])
    return tokenizer


def config_of(words: int) -> dict[str, dict[str, object]]:
    """The configuration as open_clip writes it."""
    vision = {"image_size": SIZE, "patch_size": 8, "width": 128, "layers": 6, "head_width": 32}
    text = {
        "context_length": CONTEXT,
        "vocab_size": words,
        "width": 128,
        "heads": 4,
        "layers": 2,
        "hf_tokenizer_name": "desk_clip",  # only says: the tokenizer lies beside this file
    }
    return {
        "model_cfg": {"embed_dim": 128, "vision_cfg": vision, "text_cfg": text},
        "preprocess_cfg": {
            "size": SIZE,
            "mode": "RGB",
            **CLIP,
            "interpolation": "bicubic",
            "resize_mode": "shortest",
        },
    }


def encode(model: nn.Module, pixels: Tensor) -> Tensor:
    """Normalised embeddings of pixels in [0, 1]."""
    return model.encode_image(normalize(pixels, CLIP["mean"], CLIP["std"]), normalize=True)


def contrast(tokens: list[Tensor]) -> Objective:
    """Cross-entropy of images over one caption of every class, its template drawn at each step.

    With 30 classes an ordinary contrastive loss would take equal captions in a batch for wrong.

    tokens: for each class, its captions.
    """

    def objective(model: nn.Module, batch: Batch, epoch: int) -> Tensor:
        pixels, labels = batch
        drawn = torch.stack([own[int(torch.randint(len(own), ()))] for own in tokens])
        texts = model.encode_text(drawn, normalize=True)
        logits = model.logit_scale.exp().clamp(max=100) * encode(model, pixels) @ texts.T
        return nn.functional.cross_entropy(logits.float(), labels)

    return objective


def fit(
    sets: Mapping[str, Captioned],
    tokenizer: Tokenizer,
    config: Mapping[str, Mapping[str, object]],
    settings: HyperParameters,
    counts: Mapping[str, int],
    state: Path,
    progress: Progress,
) -> tuple[nn.Module, Trained]:
    """Train on a part of each set, all classes numbered on."""
    feeds: list[RelabelledFeed] = []
    tokens: list[Tensor] = []
    rng = np.random.default_rng(SEED)
    tokenizer.enable_padding(length=CONTEXT, pad_token=PAD)
    for name, own in sets.items():
        places = np.sort(rng.permutation(len(own.train))[: counts[name]])
        feed = ImageFeed(own.train, places, own.source.crop, own.source.flip)
        first = len(tokens)
        feeds.append(
            RelabelledFeed(feed, lambda batch, picked, seed, first=first: batch[1] + first)
        )
        for captions in own.captions():
            tokens.append(torch.tensor([e.ids for e in tokenizer.encode_batch(captions)]))
    tokenizer.no_padding()
    feed = JoinedFeed(feeds, mixed=True)
    with fork_random_state():
        seed_torch(seed_of("init", SEED))
        model = open_clip.model.CLIP(**config["model_cfg"])
    progress.stage("training", len(feed) * settings.epochs, "images")
    cost = train(
        model,
        feed,
        settings,
        SEED,
        objective=contrast(tokens),
        state=state,
        save_every=60,
        advance=progress.advance,
    )
    return model.eval(), cost


def write_model(
    folder: Path, model: nn.Module, tokenizer: Tokenizer, config: Mapping[str, object]
) -> None:
    """Weights in half precision, configuration and tokenizer, as open_clip wants them."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_tensors(folder / "open_clip_model.safetensors", weights, {"format": "pt"})
    files = {
        "open_clip_config.json": config,
        "tokenizer.json": json.loads(tokenizer.to_str()),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": PAD,
            "bos_token": START,
            "eos_token": END,
            "model_max_length": CONTEXT,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n")


@torch.inference_mode()
def write_classes(folder: Path, model: nn.Module, sets: Mapping[str, Captioned]) -> None:
    """Per set, each class's normalised mean over the templates of its normalised captions."""
    tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    tensors: dict[str, Tensor] = {"logit_scale": model.logit_scale.detach()}
    for name, own in sets.items():
        means = [model.encode_text(tokenizer(c), normalize=True).mean(0) for c in own.captions()]
        tensors[name] = nn.functional.normalize(torch.stack(means), dim=1)
    about = {
        "classes": {name: own.train.classes for name, own in sets.items()},
        "templates": {name: own.templates for name, own in sets.items()},
    }
    metadata = {key: json.dumps(value) for key, value in about.items()}
    save_tensors(folder / "class_embeddings.safetensors", tensors, metadata)


class ZeroShot(nn.Module):
    """From pixels in [0, 1] to logits over a set's classes."""

    def __init__(self, model: nn.Module, classes: Tensor) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model.logit_scale.exp() * encode(self.model, pixels) @ self.classes.T


def accuracies(
    folder: Path, model: nn.Module, sets: Mapping[str, Captioned], progress: Progress
) -> dict[str, float]:
    """Zero-shot accuracy, in percent, on the whole of each test set, from the files."""
    classes, _ = load_tensors(folder / "class_embeddings.safetensors")

    def observe(network: nn.Module, name: str, batch: Batch) -> Columns:
        return classification_columns(network(batch[0]), batch[1], ("correct",))

    found: dict[str, float] = {}
    for name, own in sets.items():
        feed = ImageFeed(own.test, np.arange(len(own.test)))
        progress.stage(f"testing on {name}", len(feed), "images")
        network = ZeroShot(model, classes[name])
        said = observe_set(observe, network, name, feed, progress.advance)
        found[name] = round(100 * float(said["correct"].mean()), 2)
    return found


def read_me(
    model: nn.Module,
    scores: Mapping[str, float],
    sets: Mapping[str, Captioned],
    settings: HyperParameters,
    counts: Mapping[str, int],
    cost: Trained,
) -> str:
    """What the model is, how it was made and how good it is."""
    millions = sum(p.numel() for p in model.visual.parameters()) / 1e6
    rows = "\n".join(
        f"| {name} | {min(counts[name], len(own.train)):,} | {scores[name]:.2f} % of "
        f"{len(own.test):,} | {LICENCES[name]} |"
        for name, own in sets.items()
    )
    return f"""# A CLIP for desks

An open_clip ViT of {millions:.2f} million parameters for images of {SIZE} pixels, with a text tower
that knows the words of its captions and no others (an unknown word is an error). It is here so that
the CLIP scenario can be tried without a download; it is not a substitute for a CLIP trained on the
web.

| data set | trained on | zero-shot accuracy on the test set | licence of the data |
|---|---|---|---|
{rows}

These are the accuracies of the files in this folder, read into single precision. Training and test
images are the sets' own splits. Grey images become three equal channels; 28 pixels are resized to
{SIZE} (bicubic). Inputs are normalised with mean and std of `open_clip_config.json`.

Made by

    python scripts/make_desk_clip.py OUT --epochs {settings.epochs}{few_of(counts)}

in {cost.seconds / 60:.0f} minutes of training (wall time; {processor()}, \
{torch.get_num_threads()} threads), with torch {torch.__version__} and
open_clip {open_clip.__version__}. The loss is cross-entropy over one caption of each class of all \
the sets, its template
drawn at each step. AdamW {settings.lr:g}, weight decay {settings.weight_decay:g}, cosine after a \
warm-up, batch {settings.batch}, single precision, each
set's own crop and flip (digits are not mirrored), seed {SEED}. The last epoch's mean loss is \
{cost.loss:.3f}.

| file | |
|---|---|
| `open_clip_config.json`, `open_clip_model.safetensors` | architecture and weights (fp16): \
`open_clip.create_model("local-dir:…")` |
| `tokenizer.json`, `tokenizer_config.json` | words to numbers: \
`open_clip.get_tokenizer("local-dir:…")` |
| `class_embeddings.safetensors` | per data set one normalised embedding a class, the mean \
over the templates, to be multiplied by exp(`logit_scale`); class names and templates in its \
metadata |
"""


def few_of(counts: Mapping[str, int]) -> str:
    """The option of the command that gives these numbers of images."""
    return "" if counts == COUNTS else f" --few {counts['fashion_mnist']}"


def processor() -> str:
    """The name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def make(
    out: Path,
    settings: HyperParameters = SETTINGS,
    counts: Mapping[str, int] = COUNTS,
    least: float = LEAST,
    *,
    root: Path | None = None,
    cache: Path | None = None,
    progress: Progress,
) -> dict[str, float]:
    """Train, write and measure; the folder appears only if what is in it is good enough."""
    if out.exists():
        raise FileError(f"{out}: exists; remove it or name another folder")
    sets = open_sets(root, cache, progress)
    tokenizer = make_tokenizer([t for own in sets.values() for c in own.captions() for t in c])
    config = config_of(tokenizer.get_vocab_size())
    facts = [own.train.fingerprint for own in sets.values()]
    mark = seed_of(VERSION, SEED, settings.model_dump_json(), config, counts, TEMPLATES, facts)
    state = out.with_name(f".{out.name}-{mark:016x}.state")
    trained, cost = fit(sets, tokenizer, config, settings, counts, state, progress)
    with atomic_folder(out) as folder:
        write_model(folder, trained, tokenizer, config)
        model = open_clip.create_model(f"local-dir:{folder}").eval()  # what others will have
        write_classes(folder, model, sets)
        scores = accuracies(folder, model, sets, progress)
        state.unlink(missing_ok=True)
        if scores["cifar10"] < least:
            raise ValueRangeError(
                f"zero-shot accuracy on CIFAR-10 is {scores['cifar10']:.2f} %, wanted at least "
                f"{least:g}; nothing is written; train for more epochs"
            )
        (folder / "README.md").write_text(read_me(model, scores, sets, settings, counts, cost))
    return scores


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--epochs", type=int, default=SETTINGS.epochs)
    parser.add_argument("--few", type=int, help="images of Fashion-MNIST and of MNIST")
    parser.add_argument("--progress", choices=["auto", "json", "quiet"], default="auto")
    given = parser.parse_args()
    try:
        with make_progress(given.progress) as progress:
            chosen = SETTINGS.model_copy(update={"epochs": given.epochs})
            few = {} if given.few is None else dict.fromkeys(("fashion_mnist", "mnist"), given.few)
            print(json.dumps(make(given.out, chosen, COUNTS | few, progress=progress)))
    except NegMergeError as error:
        sys.exit(f"error: {error}")
