"""Proves that a verb ends with one sentence and the exit code of its kind if its output cannot be written, or if it has
too few file descriptors."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from shardwright.cli.common import PIPE_CLOSED, print_text, verb
from shardwright.system.errors import FullError, InputError, system_limit, too_many_files
from shardwright.system.files import new_folder
from shardwright.system.forks import FEWEST_FILES

VERBS = [
    ["--version"],
    ["--help"],
    ["schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2"],
    ["schedule", "--schedule", "1f1b", "--pp", "2", "--microbatches", "2", "--json"],
    ["train", "--keys"],
]


def run(arguments: list[str], before: Callable[[], None] | None = None, **files: Any) -> subprocess.CompletedProcess:
    files = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | files
    return subprocess.run([sys.executable, "-m", "shardwright", *arguments], text=True, preexec_fn=before, **files)


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_stdout_on_a_full_disk_is_one_sentence_and_exit_code_3(arguments: list[str]):
    with open("/dev/full", "w") as full:
        ended = run(arguments, stdout=full)
    assert ended.returncode == FullError.exit_code
    assert ended.stderr.startswith("error: no room to write (No space left on device); free some")
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("arguments", VERBS[2:], ids=" ".join)
def test_a_verb_whose_reader_has_ended_ends_quietly(arguments: list[str]):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = run(arguments, stdout=writing)
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (PIPE_CLOSED, "")


def test_an_error_that_cannot_be_printed_keeps_its_exit_code():
    with open("/dev/full", "w") as full:
        assert run(["report", "no/such/folder"], stderr=full).returncode == 2


def test_the_shortcut_of_an_emoji_in_a_text_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]):
    print_text("a :smile: b")
    assert capsys.readouterr().out == "a :smile: b\n"


@pytest.mark.parametrize("most", [8, 16, FEWEST_FILES - 1])
def test_too_few_file_descriptors_are_one_sentence_with_the_limit(most: int):
    ended = run(
        ["verify", "examples/debug.toml"],
        lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (most, most)),
        stdin=subprocess.DEVNULL,
    )
    assert ended.returncode == FullError.exit_code
    assert ended.stderr.splitlines()[-1].endswith(f"the limit is {most}); raise the limit with `ulimit -n 65536`")
    assert "Traceback" not in ended.stderr


def test_too_few_file_descriptors_end_a_verb_that_writes_a_folder_and_leave_nothing_of_it(tmp_path: Path):
    (tmp_path / "weights").write_text("")

    @verb
    def write() -> None:
        with new_folder(tmp_path / "out") as fresh:
            (fresh / "part").write_text("half of it")
            files = []
            try:
                while True:
                    files.append((tmp_path / "weights").open())
            except OSError as error:
                raise InputError(f"weights cannot be read: {error}") from None

    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        with pytest.raises(typer.Exit) as ended:
            write()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (ended.value.exit_code, os.listdir(tmp_path)) == (FullError.exit_code, ["weights"])


def raised_after(error: Exception, how: str) -> InputError:
    """An error that is raised from `error`, while it is handled, or `from None` while it is handled."""
    try:
        try:
            raise error
        except OSError as handled:
            if how == "cause":
                raise InputError("the tokenizer cannot be read") from handled
            if how == "context":
                raise InputError("the tokenizer cannot be read")  # noqa: B904
            raise InputError("the tokenizer cannot be read") from None
    except InputError as raised:
        return raised


def test_an_error_is_of_too_few_file_descriptors_if_its_traceback_would_show_them():
    few = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    for how in ("cause", "context"):
        said = too_many_files(raised_after(few, how))
        assert said is not None
        assert "raise the limit with `ulimit -n 65536`" in said
        assert said.endswith("; it led to: the tokenizer cannot be read")
    assert too_many_files(raised_after(few, "suppressed")) is None
    assert too_many_files(raised_after(OSError(errno.ENOENT, "no such file"), "cause")) is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMFILE, errno.ENFILE])
def test_a_limit_that_a_library_quotes_in_an_error_of_its_own_is_recognised(number: int):
    said = os.strerror(number)
    python = system_limit(OSError(number, said))
    assert python is not None
    assert system_limit(RuntimeError(f"[enforce fail at socket.cc:24] rv != -1. socket: {said}")) == python
    assert system_limit(RuntimeError("another error")) is None
