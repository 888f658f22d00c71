"""Tiny image classifiers as folders of timm and transformers, for pictures of the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

CLASSES = 10


def vit(folder: Path, classes: int = CLASSES, **changes: Any) -> Path:
    """A ViT of transformers with its preprocessor."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "intermediate_size": 32, "image_size": 16, "patch_size": 8}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2}
    return _transformers(
        folder, ViTForImageClassification, ViTConfig(**sizes, **layers, num_labels=classes), changes
    )


def resnet(folder: Path, classes: int = CLASSES, **changes: Any) -> Path:
    """A ResNet of transformers, with statistics of BatchNorm."""
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]}
    config = ResNetConfig(**sizes, layer_type="basic", num_labels=classes)
    return _transformers(folder, ResNetForImageClassification, config, changes)


def _transformers(folder: Path, kind: Any, config: Any, changes: dict[str, Any]) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        kind(config).save_pretrained(folder)
    images = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 16, "width": 16},
        "resample": 2,
        "image_mean": [0.25, 0.5, 0.5],
        "image_std": [0.5, 0.25, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    change(folder, **changes)
    return folder


def timm_resnet(folder: Path, classes: int = CLASSES, **changes: Any) -> Path:
    """A small network of timm."""
    import timm
    from timm.models import save_for_hf

    with torch.random.fork_rng():
        torch.manual_seed(4)
        network = timm.create_model("test_resnet", pretrained=False, num_classes=classes)
    save_for_hf(network, folder, safe_serialization=True)
    (folder / "pytorch_model.bin").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_cfg"] |= {"input_size": [3, 32, 32], "mean": [0.25, 0.5, 0.5]}
    config["pretrained_cfg"].pop("test_input_size", None)
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


MAKERS = {"vit": vit, "resnet": resnet, "timm": timm_resnet}


def change(folder: Path, **changes: Any) -> None:
    """Change fields of a folder's configuration."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
