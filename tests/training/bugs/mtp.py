"""Modules of multi-token prediction that read or predict other tokens, and their loss and gradients."""

from tests.mutation import Mutation
from tests.training.bugs.bug import (
    ONE,
    PASSES,
    PP,
    SP,
    TIED,
    TRAINER,
    ZB_V,
    ZERO_0,
    ZIGZAG,
    Bug,
    UnitBug,
)

AHEAD = f"{PASSES}:look_ahead"
READ, PREDICTED = (
    "F.pad(tokens_ABT[..., k:], (0, k), value=BEYOND)",
    "F.pad(targets_ABT[..., k:], (0, k), value=IGNORE)",
)
MODULE, TWO = {"mtp_modules": 1}, {"mtp_modules": 2}
EQUATIONS = "tests/model/test_mtp.py:test_logits_are_those_of_the_equations"
MODULE_FLOPS = "tests/model/test_mtp.py:test_each_module_has_the_flops_of_a_layer_its_projection_and_its_logits"
TRAIN_FLOPS, PARAMETERS = "shardwright.model.spec:ModelSpec.train_flops_per_token", "6 * self.n_matmul_parameters"

SCALE = {
    "the loss of a module of multi-token prediction is divided by the targets of one data rank": Bug(
        Mutation(
            f"{TRAINER}._loss",
            "self.model.sum_over_samples(self._on_device(torch.stack(counts)))",
            "2 * torch.stack(counts)",
        ),
        [ZERO_0],
        spec=MODULE,
    ),
    "the loss of a module of multi-token prediction is divided by the targets of the next token": Bug(
        Mutation(f"{TRAINER}._loss", "targets_APBT.unbind(1)[1:]", "targets_APBT.unbind(1)[:-1]"),
        [ONE],
        spec=MODULE,
    ),
    "the weight of multi-token prediction is applied twice": Bug(
        Mutation(f"{TRAINER}._loss", "self.model.spec.mtp_weight", "self.model.spec.mtp_weight ** 2"),
        [ONE],
        spec=MODULE,
    ),
    "the losses of modules of multi-token prediction are summed and not averaged": Bug(
        Mutation(
            f"{TRAINER}._loss",
            "self.loss_scale * self.model.spec.mtp_weight / len(counts)",
            "self.loss_scale * self.model.spec.mtp_weight",
        ),
        [ONE],
        spec=TWO,
    ),
    "MFU leaves out the attention of modules of multi-token prediction": UnitBug(
        Mutation(TRAIN_FLOPS, "self.n_blocks", "self.n_layers"), MODULE_FLOPS
    ),
    "MFU leaves out the logits of modules of multi-token prediction": UnitBug(
        Mutation(TRAIN_FLOPS, PARAMETERS, f"{PARAMETERS} - 6 * self.mtp_modules * self.vocab_size * self.d_model"),
        MODULE_FLOPS,
    ),
    "MFU has the logits of one module of multi-token prediction, however many there are": UnitBug(
        Mutation(
            TRAIN_FLOPS,
            PARAMETERS,
            f"{PARAMETERS} - 6 * max(0, self.mtp_modules - 1) * self.vocab_size * self.d_model",
        ),
        MODULE_FLOPS,
    ),
}
REDUCTION = {
    "the embedding's gradients in the first and in the last stage, which has a module of multi-token prediction, are "
    "not summed": Bug(
        Mutation(f"{TIED}.__init__", "parameter.requires_grad", "name != 'embedding.weight'"), [PP], spec=MODULE
    ),
    "the embedding's gradient in a last stage with a module of multi-token prediction is lost where its rank has the "
    "first": Bug(Mutation(f"{TIED}.sum_on_rank", "self._pairs", "[]"), [ZB_V], spec=MODULE | {"n_layers": 4}),
    "gradients of the projection of multi-token prediction on token shards are not summed": Bug(
        Mutation(
            "shardwright.parallel.model:sum_replica_gradients",
            "parameter.grad is not None",
            "parameter.grad is not None and 'projection' not in name",
        ),
        [SP],
        spec=MODULE,
    ),
}
SHARD = {
    "at the edge of a chunk of cp a module of multi-token prediction reads the next token of the rank": Bug(
        Mutation(
            f"{TRAINER}._microbatches",
            "ahead_AKBT[..., positions_T]",
            "look_ahead(tokens_ABT, tokens_ABT, ahead_AKBT.shape[1])[0]",
        ),
        [ZIGZAG],
        spec=MODULE,
    ),
}
ORDER = {
    "a module of multi-token prediction has the hidden vector before the embedding": UnitBug(
        Mutation(
            "shardwright.model.transformer:MTPModule.forward",
            "(self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD))",
            "(self.hidden_norm(x_BTD), self.embedding_norm(embedded_BTD))",
        ),
        EQUATIONS,
    ),
    "the norms of a module of multi-token prediction are exchanged": UnitBug(
        Mutation(
            "shardwright.model.transformer:MTPModule.forward",
            "(self.embedding_norm(embedded_BTD), self.hidden_norm(x_BTD))",
            "(self.hidden_norm(embedded_BTD), self.embedding_norm(x_BTD))",
        ),
        EQUATIONS,
    ),
    "modules of multi-token prediction read the output of the last norm": UnitBug(
        Mutation(
            "shardwright.model.transformer:Transformer.finish",
            "self.predict_ahead(x_BTD, ahead_KBT, positions_T, random_keys_B, documents, real)",
            "self.predict_ahead(self.norm(x_BTD), ahead_KBT, positions_T, random_keys_B, documents, real)",
        ),
        EQUATIONS,
    ),
    "the second module of multi-token prediction reads the model's output and not the first's": UnitBug(
        Mutation(
            "shardwright.model.transformer:Transformer.predict_ahead",
            "x_BTD, normed_BTD = module(x_BTD, self.embed_tokens(tokens_BT), positions_T, also[0], keys_2B, *also[1:])",
            "_, normed_BTD = module(x_BTD, self.embed_tokens(tokens_BT), positions_T, also[0], keys_2B, *also[1:])",
        ),
        EQUATIONS,
    ),
}
MASK = {
    "a module of multi-token prediction predicts across a token that does not count": Bug(
        Mutation(AHEAD, "there_ABT.where(targets[-1] != IGNORE, IGNORE)", "there_ABT"), [ONE], spec=MODULE
    ),
    "at the end of a sequence a module of multi-token prediction predicts its beginning": Bug(
        Mutation(AHEAD, PREDICTED, "targets_ABT.roll(-k, -1)"), [ONE], spec=MODULE
    ),
}
OFF_BY_ONE = {
    "a module of multi-token prediction reads one token too early": Bug(
        Mutation(AHEAD, READ, "F.pad(tokens_ABT[..., k - 1 :], (0, k - 1), value=BEYOND)"), [ONE], spec=TWO
    ),
    "a module of multi-token prediction reads one token too late": Bug(
        Mutation(AHEAD, READ, "F.pad(tokens_ABT[..., k + 1 :], (0, k + 1), value=BEYOND)"), [ONE], spec=MODULE
    ),
    "a module of multi-token prediction predicts the token that it reads": Bug(
        Mutation(AHEAD, PREDICTED, "targets_ABT"), [ONE], spec=MODULE
    ),
}
