"""Reports: the page of a run, its figures and tables, and the tables of the terminal.

A page is built from the files of a run alone: `frames` reads them into data frames, `figures` draws
the frames on a `charts.Chart`, `sections` adds the texts, and `page` writes the result. Scores come
from a `RunResult`; labels, units and directions of metrics come from `evaluation.metrics`; the
names of what is forgotten and kept come from the recipe's scenario settings. This room may import
`runs` and every room below it, never torch.

To add a section, write a function in `sections` and add it to `SECTIONS`. A metric with a histogram
and a panel of a scenario get their sections without a change in this room. The rules of the
verdicts at the top of a page are in `verdicts`, the numbers behind them in `questions`;
`comparison` and `comparison_page` show several runs on one page.
"""
