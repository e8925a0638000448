"""Norms after branches and over all heads, constant factors and activations that are wrong on ranks or in the model."""

from shardwright.layout.layout import Layout
from shardwright.model.sections import RopeScaling
from tests.mutation import Mutation
from tests.training.bugs.bug import APPLY, SP, TENSOR, TP, ZIGZAG, Bug, UnitBug

WHOLE = {"qk_norm": True, "qk_norm_whole": True, "norm_position": "both"}
PARALLEL = {"parallel_branches": True}
DOWN = "linear(f'{name}.down', spec.d_model, width, 'row', f'{name}.inner', std=residual_std(spec), bias=spec.bias"
SUMS, NORM = f"{TENSOR}:_SumOverRanks", f"{TENSOR}:ShardedRMSNorm.forward"
COPIED = Layout(tp=4, sequence_parallel=True)
BLOCK, NORMS = "shardwright.model.transformer:Block.branch", "shardwright.model.norm"
LOGITS = "tests/hugging_face/test_families.py:test_logits_are_those_of_transformers"
SWITCHES, NETWORK = "tests/model/test_switches.py", "shardwright.model.feed_forward:FeedForward"

LONGROPE = RopeScaling(
    kind="longrope", factor=2.0, original_max_seq_len=8, short_factor=(1.0,) * 4, long_factor=(1.0, 1.5, 3.0, 9.0)
)
SQUARES = "x_wide_BTF.square().sum(-1, keepdim=True)"

REDUCTION = {
    "a norm over all heads has the squares of one rank": Bug(
        Mutation(f"{SUMS}.forward", "start_sum(x.clone(), group).wait()", "x * group.size()"), [TP, SP], spec=WHOLE
    ),
    "the gradient of the squares of a norm over all heads is of one rank": Bug(
        Mutation(
            f"{SUMS}.backward",
            "start_sum(dy.clone(memory_format=torch.contiguous_format), ctx.group).wait()",
            "dy.clone()",
        ),
        [TP, SP],
        spec=WHOLE,
    ),
    "a norm over all keys counts a kv head once for each of its replicas": Bug(
        Mutation(NORM, f"{SQUARES} / self.copies", SQUARES), [COPIED], spec=WHOLE
    ),
}
SCALE = {
    "a norm over all heads is divided by the features of one rank": Bug(
        Mutation(NORM, "squares_BT1 / self.width", "squares_BT1 / x_BTF.shape[-1]"), [TP], spec=WHOLE
    ),
    "a norm of each head has the weights of the first head": UnitBug(
        Mutation(f"{NORMS}:HeadLayerNorm.forward", "weight.view(-1, self.head_dim)", "weight[: self.head_dim]"),
        LOGITS,
        ("cohere, norms of heads",),
    ),
    "a norm of each head does not subtract the mean": UnitBug(
        Mutation(f"{NORMS}:HeadLayerNorm.forward", "F.layer_norm", "F.rms_norm"), LOGITS, ("cohere, norms of heads",)
    ),
    "the weights of a norm of each head have the file's order of rotated elements": UnitBug(
        Mutation(
            "shardwright.hugging_face.reader:MappedTensors._box",
            "box.index_select(dim, torch.tensor([place - low for place in places], dtype=torch.long))",
            "box if tensor.folded else box.index_select("
            "dim, torch.tensor([place - low for place in places], dtype=torch.long))",
        ),
        LOGITS,
        ("cohere, norms of heads",),
    ),
    "branches are divided by residual_scale": UnitBug(
        Mutation(BLOCK, "y_BTD * self.branch_scale", "y_BTD / self.branch_scale"), LOGITS, ("granite",)
    ),
    "the embedding is not scaled": UnitBug(
        Mutation(
            "shardwright.model.transformer:Transformer.embed_tokens",
            "x_BTD * self.spec.embedding_scale",
            "x_BTD",
        ),
        LOGITS,
        ("granite",),
    ),
    "logits are not divided by logit_divisor": UnitBug(
        Mutation("shardwright.model.transformer:Transformer.__init__", "last_norm(spec)", "residual_norm(spec)"),
        LOGITS,
        ("granite",),
    ),
    "queries are not scaled": UnitBug(
        Mutation("shardwright.model.attention:_place", "x_BTHC * scale", "x_BTHC"), LOGITS, ("granite",)
    ),
    "the output of a branch has no norm": UnitBug(
        Mutation(BLOCK, "_normed(post_norm, y_BTD)", "y_BTD"), LOGITS, ("olmo2",)
    ),
    "a norm with an offset multiplies by w": UnitBug(
        Mutation(f"{NORMS}:OffsetRMSNorm.forward", "1.0 + self.weight.to(wide)", "self.weight.to(wide)"),
        f"{SWITCHES}:test_a_norm_with_an_offset_multiplies_by_1_plus_w",
    ),
    "layers without rotation are counted from 0": UnitBug(
        Mutation("shardwright.model.sizes:ModelSizes.rotates", "(layer + 1)", "layer"), LOGITS, ("smollm3",)
    ),
    "the first stage rotates every layer": Bug(
        Mutation(
            "shardwright.model.transformer:Block.forward",
            "rotary_2TC if self.rotates else None",
            "rotary_2TC if self.rotates or torch.distributed.get_rank() == 0 else None",
        ),
        [Layout(pp=2)],
        spec={"nope_interval": 2},
    ),
    "a rotated part has the frequencies of the whole head": UnitBug(
        Mutation(
            "shardwright.model.rotary:frequencies",
            "torch.arange(0, spec.rope_dim, 2, device=device, dtype=torch.float64) / spec.rope_dim",
            "torch.arange(0, spec.rope_dim, 2, device=device, dtype=torch.float64) / spec.head_dim",
        ),
        LOGITS,
        ("phi3, partial rotation",),
    ),
    "the last elements of a head are rotated": UnitBug(
        Mutation(
            "shardwright.model.attention:rotate",
            "torch.cat((rotate(x_BTHC[..., :rotated], rotary_2TC), x_BTHC[..., rotated:]), -1)",
            "torch.cat((x_BTHC[..., :-rotated], rotate(x_BTHC[..., -rotated:], rotary_2TC)), -1)",
        ),
        LOGITS,
        ("phi3, partial rotation",),
    ),
    "longrope takes the tokens of a rank of cp for the sequence": Bug(
        Mutation(f"{APPLY}:_attend_over_cp", "partial(operator.mul, layout.cp)", "partial(operator.mul, 1)"),
        [ZIGZAG],
        spec={"rope_scaling": LONGROPE},
    ),
    "long sequences are rotated by the short factors": UnitBug(
        Mutation("shardwright.model.sections:RopeScaling.factors", "n_tokens > self.original_max_seq_len", "False"),
        LOGITS,
        ("phi3, longrope, long",),
    ),
    "queries and keys are not scaled by longrope": UnitBug(
        Mutation(
            "shardwright.model.transformer:rotary_table",
            "table * spec.rope_scaling.attention_scale",
            "table * (1.0 if spec.rope_scaling.kind == 'longrope' else spec.rope_scaling.attention_scale)",
        ),
        LOGITS,
        ("phi3, longrope, attention factor",),
    ),
    "the network of parallel branches reads the residual stream": UnitBug(
        Mutation("shardwright.model.transformer:Block.forward", "not self.parallel_branches", "True"),
        LOGITS,
        ("cohere2",),
    ),
    "networks of parallel branches give tokens in another order than attention": Bug(
        Mutation(
            "shardwright.model.modules:feed_forward",
            f"{DOWN}, ordered=ordered)",
            f"{DOWN}, ordered=False)",
        ),
        [SP],
        spec=PARALLEL,
        crashes=True,
    ),
    "logits of Cohere are divided by logit_scale": UnitBug(
        Mutation("shardwright.hugging_face.cohere:complete", "1 / config['logit_scale']", "config['logit_scale']"),
        LOGITS,
        ("cohere2",),
    ),
    "layers without a window rotate": UnitBug(
        Mutation(
            "shardwright.hugging_face.cohere:complete_windows",
            "{'_nope_interval': config['_global_interval'], '_nope_layers': listed}",
            "{'_nope_interval': 0, '_nope_layers': []}",
        ),
        LOGITS,
        ("cohere2",),
    ),
    "the embedding of Gemma is not scaled": UnitBug(
        Mutation("shardwright.hugging_face.gemma:complete", "math.sqrt(config.get('hidden_size', 0))", "1.0"),
        LOGITS,
        ("gemma",),
    ),
    "keys have no bias": UnitBug(
        Mutation(
            "shardwright.model.attention:Attention.__init__",
            "self.k = Linear(d, spec.n_kv_heads * c, bias=bias)",
            "self.k = Linear(d, spec.n_kv_heads * c, bias=spec.bias)",
        ),
        LOGITS,
        ("qwen2",),
    ),
    "relu2 is gelu": UnitBug(
        Mutation(f"{NETWORK}.__init__", "ACTIVATIONS[spec.activation]", "ACTIVATIONS['gelu']"),
        f"{SWITCHES}:test_networks_are_their_formulas",
        ("relu2",),
    ),
    "the activation is of up instead of gate": UnitBug(
        Mutation(
            f"{NETWORK}.forward",
            "part('activation', self.activate, self.gate(x_BTD), self.up(x_BTD))",
            "part('activation', self.activate, self.up(x_BTD), self.gate(x_BTD))",
        ),
        f"{SWITCHES}:test_networks_are_their_formulas",
        ("geglu_tanh",),
    ),
}
