"""The work of a layer that is no product: attention, element-wise operations, messages over tp, with their numbers."""

from collections.abc import Iterator

from shardwright.cost import layer, products
from shardwright.cost.layer import BACKWARD_TRAFFIC, CAST_BYTES, FLASH_BACKWARD, MERGE_BYTES
from shardwright.plan.explain_messages import Term, hidden, message_line, one, total
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced


def attention_lines(priced: Priced, section: str) -> Iterator[Line]:
    """FLOPs, rate and seconds of fused attention."""
    job, of, spec = priced.job, priced.choice.candidates, priced.job.model
    chip, fitted, precision = job.cluster.accelerator, job.calibration, priced.job.wide_precision
    tokens, width, tp = one(of.tokens(job.seq_len)), (spec.qk_dim + spec.head_dim) / 2, int(of.tp[0])
    flops = 4 * tokens * job.seq_len * spec.n_heads / tp * width * (0.5 + 64 / job.seq_len)
    yield Line(
        section,
        "attention, FLOPs of F",
        "4 T s H/tp c (1/2 + 64/s)",
        f"4 * {num(tokens)} * {job.seq_len} * {spec.n_heads} / {tp} * {num(width)} * (1 / 2 + 64 / {job.seq_len})",
        flops,
        "FLOP",
        "c: mean width of a head of keys and of values; the causal half, blocks on the diagonal whole",
    )
    gain = job.stack.speed.flash_gain
    rate = products.reached_flops_per_s(job, precision) * fitted.flash(chip.name) * gain
    rate *= width / (width + fitted.flash_width)
    yield Line(
        section,
        "attention, rate",
        "peak x best share seen x what lasts in training x share of fused attention x c / (c + c0) x gain of the stack",
        f"{num(chip.flops_per_s[precision])} * {num(chip.matmul_share[precision])} * {num(fitted.products(chip.name))}"
        f" * {num(fitted.flash(chip.name))} * {num(width)} / ({num(width)} + {num(fitted.flash_width)}) * {num(gain)}",
        rate,
        "FLOP/s",
        "c0: width at which half is reached; cost/calibration.toml",
    )
    cp = int(of.cp[0])
    ring = cp > 1 and of.shared.cp_method == "ring"
    more = 2 - 1 / cp if ring else 1.0
    yield Line(
        section,
        "attention",
        "FLOPs / rate x (1 + I for each F)" + (" x (2 - 1 / cp)" if ring else ""),
        f"{num(flops)} / {num(rate)} * (1 + 2.5 / 0.85)" + (f" * (2 - 1 / {cp})" if ring else ""),
        flops / rate * (1 + FLASH_BACKWARD) * more,
        "s",
        "backward five products for two, at 0.85 of the rate: Dao, arXiv 2307.08691, section 3; cost/layer.py",
    )


def elementwise_lines(priced: Priced, section: str, *, experts: bool) -> Iterator[Line]:
    """Bytes of each kind of operation forward, and the seconds of all."""
    job, of, spec, speed = priced.job, priced.choice.candidates, priced.job.model, priced.job.stack.speed
    tokens, tp = one(of.tokens(job.seq_len)), int(of.tp[0])
    scale, rate = job.element_bytes / 2, layer.reached_bytes_per_s(job)
    found: list[Term] = []

    def moved(what: str, formula: str, bytes_each: float, elements: float, numbers: str) -> Line:
        value = scale * bytes_each * elements
        found.append(Term(value, num(value)))
        factor = f"{num(scale)} * " if scale != 1 else ""
        told = f"{factor}{num(bytes_each)} * {numbers}"
        formula = ("e/2 x " if scale != 1 else "") + f"bytes an element x {formula}"
        return Line(section, f"{what}, F moves", formula, told, value, "B", "cost/speed.py")

    branch = (speed.norm_bytes if spec.norm == "layernorm" else speed.rmsnorm_bytes) + speed.residual_bytes
    name = "norms and residuals"
    if spec.dropout:
        branch, name = branch + speed.dropout_bytes, "norms, residuals and dropout"
    shards, h = int(of.token_shards[0]), spec.d_model
    yield moved(name, "2 T' h", branch, 2 * tokens / shards * h, f"2 * {num(tokens)} / {shards} * {h}")
    width = spec.n_heads * spec.head_dim
    yield moved(
        "laying out heads", "T H c/tp", speed.heads_bytes, tokens * width / tp, f"{num(tokens)} * {width} / {tp}"
    )
    if spec.positions == "rope":
        width = spec.qk_dim * (spec.n_heads + spec.n_kv_heads)
        numbers = f"{num(tokens)} * {width} / {tp}"
        yield moved("rotation", "T (q heads + k heads) q/tp", speed.rope_bytes, tokens * width / tp, numbers)
    if experts:
        assert spec.moe is not None
        rows = tokens / tp * spec.moe.top_k
        f, n_shared = spec.moe.d_ffn, spec.moe.n_shared
        inner = rows * f + tokens * f * n_shared / tp
        numbers = f"({num(rows)} * {f} + {num(tokens)} * {f} * {n_shared} / {tp})"
        yield moved("activation of experts", "rows x width", speed.gated_bytes, inner, numbers)
        yield moved("sorting by expert", "rows x h", speed.permute_bytes, rows * h, f"{num(rows)} * {h}")
    else:
        each = speed.gated_bytes if spec.activation == "swiglu" else speed.gelu_bytes
        numbers = f"{num(tokens)} * {spec.d_ffn} / {tp}"
        yield moved("activation", "T x width/tp", each, tokens * spec.d_ffn / tp, numbers)
    forward = total(found)
    value = forward.value * (1 + BACKWARD_TRAFFIC) / rate
    numbers = f"({forward.numbers}) * (1 + {num(BACKWARD_TRAFFIC)}) / {num(rate)}"
    formula = "bytes x (1 + I for each F) / bandwidth reached"
    if job.precision == "fp8":
        cast = _cast_elements(priced, experts=experts)
        value += CAST_BYTES * cast / rate
        numbers += f" + {num(CAST_BYTES)} * {num(cast)} / {num(rate)}"
        formula += " + casts to fp8, F and I"
    yield Line(section, "element-wise", formula, numbers, value, "s", "cost/layer.py")


def _cast_elements(priced: Priced, *, experts: bool) -> float:
    """Elements of products' inputs that are cast to fp8, forward and backward."""
    job, of = priced.job, priced.choice.candidates
    tokens = of.tokens(job.seq_len)
    inner = products.expert_products if experts else products.dense_products
    those = [*products.attention_products(job, of, tokens), *inner(job, of, tokens)]
    cast = [each for each in those if not each.precision]
    return sum(one(each.batch * (each.k * (each.m + each.n) + each.m * (each.k + each.n))) for each in cast)


def tensor_lines(priced: Priced, section: str, passes: layer.Passes, *, experts: bool) -> Iterator[Line]:
    """Each collective over tp of a layer, and what of them is not hidden."""
    job, of, spec, speed = priced.job, priced.choice.candidates, priced.job.model, priced.job.stack.speed
    tp, e, h = int(of.tp[0]), job.element_bytes, spec.d_model
    latent, moe = spec.latent_attention, spec.moe
    width = h if latent is None else (latent.q_rank or h) + latent.kv_rank + latent.rope_dim
    tokens, shards = one(of.tokens(job.seq_len)), bool(of.sequence_parallel[0])
    regions = [("attention", tokens * width * e)]
    if not experts:
        regions.append(("network", tokens * h * e))
    elif moe is not None and moe.n_shared:
        regions.append(("shared experts", tokens * h * e))
    forward, first, sums, again = [], [], [], []
    for name, given in regions:
        result = tokens * h * e

        def line(what: str, kind: str, n_bytes: float) -> Line:
            return message_line(section, what, kind, job.cluster, n_bytes, tp, 1)

        if shards:
            gathers = line(f"into {name}", "all-gather", given), line(f"gradient into {name}", "all-gather", result)
            scatters = (
                line(f"out of {name}", "reduce-scatter", result),
                line(f"gradient out of {name}", "reduce-scatter", given),
            )
            yield from (gathers[0], scatters[0], gathers[1], scatters[1])
            forward += [gathers[0].value, scatters[0].value]
            first.append(gathers[1].value)
            sums.append(scatters[1].value)
            again += [] if job.stack.keeps_gathered else [gathers[0].value]
        else:
            out, back = (
                line(f"out of {name}", "all-reduce", result),
                line(f"gradient out of {name}", "all-reduce", given),
            )
            yield from (out, back)
            forward.append(out.value)
            sums.append(back.value)
    matmul = "matrix products"
    parts, formula = [], []
    for told, seconds, beside, hides, least in (
        ("F", forward, one(passes.forward[matmul]), speed.hides_tp, True),
        ("gathers of gradients", first, one(passes.forward[matmul]), speed.hides_tp, True),
        ("sums of gradients", sums, one(passes.weight[matmul]), speed.hides_tp or speed.hides_tp_backward, False),
        ("inputs gathered again", again, one(passes.backward_input[matmul]), True, False),
    ):
        if not seconds:
            continue
        time = sum(seconds)
        if hides:
            parts.append(hidden(time, beside, speed.interference, time / tp if least else 0.0))
        else:
            parts.append(Term(time, " + ".join(map(num, seconds))))
        formula.append(f"{told}, hidden" if hides else told)
    whole = total(parts)
    yield Line(
        section,
        "tensor parallel",
        " + ".join(formula),
        whole.numbers,
        whole.value,
        "s",
        "hidden: max(messages - products beside, least) + interference x min of both; cost/layer.py",
    )


def context_lines(priced: Priced, section: str, passes: layer.Passes) -> Iterator[Line]:
    """Hops of keys and values round a ring of cp, beside attention, and the merging of what they give."""
    job, of, spec = priced.job, priced.choice.candidates, priced.job.model
    cp, tp, e, rate = int(of.cp[0]), int(of.tp[0]), job.element_bytes, layer.reached_bytes_per_s(job)
    tokens = one(of.tokens(job.seq_len))
    kv = tokens * max(spec.n_kv_heads / tp, 1) * (spec.qk_dim + spec.head_dim)
    hops = [
        message_line(section, what, "message", job.cluster, n_bytes, cp, tp)
        for what, n_bytes in (
            ("keys and values, F", kv * e),
            ("keys, values and their gradients, I", kv * (e + 4)),
            ("gradients on their way home, I", kv * 4),
        )
    ]
    yield from hops
    merge = MERGE_BYTES * tokens * spec.n_heads * spec.head_dim / tp / rate
    width = spec.n_heads * spec.head_dim
    numbers = f"{num(MERGE_BYTES)} * {num(tokens)} * {width} / {tp} / {num(rate)}"
    yield Line(section, "merging a hop's result", "bytes an element x T H c/tp / bandwidth", numbers, merge, "s")
    parts = [
        Term(
            (cp - 1) * (max(hop.value - one(beside) / cp, 0) + merge),
            f"{cp - 1} * (max({num(hop.value)} - {num(one(beside))} / {cp}, 0) + {num(merge)})",
        )
        for hop, beside in zip(hops, (passes.forward["attention"], passes.backward_input["attention"]), strict=False)
    ]
    whole = total([*parts, Term(hops[2].value, num(hops[2].value))])
    formula = "(cp - 1) x (what sticks out of attention / cp + merging), F + I + the way home"
    yield Line(section, "context parallel", formula, whole.numbers, whole.value, "s", "cost/layer.py")
