"""Sending files to a model on the Hugging Face Hub, in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from negmerge.errors import FileError, OptionError
from negmerge.support.progress import Progress
from negmerge.support.remote.hub import hub_errors

Content = Path | bytes
"""A file on this machine, or the content of a small one."""


def send(
    repo: str,
    files: Mapping[str, Content],
    digests: Mapping[str, str],
    private: bool,
    message: str,
    progress: Progress,
) -> str:
    """Add files to a model on the Hub, which is made if it is not there.

    All files appear with one commit, whose URL is returned, or none does.

    Args:
        repo: the id, USER/NAME.
        files: the contents by name.
        digests: the SHA-256 that files must have, by name.
        private: only the owner sees the model; refused if it is there and everybody sees it.
        message: the title of the commit.
    """
    with hub_errors(repo, "does not take the files"):
        from huggingface_hub import CommitOperationAdd, HfApi, get_token
        from huggingface_hub.utils import disable_progress_bars

        if get_token() is None:
            raise OptionError(
                f"{repo}: there is no token for the Hub; log in with `hf auth login`, or set "
                "HF_TOKEN"
            )
        disable_progress_bars()  # the program shows progress itself
        api = HfApi()
        api.whoami()  # at once: what follows is tried again for a minute if the Hub is away
        api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise OptionError(
                f"{repo}: is public, and --private was asked for; name another, or change its "
                "visibility on the Hub"
            )
        added: list[Any] = []
        progress.stage("sending", sum(map(size_of, files.values())))
        for name, content in files.items():
            added.append(CommitOperationAdd(name, content))
            api.preupload_lfs_files(repo, added[-1:], free_memory=False)
            progress.advance(size_of(content))
        for one in added:
            wanted = digests.get(one.path_in_repo)
            if wanted is not None and one.upload_info.sha256.hex() != wanted:
                raise FileError(f"{one.path_or_fileobj}: changed while it was sent; run again")
        return str(api.create_commit(repo, added, commit_message=message).commit_url)


def size_of(content: Content) -> int:
    """Return the number of bytes.

    >>> size_of(b"abc")
    3
    """
    return len(content) if isinstance(content, bytes) else content.stat().st_size
