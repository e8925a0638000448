"""What a step does once or beside its passes, with its numbers: data parallelism and the optimizer."""

from collections.abc import Iterator

from shardwright.cost.layer import reached_bytes_per_s
from shardwright.cost.step import rank_parameters
from shardwright.plan.explain_messages import Term, hidden, message_line, one, total
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced

_SECTION = "Data parallel, rank with most parameters"


def data_lines(priced: Priced, forward: float, backward: float) -> Iterator[Line]:
    """Bytes, collectives, and what of them is not hidden; `forward`, `backward`: seconds of a microbatch's passes on
    the busiest rank of pp."""
    job, of, speed = priced.job, priced.choice.candidates, priced.job.stack.speed
    e, zero, m = job.element_bytes, int(of.zero[0]), int(of.microbatches(job.global_batch)[0])
    by_step = of.pp > 1 and of.shared.zero_pp_gather == "step"
    dense, experts, ends = (int(one(part)) for part in rank_parameters(job, of))
    groups = [("dense", dense, dense - ends, int(of.copies[0]), int(of.shards[0]), int(of.tp[0]))]
    n_copies = max(int(of.copies[0] * of.tp[0] // of.ep[0]), 1)
    groups.append(("experts", experts, experts, n_copies, int(of.expert_shards[0]), int(of.ep[0])))
    sums = dict.fromkeys(("reduce", "gather", "again", "scatter", "across"), 0.0)
    for name, count, layers_only, copies, shards, stride in groups:
        if not count:
            continue
        gradients = count * speed.reduce_bytes
        yield Line(
            _SECTION, f"gradients, {name}", "bytes a gradient x parameters", f"{num(speed.reduce_bytes)} * {count}",
            gradients, "B", "as they are sent",
        )  # fmt: skip
        if zero:
            yield Line(_SECTION, f"weights, {name}", "e x parameters", f"{e} * {count}", float(e * count), "B")
        wanted = [("reduce", "gradients", "all-reduce", gradients, copies, stride)]
        if zero:
            wanted = [
                ("gather", "weights", "all-gather", float(count * e), shards, stride),
                ("scatter", "gradients", "reduce-scatter", gradients, shards, stride),
                ("across", "shares over replicas", "all-reduce", gradients / shards, copies // shards, shards * stride),
            ]
            if zero == 3 and not by_step:
                of_layers = "weights without embedding and head" if layers_only < count else "weights, backward"
                wanted.insert(1, ("again", of_layers, "all-gather", float(layers_only * e), shards, stride))
        for key, what, kind, n_bytes, size, apart in wanted:
            if size > 1:
                line = message_line(_SECTION, f"{what}, {name}", kind, job.cluster, n_bytes, size, apart)
                sums[key] += line.value
                yield line
    layers = max(job.model.n_layers / of.pp, 1)

    def beside(message: float, passes: float, times: int = 1) -> Term:
        left = Term(message, num(message))
        if speed.hides_dp and message:
            left = hidden(message, passes, speed.interference, message / layers)
        return left if times == 1 else Term(times * left.value, f"{times} * ({left.numbers})")

    gather, again, scatter, across = (sums[key] for key in ("gather", "again", "scatter", "across"))
    if zero == 0:
        parts = [beside(sums["reduce"], backward)]
    else:
        parts = [beside(scatter + across, backward), beside(gather, forward)]
        if zero == 2:
            parts.append(beside(scatter, backward, m - 1))
        if zero == 3 and not by_step:
            each = (gather if of.pp > 1 else again) + scatter
            parts = [
                beside(gather, forward, m), beside(each, backward, m - 1), beside(again + scatter + across, backward)
            ]  # fmt: skip
    said = {
        0: "all-reduce beside B",
        1: "sums of gradients beside B + gathers of weights beside F",
        2: "sums of gradients beside B, for each microbatch + gathers of weights beside F",
        3: "m gathers beside F + m gathers and sums of gradients beside B",
    }[1 if by_step and zero == 3 else zero]
    whole = total([part for part in parts if part.value])
    value = priced.parts_s["data parallel"]
    twins = list(_twins(priced, dense + experts))
    yield from twins
    if twins:
        said += " + sums over two ranks of pp that hold the same"
        whole = total([whole, *(Term(line.value, num(line.value)) for line in twins)])
    yield Line(
        _SECTION, "data parallel", said, whole.numbers, value, "s",
        f"beside a pass of a microbatch: F {num(forward)} s, B = I + W {num(backward)} s; what sticks out, at least a "
        f"layer's share, + interference x the rest; cost/step.py",
    )  # fmt: skip


def _twins(priced: Priced, held: int) -> Iterator[Line]:
    """Sums of gradients over two ranks of pp that hold the same (`cost.step`)."""
    job, of, reduce_bytes = priced.job, priced.choice.candidates, priced.job.stack.speed.reduce_bytes
    stride = int(of.world[0]) // of.pp
    if of.pp > 1 and job.model.tied_embedding:
        n_bytes = job.model.vocab_size * job.model.d_model / int(of.tp[0]) * reduce_bytes
        apart = (of.pp - 1) * stride
        yield message_line(_SECTION, "tied matrix, first and last stage", "all-reduce", job.cluster, n_bytes, 2, apart)
    if len(of.shared.ways) > 1:
        n_bytes = held * reduce_bytes / (int(of.shards[0]) if of.zero[0] else 1)
        yield message_line(_SECTION, "both copies of a stage", "all-reduce", job.cluster, n_bytes, 2, stride)


def optimizer_line(priced: Priced) -> Line:
    """Bytes over bandwidth, and what a step does once."""
    job, of, speed = priced.job, priced.choice.candidates, priced.job.stack.speed
    dense, experts, _ = (int(one(part)) for part in rank_parameters(job, of))
    shared = bool(of.zero[0])
    held = [f"{dense} / {int(of.shards[0])}" if shared else str(dense)]
    if experts:
        held.append(f"{experts} / {int(of.expert_shards[0])}" if shared else str(experts))
    return Line(
        "Step",
        "optimizer",
        "bytes a parameter x parameters the rank has a share of / bandwidth reached + once a step",
        f"{num(speed.optimizer_bytes)} * ({' + '.join(held)}) / {num(reached_bytes_per_s(job))} + {num(speed.step_s)}",
        priced.parts_s["optimizer"],
        "s",
        "cost/step.py",
    )
