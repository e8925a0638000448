"""How large each package is: non-blank lines of Python in src, files above 450 lines, functions above 60.

python benchmarks/lines.py
"""

import ast
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "shardwright"
FILE_LINES, FUNCTION_LINES = 450, 60
REASONS = {
    "api/verbs.py:plan": "13 parameters and what they mean",
    "cli/plan_asked.py:read_request": "every option is read before the first error is raised",
    "data/prepare.py:prepare": "17 parameters and what they mean",
    "parallel/apply.py:apply": "the order in which parallelism is applied, in one place",
    "parallel/data.py:shard": "one FSDP group is made in one place, which reads most of the 9 parameters",
}
"""Why a function is longer."""


def main() -> None:
    """Print the table, then what is longer than the rules of CONTRIBUTING.md allow."""
    rooms: Counter[str] = Counter()
    long: list[str] = []
    for path in sorted(SOURCE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(SOURCE)
        rooms[name.parts[0]] += sum(bool(line.strip()) for line in text.splitlines())
        if (length := len(text.splitlines())) > FILE_LINES:
            long.append(f"{name}: {length} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                length = node.end_lineno - node.lineno + 1
                if length > FUNCTION_LINES:
                    reason = REASONS.get(f"{name}:{node.name}", "without a reason")
                    long.append(f"{name}:{node.name}: a function of {length} lines: {reason}")
    for room, lines in rooms.most_common():
        print(f"{lines:7,}  {room}")
    print(f"{rooms.total():7,}  non-blank lines of Python in all")
    print("\n".join(long) or f"no file above {FILE_LINES} lines, no function above {FUNCTION_LINES}")


if __name__ == "__main__":
    main()
