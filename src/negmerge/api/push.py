"""`nm.push`: the unlearned model of a run, or its patch, on the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from negmerge.checkpoints.model_folder import CARD
from negmerge.errors import FileError, OptionError
from negmerge.reports.card import What, card_of
from negmerge.reports.eval_results import FILE, eval_results
from negmerge.reports.page_data import PageData
from negmerge.runs.recipe import load_recipe
from negmerge.runs.store import Run, open_run
from negmerge.support.progress import Progress, Quiet
from negmerge.support.remote.hub import check_repo
from negmerge.support.remote.hub_upload import Content, send, size_of
from negmerge.vectors.patch import PATCH_FILE


@dataclass(frozen=True)
class Pushed:
    """What was sent to the Hub, or would be.

    Args:
        repo: the id, USER/NAME.
        files: the bytes of each file, by its name in the repository.
        card: the model card, `README.md`.
        results: the content of `.eval_results/negmerge.yaml`; None if there is no such file.
        private: whether only the owner sees it.
        commit: the URL of the commit; None if nothing was sent.
    """

    repo: str
    files: dict[str, int]
    card: str
    results: str | None
    private: bool
    commit: str | None = None


def push(
    run: Run | str | Path,
    repo: str,
    *,
    what: What = "model",
    private: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> Pushed:
    """Send the unlearned model of a finished run, or its patch, to the Hugging Face Hub.

    The files appear there with one commit, beside a model card with the scores. The token is the
    one of `hf auth login`, or `HF_TOKEN`. Every file must have the hash of the run's manifest.

    >>> nm.push("runs/demo", "someone/forgot", dry_run=True).files  # doctest: +SKIP
    {'model.safetensors': 63512, 'README.md': 3412}

    Args:
        run: what `nm.run` returned, or the folder of a run.
        repo: the id on the Hub, USER/NAME; it is made if it does not exist.
        what: `model`, `patch`, or `both` in one repository.
        private: only the owner sees the model.
        dry_run: send nothing, and ask the Hub for nothing.
        progress: where progress is shown.
    """
    check_repo(repo)
    if what not in ("model", "patch", "both"):
        raise OptionError(f"what: got {what!r}, wanted model, patch or both")
    found = open_run(run.folder if isinstance(run, Run) else Path(run))
    if not found.finished:
        raise FileError(
            f"{found.folder}: the run is not finished; continue it with negmerge unlearn"
        )
    for record in (found.recipe, found.scores):  # the card is made of them
        found.check_unchanged(record)
    page = PageData(found, load_recipe(found.recipe), found.result)
    sent = {name: found.path_in_run(listed) for name, listed in files_of(page, what).items()}
    for path in sent.values():
        found.check_unchanged(path)
    card, results = card_of(page, [*sent], what, repo), eval_results(page)
    texts = {CARD: card} | ({} if results is None else {FILE: results})
    contents: dict[str, Content] = {**sent, **{name: text.encode() for name, text in texts.items()}}
    sizes = {name: size_of(content) for name, content in contents.items()}
    if dry_run:
        return Pushed(repo, sizes, card, results, private)
    manifest = found.read_manifest().files
    digests = {n: manifest[p.relative_to(found.folder).as_posix()].sha256 for n, p in sent.items()}
    message = f"Add the {'model and its patch' if what == 'both' else what} that negmerge made"
    commit = send(repo, contents, digests, private, message, progress or Quiet())
    return Pushed(repo, sizes, card, results, private, commit)


def files_of(page: PageData, what: What) -> dict[str, str]:
    """Return the files to send: the name in the repository, and the name in the run."""
    files: dict[str, str] = {}
    folder = f"{page.run.unlearned.parent.name}/"
    if what != "patch":
        listed = (name for name in page.run.read_manifest().files if name.startswith(folder))
        files = {name.removeprefix(folder): name for name in sorted(listed)}
        files.pop(CARD, None)  # it is made anew, with the id
    if what != "model":
        first = page.result.first
        if first.scale is None:
            raise OptionError(
                f"{page.run.folder}: has no patch, because {first.method} trains the model itself; "
                "push the model"
            )
        files[PATCH_FILE] = page.run.patch(first.method).relative_to(page.run.folder).as_posix()
    return files
