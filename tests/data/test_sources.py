"""Proves that every kind of source gives its documents, in order, in bounded memory, or a clear error."""

import bz2
import gzip
import json
import lzma
import os
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data import readers
from shardwright.data.sources import Meter, documents
from shardwright.system.errors import DataError


def texts(source: object, **options: object) -> list[str]:
    return ["".join(document.pieces) for document in documents(source, **options)]  # type: ignore[arg-type]


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    assert texts(tmp_path / "a.txt") == ["one\ntwo\n"]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("b/2.py", "b/1.py", "a.md", "c.c", ".hidden", "b/.git"):
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a.md", "b/1.py", "b/2.py", "c.c"]
    assert texts(tmp_path, glob="*.py") == ["b/1.py", "b/2.py"]
    assert texts(tmp_path, glob="b/2*") == ["b/2.py"]


def test_links_that_lead_back_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("x")
    os.symlink(tmp_path, tmp_path / "a" / "back")
    os.symlink(tmp_path / "a", tmp_path / "again")
    os.symlink(tmp_path / "nothing", tmp_path / "dangling")
    os.mkfifo(tmp_path / "pipe")
    assert texts(tmp_path) == ["x"]


@pytest.mark.parametrize("suffix", [".jsonl", ".ndjson", ".jsonl.gz"])
def test_a_json_line_is_a_document(tmp_path: Path, suffix: str) -> None:
    lines = [json.dumps({"id": i, "body": body}) for i, body in enumerate(["a", "", "é\n"])]
    lines += ["", '{"body": null}', '{"body": "last"}']
    raw = "\n".join(lines).encode()
    (tmp_path / f"x{suffix}").write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    assert texts(tmp_path, text_key="body") == ["a", "é\n", "last"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('["text"]', ":2: a JSON list, not an object"),
        ('{"txt": "a", "id": 1}', ":2: no field 'text'; there are: txt, id. Choose one with --text-key"),
        ('{"text": 3}', ":2: the field 'text' is a int, not a string"),
        ('{"text": "a"', ":2: not JSON"),
        ("[" * 100_000, ":2: not JSON"),
        ('{"text": "\\ud83d"}', ":2: character 0 is half of a surrogate pair (\\ud83d)"),
    ],
)
def test_a_bad_json_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        texts(tmp_path / "x.jsonl")
    assert message in str(caught.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_bad_records_are_left_out_and_counted_on_request(tmp_path: Path, suffix: str) -> None:
    lines = ['{"text": "a"}', '{"text": "b', '{"txt": "c"}', "[]", '{"text": 3}', '{"text": "d"}']
    raw = "\n".join(lines).encode()
    (tmp_path / f"x{suffix}").write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    with pytest.raises(DataError, match="--skip-bad leaves such records out"):
        texts(tmp_path)
    meter = Meter()
    assert texts(tmp_path, skip_bad=True, meter=meter) == ["a", "d"]
    assert (meter.n_bad, meter.n_skipped) == (4, 0)
    assert f"x{suffix}:2: not JSON" in meter.skipped[0]
    (tmp_path / "y.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(DataError, match="is not UTF-8"):
        texts(tmp_path / "y.jsonl", skip_bad=True)


def test_half_a_surrogate_pair_is_replaced_or_left_out_on_request(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud83db"}\n{"text": "\\ud83d\\ude00"}\n')
    meter = Meter()
    assert texts(tmp_path, encoding_errors="replace", meter=meter) == ["a\ufffdb", "😀"]
    assert meter.n_replaced == 1
    assert texts(tmp_path, encoding_errors="skip") == ["😀"]


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string())])
def test_a_parquet_row_is_a_document(tmp_path: Path, kind: pa.DataType) -> None:
    rows = [f"row {i}" for i in range(150)] + [None, "", "last é"]
    table = pa.table({"n": list(range(len(rows))), "text": pa.array(rows, pa.string()).cast(kind)})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=50)
    meter = Meter()
    assert texts(tmp_path, meter=meter) == [row for row in rows if row]
    assert meter.read_bytes == (tmp_path / "x.parquet").stat().st_size


@pytest.mark.parametrize(
    ("text_key", "message"),
    [("body", "no column 'body'; there are: n, text"), ("n", "column 'n' holds int64, not text")],
)
def test_a_parquet_column_that_is_no_text_is_named(tmp_path: Path, text_key: str, message: str) -> None:
    pq.write_table(pa.table({"n": [1], "text": ["a"]}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=message):
        texts(tmp_path, text_key=text_key)


def test_a_dataset_is_streamed_by_the_datasets_library(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "validation.jsonl").write_text('{"text": "three"}\n')
    assert texts(f"hf:{tmp_path}") == ["one", "two"]
    assert texts(f"hf:{tmp_path}::validation") == ["three"]
    with pytest.raises(DataError, match=r"no (column|field) 'body'; there are: text"):
        texts(f"hf:{tmp_path}", text_key="body")
    with pytest.raises(DataError, match="datasets cannot open it"):
        texts(f"hf:{tmp_path}::absent")
    with pytest.raises(DataError, match=r"is not hf:NAME\[:CONFIG\]\[:SPLIT\]"):
        texts("hf:a:b:c:d")


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install datasets"):
        texts("hf:some/data")


def test_bytes_that_are_not_utf8_are_named_replaced_or_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"fine\n")
    # The bad byte stands in the second piece of its file.
    head = b"x" * 99 + b"\n"
    (tmp_path / "b.txt").write_bytes(head * 3000 + b"caf\xe9 au lait\n")
    with pytest.raises(DataError) as caught:
        texts(tmp_path)
    assert f"{tmp_path}/b.txt: byte 0xe9 at offset 300003 is not UTF-8" in str(caught.value)
    assert "--encoding-errors replace" in str(caught.value)
    (tmp_path / "c.txt").write_text("this U+FFFD was there: \ufffd")
    meter = Meter()
    assert texts(tmp_path, encoding_errors="replace", meter=meter)[1].endswith("caf\ufffd au lait\n")
    assert meter.n_replaced == 1
    (tmp_path / "c.txt").unlink()
    meter = Meter()
    assert texts(tmp_path, encoding_errors="skip", meter=meter) == ["fine\n"]
    assert meter.n_skipped == 1
    assert "b.txt: byte 0xe9" in meter.skipped[0]


def test_a_binary_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"PNG\0\1")
    with pytest.raises(DataError, match=r"a\.png: a NUL byte at offset 3: a binary file, or UTF-16; .*--glob"):
        texts(tmp_path)
    assert texts(tmp_path, encoding_errors="skip") == []


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet"])
def test_a_file_that_is_not_what_its_suffix_says_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"neither gzip nor parquet")
    with pytest.raises(DataError, match=f"{name}: cannot be read: "):
        texts(tmp_path)


def test_a_source_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the folder has no files"):
        texts(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"no files that match --glob '\*.py'"):
        texts(tmp_path, glob="*.py")
    with pytest.raises(DataError, match="there is no such file or folder; a dataset of the hub is hf:some/data"):
        texts("some/data")
    with pytest.raises(DataError, match="did you mean 'skip'"):
        texts(tmp_path, encoding_errors="skipp")


@given(
    st.lists(st.sampled_from(["a", "é", "漢", "😀", "\n", "\r\n"]), max_size=60).map("".join),
    st.integers(4, 9),
)
def test_pieces_are_bounded_and_join_to_the_text(text: str, piece_bytes: int) -> None:
    import tempfile

    with pytest.MonkeyPatch.context() as patch, tempfile.NamedTemporaryFile(suffix=".txt") as file:
        patch.setattr(readers, "PIECE_BYTES", piece_bytes)
        file.write(text.encode())
        file.flush()
        for document in documents(file.name):
            pieces = list(document.pieces)
            assert "".join(pieces) == text
            assert all(0 < len(piece.encode()) <= piece_bytes for piece in pieces)
        assert "".join(readers.cut(text)) == text
        assert all(len(piece) <= piece_bytes for piece in readers.cut(text))


def test_a_file_of_one_long_line_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.json"
    with open(path, "wb") as file:
        for _ in range(64):
            file.write("0123456789abcdé".encode() * 65_536)
    tracemalloc.start()
    n_bytes = sum(len(piece.encode()) for document in documents(path) for piece in document.pieces)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert n_bytes == path.stat().st_size > 60 * 2**20
    assert peak_bytes < 4 * 2**20


RECORDS = [{"text": "one", "id": 1}, {"text": "two\nlines", "id": 2}, {"text": "é", "id": 3}]
LINES = "".join(json.dumps(record) + "\n" for record in RECORDS).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", LINES),
        ("a.JSONL", LINES),
        ("a.txt", LINES),
        ("a", b"\xef\xbb\xbf\n" + LINES),
        ("a.json.gz", gzip.compress(LINES, mtime=0)),
        ("a.JSONL.GZ", gzip.compress(LINES, mtime=0)),
        ("a.json", gzip.compress(LINES, mtime=0)),
        ("a.jsonl.gz", LINES),
        ("a.ndjson.bz2", bz2.compress(LINES)),
        ("a.json.xz", lzma.compress(LINES)),
        ("a.json", json.dumps(RECORDS).encode()),
        ("a.json", json.dumps(RECORDS, indent=2).encode()),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0)),
    ],
)
def test_records_are_read_as_records_whatever_the_name(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    meter = Meter()
    assert texts(tmp_path / name, meter=meter) == ["one", "two\nlines", "é"]
    assert meter.read_bytes == len(content)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LINES.replace(b"}\n", b"}"), "more than one object on a line"),
        (LINES.replace(b"\n", b"\r"), "more than one object on a line"),
        (LINES.replace(b"{", b"\x1e{"), "more than one object on a line"),
        (LINES.replace(b"}\n{", b"},\n{"), "more than one object on a line"),
        (b"# a comment\n\n" + LINES, "one JSON object a line, from line 3; remove the lines before"),
        (json.dumps({"data": RECORDS}).encode(), "an object whose field 'data' has the records"),
        (json.dumps({"data": RECORDS}, indent=1).encode(), "an object whose field 'data' has the records"),
    ],
)
def test_records_in_another_form_are_refused_and_never_one_document_of_raw_json(tmp_path, content, said) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(DataError, match=said):
        texts(tmp_path / "a.json")


def test_an_array_is_read_in_bounded_memory(tmp_path: Path) -> None:
    items = [{"text": f"{i} " * 500} for i in range(4000)]
    (tmp_path / "a.json").write_text(json.dumps(items))
    tracemalloc.start()
    assert sum(1 for _ in documents(tmp_path / "a.json")) == 4000
    assert tracemalloc.get_traced_memory()[1] < 2**21 < (tmp_path / "a.json").stat().st_size
    tracemalloc.stop()


@pytest.mark.parametrize(
    "content",
    [
        '{\n  "name": "x"\n}\n',
        '{"name": "x"}',
        "[1, 2]",
        "{ x }\n{ y }\n",
        '{"a": 1}\nand more',
        "[section]\nkey = 1\n",
    ],
)
def test_what_has_no_records_is_text_of_one_document_and_counted(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert texts(tmp_path / "a.json", meter=(meter := Meter())) == [content]
    assert (meter.n_structured, meter.structured_first) == (1, str(tmp_path / "a.json"))


def test_a_table_is_text_of_one_document_and_counted(tmp_path: Path) -> None:
    for name in ("a.csv", "b.tsv", "c.txt"):
        (tmp_path / name).write_text("id,text\n1,hello\n")
    assert len(texts(tmp_path, meter=(meter := Meter()))) == 3
    assert (meter.n_structured, Path(meter.structured_first).name) == (2, "a.csv")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"body": "a"}\n{"body": "b"}\n',
            "a JSON object on each of its first lines, .* no field 'text'; there are: body",
        ),
        ('[{"body": "a"}]', "an array of objects, .* no field 'text'; there are: body. Choose one with --text-key"),
        ('{\n"data": [{"text": "a"}]}', "an object whose field 'data' has the records; write these as JSON lines"),
        ('{"text": "a"}\n{"text": "b"', ":2: not JSON|not JSON"),
        ('[{"text": "a"}, {"text": "b"', "item 2 of the JSON array has no end"),
    ],
)
def test_records_that_cannot_be_read_are_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.json")


def test_a_json_object_over_several_lines_may_be_a_record(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(RECORDS[1], indent=2))
    assert texts(tmp_path / "a.json") == ["two\nlines"]
