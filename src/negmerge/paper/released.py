"""The checkpoints of the authors' release: finding them in a folder, and converting them."""

from __future__ import annotations

import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from negmerge.checkpoints.convert import SUFFIXES, convert, is_pickle
from negmerge.checkpoints.split_attention import clip_prefix
from negmerge.errors import FileError, OptionError, quoted
from negmerge.support.files import file_digest
from negmerge.support.progress import Progress
from negmerge.support.reading import open_regular
from negmerge.training.weights import load_tensors, save_tensors

ZERO_SHOT = ("zeroshot", "zero_shot", "pretrained")
"""Names of the file of the pretrained model, without suffix."""
FINE_TUNED = "finetuned"
"""The name of a member in a folder that has other files, too."""
LINEAR = re.compile(r"(?:.*\.)?params0?\.\d+")
"""Names of tensors in files of linearised models."""
DROPPED = re.compile(r"(?:.*\.)?classification_head\.|transformer\.")
"""What is not part of the task vector: the head, and the transformer of the text encoder."""


@dataclass(frozen=True)
class Release:
    """The files of a folder: the pretrained model, and the fine-tuned ones by name."""

    zero_shot: Path
    members: dict[str, Path]

    @property
    def unlike(self) -> list[str]:
        """Members whose names differ from most others by more than numbers.

        >>> names = ["rand-m1-n1", "rand-m2-n1", "Cars"]
        >>> Release(Path("z.pt"), {name: Path(name) for name in names}).unlike
        ['Cars']
        """
        forms = {name: re.sub(r"\d+", "0", name) for name in self.members}
        ((usual, count),) = Counter(forms.values()).most_common(1)
        return [name for name in forms if forms[name] != usual] if count > 1 else []


def find_release(folder: Path, out: Path | None = None) -> Release:
    """Find the pretrained model and the members in a folder.

    A member is a file `finetuned.pt` in a folder of its own, at any depth; if there is no such
    file, every file that is neither the pretrained model nor a head, one for each folder or all in
    one folder.

    Args:
        folder: the folder of the release.
        out: the folder for converted files, which are no members if it lies in the other.
    """
    if not folder.is_dir():
        raise FileError(f"{folder}: no such folder; wanted the checkpoints of the release")
    paths = _checkpoints_in(folder, out)
    pretrained = [path for path in paths if path.stem.lower() in ZERO_SHOT]
    others = [p for p in paths if p not in pretrained and not p.stem.lower().startswith("head")]
    if not pretrained:
        raise FileError(f"{folder}: has no file of the pretrained model, such as zeroshot.pt")
    if len({file_digest(path) for path in pretrained}) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in pretrained[:3])
        raise FileError(f"{folder}: the pretrained models {names} differ; keep one of them")
    named = [path for path in others if path.stem.lower() == FINE_TUNED]
    members: dict[str, Path] = {}
    for path in named or others:
        os.close(open_regular(path))  # before hours of work: a link may lead to nothing
        name = path.relative_to(folder).with_suffix("")
        alone = named and name.parent != Path()  # rand-m1-n1/CarsVal/finetuned
        title = (name.parent if alone else name).as_posix()
        if (other := members.setdefault(title, path)) != path:
            raise FileError(
                f"{path}: is of the same member as {other.name} beside it; keep one of them"
            )
    if not members:
        raise FileError(f"{folder}: has no fine-tuned models, such as NAME/finetuned.pt")
    return Release(pretrained[0], members)


def _checkpoints_in(folder: Path, out: Path | None) -> list[Path]:
    """The checkpoints in a folder and in those below it, also in linked ones; sorted.

    Args:
        folder: the folder.
        out: a folder that is left out, as hidden ones are.
    """
    suffixes, found = (*SUFFIXES, ".safetensors"), list[Path]()
    seen = {folder.resolve(), *([] if out is None else [out.resolve()])}  # a link may lead upwards
    for place, folders, files in os.walk(folder, followlinks=True):
        below = {Path(place, name).resolve(): name for name in folders if name[0] != "."}
        folders[:] = [name for real, name in below.items() if real not in seen]
        seen.update(below)
        paths = (Path(place, name) for name in files if name[0] != ".")
        found += [path for path in paths if path.suffix in suffixes]
    return sorted(found)


def check_trust(release: Release, trust: bool) -> None:
    """Raise if there are pickles, and they are not trusted."""
    pickles = [path for path in (release.zero_shot, *release.members.values()) if is_pickle(path)]
    if pickles and not trust:
        raise OptionError(
            f"{pickles[0]}: opening a pickle can run code; if you trust the source of these "
            f"{len(pickles)} files, add --trust"
        )


def convert_release(release: Release, out: Path, progress: Progress) -> tuple[Path, list[Path]]:
    """Convert all files that are not converted; return those of the pretrained model and members.

    A converted file is named by the hash of its source, so that no file is converted twice.
    """
    sources = {"zeroshot": release.zero_shot} | release.members
    made: list[Path] = []
    progress.stage("converting", sum(path.stat().st_size for path in sources.values()))
    for name, path in sources.items():
        label = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]
        target = out / f"{label}-{file_digest(path)[:16]}.safetensors"
        if not target.is_file():
            _convert(path, target)
        made.append(target)
        progress.advance(path.stat().st_size)
    return made[0], made[1:]


def _convert(source: Path, target: Path) -> None:
    """Write a checkpoint with the names of open_clip, without head and text transformer."""
    plain = target.with_name(".plain.safetensors")  # one name, so that a killed run leaves one file
    try:
        convert(source, plain, trust=True)  # `check_trust` has asked
        tensors, _ = load_tensors(plain)
    finally:
        plain.unlink(missing_ok=True)
    if linear := [name for name in tensors if LINEAR.fullmatch(name)]:
        raise FileError(
            f"{source} {quoted(linear[0])}: is of a linearised model; wanted the standard models"
        )
    prefix = clip_prefix(tensors)
    named = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    if len(named) < len(tensors) or not any(name.startswith("visual.") for name in named):
        raise FileError(
            f"{source}: is not a CLIP image encoder; its first tensor is {quoted(min(tensors))}, "
            "wanted names such as 'visual.proj'"
        )
    kept = {name: tensor for name, tensor in named.items() if not DROPPED.match(name)}
    save_tensors(target, kept, {"format": "pt"})
