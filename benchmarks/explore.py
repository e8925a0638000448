"""Measure the time from a move of a slider to its answer, for Llama 3.1 405B on 16,384 H100.

    python benchmarks/explore.py

Batches differ, so that no cache holds the answer. The wall time includes waiting for other programs of the machine; the
CPU time does not.
"""

import statistics
import time

from shardwright.explore.page import Explorer

START = "model=llama-3.1-405b&chip=h100&count=16384&tp=8&pp=16&recompute=selective"
MOVES = (
    *("tp&to=4", "tp&to=16", "pp&to=8", "micro_batch&to=2", "zero&to=1", "recompute&to=full", "dp_replicate&to=2"),
    *("pp_schedule&to=zb-h1", "recompute&to=none", "cp&to=2"),
)
TIMES = 100


def main() -> None:
    explorer = Explorer()
    explorer.home("")  # imports and templates
    wall, cpu, size = [], [], 0
    for number in range(TIMES):
        batch = 2048 * (1 + number // len(MOVES))
        began, worked = time.perf_counter(), time.process_time()
        html = explorer.answers(f"{START}&global_batch={batch}&move={MOVES[number % len(MOVES)]}")
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - worked)
        size = max(size, len(html.encode()))
    for name, times in (("wall", wall), ("CPU", cpu)):
        print(f"{name}: median {statistics.median(times) * 1e3:.0f} ms, largest {max(times) * 1e3:.0f} ms of {TIMES}")
    print(f"largest answer: {size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
