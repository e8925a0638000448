"""Which system a configuration belongs to, and its settings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwright.readers.arguments import is_option, settings_of
from shardwright.readers.megatron import MEGATRON_LM
from shardwright.readers.shell import Shell
from shardwright.readers.shell_values import Word
from shardwright.readers.table import READ, Setting, System, normalised
from shardwright.system.errors import InputError
from shardwright.system.files import read_text, reason

SUPPORTED = "a shell script or a file of arguments of Megatron-LM (*.sh, *.txt, *.args)"
SHELL = (".sh", ".bash", ".txt", ".args", ".slurm", ".sbatch", "")
FEWEST_OPTIONS = 3
"""Fewest options of a system's table in a command that starts it."""


@dataclass(frozen=True)
class ConfigurationSource:
    """A file with its settings. `skipped`: parts of a script that were not evaluated."""

    path: str
    settings: tuple[Setting, ...]
    skipped: tuple[str, ...] = ()


def sources_of(paths: Sequence[Path]) -> tuple[System, list[ConfigurationSource]]:
    """Return the system of some files and their settings. Raises InputError for files that are not supported."""
    if len(paths) > 1:
        raise InputError(f"--from {paths[1]}: a configuration of {MEGATRON_LM.name} is one file")
    path = paths[0]
    if path.suffix.lower() not in SHELL:
        raise InputError(f"--from {path}: files named *{path.suffix} are not read; supported: {SUPPORTED}")
    return MEGATRON_LM, [_shell_source(path, MEGATRON_LM)]


def _shell_source(path: Path, system: System) -> ConfigurationSource:
    """Return the settings of the command in a script that starts the training."""
    shell = Shell()
    if (words := _argument_words(path)) is not None:
        shell.commands.append(words)
    else:
        shell.run(path)
    ranked = sorted(shell.commands, key=lambda words: _known_options(words, system))
    if not ranked or _known_options(ranked[-1], system) < FEWEST_OPTIONS:
        hint = f"; {shell.notes[0]}" if shell.notes else ""
        raise InputError(f"{path}: no command with options of {system.name} is found{hint}; supported: {SUPPORTED}")
    settings = settings_of(_split(ranked[-1]), system.options)
    stated = {normalised(setting.option) for setting in settings}
    if "nproc_per_node" not in stated and "world_size" not in stated:
        word = shell.text_of("WORLD_SIZE")
        if word is not None and word.unknown is None:
            settings.append(Setting("WORLD_SIZE", word.text, word.where))
    return ConfigurationSource(str(path), tuple(settings), tuple(shell.notes))


def _argument_words(path: Path) -> list[Word] | None:
    """Return the words of a file that has only arguments, or None if it is a script."""
    try:
        lines = read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {reason(error)}") from None
    stated = [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not stated or not stated[0].lstrip().startswith("--"):
        return None
    return [
        Word(word.strip("'\""), f"{path}:{number}")
        for number, line in enumerate(lines, 1)
        for word in line.partition(" #")[0].removesuffix("\\").split()
        if not line.lstrip().startswith("#")
    ]


def _split(words: Sequence[Word]) -> list[Word]:
    """Return words of a command; a word with options in it, as of `bash -c "..."`, becomes several."""
    result = []
    for word in words:
        parts = word.text.split() if " --" in f" {word.text}" and " " in word.text.strip() else [word.text]
        result += [Word(part, word.where, word.unknown) for part in parts]
    return result


def _known_options(words: Sequence[Word], system: System) -> int:
    names = [normalised(word.text.partition("=")[0]) for word in _split(words) if is_option(word)]
    return sum(name in system.options and system.options[name].fate == READ for name in names)
