"""Goal: an offer has the states of its table, and an error is raised once."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from shardwell.errors import WorkersMissingError
from shardwell.outer.fragment import Offer
from shardwell.parameter.values import TensorViews
from shardwell.specs.layout import TensorLayout

LAYOUT = TensorLayout.of({"w": (2,)})


def test_its_states_are_those_of_the_table() -> None:
    offer = Offer(TensorViews(LAYOUT, np.ones(2, np.float32)), sample_count=1, step=0, due=1)
    assert offer.state == "made"
    first: Future = Future()
    offer.begin(first)
    assert offer.state == "travelling"
    assert offer.ended_s == 0.0
    first.set_exception(WorkersMissingError("w1 is missing"))
    assert offer.state == "failed"
    assert offer.ended_s >= offer.call_began_s
    offer.is_known = True
    assert offer.state == "known"
    second: Future = Future()
    offer.begin(second)
    assert offer.state == "travelling"
    assert offer.ended_s == 0.0
    second.set_result({})
    assert offer.state == "come"
    assert offer.error is None
