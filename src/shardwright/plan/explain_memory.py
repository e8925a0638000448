"""Parameters and memory of the fullest rank, line by line."""

from collections.abc import Iterator

from shardwright.cost import activations, memory, parameters, pipeline, states
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced

_ZERO = "ZeRO, arXiv 1910.02054, section 5"


class _Rank:
    """What the lines of one rank of pp are made from: its stages, with P dense and Q expert parameters."""

    def __init__(self, priced: Priced) -> None:
        self.job, self.of = priced.job, priced.choice.candidates
        self.rank = int(priced.memory.rank_bytes[0].argmax())
        self.zero = priced.choice.layout.zero
        self.kinds = {kind: float(held[0, self.rank]) for kind, held in priced.memory.kinds.items()}
        self.stages = pipeline.stages(self.job, self.of)
        self.mine = [int(stage) for stage in self.stages.of_rank[self.rank]]
        multiple = self.job.stack.vocabulary_multiple
        self.held = parameters.of_ranks(
            self.job.model, self.stages, self.of.tp, self.of.ep, vocabulary_multiple=multiple
        )
        self.dense = [int(self.held.dense[0, stage]) for stage in self.mine]
        self.expert = [int(self.held.expert[0, stage]) for stage in self.mine]

    def shared(self, cut: bool) -> tuple[str, str, float]:
        """P + Q in symbols, in numbers and as a number; `cut`: divided by the ranks that share them out."""
        parts = [("P", "N", sum(self.dense), int(self.of.shards[0]))]
        if sum(self.expert):
            parts.append(("Q", "N_e", sum(self.expert), int(self.of.expert_shards[0])))
        symbols = " + ".join(f"{p} / {n}" if cut else p for p, n, _, _ in parts)
        numbers = " + ".join(f"{held} / {over}" if cut else f"{held}" for _, _, held, over in parts)
        value = sum(held / (over if cut else 1) for _, _, held, over in parts)
        return f"({symbols})", f"({numbers})", value


def parameter_lines(priced: Priced) -> Iterator[Line]:
    """Parameters of the model, and of the fullest rank."""
    spec, layout = priced.job.model, priced.choice.layout
    part = spec.parameters_by_module()
    rest = [name for name in ("embedding", "positions", "final_norm", "head") if part[name]]
    n_plain = spec.n_layers - spec.n_expert_layers
    formula = ["L (attention + norms)"]
    numbers = [f"{spec.n_layers} * ({part['layer.attention']} + {part['layer.norms']})"]
    if n_plain:
        formula.append("dense layers x network")
        numbers.append(f"{n_plain} * {part['layer.ffn']}")
    if spec.n_expert_layers:
        formula.append("other layers x (router + experts + shared)")
        inner = " + ".join(str(part[f"layer.{name}"]) for name in ("router", "experts", "shared"))
        numbers.append(f"{spec.n_expert_layers} * ({inner})")
    formula += [name.replace("_", " ") for name in rest]
    numbers += [str(part[name]) for name in rest]
    section, rank = "Parameters", _Rank(priced)
    yield Line(section, "model", " + ".join(formula), " + ".join(numbers), float(spec.n_parameters), "", "exact")
    where = f" of pp rank {rank.rank}" if layout.pp > 1 else " of a rank"
    each = "sum over its stages, cut over tp" if layout.pp > 1 else "cut over tp"
    yield Line(section, f"P, dense ones{where}", each, " + ".join(map(str, rank.dense)), float(sum(rank.dense)), "")
    if sum(rank.expert):
        yield Line(
            section,
            f"Q, in experts{where}",
            "sum over its stages, dealt out over ep",
            " + ".join(map(str, rank.expert)),
            float(sum(rank.expert)),
            "",
        )
    if layout.zero:
        n = layout.dp_shard * layout.cp
        yield Line(section, "N, ranks that share P", "dp_shard x cp", f"{layout.dp_shard} * {layout.cp}", float(n), "")
        if sum(rank.expert):
            yield Line(
                section,
                "N_e, ranks that share Q",
                "dp_shard x cp x tp / ep",
                f"{layout.dp_shard} * {layout.cp} * {layout.tp} / {layout.ep}",
                float(layout.expert_dp_shard),
                "",
            )


def memory_lines(priced: Priced) -> Iterator[Line]:
    """Each kind of memory at the fullest moment of the fullest rank; they add up to the peak."""
    rank = _Rank(priced)
    section = f"Memory of pp rank {rank.rank}" if priced.choice.layout.pp > 1 else "Memory"
    for kind, value in rank.kinds.items():
        if value:
            formula, numbers, source = _state(rank, kind) or _moving(rank, kind)
            yield Line(section, kind, formula, numbers, value, "B", source)
    held = sum(rank.kinds.values())
    share = rank.job.stack.fragmentation
    yield Line(
        section,
        "peak",
        "(1 + what the allocator cannot use) x sum",
        f"(1 + {share}) * ({' + '.join(num(value) for value in rank.kinds.values() if value)})",
        held * (1 + share),
        "B",
    )


def _state(rank: _Rank, kind: str) -> tuple[str, str, str] | None:
    """Formula, numbers and source of what lies there all through the step; None for another kind."""
    stack, e = rank.job.stack, rank.job.element_bytes
    from_zero = {"weights": (3, e), "master": (1, stack.master_bytes), "optimizer": (1, stack.moment_bytes)}
    if kind in from_zero:
        stage, n_bytes = from_zero[kind]
        symbols, numbers, _ = rank.shared(rank.zero >= stage)
        return f"{num(n_bytes)} B x {symbols}", f"{num(n_bytes)} * {numbers}", _ZERO
    if kind == "gradients":
        symbols, numbers, held = rank.shared(bool(states.shares_gradients(rank.of)[0]))
        moving = rank.kinds[kind] - held * stack.gradient_bytes
        block = (" + those of the block at work", f" + {num(moving)}") if moving > 0.5 else ("", "")
        g = num(stack.gradient_bytes)
        return f"{g} B x {symbols}{block[0]}", f"{g} * {numbers}{block[1]}", _ZERO
    if kind == "gathered":
        if rank.of.pp > 1 and rank.of.shared.zero_pp_gather == "step":
            return "e (P + Q)", f"{e} * ({sum(rank.dense)} + {sum(rank.expert)})", "gathered once a step"
        layers = int((rank.stages.plain + rank.stages.mixtures)[rank.mine].sum())
        largest = int(rank.held.layer_dense[0] + rank.held.layer_expert[0])
        ends = int(rank.held.ends[0, rank.mine].sum())
        whole = sum(rank.dense) + sum(rank.expert)
        return (
            "e x (a block and the next + embedding, norm, head), at most e (P + Q)",
            f"{e} * min({min(2, layers)} * {largest} + {ends}, {whole})",
            "gathered for each pass",
        )
    if kind == "buffers":
        tokens = float(rank.of.micro_batch[0] * rank.job.seq_len / rank.of.cp[0] / rank.of.token_shards[0])
        return "2 T' h e", f"2 * {num(tokens)} * {rank.job.model.d_model} * {e}", "a message each way"
    if kind == "workspace":
        return "of libraries", "", "cost/stack.py"
    return None


def _moving(rank: _Rank, kind: str) -> tuple[str, str, str]:
    """What comes and goes: microbatches in flight at the fullest moment times what each leaves in a stage."""
    job, of = rank.job, rank.of
    if kind == "activations" and rank.kinds[kind]:
        return _activations(rank)
    if kind == "logits":
        rows = int(parameters.vocabulary_rows(job.model, of.tp, multiple=job.stack.vocabulary_multiple)[0])
        tokens = float(of.tokens(job.seq_len)[0])
        each = rank.kinds[kind] / (tokens * rows)
        return (
            "T x rows of the vocabulary x bytes of a logit, its copies and gradients, and of microbatches in flight",
            f"{num(tokens)} * {rows} * {num(each)}",
            "cost/activations.py",
        )
    if kind == "working":
        return _working(rank)
    if kind == "experts" and rank.kinds[kind]:
        each = float(activations.mixture(job, of).experts[0])
        in_flight = round(rank.kinds[kind] / each)
        return "layers in flight x rows sent to experts", f"{in_flight} * {num(each)}", "cost/activations.py"
    return "", "", "cost/activations.py"


def _working(rank: _Rank) -> tuple[str, str, str]:
    """What the backward pass of a layer makes at once: gradients of what it kept and gathered inputs, in attention or
    in the network; and what recomputation makes again."""
    job, of, spec, e = rank.job, rank.of, rank.job.model, rank.job.element_bytes
    tokens, tp, h = float(of.tokens(job.seq_len)[0]), int(of.tp[0]), spec.d_model
    shards, value = int(of.token_shards[0]), rank.kinds["working"]
    kv_heads = max(spec.n_kv_heads / tp, 1)
    q, out = spec.n_heads / tp * spec.qk_dim, spec.n_heads / tp * spec.head_dim
    k, v = kv_heads * spec.qk_dim, kv_heads * spec.head_dim
    visiting = 0 if of.cp[0] == 1 else int(of.cp[0]) if of.shared.cp_method == "allgather" else 2
    gathered, inputs = int(shards > 1), 2 if spec.activation == "swiglu" else 1
    wide = q + k + v + out + gathered * h + visiting * (k + v)
    attention = (tokens * wide + tokens / shards * 2 * h) * e
    told = f"({num(tokens)} * {num(wide)} + {num(tokens)} / {shards} * {2 * h}) * {e}"
    dense = (rank.stages.plain[rank.mine] > 0).any()
    wide = 2 * gathered * h + spec.d_ffn / tp * (1 + inputs)
    network = (tokens * wide + tokens / shards * 2 * h) * e if dense else 0.0
    if network > attention:
        told = f"({num(tokens)} * {num(wide)} + {num(tokens)} / {shards} * {2 * h}) * {e}"
    if spec.moe is not None and (rank.stages.mixtures[rank.mine] > 0).any():
        moe = spec.moe
        rows = tokens / shards * moe.top_k
        each = 2 * h + (1 + inputs) * moe.d_ffn
        experts = (rows * each + tokens / shards * h) * e
        if experts > max(attention, network):
            told = f"({num(rows)} * {each} + {num(tokens)} / {shards} * {h}) * {e}"
        network = max(network, experts)
    more = value - max(attention, network)
    source = "cost/activations.py"
    if more < -0.5:
        return "what is made and gone within an action", "", source
    where = "the network" if network > attention else "attention"
    again = more > 0.5
    formula = f"gradients in {where} of a layer, and inputs gathered"
    return formula + " + what is made again" * again, told + f" + {num(more)}" * again, source


def _activations(rank: _Rank) -> tuple[str, str, str]:
    """Layers in flight at the fullest moment times what each keeps, and what is kept around them."""
    job, of = rank.job, rank.of
    microbatches = int(of.microbatches(job.global_batch)[0])
    fullest = int(memory.curve(job, of, rank.rank).total_bytes[:-1].argmax())
    _, at = pipeline.every_moment(of, microbatches, rank.rank)
    terms, names, rest = [], [], rank.kinds["activations"]
    for make, counts, name in (
        (activations.plain, rank.stages.plain, "layer"),
        (activations.mixture, rank.stages.mixtures, "layer with experts"),
    ):
        in_flight = int(at.in_flight[0, fullest] @ counts[rank.mine])
        if in_flight:
            layer = make(job, of)
            kept = float((layer.kept - layer.experts)[0])
            terms.append(f"{in_flight} * {num(kept)}")
            names.append(f"{name}s in flight x kept of a {name}")
            rest -= in_flight * kept
    if abs(rest) > 0.5:
        terms.append(num(rest))
        names.append("norm and messages around them, and what waits for W")
    return (
        " + ".join(names),
        " + ".join(terms),
        "in flight: microbatches x layers of the stage; kept: cost/activations.py, after Korthikanti et al., "
        "arXiv 2205.05198, table 2",
    )
