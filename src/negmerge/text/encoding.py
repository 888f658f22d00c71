"""Records as tokens: the tokens of each sample, and which of them are the answer.

The text of a prompt and its answer is cut into tokens as a whole. A token belongs to the answer if
it has a character of it; so the tokens before it are exactly those that the model is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from negmerge.errors import OptionError, one_line, quoted
from negmerge.support.bounds import bounded
from negmerge.text.documents import Record
from negmerge.text.settings import Tokens

Ids = NDArray[np.int64]

TODAY = "10 Apr 2025"
"""The date that the chat templates of Llama 3 write, instead of that of the day of the run."""


@dataclass(frozen=True)
class Sample:
    """The tokens of a sample.

    Args:
        ids: all tokens.
        first: the position of the first token of the answer.
        record: the position of the record that the sample is made of.
    """

    ids: Ids
    first: int
    record: int = 0

    @property
    def answer(self) -> Ids:
        """The tokens of the answer."""
        return self.ids[self.first :]


class Encoder:
    """Makes samples of records.

    Args:
        tokenizer: a fast tokenizer of `transformers`.
        tokens: the settings.
        name: the name of the model, for errors.
    """

    def __init__(self, tokenizer: Any, tokens: Tokens, name: str) -> None:
        self.tokenizer, self.tokens, self.name = tokenizer, tokens, name
        if not tokenizer.is_fast:
            raise OptionError(
                f"model.name {quoted(name)}: its tokenizer has no tokenizer.json, which tells the "
                "characters of each token; convert it with transformers"
            )
        if tokenizer.eos_token_id is None:
            raise OptionError(f"model.name {quoted(name)}: its tokenizer has no end token")
        if tokens.template == "chat" and not tokenizer.chat_template:
            raise OptionError(
                f"tokens.template: got chat, but the tokenizer of {quoted(name)} has no chat "
                "template; give a text such as '{prompt} {answer}'"
            )

    def samples(self, records: Sequence[Record], where: str) -> list[Sample]:
        """Return the samples of some records; a long document has several.

        Args:
            where: the name of the set, for errors.
        """
        found: list[Sample] = []
        for number, record in enumerate(records):
            if record.prompt is None:
                found += self._document(record.answer, f"{where}, record {number + 1}", number)
            else:
                found.append(self.sample(record, f"{where}, record {number + 1}", number))
        return found

    def sample(self, record: Record, where: str, number: int = 0) -> Sample:
        """Return the sample of a prompt and its answer."""
        text, begin = self._text(record, where)
        plain = self.tokens.template != "chat"  # a chat template writes its special tokens itself
        coded = self.tokenizer(
            text, add_special_tokens=plain, return_offsets_mapping=True, verbose=False
        )
        ids, ends = coded["input_ids"], [end for _, end in coded["offset_mapping"]]
        first = next((i for i, end in enumerate(ends) if end > begin), len(ids))
        if first == len(ids):
            raise OptionError(f"{where}: the answer {quoted(record.answer)} has no tokens")
        if first == 0:
            raise OptionError(
                f"{where}: the prompt {quoted(record.prompt)} has no token of its own; wanted a "
                "longer prompt, or a tokens.template with a text before it"
            )
        if plain and ids[-1] != self.tokenizer.eos_token_id:
            ids = [*ids, self.tokenizer.eos_token_id]
        if len(ids) > self.tokens.length:
            raise OptionError(
                f"{where}: has {len(ids)} tokens, wanted at most {self.tokens.length}; set "
                "tokens.length, or shorten it"
            )
        return Sample(np.array(ids, np.int64), first, number)

    def _text(self, record: Record, where: str) -> tuple[str, int]:
        """Return the text of a record, and where the answer begins."""
        if self.tokens.template != "chat":
            before = self.tokens.template.removesuffix("{answer}")
            begin = before.replace("{prompt}", record.prompt or "")
            return begin + record.answer, len(begin)
        system = self.tokens.system
        asked = [] if system is None else [{"role": "system", "content": system}]
        asked += [{"role": "user", "content": record.prompt}]
        told = [*asked, {"role": "assistant", "content": record.answer}]
        make = self.tokenizer.apply_chat_template
        try:
            with bounded():
                begin = make(asked, tokenize=False, add_generation_prompt=True, date_string=TODAY)
                text = make(told, tokenize=False, date_string=TODAY)
        except Exception as error:  # a template may raise anything
            raise OptionError(f"{where}: the chat template fails: {one_line(error)}") from None
        if system is not None and system.strip() not in begin:
            raise OptionError(
                f"tokens.system: the chat template of {quoted(self.name)} does not write it; "
                "remove it, or give tokens.template as a text that has it"
            )
        if not text.startswith(begin) or record.answer.strip() not in text[len(begin) :]:
            raise OptionError(
                f"{where}: the chat template of {quoted(self.name)} does not continue the prompt "
                "with the answer; give tokens.template as a text with {prompt} and {answer}"
            )
        return text, len(begin)

    def _document(self, text: str, where: str, number: int) -> list[Sample]:
        """Cut a document into samples of at most `tokens.length` tokens."""
        ids = [*self.tokenizer(text, verbose=False)["input_ids"]]
        if ids[-1:] != [self.tokenizer.eos_token_id]:
            ids.append(self.tokenizer.eos_token_id)
        if len(ids) < 2:
            raise OptionError(
                f"{where}: the text {quoted(text)} has no token to predict; remove the record"
            )
        size = self.tokens.length
        cuts = [ids[start : start + size] for start in range(0, len(ids), size)]
        # The first token of a sample is given, so that a single one has nothing to predict.
        return [Sample(np.array(cut, np.int64), 1, number) for cut in cuts if len(cut) > 1]
