"""Check the job files of `shardwright launch` with the programs that read them.

    python -m venv --system-site-packages build/launchers
    build/launchers/bin/pip install kubernetes-validate skypilot 'ray[default]'
    build/launchers/bin/python benchmarks/launchers.py [kubernetes] [skypilot] [ray]

kubernetes  the Job inside the JobSet is validated against the schema of the newest Kubernetes that kubernetes-validate
            has, without unknown fields; the JobSet around it, a custom resource, is not
skypilot    SkyPilot reads the task, as `sky jobs launch` does before it looks for a cloud
ray         a Ray cluster of two nodes on this machine runs the job: 2 nodes of 1 rank train a tiny model on CPUs. In
            a second job, rank 1 is killed once, and the job has to start again. Both end with the losses of the same
            run in local workers, bit for bit

benchmarks/slurm.py runs the batch file of Slurm.
"""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from shardwright.data.prepare import prepare

RUN_FILE = """
out = "{folder}/{name}"
steps = 12
device = "cpu"
data = {{ path = "{folder}/tokens" }}
batch = {{ seq_len = 16, global_batch = 4 }}
layout = {{ dp_shard = 2 }}
checkpoint = {{ every = 4 }}
metrics = {{ every = 1 }}
evaluation = {{ samples = 0 }}
[model]
n_layers = 2
d_model = 16
n_heads = 2
n_kv_heads = 1
head_dim = 8
d_ffn = 24
vocab_size = 300
max_seq_len = 16
"""
KILL = """
import os
import signal
from pathlib import Path

from shardwright.training.hooks import Hook, HookKind, register


class KillOnce(Hook):
    def before_step(self, step):
        mark = Path("{folder}/mark")
        if step == 7 and os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


register(HookKind("kill-once", lambda parts: KillOnce()))
"""
"""An extension that kills rank 1 once, after the checkpoint of step 4."""


def shardwright(*words: str, folder: Path) -> None:
    """Run the command; raises CalledProcessError if it fails."""
    subprocess.run([sys.executable, "-m", "shardwright", *words], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def job_file(on: str, folder: Path, run: str, *options: str) -> Path:
    """Write the job file of a run of two machines with one rank each."""
    path = folder / f"{on}-{run}.job"
    words = ["launch", f"{run}.toml", "--on", on, "--per-node", "1", "--cpus", "1", *options, "--write", str(path)]
    shardwright(*words, folder=folder)
    return path


def losses(folder: Path, name: str) -> list[tuple[int, float]]:
    """Return the step and loss of every record of a run."""
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = (json.loads(line) for line in lines)
    return [(each["step"], each["loss"]) for each in records if each.get("kind") == "train"]


def check_kubernetes(folder: Path) -> str:
    """Validate the Job of a JobSet. Raises ValidationError of kubernetes-validate."""
    import kubernetes_validate

    path = job_file("kubernetes", folder, "plain", "--image", "registry/x:1", "--claim", "runs")
    jobset = yaml.safe_load(path.read_text())
    inside = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    version = kubernetes_validate.latest_version()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": jobset["metadata"], "spec": inside}
    kubernetes_validate.validate(job, version, strict=True)
    return f"valid by the schema of Kubernetes {version}"


def check_skypilot(folder: Path) -> str:
    """Read the task. Raises an error of SkyPilot."""
    import sky

    task = sky.Task.from_yaml(str(job_file("skypilot", folder, "plain", "--accelerator", "H100")))
    return f"read by SkyPilot {sky.__version__}: {task.num_nodes} nodes, {next(iter(task.resources))}"


def check_ray(folder: Path) -> str:
    """Run two jobs on a cluster of two nodes. Raises AssertionError if one does not end as the local run does."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # the default of 30 s is short on a loaded machine
    shardwright("train", "local.toml", folder=folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    seen = []
    for run in ("plain", "killed"):
        trusted = ("--extension", str(folder / "kill.py")) if run == "killed" else ()
        path = job_file("ray", folder, run, *trusted)
        done = subprocess.run(
            [sys.executable, str(path)], cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        starts = [line for line in done.stdout.splitlines() if line.startswith("start ")]
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
        assert losses(folder, run) == losses(folder, "local"), f"{run}: other losses than the local run"
        seen.append(f"{run}: {'; '.join(starts)}")
    cluster.shutdown()
    return f"Ray {ray.__version__}, losses equal to local workers; " + "; ".join(seen)


CHECKS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "kubernetes": ("kubernetes_validate", check_kubernetes),
    "skypilot": ("sky", check_skypilot),
    "ray": ("ray", check_ray),
}


def main() -> None:
    """Print a line for each scheduler, or for those that are named. Exit with 1 if a check fails."""
    failed, named = False, sys.argv[1:] or list(CHECKS)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(Path(prepare.__code__.co_filename), folder / "tokens", vocab_size=300, validation=0.0)
        for run in ("local", "plain", "killed"):
            extension = f'extensions = ["{folder}/kill.py"]' if run == "killed" else ""
            (folder / f"{run}.toml").write_text(extension + RUN_FILE.format(folder=folder, name=run))
        (folder / "kill.py").write_text(KILL.format(folder=folder))
        for on, (module, check) in ((name, CHECKS[name]) for name in named):
            if importlib.util.find_spec(module) is None:
                print(f"{on}: not checked, {module} is not installed", flush=True)
                continue
            try:
                print(f"{on}: {check(folder)}", flush=True)
            except Exception as error:  # each program has errors of its own
                failed = True
                print(f"{on}: FAILED: {type(error).__name__}: {error}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
