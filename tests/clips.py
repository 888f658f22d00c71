"""A tiny CLIP with heads that work, and tiny data sets, for the tests of the CLIP scenario."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from PIL import Image
from torch import nn

from negmerge.scenarios.clip.library import open_clip
from negmerge.training.weights import save_tensors
from negmerge.vision.datasets import load, resolve

CONFIG = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 16,
            "patch_size": 8,
            "width": 32,
            "layers": 3,
            "head_width": 16,
        },
        "text_cfg": {
            "context_length": 32,
            "vocab_size": 49408,
            "width": 8,
            "heads": 2,
            "layers": 1,
        },
    },
    "preprocess_cfg": {"mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25]},
}
CLASSES = {"mnist": [str(k) for k in range(5)], "cifar10": ["cat", "dog", "ship", "frog"]}


def png(pixels: np.ndarray) -> dict[str, object]:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def make_sets(
    root: Path,
    train: int = 120,
    test: int = 60,
    sets: Mapping[str, Sequence[str]] = CLASSES,
) -> Path:
    """Mirrors of data sets; each class is a pattern of its own under noise."""
    for number, (name, classes) in enumerate(sets.items()):
        source = resolve(name)
        rng = np.random.default_rng(number)
        patterns = rng.normal(0, 1, (len(classes), 4, 4, 3)).repeat(4, 1).repeat(4, 2)
        (root / name).mkdir(parents=True)
        for split, count in (("train", train), ("test", test)):
            labels = [k % len(classes) for k in range(count)]
            noisy = patterns[labels] + rng.normal(0, 0.9, (count, 16, 16, 3))
            pixels = (128 + 50 * noisy).clip(0, 255).astype(np.uint8)
            features = Features(
                {source.image: ImageFeature(), source.label: ClassLabel(names=list(classes))}
            )
            rows = {source.image: [png(one) for one in pixels], source.label: labels}
            table = Dataset.from_dict(rows, features=features)
            table.to_parquet(root / name / f"{split}.parquet")
    return root


def random_clip(seed: int = 0) -> nn.Module:
    """A tiny CLIP with fresh weights."""
    torch.manual_seed(seed)
    return open_clip().CLIP(**CONFIG["model_cfg"]).eval()


def make_clip(folder: Path, root: Path | None = None, cache: Path | None = None) -> Path:
    """A folder as open_clip writes it.

    root: mirrors of the data sets; given, the heads are the mean features of their classes, so
        that the random encoder classifies well above chance.
    """
    clip = random_clip()
    folder.mkdir(parents=True)
    (folder / "open_clip_config.json").write_text(json.dumps(CONFIG))
    save_tensors(folder / "open_clip_model.safetensors", clip.state_dict(), {})
    if root is None:
        return folder
    heads: dict[str, torch.Tensor] = {"logit_scale": torch.tensor(3.0)}
    for name, classes in CLASSES.items():
        images = load(resolve(name, size=16, channels=3, **NORM), "train", root=root, cache=cache)
        inputs = torch.from_numpy(images.pixels.copy()).permute(0, 3, 1, 2) / 255
        with torch.inference_mode():
            features = nn.functional.normalize(clip.encode_image((inputs - 0.5) / 0.25), dim=1)
        labels = torch.from_numpy(images.labels.copy())
        means = torch.stack([features[labels == k].mean(0) for k in range(len(classes))])
        heads[name] = nn.functional.normalize(means - features.mean(0), dim=1)
    about = {"classes": json.dumps(CLASSES)}
    save_tensors(folder / "class_embeddings.safetensors", heads, about)
    return folder


NORM = CONFIG["preprocess_cfg"]
