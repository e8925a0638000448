"""Activation memory outside of the layers: dropout mask of the embedding, messages of stages, head and loss.

Notation of cost/activations.py.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.cost import ledger
from shardwright.cost.activations import symbols
from shardwright.cost.job import Candidates, Floats, Job
from shardwright.cost.ledger import Formulas
from shardwright.cost.parameters import vocabulary_rows


@dataclass(frozen=True)
class EndActivations:
    """Bytes outside of the layers. `first`: a dropout mask after the embedding; `last`: input and output of the last
    norm; `sent`: the output of a stage, if it is kept after the send; `received`: the input of a stage, if it is in a
    buffer for messages; `logits`: kept from the loss to its backward pass, `waiting_logits`: from there to W; `loss`:
    temporary buffers of the loss; `to_head`: the gradient of the head's input, or the gathered input, and this rank's
    tokens of the gradient; `summed`: with `to_head`, the gradient that is being summed over tp, before the gradient of
    the head's matrix exists; `freed`: the part of `logits` that is freed before both."""

    first: Floats
    last: Floats
    sent: Floats
    received: Floats
    logits: Floats
    waiting_logits: Floats
    loss: Floats
    to_head: Floats
    summed: Floats
    freed: Floats


def ends(job: Job, candidates: Candidates) -> EndActivations:
    """Return the activations before the first layer and after the last.

    The loss overwrites logits with their gradient, and copies a part of 16-bit logits to fp32 at a time. In other
    systems all logits are copied, and the softmax is kept; `Stack.logit_peak_bytes` is the maximum of logits, copies
    and gradients together. In fp32 there are no copies, but softmax and gradients. Modules of multi-token prediction
    have logits of their own.

    A chunked loss (`layout.loss_chunk_tokens`) has the logits of C tokens, and the temporary tensors of its sums. It
    keeps the gradients of the head's input and matrix instead of logits; the matrix gradient is a sum in at least 32
    bits.
    """
    stack, e = job.stack, job.element_bytes
    kept = np.maximum(stack.logit_kept_bytes, e)
    cut = np.where((candidates.tp > 1) & stack.shares_logits, stack.logit_cut_bytes, 0.0)
    with ledger.section("Kept of a microbatch around the layers"):
        f = Formulas(
            "B", symbols(job, candidates),
            vocabulary_rows=_logit_features(job, candidates),
            logit_bytes=kept, keeps_outputs=stack.keeps_outputs, receives_ahead=stack.receives_ahead,
            predictions=1 + job.model.mtp_modules,
            loss_bytes_a_logit=cut + np.maximum(stack.logit_peak_bytes, kept + e) - kept,
            sum_bytes=max(4.0, e), copied=int(e < 4), logits_together=stack.logits_together,
            loss_buffers=np.where(stack.compiles_loss & (candidates.tp == 1), 2, int(e < 4)),
        )  # fmt: skip
        first = f("dropout mask", f.T_shard * f.h * f.mask)
        if job.widens_norms:
            last = f("around the last norm", f.h * (f.T_shard * f.e_norm + f.T_read * f.e))
        else:
            last = f("around the last norm", (f.T_shard + f.T_read) * f.h * f.e)
        sent = f("sent on", f.T_shard * f.h * f.e * f.keeps_outputs)
        received = f("in a buffer", f.T_shard * f.h * f.e * f.receives_ahead)
        if candidates.shared.loss_chunk_tokens:
            return EndActivations(first, last, sent, received, *_chunked_loss(job, candidates, f))
        tokens = f.predictions * f.T if job.model.mtp_modules else f.T
        kept_logits = tokens * f.vocabulary_rows * f.logit_bytes
        if job.model.logit_softcap:  # the tanh is kept, and its product with the cap
            kept_logits = kept_logits + tokens * f.vocabulary_rows * f.e
        logits = f("logits of a microbatch", kept_logits)
        waiting = f("logits for W of a microbatch", tokens * f.vocabulary_rows * f.e)
        in_loss = f.T * f.vocabulary_rows * f.loss_bytes_a_logit
        if stack.logits_together:
            in_loss = np.minimum(f.T * f.vocabulary_rows, f.logits_together) * f.sum_bytes * f.loss_buffers
        if job.model.logit_softcap:  # a quotient, product or gradient next to two of them, outside of the loss
            in_loss = np.maximum(in_loss, f.T * f.vocabulary_rows * f.e)
        loss = f("loss", in_loss, "logits, copies, gradients; cost/stack.py")
        # The tokens of several sequences are copied in the order of the ranks.
        scattered = ((candidates.token_shards > 1) & bool(stack.logits_together)) + 0
        f.add(scattered=scattered, gradients_summed=scattered * (1 + (candidates.micro_batch > 1)))
        to_head = f("gradient of the head's input", (f.T + f.scattered * f.T_shard) * f.h * f.e)
        summed = f("gradient of the head's input, summed", f.gradients_summed * f.T * f.h * f.e, "parallel/tensor.py")
        return EndActivations(first, last, sent, received, logits, waiting, loss, to_head, summed, logits - waiting)


def _logit_features(job: Job, candidates: Candidates) -> Floats:
    """Return the logits of a token on a rank, (n,)."""
    tp = candidates.tp if job.stack.shares_logits else np.ones_like(candidates.tp)
    return np.asarray(vocabulary_rows(job.model, tp, multiple=job.stack.vocabulary_multiple))


def _chunked_loss(job: Job, candidates: Candidates, f: Formulas) -> tuple[Floats, ...]:
    """Return `logits` and the fields after it in `EndActivations`."""
    f.add(C=np.minimum(candidates.tokens(job.seq_len), candidates.shared.loss_chunk_tokens))
    gradients = f.T_shard * f.h * f.e
    if job.model.lora is None:  # else the matrix is frozen
        gradients = gradients + f.vocabulary_rows * f.h * f.sum_bytes
    if job.model.mtp_modules:
        gradients = f.predictions * gradients
    kept = f("gradients kept by the loss", gradients, "parallel/loss.py")
    together = np.minimum(f.C * f.vocabulary_rows, f.logits_together) * f.sum_bytes * f.loss_buffers
    chunk = f.C * f.vocabulary_rows * f.e + together
    if not job.stack.logits_together:
        chunk = f.C * f.vocabulary_rows * (f.logit_bytes + f.loss_bytes_a_logit)
    if job.model.logit_softcap:  # and a copy of the tanh
        chunk = chunk + f.C * f.vocabulary_rows * f.e
    product = (f.C * f.vocabulary_rows + f.vocabulary_rows * f.h) * f.e * f.copied
    source = "logits of a chunk; gathered inputs; parallel/loss.py"
    loss = f("loss", np.maximum(chunk, product) + f.cut * 2 * f.T * f.h * f.e, source)
    nothing = np.zeros_like(kept)
    return kept, nothing, loss, nothing, nothing, nothing
