"""A worker or a server written by hand over MPI: mpi4py, shared memory."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from hand_written import Array, HandWritten
from turns import work, worker_parser


class MpiExchange(HandWritten):
    """A rank that sends and receives with Open MPI."""

    def send(self, array: Array, rank: int, piece: int) -> Any:
        return MPI.COMM_WORLD.Isend(array, rank, piece)

    def receive(self, array: Array, rank: int, piece: int) -> Any:
        return MPI.COMM_WORLD.Irecv(array, rank, piece)

    def wait(self, pending: list[Any]) -> None:
        MPI.Request.Waitall(pending)


def main() -> None:
    parser = worker_parser()
    parser.add_argument("--megabytes", type=int, required=True)
    args = parser.parse_args()
    rank = MPI.COMM_WORLD.Get_rank()
    work(args.socket, rank, MpiExchange(rank, args.size, args.megabytes))


if __name__ == "__main__":
    main()
