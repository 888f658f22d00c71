"""The verb `completion`: the script that lets a shell complete verbs, flags and names."""

from __future__ import annotations

from typing import Literal

from negmerge.cli.app import app


@app.command
def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print the script that lets a shell complete commands, flags, recipes and rules.

    For bash, add this line to ~/.bashrc: eval "$(negmerge completion bash)"

    Args:
        shell: The shell.
    """
    text = app.generate_completion(shell=shell)
    if shell == "bash":  # paths, where there is nothing else to offer
        text = text.replace("complete -F ", "complete -o default -F ")
    print(text)
