"""The versions in a manifest: those of the libraries that are installed."""

from __future__ import annotations

from negmerge.runs import store


def test_a_library_that_is_not_installed_is_left_out(monkeypatch):
    """A run with the extra `unlearn` alone ends, although open_clip is not there."""
    monkeypatch.setattr(store, "DEPENDENCIES", ("numpy", "no_such_library"))
    assert store.versions().keys() == {"python", "cores", "numpy"}
