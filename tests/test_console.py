"""Proves that no text from a file is obeyed by a terminal, and that no secret of a URL is printed or written."""

import io
from pathlib import Path

import pytest

from shardwright.config import load
from shardwright.runs.records import EventRecord, append_event
from shardwright.system.console import PlainConsole, visible
from shardwright.system.errors import InputError, WorkerError, without_secrets
from shardwright.system.remote import file_system
from shardwright.training.kept import kept_run_file

URLS = (
    "s3://KEY:SECRET@bucket/run",
    "s3://KEY:SEC/RET+@bucket/run",
    "s3://KEY:SEC@RET@bucket/run",
    "https://SECRET@host/a",
    "https://host/a?X-Amz-Signature=SECRET&b=1",
    "https://host/a?b=1&access_token=SECRET",
    "az://c/a?sv=1&sig=SECRET%3D",
)


@pytest.mark.parametrize("url", URLS)
def test_the_secrets_of_a_url_are_masked_in_errors_events_and_print(url, tmp_path):
    append_event(tmp_path, EventRecord("save", 1, f"copied to {url}, and on"))
    said = [
        without_secrets(f"{url!r} cannot be reached"),
        str(InputError(f"{url}: no")),
        InputError(url).problems[0],
        str(WorkerError(url)),
        visible(url),
        without_secrets(f"{Path(url)}: there is no such folder"),
        (tmp_path / "events.jsonl").read_text(),
    ]
    for text in said:
        assert "***" in text
        assert not any(part in text for part in ("SECRET", "KEY", "RET"))
    assert said[6].endswith("}\n")
    for plain in ("s3://bucket/run", "https://host:80/a?step=1", "hf:a/b@c", "a@b"):
        assert without_secrets(plain) == plain
    with pytest.raises(ValueError, match="give the URL again"):
        file_system(without_secrets(url))


def test_the_run_file_that_a_run_keeps_has_no_secret(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'out = "out"\nsteps = 1\ndata = { path = "d" }\nbatch = { seq_len = 16, global_batch = 8 }\n'
        'checkpoint = { durable = "s3://KEY:SECRET@bucket/run" }\n'
    )
    kept = kept_run_file(load(path))
    assert 'durable = "s3://***@bucket/run"' in kept
    path.write_text(kept)
    assert load(path).checkpoint.durable == "s3://***@bucket/run"


def test_control_characters_and_what_has_no_width_or_turns_the_direction_are_shown():
    out = io.StringIO()
    text = "\x1b[31m\x07a\u202eb\u2066c\x9b\ud800\td\ne \u05d0"
    PlainConsole(file=out, highlight=False, width=200).print(text, markup=False)
    shown = "\\x1b[31m\\x07a\\u202eb\\u2066c\\x9b\\ud800\td\ne \u05d0"
    assert visible(text) == shown
    assert out.getvalue() == visible(out.getvalue()), "rich drops some of them itself"
    assert "\\u202eb\\u2066c\\x9b\\ud800" in out.getvalue()
    unseen = "\u2028\u2029\u061c\u200e\u200f\u200b\u2060\ufeff\U000e0041"
    assert visible(unseen) == unseen.encode("ascii", "backslashreplace").decode()
    assert visible("\u200c \u200d \N{MAN}\u200d\N{WOMAN}") == "\u200c \u200d \N{MAN}\u200d\N{WOMAN}", "joiners stay"


@pytest.mark.parametrize("url", [url for url in URLS if "@" in url])
def test_a_secret_is_masked_where_a_library_repeats_it_without_its_url(url):
    after = url.partition("://")[2]
    user = after.rpartition("@")[0]
    both = user if ":" in user else ""  # a user alone may be a login name
    text = without_secrets(f"{url}: Invalid bucket name {after!r}, got {both!r} and {user.partition(':')[2]!r}")
    assert "SECRET" not in text
    assert "RET" not in text
    assert without_secrets("ssh://git@host: no github.com") == "ssh://***@host: no github.com"


def test_a_login_name_is_masked_in_its_url_alone_and_a_token_also_where_it_is_repeated():
    assert without_secrets("ssh://hadoop@n/x: cannot open /opt/hadoop") == "ssh://***@n/x: cannot open /opt/hadoop"
    token = "ghp_" + "a1" * 18
    assert token not in without_secrets(f"https://{token}@host/a: bad token {token!r}")
