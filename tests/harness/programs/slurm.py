"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, as child processes.

Each node has a host name of its own, in a UTS namespace, and knows both by an /etc/hosts of its
own, in a mount namespace; nothing of it is seen outside. All files are in one directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from harness.polling import PATIENCE_S, eventually
from harness.programs.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare")
HOSTS = {"n1": "127.0.0.2", "n2": "127.0.0.3"}
_CPU_COUNT = 4
"""Of a node, whatever this machine has."""
_IN_NAMESPACES = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


def why_not() -> str:
    """The programs that are missing here, in words; empty: none."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed; Debian: slurmctld slurmd slurm-client munge"
    probe = ["unshare", "-u", "-m", "sh", "-c", _IN_NAMESPACES, "sh", "n1", "/etc/hosts", "true"]
    if os.geteuid() or subprocess.run(probe, capture_output=True, check=False).returncode:
        return "it takes root, and namespaces for the names of hosts"
    return ""


class Slurm:
    """Commands to it, in a directory for jobs."""

    def __init__(self, directory: Path, config: Path) -> None:
        self.directory = directory
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SHARDWELL_")},
            "SLURM_CONF": str(config),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def run(self, *command: str, **variables: str) -> str:
        """What a command prints."""
        done = subprocess.run(
            command,
            cwd=self.directory,
            env={**self.environment, **variables},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def submit(self, *arguments: str, **variables: str) -> str:
        """The number of a job."""
        return self.run("sbatch", "--parsable", *arguments, **variables).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)

    def log(self, number: str) -> str:
        """What a job has printed so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self.directory / f"shardwell-{number}.log").read_text()
        return ""

    def end(self, number: str, *, timeout_s: float = 90.0) -> tuple[str, str]:
        """State and exit code of a job, when nothing of it runs any more."""
        eventually(
            f"job {number} has ended",
            lambda: not self.run("squeue", "--noheader", "--states=all", "--jobs", number, "-t",
                                 "pending,running,completing,suspended,configuring"),
            timeout_s=timeout_s,
        )  # fmt: skip
        job = self.job(number)
        return job["JobState"], job["ExitCode"]


@contextlib.contextmanager
def running_slurm(home: Path) -> Iterator[Slurm]:
    """Slurm with both nodes idle; ended by process id, and its jobs before."""
    config, jobs, hosts = home / "slurm.conf", home / "jobs", home / "hosts"
    for name in ("state", *(f"spool-{host}" for host in HOSTS), "jobs"):
        (home / name).mkdir(parents=True)
    here = socket.gethostname()
    hosts.write_text(
        f"127.0.0.1 localhost {here}\n"
        + "".join(f"{address} {host}\n" for host, address in HOSTS.items())
    )
    key = home / "munge.key"
    key.touch(0o400)
    key.write_bytes(os.urandom(128))
    config.write_text(_config(home, here))
    munged = ["munged", "--foreground", "--force", f"--key-file={key}"]
    munged += [f"--socket={home}/munge.socket", f"--pid-file={home}/munged.pid"]
    munged += [f"--seed-file={home}/munge.seed", f"--log-file={home}/munged.log"]
    slurm = Slurm(jobs, config)
    with contextlib.ExitStack() as stack:
        _start(stack, home, "munged", munged)
        eventually("munged listens", (home / "munge.socket").exists)
        _start(stack, home, "slurmctld", ["slurmctld", "-D", "-f", str(config)])
        for host in HOSTS:
            command = ["unshare", "-u", "-m", "sh", "-c", _IN_NAMESPACES, "sh", host, str(hosts)]
            _start(stack, home, host, [*command, "slurmd", "-D", "-f", str(config)])

        def are_idle() -> bool:
            with contextlib.suppress(AssertionError):
                return slurm.run("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(HOSTS)
            return False

        try:
            eventually("both nodes are idle", are_idle)
        except AssertionError:
            logs = {path.name: path.read_text()[-2000:] for path in home.glob("*.out")}
            raise AssertionError(f"Slurm did not start: {logs}") from None
        try:
            yield slurm
        finally:
            slurm.run("scancel", "--user=root")
            eventually("no job is left", lambda: not slurm.run("squeue", "--noheader"))


def _start(stack: contextlib.ExitStack, home: Path, name: str, command: list[str]) -> None:
    output = stack.enter_context((home / f"{name}.out").open("w"))
    variables = {**os.environ, "SLURM_CONF": str(home / "slurm.conf")}
    process = subprocess.Popen(
        command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output
    )

    def end() -> None:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _config(home: Path, here: str) -> str:
    nodes = "\n".join(
        f"NodeName={host} NodeAddr={address} Port={free_port()} CPUs={_CPU_COUNT} State=UNKNOWN"
        for host, address in HOSTS.items()
    )
    return f"""
ClusterName=test
SlurmctldHost={here}(127.0.0.1)
SlurmctldPort={free_port()}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={home}/munge.socket
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
KillWait=20
MinJobAge=3600
{nodes}
PartitionName=all Nodes={",".join(HOSTS)} Default=YES MaxTime=INFINITE State=UP
"""
