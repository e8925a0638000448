"""Every formula behind the seconds of a step of GRPO, in the form of the planner's ledger (`cost.ledger`)."""

from shardwright.cost import ledger
from shardwright.cost.ledger import LedgerEntry
from shardwright.planner.choice import PricedLayout
from shardwright.planner.explain import explain
from shardwright.rl.step import ANSWERS, GENERATION, MOVING, OTHER, SCORING, TRAINING, WEIGHTS, RLStep

FITTED = "rl/step.py RATES, fitted to NeMo-RL 0.4"


def explain_step(step: RLStep) -> list[LedgerEntry]:
    """Return the entries of the step, of its transfer of weights, and of the layout that trains."""
    priced = step.training.estimate
    assert isinstance(priced, PricedLayout), "search prices each layout of training as a PricedLayout"
    with ledger.record() as entries:
        with ledger.section("Weight transfer"):
            _transfer(step)
        with ledger.section("Step of GRPO"):
            _parts(step)
    return [*entries, *explain(priced)]


def _transfer(step: RLStep) -> None:
    sent, rates = step.transfer, step.task.rates
    one_rank = {"whole": sent.whole_bytes, "own": sent.own_bytes, "in_node": sent.in_node_bytes}
    source = "rl/transfer.py"
    ledger.note("whole", "", sent.whole_bytes, "B", "all parameters that are sent, in 16 bits")
    ledger.note("own", "", sent.own_bytes, "B", "of them a rank that trains has")
    ledger.note("in node", "", sent.in_node_bytes, "B", "of them the ranks of its node have")
    ledger.note("between nodes", "whole - in_node", sent.between_nodes_bytes, "B", source, **one_rank)
    ledger.note("inside the node", "max(in_node - own, 0)", sent.inside_bytes, "B", source, **one_rank)
    ledger.note("broadcast", "", sent.broadcast_bytes, "B", "to accelerators that only generate")
    links = {"across": step.task.cluster.across.bytes_per_s, "inside": step.task.cluster.inside.bytes_per_s}
    for name, rate in links.items():
        ledger.note(f"link {name}", "", rate, "B/s", "cost/hardware.toml")
    ledger.note("link share", "", rates.link_share, "", FITTED)
    to_engine = "link_across" if step.task.cluster.nodes > 1 else "link_inside"
    ledger.note(
        WEIGHTS,
        "max(between_nodes / (link_across * link_share) + inside_the_node / (link_inside * link_share), "
        f"broadcast / ({to_engine} * link_share))",
        sent.seconds, "s", source,
        between_nodes=sent.between_nodes_bytes, inside_the_node=sent.inside_bytes, broadcast=sent.broadcast_bytes,
        link_across=links["across"], link_inside=links["inside"], link_share=rates.link_share,
    )  # fmt: skip


def _parts(step: RLStep) -> None:
    task, rates, training, parts = step.task, step.task.rates, step.training, step.parts_s
    models = 1 + task.reference
    update_s = training.update_s / (rates.training * task.n_updates)
    forward_s = training.score_s / (rates.training * task.n_updates)
    engine_s = step.generation.seconds / rates.generation
    counts = {"answers": task.n_answers, "updates": task.n_updates, "scoring models": models}
    for name, count in counts.items():
        ledger.note(name, "", count, "", "options of plan rl")
    factors = {
        "generation factor": rates.generation,
        "training factor": rates.training,
        "seconds of an answer": rates.answer_s,
    }
    for name, value in factors.items():
        ledger.note(name, "", value, "s" * name.startswith("seconds"), FITTED)
    ledger.note("engine", "", engine_s, "s", "simulated as by plan serve, until the last answer of a step")
    ledger.note("update", "", update_s, "s", "step of the layout that trains, below")
    ledger.note("forward passes", "", forward_s, "s", "of one model over the answers of an update")
    given = ledger.identified(counts | factors) | {"engine": engine_s, "update": update_s, "forward_passes": forward_s}
    ledger.note(GENERATION, "generation_factor * engine", parts[GENERATION], "s", "", **given)
    ledger.note(ANSWERS, "seconds_of_an_answer * answers", parts[ANSWERS], "s", "", **given)
    ledger.note(
        SCORING, "training_factor * updates * forward_passes * scoring_models", parts[SCORING], "s", "", **given
    )
    ledger.note(TRAINING, "training_factor * updates * update", parts[TRAINING], "s", "", **given)
    moved = {"weights": training.weight_bytes, "states": training.state_bytes}
    terms = [*([] if step.separate else ["2 * (weights + states)"]), *(["3 * weights"] if step.swaps_reference else [])]
    for name, n_bytes in moved.items():
        ledger.note(name, "", n_bytes, "B", "of the fullest rank that trains")
    ledger.note("moved", " + ".join(terms), step.moved_bytes, "B", "rl/step.py", **moved)
    ledger.note("host rate", "", rates.host_bytes_per_s, "B/s", FITTED)
    ledger.note(
        MOVING, "moved / host_rate", parts[MOVING], "s", "", moved=step.moved_bytes, host_rate=rates.host_bytes_per_s
    )
    ledger.note(OTHER, "", rates.step_s, "s", FITTED)
    ledger.total("step of GRPO", {name: seconds for name, seconds in parts.items() if name not in step.hidden()})
