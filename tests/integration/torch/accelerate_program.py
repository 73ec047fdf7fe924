"""Runs Accelerate's own test scripts on the backend "shardwell".

    python accelerate_program.py FOLDER WORLD_SIZE SCRIPT...

A script is the name of a module, and behind colons those of its functions that are left out. Its
processes are forks of this one, which has imported Accelerate once, with the variables that
torchrun sets. For each script it prints a line: the name of its module, and "ok" or "failed".
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

FOLDER, WORLD_SIZE, SCRIPTS = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.environ.update(
    ACCELERATE_USE_CPU="true",
    HF_HUB_OFFLINE="1",
    WORLD_SIZE=str(WORLD_SIZE),
    LOCAL_WORLD_SIZE=str(WORLD_SIZE),
    MASTER_ADDR="127.0.0.1",
    MASTER_PORT="0",
)

import accelerate.test_utils.testing  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

import shardwell.torch  # noqa: E402, F401 (registers the backend)


def run(script: str, left_out: list[str], rank: int) -> int:
    """A rank's exit code."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    sys.argv[1:] = []
    os.chdir(FOLDER)
    try:
        dist.init_process_group(
            "shardwell",
            init_method=f"file://{FOLDER}/{script}-store",
            world_size=WORLD_SIZE,
            rank=rank,
            timeout=timedelta(seconds=60),
        )
        module = importlib.import_module(f"accelerate.test_utils.scripts.{script}")
        for name in left_out:
            assert callable(getattr(module, name)), name
            setattr(module, name, lambda *_: None)
        module.main()
        if dist.is_initialized():
            assert dist.get_backend() == "shardwell"
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


def main() -> None:
    torch.set_num_threads(1)
    for script, *left_out in (each.split(":") for each in SCRIPTS):
        children = []
        for rank in range(WORLD_SIZE):
            child = os.fork()
            if not child:
                os.dup2(2, 1)  # what scripts print is none of the results
                os._exit(run(script, left_out, rank))
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(script, "failed" if any(codes) else "ok", flush=True)


if __name__ == "__main__":
    assert accelerate is not None
    main()
