"""Bugs of adapters: of their sums over tp, of their scale, of frozen weights, and of checkpoints that have adapters
alone."""

from dataclasses import replace
from typing import Any

from shardwright.layout.layout import Layout
from shardwright.model.lora_sizes import LoraSpec
from tests.mutation import Mutation
from tests.training.bugs.bug import EP, EXPERTS, ONE, PP, SP, STATE, TENSOR, TP, ZERO_3, AnyBug, Bug, ResumeBug, UnitBug
from tests.training.worlds import SPEC

_LORA: dict[str, Any] = {"lora": LoraSpec(rank=3, alpha=6.0)}
_OF_EXPERTS: dict[str, Any] = {"lora": LoraSpec(rank=3, alpha=6.0, targets=("experts",)), "moe": EXPERTS}
_DROPPED: dict[str, Any] = {"lora": LoraSpec(rank=3, alpha=6.0, dropout=0.3)}
_QUANTISED: dict[str, Any] = {"lora": LoraSpec(rank=3, alpha=6.0, base="nf4"), "d_ffn": 160}
_IN_8_BITS = _QUANTISED | {"lora": LoraSpec(rank=3, alpha=6.0, base="int8")}
_BASE_TESTS = "tests/training/test_quantised_base.py"
_DORA: dict[str, Any] = {"lora": LoraSpec(rank=3, alpha=6.0, dora=True)}
_DENSE = "tests/training/test_lora.py:check_that_dora_computes_as_dense_weights"
_SPLIT, _TESTS = "shardwright.split.tensor:summed_over", "tests/training/test_lora.py"

SCALE: dict[str, AnyBug] = {
    "the adapter of a row-parallel matrix is counted twice": Bug(
        Mutation(f"{TENSOR}:_row_product", "y_BTD.add_(also_BTD)", "y_BTD.add_(2 * also_BTD)"), [TP, SP], spec=_LORA
    ),
    "the output of an adapter has no scale": UnitBug(
        Mutation("shardwright.model.matmul:Adaptable.widen", "z * self.lora_scale", "z"),
        f"{_TESTS}:test_an_adapter_computes_as_the_sum_of_base_and_product",
    ),
    "the output of an adapter of experts has no scale": UnitBug(
        Mutation("shardwright.model.experts:ExpertMatrix.multiply", "z_Rr * self.scale", "z_Rr"),
        f"{_TESTS}:test_an_adapter_computes_as_the_sum_of_base_and_product",
    ),
    "the last matrix of experts has no adapter": UnitBug(
        Mutation(
            "shardwright.model.experts:Experts.forward",
            "self._matrix('down').multiply(inner_RF, counts_E, self.down_recipe)",
            "self._matrix('down')._replace(lora_a=None).multiply(inner_RF, counts_E, self.down_recipe)",
        ),
        f"{_TESTS}:test_an_adapter_computes_as_the_sum_of_base_and_product",
    ),
    "an adapter of experts is merged with the A of the first expert": UnitBug(
        Mutation(
            "shardwright.training.adapters:BaseWithAdapters.read",
            "(*offsets[:-2], 0, offsets[-1])",
            "(*(0 for _ in offsets[:-2]), 0, offsets[-1])",
        ),
        "tests/hugging_face/test_peft.py:check_that_an_adapter_passes_unchanged",
        given=("mixtral",),
    ),
    "the norm of a row in DoRA is not a constant": UnitBug(
        Mutation("shardwright.model.matmul:Adaptable.magnitude_change", "torch.no_grad()", "torch.enable_grad()"),
        _DENSE,
        given=({},),
    ),
    "DoRA divides by the norm of a row of the base alone": UnitBug(
        Mutation(
            "shardwright.model.matmul:squares_of_rows",
            "squares_F + added_F",
            "squares_F",
        ),
        _DENSE,
        given=({},),
    ),
    "DoRA scales the bias": UnitBug(
        Mutation("shardwright.model.matmul:with_magnitude", "scaled + bias_F", "scaled + bias_F * (1 + change_F)"),
        _DENSE,
        given=({"bias": True},),
    ),
    "DoRA scales the bias of a column-parallel matrix and adds it again": Bug(
        Mutation(
            f"{TENSOR}:ColumnLinear.added_bias",
            "self.bias is None or hasattr(self, 'lora_magnitude')",
            "self.bias is None",
        ),
        [TP],
        spec=_DORA | {"bias": True},
    ),
    "the input's gradient lacks the part through an adapter": Bug(
        Mutation(
            f"{TENSOR}:_input_gradient",
            "zip(dys_BTF, weights, recipes, strict=True)",
            "[each for each in zip(dys_BTF, weights, recipes, strict=True) if not each[1].requires_grad]",
        ),
        [TP, SP],
        spec=_LORA,
    ),
}
MASK: dict[str, AnyBug] = {
    "all adapters of a layer drop the same elements": UnitBug(
        Mutation(
            "shardwright.model.dropout:InputDropout.mask", "matrix_keys(placed.keys_B, self.key)", "placed.keys_B"
        ),
        f"{_TESTS}:check_that_adapters_drop_their_inputs",
    ),
    "adapters drop elements in evaluation": UnitBug(
        Mutation(
            "shardwright.model.matmul:Adaptable.input_mask",
            "self.dropout is not None and self.training",
            "self.dropout is not None",
        ),
        f"{_TESTS}:check_that_adapters_drop_their_inputs",
    ),
    "the dropped input of a row-parallel adapter begins with the first feature on every rank": Bug(
        Mutation(
            "shardwright.model.dropout:InputDropout.mask",
            "InputMask(Draw(matrix_keys(placed.keys_B, self.key), placed.positions_T), self.p, self.first)",
            "InputMask(Draw(matrix_keys(placed.keys_B, self.key), placed.positions_T), self.p, 0)",
        ),
        [TP],
        spec=_DROPPED,
    ),
    "the gradient of a dropped input passes where nothing was kept": UnitBug(
        Mutation("shardwright.model.matmul:input_gradient", "recipe.drop(dy @ weight)", "(dy @ weight)"),
        f"{_TESTS}:check_gradients_of_a_dropped_input",
    ),
    "the A of an adapter is trained on the whole input": UnitBug(
        Mutation("shardwright.model.matmul:weight_gradient", "x = recipe.drop(x)", "pass"),
        f"{_TESTS}:check_gradients_of_a_dropped_input",
    ),
    "tokens that are gathered by rank are dropped in the order of the sequence": Bug(
        Mutation(
            f"{TENSOR}:TensorAxis.drawn",
            "positions_BT.unflatten(-1, (n, -1)).transpose(0, 1)",
            "positions_BT.unflatten(-1, (n, -1))",
        ),
        [SP],
        spec=_DROPPED,
    ),
    "a block that runs again drops the inputs of adapters as the last one did": Bug(
        Mutation("shardwright.model.dropout:drawn_again", "before, _draw = _draw, of_now", "before = _draw"),
        [Layout(recompute="full")],
        spec=_DROPPED,
    ),
}
DTYPE: dict[str, AnyBug] = {
    "the columns of a shard of quantised rows begin where its first block does": Bug(
        Mutation(
            "shardwright.model.quantised:decode",
            "stored.columns.start - stored.blocks.start * BLOCK",
            "0",
        ),
        [TP, SP],
        spec=_QUANTISED,
    ),
    "the scale of a quantised row comes from its shard over tp alone": Bug(
        Mutation(
            "shardwright.model.quantised:encode",
            "wide.abs().amax(-1, keepdim=True)",
            "wide[..., columns.start : columns.stop].abs().amax(-1, keepdim=True)",
        ),
        [TP],
        spec=_IN_8_BITS,
    ),
    "every rank of ZeRO has the first rows of a quantised matrix": Bug(
        Mutation("shardwright.model.quantised:fill_box", "offsets[0] + begin", "begin"), [ZERO_3], spec=_QUANTISED
    ),
    "all ranks of tp decode the first shard of a quantised row": Bug(
        Mutation("shardwright.parallel.stored:store_base", "tp.rank()", "0"), [TP], spec=_QUANTISED
    ),
    "weights are rounded to the next value of nf4 and not to the nearest": UnitBug(
        Mutation(
            "shardwright.model.quantised:_tables", "(tables[name][1:] + tables[name][:-1]) / 2", "tables[name][1:]"
        ),
        "tests/model/test_quantised.py:check_that_every_weight_is_the_nearest_value",
    ),
    "adapters are merged into a base that is not quantised": UnitBug(
        Mutation(
            "shardwright.training.adapters:_read_base",
            "fill_box(row_of(weights.spec, name), box, offsets, weights.shapes[name], partial(weights.read, name))",
            "box.copy_(weights.read(name, offsets, shape))",
        ),
        f"{_BASE_TESTS}:check_that_merged_weights_compute_as_the_run",
    ),
}
REDUCTION: dict[str, AnyBug] = {
    "the gradients of replicated matrices of adapters are not summed over tp": Bug(
        Mutation(_SPLIT, "row.split == 'per_head'", "row.split == 'per_head' and not row.adapter"), [TP, SP], spec=_LORA
    ),
    "the gradient of B of replicated kv heads is not summed": Bug(
        Mutation(_SPLIT, "kv_replicas(n_kv_heads, layout.tp) > 1", "not row.adapter"),
        [Layout(tp=4, sequence_parallel=True)],
        spec=_LORA,
    ),
    "DoRA divides the outputs of a row-parallel matrix by the norms of this rank's columns": Bug(
        Mutation(
            f"{TENSOR}:RowLinear.forward",
            "self.magnitude_change(self.recipe, lambda squares_2D: start_sum(squares_2D, self.axis.group).wait())",
            "self.magnitude_change(self.recipe)",
        ),
        [TP, SP],
        spec=_DORA,
    ),
    "the gradients of magnitudes are not summed over token shards": Bug(
        Mutation(_SPLIT, "layout.token_shards", "layout.token_shards and row.adapter != 'm'"), [SP], spec=_DORA
    ),
    "the adapter of a row-parallel matrix is left out of the sum": Bug(
        Mutation(f"{TENSOR}:_row_product", "y_BTD if also_BTD is None else y_BTD.add_(also_BTD)", "y_BTD"),
        [TP],
        spec=_LORA,
    ),
    "a stage without adapters adds to the norm of the gradients": Bug(
        Mutation("shardwright.parallel.norm:_no_square", "torch.zeros", "torch.ones"),
        [PP],
        spec={"lora": replace(_LORA["lora"], targets=("ffn",)), "moe": replace(EXPERTS, first_dense=1)},
    ),
    "compressed gradients have parts for frozen weights": Bug(
        Mutation("shardwright.parallel.compressed:Compression.apply", "[*compress(parts, trained)]", "parts"),
        [Layout(dp_shard=2, zero=3, compress_gradients="int8")],
        spec=_LORA,
        crashes=True,
    ),
}
SHARD: dict[str, AnyBug] = {
    "the experts of a rank compute with the A of its first expert": Bug(
        Mutation(
            "shardwright.model.experts:ExpertMatrix.multiply",
            "linear(x_RD, self.lora_a, None, counts_E)",
            "linear(x_RD, self.lora_a[:1].expand_as(self.lora_a).contiguous(), None, counts_E)",
        ),
        [EP],
        spec=_OF_EXPERTS,
    ),
    "the adapters of all experts are exported as the first one's": UnitBug(
        Mutation(
            "shardwright.hugging_face.peft:adapter_files",
            "ParameterPart(ours, expert, shape[0])",
            "ParameterPart(ours, expert and 0, shape[0])",
        ),
        "tests/hugging_face/test_peft.py:check_that_an_adapter_passes_unchanged",
        given=("mixtral",),
    ),
}
STALE: dict[str, AnyBug] = {
    "frozen weights have gradients": Bug(
        Mutation(f"{TENSOR}:plain_parameters", "parameter.requires_grad", "True"), [TP], spec=_LORA
    ),
}
RECOMPUTATION: dict[str, AnyBug] = {
    "experts that are recomputed have adapters without gradients": Bug(
        Mutation("shardwright.model.experts:ExpertMatrix.tensors", "self[:4]", "self[:2]"),
        [Layout(recompute="selective", recompute_modules=("experts",))],
        spec=_OF_EXPERTS,
    ),
    "the matmul that the recomputation skips lacks its adapter": Bug(
        Mutation(
            f"{TENSOR}:RowLinear.forward",
            "_row_product(x_BTF, weight, also_BTD, self.axis, recipe)",
            "_row_product(x_BTF, weight, None, self.axis, self.recipe)",
        ),
        [TP.changed(recompute="full")],
        spec=_LORA,
    ),
}
FILES: dict[str, AnyBug] = {
    "a part of a row is merged with the norm of that part": UnitBug(
        Mutation(
            "shardwright.hugging_face.adapter:MergedAdapter.merged",
            "columns if magnitude_F is None else (0, a_RD.shape[1])",
            "columns",
        ),
        "tests/hugging_face/test_adapter.py:check_boxes_with_dora",
        given=("llama",),
    ),
    "adapters are added to another base": UnitBug(
        Mutation(
            "shardwright.training.weights:AdaptedWeights.__init__",
            "fingerprint(self.base, frozen) != manifest.base.fingerprint",
            "False",
        ),
        f"{_TESTS}:check_that_another_base_is_refused",
    ),
}
RESUME: dict[str, AnyBug] = {
    "the B of adapters is not taken up": ResumeBug(
        Mutation(
            f"{STATE}:load",
            "read_into(folder, manifest, tensors, stored_tensors(trainer))",
            "read_into(folder, manifest, {k: v for k, v in tensors.items() if not k.endswith('lora_b')}, "
            "stored_tensors(trainer))",
        ),
        (ONE, ZERO_3),
        replace(SPEC, **_LORA),
    ),
    "the magnitudes of adapters are not taken up": ResumeBug(
        Mutation(
            f"{STATE}:load",
            "read_into(folder, manifest, tensors, stored_tensors(trainer))",
            "read_into(folder, manifest, {k: v for k, v in tensors.items() if not k.endswith('lora_magnitude')}, "
            "stored_tensors(trainer))",
        ),
        (ONE, ZERO_3),
        replace(SPEC, **_DORA),
    ),
}
