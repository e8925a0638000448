"""shardwright plan RUN.toml --measured RUN_FOLDER: a finished run next to its plan."""

from shardwright.cli.common import show
from shardwright.cli.plan_asked import PlanRequest, choice_of_run, priced_of
from shardwright.cli.plan_options import PlanOptions


def compare_with_run(asked: PlanRequest, options: PlanOptions) -> None:
    """Print the run's medians next to the plan of its layout. Raises InputError if the run is of another run file."""
    from shardwright.config.settle import of_fullest_stage
    from shardwright.planner.document import job_document, layout_document
    from shardwright.planner.search import limit_bytes
    from shardwright.report.plan_measured import compare_run, measured_view, run_of

    assert options.measured is not None
    assert asked.given is not None
    run = run_of(options.measured, asked.given, str(options.target), asked.job.cluster)
    limit = limit_bytes(asked.job, options.memory_margin)
    priced = priced_of(asked.job, choice_of_run(of_fullest_stage(run.config), asked.job, limit))
    comparison = compare_run(run, priced)
    data = job_document(asked.job, asked.name, limit) | layout_document(priced, limit)
    data |= {"run": str(options.measured), "measured": comparison.as_json()}
    show(measured_view(comparison, priced, asked.name, options.measured, data), options.json, options.html)
