"""Fields of a recipe for records of text and their sets."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from negmerge.support.settings import Count, NameOrPath, Strict

Fraction = Annotated[float, Field(gt=0, lt=1)]


class Columns(Strict):
    """The columns of a file, where they are not called as here."""

    text: str = "text"
    """The text of a document."""
    prompt: str = "prompt"
    """The question, or the beginning of a text."""
    answer: str = "answer"
    """What the model is to answer; only answers are trained on and measured."""
    wrong: str = "wrong"
    """A list of wrong answers of the same kind; the truth ratio needs it."""

    @model_validator(mode="after")
    def _different(self) -> Columns:
        names = [self.text, self.prompt, self.answer, self.wrong]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"{twice!r} is named twice; wanted a column of its own for each")
        return self


class Records(Strict):
    """Documents, or prompts with answers.

    A record with an answer is a prompt and its answer; a record with a text is a document.
    """

    name: NameOrPath
    """A registered name (`negmerge list texts`), a .jsonl or .parquet file, a .txt file or a folder
    of them (one document each), or a Hub id."""
    columns: Columns = Columns()
    split: str = "train"
    """The split on the Hub."""
    config: str | None = None
    """The configuration (subset) on the Hub."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; a commit makes a run repeatable."""
    limit: Count | None = None
    """The largest number of records, from the beginning."""

    @model_validator(mode="before")
    @classmethod
    def _name_only(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given


class Part(Strict):
    """A part of the records: a share drawn at random, or the records with some values."""

    fraction: Fraction | None = None
    """The share."""
    by: str | None = None
    """With `fraction`: the column whose values are drawn; records with one value stay together."""
    column: str | None = None
    """The column that decides."""
    values: Annotated[tuple[str | bool | int | float, ...], Field(min_length=1)] | None = None
    """The values of the column."""

    @model_validator(mode="after")
    def _one_way(self) -> Part:
        if (self.fraction is None) == (self.column is None):
            raise ValueError(
                "wanted either fraction, or column and values, such as {column: author, values: "
                "[NAME]}"
            )
        if (self.column is None) != (self.values is None):
            raise ValueError("wanted column and values together")
        if self.by is not None and self.fraction is None:
            raise ValueError("by: wanted only together with fraction; remove by")
        return self


class TextData(Strict):
    """The records of each set.

    The records to forget and to retain are two files (`forget`, `retain`), or parts of one
    (`records`, divided as `split` says).
    """

    records: Records | None = None
    """The records that the model knows, to be divided into forget and retain set."""
    forget: Records | None = None
    """The records to forget."""
    retain: Records | None = None
    """The records to keep."""
    holdout: Records | None = None
    """Records of the same kind that the model has never seen."""
    general: Records | None = None
    """Other texts, whose loss tells whether the model still knows its language."""

    @model_validator(mode="after")
    def _complete(self) -> TextData:
        if self.records is None and (self.forget is None or self.retain is None):
            raise ValueError("wanted records, or forget and retain")
        if self.records is not None and (self.forget or self.retain):
            raise ValueError("records is divided by split; remove forget and retain, or records")
        return self


class TextSplit(Strict):
    """How `data.records` is divided."""

    forget: Part = Part(fraction=0.1)
    holdout: Part | None = None
    """A part that no model is trained on; None: `data.holdout`, if it is given."""
    general: Fraction | None = 0.5
    """The share of the general texts that originals are trained on beside the records; the loss is
    measured on the others. None: on all of them."""


class Tokens(Strict):
    """How records become tokens."""

    template: str = "{prompt} {answer}"
    """The text of a record with an answer, or `chat` for the chat template of the model."""
    system: str | None = None
    """With `chat`: the system message before the prompt. None: what the chat template writes."""
    length: Annotated[int, Field(ge=8, le=1 << 20)] = 256
    """The largest number of tokens of a sample. Longer documents are cut into several samples; a
    longer prompt with its answer is an error."""

    @model_validator(mode="after")
    def _has_places(self) -> Tokens:
        once = all(self.template.count(place) == 1 for place in ("{prompt}", "{answer}"))
        if self.template != "chat" and not (once and self.template.endswith("{answer}")):
            raise ValueError(
                f"template: got {self.template!r}; wanted chat, or a text with {{prompt}} once "
                "that ends with {answer}"
            )
        if self.system is not None and (self.template != "chat" or not self.system.strip()):
            raise ValueError(
                f"system: got {self.system!r}; wanted a text, and only with template: chat; remove "
                "it, or write it into template"
            )
        return self
