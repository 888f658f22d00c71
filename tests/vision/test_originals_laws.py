"""Whole pictures for CLIP: the cache of originals, and augmentation as the libraries have it."""

from __future__ import annotations

import io
import pickle
import random
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms import Compose, Grayscale, Resize

from negmerge.errors import FileError
from negmerge.scenarios.clip.library import open_clip
from negmerge.training.hyperparameters import Augmentation, RandAugment
from negmerge.training.seeds import seed_of
from negmerge.vision.datasets import load, resolve
from negmerge.vision.decode import decode, open_image
from negmerge.vision.original_feed import OriginalFeed
from negmerge.vision.originals import Originals, load_originals

SIZE = 24
MEAN, STD = (0.48, 0.46, 0.41), (0.27, 0.26, 0.28)
FIELDS = {"size": SIZE, "mean": MEAN, "std": STD}
POSITIONS, GREY = np.array([3, 0, 5]), np.array([3, 7])


def encoded(pixels: np.ndarray, kind: str, **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """An image folder of two classes, with pictures of many sizes, kinds and orientations."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    turned = Image.Exif()
    turned[0x0112] = 6
    for split in ("train", "test"):
        for k, label in enumerate(("cat", "dog")):
            (root / split / label).mkdir(parents=True)
            for j in range(4):
                shape = (30 + 7 * j, 50 - 9 * k, 3)[: 2 if j == 3 else 3]
                pixels = rng.integers(0, 256, shape, dtype=np.uint8)
                options = {"exif": turned} if j == 1 else {}
                data = encoded(pixels, "JPEG" if j < 2 else "PNG", **options)
                (root / split / label / f"{j}.png").write_bytes(data)
    return root


@pytest.fixture(scope="module")
def originals(folder: Path, tmp_path_factory) -> Originals:
    return get(folder, tmp_path_factory.mktemp("cache"))


def get(folder: Path, cache: Path) -> Originals:
    return load_originals(resolve(str(folder), **FIELDS), "train", cache=cache)


def make_feed(originals: Originals, **options) -> OriginalFeed:
    source = resolve(str(originals.entry), **FIELDS)  # any folder that exists
    return OriginalFeed(originals, np.arange(len(originals)), source, **options)


def inputs_of(
    feed: OriginalFeed, augment: Augmentation, seed: int, positions: np.ndarray = POSITIONS
) -> torch.Tensor:
    inputs, _ = feed.train_batch(positions, seed, augment)
    assert isinstance(inputs, torch.Tensor)
    return inputs


def seeded(seed: int, position: int) -> None:
    """Seed all three generators as a sample is seeded, by their public functions."""
    number = seed_of(seed, position)
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)  # noqa: NPY002


def plain_posterize(image: Image.Image, bits: int) -> Image.Image:
    """Posterize by its definition, which also has 0 bits."""
    return image.point([value & ~(2 ** (8 - bits) - 1) for value in range(256)] * 3)


def opened(folder: Path, position: int) -> Image.Image:
    """A picture of the training split, opened without our code."""
    file = sorted((folder / "train").rglob("*.png"))[position]
    return ImageOps.exif_transpose(Image.open(io.BytesIO(file.read_bytes())))


def normalised(pixels: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std


@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 5), (3, 10)])
@pytest.mark.parametrize("grey", [False, True])
def test_a_batch_equals_timms_own_transform(originals, folder, n, m, grey, monkeypatch):
    from timm.data.transforms_factory import transforms_imagenet_train

    monkeypatch.setattr(ImageOps, "posterize", plain_posterize)
    own = transforms_imagenet_train(
        img_size=SIZE, auto_augment=f"rand-m{m}-n{n}-mstd0.5", mean=MEAN, std=STD
    )
    if grey:  # as the authors prepare MNIST
        own = Compose([Resize(SIZE), Grayscale(3), own])
    feed, augment = make_feed(originals, grey=grey), Augmentation(randaugment=RandAugment(n=n, m=m))
    positions = GREY if grey else POSITIONS
    for seed in range(8):
        found = inputs_of(feed, augment, seed, positions)
        for pixels, position in zip(found, positions, strict=True):
            image = opened(folder, position)
            assert image.mode == "L" or not grey
            seeded(seed, int(position))
            expected = own(image if grey else image.convert("RGB"))
            assert torch.equal(normalised(pixels), expected), (seed, position)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_without_randaugment_a_batch_equals_open_clips_own_transform(originals, folder, library):
    own = open_clip().image_transform(SIZE, is_train=True, mean=MEAN, std=STD)
    found = inputs_of(make_feed(originals, library=library), Augmentation(), 7)
    for pixels, position in zip(found, POSITIONS, strict=True):
        seeded(7, int(position))
        assert torch.equal(normalised(pixels), own(opened(folder, position).convert("RGB")))


def test_torchvisions_randaugment_is_the_other_choice(originals):
    strong = Augmentation(randaugment=RandAugment(n=2, m=25))
    old = inputs_of(make_feed(originals, library="torchvision"), strong, 0)
    assert not torch.equal(old, inputs_of(make_feed(originals), strong, 0))
    assert torch.equal(old, inputs_of(make_feed(originals, library="torchvision"), strong, 0))


def test_pictures_do_not_depend_on_their_batch_or_the_callers_generators(originals):
    augment = Augmentation(randaugment=RandAugment(n=2, m=5))
    feed = make_feed(originals)
    together = inputs_of(feed, augment, 1)
    random.seed(5), torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002
    expected = random.random(), torch.rand(1).item(), np.random.rand()  # noqa: NPY002
    random.seed(5), torch.manual_seed(5), np.random.seed(5)  # noqa: NPY002
    for k, position in enumerate(POSITIONS):
        alone, labels = feed.train_batch(np.array([position]), 1, augment)
        assert torch.equal(alone[0], together[k])
        assert labels.tolist() == [int(originals.labels[position])]
    assert (random.random(), torch.rand(1).item(), np.random.rand()) == expected  # noqa: NPY002
    assert not torch.equal(together, inputs_of(feed, augment, 2))
    copy = pickle.loads(pickle.dumps(feed))  # noqa: S301
    assert copy.kept is None
    assert torch.equal(together, inputs_of(copy, augment, 1))


def test_flip_overrides_the_default(originals):
    augment = RandAugment(n=1, m=5)
    with_flip = {
        flip: [
            inputs_of(make_feed(originals), Augmentation(flip=flip, randaugment=augment), seed)
            for seed in range(6)
        ]
        for flip in (None, True, False)
    }
    pairs = zip(with_flip[None], with_flip[True], strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)
    pairs = zip(with_flip[None], with_flip[False], strict=True)
    assert not all(torch.equal(one, two) for one, two in pairs)


def test_originals_are_the_pictures_of_the_decoded_set(originals, folder, tmp_path):
    source = resolve(str(folder), **FIELDS)
    images = load(source, "train", cache=tmp_path)
    assert (originals.labels == images.labels).all()
    assert originals.classes == images.classes
    for k in range(len(originals)):
        assert (decode(originals.picture(k), SIZE, 3) == images.pixels[k]).all()
        assert open_image(originals.picture(k)).size == tuple(originals.sizes[k])
    inputs, _ = make_feed(originals).test_batch(POSITIONS)
    assert torch.equal(inputs, torch.from_numpy(images.pixels[POSITIONS]).permute(0, 3, 1, 2) / 255)


def test_the_fingerprint_is_of_pixels_and_labels(originals, folder, tmp_path):
    again = tmp_path / "again"
    for path in sorted(folder.rglob("*.png")):
        target = again / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes()
        image = Image.open(io.BytesIO(data))
        if image.format == "PNG":  # the same pixels in other bytes
            data = encoded(np.asarray(image), "PNG", compress_level=1)
        target.write_bytes(data)
    assert get(again, tmp_path / "cache").fingerprint == originals.fingerprint
    (again / "train" / "cat" / "2.png").write_bytes(encoded(np.zeros((5, 5), np.uint8), "PNG"))
    assert get(again, tmp_path / "cache").fingerprint != originals.fingerprint


def bomb() -> bytes:
    """A PNG of a few bytes that announces 40,000 × 40,000 pixels."""
    header = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    parts = (struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d))
             for k, d in chunks)  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"not a picture", "cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "cannot identify"),
        (bomb(), "decompression bomb"),
        (
            encoded(np.zeros((1, 20_000), np.uint8), "PNG"),
            "got 20000 × 1 pixels, wanted sides of at most 1000 : 1; crop it",
        ),
    ],
)
def test_bad_pictures_are_refused_before_a_training(folder, tmp_path, data, message):
    bad = tmp_path / "set"
    for split in ("train", "test"):
        for label in ("cat", "dog"):
            (bad / split / label).mkdir(parents=True)
            (bad / split / label / "1.png").write_bytes((folder / "train/cat/2.png").read_bytes())
    (bad / "train" / "dog" / "2.png").write_bytes(data)
    with pytest.raises(FileError, match=message) as caught:
        get(bad, tmp_path / "cache")
    assert "dog/2.png" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_entry_is_made_again(folder, tmp_path):
    first = get(folder, tmp_path)
    with (first.entry / "encoded.npy").open("r+b") as file:
        file.seek(500)
        file.write(b"damage")
    again = get(folder, tmp_path)
    assert again.fingerprint == first.fingerprint
    assert open_image(again.picture(0)).size == tuple(again.sizes[0])


def test_pictures_of_another_folder_are_refused(folder, tmp_path):
    own = tmp_path / "own"
    for split in ("train", "test"):
        (own / split / "cat").mkdir(parents=True)
        (own / split / "cat" / "a.png").write_bytes((folder / "train/cat/2.png").read_bytes())
    (own / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: {folder}/train/**\n---\n"
    )
    with pytest.raises(FileError) as caught:
        get(own, tmp_path / "cache")
    assert "\n" not in str(caught.value)
