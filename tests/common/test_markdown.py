"""Foreign text in Markdown and Python is text: nothing of it is a link, a tag, a cell, a heading or code."""

import ast

from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from common.errors import one_line
from common.markdown import code, plain, python_string, table


texts = st.text(st.characters() | st.sampled_from("\\`*_[]()<>|~&#$!:@\"'.\n- ="))


def parsed(markdown):
    """The inline tokens of a text in Markdown, each with its type and content."""
    inline = [token for token in MarkdownIt("commonmark").enable("table").parse(markdown) if token.type == "inline"]
    return [[(child.type, child.content) for child in token.children] for token in inline]


@given(texts)
@example("x](http://evil.example) | a")
@example('<img onerror="alert(1)"> &amp; **x** __y__ _z_ ~~a~~ #')
@example("a\\|b\\")
def test_plain_text_is_shown_as_it_is(text):
    table = f"| {plain(text)} | x |\n|---|---|\n| {plain(text)} | x |"
    for shown in (*parsed(f"# {plain(text)}\n"), *parsed(table)[::2]):
        assert {kind for kind, _ in shown} <= {"text"}
        assert "".join(content for _, content in shown) == one_line(text)


def test_plain_text_makes_no_autolinks():
    """That is GitHub's and the hub's extension, which the parser lacks here."""
    assert plain("http://evil.example www.evil.example me@evil.example") == (
        r"http\://evil.example www\.evil.example me\@evil.example"
    )


@given(texts.filter(one_line))
@example("`` x ` <img>")
def test_a_code_span_holds_the_whole_text(text):
    for markdown in (f"From {code(text)}.", f"{code(text)}."):
        (shown,) = parsed(markdown)
        assert [part for part in shown if part[0] != "text"] == [("code_inline", one_line(text))]


@given(texts)
@example("a\"b\\'c\n")
def test_a_python_string_is_the_text(text):
    literal = python_string(text)
    assert ast.literal_eval(literal) == text
    assert literal.isprintable()
    assert literal.startswith('"') or '"' in text


@given(st.lists(st.tuples(texts, texts), max_size=3))
def test_a_table_has_every_cell(rows):
    markdown = table(("one", "two"), [[plain(cell) for cell in row] for row in rows], [":--", " --: "])
    shown = ["".join(content for _, content in cell) for cell in parsed(markdown)]
    assert shown == ["one", "two", *(one_line(cell) for row in rows for cell in row)]
    rules = [
        token.attrs for token in MarkdownIt("commonmark").enable("table").parse(markdown) if token.type == "th_open"
    ]
    assert rules == [{"style": "text-align:left"}, {"style": "text-align:right"}]
