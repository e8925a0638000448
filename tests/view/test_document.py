"""Proves that terminal and page show the same values of a document, whatever characters the values have."""

import io
import re
from html import unescape

import pytest
from rich.console import Console

from shardwright.explore.page import style
from shardwright.system.console import PlainConsole
from shardwright.view.document import (
    BYTES,
    CODE,
    COUNT,
    Code,
    Column,
    Fact,
    Facts,
    Marked,
    Note,
    Picture,
    Section,
    Table,
    VerbDocument,
)
from shardwright.view.html import MOST_SHORT, narrow_style, page
from shardwright.view.terminal import TableStream, print_parts

TABLE = Table(
    (Column("layout", CODE, 12), Column("memory", BYTES, 8), Column("calls", COUNT, 5), Column("verdict")),
    [("tp [bold]2", 3 * 2**30, 12345, Marked("no", "bad")), ("<b>", 1536, None, "yes")],
    rest="and 2 more",
)
DOCUMENT = VerbDocument(
    "a <title>",
    {},
    [
        Facts([Fact("largest", "[red]7", "of <9>", "bad")]),
        Note("a & b [/]", "warning", "bad"),
        Section("A [section]"),
        TABLE,
        Picture("curve", "A curve", lambda: '<svg viewBox="0 0 1 1"></svg>', "its caption"),
        Code("  [lines]\n  <kept>"),
    ],
)


def test_a_column_of_long_texts_has_lines_of_its_own_on_a_narrow_screen_and_lines_below_a_table_are_kept():
    long, short = "dp_shard=64,zero=3,recompute=full", "dp_shard=8"
    columns = Column("name", CODE), Column("memory", BYTES), Column("layout", CODE)
    text = page(VerbDocument("", {}, [Table(columns, [(long, 1, short), (short, 1, long)], "one\ntwo")]))
    assert '<table class="long short-2">' in text
    assert re.findall(r'<t[hd] class="([^"]* )?long">(?:<code>)?([^<]*)', text) == [
        ("left ", name) for name in ("layout", short, long)
    ]
    assert '<p class="quiet">one\ntwo</p>' in text
    assert "white-space: pre-line" in text
    assert 'class="long short' not in page(VerbDocument("", {}, [Table(columns, [(long, 1, short)])]))


@pytest.mark.parametrize("n", [13, MOST_SHORT, MOST_SHORT + 1])
def test_every_table_with_lines_for_long_texts_has_a_style_for_its_columns(n: int):
    columns = [*(Column(f"{at}", BYTES) for at in range(n)), Column("layout", CODE)]
    text = page(VerbDocument("", {}, [Table(columns, [(*range(n), "dp_shard=64,zero=3,recompute=full")])]))
    assert ('class="long short-' in text) is (n <= MOST_SHORT)
    for shown in (text, narrow_style(), style()):
        assert (f".short-{n} {{ --short: {n}; }}" in shown) is (n <= MOST_SHORT)
        assert ".long :is(td, th).long" in shown


def printed(width: int = 40) -> tuple[Console, io.StringIO]:
    return Console(file=(file := io.StringIO()), width=width), file


def test_every_value_is_in_the_terminal_and_on_the_page_as_it_is():
    console, file = printed()
    print_parts(DOCUMENT.parts, console)
    text, shown = file.getvalue(), unescape(re.sub(r"<style>.*</style>|<[^>]+>", " ", page(DOCUMENT), flags=re.DOTALL))
    values = ["largest", "[red]7", "of <9>", "warning: a & b [/]", "A [section]", "layout", "tp [bold]2", "3 GiB"]
    for value in [*values, "12,345", "no", "<b>", "1.5 KiB", "and 2 more", "  [lines]\n  <kept>"]:
        assert value in text, value
        assert value in shown, value
    assert "its caption" not in text, "a terminal has no pictures"
    assert "its caption" in shown


def test_a_row_that_is_printed_when_it_is_computed_stands_under_its_heading():
    console, file = printed()
    stream = TableStream(TABLE, console)
    for row in TABLE.rows:
        stream.add(row)
    heading, *rows = file.getvalue().splitlines()
    assert rows == ["tp [bold]2       3 GiB  12,345  no", "<b>            1.5 KiB         yes"]
    assert heading == "layout          memory  calls  verdict"
    console, file = printed()
    print_parts([Table(TABLE.columns, TABLE.rows, streamed=True)], console)
    assert not file.getvalue(), "it is not printed a second time"


@pytest.mark.parametrize("stacked", [False, True])
def test_a_name_with_control_characters_newlines_and_tabs_is_one_whole_cell_of_one_row(stacked: bool):
    table = Table((Column("name"), Column("calls", COUNT)), [("a\x1b[31m\tb\nc", 12345), ("d", 6)], stacked=stacked)
    out = io.StringIO()
    print_parts([table, Note("text", "e\nf")], PlainConsole(file=out, width=80))
    row, *others = [line.split() for line in out.getvalue().splitlines() if line][not stacked :]
    assert row == ["a\\x1b[31m\\x09b\\x0ac" + ":" * stacked, "12,345"]
    assert others == [["d" + ":" * stacked, "6"], ["e\\x0af:", "text"]]
