"""docs/measurements.md says what the records in benchmarks/results say."""

from pathlib import Path
from runpy import run_path
from typing import Any

import pytest

SCRIPT: dict[str, Any] = run_path(str(Path(__file__).parents[2] / "benchmarks/results_page.py"))


def test_the_page_shows_the_records_as_they_are():
    text = SCRIPT["PAGE"].read_text()
    assert SCRIPT["refreshed"](text) == text, "run python benchmarks/results_page.py"


@pytest.mark.parametrize("record", sorted(path.name for path in SCRIPT["RESULTS"].glob("*.md")))
def test_every_record_is_on_the_page(record: str):
    assert f"<!-- record: {record} -->" in SCRIPT["PAGE"].read_text()


def test_a_record_goes_in_without_its_title_and_one_level_down(tmp_path):
    (tmp_path / "a.md").write_text("# A\n\n## b\n\nnew\n")
    text = "# Page\n\n<!-- record: a.md -->\nold\n<!-- end -->\n\nwords\n"
    found = SCRIPT["refreshed"](text, tmp_path)
    assert found == ("# Page\n\n<!-- record: a.md -->\n\n### b\n\nnew\n\n<!-- end -->\n\nwords\n")
    assert SCRIPT["refreshed"](found, tmp_path) == found
