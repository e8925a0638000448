"""The folder of a run, `out` in its run file: the names of its files. `runs/records.py` has the records of lines.

run.toml                    the run file with every default filled in
metrics.jsonl               a JSON object for each start (`StartRecord`), each logged step (`TrainRecord`), each
                            evaluation (`EvaluationRecord`) and each checkpoint (`CheckpointRecord`)
events.jsonl                a JSON object for each event other than a step (`EventRecord`)
timeline/rank-R.jsonl       of rank R of `pp`: a JSON object for each of its last few logged steps (`PipelineStep`)
checkpoints/step-00000100/  a checkpoint, which has this name once it is complete; see `train/checkpoint`
reference.safetensors       with [preference]: the reference's log-probability of each answer
offload/                    empty: the location of nameless files with optimizer states
logs/rank-R.log             stderr of rank R, if `shardwright train` started the ranks; after restart N
                            logs/restart-N/rank-R.log
tensorboard/                events, if the run file enables them
profile/steps-A-B/rank-R.json  torch.profiler's trace of steps A to B on rank R, if [profile] requests it
profile/memory-rank-R.pickle   the newest snapshot of the allocator of rank R's GPU
report.html curves.png timeline.svg expert_load.json     written by `shardwright report` unless other paths are given
.lock                       names the process that trains here
"""

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from shardwright.system.files import inside, open_regular, problem_of_place, real_path
from shardwright.system.owner import LOCK

RUN_FILE, METRICS, CHECKPOINTS, LOGS, TENSORBOARD = "run.toml", "metrics.jsonl", "checkpoints", "logs", "tensorboard"
EVENTS = "events.jsonl"
OFFLOADED = "offload"
REFERENCE = "reference.safetensors"
TIMELINES = "timeline"
PROFILE = "profile"
MODEL_FILE = "model.toml"
"""In a folder written by `shardwright import`: the section [model] of its weights."""
RESOLVED = "# resolved by shardwright"
"""The first words of a run file that a run wrote."""
PAGE, CURVES, TIMELINE, EXPERT_LOAD = "report.html", "curves.png", "timeline.svg", "expert_load.json"
RUN_NAMES = {RUN_FILE, METRICS, CHECKPOINTS, LOGS, TENSORBOARD, EVENTS, OFFLOADED, REFERENCE, TIMELINES, PROFILE, LOCK}
"""Files and folders that training creates in the folder of a run."""
PHASES = ("data", "forward_backward", "optimizer")
"""Parts of the step time; a record has the seconds of each as PHASE_s."""
MOST_RANKS_LOGGED = 256
"""Maximum number of ranks for which a record has one number per rank; more could fill a disk in a long run."""
MOST_LOADS_LOGGED = 4096
"""Maximum number of experts of all layers for which a record has the tokens of each, for the same reason."""
_CHECKPOINT = re.compile(r"step-(\d{8,})")
_TRACED, _TRACE = re.compile(r"steps-(\d{1,18})-(\d{1,18})"), re.compile(r"rank-(\d{1,9})\.json")


def timeline_path(out: Path, rank: int) -> Path:
    """Return the timeline file of rank `rank` of `pp` in the run folder `out`."""
    return inside(out / TIMELINES, f"rank-{rank}.jsonl")


def trace_path(out: Path, steps: tuple[int, int], rank: int) -> Path:
    """Return the file of rank `rank` with its trace of the first to the last of `steps`, in the run folder `out`."""
    return inside(out / PROFILE, f"steps-{steps[0]}-{steps[1]}") / f"rank-{rank}.json"


def trace_files(out: Path) -> list[Path]:
    """Return the traces of all ranks of the last steps that were traced, by rank; none if no step was."""
    folders = {path: match for path in (out / PROFILE).glob("steps-*") if (match := _TRACED.fullmatch(path.name))}
    if not folders:
        return []
    newest = max(folders, key=lambda path: (int(folders[path][2]), int(folders[path][1])))
    ranks = {path: match for path in newest.iterdir() if (match := _TRACE.fullmatch(path.name))}
    return [inside(newest, path.name) for path in sorted(ranks, key=lambda path: int(ranks[path][1]))]


def snapshot_path(out: Path, rank: int) -> Path:
    """Return the file with the snapshot of the allocator of rank `rank` in the run folder `out`."""
    return inside(out / PROFILE, f"memory-rank-{rank}.pickle")


def run_of_checkpoint(checkpoint: Path) -> Path | None:
    """Return the folder of the run that contains a checkpoint, or None."""
    inside = checkpoint.absolute().parent
    return inside.parent if inside.name == CHECKPOINTS else None


def checkpoint_name(step: int) -> str:
    """Return the name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done when a complete checkpoint was saved."""
    match = _CHECKPOINT.fullmatch(checkpoint.name)
    assert match is not None, checkpoint
    return int(match[1])


def published(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints in OUT/checkpoints, the oldest first."""
    if not checkpoints.is_dir():
        return []
    steps = {path: match for path in checkpoints.iterdir() if (match := _CHECKPOINT.fullmatch(path.name))}
    return sorted(steps, key=lambda path: int(steps[path][1]))


def resumable(out: Path, local: str | None) -> list[Path]:
    """Return the complete checkpoints in OUT/checkpoints and in this host's `checkpoint.local` folder, by step."""
    return sorted([*published(out / CHECKPOINTS), *(published(Path(local)) if local else [])], key=step_of)


def now() -> str:
    """Return the `time` of a record: UTC in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def misplaced_entries(out: Path) -> list[str]:
    """Return the entries of a folder that have the name of a run's file or folder but are of another kind, or a run
    file that no run wrote."""
    folders = [out / name for name in (CHECKPOINTS, LOGS, TENSORBOARD, TIMELINES, PROFILE)]
    files = [out / name for name in (RUN_FILE, METRICS, EVENTS, REFERENCE, LOCK)]
    problems = [f"{path} is a file, and a run keeps a folder there" for path in folders if path.is_file()]
    problems += [f"{path} is a folder, and a run keeps a file there" for path in files if path.is_dir()]
    others = [path for path in files if os.path.lexists(path) and not path.is_dir()]
    problems += [
        f"{path} is a device, a pipe or a link to elsewhere, and a run keeps a file there"
        for path in others
        if not path.is_file() or problem_of_place(path) is not None
    ]
    for folder in folders[1:]:
        links = {path: real_path(path) for path in folder.rglob("*") if path.is_symlink()}
        outside = {path: to for path, to in links.items() if not to.is_relative_to(real_path(folder))}
        problems += [f"{path} is a link to {to}, and a run writes only below {folder}" for path, to in outside.items()]
    run_file = out / RUN_FILE
    if run_file.is_file() and not (out / METRICS).exists():
        with open_regular(run_file) as file:
            if file.read(len(RESOLVED)) != RESOLVED.encode():
                problems.append(
                    f"{run_file} was not written by a run, and this run would write its own run file over it"
                )
    way_out = "move it away, or name another folder with --set out=..."
    return [f"{problem}; {way_out}" for problem in problems]
