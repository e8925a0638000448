"""shardwright plan RUN.toml --measured RUN_FOLDER: a finished run next to its plan."""

from shardwright.cli.common import console, print_json, print_table, print_text
from shardwright.cli.plan_asked import PlanRequest, choice_of_run, priced_of
from shardwright.cli.plan_options import PlanOptions
from shardwright.view.terminal import columns


def compare_with_run(asked: PlanRequest, options: PlanOptions) -> None:
    """Print the run's medians next to the plan of its layout. Raises InputError if the run is of another run file."""
    from shardwright.planner.document import job_document, layout_document
    from shardwright.planner.search import limit_bytes
    from shardwright.report.plan_measured import compare_run, run_of

    assert options.measured is not None
    assert asked.config is not None
    run = run_of(options.measured, asked.config, str(options.target), asked.job.cluster)
    limit = limit_bytes(asked.job, options.memory_margin)
    priced = priced_of(asked.job, choice_of_run(run.config, asked.job, limit))
    result = compare_run(run, priced)
    if options.json:
        print_json(
            job_document(asked.job, asked.name, limit)
            | layout_document(priced, limit)
            | {"run": str(options.measured), "measured": result.as_json()}
        )
        return
    from shardwright.report.plan_view import job_note

    print_text(job_note(asked.job, asked.name).text)
    console.print(f"[bold]{priced.choice}[/]", soft_wrap=True)
    n = result.n_records
    on = "" if result.device is None else f" on {result.device}"
    print_text(f"{options.measured}, {result.steps}: medians of {n} {'record' if n == 1 else 'records'}{on}")
    table = columns("", "planned", "measured", "measured / planned", left=1)
    for term in (*result.terms, *result.parts):
        ratio = "" if term.ratio is None else f"{term.ratio:.2f}"
        table.add_row(term.name, term.in_words(term.planned), term.in_words(term.measured), ratio)
    print_table(table)
    print_text(result.largest)
