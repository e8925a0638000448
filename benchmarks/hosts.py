"""Two hosts on this machine: network namespaces with process ids and a clock of their own, joined by a veth pair."""

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from chaos_runs import children

SLOW = {"netem": ["netem", "delay", "20ms"], "tbf": ["tbf", "rate", "4mbit", "burst", "16kb", "latency", "500ms"]}
AS_PID_1 = """
hostname "$0"
"$@"
code=$?
sleep 1
set -- /proc/[0-9]*
[ $# -eq 1 ] || echo "$(($# - 1)) processes are left over"
exit $code
"""
"""What the first process of a host does, whose end is that of all others there."""


def why_not() -> str:
    """Why this machine cannot be two hosts; nothing where it can."""
    if missing := [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]:
        return f"no {', '.join(missing)} here (iproute2, util-linux)"
    name = f"sw{os.getpid()}try"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"`ip netns add` is refused: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


@dataclass
class Host:
    """A network namespace, and the torchrun that runs in it."""

    name: str
    namespace: str
    interface: str
    address: str
    clock_ahead_s: int
    """Of its monotonic clock, before that of this machine."""
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, command: Sequence[str], said: Path) -> None:
        """Run a command as the only one of this host."""
        own = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        own += ["--time", "--monotonic", str(self.clock_ahead_s)]
        environment = os.environ | {"GLOO_SOCKET_IFNAME": self.interface, "OMP_NUM_THREADS": "1"}
        environment |= self.environment
        with said.open("ab") as file:
            self.process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *own, "bash", "-c", AS_PID_1, self.name, *command],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Processes of its ranks, by the ids that they have outside of it."""
        if self.process is None:
            return []
        by_parent, found, new = children(), [], [self.process.pid]
        while new:
            found += new
            new = [pid for each in new for pid in by_parent.get(each, [])]
        lines = {pid: _command(pid) for pid in found}
        return [pid for pid in found if b"shardwright" in lines[pid] and b"torch.distributed.run" not in lines[pid]]

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Link:
    """Two hosts joined by a veth pair, from the beginning of a `with` to its end."""

    def __init__(self) -> None:
        mark = os.getpid() % 100000
        self.hosts = [
            Host(f"host-{name}", f"sw{mark}{name}", f"sw{mark}{name}0", f"10.213.0.{number}", ahead_s)
            for number, name, ahead_s in ((1, "a", 0), (2, "b", 500_000))
        ]

    def __enter__(self) -> "Link":
        try:
            a, b = self.hosts
            for host in self.hosts:
                _ip("netns", "add", host.namespace)
            peer = ["peer", "name", b.interface, "netns", b.namespace]
            _ip("link", "add", a.interface, "netns", a.namespace, "type", "veth", *peer)
            for host in self.hosts:
                _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
                for interface in ("lo", host.interface):
                    _ip("-n", host.namespace, "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End what runs on the hosts, and remove them."""
        for host in self.hosts:
            host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)

    def set(self, state: str) -> None:
        """`down` or `up`."""
        _ip("-n", self.hosts[0].namespace, "link", "set", self.hosts[0].interface, state)

    def slow(self) -> str:
        """Make it slow both ways; returns by what."""
        for discipline, words in SLOW.items():
            commands = [
                ["ip", "netns", "exec", host.namespace, "tc", "qdisc", "add", "dev", host.interface, "root", *words]
                for host in self.hosts
            ]
            if all(subprocess.run(each, capture_output=True, check=False).returncode == 0 for each in commands):
                return " ".join(words) if discipline == "netem" else f"no netem here; {' '.join(words)}"
        return ""

    def fast(self) -> None:
        """As it was before `slow`."""
        for host in self.hosts:
            delete = ["tc", "qdisc", "del", "dev", host.interface, "root"]
            subprocess.run(["ip", "netns", "exec", host.namespace, *delete], capture_output=True, check=False)


def _command(pid: int) -> list[bytes]:
    """The words that a process was started with; none of one that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
