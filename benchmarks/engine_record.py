"""The record of `engine.py` as Markdown."""

from __future__ import annotations

from typing import Any

from machine import markdown_table

Row = dict[str, Any]


def as_markdown(found: dict[str, Any]) -> str:
    groups = found["groups"].values()
    rows = [one for group in groups for one in group["rows"]]
    machines = "; ".join(sorted({group["machine"] for group in groups}))
    minutes = sum(group["minutes"] for group in groups)
    lines = [
        "# The merge engine, measured",
        "",
        f"`{found['command']}` on {machines}, {minutes:.0f} minutes. Towers are "
        "ViT-B/32 image towers (87.8 M float32 parameters, 351 MB each); language models are "
        "Llamas of 252 M parameters in 4 shards. The page cache is warm unless a row says "
        "otherwise. Ratios are medians of runs that alternate.",
        "",
        markdown_table([_goal(one) for one in rows]),
    ]
    for one in rows:
        if "table" in one:
            lines += [
                "",
                f"{one['what'].partition(':')[0].capitalize()} (consensus, in memory):",
                "",
            ]
            lines += [markdown_table([_line(line) for line in one["table"]])]
    profiled = [one for one in rows if one.get("where_the_time_goes")]
    if profiled:
        parts = sorted({part for one in profiled for part in one["where_the_time_goes"]})
        lines += ["", "Where the CPU time of a merge goes (samples of `perf`):", ""]
        lines += [markdown_table([_profile(one, parts) for one in profiled])]
    return "\n".join(lines) + "\n"


def _goal(one: Row) -> dict[str, str]:
    shown = {"what", "ratio", "wanted", "reached", "table", "where_the_time_goes"}
    return {
        "what": one["what"],
        "measured": f"{one['ratio']:.3g}",
        "wanted": one["wanted"],
        "reached": "yes" if one["reached"] else "no",
        "details": ", ".join(f"{k} {_short(v)}" for k, v in one.items() if k not in shown),
    }


def _line(line: Row) -> dict[str, str]:
    return {
        "pool": line["pool"],
        "GB read": f"{line['gigabytes']:.2f}",
        "seconds": f"{line['seconds']:.2f}",
        "share of read speed": f"{line['share_of_read_speed']:.2f}",
    }


def _profile(one: Row, parts: list[str]) -> dict[str, str]:
    shares = one["where_the_time_goes"]
    what = one["what"].removeprefix("merge in memory, ").partition(":")[0]
    return {"merge": what} | {part: f"{100 * shares.get(part, 0):.0f} %" for part in parts}


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{k}: {_short(v)}" for k, v in value.items())
    return f"{value:.3g}" if isinstance(value, float) else str(value)
