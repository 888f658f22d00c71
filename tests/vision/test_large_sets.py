"""Large data sets: only what is needed is read, downloads go on, and changes are still noticed."""

from __future__ import annotations

import hashlib
import io
import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import datasets as library
import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features
from datasets import Image as ImageFeature
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from clips import make_clip, make_sets
from negmerge.errors import FileError
from negmerge.runs.recipe import check_recipe
from negmerge.vision import places
from negmerge.vision.datasets import load, load_some, resolve
from negmerge.vision.places import Local, walk
from negmerge.vision.splits import balanced, held_out_rows

CLASSES = ["cat", "dog", "emu"]
ROWS, GROUP, SHARDS = 400, 10, 4


def noise(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def encoded(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


PIXELS = noise((ROWS, 32, 32, 3))  # row groups are larger than the 8 KB that arrow joins


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A training split of 400 rows in 4 files of 10 row groups, as the Hub lays ImageNet out."""
    folder = tmp_path_factory.mktemp("shards") / "birds"
    (folder / "data").mkdir(parents=True)
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=CLASSES)})
    cells = [{"bytes": encoded(one), "path": f"{k}.png"} for k, one in enumerate(PIXELS)]
    rows = {"image": cells, "label": [k % 3 for k in range(ROWS)]}
    table = Dataset.from_dict(rows, features=features).data.table
    for k in range(SHARDS):
        part = table.slice(k * ROWS // SHARDS, ROWS // SHARDS)
        name = f"data/train-{k:05d}-of-{SHARDS:05d}.parquet"
        pq.write_table(part, folder / name, row_group_size=GROUP)
    pq.write_table(table.slice(0, 30), folder / "data/validation-00000-of-00001.parquet")
    return folder


class Counted(LocalFileSystem):
    """Local files behind an address, with a list of what is read and a limit that cuts the line."""

    protocol = "counted"
    reads: ClassVar[list[tuple[str, int, int]]] = []
    limit = 10**9

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.removeprefix("counted://").lstrip("/")

    def _open(self, path, mode="rb", block_size=None, **options):
        file = super()._open(path, mode, block_size, **options)
        plain = file.f.read

        def read(size: int = -1) -> bytes:
            at = file.f.tell()
            data = plain(size)
            Counted.reads.append((Path(path).name, at, at + len(data)))
            if sum(end - begin for _, begin, end in Counted.reads) > Counted.limit:
                raise ConnectionError("the line was cut")
            return data

        file.f = Reader(file.f, read)
        return file


class Reader:
    """A file with another `read`."""

    def __init__(self, file, read) -> None:
        self.file, self.read = file, read

    def __getattr__(self, name):
        return getattr(self.file, name)


@pytest.fixture
def hub(shards, monkeypatch):
    """The same files at addresses that are not local, found as those of the Hub are."""
    fsspec.register_implementation("counted", Counted, clobber=True)
    from_disk = library.load_dataset_builder

    def remote(path, name, revision, **options):
        builder = from_disk(str(shards), **options)
        files = builder.config.data_files.items()
        builder.config.data_files = {
            split: [f"counted://{file}" for file in some] for split, some in files
        }
        return builder

    monkeypatch.setattr(library, "load_dataset_builder", remote)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", False)
    Counted.reads, Counted.limit = [], 10**9
    return resolve("someone/birds", size=32, test="validation")


def pictures_read(shards: Path) -> set[int]:
    """The row groups, numbered over all files, of whose pictures something was read."""
    found = set()
    for k, path in enumerate(sorted((shards / "data").glob("train-*"))):
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups):
            chunk = footer.row_group(group).column(0)
            assert chunk.path_in_schema == "image.bytes"
            begin = chunk.dictionary_page_offset or chunk.data_page_offset
            end = begin + chunk.total_compressed_size
            for name, first, last in Counted.reads:
                is_footer = last == path.stat().st_size  # read together with what is before it
                if name == path.name and first < end and begin < last and not is_footer:
                    found.add(k * footer.num_row_groups + group)
    return found


def test_only_row_groups_with_validation_rows_are_fetched(hub, shards, tmp_path):
    images = load(hub, "train", part="held_out", cache=tmp_path)
    picked = held_out_rows(ROWS)
    np.testing.assert_array_equal(images.pixels, PIXELS[picked])
    assert images.labels.tolist() == (picked % 3).tolist()
    assert images.classes == tuple(CLASSES)
    needed = {int(row) // GROUP for row in picked}
    assert len(needed) < ROWS // GROUP
    assert pictures_read(shards) == needed
    Counted.reads = []
    load(hub, "train", part="held_out", cache=tmp_path)
    assert Counted.reads == []


def test_labels_are_fetched_without_pictures(hub, shards, tmp_path):
    images = load(hub, "train", part="labels", cache=tmp_path)
    assert images.labels.tolist() == [k % 3 for k in range(ROWS)]
    assert images.pixels.shape == (ROWS, 0, 0, 3)
    assert pictures_read(shards) == set()


@pytest.mark.parametrize("part", ["held_out", "all"])
def test_an_interrupted_download_goes_on_where_it_stopped(part, hub, shards, tmp_path):
    size = sum(path.stat().st_size for path in (shards / "data").glob("train-*"))
    Counted.limit = int(0.7 * size)
    with pytest.raises(FileError, match=r"someone/birds: the line was cut; set data.root or"):
        load(hub, "train", part=part, cache=tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir() and path.name[0] != "."]
    (kept,) = tmp_path.glob(".birds-train-*.parts/*")
    done = sum(len(np.load(file)) for file in kept.iterdir())
    assert done > 0
    rest = (held_out_rows(ROWS) if part == "held_out" else np.arange(ROWS))[done:]
    Counted.reads, Counted.limit = [], 10**9
    images = load(hub, "train", part=part, cache=tmp_path)
    wanted = PIXELS[held_out_rows(ROWS)] if part == "held_out" else PIXELS
    np.testing.assert_array_equal(images.pixels, wanted)
    assert pictures_read(shards) == {int(row) // GROUP for row in rest}
    assert not list(tmp_path.glob(".*.parts"))


def test_a_damaged_part_is_fetched_again(hub, shards, tmp_path):
    Counted.limit = int(0.7 * sum(f.stat().st_size for f in (shards / "data").glob("train-*")))
    with pytest.raises(FileError, match="the line was cut"):
        load(hub, "train", part="held_out", cache=tmp_path)
    (tmp_path / next(tmp_path.glob(".birds-*.parts/*/0.npy"))).write_bytes(b"\x93NUMPY")
    Counted.limit = 10**9
    images = load(hub, "train", part="held_out", cache=tmp_path)
    np.testing.assert_array_equal(images.pixels, PIXELS[held_out_rows(ROWS)])


def test_a_local_folder_of_parquet_is_read_by_row_groups(shards, tmp_path, monkeypatch):
    """Unneeded row groups are overwritten with junk, which nobody notices."""
    copy = tmp_path / "set" / "data"
    copy.mkdir(parents=True)
    picked = held_out_rows(ROWS)
    needed = {int(row) // GROUP for row in picked}
    for k, path in enumerate(sorted((shards / "data").iterdir())):
        content = bytearray(path.read_bytes())
        footer = pq.read_metadata(path)
        for group in range(footer.num_row_groups if path.name.startswith("train") else 0):
            chunk = footer.row_group(group).column(0)
            begin = chunk.dictionary_page_offset or chunk.data_page_offset
            if k * footer.num_row_groups + group not in needed:
                content[begin : begin + chunk.total_compressed_size] = bytes(
                    chunk.total_compressed_size
                )
        (copy / path.name).write_bytes(content)
    source = resolve(str(tmp_path / "set"), size=32)
    images = load(source, "train", part="held_out", cache=tmp_path / "cache")
    np.testing.assert_array_equal(images.pixels, PIXELS[picked])
    with pytest.raises(FileError):
        load(source, "train", cache=tmp_path / "cache")


def test_only_picked_files_of_an_image_folder_are_decoded(tmp_path):
    for split, count in (("train", 40), ("test", 6)):
        for name in ("cat", "dog"):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for k in range(count // 2):
                (folder / f"{k:02d}.png").write_bytes(b"not a picture")
    picked = held_out_rows(40)
    for row in picked:
        path = tmp_path / "set/train" / ("cat", "dog")[row // 20] / f"{row % 20:02d}.png"
        path.write_bytes(encoded(noise((8, 8, 3), int(row))))
    source = resolve(str(tmp_path / "set"), size=8)
    images = load(source, "train", part="held_out", cache=tmp_path / "cache")
    for found, row in zip(images.pixels, picked, strict=True):
        np.testing.assert_array_equal(found, noise((8, 8, 3), int(row)))
    assert images.ids is not None
    assert images.ids[0] == f"train/{('cat', 'dog')[picked[0] // 20]}/{picked[0] % 20:02d}.png"


@pytest.mark.parametrize("extra", [None, "train/a/notes.txt", "train/a/deeper/1.png"])
def test_a_listed_image_folder_is_read_as_datasets_reads_it(extra, tmp_path, monkeypatch):
    """Names whose order depends on the slash; a folder with other things is left to `datasets`."""
    names = ["B", "a", "a b", "a-b", "a.b", "é"]
    for split in ("train", "test"):
        for c, name in enumerate(names[: 6 if split == "train" else 4]):
            folder = tmp_path / "set" / split / name
            folder.mkdir(parents=True)
            for k, file in enumerate(("10.PNG", "2.png", "2-.png", "_x.png", ".hidden.png")):
                (folder / file).write_bytes(encoded(noise((4, 4, 3), 10 * c + k)))
    if extra is not None:
        (tmp_path / "set" / extra).parent.mkdir(exist_ok=True)
        (tmp_path / "set" / extra).write_bytes(encoded(noise((4, 4, 3), 99)))
    source = resolve(str(tmp_path / "set"), size=4)

    def both(cache: str) -> list:
        try:
            found = [load(source, split, cache=tmp_path / cache) for split in ("train", "test")]
        except FileError as error:
            return [str(error)]
        return [
            (i.fingerprint, i.classes, None if i.ids is None else i.ids.tolist()) for i in found
        ]

    ours = both("ours")
    monkeypatch.setattr("negmerge.vision.tables.open_folder", lambda *_: None)
    assert ours == both("theirs")


PATHS = st.sets(st.text("a.-0é", min_size=1, max_size=3).map(lambda t: f"x{t}"), max_size=4)


@settings(max_examples=30, deadline=None)
@given(files=PATHS, inner=st.dictionaries(st.sampled_from(["xa", "xa-", "x0"]), PATHS, max_size=2))
def test_a_snapshot_hashes_the_sorted_paths_sizes_and_times(files, inner):
    with TemporaryDirectory() as name:
        root = Path(name).resolve() / "set"
        for folder, some in ({"": files - inner.keys()} | inner).items():
            (root / folder).mkdir(parents=True, exist_ok=True)
            for k, file in enumerate(sorted(some)):
                (root / folder / file).write_bytes(bytes(k))
        found = sorted(str(path) for path in root.rglob("*") if path.is_file())
        assert [path for path, _ in walk(root)] == found
        stats = [(path, os.stat(path)) for path in found]  # noqa: PTH116
        identity = [str(root), [(path, s.st_size, s.st_mtime_ns) for path, s in stats]]
        stamp = "".join(f"{s.st_ino} {s.st_ctime_ns}\n" for _, s in stats)
        snapshot = Local(root).snapshot()
        text = json.dumps([identity, "train", 8])
        assert snapshot.key("train", 8) == hashlib.sha256(text.encode()).hexdigest()
        assert snapshot.stamp == hashlib.sha256(stamp.encode()).hexdigest()
        assert (snapshot.count, snapshot.size) == (len(found), sum(s.st_size for _, s in stats))


def test_a_snapshot_of_a_large_folder_is_used_again_for_as_long_as_it_took(tmp_path, monkeypatch):
    (tmp_path / "one.png").write_bytes(b"1")
    place, clock = Local(tmp_path), iter([0.0, 4.0, 7.9, 8.1, 12.0, 12.5, 13.0])
    monkeypatch.setattr(places, "MANY", 1)
    monkeypatch.setattr(places.time, "monotonic", lambda: next(clock))
    first = place.snapshot()  # from 0 to 4
    (tmp_path / "two.png").write_bytes(b"2")
    assert place.snapshot(fresh=False) is first  # at 7.9
    second = place.snapshot(fresh=False)  # from 8.1 to 12
    assert (first.count, second.count) == (1, 2)
    (tmp_path / "three.png").write_bytes(b"3")
    assert place.snapshot().count == 3  # fresh


def test_of_a_large_test_split_only_the_limit_is_decoded(shards, tmp_path, monkeypatch):
    source = resolve(str(shards), size=32, test="validation")

    def choose(labels: np.ndarray) -> np.ndarray:
        return balanced(labels, 7, np.random.default_rng(3))

    whole, positions = load_some(source, "test", choose, cache=tmp_path)
    assert len(whole) == 30
    monkeypatch.setattr("negmerge.vision.datasets.LARGE", 29 * 32 * 32 * 3)
    some, order = load_some(source, "test", choose, cache=tmp_path)
    assert len(some) == 7
    assert order.tolist() == list(range(7))
    np.testing.assert_array_equal(some.pixels[order], whole.pixels[positions])
    np.testing.assert_array_equal(some.labels[order], whole.labels[positions])
    everything, order = load_some(source, "test", lambda labels: np.arange(30), cache=tmp_path)
    assert everything.fingerprint == whole.fingerprint
    assert order.tolist() == list(range(30))


def test_a_clip_run_reports_the_same_images_of_a_large_control_set(tmp_path, monkeypatch):
    monkeypatch.setenv("NEGMERGE_CACHE", str(tmp_path / "cache"))
    root = make_sets(tmp_path / "sets")
    tree = {
        "data": {"name": "mnist", "root": str(root), "limit": {"test": 20}},
        "model": {"name": str(make_clip(tmp_path / "clip", root, tmp_path / "cache"))},
        "clip": {"control": {"name": "cifar10", "limit": {"test": 11}}},
        "search": {"samples": 5},
        "pool": {"grid": {"epochs": [1]}},
    }

    def reported() -> tuple[int, list]:
        scenario = check_recipe(tree, "test").make_scenario()
        feed = scenario.eval_sets("report")["retain"]
        inputs, labels = feed.test_batch(np.arange(len(feed)))
        return len(scenario.control[1]), [inputs.numpy().tobytes(), labels.tolist()]

    sizes = []
    for large in (1 << 30, 0):
        monkeypatch.setattr("negmerge.vision.datasets.LARGE", large)
        sizes.append(reported())
    assert [size for size, _ in sizes] == [60, 11]
    assert sizes[0][1] == sizes[1][1]
