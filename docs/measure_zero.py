"""Measure what each ZeRO stage holds and sends on 4 ranks of this machine, and print it as a table.

    python -m docs.measure_zero

To be run in the root of the repository. The measuring is that of tests/training/test_memory_and_traffic.py: every
tensor alive on a rank is counted, and every collective of one step.
"""

from tests.distributed import run_ranks
from tests.training.test_memory_and_traffic import ACCUMULATION, LAYOUTS, P, held_bytes, traffic_of_a_step

NAMES = {"allgather_base": "all-gather", "reduce_scatter_base": "reduce-scatter", "allreduce": "all-reduce"}


def main() -> None:
    print(f"4 ranks, P = {P / 1024:.1f} KiB of parameters, A = {ACCUMULATION} micro-batches; all in units of P\n")
    print("| layout | optimizer states | between steps | between micro-batches | sent in a step |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name, layout in LAYOUTS.items():
        held = run_ranks(held_bytes, 4, layout)[0]
        calls, sent = run_ranks(traffic_of_a_step, 4, layout)[0]
        traffic = [f"{calls[kind]} {word} of {sent[kind] / P:.2f}" for kind, word in NAMES.items() if kind in calls]
        columns = (f"{held[kind] / P:.2f}" for kind in ("optimizer", "between steps", "between microbatches"))
        print(f"| {name} | {' | '.join(columns)} | {', '.join(traffic)} |")


if __name__ == "__main__":
    main()
