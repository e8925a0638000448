"""shardwright plan RUN.toml --measured RUN_FOLDER: a finished run next to its plan."""

from shardwright.cli.common import show
from shardwright.cli.plan_asked import PlanRequest, choice_of_run, priced_of
from shardwright.cli.plan_options import PlanOptions


def compare_with_run(request: PlanRequest, options: PlanOptions) -> None:
    """Print the run's medians next to the plan of its layout. Raises InputError if the run is of another run file."""
    from shardwright.config.settle import fullest_stage_config
    from shardwright.planner.document import job_document, layout_document
    from shardwright.planner.search import limit_bytes
    from shardwright.report.plan_measured import compare_run, measured_view, run_of

    assert options.measured is not None
    assert request.given is not None
    run = run_of(options.measured, request.given, str(options.target), request.job.cluster)
    limit = limit_bytes(request.job, options.memory_margin)
    priced = priced_of(request.job, choice_of_run(fullest_stage_config(run.config), request.job, limit))
    comparison = compare_run(run, priced)
    data = job_document(request.job, request.name, limit) | layout_document(priced, limit)
    data |= {"run": str(options.measured), "measured": comparison.as_json()}
    show(measured_view(comparison, priced, request.name, options.measured, data), options.json, options.html)
