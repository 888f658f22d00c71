"""Models of the Hugging Face Hub: their ids, their commits, and errors in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, unquote

from negmerge.errors import FileError, NegMergeError, OptionError, one_line, printable, quoted

SCHEME = "hf://"
FILES = (
    ".bin", ".ckpt", ".csv", ".json", ".jsonl", ".parquet", ".pt", ".pth", ".safetensors", ".yaml",
    ".yml",
)  # fmt: skip
"""Endings of the names of files: a missing file is not taken for a model of the Hub."""
OTHER_KINDS = ("buckets", "datasets", "kernels", "spaces")
"""What `hf://` URLs of other things than models begin with."""
NOT_HERE = "; there is no such file or folder here, either"
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REPO = re.compile(rf"{_NAME}/{_NAME}")
_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([A-Za-z0-9._/-]{{1,200}}))?")
_URL = re.compile(r"hf://([^/@]+/[^/@]+)(?:@([^/]+))?(/.+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def check_repo(repo: str) -> str:
    """Return the id of a model on the Hub; raise if it cannot be one.

    >>> check_repo("someone/forgot")
    'someone/forgot'
    >>> check_repo("forgot")
    Traceback (most recent call last):
    negmerge.errors.OptionError: 'forgot': wanted the id of a model on the Hub, USER/NAME, ...
    """
    if not _REPO.fullmatch(repo) or "--" in repo or ".." in repo or repo.endswith(".git"):
        raise OptionError(
            f"{quoted(repo)}: wanted the id of a model on the Hub, USER/NAME, of letters, digits, "
            "-, _ and ."
        )
    return repo


def is_repo(text: str) -> bool:
    """Whether a text can be the id of a model or a data set on the Hub.

    >>> is_repo("timm/resnet18.a1_in1k"), is_repo("./resnet18"), is_repo("cifar10")
    (True, False, False)
    """
    return _REPO.fullmatch(text) is not None


def hub_url(place: object) -> str | None:
    """Return the URL of a model that is named by its id alone; None for everything else.

    A file or folder of that name comes first.

    >>> hub_url("someone/model"), hub_url("someone/model@v1.0"), hub_url("pool/a.safetensors")
    ('hf://someone/model', 'hf://someone/model@v1.0', None)
    """
    if not isinstance(place, str | os.PathLike):
        return None
    text = str(place)
    found = _ID.fullmatch(text)
    if found is None or text.endswith(FILES) or found[1].startswith(OTHER_KINDS):
        return None
    if any(os.path.lexists(name) for name in (text, found[1])):
        return None
    return f"{SCHEME}{found[1]}" + (f"@{quote(found[2], safe='')}" if found[2] else "")


def pinned(url: str) -> str:
    """Return the URL of a model on the Hub with the commit that its revision is now.

    >>> url = f"hf://someone/model@{'0' * 40}/a.safetensors"
    >>> pinned(url) == url, pinned("s3://bucket/model")
    (True, 's3://bucket/model')
    """
    found = _URL.fullmatch(url)
    if found is None or url.removeprefix(SCHEME).startswith(tuple(f"{k}/" for k in OTHER_KINDS)):
        return url
    repo, revision, path = found[1], found[2] and unquote(found[2]), found[3] or ""
    if revision and _COMMIT.fullmatch(revision):
        return url
    with hub_errors(repo, "cannot be asked for this model", NOT_HERE):
        from huggingface_hub import HfApi

        sha = HfApi().repo_info(repo, revision=revision, timeout=20).sha
    if not isinstance(sha, str) or not _COMMIT.fullmatch(sha):
        raise FileError(f"{printable(url)}: the Hub names no commit; got {quoted(sha)}")
    return f"{SCHEME}{repo}@{sha}{path}"


def hub_source(url: str) -> str | None:
    """Return the id and the commit of a model, as records name it; None for other URLs.

    >>> hub_source(f"hf://someone/model@{'0' * 40}")
    'someone/model@0000000000000000000000000000000000000000'
    >>> hub_source("hf://someone/model") is None
    True
    """
    found = _URL.fullmatch(url)
    known = found is not None and found[2] is not None and _COMMIT.fullmatch(found[2])
    return url.removeprefix(SCHEME) if known else None


@contextmanager
def hub_errors(repo: str, what: str, also: str = "") -> Iterator[None]:
    """Turn what huggingface_hub raises into an error of one line, without the token.

    Args:
        repo: the id of the model.
        what: what the Hub could not do, for errors that are not known here.
        also: the end of errors that say that there is no such model.
    """
    try:
        yield
    except NegMergeError:
        raise
    except ImportError as error:
        raise FileError(
            f"{repo}: no such file or folder; to open it as a model of the Hub, install "
            f"huggingface_hub: pip install 'negmerge[hub]' ({one_line(error)})"
        ) from None
    except Exception as error:  # httpx, the Hub and the disk have many types
        raise FileError(f"{repo}: {_reason(error, repo, what, also)}") from None


def _reason(error: Exception, repo: str, what: str, also: str) -> str:
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    while status is None and error.__cause__ is not None:  # an upload wraps the answer of the Hub
        assert isinstance(error.__cause__, Exception)
        error = error.__cause__
        status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"the Hub {what}: HF_HUB_OFFLINE is set; unset it{also}"
    if isinstance(error, errors.GatedRepoError):
        return "the Hub asks for a consent to open it; give it on the page of the model, and log in"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the Hub has no such revision of it; check what follows @{also}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            "the Hub has no such model, or hides it; check the name, or log in with `hf auth "
            f"login`{also}"
        )
    if status == 401:
        return "the Hub does not know the token (401); log in with `hf auth login`"
    if status == 403:
        return (
            f"the token has no right to write to {repo.partition('/')[0]} (403); make one with "
            "write access, and log in with `hf auth login`"
        )
    return f"the Hub {what}: {one_line(error)}"
