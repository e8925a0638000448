"""One line of an explanation."""

from dataclasses import dataclass

from shardwright.units import MiB, format_bytes


@dataclass(frozen=True)
class Line:
    """`what = formula = numbers = value unit (source)`.

    `numbers`: the formula with numbers in the place of its symbols, arithmetic that gives `value`; empty where the
    value comes from a simulation or from a formula of more steps, which `source` then names.
    """

    section: str
    what: str
    formula: str
    numbers: str
    value: float
    unit: str
    source: str = ""

    def __str__(self) -> str:
        value = f"{self.value:,.6g} {self.unit}".strip()
        if self.unit == "B" and self.value >= MiB:
            value += f", {format_bytes(self.value)}"
        steps = [self.what, self.formula, self.numbers, value]
        source = f" ({self.source})" if self.source else ""
        return " = ".join(step for step in steps if step) + source


def num(value: float) -> str:
    """A number as it is put into a formula: whole if it is, else with nine digits."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{value:.9g}"
