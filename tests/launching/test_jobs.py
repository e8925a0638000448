"""Proves that the job files of `launch` start the ranks of the layout, and that what does not fit is refused."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from shardwright.cli.launch import _name
from shardwright.cli.main import app
from shardwright.launching.jobs import NAME, _seconds

DOCS = Path(__file__).resolve().parents[2] / "docs"
RUN = """
out = "runs/Llama_8b"
steps = 10
model = { preset = "llama-3.1-8b" }
data = { path = "tokens" }
batch = { seq_len = 4096, global_batch = 32 }
layout = { dp_shard = 2, tp = 8 }
"""
NEEDED = {
    "slurm": (),
    "kubernetes": ("--image", "registry/x:1", "--claim", "runs"),
    "skypilot": ("--accelerator", "H100"),
    "ray": (),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "it's run.toml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def launch(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["launch", *map(str, arguments)])


def job_of(on: str, *arguments: str, run: str = "run.toml") -> str:
    result = launch(run, "--on", on, *NEEDED[on], *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_batch_file_of_the_docs_is_what_the_verb_prints(folder: Path):
    page = (DOCS / "launch.md").read_text()
    shown = next(text for text in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "scontrol requeue" in text)
    assert job_of("slurm", "--name", "shardwright") == shown


def words_of_the_job(on: str, text: str, folder: Path) -> list[str]:
    """Return the words with which the job starts the first rank or torchrun, by the interpreter of its language."""
    if on == "kubernetes":
        nodes = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
        words = nodes["template"]["spec"]["containers"][0]["command"]
        return [word.replace("$$(", "$(") for word in words]
    if on == "ray":
        names = {
            node.targets[0].id: node.value
            for node in ast.parse(text).body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        return list(ast.literal_eval(names["TRAIN"]))
    script = yaml.safe_load(text)["run"] if on == "skypilot" else text
    (folder / "show").write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv))\n")
    (folder / "show").chmod(0o755)
    for name in ("srun", "torchrun"):
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder / "show")
    environment = {
        "PATH": f"{folder}:/usr/bin:/bin",
        "SLURM_SUBMIT_DIR": str(folder),
        "SLURM_CPUS_PER_TASK": "8",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    }
    told = subprocess.run(["bash", "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    return list(json.loads(told.stdout))


@pytest.mark.parametrize("on", NEEDED)
def test_a_job_starts_the_run_file_with_its_overrides_whatever_their_letters_are(on: str, folder: Path):
    changes = "--set", "data.path=a b;$(touch x)'\"", "--activate", "true"
    words = words_of_the_job(on, job_of(on, *changes, run="it's run.toml"), folder)
    assert words[-4:] == ["train", "it's run.toml", "--resume", "--set=data.path=a b;$(touch x)'\""]
    assert not (folder / "x").exists()


def test_a_node_of_skypilot_knows_its_number_and_the_first_node(folder: Path):
    words = words_of_the_job("skypilot", job_of("skypilot", "--activate", "true"), folder)
    values = {
        words[i]: words[i + 1] for i in range(1, len(words) - 1) if words[i].startswith("--n") or "master" in words[i]
    }
    expected = {"--nnodes": "2", "--nproc-per-node": "8", "--node-rank": "1", "--master-addr": "10.0.0.1"}
    assert values == expected | {"--master-port": "29500"}


def test_the_pods_of_kubernetes_are_the_nodes_of_the_layout(folder: Path):
    job: Any = yaml.safe_load(job_of("kubernetes", "--grace", "90", "--cpus", "4"))
    assert job["metadata"]["name"] == "llama-8b"
    nodes = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (nodes["completions"], nodes["parallelism"], nodes["completionMode"]) == (2, 2, "Indexed")
    pod = nodes["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 90
    container = pod["containers"][0]
    assert container["resources"]["limits"] == {"cpu": "32", "nvidia.com/gpu": "8"}
    assert "llama-8b-node-0-0.llama-8b" in container["command"]
    mounted = {each["name"] for each in container["volumeMounts"]}
    assert mounted == {each["name"] for each in pod["volumes"]}


@pytest.mark.parametrize("on", NEEDED)
def test_a_run_on_cpus_asks_for_no_gpu(on: str, folder: Path):
    for device, asks in (("cpu", False), ("cuda", True)):
        text = job_of(on, "--set", f'device="{device}"').replace("--gpu-bind=none", "")
        assert bool(re.search(r"gpu|GPU'|H100", text.split("def main")[0].split("class Node")[0])) == asks


def test_a_job_file_is_written_once_and_named_with_the_command_that_submits_it(folder: Path):
    assert "sbatch train.sbatch" in launch("run.toml", "--on", "slurm", "--write", "train.sbatch").output
    again = launch("run.toml", "--on", "slurm", "--write", "train.sbatch")
    assert (again.exit_code, "--overwrite replaces it" in again.output) == (2, True)
    told = json.loads(launch("run.toml", "--on", "ray", "--json").stdout)
    assert (told["nodes"], told["ranks"]) == (2, 16)
    compile(told["text"], "train_ray.py", "exec")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--on", "slurn"), "did you mean 'slurm'?"),
        (("--on", "slurm", "--nodes", "3"), "= 24 ranks, and run.toml has 16"),
        (("--on", "slurm", "--per-node", "5"), "give --nodes 4 --per-node 4"),
        (("--on", "slurm", "--per-node", "0"), "--per-node 0: a number of 1 or more is needed"),
        (("--on", "slurm", "--name", "a b"), "--name a b: a letter, then"),
        (("--on", "slurm", "--time", "soon"), "--time soon: give Slurm's form"),
        (("--on", "slurm", "--time", "10"), "--time 10 (600 s) is not longer than --grace 600"),
        (("--on", "slurm", "--grace", "90000"), "--grace 90000: at most 65535 seconds"),
        (("--on", "slurm", "--name", "8b"), "--name 8b: a letter, then"),
        (("--on", "slurm", "--activate", "a\nb"), "--activate 'a\\nb': one line"),
        (("--on", "slurm", "--max-restarts", "-1"), "--max-restarts -1: 0 or more"),
        (("--on", "kubernetes"), "--image is missing; --on kubernetes needs it"),
        (("--on", "kubernetes", "--image", "x", "--claim", "y", "--mount", "runs"), "an absolute path"),
        (("--on", "skypilot"), "--accelerator is missing"),
        (("--on", "ray", "--write", "none/there"), "there is no folder none"),
        (("--on", "ray", "--set", "layout.tp=3"), "layout.tp=3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_launched_is_one_sentence(arguments: tuple[str, ...], said: str, folder: Path):
    result = launch("run.toml", *arguments)
    assert (result.exit_code, said in result.output) == (2, True), result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("1:00:00", 3600),
        ("2-3", 183600),
        ("1-0:30", 88200),
        ("1-01:01:01", 90061),
        ("0", 0),
    ],
)
def test_a_time_of_slurm_is_read_as_slurm_reads_it(time: str, seconds: int):
    assert _seconds(time) == seconds


@pytest.mark.parametrize(
    ("out", "name"), [("runs/8b", "run-8b"), ("runs/A_b.c", "a-b-c"), ("x" * 39 + "-y", "x" * 39), ("---", "train")]
)
def test_the_name_of_a_job_follows_from_the_folder_of_the_run_and_every_scheduler_accepts_it(out: str, name: str):
    assert _name(out) == name
    assert NAME.fullmatch(name)
