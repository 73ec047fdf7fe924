"""Goal: what a learner says of itself is checked, and comes as it was sent."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardwell import LearnerProgress
from shardwell.errors import ArgumentError
from shardwell.v1 import parameter_server_pb2 as pb

NAMES = [each.name for each in fields(LearnerProgress)]


def test_it_comes_as_it_was_sent() -> None:
    values: dict[str, Any] = {name: number + 1 for number, name in enumerate(NAMES)}
    sent = LearnerProgress(**values)
    message = pb.LearnerProgress.FromString(sent.to_proto().SerializeToString())
    assert [field.name for field in pb.LearnerProgress.DESCRIPTOR.fields] == NAMES
    assert LearnerProgress.from_proto(message) == sent
    assert LearnerProgress.from_proto(pb.LearnerProgress()) == LearnerProgress()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [-1, float("nan"), float("inf"), 2**64, True, "1"], ids=lambda value: repr(value)
)
def test_no_number_of_it_is_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"a learner's {name} must be"):
        LearnerProgress(**{name: value})


@pytest.mark.parametrize(
    "message",
    [
        pb.LearnerProgress(inner_steps=2**63),
        pb.LearnerProgress(hidden_s=float("nan")),
        pb.LearnerProgress(waited_s=-1.0),
    ],
)
def test_nothing_else_is_read(message: pb.LearnerProgress) -> None:
    with pytest.raises(ArgumentError, match="a learner's"):
        LearnerProgress.from_proto(message)
