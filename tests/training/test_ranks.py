"""Proves that a process finds its rank under torchrun, srun or alone, and that the ranks find each other.

The environments are those that the launchers set; the last tests start real processes by hand, as a launcher would.
"""

import contextlib
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from shardwright.system.errors import InputError, WorkerError
from shardwright.training import ranks
from shardwright.training.ranks import ProcessRank, first_host, meeting_point, place_from_environment
from tests.marks import prove
from tests.training.runs import trajectory, write_run_file

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "gpu[03-05,9],login1",
}


def test_the_rank_is_that_of_torchrun_or_of_srun_or_there_is_none():
    assert place_from_environment(TORCHRUN) == ProcessRank(rank=5, local_rank=1, world_size=8)
    assert place_from_environment(SRUN) == ProcessRank(rank=5, local_rank=1, world_size=8)
    assert place_from_environment({}) is None
    # torchrun inside of a Slurm job: the one that started this process counts.
    assert place_from_environment(SRUN | TORCHRUN | {"RANK": "7"}) == ProcessRank(7, 1, 8)


def test_a_batch_script_or_a_step_of_one_task_is_no_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    assert place_from_environment(batch) is None
    assert place_from_environment(SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "0"}, "but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (TORCHRUN | {"MASTER_ADDR": ""}, "but not MASTER_ADDR"),
        (TORCHRUN | {"MASTER_PORT": "99999"}, "MASTER_PORT=99999; ports go to 65535"),
        ({k: v for k, v in TORCHRUN.items() if k != "RANK"}, "but not RANK; start with torchrun"),
        (TORCHRUN | {"RANK": "one"}, "RANK='one', which is no rank or count"),
        (TORCHRUN | {"RANK": "8"}, "RANK=8 and WORLD_SIZE=8; ranks go from 0 to WORLD_SIZE - 1 = 7"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID=None, which is no rank"),
        (SRUN | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
    ],
)
def test_an_environment_that_is_half_set_is_refused(environment, words):
    with pytest.raises(InputError, match=words):
        place_from_environment(environment)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node7", "node7"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("login1,gpu[03-05]", "login1"),
        ("gpu[003]", "gpu003"),
        ("a-b-[1,3].cluster.org", "a-b-1.cluster.org"),
        ("rack[1-2]node[4,6]-ib,x", "rack1node4-ib"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    assert first_host(nodelist) == host


def test_a_node_list_without_a_host_is_refused():
    with pytest.raises(InputError, match="set MASTER_ADDR"):
        first_host("")


def test_jobs_and_steps_of_slurm_meet_at_ports_of_their_own():
    environments = [SRUN | {"SLURM_JOB_ID": str(4711 + i // 4), "SLURM_STEP_ID": str(i % 4)} for i in range(40)]
    points = [meeting_point(environment) for environment in environments]
    assert {address for address, _ in points} == {"gpu03"}
    assert len({port for _, port in points}) == 40
    assert all(1024 < port < 32768 for _, port in points)
    # What the user sets goes before what is guessed.
    assert meeting_point(SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7"}) == ("10.0.0.1", 7)


def started_by_hand(run_file: Path, environments: list[dict[str, str]], *arguments: str) -> list[tuple[int, str]]:
    """Exit code and stderr of `shardwright train` in each of the environments, all at once."""
    command = [sys.executable, "-m", "shardwright", "train", str(run_file), *arguments]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, env=os.environ | own, **quiet) for own in environments]
    return [(process.wait(), process.stderr.read()) for process in processes]


@prove
def test_two_processes_that_srun_has_started_train_together(tokens, tmp_path):
    run_file = write_run_file(tmp_path, tokens)
    job = SRUN | {"SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_JOB_ID": str(os.getpid())}
    tasks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    ended = started_by_hand(run_file, tasks, "--set", "steps=2")
    assert [code for code, _ in ended] == [0, 0], ended
    assert [step for step, _, _ in trajectory(run_file)] == [1, 2]


@prove
def test_a_port_that_is_taken_is_an_error_that_says_so(tokens, tmp_path):
    run_file = write_run_file(tmp_path, tokens)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        rank = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ((code, stderr),) = started_by_hand(run_file, [rank])
    assert code == 2
    (line,) = stderr.strip().splitlines()
    assert line.startswith(f"error: rank 0: cannot listen on 127.0.0.1:{port}")
    assert "set MASTER_PORT to a free one" in line


def closes_every_connection(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while True:
            server.accept()[0].close()


def test_a_rank_that_meets_another_program_at_the_port_says_so_without_a_stack(monkeypatch, capfd):
    monkeypatch.setattr(ranks, "COLLECTIVE_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=closes_every_connection, args=(server,), daemon=True).start()
        port = str(server.getsockname()[1])
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", port)
        told = f"cannot reach rank 0 at 127.0.0.1:{port}; .* does no other program use it"
        with pytest.raises(InputError, match=told), ranks.process_group(ProcessRank(1, 1, 2), torch.device("cpu")):
            pass
    assert capfd.readouterr().err == ""


def name_of_start(store, world_size: int, *which: int, timeout_s: float = 20.0) -> list[str]:
    """The name that each of these ranks of a start gets."""
    with ThreadPoolExecutor(world_size) as threads:
        places = [ProcessRank(rank, rank, world_size) for rank in which]
        return list(threads.map(lambda place: ranks._name_of_start(store, place, timeout_s), places))


def test_ranks_of_a_start_find_each_other_in_a_store_with_what_earlier_starts_left():
    """As of torchrun's agents, of which each counts its restarts for itself; the world has 3 ranks, 4, and 2."""
    store = torch.distributed.HashStore()
    names = [name_of_start(store, n, *range(n)) for n in (3, 4, 2)]
    assert [len(set(each)) for each in names] == [1, 1, 1]
    assert len({each[0] for each in names}) == 3


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(WorkerError, match=r"rank 2 did not come to where the ranks meet within 0\.2 s"):
        name_of_start(torch.distributed.HashStore(), 3, 0, 1, timeout_s=0.2)
