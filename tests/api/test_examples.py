"""What `help` shows: the signature, and examples that run as pasted in a fresh interpreter."""

from __future__ import annotations

import doctest
import pydoc
import subprocess
import sys

import pytest

import negmerge as nm

SHOWN = {
    "merge": nm.merge,
    "apply": nm.apply,
    "Accumulator": nm.Accumulator,
    "TaskVector": nm.TaskVector,
    "TaskVector.sparsity": nm.TaskVector.sparsity,
    "TaskVector.applied": nm.TaskVector.applied,
}


@pytest.mark.parametrize("name", SHOWN)
def test_examples_run_as_pasted(name, tmp_path):
    (example,) = (
        found
        for found in doctest.DocTestFinder(recurse=False).find(SHOWN[name], name)
        if found.examples
    )
    pasted = "".join(one.source + ("\n" if "\n " in one.source else "") for one in example.examples)
    done = subprocess.run(
        [sys.executable, "-q", "-i"], input=pasted, cwd=tmp_path, capture_output=True, text=True
    )
    assert "Error" not in done.stderr, done.stderr
    for one in example.examples:
        assert one.want.strip() in done.stdout, one.source


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("merge", "merge(base: 'Model', models: 'Sequence[Model]', rule: 'str' = 'consensus'"),
        ("apply", "apply(base: 'Model', vector: 'TaskVector | PathLike'"),
        ("Accumulator", "class Accumulator(builtins.object)\n |  Accumulator(base: 'Model', rules"),
    ],
)
def test_help_shows_the_signature(name, start):
    text = pydoc.plain(pydoc.render_doc(SHOWN[name]))
    assert start in text
    assert "Args:" in text
