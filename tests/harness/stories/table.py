"""What happens to a table, as a list of changes, each safe to repeat; on storage of any kind.

The story acts as a shard: it creates rows, updates them, sums gradients, closes a step in
batches, evicts, and gives free places away again. How far it has come is `record.version`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from shardwell_server.store.contract import (
    FREE,
    Position,
    Store,
    TableLayout,
    TableRecord,
    TableStorage,
)

State = dict[str, Any]
LAYOUT = TableLayout(
    name="t",
    dim=3,
    slot_widths=(3, 1),
    row_capacity=64,
    rows_per_change_max=8,
    with_sum=True,
    description={"any": ["thing", 1, 0.1]},
)


def _nothing(point: str) -> None:
    pass


class Step(NamedTuple):
    """One change."""

    places: list[int]
    value: int
    """The written values are a function of it and the place."""
    values: bool = True
    sums: bool = False
    is_free: bool = False
    """The rows are evicted."""
    has_sum: bool = True
    """Sums are written, else cleared."""
    position: tuple[int, int, int] | None = None


STORY = [
    Step([0, 1, 2], 1, position=(0, 0, 1)),  # all new
    Step([1, 3, 0, 4], 2, position=(0, 1, 0)),  # old and new
    Step([4, 2], 3, position=(1, 1, 0)),
    Step([1, 2, 3], 4, values=False, sums=True, position=(1, 1, 1)),
    Step([3, 5, 0, 6], 5, values=False, sums=True, position=(0, 1, 1)),  # new rows with sums
    Step([], 6, position=(1, 2, 0)),
    Step([1, 3, 6], 7, sums=True, has_sum=False),  # a closing, batch by batch
    Step([0, 2, 5], 8, sums=True, has_sum=False),
    Step([2, 4], 9, is_free=True),
    Step([4, 7, 1], 10, position=(0, 2, 0)),  # a free place, a new one
    Step([6, 5, 4, 3, 2, 1, 0, 7], 11, sums=True, position=(1, 2, 1)),
]


def make(store: Store) -> TableStorage:
    """The table of the story: that of an earlier process, or a new one."""
    store.recover()
    found = store.recover_tables()
    store.recovered()
    return found[0][1] if found else store.create(LAYOUT)


def take_seats(storage: TableStorage) -> None:
    """Two workers', if they are not there yet."""
    while len(storage.positions()) < 2:
        storage.add_seat()
        storage.log({"kind": "seat", "worker_id": f"w{len(storage.positions())}"})


def tell(
    storage: TableStorage,
    reached: Callable[[str], None] = _nothing,
    answered: Callable[[], None] = lambda: None,
) -> None:
    """Does what is not done yet; `reached` is called after every write of rows too.

    All is durable before it is answered. Images are made whose time it is, and further changes
    between their blocks.
    """
    take_seats(storage)
    for _ in range(storage.record.version):
        answered()
    steps = iter(range(storage.record.version, len(STORY)))

    def one() -> bool:
        """Makes the next change; False, for `is_stopping`."""
        number = next(steps, None)
        if number is not None:
            apply(storage, STORY[number], number + 1, reached)
            storage.make_durable()
            answered()
        return False

    while storage.record.version < len(STORY):
        one()
        storage.make_image(one)


def apply(
    storage: TableStorage, step: Step, version: int, reached: Callable[[str], None] = _nothing
) -> None:
    """Makes one change."""
    places = np.array(step.places, np.int64)
    used = storage.record.row_used
    new = places[places >= used]
    following = max([used, *(place + 1 for place in step.places)])
    storage.reserve(following)
    with storage.change(places, values=step.values, sums=step.sums) as change:
        if step.values:
            weights, slots = write_values(
                storage, places, change.weights + step.value, step, reached
            )
            if step.value % 2:  # half of them by the storage
                change.weights[:] = weights
                change.write(weights=change.weights, slots=slots)
                reached("rows written by the storage")
            else:
                storage.weights[places] = weights
                reached("weights written")
                for array, rows in zip(storage.slots, slots, strict=True):
                    array[places] = rows
                    reached("slot written")
            storage.keep_rows(version, places, change.weights_before.copy())
        elif new.size:
            weights, slots = write_values(storage, new, np.zeros((new.size, 3)), step, reached)
            storage.weights[new] = weights
            for array, rows in zip(storage.slots, slots, strict=True):
                array[new] = rows
        if step.sums:
            assert storage.sums is not None
            sums = np.repeat(places[:, None] * 100.0 + step.value, 3, axis=1).astype(np.float32)
            if step.has_sum and step.value % 2:
                change.write(sums=sums)
            elif step.has_sum:
                storage.sums[places] = sums
            reached("sums written")
            storage.has_sum[places] = step.has_sum
            reached("flags written")
        count = step.value % 3
        record = TableRecord(
            following, version, count, step.value * 10, -step.value, is_closing=count == 1
        )
        position = None if step.position is None else Position(*step.position)
        change.commit(record, position)


def write_values(
    storage: TableStorage,
    places: np.ndarray,
    weights: np.ndarray,
    step: Step,
    reached: Callable[[str], None],
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Writes keys and counts of rows; returns their weights and slots.

    A new row's weights don't count in what was before.
    """
    is_new = places >= storage.record.row_used
    storage.keys[places] = places + 1000 * step.value
    storage.update_counts[places] = FREE if step.is_free else step.value
    storage.last_steps[places] = step.value + 50
    reached("counts written")
    slots = [
        np.repeat(places[:, None] * 10.0 + step.value + number, array.shape[1], axis=1)
        for number, array in enumerate(storage.slots)
    ]
    weights = np.where(is_new[:, None], places[:, None] + step.value, weights)
    return weights.astype(np.float32), [rows.astype(np.float32) for rows in slots]


def state_of(storage: TableStorage) -> State:
    """All that storage must keep, in plain values; checked against damage on the way."""
    used = storage.record.row_used
    storage.verify(np.arange(used))
    assert storage.sums is not None
    has_sum = storage.has_sum[:used]
    return {
        "record": storage.record,
        "positions": storage.positions(),
        "keys": storage.keys[:used].tolist(),
        "update_counts": storage.update_counts[:used].tolist(),
        "last_steps": storage.last_steps[:used].tolist(),
        "weights": storage.weights[:used].tobytes(),
        "slots": [slot[:used].tobytes() for slot in storage.slots],
        "has_sum": has_sum.tolist(),
        "sums": storage.sums[:used][has_sum].tobytes(),
    }
