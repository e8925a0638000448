"""Bugs of Muon: of which elements are one matrix, and of the way of a shard to its owner and back. Some shipped in
other systems and trained on without an error (Megatron-LM 7117, DeepSpeed 8384, torchtitan 4532)."""

from dataclasses import replace

from shardwright.layout.layout import Layout
from tests.mutation import Mutation
from tests.training.bugs.bug import EVEN, EXPERTS, LATENT, TP, AnyBug, Bug, UnitBug

_EXCHANGE, _MUON = "shardwright.parallel.whole_matrices", "shardwright.training.optimizers.muon"
_BY_HAND = "tests/training/test_muon.py:test_each_logical_matrix_is_updated_by_itself"
_LATENT, _EXPERTS = replace(EVEN, n_kv_heads=4, latent_attention=LATENT), replace(EVEN, moe=EXPERTS)
_SHARDED = Layout(dp_shard=2, zero=2)


SHARD: dict[str, AnyBug] = {
    "Muon makes each shard of rows orthogonal by itself": Bug(
        Mutation(
            f"{_EXCHANGE}:_axes_of", "cut.dim == 0 and parameter.dim() == 3", "cut.dim == 0 or parameter.dim() == 3"
        ),
        [TP, _SHARDED],
        optimizer="muon",
    ),
    "Muon scales an update by the shape of the shard": Bug(
        Mutation(
            f"{_MUON}:Muon._apply",
            "update.to(weights.dtype)",
            "update.to(weights.dtype) * (max(weights.shape[-2:]) / max(self._matrices[number].shape[-2:])) ** 0.5",
        ),
        [TP],
        optimizer="muon",
    ),
    "Muon takes parts of a stacked matrix for one": UnitBug(
        Mutation(f"{_MUON}:map_logical_matrices", "len(row.parts) < 2", "len(row.parts) < 3"),
        _BY_HAND,
        (_LATENT,),
    ),
    "Muon normalises all experts by one norm": UnitBug(
        Mutation(f"{_MUON}:orthogonal", "x.norm(dim=(-2, -1), keepdim=True)", "x.norm()"),
        _BY_HAND,
        (_EXPERTS,),
    ),
}
ORDER: dict[str, AnyBug] = {
    "the owner of a matrix puts its shards in the reverse order": Bug(
        Mutation(f"{_EXCHANGE}:_exchange", "torch.cat(parts, axis.dim)", "torch.cat(parts[::-1], axis.dim)"),
        [TP, _SHARDED],
        optimizer="muon",
    ),
    "updates come back in the order of the owners": Bug(
        Mutation(
            f"{_EXCHANGE}:_exchange",
            "[results[i] for i in range(len(matrices))]",
            "[results[i] if results[i].shape != results[j].shape else results[j]"
            " for i, j in zip(range(len(matrices)), [i for indices in owned for i in indices])]",
        ),
        [_SHARDED],
        optimizer="muon",
    ),
}
STALE: dict[str, AnyBug] = {
    "Muon steps along the momentum without the last gradient": UnitBug(
        Mutation(f"{_MUON}:Muon._direction", "gradient.lerp(momentum, mu)", "momentum.clone()"),
        _BY_HAND,
        (EVEN,),
    ),
}
SCALE: dict[str, AnyBug] = {
    "parameters beside Muon's take its learning rate": UnitBug(
        Mutation("shardwright.training.optimizer:parameter_groups", "config.lr_scale_of(row)", "1.0"),
        _BY_HAND,
        (EVEN,),
    ),
}
