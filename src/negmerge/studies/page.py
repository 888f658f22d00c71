"""The page of a study: one HTML file that needs no network, and the exports of its tables."""

from __future__ import annotations

from negmerge.reports.page import render_page
from negmerge.reports.sections import Section
from negmerge.reports.styles import styles_of
from negmerge.studies.comparison import Comparison
from negmerge.studies.directory import StudyDirectory
from negmerge.studies.evidence import (
    evidence_table,
    found_in,
    only_look_good,
    sentences,
    telling,
)
from negmerge.studies.figures import APART, VERDICTS, against_retrained, forest
from negmerge.studies.summary import (
    compared_text,
    decided_texts,
    distance_texts,
    seeds_text,
    undecided_texts,
    warnings_of,
)
from negmerge.studies.tables import differences_table, means_table, seeds_table
from negmerge.support.files import lock_folder, write_file


def glance(study: Comparison) -> Section:
    """The figure: one chart for each of the main metrics."""
    text = (
        f"For each method the mean difference from {study.against}, with its 95 % interval; the "
        "small dots are the single seeds. Right of the line the method is better. A coloured "
        "marker is a verdict of the t test at 5 % after Holm's correction for several methods; "
        "grey is undecided. The intervals are not corrected."
    )
    if "retrained" in study.values.get(study.recipe.settings.forget_metric, {}):
        text += (
            " The retrained model is the target of unlearning: forgetting more than it did is not "
            "better, and Avg. Gap measures the distance from it."
        )
    verdicts = [one.verdict for name in study.drawn for one in study.of(name)]
    legend = [verdict for verdict in VERDICTS if verdict in verdicts]
    charts = [forest(study, name) for name in study.drawn]
    return Section("glance", text, charts, legend)


def means(study: Comparison) -> Section:
    """The means of all models."""
    text = (
        "The mean of each model over the seeds. Its interval contains the differences between "
        "seeds, which are the same for all methods: two methods whose intervals overlap may still "
        "differ in every seed. The CSV file has all metrics, with standard deviations."
    )
    return Section("means", text, table=means_table(study), open=True)


def paired(study: Comparison) -> Section:
    """The differences of all methods, with their tests."""
    text = " ".join(
        [f"Each method less {study.against}, in the same seed.", *distance_texts(study)]
    )
    text += (
        f" Holm's correction is for the {len(study.methods) - 1} comparisons of a metric. "
        "“Detectable” is the difference that this study would have found with a probability of "
        "80 %: by the t test at 5 % divided by the number of comparisons, with this number of "
        "seeds and this scatter. The CSV file has all metrics."
    )
    notes = undecided_texts(study)
    if notes:
        text += (
            " Below the table is what the study could not decide, and how many seeds would, if the "
            "measured difference is the true one."
        )
    return Section("paired", text, table=differences_table(study), open=True, notes=notes)


def evidence(study: Comparison) -> Section | None:
    """What tests of forgetting found beside the retrained models; None without a test."""
    rows = found_in(study)
    if not rows:
        return None
    text = (
        "The tests of forgetting of every run, each less the same test on the retrained model of "
        "the same seed, which never saw the forget set: it is the line at zero, the one to reach. "
        "Orange, and * in the table, is a model that is told apart from it by the t test at 5 %, "
        "after Holm's correction for several models; a model that is not told apart is not shown "
        "to have forgotten. “Bound”: some values are only a lower or an upper bound. The "
        "CSV file has all numbers of the tests."
    )
    looks = only_look_good(study, rows)
    if looks:
        text += " Below the table are what each test says, and the methods that only look good."
    notes, shown = [*sentences(rows), *looks], telling(rows)
    tests = {one.test: [row for row in shown if row.test == one.test] for one in shown}
    charts = [against_retrained(own) for own in tests.values()]
    table = evidence_table(study, rows)
    return Section("evidence", text, charts, [*APART], table=table, open=True, notes=notes)


def every_seed(study: Comparison) -> Section:
    """The values that everything else is computed from."""
    return Section("seeds", "What each run measured.", table=seeds_table(study))


SECTIONS = {
    "Differences at a glance": glance,
    "Means": means,
    "Paired differences": paired,
    "Would a sceptic agree?": evidence,
    "Every seed": every_seed,
}


def write_page(study: Comparison, folder: StudyDirectory) -> None:
    """Write the page and the exports of its tables; the same results give the same bytes."""
    made = [(title, make(study)) for title, make in SECTIONS.items()]
    sections = [(title, section) for title, section in made if section is not None]
    tables = [section.table for _, section in sections if section.table is not None]
    seeds = ",".join(map(str, study.seeds))
    page = render_page(
        "study.html.j2",
        styles_of(["original", "retrained", *study.methods]) | VERDICTS | APART,
        title=study.recipe.title or "A study of negmerge",
        seeds=seeds_text(study.seeds),
        summary=None,
        compared=compared_text(study),
        decided=decided_texts(study),
        warnings=warnings_of(study),
        missing=[],
        sections=sections,
        command=f"negmerge study recipe.yaml --seeds {seeds} --against {study.against} --out DIR",
        recipe=study.recipe.model_copy(update={"seed": 0}).dump(),
    )
    files = {folder.tables / name: text for one in tables for name, text in one.files().items()}
    with lock_folder(folder.folder):  # another study of other seeds may end at this moment
        for path, text in (files | {folder.page: page}).items():
            write_file(path, text.encode())
