"""Figures of ranks: their shards, the messages between them, a ring step by step, a pipeline, dispatch, nodes.

Each function draws the layout of a state. At most MOST_RANKS ranks are drawn, and the text gives the number of all.
"""

from collections.abc import Sequence

from shardwright.explore.learn.drawing import MOST_RANKS, WIDTH, Figure, colour, some
from shardwright.explore.pictures import PagePicture, timeline_svg
from shardwright.explore.state import PageState
from shardwright.explore.traffic import sent_messages
from shardwright.layout.box import DENSE_AXES
from shardwright.schedule import draw
from shardwright.schedule.build import build, problems
from shardwright.schedule.simulate import Times, simulate
from shardwright.split.sequence import spans, step_pairs
from shardwright.system.units import format_bytes

LEFT = 84
"""Width of the names of rows."""
MOST_CHUNKS = 4


def _buffers(state: PageState) -> dict[str, str]:
    """Return the bytes of the buffer of one call of each message, as text."""
    return {message.what: format_bytes(message.n_bytes) for message in sent_messages(state.priced)}


def shards(state: PageState) -> Figure:
    """Draw which rank has which shard of parameters, gradients and optimizer states, by the ZeRO stage."""
    layout = state.layout
    group = layout.group_of(0, *(("dp_shard", "cp") if layout.zero else ("dp_replicate",)))
    ranks = group[:MOST_RANKS]
    figure = Figure(
        "shards",
        f"Shards of the ranks with zero={layout.zero}",
        f"{some(len(ranks), len(group))} share their state. "
        + " ".join(
            f"Each rank has {'one shard' if layout.zero >= stage else 'all'} of the {name}."
            for name, stage in (("parameters", 3), ("gradients", 2), ("optimizer states", 1))
        ),
        "A strip is a shard, with the colour of the rank that updates it.",
    )
    pitch = (WIDTH - LEFT) / len(ranks)
    for at, rank in enumerate(ranks):
        figure.words(LEFT + (at + 0.5) * pitch, 12, str(rank), "middle")
    figure.words(4, 12, "rank")
    strip = (pitch - 6) / len(ranks)
    for row, (name, stage) in enumerate((("parameters", 3), ("gradients", 2), ("optimizer", 1))):
        y = 22 + row * 44
        figure.words(4, y + 19, name)
        for at in range(len(ranks)):
            x = LEFT + at * pitch + 3
            figure.box(x, y, pitch - 6, 30)
            for shard in range(len(ranks)):
                if shard == at or layout.zero < stage:
                    figure.box(x + shard * strip, y, strip, 30, colour(shard))
    reduced, gathered = ("reduce-scatter", "all-gather") if layout.zero else ("all-reduce", "")
    _round(figure, ranks, pitch, 81, 0.0, 0.4)
    if gathered:
        _round(figure, ranks, pitch, 37, 0.55, 0.95)
    figure.caption += f" Dots: {reduced} of gradients" + (f", then {gathered} of parameters." if gathered else ".")
    return figure


def _round(figure: Figure, ranks: Sequence[int], pitch: float, y: float, begin: float, end: float) -> None:
    """Move a dot from each rank to the next one, and from the last rank to the first."""
    for at in range(len(ranks)) if len(ranks) > 1 else ():
        x_from, x_to = LEFT + (at + 0.5) * pitch, LEFT + ((at + 1) % len(ranks) + 0.5) * pitch
        figure.dot([(x_from, y), (x_to, y)], begin, end, colour(at))


def matmuls(state: PageState) -> Figure:
    """Draw a pair of column-parallel and row-parallel matmuls, and their collectives."""
    layout, model = state.layout, state.job.model
    t = min(layout.tp, MOST_RANKS)
    sent = _buffers(state)
    by_token = layout.token_shards
    before = f"all-gather, {sent['input of attention, all-gather']}" if by_token else "no message"
    kind = "reduce-scatter" if by_token else "all-reduce"
    after = f"{kind}, {sent[f'result of attention, {kind}']}"
    figure = Figure(
        "matmuls",
        f"A pair of matmuls over tp {layout.tp}",
        f"{some(t, layout.tp)} shard two matrices. {'Each rank has the tokens of its colour; ' if by_token else ''}"
        f"before the first matmul: {before}. The first matrix is sharded by columns: {model.n_heads} heads over "
        f"{layout.tp} ranks. The second is sharded by rows, so each rank has a partial sum; after it: {after}.",
        "One colour for each rank. Dots are bytes on their way between ranks.",
    )
    width = (WIDTH - 16) / t
    rows = ((20, "input, by token" if by_token else "input, all tokens on every rank", by_token),
            (92, "first matrix, column-parallel", True), (230, "output", by_token))  # fmt: skip
    for y, name, cut in rows:
        figure.words(8, y - 6, name)
        for rank in range(t):
            figure.box(8 + rank * width, y, width, 26, colour(rank) if cut else "", f"{rank}" if cut else "")
    figure.words(8, 150, "second matrix, row-parallel")
    for rank in range(t):
        figure.box(8, 156 + rank * 36 / t, WIDTH - 16, 36 / t, colour(rank))
    for y, words in ((62, before), (210, after)):
        figure.arrow(WIDTH / 2, y - 13, WIDTH / 2, y + 7)
        figure.words(WIDTH / 2 + 10, y + 1, words)
    for rank in range(t):
        x_from, x_to = 8 + (rank + 0.5) * width, 8 + ((rank + 1) % t + 0.5) * width
        if by_token:
            figure.dot([(x_from, 33), (x_to, 105)], 0.0, 0.3, colour(rank))
        figure.dot([(x_from, 156 + (rank + 0.5) * 36 / t), (x_to, 243)], 0.5, 0.85, colour(rank))
    return figure


def ring(state: PageState) -> Figure:
    """Draw the tokens of each rank of cp, and the keys that it has in each step of the ring."""
    layout, seq_len = state.layout, state.job.seq_len
    method, n = layout.cp_method, layout.cp_ring
    shown = min(layout.cp, MOST_RANKS)
    figure = Figure(
        "ring",
        f"Tokens and keys of the ranks of cp {layout.cp}, {method}",
        f"{some(shown, layout.cp)} have the tokens of their colour in a sequence of {seq_len:,}. "
        + (
            f"In each of {n} steps every rank attends to the keys of another rank; a bar shows its share of the most "
            "scores of a rank in a step. All wait for the longest bar."
            if n > 1
            else "An all-to-all exchanges tokens for heads, so each rank has all tokens of some heads in attention."
        ),
        "The strip is the sequence. Below: the rank whose keys are there, step by step.",
    )
    scale = (WIDTH - 8) / seq_len
    for rank in range(layout.cp if layout.cp <= 64 else shown):
        ulysses = layout.cp_ulysses
        for span in spans(method, seq_len, n, ulysses, rank // ulysses, rank % ulysses):
            kind = colour(rank) if rank < shown else ""
            figure.box(4 + span[0] * scale, 4, len(span) * scale, 18, kind)
    pitch = (WIDTH - 48) / shown
    for rank in range(shown):
        figure.box(48 + rank * pitch, 34, pitch - 3, 18, colour(rank), str(rank))
    figure.words(4, 47, "rank")
    if n == 1:
        names = [f"rank {rank}" for rank in range(shown)]
        return _exchange(figure, names, [f"heads {rank}" for rank in range(shown)], 66)
    pairs = step_pairs(method, seq_len, n)
    most = max(map(max, pairs))
    for step in range(shown):
        y = 60 + step * 30
        figure.words(4, y + 14, f"step {step}")
        for rank in range(shown):
            source = (rank - step) % n
            x = 48 + rank * pitch
            figure.box(x, y, pitch - 3, 24)
            tall = 24 * pairs[step][rank] / most
            figure.box(x, y + 24 - tall, pitch - 3, tall, colour(source) if source < shown else "other")
            figure.words(x + pitch / 2 - 1.5, y + 16, str(source), "middle")
            begin = step / shown
            figure.mark(x, y, pitch - 3, 24, begin, begin + 0.6 / shown, 10)
            if step + 1 < shown and rank + 1 < shown:
                middle = x + pitch / 2
                figure.dot([(middle, y + 12), (middle + pitch, y + 42)], begin + 0.6 / shown, begin + 1 / shown,
                           colour(source), 10)  # fmt: skip
    return figure


def pipeline(state: PageState) -> PagePicture:
    """Return the timeline of the schedule as `schedule.draw` draws it, with a line that moves over it."""
    layout = state.layout
    p, few = min(layout.pp, MOST_RANKS), int(state.choice.candidates.microbatches(state.job.global_batch)[0])
    numbers = [m for m in (min(few, 2 * p), 2 * p) if not problems(layout.pp_schedule, p, m, layout.virtual_stages)]
    schedule = build(layout.pp_schedule, p, numbers[0], layout.virtual_stages)
    simulation = simulate(schedule, Times())
    words = (
        f"{some(p, layout.pp, 'ranks of pp')} run {some(schedule.n_microbatches, few, 'micro-batches')} with "
        f"{layout.pp_schedule}, where F, I and W take the same time: each rank is idle {simulation.bubble_rate:.1%} of "
        f"the step, and has at most {max(simulation.peak_in_flight)} micro-batches in flight."
    )
    drawn = timeline_svg(draw.planned(simulation), moves=True)
    return PagePicture(f"Schedule: {layout.pp_schedule}", drawn, caption=words, wide=True)


def dispatch(state: PageState) -> Figure:
    """Draw the all-to-alls of tokens to the ranks of their experts, and back."""
    layout, moe = state.layout, state.job.model.moe
    assert moe is not None
    n, per_rank = min(layout.ep, MOST_RANKS), moe.n_experts // layout.ep
    sent = _buffers(state).get("tokens of experts, all-to-all")
    buffer = f"its buffer has {sent}" if sent else "the busiest rank of pp has only dense blocks, and sends no token"
    figure = Figure(
        "dispatch",
        f"Dispatch of tokens to experts over ep {layout.ep}",
        f"{some(n, layout.ep)} send each of their tokens to the ranks of its {moe.top_k} of {moe.n_experts} experts, "
        f"and receive the results back. A rank has {per_rank} experts of a layer; {buffer}.",
        "Left: tokens. Right: experts. Dots go to the experts (dispatch) and return (combine).",
    )
    names = [f"rank {rank}" for rank in range(n)]
    return _exchange(figure, names, [f"{rank * per_rank} to {(rank + 1) * per_rank - 1}" for rank in range(n)], 4)


def _exchange(figure: Figure, left: Sequence[str], right: Sequence[str], top: float) -> Figure:
    """Draw an all-to-all from the ranks on the left to their parts on the right, and back."""
    n, pitch = len(left), 30
    for rank in range(n):
        y = top + rank * pitch
        figure.box(4, y, 92, 22, colour(rank), left[rank])
        figure.box(WIDTH - 124, y, 120, 22, colour(rank), right[rank])
        for other in range(n):
            figure.path(f"M98 {y + 11}L{WIDTH - 126} {top + other * pitch + 11}", "thin")
        for turn in range(1, min(n, 4)):
            other = (rank + turn) % n
            start, end = (98.0, y + 11.0), (WIDTH - 126.0, top + other * pitch + 11.0)
            figure.dot([start, end], 0.02 + 0.04 * turn, 0.34 + 0.04 * turn, colour(other))
            figure.dot([end, start], 0.52 + 0.04 * turn, 0.84 + 0.04 * turn, colour(other))
    return figure


def all_reduce(state: PageState) -> Figure:
    """Draw a reduce-scatter and an all-gather over a ring, chunk by chunk."""
    sent = sent_messages(state.priced)
    summed = [message for message in sent if message.collective in ("all-reduce", "reduce-scatter")]
    largest = max(summed or sent, key=lambda message: message.n_bytes)
    n_ranks = largest.size
    n = max(2, min(n_ranks, MOST_CHUNKS))
    figure = Figure(
        "all-reduce",
        "An all-reduce over a ring: reduce-scatter, then all-gather",
        f"{some(n, max(n_ranks, n))} have {n} chunks each. In each of {n - 1} steps a rank sends one chunk to the next "
        f"rank, which adds it; in {n - 1} more steps the finished chunks travel round. The largest buffer here: "
        f"{largest.what}, {format_bytes(largest.n_bytes)}, over {n_ranks} ranks.",
        "The height of a chunk is the share of ranks whose values are in its sum.",
    )
    pitch, y = (WIDTH - 60) / n, 4.0
    sums = [[1 / n] * n for _ in range(n)]
    steps = 2 * (n - 1)
    for step in range(steps + 1):
        reducing = step <= n - 1
        figure.words(
            4, y + 18, "start" if not step else f"{'r-s' if reducing else 'a-g'} {step if reducing else step - n + 1}"
        )
        for rank in range(n):
            x, wide = 60 + rank * pitch, (pitch - 8) / n
            for chunk in range(n):
                tall = 26 * sums[rank][chunk]
                figure.box(x + chunk * wide, y, wide, 26)
                figure.box(x + chunk * wide, y + 26 - tall, wide, tall, colour(chunk))
        if step < steps:
            turn = step if step < n - 1 else step - n
            after = [list(row) for row in sums]
            for rank in range(n):
                chunk, to = (rank - turn) % n, (rank + 1) % n
                after[to][chunk] = sums[rank][chunk] + (sums[to][chunk] if step < n - 1 else 0)
                way = [(60 + (at + 0.5) * pitch, level) for at, level in ((rank, y + 13), (to, y + 51))]
                figure.dot(way, step / steps, (step + 0.8) / steps, colour(chunk), 12)
            sums = after
        y += 38
    return figure


def mesh(state: PageState) -> Figure:
    """Draw the ranks of each process group of rank 0, with a colour for each node."""
    layout, node = state.layout, state.job.cluster.node_size
    axes = [axis for axis in (*reversed(DENSE_AXES), "ep") if layout.degree(axis) > 1]
    rows = [(axis, layout.group_of(0, axis)) for axis in axes]
    placed = [f"{axis} {len(group)}, {_nodes(group, node)}" for axis, group in rows]
    figure = Figure(
        "mesh",
        f"Process groups of rank 0 of {layout.world_size:,}",
        f"Groups of rank 0, in nodes of {node}: {'; '.join(placed) or 'none, there is one rank'}.",
        "A box is a rank with its number; boxes of one colour are in one node.",
    )
    nodes: dict[int, int] = {}
    pitch = (WIDTH - 8) / MOST_RANKS
    for row, ((_, group), words) in enumerate(zip(rows, placed, strict=True)):
        y = row * 54
        figure.words(4, y + 12, words + f", {MOST_RANKS} drawn" * (len(group) > MOST_RANKS))
        for at, rank in enumerate(group[:MOST_RANKS]):
            kind = colour(nodes.setdefault(rank // node, len(nodes)))
            figure.box(4 + at * pitch, y + 18, pitch - 4, 24, kind, str(rank))
            if at:
                figure.dot([(4 + pitch / 2, y + 30), (4 + at * pitch + pitch / 2, y + 30)], 0.1, 0.8, kind, 6)
    return figure


def _nodes(group: Sequence[int], node: int) -> str:
    n = len({rank // node for rank in group})
    return "inside a node" if n == 1 else f"over {n:,} nodes"
