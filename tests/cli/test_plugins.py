"""Entries of other packages, files and modules: on the command line, in workers, and refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import negmerge
from negmerge import plugins
from negmerge.errors import OptionError
from negmerge.merging.rules import rules
from negmerge.registry import Registry
from negmerge.runs.executors import Cores, LocalProcesses
from negmerge.runs.watch import Unit, Watch
from running import negmerge as run

RULE = """
from dataclasses import dataclass
from negmerge.merging.rules import Rule, rule
from negmerge.merging.statistics import Statistic

@rule
@dataclass(frozen=True)
class {name}(Rule):
    \"\"\"The mean, times {factor}.\"\"\"

    statistics = (Statistic("doubled", lambda delta: 2 * delta),)

    @staticmethod
    def finish(c, doubled):
        return doubled / (2 * c[0]) * {factor}
"""
MINE = RULE.format(name="Mine", factor=3.0)


def merged(place: Path, pool: tuple[Path, list[Path]], out: str, *more: str, **environment: str):
    """Merge a pool; what is written to standard error."""
    base, models = pool
    return run(place, "merge", str(base), *map(str, models), "-o", out, *more, **environment)[1]


def mean_change(pool: tuple[Path, list[Path]], name: str) -> np.ndarray:
    base, models = pool
    return np.mean([load_file(one)[name] - load_file(base)[name] for one in models], axis=0)


def applied(place: Path, pool: tuple[Path, list[Path]], patch: str, name: str) -> np.ndarray:
    """What a patch adds to a tensor."""
    base, _ = pool
    run(place, "apply", str(base), patch, "--add", "1", "-o", "out.safetensors")
    return load_file(place / "out.safetensors")[name] - load_file(base)[name]


# -------------------------------------------------------------------------------- files and modules


@pytest.mark.slow
def test_a_rule_of_a_file_cold_and_warm(small_pool, tmp_path):
    (tmp_path / "my_rules.py").write_text(MINE)
    own = {"NUMBA_CACHE_DIR": str(tmp_path / "compiled")}
    arguments = ["--plugin", "my_rules.py", "--rule", "mine"]
    assert merged(tmp_path, small_pool, "cold", *arguments, **own) == ""
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.nbc")}
    assert kept
    assert merged(tmp_path, small_pool, "warm", *arguments, **own) == ""
    again = {path: path.stat().st_mtime_ns for path in (tmp_path / "compiled").rglob("*.nbc")}
    assert again == kept, "nothing is compiled again"
    assert (tmp_path / "cold").read_bytes() == (tmp_path / "warm").read_bytes()
    wanted = 3 * mean_change(small_pool, "head.weight")
    found = applied(tmp_path, small_pool, "cold", "head.weight")
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    (tmp_path / "my_rules.py").write_text(RULE.format(name="Mine", factor=-5.0))
    merged(tmp_path, small_pool, "changed", *arguments, **own)
    found = applied(tmp_path, small_pool, "changed", "head.weight")
    np.testing.assert_allclose(found, -5 / 3 * wanted, atol=1e-6)


METRIC = """
from negmerge.evaluation.metrics import Histogram, Measured, Metric, metrics

for name, file in {files}.items():
    metrics.register(name, Metric(
        name=name, label=name, short=name, better="lower", sets=(), columns=(),
        value=lambda found: Measured(0.0, 0.0, 0.0, 1),
        histogram=Histogram(file, name, "Some numbers.", lambda found: []),
    ))
"""


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"one": "attack.csv"}, "'attack.csv', which another metric writes; choose another name"),
        ({"one": "same.csv", "two": "Same.csv"}, "'Same.csv', which another metric writes"),
        ({"one": "scores.csv"}, "'scores.csv'; wanted letters"),
        ({"one": "../../x.csv"}, "'../../x.csv'; wanted letters"),
    ],
)
def test_histograms_that_would_get_one_file_are_refused(files, message, tmp_path):
    (tmp_path / "mine.py").write_text(METRIC.format(files=files))
    _, err = run(tmp_path, "list", "metrics", "--plugin", "mine.py", code=2)
    assert message in err
    assert "Traceback" not in err
    (tmp_path / "mine.py").write_text(METRIC.format(files={"one": "own.csv"}))
    assert "one" in run(tmp_path, "list", "metrics", "--plugin", "mine.py")[0]


def test_before_and_after_the_verb_files_and_modules(small_pool, tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/my_module.py").write_text(RULE.format(name="Second", factor=2.0))
    (tmp_path / "other").mkdir()
    for folder, name in ((tmp_path, "First"), (tmp_path / "other", "Third")):
        (folder / "rules.py").write_text(RULE.format(name=name, factor=1.0))  # one name, two files
    site = f"{tmp_path}/lib:{Path(negmerge.__file__).parents[1]}"
    before, after = ["--plugin", "rules.py"], ["--plugin=my_module", "--plugin", "other/rules.py"]
    out, err = run(tmp_path, *before, "list", "rules", "--json", *after, PYTHONPATH=site)
    found = json.loads(out)
    assert err == ""
    places = {name: entry["plugin"] for name, entry in found.items() if "plugin" in entry}
    assert places == {
        "first": str(tmp_path / "rules.py"),
        "second": str(tmp_path / "lib/my_module.py"),
        "third": str(tmp_path / "other/rules.py"),
    }
    table, _ = run(tmp_path, "list", "rules", "--plugin", "rules.py")
    assert "rules.py" in table


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("x = 1\n1 / 0\n", "ZeroDivisionError: division by zero (broken.py, line 2)"),
        ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
        ("import no_such_library\n", "No module named 'no_such_library' (broken.py, line 1)"),
        ("raise SystemExit(3)\n", "SystemExit: 3 (broken.py, line 1)"),
        ("raise ValueError('two\\nlines \\x1b[31m')\n", "two lines \\x1b[31m (broken.py, line 1)"),
        (
            MINE + MINE,
            "rule 'mine' is registered already, by broken.py; choose another name "
            "(broken.py, line 21)",
        ),
        (
            RULE.format(name="Consensus", factor=1.0),
            "rule 'consensus' is registered already, by this package; choose another name "
            "(broken.py, line 6)",
        ),
    ],
    ids=["raises", "syntax", "import", "exit", "lines", "twice", "taken"],
)
def test_a_file_that_cannot_be_imported_is_one_line(content, told, tmp_path):
    (tmp_path / "broken.py").write_text(content)
    _, err = run(tmp_path, "list", "rules", "--plugin", "broken.py", code=2)
    assert err.startswith("error: --plugin 'broken.py': cannot be imported: ")
    assert err.endswith(f"{told}\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("nothing.py", "No such file or directory"),
        (".py", "No such file or directory"),
        ("x" * 5000 + ".py", "File name too long"),
        ("folder.py", "Is a directory"),
        ("nothing", "; name an installed module, or a file that ends in .py"),
        ("json.nothing", "; name an installed module, or a file that ends in .py"),
        ("./rules", "cannot be imported"),
        ("", "cannot be imported"),
    ],
)
def test_a_plugin_that_is_not_there_is_one_line(name, told, tmp_path):
    (tmp_path / "folder.py").mkdir()
    _, err = run(tmp_path, "list", "selectors", f"--plugin={name}", code=2)
    assert err.startswith("error: --plugin ")
    assert told in err
    assert err.count("\n") == 1


# ------------------------------------------------------------------------------------- entry points


def install(place: Path, package: str, points: str, **modules: str) -> None:
    """A package with entry points, as pip leaves it."""
    (place / package).mkdir(parents=True)
    (place / package / "__init__.py").touch()
    for name, content in modules.items():
        (place / package / f"{name}.py").write_text(content)
    about = place / f"{package}-1.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.5\n")
    (about / "entry_points.txt").write_text(points)


@pytest.fixture
def site(tmp_path) -> dict[str, str]:
    """The variable that makes a folder of packages known, beside this package."""
    (tmp_path / "site").mkdir()
    return {"PYTHONPATH": f"{tmp_path}/site:{Path(negmerge.__file__).parents[1]}"}


KINDS = """
from dataclasses import replace
from negmerge.evaluation.criteria import criteria
from negmerge.rivals.registry import rivals
from negmerge.vision.datasets import datasets
from negmerge.vision.networks import SmallResNet, models

def my_net(classes, channels):
    \"\"\"A network of another package.\"\"\"
    return SmallResNet(classes, channels)

models.register("my_net", my_net)
datasets.register("my_data", replace(datasets.get("fashion_small"), name="my_data"))
criteria.register("my_way", replace(criteria.get("keep_retain"), name="my_way"))
rivals.register("my_rival", rivals.get("finetune"))
"""
POINTS = """
[negmerge.rules]
mine = friend.rules:Mine
[negmerge.models]
my_net = friend.kinds:my_net
[negmerge.datasets]
my_data = friend.kinds
[negmerge.criteria]
my_way = friend.kinds
[negmerge.rivals]
my_rival = friend.kinds
"""


@pytest.mark.slow
def test_entries_of_an_installed_package(small_pool, tmp_path, site):
    install(tmp_path / "site", "friend", POINTS, rules=MINE, kinds=KINDS)
    assert merged(tmp_path, small_pool, "p", "--rule", "mine", **site) == ""
    found = applied(tmp_path, small_pool, "p", "head.weight")
    wanted = 3 * mean_change(small_pool, "head.weight")
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    listing = (
        "import json; from negmerge.cli.listing import KINDS as k; print(json.dumps({n: k[n]() "
    )
    listing += "for n in ('rules', 'models', 'datasets', 'criteria', 'rivals')}))"
    done = subprocess.run(
        [sys.executable, "-c", listing], env=os.environ | site, capture_output=True, text=True
    )
    assert done.stderr == ""
    found = json.loads(done.stdout)
    names = {
        kind: {name: entry["plugin"] for name, entry in entries.items() if "plugin" in entry}
        for kind, entries in found.items()
    }
    rules_file, kinds_file = (str(tmp_path / "site/friend" / f) for f in ("rules.py", "kinds.py"))
    assert names == {
        "rules": {"mine": rules_file},
        "models": {"my_net": kinds_file},
        "datasets": {"my_data": kinds_file},
        "criteria": {"my_way": kinds_file},
        "rivals": {"my_rival": kinds_file},
    }


def test_an_entry_point_that_fails_is_a_warning_and_the_rest_goes_on(small_pool, tmp_path, site):
    points = "[negmerge.rules]\nmine = {0}.rules:Mine\nother = {0}.rules:Mine\n"
    install(tmp_path / "site", "a_raises", points.format("a_raises"), rules="1 / 0\n")
    install(tmp_path / "site", "b_gone", "[negmerge.rules]\nx = b_gone.nothing\n")
    install(tmp_path / "site", "friend", "[negmerge.rules]\nmine = friend.rules:Mine", rules=MINE)
    install(tmp_path / "site", "twice", "[negmerge.rules]\nmine = twice.rules:Mine", rules=MINE)
    plain = MINE.replace("@rule\n", "")
    install(tmp_path / "site", "unsaid", "[negmerge.rules]\nz = unsaid.rules:Mine", rules=plain)
    err = merged(tmp_path, small_pool, "p", "--rule", "mine", **site)
    assert err.splitlines() == [
        "warning: entry point mine = a_raises.rules:Mine of a_raises 1.5: cannot be imported: "
        "ZeroDivisionError: division by zero (rules.py, line 1)",
        "warning: entry point mine = twice.rules:Mine of twice 1.5: cannot be imported: "
        "ValueError: rule 'mine' is registered already, by rules.py; choose another name "
        "(rules.py, line 6)",
        "warning: entry point x = b_gone.nothing of b_gone 1.5: cannot be imported: "
        "ModuleNotFoundError: No module named 'b_gone.nothing'",
        "warning: entry point z = unsaid.rules:Mine of unsaid 1.5: unsaid.rules registers no rule "
        "'z'; give the entry point the name of its rule",
    ]
    assert (tmp_path / "p").exists()
    assert merged(tmp_path, small_pool, "q", "--rule", "uniform", **site) == "", "not looked for"


def test_help_looks_for_no_entry_points(tmp_path, site):
    install(tmp_path / "site", "loud", "[negmerge.rules]\nx = loud.rules", rules="1 / 0\n")
    for arguments in ([], ["merge", "--help"], ["list", "--help"], ["list", "selectors"]):
        assert run(tmp_path, *arguments, **site)[1] == ""


def test_registries_ask_for_the_group_of_their_kind(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(plugins, "load_group", lambda group: asked.append(group) or iter(()))
    for kind in (
        "rule",
        "rival",
        "metric",
        "criterion",
        "scenario",
        "data set",
        "model",
        "evidence",
    ):
        registry: Registry[int] = Registry(kind)
        registry.register("one", 1)
        assert registry.get("one") == 1
        assert len(asked) == 0, "an entry that is there is no reason to look further"
        with pytest.raises(OptionError, match="There are: one"):
            registry.get("two")
        assert list(registry) == ["one"]
        assert asked.pop().removeprefix("negmerge.") in (
            "rules", "rivals", "metrics", "criteria", "scenarios", "datasets", "models",
            "evidence",
        )  # fmt: skip
        assert not asked, "once is enough"


def test_entries_of_this_package_come_from_no_plugin():
    assert {rules.source(name) for name in rules} == {""}


# ------------------------------------------------------------------------------------------ workers

RECIPE = """
title: With plug-ins
data: {name: my_data, root: mirror, limit: {train: 300, test: 100}}
model: {name: my_net}
split: {forget: {fraction: 0.2}, validation: 0.1}
train: {epochs: 1, batch: 32, lr: 0.05}
retrain: null
pool: {settings: {batch: 16, lr: 0.05}, grid: {epochs: [1, 2]}}
methods: [mine, my_rival]
search: {stop: 1.0, count: 3, samples: 60, criterion: my_way}
workers: 2
"""
RIVAL = """
from negmerge.rivals.registry import Range, rival
from negmerge.training.hyperparameters import HyperParameters

@rival("retain", "nowhere", HyperParameters(epochs=1, lr=0.01), {"lr": Range(1e-3, 1e-1)})
def my_rival(task):
    \"\"\"Train on the retain set.\"\"\"
    return task.train(task.feeds["retain"])
"""


@pytest.mark.slow
def test_workers_have_the_plugins_and_a_run_goes_on_with_them(tmp_path):
    """Model, data set and rival are needed in the workers."""
    kinds = KINDS.replace('rivals.register("my_rival", rivals.get("finetune"))\n', RIVAL)
    (tmp_path / "my_rules.py").write_text(MINE)
    (tmp_path / "my_kinds.py").write_text(kinds)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assets = Path(negmerge.__file__).parent / "assets/fashion_small"
    shutil.copytree(assets, tmp_path / "mirror/my_data")
    unlearn = ["unlearn", "recipe.yaml", "--out", "run"]
    told = run(tmp_path, *unlearn, code=2)[1]
    assert told.startswith("error: ")
    assert told.count("\n") == 1
    command = [*unlearn, "--plugin", "my_rules.py", "--plugin", "my_kinds.py"]
    run(tmp_path, *command)
    scores = json.loads((tmp_path / "run/scores.json").read_text())
    assert {row["method"] for row in scores["methods"]} == {"mine", "my_rival"}
    for name in ("manifest.json", "scores.json", "patches/mine.safetensors"):
        (tmp_path / "run" / name).unlink()
    run(tmp_path, *command)
    again = json.loads((tmp_path / "run/scores.json").read_text())
    assert again["methods"][0]["acc_forget"] == scores["methods"][0]["acc_forget"]


WORKER = """
import sys
from pathlib import Path
class Value:
    def __init__(self, number):
        self.number = number
    def run(self, scenario, advance):
        return Value(scenario.number * self.number)
def make():
    return Value(2)
"""


def test_values_of_a_plugin_file_reach_workers(tmp_path, monkeypatch):
    """They are unpickled there, which needs the module."""
    monkeypatch.setattr(plugins, "_loaded", [])
    path = tmp_path / "my_values.py"
    path.write_text(WORKER)
    plugins.load(str(path))
    (name,) = (name for name in sys.modules if name.startswith("my_values_"))
    module = sys.modules[name]
    with LocalProcesses(module.make, 1, Cores(1, 1)) as pool:
        watch = Watch([Unit(name="value", size=1)])
        found = [value.number for _, value in pool.run([module.Value(21)], watch)]
    assert found == [42]


def test_an_entry_point_that_fails_is_one_line_for_all_processes(tmp_path, site):
    install(tmp_path / "site", "loud", "[negmerge.rules]\nx = loud.rules", rules="1 / 0\n")
    code = (
        "from multiprocessing import get_context\n"
        "from negmerge.merging.rules import rules\n"
        "if __name__ == '__main__':\n"
        "    print('nothing' in rules)\n"
        "    with get_context('spawn').Pool(2) as pool:\n"
        "        print(pool.map(rules.__contains__, ['a', 'b', 'c']))\n"
    )
    (tmp_path / "main.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "main.py"], cwd=tmp_path, env=site, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == 1
