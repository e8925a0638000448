"""shardwright eval: the perplexity of a model on prepared data."""

import dataclasses

from shardwright.cli.common import (
    AsJson,
    Device,
    ModelArgument,
    device_problems,
    filled,
    layout_of,
    option,
    print_answer,
    reading_verb,
    size_problems,
)
from shardwright.system.errors import InputError, collecting
from shardwright.system.units import counted, format_count


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """Arguments and options of `eval`."""

    model: ModelArgument
    data: str | None = option(None, "a folder of `shardwright data prepare`, or its URL [default: the run's]", "FOLDER")
    split: str = option("validation", "the split of that folder: validation or train")
    layout: str = option("", "keys of the layout to run on, such as tp=2,dp_shard=2", "KEY=VALUE,...")
    seq_len: int | None = option(None, "tokens of a sequence [default: the run's, or max_seq_len]")
    samples: int | None = option(None, "sequences, spread evenly over the split [default: all]")
    micro_batch: int = option(4, "sequences that a rank runs at a time")
    device: Device = "auto"
    sequences: str | None = option(None, "packed or documents [default: as in the run, or packed]")
    loss: str = option("auto", "pairs: as in [preference] of the run; tokens: the next token [default: the run's loss]")
    json: AsJson = False


@reading_verb
def eval(options: EvalOptions) -> None:
    """Measure the perplexity of a run on its validation data, or of any model on prepared data.

    shardwright eval quickstart/run

    Perplexity is the exponential of the mean cross-entropy of a token. It does not depend on the layout. Of a run on
    pairs of answers, the loss, margin and accuracy of the pairs are measured.
    """
    from shardwright.generation.evaluate import EvalRequest, evaluate

    problems = size_problems(
        {"--seq-len": options.seq_len, "--samples": options.samples, "--micro-batch": options.micro_batch}
    )
    if options.sequences not in (None, "packed", "documents"):
        problems.append(f"--sequences {options.sequences}: not one of packed, documents")
    if options.split not in ("validation", "train"):
        problems.append(f"--split {options.split}: not one of validation, train")
    if options.loss not in ("auto", "tokens", "pairs"):
        problems.append(f"--loss {options.loss}: not one of tokens, pairs")
    problems += device_problems(options.device)
    with collecting(problems):
        layout = layout_of(options.layout)
    if problems:
        raise InputError(*problems)
    evaluation = evaluate(filled(EvalRequest, options, layout=layout))
    if evaluation is None:
        return
    loss = f"{evaluation.loss:.5f} {evaluation.unit}"
    if evaluation.n_pairs is None:
        result = f"perplexity {evaluation.perplexity:.4f}, loss {loss}"
        size = f"{format_count(evaluation.n_tokens or 0)} tokens"
    else:
        leads = f"the chosen answer leads in {evaluation.accuracy:.1%} of the pairs"
        result = f"{evaluation.kind} loss {loss}, margin {evaluation.margin:.5f}; {leads}"
        size = counted(evaluation.n_pairs, "pair")
    print_answer(
        options.json,
        dataclasses.asdict(evaluation),
        result,
        f"{size}: {counted(evaluation.n_samples, 'sequence')} of {evaluation.seq_len} of the {options.split} split in "
        f"{', '.join(evaluation.data)}",
        *(f"note: {remark}" for remark in evaluation.remarks),
    )
