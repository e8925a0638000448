"""shardwright merge: the weighted mean of the weights of several checkpoints."""

from pathlib import Path

from shardwright.cli.common import AsJson, argument, option, print_answer, reading_verb
from shardwright.system.errors import InputError
from shardwright.system.units import format_count


@reading_verb
def merge(
    sources: list[Path] = argument(
        ..., "checkpoints, runs (the newest checkpoint), folders of weights", "CHECKPOINT..."
    ),
    out: Path = option(..., "the new folder that is written", "FOLDER"),
    last: int | None = option(None, "the last N checkpoints of the run that is named", "N"),
    shares: str | None = option(None, "the share of each checkpoint, in sum 1; if not given, all are equal", "X,Y,..."),
    json: AsJson = False,
) -> None:
    """Write the weighted mean of the weights of several checkpoints of one model.

    The folder is of the kind that `import` writes: generate, eval, export and init.weights of a run take it. The states
    of the optimizer are not merged. Sums are in float64, over one block of at most 256 MiB of each source at a time.

    shardwright merge runs/debug --last 4 --out weights/mean

    shardwright merge runs/a runs/b --shares 0.25,0.75 --out weights/between
    """
    from shardwright.training.merging import merge as write

    done = write(sources, out, None if shares is None else _numbers(shares), last)
    n, pairs = done.weights.spec.n_parameters, zip(done.weights.sources, done.weights.shares, strict=True)
    merged = [{"path": str(source.path), "share": share} for source, share in pairs]
    print_answer(
        json,
        {"out": str(out), "sources": merged, "parameters": n, "remarks": list(done.remarks)},
        *(f"{part['share']:8.4g}  {part['path']}" for part in merged),
        f"{format_count(n)} parameters -> {out}",
        *done.remarks,
        f"  shardwright eval {out} --data DATA",
    )


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--shares {text}: numbers separated by commas are needed, such as 0.25,0.75") from None
