"""The verb `init`: looks at data, asks four questions, and writes a recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from negmerge.cli.app import Given, Json, OptionalOut, app
from negmerge.errors import FileError, NegMergeError, OptionError, printable, quoted
from negmerge.support.terminal import with_terminal

if TYPE_CHECKING:
    from negmerge.text.survey import TextSurvey
    from negmerge.vision.survey import ImageSurvey

T = TypeVar("T")
Kind = Literal["images", "clip", "texts"]
KINDS = {
    "images": "a classifier of images forgets a class or some of its training images",
    "clip": "a CLIP model forgets a set of images and keeps another",
    "texts": "a language model forgets documents, or answers to questions",
}
USUAL_MODELS = {"images": "resnet_small", "clip": "ViT-B-32", "texts": "stories15m"}
MODEL_QUESTIONS = {
    "images": "Which network, and the .safetensors file of its weights if it is trained?",
    "clip": "Which CLIP: an architecture of open_clip, or a folder?",
    "texts": "Which language model: a folder, a Hub id, or the small one of the package?",
}


@app.command
def init(
    data: Given | None = None,
    /,
    *,
    kind: Kind | None = None,
    forget: str | None = None,
    keep: str | None = None,
    model: str | None = None,
    weights: Given | None = None,
    out: OptionalOut = None,
    json_: Json = False,
) -> None:
    """Write a recipe for your own data; asks what is not given, if there is a terminal.

    Args:
        data: A folder of images with a folder for each class, a file or folder of texts (.jsonl,
            .parquet, .txt), or the name of a known set (`negmerge list datasets`).
        kind: What forgets: a classifier of images, a CLIP model, or a language model (texts); by
            default what the data looks like.
        forget: What to forget. Of images: the name of a class, a share such as 10%, or a file with
            the name of an image per line. Of texts: COLUMN=VALUE,VALUE, a share, or a file of
            records.
        keep: For a CLIP model, which forgets all of the data: the images whose accuracy is kept.
        model: A network (`negmerge list models`), a CLIP, or the folder or Hub id of a language
            model.
        weights: For a network: the .safetensors file of the trained model; without it the run
            trains one.
        out: The recipe to write; by default NAME.yaml, with the name of the data.
        json_: Print the result as JSON.
    """
    from negmerge.runs.new_recipe import NewRecipe, check_new_file
    from negmerge.support.files import write_file

    asks = Questions.possible()
    missing = {"DATA": data, "--keep" if kind == "clip" else "--forget": keep or forget}
    missing |= {"--model": model}
    absent = [name for name, given in missing.items() if given is None]
    if absent and not asks:
        raise OptionError(
            f"init: {' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} missing, and "
            "there is no terminal to ask; `negmerge init --help` lists what it takes"
        )
    questions = Questions()
    data, looked = questions.ask("Where is the data?", data, lambda text: (text, look(text, kind)))
    file = check_new_file(out or Path(f"{Path(data).stem or 'recipe'}.yaml"))
    if not json_:
        print(printable(f"{data}: {looked.text}"), flush=True)
    if kind is None and asks and absent:
        choices = "; ".join(f"{name}: {text}" for name, text in KINDS.items())
        kind = questions.ask(f"What is to forget? {choices}.", None, _kind, looked.kind)
    kind = kind or looked.kind
    looked = looked if looked.fits(kind) else look(data, kind)
    if kind == "clip" and forget is not None:
        raise OptionError("--forget: a CLIP model forgets all of the data; name what it --keeps")
    if kind != "clip" and keep is not None:
        raise OptionError("--keep: is for CLIP models; name what to --forget")
    if kind != "images" and weights is not None:
        raise OptionError("--weights: is for networks; --model names the folder of the model")
    what: Any = None
    if kind == "clip":
        question = "What is to be kept: which other images, a folder or the name of a set?"
        keep, kept = questions.ask(
            question, keep, lambda text: (text, look(text, "clip")), "imagenet"
        )
        what = keep, kept
    else:
        what = questions.ask(looked.question(kind), forget, looked.parse(kind), "10%")
    name, own = questions.ask(
        MODEL_QUESTIONS[kind],
        model,
        lambda text: _model(text, weights, kind),
        USUAL_MODELS[kind],
    )
    new = NewRecipe(file, data, name, own)
    if kind == "texts":
        assert looked.texts is not None
        text = new.of_texts(looked.texts, what)
    elif kind == "clip":
        text = new.of_clip(looked.images, what[0], what[1].images)
    else:
        text = new.of_images(looked.images, what)
    write_file(file, text.encode())
    if json_:
        print(
            json.dumps({"event": "result", "recipe": str(file), "kind": kind, "data": looked.text})
        )
        return
    print(printable(f"{file}: written; change what you like, then"))
    print(printable(f"  negmerge unlearn {file} --dry-run    # steps, disk, memory and time"))
    print(printable(f"  negmerge unlearn {file}"))


@dataclass(frozen=True)
class Looked:
    """What was found where the data is.

    Args:
        kind: what the data looks like.
        text: one line about it.
        images, texts: what it holds; both None for a registered set of images.
    """

    kind: Kind
    text: str
    images: ImageSurvey | None = None
    texts: TextSurvey | None = None

    def fits(self, kind: Kind) -> bool:
        """Whether the data was read as this kind needs it."""
        return (kind == "texts") == (self.texts is not None)

    def question(self, kind: Kind) -> str:
        """Return the question of what to forget."""
        if kind == "texts":
            return "What is to be forgotten: COLUMN=VALUE,VALUE, a share, or a file of records?"
        return "What is to be forgotten: a class, a share, or a file with names of images?"

    def parse(self, kind: Kind) -> Callable[[str], Any]:
        """Return the function that reads the answer."""
        from negmerge.runs.new_recipe import forgotten_images, forgotten_texts

        if self.texts is not None:
            texts = self.texts
            return lambda text: forgotten_texts(text, texts)
        return lambda text: forgotten_images(text, self.images)


def look(name: str, kind: Kind | None) -> Looked:
    """Look at the data; raise an error of one line if it cannot be used.

    Args:
        kind: how to read it; None: as what it looks like.
    """
    from negmerge.text.documents import FOLDER_FILES
    from negmerge.text.library import texts as known_texts
    from negmerge.vision.datasets import datasets

    path = Path(name).expanduser()
    if not path.exists():
        if name in known_texts and kind in (None, "texts"):
            return _texts(name)
        if kind == "texts" or name.startswith(("/", ".", "~")) or path.suffix in FOLDER_FILES:
            raise FileError(f"{quoted(name)}: no such file or folder")
        if name in datasets:
            return Looked("images", f"a known set of images; {datasets.get(name).summary}")
        raise OptionError(
            f"{quoted(name)}: no such file or folder, and no known set of images (`negmerge list "
            "datasets`)"
        )
    if path.is_file() and path.suffix not in FOLDER_FILES:
        raise FileError(
            f"{name}: wanted a folder of images, or texts as a folder or a file that ends with "
            f"{', '.join(FOLDER_FILES)}"
        )
    is_text = kind == "texts" or (kind is None and _looks_like_texts(path))
    if is_text:
        return _texts(str(path))
    from negmerge.vision.survey import survey_images

    found = survey_images(path)
    return Looked("images", found.describe(), images=found)


def _texts(name: str) -> Looked:
    from negmerge.text.survey import survey_texts

    found = survey_texts(name)
    if found.count < 2:
        raise FileError(
            f"{name}: has one record, and a part of the records is to be forgotten; wanted one per "
            "line of a .jsonl file, or a folder of .txt files"
        )
    return Looked("texts", found.describe(), texts=found)


def _looks_like_texts(path: Path) -> bool:
    """Whether a file or folder holds records of text; a parquet file by its columns."""
    if path.is_dir():
        first = next((p for p in sorted(path.rglob("*")) if p.is_file() and p.name[0] != "."), None)
        return first is not None and _looks_like_texts(first)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            kinds = [field.type for field in pq.read_schema(path)]
        except (pa.ArrowException, OSError):
            return False  # the reader of images says what is wrong
        return not any(pa.types.is_struct(kind) or pa.types.is_binary(kind) for kind in kinds)
    return path.suffix in (".jsonl", ".txt")


def _kind(text: str) -> Kind:
    from negmerge.registry import unknown_name

    if text not in KINDS:
        raise OptionError(unknown_name("kind", text, list(KINDS)))
    return text  # pyright: ignore[reportReturnType]


def _model(text: str, weights: str | None, kind: Kind) -> tuple[str, str | None]:
    """Return the name of the model and the file of its weights, which may follow in an answer."""
    name, _, file = text.strip().partition(" ")
    own = weights or file.strip() or None
    if kind == "clip":
        return text, None
    if kind == "texts":
        if "/" not in text and text != USUAL_MODELS["texts"] and not Path(text).is_dir():
            raise OptionError(
                f"--model {quoted(text)}: no such folder; wanted a folder, a Hub id such as "
                f"someone/name, or {USUAL_MODELS['texts']}"
            )
        return text, None
    if "/" not in name:
        from negmerge.vision.networks import models

        models.get(name)
    if own is not None and not Path(own).is_file():
        raise FileError(f"{own}: no such file; wanted the .safetensors file of the trained model")
    return name, own


class Questions:
    """Asks on the terminal, again and again until the answer can be used."""

    @staticmethod
    def possible() -> bool:
        """Whether there is a terminal to ask."""
        return sys.__stdin__ is not None and sys.__stdin__.isatty() and sys.stdout.isatty()

    def ask(
        self, question: str, given: str | None, parse: Callable[[str], T], usual: str | None = None
    ) -> T:
        """Return what an answer means.

        Args:
            question: the text of the question.
            given: the answer, if it is known; then nothing is asked, and a mistake raises.
            parse: reads the answer.
            usual: the answer of who presses Enter.
        """
        if given is not None:
            return parse(given)
        prompt = f"{question}\n{'' if usual is None else f'[{usual}] '}> "
        while True:
            with with_terminal():
                try:
                    answer = input(printable(prompt).replace("\\n", "\n")).strip()
                except EOFError:
                    raise KeyboardInterrupt from None
            answer = answer or usual
            if not answer:
                continue
            try:
                return parse(answer)
            except NegMergeError as error:
                print(printable(f"{error}"), flush=True)
