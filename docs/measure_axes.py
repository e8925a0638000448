"""Measure what a layer sends and keeps under tensor, sequence and context parallelism, and print it as tables.

    python -m docs.measure_axes

To be run in the root of the repository. The measuring is that of tests/parallel/test_tensor.py and
tests/parallel/test_context_traffic.py: collectives and messages are counted where PyTorch is called, and so are the
activations that autograd keeps. What one layer has is the difference between models of three and of two.
"""

import torch
from tests.distributed import run_ranks
from tests.parallel import attention, test_context_traffic
from tests.parallel import test_tensor as tensor

from shardwright.layout.layout import Layout
from shardwright.split.sequence import attention_pairs, spans, step_pairs

WORDS = {"allreduce": "all-reduce", "allgather_base": "all-gather", tensor.REDUCE_SCATTER: "reduce-scatter"}
SHARDINGS = {
    "tp 2": Layout(tp=2, sequence_parallel=False),
    "tp 4": Layout(tp=4, sequence_parallel=False),
    "tp 2, sequence parallel": Layout(tp=2, sequence_parallel=True),
    "tp 4, sequence parallel": Layout(tp=4, sequence_parallel=True),
    "tp 2, recompute": Layout(tp=2, recompute="full", sequence_parallel=False),
    "tp 2, sequence parallel, recompute": Layout(tp=2, sequence_parallel=True, recompute="full"),
}


def main() -> None:
    a_layers_collectives()
    a_layers_activations()
    a_layers_messages()
    where_tokens_are()
    balance()


def a_layers_collectives() -> None:
    print("Collectives of a layer, in units of X = B T D elements\n")
    print("| layout | forward | backward |")
    print("| --- | --- | --- |")
    for name, layout in SHARDINGS.items():
        two, three = (run_ranks(tensor.traffic_of_the_passes, layout.world_size, layout, n)[0] for n in (2, 3))
        passes = [tensor.of_one_layer(few, many) for few, many in zip(two, three, strict=True)]
        print(f"| {name} | {' | '.join(_calls(sent) for sent in passes)} |")
    print("\nThe same of a whole model of 2 layers, without its loss\n")
    print("| layout | forward | backward |")
    print("| --- | --- | --- |")
    for name in ("tp 2", "tp 2, sequence parallel"):
        passes = run_ranks(tensor.traffic_of_the_passes, 2, SHARDINGS[name], 2)[0]
        print(f"| {name} | {' | '.join(_calls(sent) for sent in passes)} |")
    print()


def _calls(sent: dict[str, tuple[int, int]]) -> str:
    return ", ".join(
        f"{sent[name][0]} {word} of {sent[name][1] / tensor.X:g}" for name, word in WORDS.items() if name in sent
    )


def a_layers_activations() -> None:
    t = tensor.WIDE
    print(
        f"Elements of activations that a layer keeps for each token; D {t.d_model}, F {t.d_ffn}, {t.n_heads} heads of "
        f"{t.head_dim}, {t.n_kv_heads} kv heads\n"
    )
    print("| tp | kept | by the formula | kept with sequence parallelism | by the formula |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    for tp in (1, 2, 4):
        cells = []
        for sequence_parallel in (False, True):
            layout = Layout(tp=tp, sequence_parallel=sequence_parallel)
            cells += [measured_elements(layout), formula_elements(layout)]
        print(f"| {tp} | {' | '.join(f'{cell:g}' for cell in cells)} |")
    print()


def measured_elements(layout: Layout) -> float:
    """What a layer of the tests' model keeps, in elements a token, as counted."""
    two, three = (run_ranks(tensor.saved_bytes, layout.tp, layout, n)[0] for n in (2, 3))
    return (three - two) / (tensor.B * tensor.T * tensor.ELEMENT)


def formula_elements(layout: Layout) -> float:
    """The same by the formula of the test."""
    return tensor.kept_bytes_of_one_layer(layout) / (tensor.B * tensor.T * tensor.ELEMENT)


def a_layers_messages() -> None:
    cases = [*attention.ONE_OF_EACH, attention.Case("zigzag", 4, 1, kv_heads=4)]
    sent = run_ranks(test_context_traffic.sent_in_cases, 4, cases, torch.bfloat16)[0]
    print("What attention of one layer sends from a rank, in units of the bytes of its q; 4 ranks, 4 heads, bf16\n")
    print("| method | kv heads | forward | backward |")
    print("| --- | ---: | --- | --- |")
    for case, passes in zip(cases, sent, strict=True):
        q_bytes = attention.BATCH * attention.SEQ_LEN // case.ranks * case.heads * attention.WIDTH * 2
        print(f"| {case.method} | {case.kv_heads} | {' | '.join(_messages(log, q_bytes) for log in passes)} |")
    print()


def _messages(log: list[test_context_traffic.Sent], unit: int) -> str:
    sizes: dict[tuple[str, int], int] = {}
    for sent in log:
        sizes[sent] = sizes.get(sent, 0) + 1
    words = {"message": "message", "all_gather": "all-gather", "all_to_all": "all-to-all"}
    parts = [
        f"{count} {words[what]}{'s' if count > 1 else ''} of {n_bytes / unit:g}"
        for (what, n_bytes), count in sizes.items()
    ]
    return f"{', '.join(parts)}; {sum(sent.n_bytes for sent in log) / unit:g} in all"


def where_tokens_are() -> None:
    print("Positions that ranks 0 to 3 hold of 16 tokens\n")
    print("| method | rank 0 | rank 1 | rank 2 | rank 3 |")
    print("| --- | --- | --- | --- | --- |")
    for name, ring, ulysses in (
        ("ring", 4, 1),
        ("zigzag", 4, 1),
        ("allgather", 4, 1),
        ("ulysses", 1, 4),
        ("usp", 2, 2),
    ):
        held = [spans(name, 16, ring, ulysses, *divmod(rank, ulysses)) for rank in range(4)]
        print(f"| {name} | {' | '.join(', '.join(_span(span) for span in rank) for rank in held)} |")
    print()


def _span(span: range) -> str:
    return f"{span[0]}-{span[-1]}"


def balance() -> None:
    print("Attention of a causal sequence over n ranks; 1 is an equal share of all pairs\n")
    print("| n | method | least of a rank | most of a rank | sum over steps of the slowest rank |")
    print("| ---: | --- | ---: | ---: | ---: |")
    for ring in (2, 4, 8):
        seq_len = 2048 * ring
        share = seq_len * (seq_len + 1) / 2 / ring
        for method in ("ring", "zigzag", "striped"):
            pairs = attention_pairs(method, seq_len, ring)
            time = sum(max(step) for step in step_pairs(method, seq_len, ring))
            print(f"| {ring} | {method} | {min(pairs) / share:.3f} | {max(pairs) / share:.3f} | {time / share:.3f} |")


if __name__ == "__main__":
    main()
