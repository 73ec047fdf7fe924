"""Which peers are installed, in which interpreters, and how their workers are started."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from peers.turns import Crew, worker_command


class Installed:
    """gloo and Open MPI, where they are there.

    Args:
        args: Those of `add_flags`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._torch_python: str = args.torch_python
        self._mpi_python: str = args.mpi_python
        self.missing: dict[str, str] = {}
        """By peer, gloo and Open MPI: why it is left out."""
        if not has_module(self._torch_python, "torch.distributed"):
            self.missing["gloo"] = f"{self._torch_python} has no torch; pass --torch-python PYTHON"
        places = (str(Path(self._mpi_python).parent), os.environ.get("PATH", os.defpath))
        self._mpirun = shutil.which("mpirun", path=os.pathsep.join(places)) or ""
        if not self._mpirun:
            self.missing["Open MPI"] = f"no mpirun is on PATH or beside {self._mpi_python}"
        elif not has_module(self._mpi_python, "numpy, mpi4py.MPI"):
            self.missing["Open MPI"] = (
                f"{self._mpi_python} can't import numpy and mpi4py; pass --mpi-python PYTHON"
            )

    def gloo(self, size: int, worker: str, *flags: str) -> Crew:
        """So many ranks."""
        command = worker_command(worker, *flags, python=self._torch_python)
        return Crew([command] * size, size, {"GLOO_SOCKET_IFNAME": "lo"})

    def open_mpi(
        self, size: int, worker: str, *flags: str, mpirun_flags: tuple[str, ...] = ()
    ) -> Crew:
        """So many ranks, which are more than there are cores."""
        command = [self._mpirun, "--oversubscribe", "--bind-to", "none", *mpirun_flags]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command += ["-n", str(size), *worker_command(worker, *flags, python=self._mpi_python)]
        return Crew([command], size)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Where peers are, if not in this interpreter."""
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter with torch")
    parser.add_argument("--mpi-python", default=sys.executable, help="an interpreter with mpi4py")


def has_module(python: str, module: str) -> bool:
    """Whether an interpreter can import something."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=120)
        return done.returncode == 0
    return False
