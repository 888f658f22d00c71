"""The model card of a folder that `apply` writes."""

from __future__ import annotations

from shlex import quote

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.checkpoints.model_folder import licence_of
from negmerge.errors import printable
from negmerge.support.markdown import code, front_matter
from negmerge.support.remote.hub import hub_source
from negmerge.support.remote.scratch import url_of
from negmerge.vectors.task_vector import TaskVector

LIMIT = (
    "Unlearning by merging is approximate: it certifies no deletion. What was to be forgotten may "
    "be found again by further training, by other attacks or by other questions than those that "
    "were tried."
)


def model_card(
    base: Checkpoint, tau: TaskVector, changed: int, out: str, command: list[str] | None
) -> str:
    """A short model card: how the model was made, and the command that makes it again.

    The text contains neither folders nor times, so that the same input gives the same text.
    """
    origin, scale = tau.origin, abs(tau.scale)
    source = hub_source(url_of(base.path) or "") if base.sources else None
    sign, done = ("minus", "subtracted") if tau.scale < 0 else ("plus", "added")
    name = base.path.absolute().name if base.sources else "a state dict"
    elements = sum(info.elements for info in base.tensors.values())
    options = ", ".join(f"{key}={value}" for key, value in origin.options.items())
    rows = {
        "base": f"{code(source or name)}, fingerprint {code(origin.base)}",
        "patch": code(tau.path.name) if tau.path else "a task vector in memory",
        "rule": f"{code(origin.rule)} of {origin.n} fine-tuned models",
        "options": code(options) if options else "none",
        "λ": f"{scale!r}, {done}",
        "changed": f"{changed:,} of {elements:,} elements",
    }
    verb = " ".join((command or ["negmerge", "apply"])[:2])
    lines = [
        f"# {printable(out)}",
        "",
        f"This model is a base model {sign} λ times a task vector, written by `{verb}`.",
        "The base's own model card does not describe it and is not copied.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {key} | {value} |" for key, value in rows.items()),
        "",
        f"{LIMIT} Nothing was measured by this command.",
    ]
    if command is not None:
        lines += ["", "    " + printable(" ".join(map(quote, [*command, "-o", out])))]
    metadata = {
        "base_model": source and source.partition("@")[0],
        "license": licence_of(base.path) if base.folder is not None else None,
        "tags": ["negmerge"],
    }
    return front_matter(metadata) + "\n" + "\n".join(lines) + "\n"
