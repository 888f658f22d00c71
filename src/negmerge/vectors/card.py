"""The model card of a folder that `apply` writes."""

from __future__ import annotations

from shlex import quote

from negmerge.checkpoints.checkpoint import Checkpoint
from negmerge.errors import printable
from negmerge.vectors.task_vector import TaskVector

CARD = "README.md"


def model_card(
    base: Checkpoint, tau: TaskVector, changed: int, out: str, command: list[str] | None
) -> str:
    """A short model card: how the model was made, and the command that makes it again.

    The text contains neither folders nor times, so that the same input gives the same text.
    """
    origin, scale = tau.origin, abs(tau.scale)
    sign, done = ("minus", "subtracted") if tau.scale < 0 else ("plus", "added")
    name = base.path.absolute().name if base.sources else "a state dict"
    elements = sum(info.elements for info in base.tensors.values())
    options = ", ".join(f"{key}={value}" for key, value in origin.options.items())
    rows = {
        "base": f"{_code(name)}, fingerprint {_code(origin.base)}",
        "patch": _code(tau.path.name) if tau.path else "a task vector in memory",
        "rule": f"{_code(origin.rule)} of {origin.n} fine-tuned models",
        "options": _code(options) if options else "none",
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
    ]
    if command is not None:
        lines += ["", "    " + printable(" ".join(map(quote, [*command, "-o", out])))]
    return "\n".join(lines) + "\n"


def _code(text: str) -> str:
    """Markdown code; characters of the text that are markup are replaced."""
    return f"`{printable(text).replace('`', chr(39)).replace('|', '¦')}`"
