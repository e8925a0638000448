"""Long measurements in parts: what is done is kept in a file, and the same command goes on after it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Log:
    """Records of parts that are done, a JSON object a line, and until when to go on."""

    def __init__(self, path: Path | None, seconds: float) -> None:
        """`path`: None to keep them in memory alone; `seconds`: after which no further part is begun, 0 for never."""
        self.path, self.until_s = path, time.monotonic() + (seconds or float("inf"))
        there = path is not None and path.exists()
        self.records: list[Record] = [json.loads(line) for line in path.read_text().splitlines()] if there else []

    def select(self, kind: str) -> list[Record]:
        """The records of a kind, in their order."""
        return [record for record in self.records if record["kind"] == kind]

    def go_on(self, kind: str, is_done: Callable[[list[Record]], bool], one: Callable[[int], Record]) -> bool:
        """Do parts of a kind, each by its number, until `is_done` of their records says so. Whether it does."""
        while not is_done(self.select(kind)):
            number = len(self.select(kind))
            if time.monotonic() > self.until_s:
                print(f"{kind}: {number} done; give the command again", flush=True)
                return False
            record = {"kind": kind, **one(number)}
            self.records.append(record)
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(record) + "\n")
        return True
