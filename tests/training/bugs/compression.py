"""Bugs of compressed gradients and weights: rounded too often or another way, scales of other blocks, sums left out."""

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.parallel.test_compression import HOPS
from tests.training.bugs.bug import EXPERTS, LATENT, STATE, AnyBug, Bug, ResumeBug, UnitBug

_INTEGERS = "shardwright.parallel.compression:Integers"
_COMPRESSED, _SUMS = "shardwright.parallel.compressed", "shardwright.parallel.compression"
_WEIGHTS = [Layout(dp_shard=2, zero=3, compress_weights="int8"), Layout(dp_shard=2, zero=1, compress_weights="int8")]
_PRODUCTS = "shardwright.parallel.powersgd:PowerSGD.sum"
_THIN = [Layout(dp_replicate=2, compress_gradients="powersgd-2")]
_TOPK = "shardwright.parallel.topk:TopK"
_DISPATCH, _MIXTURE = Layout(dp_shard=2, zero=2, ep=2, compress_dispatch="fp8"), {"moe": EXPERTS}
_STAGES = Layout(pp=2, compress_pipeline="int8")
_LARGEST = [Layout(dp_replicate=2, compress_gradients="topk-2")]
_FORMULA = "tests/parallel/test_compression.py:test_integers_arrive_within_half_a_scale_of_their_block"
_SHOWN = "tests/parallel/test_compression.py:test_a_sum_shows_the_bug"

SHARD: dict[str, AnyBug] = {
    "PowerSGD splits stacked matrices at other rows": Bug(
        Mutation(
            "shardwright.parallel.powersgd:_matrices",
            "stacked.unflatten(-2, (row.heads, -1)).split([n for _, n in row.parts], -2)",
            "stacked.unflatten(-2, (row.heads, -1)).roll(1, -2).split([n for _, n in row.parts], -2)",
        ),
        _THIN,
        spec={"latent_attention": LATENT, "n_kv_heads": 3},
    ),
    "the largest elements of gradients arrive one place further": Bug(
        Mutation(
            f"{_TOPK}._set_gradient",
            "place_X.view(-1, self.k).long()",
            "place_X.view(-1, self.k).long().sub(1).relu()",
        ),
        _LARGEST,
    ),
    "the largest elements of gradients arrive in the next block": Bug(
        Mutation(f"{_TOPK}._set_gradient", "value_X.view(-1, self.k)", "value_X.view(-1, self.k).roll(1, 0)"), _LARGEST
    ),
    "weights arrive with the scales of other blocks": Bug(
        Mutation(f"{_INTEGERS}.decode", "next(scales_nB)", "next(scales_nB).roll(1, 1)"), _WEIGHTS
    ),
    "tokens reach their experts with the scales of other tokens": Bug(
        Mutation(f"{_INTEGERS}.decode", "next(scales_nB)", "next(scales_nB).roll(1, 0)"), [_DISPATCH], spec=_MIXTURE
    ),
    "tokens reach their experts without a scale": Bug(
        Mutation(f"{_INTEGERS}.decode", "x_nBE * scale_nB[..., None].to(_wide(dtype))", "x_nBE"),
        [_DISPATCH],
        spec=_MIXTURE,
    ),
    "tokens for a rank's own experts are not rounded": Bug(
        Mutation(
            "shardwright.parallel.expert:_AwaitAllToAll.forward",
            "decode_rows(arrived, codec, rows.shape[1], rows.dtype)",
            "torch.cat([rows.split(to)[r] if r == exchange.group.rank() else part for r, part in "
            "enumerate(decode_rows(arrived, codec, rows.shape[1], rows.dtype).split(from_))])",
        ),
        [_DISPATCH],
        spec=_MIXTURE,
    ),
    "activations arrive with the scales of other tokens": Bug(
        Mutation(f"{_INTEGERS}.decode", "next(scales_nB)", "next(scales_nB).roll(1, 0)"), [_STAGES]
    ),
    "activations have one scale for all tokens": Bug(
        Mutation(f"{_INTEGERS}.encode", "x_nBE.abs().amax(-1)", "x_nBE.abs().amax().expand(x_nBE.shape[:2])"),
        [_STAGES],
    ),
    "weights have one scale for all rows that a rank holds": Bug(
        Mutation(
            f"{_INTEGERS}.encode", "x_nBE.abs().amax(-1)", "x_nBE.abs().amax((1, 2))[:, None].expand(x_nBE.shape[:2])"
        ),
        _WEIGHTS,
    ),
    "a rank uses its own shard of the weights unrounded": Bug(
        Mutation(
            f"{_COMPRESSED}:_AllGather.__call__",
            "output_tensor.copy_(self.codec.decode(received, self.parts, output_tensor.dtype).view(-1))",
            "own = input_tensor.clone()\n"
            "output_tensor.copy_(self.codec.decode(received, self.parts, output_tensor.dtype).view(-1))\n"
            "input_tensor.copy_(own)",
        ),
        _WEIGHTS,
    ),
    "integers of 4 bits arrive in the order of their bytes' other half": UnitBug(
        Mutation(f"{_INTEGERS}._unpacked", "[packed % 16, packed // 16]", "[packed // 16, packed % 16]"), _FORMULA, (4,)
    ),
    "sums of integers take the parts of another node": UnitBug(
        HOPS["sums of integers take the parts of another node"], _SHOWN, put_in_there=True
    ),
}
REDUCTION: dict[str, AnyBug] = {
    "compressed shards of gradients are not summed over replicas": Bug(
        Mutation("shardwright.parallel.data:Sharded.end_step", "self.over_replicas.sum(self.groups)", "None"),
        [Layout(dp_replicate=2, dp_shard=2, zero=2, compress_gradients="bf16")],
    ),
    "a rank keeps the compressed sum that it sends to its replicas unrounded": Bug(
        Mutation(
            f"{_SUMS}:start_sum",
            "return codec.decode(sent, parts, x_nK.dtype)",
            "found = codec.decode(sent, parts, x_nK.dtype)\nfound[group.rank()] = sums_1K[0]\nreturn found",
        ),
        [Layout(dp_replicate=2, compress_gradients="bf16")],
    ),
    "of two ranks' largest elements at one place one arrives": Bug(
        Mutation(f"{_TOPK}._set_gradient", "sum_BE.scatter_add_", "sum_BE.scatter_"), _LARGEST
    ),
    "a rank adds its own largest elements alone": Bug(
        Mutation(
            f"{_TOPK}._set_gradient",
            "zip(value_nX, place_nX, strict=True)",
            "zip(value_nX[:1], place_nX[:1], strict=True)",
        ),
        _LARGEST,
    ),
    "the largest elements of gradients are chosen by sign": Bug(
        Mutation(
            f"{_TOPK}._take_largest",
            "blocks_BE.abs().topk(self.k, sorted=False)",
            "blocks_BE.topk(self.k, sorted=False)",
        ),
        _LARGEST,
    ),
    "what goes between nodes has not been summed in them": UnitBug(
        HOPS["what goes between nodes has not been summed in them"], _SHOWN, put_in_there=True
    ),
}
DTYPE: dict[str, AnyBug] = {
    "gradients that travel in bf16 are summed in it": Bug(
        Mutation(
            f"{_COMPRESSED}:reduce_scatter",
            "codec.decode(received, parts, kept_K.dtype)",
            "codec.decode(received, parts, torch.bfloat16)",
        ),
        [Layout(dp_shard=4, zero=1, compress_gradients="bf16")],
    ),
    "weights are truncated to integers": Bug(
        Mutation(f"{_INTEGERS}._rounded", "x_nBE.round()", "x_nBE.trunc()"), [*_WEIGHTS, _STAGES]
    ),
    "activations arrive in bf16": Bug(
        Mutation(f"{_INTEGERS}.decode", "x_nBE.to(dtype)", "x_nBE.bfloat16().to(dtype)"), [_STAGES]
    ),
    "tokens reach their experts in bf16": Bug(
        Mutation(f"{_INTEGERS}.decode", "x_nBE.to(dtype)", "x_nBE.bfloat16().to(dtype)"), [_DISPATCH], spec=_MIXTURE
    ),
    "tokens reach their experts in the other type of fp8": Bug(
        Mutation(
            f"{_SUMS}:Floats._rounded", "x_nBE.float().to(torch.float8_e4m3fn)", "x_nBE.float().to(torch.float8_e5m2)"
        ),
        [_DISPATCH],
        spec=_MIXTURE,
    ),
    "gradients of rows are sent in fp8 too": Bug(
        Mutation(
            "shardwright.parallel.expert:_AwaitAllToAll.backward",
            "_start(grads[0], ctx.from_, ctx.to, ctx.exchange.group)",
            "_start(grads[0].to(torch.float8_e4m3fn).to(grads[0].dtype), ctx.from_, ctx.to, ctx.exchange.group)",
        ),
        [_DISPATCH],
        spec=_MIXTURE,
    ),
    "scales of blocks are rounded to bf16": Bug(
        Mutation(
            f"{_INTEGERS}.encode",
            "(x_nBE.abs().amax(-1).to(_wide(x_nP.dtype)) / self.largest).float()",
            "(x_nBE.abs().amax(-1).to(_wide(x_nP.dtype)) / self.largest).bfloat16().float()",
        ),
        _WEIGHTS,
    ),
    "sums of integers are rounded to bf16": UnitBug(
        HOPS["sums of integers are rounded to bf16"], _SHOWN, put_in_there=True
    ),
    "a block with an infinite element arrives as zeros": UnitBug(
        Mutation(
            f"{_INTEGERS}.decode",
            "scale_nB[..., None].to(_wide(dtype))",
            "scale_nB[..., None].to(_wide(dtype)).nan_to_num()",
        ),
        "tests/parallel/test_compression.py:test_what_is_no_number_arrives_as_none",
        (float("inf"),),
    ),
}
STALE: dict[str, AnyBug] = {
    "PowerSGD forgets what it has not sent": Bug(
        Mutation(_PRODUCTS, "member.error.add_(member.parameter.grad)", "member.error.copy_(member.parameter.grad)"),
        _THIN,
    ),
    "top-k forgets what it has not sent": Bug(
        Mutation(
            f"{_TOPK}._take_largest",
            "member.error.add_(local_part(gradient))",
            "member.error.copy_(local_part(gradient))",
        ),
        _LARGEST,
    ),
    "top-k keeps what it has sent": Bug(
        Mutation(f"{_TOPK}._take_largest", "blocks_BE.scatter(1, places_BK, 0.0)", "blocks_BE"), _LARGEST
    ),
    "PowerSGD takes what all ranks sent from each rank's error": Bug(
        Mutation(_PRODUCTS, "_pairs(p, own_q)", "_pairs(p, q)"), _THIN
    ),
    "PowerSGD begins every step with the same basis": Bug(
        Mutation(_PRODUCTS, "member.bases.copy_(torch.cat(chosen))", "None"), _THIN
    ),
    "PowerSGD multiplies by columns that are not orthonormal": Bug(
        Mutation(_PRODUCTS, "[_orthonormal(p_BNR) for p_BNR in group]", "list(group)"), _THIN
    ),
}
RESUME: dict[str, AnyBug] = {
    "what PowerSGD has not sent is lost on resume": ResumeBug(
        Mutation(f"{STATE}:named_tensors", "tensors | {f'{COMPRESSION}{k}': v for k, v in kept.items()}", "tensors"),
        (_THIN[0], _THIN[0]),
    ),
}
