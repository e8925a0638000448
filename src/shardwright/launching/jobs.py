"""Write the job file of a run for a scheduler: an sbatch file, a JobSet of Kubernetes, a SkyPilot task, a Ray job.

Every job starts `shardwright train RUN.toml --resume`, so a job that is started again continues from its newest
checkpoint. When a scheduler ends a job, it sends SIGTERM and waits; the ranks save and exit with 75.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import join, quote
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from shardwright.system.units import divisors

PORT = 29500
"""Port of the rendezvous on the first node; PyTorch's default."""
NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")
"""A name that every scheduler accepts (RFC 1035, as a Service of Kubernetes), short enough for the names of pods that
are made from it."""
MOST_GRACE_S = 65535
"""Longest time between a signal and the end of a job that Slurm accepts, in seconds."""
TIME = re.compile(r"(\d{1,4}-)?\d{1,4}(:\d{2}){0,2}")
SINGLE_LINE = re.compile(r"[^\x00-\x1f\x7f]+")


@dataclass(frozen=True, kw_only=True)
class LaunchJob:
    """A run as a job of `nodes` x `per_node` ranks.

    `gpus`: a rank uses a GPU. `overrides`: keys of the run file, as `key=value`. `cpus`: cores of a rank. `grace_s`:
    seconds between SIGTERM and the end. `activate`: a shell line before the command. For Kubernetes `image`: of the
    container, `claim`: the volume claim, `mount`: where it is mounted. `accelerator`: for SkyPilot, such as H100.
    `array`: for Slurm, the number of runs, whose run files 0.toml, 1.toml, ... are in the folder `run_file`; 0: a run.
    """

    name: str
    nodes: int
    per_node: int
    gpus: bool
    run_file: str
    cpus: int
    time: str
    grace_s: int
    max_restarts: int
    activate: str
    overrides: tuple[str, ...] = ()
    image: str | None = None
    claim: str | None = None
    mount: str = "/runs"
    accelerator: str | None = None
    array: int = 0

    @property
    def train(self) -> list[str]:
        """The words of the command after `python -m`."""
        return [
            "shardwright",
            "train",
            self.run_file,
            "--resume",
            *(f"--set={override}" for override in self.overrides),
        ]

    def torchrun(self, node_rank: str, address: str) -> list[str]:
        """Return the words of torchrun on one node. `node_rank`, `address`: as the scheduler expands them."""
        sizes = ["--nnodes", str(self.nodes), "--nproc-per-node", str(self.per_node)]
        return ["torchrun", *sizes, "--node-rank", node_rank, "--master-addr", address, "--master-port", str(PORT)]


@dataclass(frozen=True)
class JobFormat:
    """The job file of a scheduler. `file_name`: its usual name; `submit`: the command that submits it. `needs`: options
    without a default that the scheduler needs, with an example. `text`: the content of the file."""

    name: str
    file_name: str
    submit: str
    needs: Mapping[str, str]
    text: Callable[[LaunchJob], str]


def _rendered(template: str, job: LaunchJob) -> str:
    environment = Environment(
        loader=PackageLoader("shardwright", "launching"), undefined=StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    return environment.get_template(template).render(job=job, train=_train(job), resources=_resources(job))


def _train(job: LaunchJob) -> str:
    """Return the command after `python -m` for a shell; in an array its run file is the task's."""
    if not job.array:
        return join(job.train)
    at = job.train.index(job.run_file)
    return f'{join(job.train[:at])} {quote(job.run_file)}/"$SLURM_ARRAY_TASK_ID".toml {join(job.train[at + 1 :])}'


def _resources(job: LaunchJob) -> dict[str, int]:
    return {"CPU": job.cpus * job.per_node} | ({"GPU": job.per_node} if job.gpus else {})


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None),
)


def _as_yaml(document: dict[str, Any]) -> str:
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=1000))


def _jobset(job: LaunchJob) -> str:
    """Return a JobSet: one pod a node, all started again together if one fails. Its first pod is the rendezvous."""
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    limits = {"cpu": str(job.cpus * job.per_node)} | ({"nvidia.com/gpu": str(job.per_node)} if job.gpus else {})
    first = f"{job.name}-node-0-0.{job.name}"
    train = [word.replace("$(", "$$(") for word in job.train]  # Kubernetes replaces $(NAME) by a variable
    container = {
        "name": "train",
        "image": job.image,
        "workingDir": job.mount,
        "command": [*job.torchrun("$(NODE_RANK)", first), "-m", *train],
        "env": [
            {"name": "NODE_RANK", "valueFrom": index},
            {"name": "OMP_NUM_THREADS", "value": str(job.cpus)},
        ],
        "resources": {"limits": limits},
        "volumeMounts": [{"name": "run", "mountPath": job.mount}, {"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s,
        "containers": [container],
        "volumes": [
            {"name": "run", "persistentVolumeClaim": {"claimName": job.claim}},
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
        ],
    }
    nodes = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return _as_yaml(
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": job.name},
            "spec": {
                "failurePolicy": {"maxRestarts": job.max_restarts},
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": nodes}}],
            },
        }
    )


def _sky_task(job: LaunchJob) -> str:
    """Return a SkyPilot task, for `sky jobs launch`, which starts it again after a preemption or a failure."""
    accelerators = {"accelerators": f"{job.accelerator}:{job.per_node}"} if job.gpus else {}
    recovery = {"job_recovery": {"max_restarts_on_errors": job.max_restarts}}
    first = '"$(head -n 1 <<< "$SKYPILOT_NODE_IPS")"'
    command = " ".join([*job.torchrun('"$SKYPILOT_NODE_RANK"', first), "-m", join(job.train)])
    lines = [job.activate, f"export OMP_NUM_THREADS={job.cpus}", command]
    return _as_yaml(
        {
            "name": job.name,
            "num_nodes": job.nodes,
            "resources": {**accelerators, "cpus": f"{job.cpus * job.per_node}+", **recovery},
            "workdir": ".",
            "run": "\n".join(lines) + "\n",
        }
    )


JOB_FORMATS = {
    row.name: row
    for row in (
        JobFormat("slurm", "train.sbatch", "sbatch {}", {}, partial(_rendered, "train.sbatch")),
        JobFormat(
            "kubernetes", "train.yaml", "kubectl apply -f {}", {"image": "registry/shardwright:1", "claim": "runs"},
            _jobset,
        ),
        JobFormat("skypilot", "train.sky.yaml", "sky jobs launch {}", {"accelerator": "H100"}, _sky_task),
        JobFormat(
            "ray", "train_ray.py", "ray job submit -- python {}", {},
            partial(_rendered, "ray_job.py.jinja"),
        ),
    )
}  # fmt: skip


def ranks_of_node(world_size: int, most: int) -> int:
    """Return the largest number of ranks per machine, up to `most`, with which all machines have as many."""
    return max(n for n in divisors(world_size) if n <= most)


def job_problems(job: LaunchJob, world_size: int, layout: str) -> Iterator[str]:
    """Yield the reasons why a job cannot run a layout of `world_size` ranks, which is described by `layout`."""
    ranks = job.nodes * job.per_node
    if ranks != world_size:
        per_node = ranks_of_node(world_size, job.per_node)
        yield (
            f"--nodes {job.nodes} x --per-node {job.per_node} = {ranks} ranks, and {job.run_file} has {world_size} "
            f"({layout}); give --nodes {world_size // per_node} --per-node {per_node}, or change the layout"
        )
    if NAME.fullmatch(job.name) is None:
        yield f"--name {job.name}: a letter, then at most 39 lower-case letters, digits and hyphens, such as llama-8b"
    if job.grace_s > MOST_GRACE_S:
        yield f"--grace {job.grace_s}: at most {MOST_GRACE_S} seconds"
    if TIME.fullmatch(job.time) is None:
        yield f"--time {job.time}: give Slurm's form, such as 24:00:00 or 2-00:00:00"
    elif 0 < (time_s := _seconds(job.time)) <= job.grace_s:
        grace = f"the {job.grace_s} s that a job has to save" if job.array else f"--grace {job.grace_s}"
        yield (
            f"--time {job.time} ({time_s} s) is not longer than {grace}, so the job is stopped when it starts; give a "
            f"longer --time{'' if job.array else ' or a shorter --grace'}"
        )
    texts = {f"--{name}": getattr(job, name) for name in ("activate", "image", "claim", "mount", "accelerator")}
    given = [
        *texts.items(),
        ("--out" if job.array else "RUN.toml", job.run_file),
        *(("--set", override) for override in job.overrides),
    ]
    for option, value in given:
        if value and SINGLE_LINE.fullmatch(value) is None:
            yield f"{option} {value!r}: one line without control characters is needed"
    if not Path(job.mount).is_absolute():
        yield f"--mount {job.mount}: an absolute path in the container is needed, such as /runs"


def _seconds(time: str) -> int:
    """Return the seconds of a time in Slurm's form: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S; 0: no limit."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, seconds = (parts + [0, 0])[:3]
    else:
        hours, minutes, seconds = {1: (0, *parts, 0), 2: (0, *parts), 3: parts}[len(parts)]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
