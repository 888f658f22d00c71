"""The command line with URLs, in processes of its own, and recipes with URLs."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import stores
from negmerge.errors import FileError, OptionError
from negmerge.runs.recipe import load_recipe
from negmerge.vision import places
from negmerge.vision.datasets import load, resolve
from negmerge.vision.places import ASSETS
from running import negmerge, negmerge_here, python

LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
from negmerge.cli import main
main(sys.argv[1:])
"""

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEGMERGE_SCRATCH", str(tmp_path / "scratch"))
    monkeypatch.setattr(places, "_FETCHED", {})
    stores.empty()
    return tmp_path / "scratch"


def refused(tmp_path: Path, *arguments: str) -> str:
    out, err = negmerge_here(tmp_path, *arguments, code=2)
    assert out == ""
    assert err.count("\n") == 1
    return err


# -------------------------------------------------------------------------------------------- files


def test_every_file_command_takes_urls(small_pool, tmp_path):
    base, pool = small_pool
    far, wild = f"file://{base}", f"file://{tmp_path}/model*.safetensors"
    negmerge(tmp_path, "merge", str(base), *map(str, pool), "-o", "here.safetensors")
    negmerge(tmp_path, "merge", far, wild, "-o", "there.safetensors")
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    assert here.read_bytes() == there.read_bytes()
    out, _ = negmerge_here(tmp_path, "merge", far, wild, "-o", "p.safetensors", "--dry-run")
    assert out.startswith("consensus of 3: ")
    negmerge_here(tmp_path, "apply", far, f"file://{there}", "--negate", "1", "-o", "a.safetensors")
    negmerge_here(tmp_path, "merge", far, wild, "--negate", "1", "-o", "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert '"kind": "patch"' in negmerge_here(tmp_path, "inspect", f"file://{there}", "--json")[0]
    negmerge_here(tmp_path, "convert", far, "-o", "c.safetensors")
    assert (tmp_path / "c.safetensors").exists()


def test_errors_of_the_command_line_name_the_url(small_pool, tmp_path):
    base, _ = small_pool
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(base.read_bytes()[:-4])
    err = refused(tmp_path, "merge", f"file://{base}", f"file://{cut}", "-o", "p.safetensors")
    assert err.startswith(f"error: file://{cut}: ")
    assert "scratch" not in err
    err = refused(tmp_path, "inspect", "zip://a.safetensors::s3://bucket/a.zip")
    assert "joins several file systems" in err
    err = refused(tmp_path, "inspect", "http://me:hidden@127.0.0.1:9/a.safetensors?key=hidden")
    assert err.startswith("error: http://127.0.0.1:9/a.safetensors: ")
    assert "hidden" not in err
    for verb in ("verify", "report", "status"):
        err = refused(tmp_path, verb, "s3://bucket/run")
        assert "is a URL; a run is on this machine" in err


def test_outputs_are_not_urls(small_pool, tmp_path):
    base, pool = small_pool
    err = refused(tmp_path, "merge", str(base), str(pool[0]), "-o", "s3://bucket/p.safetensors")
    assert "is a URL; outputs are on this machine" in err
    assert "is a URL" in refused(tmp_path, "unlearn", "demo", "--out", "s3://bucket/run")
    assert not (tmp_path / "s3:").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, scratch):
    (tmp_path / "large.safetensors").write_bytes(b"x" * 1_000_000)
    url = f"file://{tmp_path}/large.safetensors"
    _, err = python(tmp_path, "-c", LIMITED, "inspect", url, code=2)
    assert err.startswith(f"error: {url}: cannot be written to {scratch}")
    assert "File too large" in err
    assert err.count("\n") == 1
    assert not [*scratch.rglob("*.safetensors")]
    assert not [*scratch.rglob(".new-*")]


# ------------------------------------------------------------------------------------------ recipes


def test_data_at_a_url_is_the_same_data(tmp_path):
    stores.upload(ASSETS / "fashion_small", "watched://data/fashion_small")
    here = load(resolve("fashion_small"), "test", cache=tmp_path / "c1")
    options = {"root": "watched://data", "cache": tmp_path / "c2"}
    there = load(resolve("fashion_small"), "test", **options)
    assert there.fingerprint == here.fingerprint
    count = len(stores.Watched.reads)
    load(resolve("fashion_small"), "test", **options)
    assert len(stores.Watched.reads) == count
    named = resolve("watched://data/fashion_small", size=28, channels=1)
    assert load(named, "test", cache=tmp_path / "c3").fingerprint == here.fingerprint
    with pytest.raises(FileError, match=r"'watched://nowhere': no such folder; data.root must"):
        load(resolve("fashion_small"), "test", root="watched://nowhere", cache=tmp_path)


def test_a_recipe_keeps_urls_and_refuses_secrets(tmp_path):
    changes = ["data.root=s3://bucket/data/", "model.weights=gs://bucket/base.safetensors"]
    recipe = load_recipe(changes=changes)
    assert recipe.settings.data.root == "s3://bucket/data"
    assert "weights: gs://bucket/base.safetensors\n" in recipe.dump()
    (tmp_path / "again.yaml").write_text(recipe.dump())
    assert load_recipe(tmp_path / "again.yaml").dump() == recipe.dump()
    assert load_recipe(changes=["data.root=a/b"]).settings.data.root == Path("a/b")
    for field in ("data.root", "data.name", "model.weights", "retrain.weights"):
        for url in ("https://me:hidden@host/a", "https://host/a?X-Amz-Signature=hidden"):
            with pytest.raises(OptionError, match="has a user, a password or a query") as error:
                load_recipe(changes=[f"{field}={url}"])
            assert "hidden" not in str(error.value)
    with pytest.raises(OptionError, match="not a valid path"):
        load_recipe(changes=["data.root=3"])


def test_weights_at_a_url_are_the_same_model(tmp_path):
    """The scenario of a recipe, with the original and the list of records at URLs."""
    from negmerge.training.weights import save_model

    trained = load_recipe().make_scenario()
    save_model(tmp_path / "base.safetensors", trained.model(seed=5), {})
    stores.upload(tmp_path / "base.safetensors", "watched://b/base.safetensors")
    fsspec.filesystem("watched").pipe_file("/b/forget.txt", b"0\n5\n7\n")
    where = "watched://b/base.safetensors"
    changes = [f"model.weights={where}", "split.forget={indices: 'watched://b/forget.txt'}"]
    recipe = load_recipe(changes=[*changes, "data.limit.train=null"])
    scenario = recipe.make_scenario()
    scenario.check()
    assert scenario.original().weights == where
    local = load_recipe(changes=[f"model.weights={tmp_path}/base.safetensors"]).make_scenario()
    assert scenario.original().digest() == local.original().digest()
    assert len(scenario.splits.forget) == 3
    missing = load_recipe(changes=["model.weights=watched://b/missing.safetensors"])
    with pytest.raises(FileError, match=r"^watched://b/missing.safetensors: no such file"):
        missing.make_scenario().check()
