"""Where the seconds of a step come from, line by line."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shardwright.cost import idle, layer, pipeline, products
from shardwright.cost.layer import Passes
from shardwright.cost.products import TILE_COLUMNS, TILE_ROWS, Product
from shardwright.cost.step import StagePasses, stragglers
from shardwright.model.spec import ModelSpec
from shardwright.plan.explain_data import data_lines, optimizer_line
from shardwright.plan.explain_ends import embedding_lines, head_lines
from shardwright.plan.explain_layer import attention_lines, context_lines, elementwise_lines, tensor_lines
from shardwright.plan.explain_messages import message_line, one
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced
from shardwright.schedule.placement import held_by

_WAVES = "wave and tile quantisation, NVIDIA Matrix Multiplication Background; cost/products.py"
_SOURCES = {
    "matrix products": "the products above, those for the gradients of their inputs, and of their weights",
    "element-wise": "bytes moved / bandwidth reached; cost/layer.py",
    "attention": "stored scores: two products, and passes over memory; cost/layer.py",
    "tensor parallel": "sums over tp; cost/layer.py, cost/collectives.py",
    "context parallel": "keys and values round the ring, less what is hidden; cost/layer.py",
    "expert parallel": "all-to-alls of tokens; cost/layer.py",
    "recomputation": "the forward pass once more; cost/layer.py",
    "launch": "what the processor needs to start the kernels, where that is longer; cost/layer.py",
}


def time_lines(priced: Priced) -> Iterator[Line]:
    """Products, the kinds of work of a layer, the pipeline, and the sum."""
    yield from _rates(priced)
    spec = priced.job.model
    if spec.n_expert_layers < spec.n_layers:
        yield from _layer(priced, experts=False)
    if spec.n_expert_layers:
        yield from _layer(priced, experts=True)
    of = priced.choice.candidates
    logits = products.head_product(priced.job, of, of.tokens(priced.job.seq_len))
    yield _product(priced, "Head, one microbatch", "logits", logits)
    yield from _kinds("Head, one microbatch", "the head", layer.head(priced.job, of), dict(head_lines(priced)))
    yield from _kinds(
        "Embedding, one microbatch", "the embedding", layer.embedding(priced.job, of), dict(embedding_lines(priced))
    )
    yield from _pipeline(priced)
    yield from _step(priced)


def _rates(priced: Priced) -> Iterator[Line]:
    job, chip = priced.job, priced.job.cluster.accelerator
    yield Line(
        "Rates",
        "products reach",
        "peak x best share seen x what lasts in training",
        f"{num(chip.flops_per_s[job.precision])} * {num(chip.matmul_share[job.precision])} * "
        f"{num(job.calibration.products(chip.name))}",
        products.reached_flops_per_s(job, job.precision),
        "FLOP/s",
        "cost/hardware.toml, cost/calibration.toml",
    )
    yield Line(
        "Rates",
        "element-wise kernels reach",
        "bandwidth x shares",
        f"{num(chip.memory_bytes_per_s)} * {num(layer.reached_bytes_per_s(job) / chip.memory_bytes_per_s)}",
        layer.reached_bytes_per_s(job),
        "B/s",
        "cost/hardware.toml, cost/calibration.toml",
    )
    tile = f"{TILE_ROWS} x {TILE_COLUMNS}"
    yield Line(
        "Rates",
        "w0",
        f"waves that a product takes longer than its own, w = tiles of {tile} of its result / {chip.multiprocessors} "
        f"multiprocessors: the first starts cold, the last is not full",
        "",
        job.calibration.partial_wave,
        "",
        "cost/calibration.toml",
    )
    yield Line(
        "Rates",
        "k0",
        "features in at which half of the time goes into filling and emptying the multipliers; k = those of a product",
        "",
        job.calibration.ramp_k,
        "",
        "cost/calibration.toml",
    )


def _layer(priced: Priced, *, experts: bool) -> Iterator[Line]:
    """The products of a layer forward, and all its work for one microbatch."""
    job, of = priced.job, priced.choice.candidates
    section = "A layer with experts, one microbatch" if experts else "A layer, one microbatch"
    tokens = of.tokens(job.seq_len)
    inner = products.expert_products if experts else products.dense_products
    each = [*products.attention_products(job, of, tokens), *inner(job, of, tokens)]
    for name, product in zip(_names(job.model, experts=experts), each, strict=True):
        yield _product(priced, section, name, product)
    passes = layer.layer(job, of, experts=experts)
    own = {"element-wise": list(elementwise_lines(priced, section, experts=experts))}
    if job.stack.flash_attention:
        own["attention"] = list(attention_lines(priced, section))
    if of.tp[0] > 1:
        own["tensor parallel"] = list(tensor_lines(priced, section, passes, experts=experts))
    if of.cp[0] > 1 and of.shared.cp_method in ("zigzag", "ring"):
        own["context parallel"] = list(context_lines(priced, section, passes))
    yield from _kinds(section, "a layer", passes, own)


def _kinds(section: str, whose: str, passes: Passes, own: Mapping[str, Sequence[Line]]) -> Iterator[Line]:
    """Each kind of work, by lines of its `own` where it has some; then F, I and W as sums of the kinds."""
    parts = {"F": passes.forward, "I": passes.backward_input, "W": passes.weight}
    for kind in passes.forward:
        seconds = [one(part[kind]) for part in parts.values()]
        if any(seconds):
            source = _SOURCES.get(kind, "cost/layer.py")
            yield from own.get(kind) or [
                Line(section, kind, "F + I + W", " + ".join(map(num, seconds)), sum(seconds), "s", source)
            ]
    for name, part in parts.items():
        those = {kind: one(seconds) for kind, seconds in part.items() if one(seconds)}
        if those:
            numbers = " + ".join(map(num, those.values()))
            yield Line(section, f"{name} of {whose}", " + ".join(those), numbers, sum(those.values()), "s")


def _names(spec: ModelSpec, *, experts: bool) -> list[str]:
    """Of the products of a layer, in the order of `cost.products`."""
    latent, up = spec.latent_attention, "gate and up" if spec.activation == "swiglu" else "up"
    names = ["q, k, v", "o"]
    if latent is not None:
        names = [*(["q_down", "q_up"] if latent.q_rank else ["q"]), "kv_down", "kv_up", "o"]
    if not experts:
        return [*names, up, "down"]
    shared = [f"{up} of the shared", "down of the shared"] if spec.moe is not None and spec.moe.n_shared else []
    return [*names, "router", f"{up} of an expert", "down of an expert", *shared]


def _product(priced: Priced, section: str, name: str, each: Product) -> Line:
    """One product forward, by what bounds it."""
    job, chip = priced.job, priced.job.cluster.accelerator
    m, k, n, batch = (float(np.asarray(size).reshape(-1)[0]) for size in (each.m, each.k, each.n, each.batch))
    seconds = float(each.seconds(job).reshape(-1)[0])
    times = f"{num(batch)} x " if batch != 1 else ""
    what = f"{name}, {times}({num(m)}, {num(k)}) by ({num(k)}, {num(n)})"
    n_bytes = job.element_bytes * (m * k + k * n + m * n) * batch
    if np.isclose(n_bytes / chip.memory_bytes_per_s, seconds, rtol=1e-9):
        numbers = f"{num(n_bytes)} / {num(chip.memory_bytes_per_s)}"
        return Line(section, what, "bytes / bandwidth", numbers, seconds, "s", _WAVES)
    waves = max(m / TILE_ROWS, 0.25) * max(n / TILE_COLUMNS, 0.25) * batch / chip.multiprocessors
    fitted, rate = job.calibration, products.reached_flops_per_s(job, each.precision or job.precision)
    numbers = (
        f"2 * {num(m)} * {num(k)} * {num(n)} * {num(batch)} / ({num(rate)} * ({num(waves)} / ({num(waves)} + "
        f"{num(fitted.partial_wave)})) * ({num(k)} / ({num(k)} + {num(fitted.ramp_k)})))"
    )
    return Line(
        section, what, "2 m k n batch / (reached q), q = w / (w + w0) k / (k + k0)", numbers, seconds, "s", _WAVES
    )


def _pipeline(priced: Priced) -> Iterator[Line]:
    """Work of the busiest rank, and how long the schedule takes with it."""
    job, of = priced.job, priced.choice.candidates
    m = of.microbatches(job.global_batch)
    passes = StagePasses(job, of)
    times = passes.times()
    rank = int(idle.busy(of, times, m)[0].argmax())
    ways = of.shared.ways
    section = f"Pipeline, busiest rank {rank}" if of.pp > 1 else "Step on a rank"
    mine = [stage for _, stage in held_by(ways, rank)]
    if of.pp > 1:
        counts = [len(layers) for layers in pipeline.stages(job, of).layers]
        told = f"layers of each of {len(counts)} stages"
        yield Line(section, told, "cut so that they take about as long", " + ".join(map(str, counts)),
                   float(sum(counts)), "layers", "split/stages.py")  # fmt: skip
        where = "its stages" if len(ways) == 1 else "its stages, half of the microbatches each way"
        told = ", ".join(f"{stage} ({counts[stage]})" for stage in mine)
        yield Line(
            section, f"{where}, with their layers", told, "", float(sum(counts[stage] for stage in mine)), "layers"
        )
        yield (message := _message(priced, section))
    each = []
    blocks = of.pp > 1 and job.stack.speed.blocking_sends
    for place, name in enumerate("FIW"):
        names, numbers, value = [], [], 0.0
        for what, (work, count) in zip(_works(job.model), passes.work, strict=True):
            n, seconds = int(count[mine].sum()), one(work.totals[place])
            if n and seconds:
                names.append(what)
                numbers.append(f"{n} * {num(seconds)}")
                value += n * seconds
        if blocks and name != "W":
            names.append("messages")
            numbers.append(f"{len(mine)} * {num(message.value)}")
            value += len(mine) * message.value
        each.append(value / len(ways))
        whole = " + ".join(numbers) or "0"
        if len(ways) > 1:
            whole = f"({whole}) / {len(ways)}"
        yield Line(section, f"{name} of a microbatch", " + ".join(names), whole, each[-1], "s", "of the sections above")
    work_s = float(m[0]) * sum(each)
    yield Line(
        section, "work", "m (F + I + W)", f"{int(m[0])} * ({' + '.join(map(num, each))})", work_s, "s", "cost/idle.py"
    )
    if of.pp > 1:
        span = work_s + priced.parts_s["pipeline"]
        yield Line(
            section,
            f"{of.shared.schedule} with these times",
            "its makespan",
            "",
            span,
            "s",
            "simulated action by action; cost/idle.py",
        )
        # A small difference of large numbers, which needs their digits.
        yield Line(section, "pipeline (waiting)", "makespan - work", f"{span:.12g} - {work_s:.12g}", span - work_s, "s")
    if priced.parts_s.get("data parallel"):
        yield from data_lines(priced, each[0], each[1] + each[2])


def _works(spec: ModelSpec) -> list[str]:
    """Of `StagePasses.work`, in its order."""
    mixtures, plain = spec.n_expert_layers, spec.n_layers - spec.n_expert_layers
    return ["embedding", "head", *(["layers"] if plain else []), *(["layers with experts"] if mixtures else [])]


def _message(priced: Priced, section: str) -> Line:
    """From one stage to the next."""
    job, of, speed = priced.job, priced.choice.candidates, priced.job.stack.speed
    cut = one(of.tp if speed.scatters_messages else of.token_shards)
    n_bytes = one(of.tokens(job.seq_len)) * job.model.d_model * job.element_bytes / cut
    stride = int(of.world[0]) // of.pp
    return message_line(section, "between stages", "message", job.cluster, n_bytes, of.pp, stride, speed.message_s)


def _step(priced: Priced) -> Iterator[Line]:
    """The parts of a step, and their sum."""
    parts = {kind: seconds for kind, seconds in priced.parts_s.items() if seconds}
    if "optimizer" in parts:
        yield optimizer_line(priced)
    if "stragglers" in parts:
        rest = priced.step_s - parts["stragglers"]
        share = one(stragglers(priced.job, priced.choice.candidates))
        each, nodes = priced.job.calibration.straggler_share, priced.job.cluster.nodes
        yield Line(
            "Step",
            "stragglers",
            f"{num(each)} for each doubling of nodes x the rest, {nodes} nodes",
            f"{num(share)} * {num(rest)}",
            parts["stragglers"],
            "s",
            "all wait for the slowest; cost/step.py",
        )
    numbers = " + ".join(num(seconds) for seconds in parts.values())
    yield Line("Step", "step", " + ".join(parts), numbers, priced.step_s, "s", "the parts add up")
