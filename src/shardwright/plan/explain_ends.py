"""What the first and the last stage do beside their layers, with its numbers."""

from collections.abc import Iterator

from shardwright.cost import layer
from shardwright.plan.explain_messages import message_line, one
from shardwright.plan.line import Line, num
from shardwright.plan.search import Priced

HEAD, EMBEDDING = "Head, one microbatch", "Embedding, one microbatch"


def head_lines(priced: Priced) -> Iterator[tuple[str, list[Line]]]:
    """The loss, and messages over tp, by kind of work."""
    job, of = priced.job, priced.choice.candidates
    tokens, rate, loss = one(of.tokens(job.seq_len)), layer.reached_bytes_per_s(job), job.stack.speed.loss_bytes
    vocab, tp = job.model.vocab_size, int(of.tp[0])
    yield (
        "element-wise",
        [
            Line(
                HEAD,
                "element-wise",
                "bytes a logit, F and I x T v/tp / bandwidth reached",
                f"{num(loss)} * {num(tokens)} * {vocab} / {tp} / {num(rate)}",
                loss * tokens * vocab / tp / rate,
                "s",
                "the loss, and the logits on their way to it; cost/speed.py",
            )
        ],
    )
    if tp > 1:
        shards = bool(of.sequence_parallel[0])
        kinds = (
            [("input", "all-gather"), ("its gradient", "reduce-scatter")] if shards else [("gradient", "all-reduce")]
        )
        yield "tensor parallel", _messages(priced, HEAD, kinds)


def embedding_lines(priced: Priced) -> Iterator[tuple[str, list[Line]]]:
    """Rows read and written, and messages over tp, by kind of work."""
    job, of = priced.job, priced.choice.candidates
    tokens, rate, e = one(of.tokens(job.seq_len)), layer.reached_bytes_per_s(job), job.element_bytes
    h = job.model.d_model
    yield (
        "element-wise",
        [
            Line(
                EMBEDDING,
                "element-wise",
                "rows read and written, F and I, T h e each / bandwidth reached",
                f"2 * 2 * {num(tokens)} * {h} * {e} / {num(rate)}",
                4 * tokens * h * e / rate,
                "s",
                "cost/layer.py",
            )
        ],
    )
    if of.tp[0] > 1:
        shards = bool(of.sequence_parallel[0])
        kinds = [("rows", "reduce-scatter"), ("gradients", "all-gather")] if shards else [("rows", "all-reduce")]
        yield "tensor parallel", _messages(priced, EMBEDDING, kinds)


def _messages(priced: Priced, section: str, kinds: list[tuple[str, str]]) -> list[Line]:
    """Collectives of T h e bytes over tp, and their sum."""
    job, of = priced.job, priced.choice.candidates
    n_bytes = one(of.tokens(job.seq_len)) * job.model.d_model * job.element_bytes
    found = [message_line(section, what, kind, job.cluster, n_bytes, int(of.tp[0]), 1) for what, kind in kinds]
    numbers = " + ".join(num(line.value) for line in found)
    whole = sum(line.value for line in found)
    return [*found, Line(section, "tensor parallel", "the messages above", numbers, whole, "s", "cost/layer.py")]
