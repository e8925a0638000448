"""Bugs of recomputation: other inputs, another function, lost gradients, or what should have been kept or not."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import LATENT, TENSOR, TP, ZERO_3, AnyBug, Bug, UnitBug

ROOM = "shardwright.model.recompute"
TESTS = "tests/model/test_recompute.py"
SELECTIVE = Layout(recompute="selective")
GRAPH = "torch._C._current_graph_task_id() >= 0"
"""True in a backward pass."""

RECOMPUTATION: dict[str, AnyBug] = {
    "gate and up are swapped when the activation is computed again": Bug(
        Mutation(f"{ROOM}:_RecomputedCall.outputs", "self.compute(*self.inputs)", "self.compute(*self.inputs[::-1])"),
        [SELECTIVE, TP.changed(recompute="selective")],
    ),
    "a part is computed again from inputs in fewer digits": Bug(
        Mutation(f"{ROOM}:_RecomputedCall.outputs", "_read(x).detach()", "_read(x).detach().float().double()"),
        [SELECTIVE, ZERO_3.changed(recompute="selective")],
    ),
    "weights inside of a part have no gradient": Bug(
        Mutation(
            f"{ROOM}:_RecomputedCall.gradients",
            "return by_argument",
            "return [*by_argument[:1], *([None] * len(by_argument[1:]))]",
        ),
        [Layout(recompute="selective", recompute_modules=("mla_up",))],
        spec={"n_kv_heads": 3, "latent_attention": LATENT},
    ),
    "a view of what is computed again begins at its first element": Bug(
        Mutation(
            f"{ROOM}:_RecomputedView.read",
            "y.as_strided(self.size, self.stride, self.offset)",
            "y.as_strided(self.size, self.stride, 0)",
        ),
        [Layout(recompute="selective", recompute_modules=("rope",))],
        spec={"qk_norm": True},
        documents=True,
    ),
    "attention is computed again over documents": Bug(
        Mutation(
            "shardwright.model.attention:Attention.forward",
            "self.attend(q_BTHC, k_BTKC, v_BTKC, documents)",
            f"self.attend(q_BTHC, k_BTKC, v_BTKC, None if {GRAPH} else documents)",
        ),
        [Layout(recompute="selective", recompute_modules=("attention",))],
        documents=True,
    ),
    "the matmul that the recomputation skips is not summed over tp": Bug(
        Mutation(
            f"{TENSOR}:RowLinear.forward",
            "_row_product(x_BTF, weight, also_BTD, self.axis, recipe)",
            "matmul.forward(x_BTF, weight)",
        ),
        [TP.changed(recompute="full")],
    ),
    "an output that was changed in place is computed again as it was": UnitBug(
        Mutation(f"{ROOM}:_keep", "output is not None and output.version == tensor_version(x)", "output is not None"),
        f"{TESTS}:test_a_view_of_an_output_is_computed_again_and_an_output_changed_in_place_is_kept",
    ),
    "every matmul computes its input again": UnitBug(
        Mutation(
            f"{ROOM}:_RecomputedCall.outputs", "self._outputs is None", "self._outputs is None or not self.weights"
        ),
        f"{TESTS}:test_matmuls_and_routing_run_once_and_each_part_once_more",
    ),
    "routing is decided again with the experts": UnitBug(
        Mutation(
            "shardwright.model.moe:MoE.forward",
            "rows_RD = dispatch(x_BTD.flatten(0, 1), rows, of_inputs)",
            """
            from shardwright.model.recompute import part
            rows_RD = part("norms", lambda x: (self.router(x), dispatch(x.flatten(0, 1), rows))[1], x_BTD)
            """,
        ),
        f"{TESTS}:test_matmuls_and_routing_run_once_and_each_part_once_more",
    ),
    "routing is decided again with the whole layer": UnitBug(
        Mutation(f"{ROOM}:_Decisions.next", "self._taken == len(self._made)", "True"),
        f"{TESTS}:test_a_block_that_runs_again_as_a_whole_picks_experts_once",
    ),
    "what can be computed again is kept": UnitBug(
        Mutation(f"{ROOM}:_keep", "output is not None and output.version == tensor_version(x)", "False"),
        f"{TESTS}:test_the_model_of_the_benchmark_keeps_at_most_55_percent",
    ),
}
