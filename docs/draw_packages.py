"""Draw docs/packages.svg: the packages of src/shardwright and their imports, from the code.

    python docs/draw_packages.py

A package is above all that it imports. An import that a path of other imports implies is left out.
"""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import TYPE_CHECKING

import grimp
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from shardwright.view.style import COLOURS, rendered

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PICTURE = FilePath(__file__).with_name("packages.svg")
ROOT = "shardwright"
WIDTH_IN, ROW_IN = 9.0, 0.5
CURVE = [Path.MOVETO, Path.CURVE3, Path.CURVE3]
BEND = 0.07
"""How far a line bends for each row that it passes, of the width of the picture."""
Imports = Mapping[str, set[str]]
"""The packages that each package imports."""


def package_imports() -> dict[str, set[str]]:
    """Return the imports between the packages and modules at the root, except `__main__`."""
    graph = grimp.build_graph(ROOT)
    result: dict[str, set[str]] = defaultdict(set)
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            importer, other = (name.removeprefix(ROOT).lstrip(".").split(".")[0] for name in (module, imported))
            if importer and other and importer not in (other, "__main__"):
                result[importer].add(other)
                result[other] |= set()
    return result


def shown(imports: Imports) -> dict[str, set[str]]:
    """Return the imports that no path of other imports implies. The imports have no circle."""
    reached: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in reached:
            reached[name] = set().union(*({other} | reach(other) for other in imports[name]))
        return reached[name]

    return {
        name: {one for one in them if not any(one in reach(other) for other in them)} for name, them in imports.items()
    }


def rows(imports: Imports) -> list[list[str]]:
    """Return the packages by the length of their longest chain of imports, the shortest first, each row in the order of
    the mean place of the packages that each imports."""
    level: dict[str, int] = {}

    def level_of(name: str) -> int:
        if name not in level:
            level[name] = 1 + max(map(level_of, imports[name]), default=-1)
        return level[name]

    result: list[list[str]] = [[] for _ in range(1 + max(map(level_of, imports)))]
    for name in sorted(imports):
        result[level[name]].append(name)
    place: dict[str, float] = {}
    for row in result:
        row.sort(key=lambda name: sum(place[other] for other in imports[name]) / max(1, len(imports[name])))
        place |= {name: (number + 0.5) / len(row) for number, name in enumerate(row)}
    return result


def picture() -> bytes:
    """Return the picture as the bytes of an SVG file."""
    imports = shown(package_imports())
    by_level = rows(imports)
    places = {
        name: ((number + 0.5) / len(row), level)
        for level, row in enumerate(by_level)
        for number, name in enumerate(row)
    }

    def compose(figure: "Figure") -> None:
        ax = figure.add_axes((0, 0, 1, 1))
        ax.set_axis_off()
        ax.set_xlim(0, 1)
        ax.set_ylim(-0.6, len(by_level) - 0.4)
        for name in sorted(imports):
            for other in sorted(imports[name]):
                (x, y), (x_other, y_other) = places[name], places[other]
                # A line over several rows bends outwards, around the packages between its ends.
                middle = (x + x_other) / 2
                bend = BEND * (y - y_other - 1) * (1 if middle > 0.5 else -1)
                line = Path([(x, y - 0.2), (middle + bend, (y + y_other) / 2), (x_other, y_other + 0.2)], CURVE)
                ax.add_patch(PathPatch(line, facecolor="none", edgecolor=COLOURS["quiet"], lw=0.8, zorder=1))
        box = {"boxstyle": "round,pad=0.35", "facecolor": COLOURS["paper"], "edgecolor": COLOURS["curve"]}
        for name, (x, y) in places.items():
            ax.text(x, y, name, ha="center", va="center", fontsize=9.5, bbox=box, zorder=2)

    return rendered((WIDTH_IN, ROW_IN * len(by_level)), compose, "svg")


if __name__ == "__main__":
    PICTURE.write_bytes(picture())
    print(f"written to {PICTURE}")
