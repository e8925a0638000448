"""The document of `sweep`: a table of its runs, the power law of loss by FLOPs, and a picture."""

from collections.abc import Sequence
from functools import partial

from shardwright.system.units import format_count
from shardwright.training.sweep import CONFIDENCE, PowerLaw, SweepRun, best_by_flops, fit_power_law
from shardwright.view.document import (
    NUMBER,
    Column,
    Fact,
    Facts,
    Marked,
    Note,
    Part,
    Picture,
    Quantity,
    Table,
    VerbDocument,
)
from shardwright.view.style import FittedBand, Line, log_lines_svg

LOSS = Quantity("{:.4f}".format)
FLOPS = Quantity("{:.3g}".format)
COUNTED = Quantity(format_count)


def sweep_document(runs: Sequence[SweepRun]) -> VerbDocument:
    """Return the document of the runs of a sweep, which may not all have ended."""
    best = best_by_flops(runs)
    fit = fit_power_law(best)
    keys = list(runs[0].values)
    columns = [
        *(Column(key, NUMBER) for key in keys),
        Column("parameters", COUNTED),
        Column("FLOPs", FLOPS),
        Column("loss", LOSS),
        Column("run"),
    ]
    rows = []
    for run in runs:
        loss = run.loss
        label = str(run.out) if loss is not None else f"{run.out}: {'diverged' if run.ended else 'not ended'}"
        shown = None if loss is None else Marked(loss, "good" if loss == best[run.flops] else "")
        rows.append((*run.values.values(), run.config.spec().n_parameters, run.flops, shown, label))
    ended = sum(run.ended for run in runs)
    parts: list[Part] = [Facts(_facts(len(runs), ended, fit)), Table(columns, rows)]
    if fit is None:
        parts.append(Note("a power law needs ended runs of three different numbers of FLOPs", tone="quiet"))
    data = {
        "runs": [
            {
                "values": dict(run.values),
                "out": str(run.out),
                "parameters": run.config.spec().n_parameters,
                "flops": run.flops,
                "loss": run.loss,
                "ended": run.ended,
            }
            for run in runs
        ],
        "fit": None
        if fit is None
        else {"a": fit.a, "b": fit.b, "c": fit.c, "b_interval": fit.b_interval, "confidence": CONFIDENCE},
    }
    picture = Picture(
        "losses", "Loss by FLOPs", partial(sweep_svg, runs, fit),
        "Each run, and the power law through the lowest loss of each number of FLOPs with its interval.",
    )  # fmt: skip
    return VerbDocument(f"sweep over {', '.join(keys)}", data, parts, [picture] if best else [])


def _facts(n_runs: int, ended: int, fit: PowerLaw | None) -> list[Fact]:
    facts = [Fact("runs", f"{ended} of {n_runs}", "ended")]
    if fit is not None:
        low, high = fit.b_interval
        floor = f" + {fit.c:.3g}" if fit.c else ""
        remark = f"C in FLOPs; {CONFIDENCE:.0%} interval of the exponent {low:.3g} to {high:.3g}"
        facts.append(Fact("loss", f"{fit.a:.3g} C^-{fit.b:.3g}{floor}", remark))
    return facts


def sweep_svg(runs: Sequence[SweepRun], fit: PowerLaw | None) -> str:
    """Return a picture of loss by FLOPs: a colour for each value of the first key, and the fit with its interval."""
    key = next(iter(runs[0].values))
    lines: list[Line] = []
    for value in dict.fromkeys(run.values[key] for run in runs):
        points = [(run.flops, loss) for run in runs if run.values[key] == value and (loss := run.loss) is not None]
        if points:
            flops, losses = zip(*points, strict=True)
            lines.append((f"{key.rpartition('.')[2]} {value}", flops, losses))
    band = None
    if fit is not None:
        flops, middle, low, high = zip(*fit.band, strict=True)
        band = FittedBand("fit, interval", flops, middle, low, high)
    return log_lines_svg(lines, x_label="FLOPs", y_label="loss", joined=False, fit=band).decode("utf-8")
