"""The long form of tests/cli/test_mutated_input.py: thousands of mistyped numbers and damaged files, over all verbs.

    python benchmarks/mutated_input.py --cases 3000 --log mutated.jsonl

A case fails where a verb ends with a traceback, takes more than 20 s of CPU, or leaves half of its output. With --log
what is done is kept in a file, and the same command goes on after it; --seconds ends a part.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
from pathlib import Path

from parts import Log, Record

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cli.test_mutated_input import READERS, answers, damaged_files, numbers, write_files

AT_ONCE = 20
"""Cases of a part."""


def main() -> int:
    """Run what is asked for; print each case that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=3000)
    parser.add_argument("--log", type=Path, help="what is done; the command goes on after it")
    parser.add_argument("--seconds", type=float, default=0.0, help="after which no further part is begun; 0: all are")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    # All numbers, in an order drawn by chance, and a damaged file after each.
    mistyped = numbers()
    random.Random(0).shuffle(mistyped)
    log = Log(options.log and options.log.absolute(), options.seconds)

    def one(number: int) -> Record:
        failed = []
        for case in range(number * AT_ONCE, (number + 1) * AT_ONCE):
            with tempfile.TemporaryDirectory() as name:
                write_files(Path(name))
                os.chdir(name)
                try:
                    if case % 2 or case // 2 >= len(mistyped):
                        damaged_files(Path(name), [case // 2])
                    else:
                        answers(Path(name), mistyped[case // 2])
                except AssertionError as error:
                    failed.append(f"case {case} ({READERS[case // 2 % len(READERS)] if case % 2 else ''}): {error}")
                    print(failed[-1], flush=True)
                finally:
                    os.chdir("/")
        return {"failed": failed}

    if not log.go_on("cases", lambda found: AT_ONCE * len(found) >= options.cases, one):
        return 0
    found = log.select("cases")
    n_failed = sum(len(each["failed"]) for each in found)
    print(f"{n_failed} of {AT_ONCE * len(found)} cases failed; there are {len(mistyped)} mistyped numbers", flush=True)
    return int(n_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
