"""Goal: `torch.distributed` works on the backend "shardwell" as on gloo, and its errors have names.

Method: three real processes with both backends at once; each collective is made by both, on the
same tensors of whole numbers, and the results are compared bit by bit, or with plain sums where
gloo has no such collective. DDP under torchrun.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.programs.commands import Program
from harness.programs.ports import free_port

torch = pytest.importorskip("torch", reason="torch is not installed; it is not a dependency")

BEGIN = """
import itertools, os, sys, torch, shardwell, shardwell.torch
import torch.distributed as dist
from datetime import timedelta

dist.init_process_group("shardwell", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
"""
COLLECTIVES = (
    BEGIN
    + """
gloo = dist.new_group(backend="gloo")
ops = dist.ReduceOp
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32,
          torch.uint8, torch.bool]

def values(dtype, shape=(4, 5), seed=0):
    made = torch.Generator().manual_seed(10 * rank + seed)
    return torch.randint(0, 2 if dtype == torch.bool else 9, shape, generator=made).to(dtype)

def same(what, call):
    results = [call(group) for group in (None, gloo)]
    for mine, its in zip(*results, strict=True):
        assert mine.dtype == its.dtype and torch.equal(mine, its), (what, mine, its)

def reduced(op, dtype, make):
    def call(group):
        tensor = make(dtype)
        dist.all_reduce(tensor, op, group=group)
        return [tensor]
    return call

for dtype, op in itertools.product(DTYPES[:-1], [ops.SUM, ops.MIN, ops.MAX, ops.PRODUCT]):
    same((dtype, op), reduced(op, dtype, values))
for op in (ops.BAND, ops.BOR, ops.BXOR):
    same(op, reduced(op, torch.int64, values))
strided, plain = values(torch.float32).t()[1:], values(torch.float32).t()[1:].contiguous()
dist.all_reduce(strided)  # of which gloo reduces other elements
dist.all_reduce(plain, group=gloo)
assert torch.equal(strided, plain)
same("one", reduced(ops.SUM, torch.float32, lambda dtype: values(dtype, ())))
mean = values(torch.float32)
dist.all_reduce(mean, ops.AVG)

for dtype, root in itertools.product(DTYPES, range(size)):
    def broadcast(group):
        tensor = values(dtype)
        dist.broadcast(tensor, root, group=group)
        return [tensor]
    def gathered(group):
        places = [torch.zeros(4, 5, dtype=dtype) for _ in range(size)]
        dist.all_gather(places, values(dtype), group=group)
        return places
    def gather(group):
        places = [torch.zeros(4, 5, dtype=dtype) for _ in range(size)] if rank == root else None
        dist.gather(values(dtype), places, root, group=group)
        return places or []
    def scatter(group):
        parts = [values(dtype, seed=i) for i in range(size)] if rank == root else None
        output = torch.zeros(4, 5, dtype=dtype)
        dist.scatter(output, parts, root, group=group)
        return [output]
    for call in (broadcast, gathered, gather, scatter):
        same((call.__name__, dtype, root), call)
for dtype in (torch.float32, torch.int64, torch.bfloat16):
    def reduce(group):
        tensor = values(dtype)
        dist.reduce(tensor, 1, group=group)
        return [tensor] if rank == 1 else []
    def into_one(group):
        output = torch.zeros(size * 4, 5, dtype=dtype)
        dist.all_gather_into_tensor(output, values(dtype), group=group)
        return [output]
    for call in (reduce, into_one):
        same((call.__name__, dtype), call)
    parts = [values(dtype, (7,), seed=i) for i in range(size)]
    whole, one = torch.zeros(7, dtype=dtype), torch.zeros(7, dtype=dtype)
    dist.reduce_scatter(whole, [part.clone() for part in parts])
    dist.reduce_scatter_tensor(one, torch.cat(parts))
    expected = torch.cat(parts)
    dist.all_reduce(expected, group=gloo)
    assert torch.equal(whole, expected[7 * rank : 7 * rank + 7]), (dtype, whole)
    assert torch.equal(one, whole), (dtype, one)
    given = values(dtype, (size * 2,))
    everything = [torch.zeros(size * 2, dtype=dtype) for _ in range(size)]
    dist.all_gather(everything, given, group=gloo)
    exchanged = torch.zeros(size * 2, dtype=dtype)
    dist.all_to_all_single(exchanged, given)
    assert torch.equal(exchanged, torch.cat([x[2 * rank : 2 * rank + 2] for x in everything]))

work = [dist.all_reduce(values(torch.float32, (100_000,)), async_op=True) for _ in range(5)]
dist.barrier()
for each in work:
    each.wait()
    assert each.get_future().done()  # DDP.join reads it at once
found = [None] * size
dist.all_gather_object(found, {"rank": rank, "text": "x" * rank})
assert [each["rank"] for each in found] == list(range(size)), found
told = [{"from": rank}]
dist.broadcast_object_list(told, 2)
assert told == [{"from": 2}]
some = dist.new_group([0, 2], backend="shardwell")
if rank != 1:
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=some)
    assert tensor.tolist() == [2.0] * 3
try:
    dist.all_reduce(torch.zeros(rank + 1))
except shardwell.CollectiveMismatchError as error:
    print("lengths", error, flush=True)
except Exception as error:
    print("lengths", type(error), error, flush=True)
dist.barrier()
dist.destroy_process_group()
print("done", flush=True)
"""
)
UNEVEN = (
    BEGIN
    + """
gloo = dist.new_group(backend="gloo")
ours = dist.group.WORLD
store = dist.distributed_c10d._get_default_store()

def values(*shape, dtype=torch.float32, seed=rank):
    return torch.randint(0, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

def same(what, call):
    for mine, its in zip(call(ours), call(gloo), strict=True):
        assert torch.equal(mine, its), (what, mine, its)

# What is gathered together: of each rank a list.
for dtype in (torch.float32, torch.int64, torch.uint8):
    def together(group):
        given = [values(2, 3, dtype=dtype), values(5, dtype=dtype), values(0, dtype=dtype)]
        places = [[torch.zeros_like(tensor) for tensor in given] for _ in range(size)]
        group.allgather_coalesced(places, given).wait()
        return [place for each in places for place in each]
    def into_ones(group):
        given = [values(2, 3, dtype=dtype), values(5, dtype=dtype)]
        places = [torch.zeros(size * 2, 3, dtype=dtype), torch.zeros(size * 5, dtype=dtype)]
        group.allgather_into_tensor_coalesced(places, given).wait()
        return places
    def exchanged(group):  # rank r has r + s + 1 rows for rank s
        counts = [rank + other + 1 for other in range(size)]
        given, got = values(sum(counts), 2, dtype=dtype), torch.zeros(sum(counts), 2, dtype=dtype)
        dist.all_to_all_single(got, given, counts, counts, group=group)
        return [got]
    for call in (together, into_ones, exchanged):
        same((call.__name__, dtype), call)
    every = [values(other + 1, 3, dtype=dtype, seed=other) for other in range(size)]
    places = [torch.zeros_like(tensor) for tensor in every]
    dist.all_gather(places, every[rank])
    assert all(map(torch.equal, places, every)), places
    sent = [[values(s, r + 1, dtype=dtype, seed=7 * r + s) for s in range(size)]
            for r in range(size)]  # nothing for rank 0
    got = [torch.zeros_like(each[rank]) for each in sent]
    dist.all_to_all(got, sent[rank])
    assert all(torch.equal(mine, each[rank]) for mine, each in zip(got, sent)), got
    parts = [[values(s + 1, 2, dtype=dtype, seed=7 * r + s) for s in range(size)]
             for r in range(size)]
    for op, expected in (
        (dist.ReduceOp.SUM, sum(each[rank] for each in parts)),
        (dist.ReduceOp.MIN, torch.stack([each[rank] for each in parts]).amin(0)),
    ):
        part = torch.zeros(rank + 1, 2, dtype=dtype)
        dist.reduce_scatter(part, parts[rank], op)
        assert torch.equal(part, expected.to(dtype)), (op, part)
    given = [values(size, 2, dtype=dtype), values(size * 3, dtype=dtype)]
    places = [torch.zeros(1, 2, dtype=dtype), torch.zeros(3, dtype=dtype)]
    ours.reduce_scatter_tensor_coalesced(places, given, dist.ReduceScatterOptions()).wait()
    for place, tensor in zip(places, given):
        dist.all_reduce(tensor, group=gloo)
        assert torch.equal(place, tensor[len(place) * rank:][:len(place)]), place

def sparse(group):  # ranks have different rows, and rank 0 one of them twice
    rows = [[0, 0, 3], [3], []][rank]
    made = (torch.tensor([rows], dtype=torch.int64), values(len(rows), 2), (4, 2))
    tensor = torch.sparse_coo_tensor(*made, check_invariants=True)
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]
same("sparse", sparse)

given, exchanged = values(size * 2), torch.zeros(size * 2)
places = [torch.zeros(size * 2) for _ in range(size)]
rows, number = torch.sparse_coo_tensor([[rank, 3]], torch.ones(2), (8,)), torch.tensor(1)
with torch.device("meta"):  # where a tensor of ours that names no device has no values
    dist.all_to_all_single(exchanged, given)
    dist.all_gather(places, given)
    dist.all_reduce(rows)
    dist.all_reduce(number)
assert torch.equal(places[rank], given)
assert torch.equal(exchanged, torch.cat([each[2 * rank : 2 * rank + 2] for each in places]))
assert rows.to_dense()[3] >= size and int(number) == size

for _ in range(5):  # nobody leaves before the others have come
    some = dist.new_group([0, 2], backend="shardwell")
    if rank != 1:
        assert dist.distributed_c10d._resolve_process_group(some.group_name) is some
        dist.destroy_process_group(some)

def twice(first):  # what is chained may wait for another, as PowerSGD does
    other = dist.all_reduce(first.value()[0], async_op=True)
    return other.get_future().wait()[0]
first = dist.all_reduce(torch.ones(2), async_op=True).get_future().then(twice)
assert first.wait().tolist() == [9.0, 9.0]

def refused(error, call):
    try:
        call()
    except error as found:
        print(found, flush=True)
    else:
        print("nothing", flush=True)

refused(shardwell.ArgumentError, lambda: dist.send(torch.zeros(1), (rank + 1) % size))
refused(shardwell.ArgumentError, lambda: dist.irecv(torch.zeros(1), (rank + 1) % size))
refused(shardwell.ArgumentError, lambda: dist.irecv(torch.zeros(1)))
wrong = torch.zeros(size + 1)
refused(shardwell.CollectiveMismatchError, lambda: dist.all_to_all_single(
    wrong, torch.zeros(size), [2] + [1] * (size - 1), [1] * size))
# The others come when rank 0 has given up.
options = dist.BarrierOptions()
options.timeout = timedelta(seconds=0.3 if rank == 0 else 60)
if rank != 0:
    store.wait(["barrier"])
refused(shardwell.WorkersMissingError, lambda: ours.barrier(options).wait())
if rank == 0:
    store.set("barrier", "")
else:
    store.wait(["reduced"])
tensor = torch.ones(3)
work = dist.all_reduce(tensor, async_op=True)
if rank == 0:
    refused(shardwell.DeadlineError, lambda: work.wait(timedelta(seconds=0.1)))
    store.set("reduced", "")
work.wait()
assert tensor.tolist() == [3.0] * 3
dist.destroy_process_group()
print("done", flush=True)
"""
)
LOST = (
    BEGIN
    + """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(30, 5))
loss = model(torch.randn(4, 30)).sum()
if rank == 1:
    import os
    os._exit(3)
try:
    loss.backward()
except RuntimeError as error:  # out of C++, which keeps the name and the text
    print(str(error).replace("\\n", " "), flush=True)
for is_async in (False, True):
    try:
        work = dist.all_reduce(torch.zeros(10), async_op=is_async)
        work.wait()
    except shardwell.ShardwellError as error:
        print(type(error).__name__, error, flush=True)
"""
)
DDP = (
    BEGIN
    + """
torch.manual_seed(1)
layers = [torch.nn.Linear(20, 50), torch.nn.BatchNorm1d(50), torch.nn.Linear(50, 3)]
model = torch.nn.Sequential(*layers)
ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
torch.manual_seed(rank)
for step in range(20):
    loss = torch.nn.functional.cross_entropy(ddp(torch.randn(16, 20)), torch.randint(0, 3, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
found = [torch.zeros(50, 20) for _ in range(size)]
dist.all_gather(found, model[0].weight.detach())
assert all(torch.equal(found[0], other) for other in found)
# In one piece: both ranks write to one pipe.
os.write(1, b"%d %.6f" % (rank, found[0].abs().sum().item()) + bytes([10]))
dist.destroy_process_group()
"""
)


def programs(text: str, size: int) -> list[Program]:
    port = str(free_port())
    return [
        Program(
            "-c",
            text,
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
            is_forked=True,
        )
        for rank in range(size)
    ]


def test_collectives_are_gloos() -> None:
    first, second, third = programs(COLLECTIVES, 3)
    with first, second, third:
        for each in (first, second, third):
            assert each.end(150.0) == 0, each.log
            assert each.lines[-1] == "done"
            assert each.lines[-2].startswith("lengths")
            assert "element" in each.lines[-2], each.lines[-2]


def test_what_is_uneven_sparse_or_refused() -> None:
    first, second, third = programs(UNEVEN, 3)
    with first, second, third:
        for each in (first, second, third):
            assert each.end(150.0) == 0, each.log
            *messages, mismatch, missing = each.lines[:5]
            assert len(messages) == 3
            assert all("new_group(backend='gloo')" in line for line in messages), messages
            assert "rank 0 sent 1 elements" in mismatch
            assert "ranks 1, 2 did not call barrier" in missing
            assert each.lines[-1] == "done"
        assert "within 0.1 s" in first.lines[-2]


def test_a_rank_that_is_lost_is_named() -> None:
    first, second, third = programs(LOST, 3)
    with first, second, third:
        assert second.end(150.0) == 3, second.log
        for each in (first, third):
            assert each.end(150.0) == 0, each.log
            assert len(each.lines) == 3, each.lines
            assert all("rank 1" in line for line in each.lines), each.lines
            assert "WorkerLostError" in each.lines[0]


def test_ddp_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(DDP)
    arguments = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        f"--master-port={free_port()}",
    ]
    with Program(*arguments, str(script)) as program:
        assert program.end(150.0) == 0, program.log
    printed = sorted(line for line in program.lines if line[:2] in ("0 ", "1 "))
    assert len(printed) == 2, program.lines
    assert printed[0][2:] == printed[1][2:]
