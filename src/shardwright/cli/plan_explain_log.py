"""shardwright plan explain-log: the step times of a training log next to the prediction for its configuration."""

from shardwright.cli.common import reading_verb, show
from shardwright.cli.plan_calibrate import LogOptions, read_logged_run
from shardwright.system.errors import InputError


@reading_verb
def plan_explain_log(options: LogOptions) -> None:
    """Compare a training log with the prediction for its configuration, and explain the gap.

    The output shows the measured and the predicted step time with its interval, MFU by both conventions, the slow steps
    (warm-up, periodic, isolated), and the three most likely causes of a gap with their evidence. Nothing that is read
    is executed.

    shardwright plan explain-log train.log --from train_gpt.sh --cluster h100:64

    Exit codes: 0 explained, 2 the input cannot be used.
    """
    from shardwright.planner.log_calibration import calibrate
    from shardwright.readers.logs import joined_times, step_times
    from shardwright.report.log_view import explained_log_view

    if len(options.logs) > 1:
        raise InputError(f"plan explain-log takes one log; leave out {', '.join(map(str, options.logs[1:]))}")
    run = read_logged_run(options)
    times = step_times(run.logs[0], run.priced.job)
    result = calibrate(run.priced, run.cluster, *joined_times([times]))
    show(explained_log_view(run.name, run.priced, run.logs[0], times, result), options.json, None)
