"""Files that hosting services read: they must be well-formed and agree with the package."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TEMPLATES = [
    path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"
]
CFF_FIELDS = {
    "abstract", "authors", "cff-version", "commit", "contact", "date-released", "doi",
    "identifiers", "keywords", "license", "license-url", "message", "preferred-citation",
    "references", "repository", "repository-artifact", "repository-code", "title", "type", "url",
    "version",
}  # fmt: skip
"""The fields of the Citation File Format 1.2.0."""


def test_the_citation_is_that_of_the_paper_and_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited.keys() <= CFF_FIELDS
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == PROJECT["version"]
    assert cited["license"] == PROJECT["license"]
    paper = cited["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    readme = (ROOT / "README.md").read_text()
    names = " and ".join(f"{a['family-names']}, {a['given-names']}" for a in paper["authors"])
    for text in (paper["title"], names, paper["url"], str(paper["year"])):
        assert text in readme
    assert paper["identifiers"][0]["value"].replace(":", " ") in readme


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_of_issues_has_what_the_form_needs(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["attributes"]["label"] for field in form["body"])


def test_the_workflow_calls_targets_that_exist():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        target
        for job in workflow["jobs"].values()
        for step in job["steps"]
        for line in re.findall(r"^make (.+)$", step.get("run", ""), re.MULTILINE)
        for target in line.split()
        if "=" not in target
    }
    assert {"lint", "base", "docs", "test", "merge-verbs"} <= called <= targets


def test_the_version_has_a_section_in_the_changelog():
    sections = re.findall(r"^## (\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == PROJECT["version"]
    assert sections == sorted(sections, key=lambda v: [*map(int, v.split("."))], reverse=True)
