"""Loading of data sets: layouts, decoding, cache and errors."""

from __future__ import annotations

import errno
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from negmerge.errors import FileError, OptionError
from negmerge.runs.recipe import load_recipe
from negmerge.vision.datasets import load, resolve
from negmerge.vision.decode import Picture, decode
from negmerge.vision.places import ASSETS
from running import negmerge

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_embedded_data.py"
FULL = Path(os.environ.get("NEGMERGE_DATA") or "~/.cache/negmerge-data").expanduser()
FULL_FASHION = FULL / "fashion_mnist"
LABELS = ClassLabel(names=["cat", "dog"])
PROBE = """
import sys, time
from pathlib import Path
from negmerge.vision.datasets import load, resolve
begun = time.process_time()
images = load(resolve(sys.argv[1], size=8), "train", cache=Path(sys.argv[2]))
seconds = time.process_time() - begun
print(len(images), images.fingerprint, seconds, *{"datasets", "torch", "PIL"} & sys.modules.keys())
"""


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(pixels: np.ndarray, kind: str = "PNG", **options) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def write_parquet(
    path: Path, pictures: list[bytes | None], labels: list, label=LABELS, name: str = "{}.png"
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": data, "path": name.format(k)} for k, data in enumerate(pictures)]
    rows = {"image": cells, "label": labels}
    features = Features({"image": ImageFeature(), "label": label})
    pq.write_table(Dataset.from_dict(rows, features=features).data.table, path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight images of 8 x 8 in two splits."""
    for seed, split in enumerate(("train", "test")):
        pictures = [encoded(one) for one in noise((4, 8, 8, 3), seed)]
        write_parquet(tmp_path / "set" / f"{split}.parquet", pictures, [0, 1, 1, 0])
    return tmp_path / "set"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def get(path: Path, cache: Path, split="train", size: int = 8, **fields):
    return load(resolve(str(path), size=size, **fields), split, cache=cache)


def entry_of(cache: Path) -> Path:
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    return entry


# Layouts


def test_a_folder_of_parquet(folder, cache):
    images = get(folder, cache, "test")
    np.testing.assert_array_equal(images.pixels, noise((4, 8, 8, 3), 1))
    assert images.classes == ("cat", "dog")
    assert images.ids is None


def test_one_parquet_file_is_the_training_split(folder, cache):
    images = get(folder / "train.parquet", cache)
    np.testing.assert_array_equal(images.pixels, noise((4, 8, 8, 3), 0))
    with pytest.raises(FileError, match="no split 'test'; there are: 'train'"):
        get(folder / "train.parquet", cache, "test")


def test_a_share_of_the_training_split_is_the_test_set(tmp_path, cache):
    pictures = noise((30, 8, 8, 3))
    labels = [0] * 20 + [1] * 10
    write_parquet(tmp_path / "one.parquet", [encoded(one) for one in pictures], labels)
    parts = [
        get(tmp_path / "one.parquet", cache, split, test_share=0.2) for split in ("train", "test")
    ]
    assert [np.bincount(part.labels).tolist() for part in parts] == [[16, 8], [4, 2]]
    together = sorted(one.tobytes() for part in parts for one in part.pixels)
    assert together == sorted(one.tobytes() for one in pictures)
    shared = {"source": resolve(str(tmp_path / "one.parquet"), size=8, test_share=0.2)}
    held_out = load(split="train", part="held_out", cache=cache, **shared)
    known = {one.tobytes() for one in parts[0].pixels}
    assert len(held_out) == 2  # a tenth of the 24 that are left
    assert all(one.tobytes() in known for one in held_out.pixels)
    other = get(tmp_path / "one.parquet", tmp_path / "other", "test", test_share=0.2)
    assert other.fingerprint == parts[1].fingerprint
    assert len(get(tmp_path / "one.parquet", cache)) == 30


def image_folder(root: Path, splits=("train", "test"), classes=("cat", "dog")) -> np.ndarray:
    pixels = noise((len(splits), len(classes), 3, 8, 8, 3))
    for s, split in enumerate(splits):
        for c, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for k in reversed(range(3)):  # the order of creation is not the order of reading
                (root / split / name / f"{k}.png").write_bytes(encoded(pixels[s, c, k]))
    return pixels


@pytest.mark.parametrize("where", ["", "data"])
def test_an_image_folder_has_file_names_as_ids(where, tmp_path, cache):
    pixels = image_folder(tmp_path / "set" / where)
    images = get(tmp_path / "set", cache, "test")
    np.testing.assert_array_equal(images.pixels, pixels[1].reshape(6, 8, 8, 3))
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert images.ids is not None
    assert images.ids[4] == f"{where + '/' if where else ''}test/dog/1.png"


def test_a_class_named_train_is_not_a_split(tmp_path, cache):
    pixels = image_folder(tmp_path / "set", classes=("test", "train"))
    for s, split in enumerate(("train", "test")):
        images = get(tmp_path / "set", cache, split)
        np.testing.assert_array_equal(images.pixels, pixels[s].reshape(6, 8, 8, 3))
        assert images.classes == ("test", "train")


def test_other_folders_are_ignored(tmp_path, cache):
    image_folder(tmp_path / "set", splits=("train", "val"))
    (tmp_path / "set" / "docs").mkdir()
    assert len(get(tmp_path / "set", cache, "test", test="valid")) == 6
    with pytest.raises(FileError, match="no split 'test'; there are: 'train', 'val'"):
        get(tmp_path / "set", cache, "test")


def test_an_unused_folder_without_classes_is_ignored(tmp_path, cache):
    pixels = image_folder(tmp_path / "set", splits=("train", "val"))  # as ImageNet is laid out
    (tmp_path / "set" / "test").mkdir()
    (tmp_path / "set" / "test" / "0.png").write_bytes(encoded(pixels[0, 0, 0]))
    images = get(tmp_path / "set", cache, "test", test="validation")
    assert images.classes == ("cat", "dog")
    np.testing.assert_array_equal(images.pixels, pixels[1].reshape(6, 8, 8, 3))


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_squash_resizes_both_sides(interpolation, tmp_path, cache):
    wide = noise((1, 1, 1, 8, 20, 3))[0, 0, 0]
    for folder in ("train/cat", "train/dog"):
        (tmp_path / "set" / folder).mkdir(parents=True)
        (tmp_path / "set" / folder / "0.png").write_bytes(encoded(wide))
    way = {"fit": "squash", "interpolation": interpolation}
    found = get(tmp_path / "set", cache, **way).pixels[0]
    wanted = Image.fromarray(wide).resize((8, 8), Image.Resampling[interpolation.upper()])
    np.testing.assert_array_equal(found, np.asarray(wanted))
    cropped = get(tmp_path / "set", cache).pixels[0]
    np.testing.assert_array_equal(cropped, wide[:, 6:14])


def test_a_class_without_images_in_a_split_keeps_its_number(tmp_path, cache):
    image_folder(tmp_path / "set", classes=("ape", "bee", "cat"))
    shutil.rmtree(tmp_path / "set" / "test" / "ape")
    images = get(tmp_path / "set", cache, "test")
    assert images.classes == ("ape", "bee", "cat")
    assert images.labels.tolist() == [1, 1, 1, 2, 2, 2]


def test_files_of_a_split_are_read_in_the_order_of_their_names(tmp_path, cache):
    pixels = noise((3, 8, 8, 3))
    for k in (1, 2, 0):
        name = f"data/train-0000{k}-of-00003.parquet"
        write_parquet(tmp_path / "set" / name, [encoded(pixels[k])], [k % 2])
    np.testing.assert_array_equal(get(tmp_path / "set", cache).pixels, pixels)


@pytest.mark.parametrize("name", ["a b", "a[1]", "ü", "a::b", "x*"])
def test_folder_names_with_special_characters(name, tmp_path, cache):
    image_folder(tmp_path / name)
    assert len(get(tmp_path / name, cache)) == 6


def test_a_local_data_set_needs_no_network(folder, cache, monkeypatch):
    import socket

    import datasets

    requests = []
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", lambda *where: requests.append(where))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *where, **how: requests.append(where))
    get(folder, cache)
    get(folder / "train.parquet", cache)
    assert requests == []


@pytest.mark.parametrize("where", ["default/{}/0000", "{}/0000", "plain/{}-00000-of-00001"])
def test_other_layouts_of_parquet_files(where, folder, tmp_path, cache):
    for split in ("train", "test"):
        path = tmp_path / "moved" / f"{where.format(split)}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{split}.parquet").rename(path)
    np.testing.assert_array_equal(
        get(tmp_path / "moved", cache, "test").pixels, noise((4, 8, 8, 3), 1)
    )


@pytest.mark.parametrize("called", ["valid", "validation", "val"])
def test_synonyms_of_validation(called, folder, cache):
    (folder / "test.parquet").rename(folder / f"{called}.parquet")
    assert len(get(folder, cache, "test", test="valid")) == 4
    with pytest.raises(FileError, match="no split 'test'; there are: 'train', 'validation'"):
        get(folder, cache, "test")


def test_other_column_names(tmp_path, cache):
    pixels = noise((2, 8, 8, 3))
    cells = [{"bytes": encoded(one), "path": None} for one in pixels]
    rows = {"foto": cells, "kind": [1, 0], "sort": ["a", "b"], "key": ["x9", "x7"]}
    features = Features(
        {"foto": ImageFeature(), "kind": LABELS, "sort": Value("string"), "key": Value("string")}
    )
    path = tmp_path / "set" / "train.parquet"
    path.parent.mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(path)
    assert get(path.parent, cache).labels.tolist() == [1, 0]
    chosen = get(path.parent, cache, label="sort", id="key")
    assert chosen.labels.tolist() == [0, 1]
    assert chosen.ids is not None
    assert chosen.ids.tolist() == ["x9", "x7"]
    there = r"there are: 'foto' \(.*\), 'kind' \(int64\), 'sort' \(string\), 'key' \(string\)"
    with pytest.raises(FileError, match=f"no column 'sotr' for the labels; {there}"):
        get(path.parent, cache, label="sotr")
    with pytest.raises(FileError, match="no column 'kye' for the ids"):
        get(path.parent, cache, id="kye")


@pytest.mark.parametrize(
    ("train", "test", "kind", "classes"),
    [
        (["dog", "ape"], ["cat", "ape"], "string", ("ape", "cat", "dog")),
        ([10, 2], [2, 3], "int64", ("2", "3", "10")),
    ],
)
def test_labels_without_class_names_have_the_same_numbers_in_both_splits(
    train, test, kind, classes, tmp_path, cache
):
    pictures = [encoded(one) for one in noise((2, 8, 8, 3))]
    for split, labels in (("train", train), ("test", test)):
        write_parquet(tmp_path / "set" / f"{split}.parquet", pictures, labels, Value(kind))
    for split, labels in (("train", train), ("test", test)):
        images = get(tmp_path / "set", cache, split)
        assert images.classes == classes
        assert [images.classes[label] for label in images.labels] == [str(v) for v in labels]


def test_ids_that_are_numbers_or_missing(tmp_path, cache):
    cells = [{"bytes": encoded(one), "path": None} for one in noise((3, 8, 8, 3))]
    rows = {"image": cells, "label": [1, 0, 1], "key": [17, None, 5]}
    features = Features({"image": ImageFeature(), "label": LABELS, "key": Value("int64")})
    path = tmp_path / "set" / "train.parquet"
    path.parent.mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(path)
    images = get(path.parent, cache, id="key")
    assert images.ids is not None
    assert images.ids.tolist() == ["17", "", "5"]  # a list of records has no empty lines


def test_records_are_forgotten_by_file_name(tmp_path, monkeypatch):
    """Listed files are forgotten even if half of the data is held out for validation."""
    for split, name in (("train", "cat"), ("train", "dog"), ("test", "cat"), ("test", "dog")):
        (tmp_path / "set" / split / name).mkdir(parents=True)
        for k, pixels in enumerate(noise((10, 8, 8, 3))):
            path = tmp_path / "set" / split / name / f"{name}-{k}.png"
            path.write_bytes(encoded(pixels))
    (tmp_path / "own.yaml").write_text(
        "data: {name: set, size: 8}\nsplit: {forget: {ids: forget.txt}, validation: 0.5}\n"
    )
    listed = tmp_path / "forget.txt"
    listed.write_bytes(b"\xef\xbb\xbfcat-3.png\r\ntrain/dog/dgo-7.png\r\n")
    _, err = negmerge(tmp_path, "unlearn", "own.yaml", "--out", "run", code=2)
    assert err == (
        "error: forget.txt: 1 of 2 ids are not in the training set, the first is "
        "'train/dog/dgo-7.png', did you mean 'train/dog/dog-7.png'?; ids of this data set look "
        "like 'train/cat/cat-0.png' and 'train/dog/dog-9.png'\n"
    )
    assert not (tmp_path / "run").exists()
    everyone = [f"cat-{k}.png" for k in range(5)] + [f"dog-{k}.png" for k in range(4)]
    listed.write_text("\n".join(everyone))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path / "cache"))
    sizes = load_recipe("own.yaml").make_scenario().describe().sizes
    assert sizes == {"retain": 1, "forget": 9, "validation": 10, "test": 20}


def test_the_root_the_environment_and_the_hub_id(folder, cache, tmp_path, monkeypatch):
    mirrors = tmp_path / "mirrors"
    shutil.copytree(folder, mirrors / "someone" / "birds")
    source = resolve("someone/birds", size=8)
    assert len(load(source, "train", root=mirrors, cache=cache)) == 4
    monkeypatch.setenv("NEGMERGE_DATA", str(mirrors))
    assert len(load(source, "train", cache=cache)) == 4
    assert len(load(source, "train", root=tmp_path, cache=cache)) == 4
    monkeypatch.setenv("NEGMERGE_DATA", str(tmp_path / "nowhere"))
    assert len(load(source, "train", root=mirrors, cache=cache)) == 4
    with pytest.raises(FileError, match="nowhere': no such folder; NEGMERGE_DATA must name"):
        load(source, "train", cache=cache)


# Decoding


def test_grey_and_colour_are_converted(tmp_path, cache):
    grey, colour = noise((8, 8)), noise((8, 8, 3), 1)
    path = tmp_path / "set" / "train.parquet"
    write_parquet(path, [encoded(grey), encoded(colour)], [0, 1])
    as_colour = get(path, cache).pixels
    np.testing.assert_array_equal(as_colour[0], np.stack([grey] * 3, axis=-1))
    np.testing.assert_array_equal(as_colour[1], colour)
    as_grey = get(path, cache, channels=1).pixels
    np.testing.assert_array_equal(as_grey[0, :, :, 0], grey)
    luma = colour @ [0.299, 0.587, 0.114]
    assert np.abs(as_grey[1, :, :, 0] - luma).max() <= 1


@pytest.mark.parametrize("shape", [(40, 60, 3), (61, 40, 3), (5, 7, 3), (33, 16, 3)])
def test_resized_as_torchvision_does(shape):
    from torchvision.transforms.functional import InterpolationMode, center_crop, resize

    pixels = noise(shape)
    wanted = resize(Image.fromarray(pixels), [16], InterpolationMode.BICUBIC)
    wanted = np.asarray(center_crop(wanted, [16, 16]))
    np.testing.assert_array_equal(decode(Picture("one", encoded(pixels)), 16, 3), wanted)


def test_common_formats_and_modes():
    pixels = noise((8, 8, 3))
    for kind, options in (("BMP", {}), ("WEBP", {"lossless": True}), ("PPM", {}), ("TIFF", {})):
        found = decode(Picture(kind, encoded(pixels, kind, **options)), 8, 3)
        np.testing.assert_array_equal(found, pixels)
    with_alpha = np.concatenate([pixels, noise((8, 8, 1), 1)], axis=-1)
    np.testing.assert_array_equal(decode(Picture("alpha", encoded(with_alpha)), 8, 3), pixels)
    palette = Image.fromarray(pixels).quantize(16)
    buffer = io.BytesIO()
    palette.save(buffer, "PNG", transparency=bytes(range(16)))
    wanted = np.asarray(palette.convert("RGB"))
    np.testing.assert_array_equal(decode(Picture("palette", buffer.getvalue()), 8, 3), wanted)


def test_pictures_that_are_not_local():
    import fsspec

    pixels = noise((8, 8, 3))
    with fsspec.open("memory://one.png", "wb") as file:
        file.write(encoded(pixels))
    np.testing.assert_array_equal(decode(Picture("one", path="memory://one.png"), 8, 3), pixels)


def test_exif_orientation_is_applied():
    pixels = noise((8, 8, 3))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = decode(Picture("turned", encoded(pixels, "PNG", exif=exif.tobytes())), 8, 3)
    np.testing.assert_array_equal(turned, np.rot90(pixels, -1))


# The cache


def test_the_fingerprint_depends_on_the_content(folder, cache, tmp_path):
    first = get(folder, cache)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert get(tmp_path / "elsewhere", tmp_path / "other").fingerprint == first.fingerprint
    assert get(folder, cache, "test").fingerprint != first.fingerprint
    write_parquet(
        folder / "train.parquet", [encoded(one) for one in noise((4, 8, 8, 3))], [0, 1, 1, 1]
    )
    assert get(folder, cache).fingerprint != first.fingerprint


def test_opening_a_cached_data_set_is_fast_and_imports_no_large_library(folder, cache):
    command = [sys.executable, "-c", PROBE, str(folder), str(cache)]
    fingerprint = get(folder, cache).fingerprint
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    count, found, seconds, *loaded = done.stdout.split()
    assert (count, found, loaded) == ("4", fingerprint, [])
    assert float(seconds) < 0.05  # CPU time
    assert done.stderr == ""


def test_only_the_cache_entry_is_written(folder, cache, capfd):
    before = sorted(folder.parent.rglob("*"))
    get(folder, cache)
    after = {p for p in folder.parent.rglob("*") if cache not in p.parents and p != cache}
    assert after == {*before}
    assert {p.name for p in entry_of(cache).iterdir()} == {
        "pixels.npy",
        "labels.npy",
        "entry.json",
    }
    assert [p.suffix for p in cache.iterdir() if p.is_file()] == [".lock"]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["pixels.npy", "labels.npy", "entry.json"])
@pytest.mark.parametrize("damage", ["missing", "short", "empty", "changed"])
def test_a_damaged_entry_is_rewritten(name, damage, folder, cache):
    wanted = noise((4, 8, 8, 3))
    get(folder, cache)
    victim = entry_of(cache) / name
    content = victim.read_bytes()
    victim.unlink()
    if damage != "missing":
        new = {"short": content[:-9], "empty": b"", "changed": content[:-9] + b"!" + content[-8:]}
        victim.write_bytes(new[damage])
    images = get(folder, cache)
    np.testing.assert_array_equal(images.pixels, wanted)
    assert images.labels.tolist() == [0, 1, 1, 0]
    assert images.classes == ("cat", "dog")


def test_an_entry_of_another_format_or_with_pickles_is_rewritten(folder, cache):
    fingerprint = get(folder, cache).fingerprint
    notes = entry_of(cache) / "entry.json"
    notes.write_text(json.dumps(json.loads(notes.read_text()) | {"format": "other"}))
    assert get(folder, cache).fingerprint == fingerprint
    np.save(entry_of(cache) / "labels.npy", np.array([{}, 1], dtype=object), allow_pickle=True)
    assert get(folder, cache).labels.tolist() == [0, 1, 1, 0]


def test_a_copied_entry_is_valid(folder, cache, monkeypatch):
    get(folder, cache)
    for file in entry_of(cache).iterdir():
        os.utime(file, (1, 1))
    monkeypatch.setattr("negmerge.vision.datasets._make_entry", None)
    assert len(get(folder, cache)) == 4


def test_a_temporary_folder_of_a_killed_run_is_replaced(folder, cache):
    get(folder, cache)
    entry = entry_of(cache)
    half = entry.with_name(f".{entry.name}.negmerge-tmp")
    entry.rename(half)
    (half / "labels.npy").unlink()
    assert len(get(folder, cache)) == 4
    assert not half.exists()


def test_concurrent_processes_all_succeed(folder, cache):
    command = [sys.executable, "-c", PROBE, str(folder), str(cache)]
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    results = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], results
    assert len({out.split()[1] for out, _ in results}) == 1
    assert entry_of(cache)


def test_concurrent_threads_decode_once(folder, cache):
    class Count:
        stages = done = 0

        def __enter__(self):
            return self

        def __exit__(self, *error): ...

        def stage(self, name, total, unit="bytes"):
            self.stages += 1
            assert total == 4

        def advance(self, count):
            self.done += count

    progress = Count()
    source = resolve(str(folder), size=8)
    with ThreadPoolExecutor(4) as pool:
        runs = [
            pool.submit(load, source, "train", cache=cache, progress=progress) for _ in range(4)
        ]
        assert len({run.result().fingerprint for run in runs}) == 1
    assert (progress.stages, progress.done) == (1, 4)


def test_a_cache_that_cannot_be_written(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="the cache cannot be written: Not a dir"):
        get(folder, tmp_path / "file" / "cache")


def test_a_cache_that_is_full(folder, cache, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("negmerge.vision.cache.write_fully", full)
    message = refused(folder, cache)
    assert (
        "the cache cannot be written: No space left on device; free disk space, or set" in message
    )


def test_the_default_cache_folder(folder, tmp_path, monkeypatch):
    monkeypatch.delenv("NEGMERGE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load(resolve(str(folder), size=8), "train")
    assert entry_of(tmp_path / "xdg" / "negmerge" / "data")
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path / "mine"))
    load(resolve(str(folder), size=8), "train")
    assert entry_of(tmp_path / "mine")


def overwrite(path: Path, content: bytes) -> None:
    """Replace the content; keep the size and the modification time."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_the_command_line_detects_a_changed_picture_with_the_same_size_and_time(tmp_path):
    image_folder(tmp_path / "set")
    victim = tmp_path / "set/train/cat/1.png"
    no_such_class = ["unlearn", "--set", "data={name: set, size: 8}", "--out", "run"]
    no_such_class += ["--set", "split.forget={class: ape}"]  # this error comes after the decoding
    _, err = negmerge(tmp_path, *no_such_class, code=2)
    assert "no such class" in err
    overwrite(victim, bytes(victim.stat().st_size))
    _, err = negmerge(tmp_path, *no_such_class, code=2)
    assert "train/cat/1.png'): cannot be decoded" in err


@pytest.mark.parametrize("room", [1 << 20, 0], ids=["read again", "too large to read again"])
def test_changed_files_with_the_same_size_and_time(room, tmp_path, cache, monkeypatch):
    """The same content is not decoded again, unless the data set is too large to hash."""
    monkeypatch.setattr("negmerge.vision.places.MAX_HASHED", room)
    image_folder(tmp_path / "set")
    victim = tmp_path / "set/train/cat/0.bmp"
    one, two = noise((2, 8, 8, 3), 7)
    victim.write_bytes(encoded(one, "BMP"))
    np.testing.assert_array_equal(get(tmp_path / "set", cache).pixels[0], one)
    overwrite(victim, encoded(two, "BMP"))
    np.testing.assert_array_equal(get(tmp_path / "set", cache).pixels[0], two)
    overwrite(victim, encoded(two, "BMP"))
    if room:
        monkeypatch.setattr("negmerge.vision.datasets._make_entry", None)
    for _ in range(2):  # the second time nothing is read
        np.testing.assert_array_equal(get(tmp_path / "set", cache).pixels[0], two)
        monkeypatch.setattr("negmerge.vision.places.file_digest", None)


# Errors


def refused(path: Path, cache: Path, split="train", **fields) -> str:
    with pytest.raises(FileError) as caught:
        get(path, cache, split, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isprintable()
    assert not cache.exists() or not [p for p in cache.iterdir() if p.is_dir()]
    return message


def test_a_broken_image_is_named(tmp_path, cache):
    good = encoded(noise((8, 8, 3)))
    path = tmp_path / "set" / "train.parquet"
    for bad in (good[:60], b"junk", b"", None, b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        write_parquet(path, [good, good, bad], [0, 1, 0])
        message = refused(path.parent, cache)
        assert "split 'train': image 2 ('2.png'): cannot be decoded: " in message


def test_a_broken_file_of_an_image_folder_is_named(tmp_path, cache):
    image_folder(tmp_path / "set")
    (tmp_path / "set" / "train" / "dog" / "1.png").write_bytes(b"junk")
    assert re.search(r"image 4 \('.*/train/dog/1.png'\): cannot", refused(tmp_path / "set", cache))


def test_sixteen_bits_per_channel_are_refused(tmp_path, cache):
    deep = encoded(np.full((8, 8), 40_000, np.uint16))
    write_parquet(tmp_path / "set" / "train.parquet", [deep], [0])
    assert "got mode I;16, wanted 8 bits per channel" in refused(tmp_path / "set", cache)


def test_paths_in_parquet_files_are_not_opened(tmp_path, cache):
    secret = tmp_path / "secret.png"
    secret.write_bytes(encoded(noise((8, 8, 3))))
    write_parquet(tmp_path / "set" / "train.parquet", [None], [0], name=str(secret))
    assert "neither content nor a file" in refused(tmp_path / "set", cache)


@pytest.mark.parametrize(
    ("labels", "kind", "message"),
    [
        ([0, -1], LABELS, "image 1 has no label"),
        ([0, None], LABELS, "image 1 has no label"),
        (["a", None], Value("string"), "image 1 has no label"),
        (["a", ""], Value("string"), "image 1 has no label"),
        ([0, -1], Value("int64"), "image 1 has no label"),
        ([0.5, 1.5], Value("float64"), "labels are float, wanted names or whole numbers"),
        ([], LABELS, "split 'train': has no images"),
    ],
)
def test_bad_labels(labels, kind, message, tmp_path, cache):
    pictures = [encoded(noise((8, 8, 3)))] * len(labels)
    write_parquet(tmp_path / "set" / "train.parquet", pictures, labels, kind)
    assert message in refused(tmp_path / "set", cache)


def test_a_label_above_the_number_of_classes(folder, cache):
    table = pq.read_table(folder / "train.parquet")
    names = table.schema.metadata[b"huggingface"].replace(b'"cat", "dog"', b'"cat"')
    pq.write_table(table.replace_schema_metadata({"huggingface": names}), folder / "train.parquet")
    assert "image 1 has label 1, wanted 0 to 0" in refused(folder, cache)


def test_missing_columns(tmp_path, cache):
    (tmp_path / "set").mkdir()
    rows = {"a": [1], "b\x1b[31m": ["x"]}
    Dataset.from_dict(rows).to_parquet(tmp_path / "set" / "train.parquet")
    message = refused(tmp_path / "set", cache)
    assert "no column 'image' for the images; there are: 'a' (int64), 'b\\x1b[31m'" in message


def test_unreadable_files(folder, tmp_path, cache, capfd):
    (tmp_path / "nothing").mkdir()
    assert "cannot be read" in refused(tmp_path / "nothing", cache)
    (folder / "link.parquet").symlink_to("nowhere")
    assert "link.parquet': No such file or directory" in refused(folder, cache)
    (folder / "link.parquet").unlink()
    (folder / "train.parquet").write_bytes(b"PAR1 but not really")
    assert f"{folder}: cannot be read" in refused(folder, cache)
    assert capfd.readouterr() == ("", "")


def test_data_that_changes_while_it_is_read(folder, cache, monkeypatch):
    from negmerge.vision import datasets

    def slow(*arguments):
        yield from decode_all(*arguments)
        os.utime(folder / "train.parquet")

    decode_all = datasets.decode_all
    monkeypatch.setattr(datasets, "decode_all", slow)
    assert "changed while it was read; run again" in refused(folder, cache)


def test_offline_error_names_the_searched_places_and_the_remedy(tmp_path, cache):
    begun = time.monotonic()
    with pytest.raises(FileError) as caught:
        load(resolve("cifar10"), "train", root=tmp_path, cache=cache)
    message = str(caught.value)
    assert (
        f"looked for '{tmp_path}/cifar10', '{tmp_path}/uoft-cs/cifar10', huggingface.co" in message
    )
    assert "HF_HUB_OFFLINE is set; set data.root or NEGMERGE_DATA to a folder with" in message
    assert message.endswith("cifar10/train.parquet")
    assert time.monotonic() - begun < 5


def test_id_config_and_revision_are_passed_to_the_hub(folder, cache, monkeypatch):
    import datasets

    requests = []

    def hub(path, name, revision, **options):
        requests.append((path, name, revision))
        builder = from_disk(str(folder), **options)
        builder.download_and_prepare = None  # rows are streamed
        return builder

    from_disk = datasets.load_dataset_builder
    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    source = resolve("someone/birds", size=8, config="small")
    images = load(source, "test", revision="v2", cache=cache)
    np.testing.assert_array_equal(images.pixels, noise((4, 8, 8, 3), 1))
    assert {*requests} == {("someone/birds", "small", "v2")}
    monkeypatch.setattr(datasets, "load_dataset_builder", None)
    assert load(source, "test", revision="v2", cache=cache).fingerprint == images.fingerprint
    with pytest.raises(
        FileError, match=r"looked for huggingface.co/datasets/someone/birds: .*; set"
    ):
        load(source, "test", revision="v3", cache=cache)


def test_unknown_names_and_bad_fields(tmp_path):
    with pytest.raises(OptionError, match="did you mean 'cifar10'"):
        resolve("cifar")
    with pytest.raises(FileError, match="no such file or folder"):
        resolve(str(tmp_path / "nothing"))
    with pytest.raises(OptionError, match=r"give the size of its images, e.g. data.size=224"):
        resolve("someone/birds")
    with pytest.raises(OptionError, match="no field 'colour'; there are: name, hub"):
        resolve("mnist", colour=3)
    with pytest.raises(OptionError, match="mean has 1 numbers, wanted 3"):
        resolve("mnist", channels=3)
    with pytest.raises(OptionError, match="channels 4, wanted 1 or 3"):
        resolve("mnist", channels=4)
    with pytest.raises(OptionError, match="size 0, wanted at least 1"):
        resolve("mnist", size=0)
    clip = resolve("mnist", size=224, channels=3, mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.2])
    assert clip.mean == (0.5, 0.4, 0.3)


# The embedded set


def embedded(split: str) -> tuple[list[bytes], list[int]]:
    table = pq.read_table(ASSETS / "fashion_small" / f"{split}.parquet")
    return [cell["bytes"] for cell in table["image"].to_pylist()], table["label"].to_pylist()


def test_the_embedded_set_is_balanced_and_small(cache):
    for split, each in (("train", 800), ("test", 250)):
        images = load(resolve("fashion_small"), split, cache=cache)
        assert np.bincount(images.labels).tolist() == [each] * 10
        assert images.classes[0] == "t-shirt or top"
    assert sum(f.stat().st_size for f in (ASSETS / "fashion_small").iterdir()) <= 6_000_000


@pytest.mark.skipif(not FULL_FASHION.is_dir(), reason=f"needs Fashion-MNIST in {FULL_FASHION}")
def test_the_embedded_set_is_the_output_of_the_script(tmp_path):
    spec = importlib.util.spec_from_file_location("make_embedded_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(FULL_FASHION, tmp_path)
    same_tools = {name: version(name) for name in script.MADE_WITH} == script.MADE_WITH
    for split, size in script.SIZES.items():
        name = f"{split}.parquet"
        made, ours = tmp_path / name, ASSETS / "fashion_small" / name
        assert made.read_bytes() == ours.read_bytes() or not same_tools
        full = pq.read_table(FULL_FASHION / name)
        places = script.chosen(full["label"].to_numpy(), size)
        pictures, labels = embedded(split)
        assert labels == full["label"].take(places).to_pylist()
        originals = full["image"].take(places).to_pylist()
        for picture, original in zip(pictures, originals, strict=True):
            theirs = Image.open(io.BytesIO(original["bytes"]))
            assert np.array_equal(Image.open(io.BytesIO(picture)), theirs)


def test_a_pipe_in_place_of_a_parquet_file_is_one_line(tmp_path):
    """To open a pipe waits for somebody who writes to it."""
    shutil.copytree(ASSETS / "fashion_small", tmp_path / "set")
    (tmp_path / "set/train.parquet").unlink()
    os.mkfifo(tmp_path / "set/train.parquet")
    _, err = negmerge(
        tmp_path, "unlearn", "demo", "--set", "data={name: ./set, size: 28, channels: 1}", code=2
    )
    assert re.fullmatch(r"error: .*(train|regular file).*\n", err)
