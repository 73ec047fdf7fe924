"""A worker or a server written by hand over gloo: torch.distributed's send and recv."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hand_written import Array, HandWritten
from turns import work, worker_parser


class GlooExchange(HandWritten):
    """A rank that sends and receives with gloo."""

    piece_size = 2**23  # each message costs more than there is to overlap

    def send(self, array: Array, rank: int, piece: int) -> Any:
        return dist.isend(torch.from_numpy(array), rank, tag=piece)

    def receive(self, array: Array, rank: int, piece: int) -> Any:
        return dist.irecv(torch.from_numpy(array), rank, tag=piece)

    def wait(self, pending: list[Any]) -> None:
        for one in pending:
            one.wait()

    def close(self) -> None:
        dist.destroy_process_group()


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--megabytes", type=int, required=True)
    args = parser.parse_args()
    meeting = Path(args.socket).with_name("gloo")
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=args.rank, world_size=args.size
    )
    work(args.socket, args.rank, GlooExchange(args.rank, args.size, args.megabytes))


if __name__ == "__main__":
    main()
