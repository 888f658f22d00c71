"""Texts of data stay texts in Markdown and YAML, whatever they hold; a Markdown parser is asked."""

from __future__ import annotations

import yaml
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from negmerge.errors import printable
from negmerge.support.markdown import code, front_matter, plain, table

PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
TEXTS = st.text(st.sampled_from("ab1 \t\n\\`*_{}[]()<>#+-.!|~&;:=\"'/@^$é\x1b\u202e"), max_size=30)


def shown(markdown: str) -> tuple[str, set[str]]:
    """What a reader sees, and the kinds of what is in it."""
    tokens = [one for token in PARSER.parse(markdown) for one in (token.children or [])]
    kinds = {token.type for token in PARSER.parse(markdown)} | {token.type for token in tokens}
    return "".join(token.content for token in tokens), kinds


def as_shown(text: str) -> str:
    return printable(" ".join(text.split()))


@given(TEXTS)
def test_a_text_is_shown_as_it_is(text):
    seen, kinds = shown(f"- a {plain(text)} z")
    assert " ".join(seen.split()) == " ".join(f"a {as_shown(text)} z".split())
    assert kinds <= {
        "bullet_list_open", "bullet_list_close", "list_item_open", "list_item_close", "inline",
        "paragraph_open", "paragraph_close", "text", "text_special",
    }  # fmt: skip


@given(TEXTS, TEXTS)
def test_a_text_stays_in_its_cell(one, two):
    lines = table(["x", "y"], [[f"a{plain(one)}", code(f"b{two}")]])
    tokens = PARSER.parse("\n".join(lines))
    assert sum(token.type == "td_open" for token in tokens) == 2
    assert sum(token.type == "tr_open" for token in tokens) == 2
    cells = [token for token in tokens if token.type == "inline"][2:]
    assert "".join(c.content for c in cells[0].children) == f"a{as_shown(one)}" or "\\|" in plain(
        one
    )
    (inside,) = cells[1].children
    assert inside.type == "code_inline"


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=30), max_size=4))
def test_the_block_at_the_top_is_read_back(tree):
    text = front_matter(tree)
    assert text.startswith("---\n")
    inside = text.removeprefix("---\n").removesuffix("---\n")
    assert "\n---\n" not in f"\n{inside}"
    assert (yaml.safe_load(inside) or {}) == {printable(k): printable(v) for k, v in tree.items()}
