"""A Slurm of its own on this machine, as `slurm.py` uses it: munged, a controller and two nodes on loopback, and jobs.

Everything lies in one folder. The nodes are named 127.0.0.1 and 127.0.0.2: names that Slurm counts up in a list of
nodes, and that every Linux machine resolves. Each has 2 cores, and 2 GPUs in name alone.
"""

import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from chaos_runs import children, wait_for
from shardwright.system.signals import send_signal

NODES = ("127.0.0.1", "127.0.0.2")
TASKS = 2
"""Of a job on each node."""
DAEMONS = ("munged", "slurmctld", "slurmd")
CONF = """
ClusterName=shardwright
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=15
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=1
KillWait=30
SlurmdTimeout=30
SlurmdParameters=config_overrides
StateSaveLocation={folder}/slurmctld
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
NodeName={nodes[0]} NodeAddr={nodes[0]} NodeHostname=localhost Port={ports[1]} CPUs=2 Gres=gpu:2
NodeName={nodes[1]} NodeAddr={nodes[1]} NodeHostname=localhost Port={ports[2]} CPUs=2 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
"""`cred_expire` is how long a job that is queued again has to wait, 120 s if it is not set."""


def missing() -> list[str]:
    """The programs of Slurm and munge that are not installed here."""
    return [name for name in (*DAEMONS, "sbatch", "srun", "scontrol", "scancel") if not _path(name)]


def _path(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(n: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """Munge, a controller and two nodes, from `with` to its end; then none of their processes or jobs is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.conf = folder, folder / "slurm.conf"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Cluster":
        munge = self.folder / "munge"
        for folder in (munge, self.folder / "slurmctld", *(self.folder / node for node in NODES)):
            folder.mkdir()
            folder.chmod(0o755)  # munged refuses a socket in a folder that others cannot enter
        self.folder.chmod(0o755)
        key = munge / "key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        text = CONF.format(folder=self.folder, user=getpass.getuser(), nodes=NODES, ports=_free_ports(3))
        self.conf.write_text(text)
        # A GPU needs a character device; that of no GPU will do, as tasks are not confined to theirs.
        (self.folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
        try:
            files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
            self._start("munged", "munged", "--foreground", *files, f"--socket={munge / 'socket'}")
            wait_for((munge / "socket").exists, f"munged\n{self.said('munged')}", 60.0, 0.05)
            self._start("slurmctld", "slurmctld", "-D", "-i", "-f", str(self.conf))
            for node in NODES:
                self.start_node(node)
            self.wait_for_nodes({"idle"})
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, name: str, *command: str) -> None:
        path = _path(command[0])
        assert path is not None
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                [path, *command[1:]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment(),
                start_new_session=True,  # a Ctrl-C is for this script, which then ends them in order
            )

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._start(node, "slurmd", "-D", "-N", node, "-f", str(self.conf))

    def kill_node(self, node: str) -> None:
        """End all that runs on a node at once, as a machine without power would."""
        daemon, tasks = self._daemons.pop(node), set(self._processes(f"SLURMD_NODENAME={node}"))
        steps = [parent for parent, found in children().items() if tasks & set(found)]
        steps = [pid for pid in steps if _read(pid, "cmdline").startswith(b"slurmstepd")]
        for pid in (daemon.pid, *steps, *tasks):
            send_signal(pid, signal.SIGKILL)
        daemon.wait()

    def environment(self) -> dict[str, str]:
        """Of the commands of this Slurm; nothing of a job that this script may itself be a part of."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "SBATCH"))}
        return kept | {"SLURM_CONF": str(self.conf)}

    def command(self, *words: str, cwd: Path | None = None) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            words, env=self.environment(), cwd=cwd, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}\n{self.said('slurmctld')}"
        return done.stdout

    def update_node(self, node: str, state: str) -> None:
        """`scontrol update` of a node's state."""
        self.command("scontrol", "update", f"NodeName={node}", f"State={state}", "Reason=trial")

    def wait_for_nodes(self, states: set[str]) -> None:
        """Until every node is in one of these states."""

        def reached() -> bool:
            found = subprocess.run(
                ["sinfo", "-N", "-h", "-o", "%t"], env=self.environment(), capture_output=True, text=True, check=False
            )
            return found.returncode == 0 and bool(found.stdout) and set(found.stdout.split()) <= states

        wait_for(reached, f"nodes that are {states}\n{self.said('slurmctld')}", 120.0, 0.2)

    def restore(self) -> None:
        """End all jobs and bring both nodes back, for the next trial."""
        self._cancel()
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        wait_for(lambda: not self.command("squeue", "-h"), "no jobs", 120.0, 0.5)
        for node in self.command("sinfo", "-N", "-h", "-t", "down,drain,drained", "-o", "%N").split():
            with suppress(AssertionError):  # it may have come back by itself
                self.update_node(node, "RESUME")
        self.wait_for_nodes({"idle"})

    def said(self, daemon: str) -> str:
        """The end of the output of a daemon."""
        path = self.folder / f"{daemon}.log"
        return path.read_text(errors="replace")[-3000:] if path.exists() else ""

    def submit(self, batch_file: Path, *options: str) -> "Job":
        """`sbatch` in the folder of a batch file."""
        said = self.command("sbatch", "--parsable", *options, batch_file.name, cwd=batch_file.parent)
        return Job(self, int(said.strip().partition(";")[0]))

    def _processes(self, setting: str) -> list[int]:
        """Processes of this Slurm and its jobs whose environment has a setting, but for this process."""
        own, found = f"SLURM_CONF={self.conf}".encode(), []
        for path in Path("/proc").iterdir():
            if path.name.isdigit() and int(path.name) != os.getpid():
                variables = _read(int(path.name), "environ").split(b"\0")
                if own in variables and setting.encode() in variables:
                    found.append(int(path.name))
        return found

    def _cancel(self) -> None:
        command = ["scancel", f"--user={getpass.getuser()}"]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, env=self.environment(), capture_output=True, timeout=30, check=False)

    def __exit__(self, *error: object) -> None:
        """End jobs, then daemons, then what is left of either; a signal that asks for an end does not stop this."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        self._cancel()
        until = time.monotonic() + 15.0
        daemons = {each.pid for each in self._daemons.values()}
        while time.monotonic() < until and set(self._processes(f"SLURM_CONF={self.conf}")) - daemons:
            time.sleep(0.2)
        for name in (*NODES, "slurmctld", "munged"):
            if daemon := self._daemons.pop(name, None):
                daemon.terminate()
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(15.0)
                daemon.kill()
                daemon.wait()
        for pid in self._processes(f"SLURM_CONF={self.conf}"):
            send_signal(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Job:
    """A job of a cluster."""

    cluster: Cluster
    number: int

    def fields(self) -> dict[str, str]:
        """What Slurm knows of it: `JobState`, `Restarts`, `Reason`, `ExitCode` and others."""
        said = self.cluster.command("scontrol", "show", "job", "-o", str(self.number))
        return {name: value for name, _, value in (word.partition("=") for word in said.split())}

    @property
    def state(self) -> str:
        return self.fields()["JobState"]

    def wait(self, states: Sequence[str], timeout_s: float = 900.0) -> dict[str, str]:
        """Its fields once it is in one of these states."""
        wait_for(lambda: self.state in states, f"job {self.number} {states}: {self.fields()}", timeout_s, 0.5)
        return self.fields()


def _read(pid: int, name: str) -> bytes:
    """A file of /proc/PID; nothing where the process is gone or another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""
