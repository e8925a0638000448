"""Bugs of the chunked loss: chunks left out, not accumulated, not reduced over tp, or each with its own divisor."""

from dataclasses import replace

import torch

from tests.mutation import Mutation
from tests.training.bugs.bug import ONE, PASSES, PP, SP, TP, ZB, ZERO_3, AnyBug, Bug, UnitBug

FORWARD, BACKWARD = (f"shardwright.parallel.loss:_ChunkedLossFunction.{name}" for name in ("forward", "backward"))
CHUNKS = {"loss_chunk_tokens": 3}

CHUNKS: dict[str, AnyBug] = {
    "the last chunk of the loss is left out": Bug(
        Mutation(FORWARD, "zip(*chunks, strict=True)", "zip(*(each[:-1] for each in chunks), strict=True)"),
        [replace(each, **CHUNKS) for each in (ONE, ZERO_3)],
    ),
    "the gradient of the head is that of the last chunk": Bug(
        Mutation(
            FORWARD,
            "matmul.weight_gradient(dlogits_Cv, x_CD, add_to=dweight_vD)",
            "dweight_vD.copy_(matmul.weight_gradient(dlogits_Cv, x_CD))",
        ),
        [replace(each, **CHUNKS) for each in (ONE, TP, PP)],
    ),
    "the softmax of the second chunk is not summed over tp": Bug(
        Mutation(FORWARD, "loss.of_chunk", "(partial(loss.of_chunk, group=None) if at == 2 else loss.of_chunk)"),
        [replace(each, **CHUNKS) for each in (TP, SP)],
    ),
    "the gradient of the head's input is not summed over tp": Bug(
        Mutation(FORWARD, "dx_BTD if summing is None else summing.wait()", "dx_BTD"), [replace(TP, **CHUNKS)]
    ),
    "the gradient of the head's input is summed over tp when the first chunk is done": Bug(
        Mutation(FORWARD, "at == len(chunks[0])", "at == 1"), [replace(TP, **CHUNKS)]
    ),
    "the gradient of each chunk is divided by its own target tokens": Bug(
        Mutation(
            FORWARD,
            "matmul.input_gradient(dlogits_Cv, weight_vD, add_to=dx_CD)",
            "matmul.input_gradient(dlogits_Cv.div_((targets_C != -100).sum().clamp(min=1)), weight_vD, add_to=dx_CD)",
        ),
        [replace(each, **CHUNKS) for each in (ONE, SP)],
    ),
    "masked targets of a chunk count as token 0": Bug(
        Mutation(FORWARD, "targets_BT.flatten()", "targets_BT.flatten().clamp(min=0)"),
        [replace(each, **CHUNKS) for each in (ONE, TP)],
    ),
    "the gradient of the head is not multiplied by that of the loss": Bug(
        Mutation(BACKWARD, "dweight_vD.mul_(ratio)", "dweight_vD.div_(factor)"),
        [replace(each, **CHUNKS) for each in (ONE, ZB)],
    ),
    "targets of a chunk are those of other tokens on token shards": Bug(
        Mutation(
            f"{PASSES}:ForwardBackward._loss_sum",
            "TensorAxis(tp, layout.token_shards)",
            "TensorAxis(tp, layout.token_shards, True)",
        ),
        [replace(SP, **CHUNKS)],
    ),
    "the compiled loss takes all tokens at once": UnitBug(
        Mutation("shardwright.parallel.loss:_in_parts", "n_tokens <= n_together", "True"),
        "tests/parallel/test_loss.py:test_compiled_the_loss_has_two_buffers_of_some_tokens_at_a_time",
        (torch.bfloat16,),
    ),
    "the compiled loss is that of the first tokens": UnitBug(
        Mutation(
            "shardwright.parallel.loss:_in_parts",
            "torch.cat([loss_of(*part) for part in parts])",
            "[loss_of(*part) for part in parts][0]",
        ),
        "tests/parallel/test_loss.py:test_compiled_the_loss_has_two_buffers_of_some_tokens_at_a_time",
        (torch.bfloat16,),
    ),
    "gradients of chunks are accumulated in 16 bits": UnitBug(
        Mutation(FORWARD, "torch.zeros_like(weight_vD, dtype=wide)", "torch.zeros_like(weight_vD)"),
        "tests/parallel/test_loss.py:test_the_heads_gradient_in_16_bits_is_rounded_once",
    ),
    "the gradient of an input that is not contiguous goes into a copy": UnitBug(
        Mutation(
            FORWARD,
            "torch.zeros_like(x_BTD, memory_format=torch.contiguous_format)",
            "torch.zeros_like(x_BTD)",
        ),
        "tests/parallel/test_loss.py:test_an_input_whose_tokens_are_not_one_after_another_has_the_same_gradient",
    ),
    "the logits of all chunks are kept": UnitBug(
        Mutation(FORWARD, "del dlogits_Cv", "ctx.kept = [*getattr(ctx, 'kept', []), dlogits_Cv]"),
        "tests/parallel/test_loss.py:test_the_peak_is_that_of_one_chunk_as_the_formula_says",
        (torch.float64,),
    ),
}
