"""The package: what the wheel holds, what each extra brings, what is said where one is missing."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch

import negmerge
from negmerge import extras
from negmerge.errors import NegMergeError

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/negmerge"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHIPPED = {".j2", ".js", ".json", ".jsonl", ".md", ".parquet", ".py", ".safetensors", ".yaml"}
NAMES = {
    "mlflow_skinny": "mlflow",
    "grad_cam": "pytorch_grad_cam",
    "open_clip_torch": "open_clip",
    "pillow": "PIL",
    "pyyaml": "yaml",
    "scikit_learn": "sklearn",
}
"""What distributions are called when they are imported, if otherwise."""
WITH_BASE = {"llvmlite", "pydantic_core"}


# ----------------------------------------------------------------------------------------- contents


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Source distribution and wheel, made of a tree in which others have worked."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in (".gitignore", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    shutil.copytree(SOURCE, tree / "src/negmerge")
    shutil.copytree(ROOT / "tests/recipes", tree / "tests/recipes")
    (tree / "src/negmerge/__pycache__").mkdir(exist_ok=True)
    for name in ("__pycache__/a.pyc", "__pycache__/a.nbi", "merging/loop.nbc"):
        (tree / "src/negmerge" / name).write_bytes(b"x")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(tree)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_holds_the_package_and_nothing_else(built: Path):
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    files = (path for path in SOURCE.rglob("*") if path.is_file())
    wanted = {
        path.relative_to(SOURCE.parent).as_posix()
        for path in files
        if path.suffix in SHIPPED or path.name == "LICENSE"
    }
    assert names == wanted
    assert "negmerge/runs/store.py" in names, "git ignores a folder of this name elsewhere"
    assert "negmerge/recipes/demo.yaml" in names
    assert "negmerge/assets/fashion_small/train.parquet" in names
    assert "negmerge/assets/desk_clip/open_clip_model.safetensors" in names
    assert "negmerge/assets/stories15m/model.safetensors" in names


def test_the_source_distribution_holds_what_the_wheel_is_made_of(built: Path):
    (wheel,), (archive,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    package = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    beside = {"CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
    assert names - {".gitignore"} == beside | {f"src/{name}" for name in package}


# ------------------------------------------------------------------------------------------- extras


def imported_as(requirements: list[str]) -> set[str]:
    """The import names of requirements, without those of this package."""
    found = {re.split(r"[^\w-]", one)[0].lower().replace("-", "_") for one in requirements}
    return {NAMES.get(name, name) for name in found} - {"negmerge"}


def imports() -> dict[str, set[str]]:
    """The libraries that the package imports, and in which modules."""
    found: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                modules = [node.module]
            else:
                continue
            for module in modules:
                found.setdefault(module.partition(".")[0], set()).add(path.name)
    known = {"negmerge", "__future__", *sys.stdlib_module_names}
    return {library: places for library, places in found.items() if library not in known}


def test_the_base_install_has_what_the_design_names():
    assert imported_as(PROJECT["dependencies"]) == {
        "cyclopts", "numba", "numpy", "pydantic", "rich", "safetensors", "yaml",
    }  # fmt: skip


def test_every_extra_names_its_libraries():
    optional = PROJECT["optional-dependencies"]
    for extra, libraries in extras.EXTRAS.items():
        assert set(libraries) == imported_as(optional[extra]), extra
    assert optional["all"] == ["negmerge[clip,text,harness,ray,remote,hub]"]
    assert all("negmerge[unlearn]" in optional[extra] for extra in ("clip", "text", "ray"))


def test_every_library_that_is_imported_is_a_dependency():
    known = {name for libraries in extras.EXTRAS.values() for name in libraries}
    known |= imported_as(PROJECT["dependencies"]) | WITH_BASE
    assert {library: places for library, places in imports().items() if library not in known} == {}


# -------------------------------------------------------------------------------- missing libraries


def test_only_imports_of_this_package_are_answered(monkeypatch):
    monkeypatch.setitem(extras.EXTRAS, "clip", ("not_there",))
    for code in ("import not_there", "from importlib import import_module as i; i('not_there')"):
        with pytest.raises(extras.MissingExtraError, match=r"pip install 'negmerge\[clip\]'$"):
            exec(code, {"__name__": "negmerge.scenarios.anything"})  # noqa: S102
        with pytest.raises(ModuleNotFoundError) as error:
            exec(code, {"__name__": "another_package"})  # noqa: S102
        assert not isinstance(error.value, NegMergeError)
    assert importlib.util.find_spec("not_there") is None


HIDE = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in {hidden} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def without(libraries: set[str], code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process that does not find some libraries."""
    command = [sys.executable, "-c", HIDE.format(hidden=libraries) + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


UNLEARN = set(extras.EXTRAS["unlearn"])
MAIN = "from negmerge.cli import main; main(sys.argv[1:])"


def line_of(library: str, extra: str) -> str:
    return f"error: {extras.missing_message(library, extra)}\n"


@pytest.mark.parametrize(
    ("arguments", "library"),
    [
        (["unlearn", "demo", "--out", "run"], "torch"),
        (["reproduce", "T2"], "torch"),
        (["list", "rivals"], "torch"),
        (["list", "models"], "torch"),
    ],
)
def test_a_verb_names_the_extra_that_it_needs(arguments, library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = without(UNLEARN, MAIN, *arguments)
    assert (done.returncode, done.stderr) == (2, line_of(library, "unlearn"))
    assert not list(tmp_path.iterdir())


def test_a_page_names_the_extra_that_it_needs(tmp_path):
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    done = without(UNLEARN, MAIN, "report", tmp_path)
    assert (done.returncode, done.stderr) == (2, line_of("jinja2", "unlearn"))


def test_a_url_names_the_extra_that_it_needs(tmp_path):
    done = without({"fsspec", "s3fs"}, MAIN, "inspect", "s3://bucket/a.safetensors")
    assert (done.returncode, done.stderr) == (2, line_of("fsspec", "remote"))


def test_a_pickle_needs_torch_and_safetensors_do_not(small_pool, tmp_path):
    base, _ = small_pool
    torch.save({"w": torch.ones(2)}, tmp_path / "a.pt")
    out = tmp_path / "out.safetensors"
    done = without(UNLEARN, MAIN, "convert", tmp_path / "a.pt", "--trust", "-o", out)
    assert (done.returncode, done.stderr) == (2, line_of("torch", "unlearn"))
    assert not out.exists()
    done = without(UNLEARN, MAIN, "convert", base, "-o", out)
    assert done.returncode == 0, done.stderr
    assert out.exists()


CLIP = """
from negmerge.errors import NegMergeError
from negmerge.scenarios.clip.pretrained import ClipSource
try:
    ClipSource("desk_clip").build()
except NegMergeError as error:
    print(error)
"""


def test_a_clip_names_its_extra():
    done = without({"open_clip"}, CLIP)
    assert done.stdout == extras.missing_message("open_clip", "clip") + "\n", done.stderr


NAME = """
import negmerge as nm
try:
    getattr(nm, sys.argv[1])
except nm.NegMergeError as error:
    print(error)
"""


@pytest.mark.parametrize("name", negmerge.__all__)
def test_a_public_name_is_there_or_names_the_extra_that_it_needs(name):
    done = without(UNLEARN, NAME, name)
    assert done.returncode == 0, done.stderr
    if name in ("Unlearned", "push", "report", "run", "study", "unlearn"):
        assert done.stdout.endswith("pip install 'negmerge[unlearn]'\n")
    else:
        assert done.stdout == ""


TENSOR = """
import negmerge as nm
tau = nm.merge(sys.argv[1], sys.argv[2:])
try:
    tau["head.weight"]
except nm.NegMergeError as error:
    print(error)
"""


def test_a_library_that_is_missed_in_the_middle_of_a_function(small_pool):
    base, pool = small_pool
    done = without(UNLEARN, TENSOR, base, *pool)
    assert done.stdout == extras.missing_message("torch", "unlearn") + "\n", done.stderr
