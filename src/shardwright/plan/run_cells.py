"""The cells of a row of a table that people filled in: read as numbers within reason, or refused in words."""

from collections.abc import Mapping
from math import isfinite

MOST = {"layers": 1000, "pp": 128, "vpp": 1000, "layers_per_vpp": 1000, "experts": 10_000, "topk": 10_000, "etp": 1000}
"""Numbers beyond these are slips of the pen, and a pipeline of so many stages would take minutes to run on paper."""
MOST |= dict.fromkeys(("hidden", "ffn", "moe_ffn"), 1_000_000) | dict.fromkeys(("heads", "kv_heads"), 100_000)
MOST_OF_ANY = 10_000_000
OFF = ("", "0", "0.0", "false", "no", "none", "off")


class Unusable(Exception):
    """Why a row cannot be predicted."""


class Cells:
    """A row's cells by column, where a column that is missing is empty; and in `assumed` what was taken instead."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        self.cells = cells
        self.assumed: list[str] = []

    def text(self, column: str) -> str:
        """What stands there."""
        return self.cells.get(column, "")

    def flag(self, column: str) -> bool:
        """Whether something is said there, other than no."""
        return self.text(column).lower() not in OFF

    def measured(self, column: str) -> float | None:
        """A positive figure, or None for an empty cell. Within bounds that keep its error finite."""
        value = self._figure(column)
        if value is not None and not 1e-6 <= value <= 1e9:
            why = "is not positive" if value <= 0 else "is no plausible measurement; valid: 1e-6 to 1e9"
            raise Unusable(f"{column}={quoted(self.text(column))} {why}")
        return value

    def number(self, column: str, default: int | None = None, assumed: str = "", *, least: int = 1) -> int:
        """A whole number; with a default, for an empty cell that, and `assumed` goes with the row."""
        value = self._figure(column)
        if value is None:
            if default is None:
                raise Unusable(f"{column} is empty")
            self.assume(assumed)
            return default
        said, most = f"{column}={quoted(self.text(column))}", MOST.get(column, MOST_OF_ANY)
        if value < least:
            raise Unusable(f"{said} is {'not positive' if least else 'negative'}")
        if value > most:
            raise Unusable(f"{said} is more than the {most:,} that are believed")
        if value != int(value):
            raise Unusable(f"{said} is not a whole number")
        return int(value)

    def degrees(self, *axes: str) -> list[int]:
        """Numbers of ranks, of which those that are not said are 1."""
        if unsaid := [axis for axis in axes if not self.text(axis)]:
            self.assume(f"{', '.join(unsaid)}=1")
        return [self.number(axis, 1) for axis in axes]

    def assume(self, text: str) -> None:
        """Words about what the row leaves open, once; empty ones are none."""
        if text and text not in self.assumed:
            self.assumed.append(text)

    def _figure(self, column: str) -> float | None:
        text = self.text(column)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise Unusable(f"{column}={quoted(text)!r} is not a number") from None
        if not isfinite(value):
            raise Unusable(f"{column}={quoted(text)} is not finite")
        return value


def quoted(text: str) -> str:
    """A cell as a reason repeats it: not at any length."""
    return text if len(text) <= 40 else f"{text[:36]}..."
