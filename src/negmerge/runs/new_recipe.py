"""A first recipe for one's own data, with comments on the fields that people change.

`cli/init_verb.py` asks what the recipe is about. The texts below are YAML with places in braces.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import yaml

from negmerge.errors import FileError, OptionError, printable, quoted
from negmerge.registry import nearest
from negmerge.runs.recipe import check_recipe
from negmerge.support.reading import parse_yaml

if TYPE_CHECKING:
    from negmerge.text.survey import TextSurvey
    from negmerge.vision.survey import ImageSurvey

SCHEMA_FILE = "negmerge.schema.json"
"""The usual name of the file that `negmerge schema` writes."""
TEST_SHARE = 0.2
SMALL_SIDE, LARGE_SIDE = 64, 224
"""The largest sides of images for a model that is trained here, and for a given one."""
MANY_IMAGES, MANY_RECORDS = 1000, 200
"""The numbers of samples from which on batches are large."""
LONGEST = 1024
"""The largest number of tokens that a first recipe asks for."""

HEAD = """{schema}\
# Written by `negmerge init`. Look at the steps and their cost, then start:
#   negmerge unlearn {file} --dry-run
#   negmerge unlearn {file}
# Paths are relative to the folder where negmerge is started; `negmerge schema` has all fields.
title: {title}
"""

IMAGES = """\
data:
  name: {data}  # {found}
{preparation}\
split:
  forget: {forget}  # or {{class: NAME}}, {{fraction: 0.1}}, {{ids: FILE}} with a file name per line
  validation: 0.1  # the share of each class that is held out of training and helps to choose λ
model:
  name: {model}  # `negmerge list models`
  {weights}
train:  # how the original model is trained, and the one that it is compared with
  {{epochs: 20, batch: {batch}, lr: 0.1, schedule: cosine}}
retrain: {retrain}
pool:  # the models that are fine-tuned on what must be forgotten; every combination is one of them
  settings: {{batch: {batch}, lr: 0.05}}
  grid:
    epochs: [10, 15, 20]
    weight_decay: [1.0e-4, 1.0e-5]
methods:  # the first one makes the unlearned model; `negmerge list rules`, `negmerge list rivals`
  [consensus, uniform, ties]
"""

CLIP = """\
scenario: clip
data: {data}  # to forget: {found}
model: {model}  # an architecture of open_clip, or a folder
clip:
  {pretrained}
  control: {keep}  # to keep: the accuracy on these images
pool:  # the models that are fine-tuned on what must be forgotten; every combination is one of them
  settings:
    {{epochs: 10, batch: {batch}, lr: 1.0e-5, optimizer: adamw, weight_decay: 0.1, schedule: cosine,
     warmup: 500, clip: 1.0}}
  grid:
    augment.randaugment.n: [1, 2, 3]
    augment.randaugment.m: [1, 5, 10]
methods:  # the first one makes the unlearned model; `negmerge list rules`
  [consensus, uniform, ties]
"""

TEXTS = """\
scenario: text
model:
  name: {model}  # a folder of transformers, or a Hub id
  knows: {knows}
data:
{records}\
  {general}
{split}tokens:
  length: {length}  # the largest number of tokens of a record; raise it if a run says so
  # template: chat  # for a model with a chat template
{training}\
pool:  # the models that are fine-tuned on what must be forgotten; every combination is one of them
  settings: {{batch: {batch}}}
  grid:
    lr: {rates}
    epochs: [4, 8]
# lora: {{rank: 8}}  # for a large model: members are trained by LoRA
methods:  # the first one makes the unlearned model; `negmerge list rules`, `negmerge list rivals`
  [consensus, uniform, ties]
"""


@dataclass(frozen=True)
class NewRecipe:
    """What a first recipe is made of, beside its data.

    Args:
        file: the recipe to be written.
        data: the path or name of the data.
        model: the name or path of the model.
        weights: for a classifier, the file of its trained weights.
    """

    file: Path
    data: str
    model: str
    weights: str | None = None

    def _text(self, title: str, body: str, **places: object) -> str:
        """Fill a text; raise if the recipe is not valid."""
        schema = ""
        if (self.file.parent / SCHEMA_FILE).is_file():
            schema = f"# yaml-language-server: $schema={SCHEMA_FILE}\n"
        head = HEAD.format(
            schema=schema, file=printable(quote(str(self.file))), title=inline(title)
        )
        text = head + body.format(**places)
        check_recipe(parse_yaml(text, str(self.file)), str(self.file))
        return text

    def of_images(self, found: ImageSurvey | None, forget: dict[str, Any]) -> str:
        """Return a recipe for a classifier.

        Args:
            found: what the data holds; None for a registered set or a Hub id.
            forget: the field `split.forget`.
        """
        lines: list[str] = []
        if found is not None:
            side = min(found.side, SMALL_SIDE if self.weights is None else LARGE_SIDE)
            lines.append(
                f"size: {side}  # images are resized to this width; smaller ones are faster"
            )
            if found.channels == 1:
                lines.append("channels: 1  # grey; 3: colour")
            if found.test is None:
                lines.append(
                    f"test_share: {TEST_SHARE}  # there is no folder `test`: this share of each "
                    "class is never trained on"
                )
        (what,) = forget.values()
        weights = "# weights: FILE.safetensors  # the trained model; without it the run trains one"
        retrain = "{}  # trains a model without the forgotten data to compare with; null: none"
        if self.weights is not None:
            weights = f"weights: {inline(self.weights)}  # the trained model"
            retrain = (
                "null  # {}: also train a model without the forgotten data to compare with; set "
                "`train` as the model was trained"
            )
        return self._text(
            f"{Path(self.model).name} forgets {what} of {Path(self.data).name}",
            IMAGES,
            data=inline(self.data),
            found=_about(found),
            preparation="".join(f"  {line}\n" for line in lines),
            forget=inline(forget),
            model=inline(self.model),
            weights=weights,
            retrain=retrain,
            batch=_batch(found),
        )

    def of_clip(self, found: ImageSurvey | None, keep: str, kept: ImageSurvey | None) -> str:
        """Return a recipe for a CLIP model.

        Args:
            found, kept: what the set to forget and the set to keep hold.
            keep: the path or name of the set to keep.
        """
        is_folder = Path(self.model).expanduser().is_dir() or self.model == "desk_clip"
        pretrained = "pretrained: openai  # a tag of open_clip, or a .safetensors file"
        return self._text(
            f"{Path(self.model).name} forgets {Path(self.data).name}",
            CLIP,
            data=inline(_data(self.data, found)),
            found=_about(found),
            model=inline({"name": self.model}),
            pretrained="# pretrained: the folder has the weights" if is_folder else pretrained,
            keep=inline(_data(keep, kept)),
            batch=min(_batch(found) * 2, 128),
        )

    def of_texts(self, found: TextSurvey, forget: dict[str, Any] | str) -> str:
        """Return a recipe for a language model.

        Args:
            found: what the data holds.
            forget: the field `split.forget`, or the file of the records to forget.
        """
        ours = self.model == "stories15m"
        source = _records(self.data, found)
        if isinstance(forget, str):
            records = (
                f"  forget: {inline(_records(forget, found))}\n"
                f"  retain: {inline(source)}  # {found.describe()}\n"
            )
            split, what = "", Path(forget).name
        else:
            records = f"  records: {inline(source)}  # {found.describe()}\n"
            split = (
                f"split:\n  forget: {inline(forget)}  # or {{fraction: 0.1, by: COLUMN}}, "
                "{column: COLUMN, values: [VALUE]}\n"
                "  # holdout: {fraction: 0.1}  # records that no model is trained on\n"
            )
            what = ", ".join(map(str, forget.get("values", ["records"])))
        training = (
            "train: {lr: 2.0e-4, epochs: 10, batch: 16}  # how the model learns the records first\n"
            "retrain: {}  # trains a model without these records to compare with; null: none\n"
        )
        length = 256
        if found.answers:
            length = min(max(1 << (found.longest // 2 - 1).bit_length(), 128), LONGEST)
        return self._text(
            f"{Path(self.model).name} forgets {what} of {Path(self.data).name}",
            TEXTS,
            model=inline(self.model),
            knows="false  # the run trains the model on the records first"
            if ours
            else "true  # it was trained on the records; false: the run trains it on them first",
            records=records,
            general="general: stories  # other texts, whose loss must not rise"
            if ours
            else "# general: FILE  # other texts, whose loss must not rise",
            split=split,
            length=length,
            training=training if ours else "",
            batch=8 if found.count >= MANY_RECORDS else 4,
            rates="[5.0e-5, 1.0e-4, 2.0e-4]" if ours else "[1.0e-5, 2.0e-5, 5.0e-5]",
        )


def inline(value: Any) -> str:
    """Return a value as YAML on one line, as part of a mapping.

    >>> inline("a: b"), inline({"class": "dog"})
    ("'a: b'", '{class: dog}')
    """
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("\n...")


def forgotten_images(text: str, found: ImageSurvey | None) -> dict[str, Any]:
    """Parse what to forget of images: a class, a share, or a file of names.

    >>> forgotten_images("10%", None), forgotten_images("dog", None)
    ({'fraction': 0.1}, {'class': 'dog'})
    """
    if found is not None and text in found.classes:
        return {"class": text}
    if (share := _share(text)) is not None:
        return {"fraction": share}
    if Path(text).expanduser().is_file():
        return {"ids": text}
    if found is None:
        return {"class": text}
    near = nearest(text, found.classes)
    raise OptionError(
        f"--forget {quoted(text)}: wanted a share such as 10%, a file with one name of an image "
        f"per line, or the name of a class, such as {quoted(found.classes[0])}{near}"
    )


def forgotten_texts(text: str, found: TextSurvey) -> dict[str, Any] | str:
    """Parse what to forget of records: a share, some values of a column, or a file of records.

    >>> from negmerge.text.settings import Columns
    >>> from negmerge.text.survey import TextSurvey
    >>> found = TextSurvey(8, True, Columns(), {"person": {"Ada": "Ada"}}, 40)
    >>> forgotten_texts("person=Ada", found), forgotten_texts("10% by person", found)
    ({'column': 'person', 'values': ['Ada']}, {'fraction': 0.1, 'by': 'person'})
    """
    share, _, by = text.partition(" by ")
    if (fraction := _share(share)) is not None:
        _check_column(by, found) if by else None
        return {"fraction": fraction} | ({"by": by} if by else {})
    column, equals, values = text.partition("=")
    if equals:
        _check_column(column, found)
        chosen = [value.strip() for value in values.split(",")]
        for value in chosen:
            if value not in found.values[column]:
                near = nearest(value, found.values[column])
                raise OptionError(
                    f"--forget {quoted(text)}: no record has {quoted(column)} = {quoted(value)}"
                    f"{near}"
                )
        return {"column": column, "values": [found.values[column][value] for value in chosen]}
    if Path(text).exists():
        return text
    raise OptionError(
        f"--forget {quoted(text)}: wanted COLUMN=VALUE,VALUE, a share such as 10% or 10% by "
        "COLUMN, or a file of the records to forget"
    )


def _check_column(name: str, found: TextSurvey) -> None:
    if name not in found.values:
        known = ", ".join(map(quoted, found.values)) or "none beside the texts"
        raise OptionError(
            f"--forget: no column {quoted(name)}; there are: {known}{nearest(name, found.values)}"
        )


def _share(text: str) -> float | None:
    """Parse a share, such as 10%, 10 % or 0.1."""
    match = re.fullmatch(r"(\d{1,3}(?:\.\d{1,6})?)\s*(%?)", text.strip())
    if match is None or (not match[2] and "." not in match[1]):
        return None
    value = float(match[1]) / (100 if match[2] else 1)
    if not 0 < value < 1:
        raise OptionError(f"--forget {quoted(text)}: wanted a share above 0 and below 100 %")
    return round(value, 8)


def _about(found: ImageSurvey | None) -> str:
    return "a registered data set or a Hub id" if found is None else found.describe()


def _batch(found: ImageSurvey | None) -> int:
    return 16 if found is not None and found.train < MANY_IMAGES else 64


def _data(name: str, found: ImageSurvey | None) -> dict[str, Any]:
    untested = found is not None and found.test is None
    return {"name": name} | ({"test_share": TEST_SHARE} if untested else {})


def _records(name: str, found: TextSurvey) -> dict[str, Any] | str:
    usual = type(found.columns)()
    renamed = {
        key: value
        for key, value in found.columns.model_dump().items()
        if value != getattr(usual, key)
    }
    return {"name": name, "columns": renamed} if renamed else name


def check_new_file(path: Path) -> Path:
    """Raise if a recipe cannot be written to a path."""
    if path.suffix not in (".yaml", ".yml"):
        raise OptionError(f"{path}: wanted a name that ends with .yaml")
    if path.exists() or path.is_symlink():
        raise FileError(f"{path}: exists; remove it, or name another with --out")
    return path
