"""Where the seconds of a step come from, line by line."""

from collections.abc import Iterator

import numpy as np

from shardloom.cost import idle, layer, products
from shardloom.cost.products import TILE_COLUMNS, TILE_ROWS, Product
from shardloom.cost.step import StagePasses
from shardloom.model.spec import ModelSpec
from shardloom.plan.line import Line, num
from shardloom.plan.search import Priced

_WAVES = "wave and tile quantisation, NVIDIA Matrix Multiplication Background; cost/products.py"
_SOURCES = {
    "element-wise": "bytes moved / reached bandwidth; cost/layer.py",
    "attention": "fused: FLOPs of the causal half / reached FLOP/s; cost/layer.py",
    "tensor parallel": "sums over tp, less what is hidden; cost/layer.py, cost/collectives.py",
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
    logits = products.head_product(priced.job, of, layer.tokens_of(priced.job, of))
    yield _product(priced, "Head, one microbatch", "logits", logits)
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


def _layer(priced: Priced, *, experts: bool) -> Iterator[Line]:
    """The products of a layer forward, and all its work for one microbatch."""
    job, of = priced.job, priced.choice.candidates
    section = "A layer with experts, one microbatch" if experts else "A layer, one microbatch"
    tokens = layer.tokens_of(job, of)
    inner = products.expert_products if experts else products.dense_products
    each = [*products.attention_products(job, of, tokens), *inner(job, of, tokens)]
    for name, product in zip(_names(job.model, experts=experts), each, strict=True):
        yield _product(priced, section, name, product)
    passes = layer.layer(job, of, experts=experts)
    parts = (("F", passes.forward), ("I", passes.backward_input), ("W", passes.weight))
    for kind in passes.forward:
        seconds = [float(np.asarray(part[kind]).reshape(-1)[0]) for _, part in parts]
        if any(seconds):
            source = _SOURCES.get(kind, "cost/layer.py")
            yield Line(section, kind, "F + I + W", " + ".join(map(num, seconds)), sum(seconds), "s", source)


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
    times = StagePasses(job, of).times()
    rank = int(idle.busy(of, times, m)[0].argmax())
    ways = idle.ways_of(of)
    section = f"Pipeline, busiest rank {rank}" if of.pp > 1 else "Step on a rank"
    each = []
    for name, seconds in (("F", times.forward), ("I", times.backward_input), ("W", times.weight)):
        mine = [float(seconds[0, stage]) for way in ways for stage, there in enumerate(way) if there == rank]
        each.append(sum(mine) / len(ways))
        formula = "sum over its stages" if of.pp > 1 else "sum over layers, embedding and head"
        whole = " + ".join(map(num, mine))
        numbers = (f"({whole}) / {len(ways)}" if len(ways) > 1 else whole) if len(mine) > 1 else ""
        yield Line(section, f"{name} of a microbatch", formula, numbers, each[-1], "s")
    work = float(m[0]) * sum(each)
    yield Line(
        section, "work", "m (F + I + W)", f"{int(m[0])} * ({' + '.join(map(num, each))})", work, "s", "cost/idle.py"
    )
    if of.pp > 1:
        span = work + priced.parts_s["pipeline"]
        message = float(times.message[0])
        yield Line(
            section, "message between stages", "latency + T' h e / bandwidth", "", message, "s", "cost/collectives.py"
        )
        yield Line(
            section,
            f"{of.schedule} with these times",
            "its makespan",
            "",
            span,
            "s",
            "simulated action by action; cost/idle.py",
        )
        # A small difference of large numbers, which needs their digits.
        yield Line(section, "pipeline (waiting)", "makespan - work", f"{span:.12g} - {work:.12g}", span - work, "s")


def _step(priced: Priced) -> Iterator[Line]:
    """The parts of a step, and their sum."""
    parts = {kind: seconds for kind, seconds in priced.parts_s.items() if seconds}
    zero = priced.choice.layout.zero
    said = {
        0: "gradients all-reduced once, less what is hidden",
        1: "gradients reduce-scattered and weights gathered once, less what is hidden",
        2: "gradients reduce-scattered for each microbatch, weights gathered once, less what is hidden",
        3: "weights gathered for each pass and gradients reduce-scattered, less what is hidden",
    }[zero]
    if "data parallel" in parts:
        yield Line("Step", "data parallel", said, "", parts["data parallel"], "s", "cost/step.py, cost/collectives.py")
    if "optimizer" in parts:
        speed = priced.job.stack.speed
        yield Line(
            "Step",
            "optimizer",
            f"{num(speed.optimizer_bytes)} B x parameters of a rank / reached bandwidth + once a step",
            "",
            parts["optimizer"],
            "s",
            "cost/step.py",
        )
    numbers = " + ".join(num(seconds) for seconds in parts.values())
    yield Line("Step", "step", " + ".join(parts), numbers, priced.step_s, "s", "the parts add up")
