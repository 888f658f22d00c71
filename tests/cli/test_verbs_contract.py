"""Every verb: help without heavy imports, and the CPU commands never import torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from negmerge.cli import main
from negmerge.cli.listing import KINDS
from running import negmerge

VERBS = [
    "unlearn",
    "merge",
    "apply",
    "inspect",
    "report",
    "reproduce",
    "list",
    "convert",
    "adapter",
    "verify",
    "copy",
    "push",
    "check",
    "study",
    "status",
    "init",
    "doctor",
    "schema",
    "completion",
]
PROBE = """
import sys
from negmerge.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    if stop.code:
        raise
print("LOADED", *sorted({"torch", "numba", "numpy"} & sys.modules.keys()))
"""


def loaded(*arguments: str) -> tuple[str, set[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True
    )
    text, _, names = done.stdout.rpartition("LOADED")
    return text, set(names.split())


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_imports_nothing_heavy(verb):
    text, names = loaded(*verb.split(), "--help")
    assert "Usage: negmerge" in text
    assert names == set()


def test_alone_it_says_what_to_do_first():
    text, names = loaded()
    assert names == set()
    for entry in ("remove data from my model", "the paper's tables", "a folder of checkpoints"):
        assert entry in text
    typed = re.findall(r"^ *negmerge (\w+)", text, re.MULTILINE)
    assert {"init", "unlearn", "reproduce", "merge", "apply"} <= {*typed} <= {*VERBS, "makes"}
    assert max(map(len, text.splitlines())) <= 80
    assert loaded("--help")[0] != text


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        ("merge", "BASE"),
        ("merge a b", "--out"),
        ("apply a", "PATCH"),
        ("reproduce", "TABLE"),
        ("study", "RECIPE"),
        ("study demo", "--seeds"),
    ],
)
def test_a_missing_argument_is_named(arguments, missing, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments.split())
    verb = arguments.split()[0]
    assert capsys.readouterr().err == (
        f"error: {verb}: {missing} is missing; `negmerge {verb} --help` lists what it takes\n"
    )


@pytest.mark.parametrize("kind", ["recipes", "tables"])
def test_listing_recipes_imports_nothing_heavy(kind):
    assert loaded("list", kind, "--json")[1] <= {"numpy"}


def test_cpu_commands_never_import_torch(small_pool, tmp_path):
    base, pool = small_pool
    patch, out = str(tmp_path / "p.safetensors"), str(tmp_path / "o.safetensors")
    models = [str(path) for path in pool]
    for arguments in (
        ["merge", str(base), *models, "-o", patch],
        ["merge", str(base), *models, "-o", patch, "--rule", "ties"],
        ["apply", str(base), patch, "--negate", "0.5", "-o", out],
        ["inspect", patch],
        ["inspect", out, "--json"],
        ["list", "rules"],
        ["doctor"],
    ):
        assert "torch" not in loaded(*arguments)[1], arguments


def test_the_kinds_of_the_contract_are_listed():
    wanted = "rules selectors rivals metrics evidence criteria scenarios datasets texts models"
    assert list(KINDS) == [*wanted.split(), "recipes", "tables"]


@pytest.mark.parametrize("kind", KINDS)
def test_everything_that_has_a_name_is_listed(kind, tmp_path):
    found = json.loads(negmerge(tmp_path, "list", kind, "--json")[0])
    table, _ = negmerge(tmp_path, "list", kind)
    assert found
    for name, entry in found.items():
        assert name in table
        assert entry["summary"], name
    assert kind != "tables" or "{" not in table  # all that a recipe says is filled in


def test_list_rules_shows_every_rule_and_option(tmp_path):
    found = json.loads(negmerge(tmp_path, "list", "rules", "--json")[0])
    assert found["consensus"]["options"]["reduce"] == {"takes": "mean|min|max", "default": "mean"}
    table, _ = negmerge(tmp_path, "list", "rules")
    for name, rule in found.items():
        assert name in table
        for option in rule["options"]:
            assert f"{option}=" in table
