"""Goal: a spec that is out of range is never made, and what is made travels unchanged.

Method: every field at its limits and beyond them; messages are filled by hand, field by field, from
types.proto, and hypothesis sends specs through the wire's bytes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardwell
from shardwell import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Average,
    Elastic,
    LearnerProgress,
    Optimizer,
    ParameterSpec,
    RMSProp,
    RowWiseAdagrad,
)
from shardwell.errors import ArgumentError
from shardwell.specs.grouped_rate import RATE_GROUP_COUNT_MAX, factors_of, rate_of
from shardwell.specs.optimizers import check_learning_rate
from shardwell.v1 import parameter_server_pb2 as pb
from shardwell.v1 import types_pb2

CODECS = {"fp32": 1, "fp16": 2, "bf16": 3}
"""types.proto's numbers."""
RULES = [Average, SGD, Adagrad, RMSProp, Adam, AdamW]
NOT_NUMBERS = [math.nan, math.inf, -math.inf, "1", None, True, 1j, -1e-9, -1]

at_least_0 = st.floats(0, 1e30)
above_0 = st.floats(0, 1e30, exclude_min=True)
below_1 = st.floats(0, 1, exclude_max=True)
shared = dict.fromkeys(("learning_rate", "clip_value", "clip_norm", "weight_decay"), at_least_0)
moments = {"beta1": below_1, "beta2": below_1, "epsilon": above_0}

optimizers = st.one_of(
    st.builds(Average, clip_value=at_least_0, clip_norm=at_least_0),
    st.builds(SGD, **shared, momentum=below_1, dampening=st.floats(0, 1)),
    st.builds(SGD, **shared, momentum=st.floats(0.1, 0.99), nesterov=st.just(True)),
    st.builds(Adagrad, **shared, epsilon=above_0, initial_accumulator=at_least_0),
    st.builds(RMSProp, **shared, decay=below_1, epsilon=above_0, momentum=below_1),
    st.builds(Adam, **shared, **moments),
    st.builds(AdamW, **shared, **moments),
)
codecs = st.sampled_from(["fp32", "fp16", "bf16", "fp32+lz4", "fp16+lz4", "bf16+lz4"])
common = {
    "name": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True),
    "size": st.integers(1, 2**48),
    "optimizer": optimizers,
    "codec": codecs,
    "allow_non_finite": st.booleans(),
}
specs = st.one_of(
    st.builds(ParameterSpec, **common, worker_count=st.integers(1, 2**16)),
    st.builds(ParameterSpec, **common, worker_count=st.just(0), mode=st.just("async")),
)


def spec(**changes: Any) -> ParameterSpec:
    values: dict[str, Any] = {
        "name": "model",
        "size": 650,
        "optimizer": SGD(learning_rate=0.5),
        "worker_count": 4,
    }
    return ParameterSpec(**{**values, **changes})


@given(specs)
def test_a_spec_travels_unchanged(sent: ParameterSpec) -> None:
    message = types_pb2.ParameterSpec.FromString(sent.to_proto().SerializeToString())
    assert ParameterSpec.from_proto(message) == sent
    assert sent.differences(ParameterSpec.from_proto(message)) == []


@given(specs)
def test_the_message_has_the_protos_numbers(sent: ParameterSpec) -> None:
    message = sent.to_proto()
    assert (message.name, message.size) == (sent.name, sent.size)
    assert message.codec == CODECS[sent.codec[:4]]
    assert message.compression == (2 if sent.codec.endswith("+lz4") else 1)
    assert message.mode == (1 if sent.mode == "sync" else 2)
    assert message.worker_count == sent.worker_count
    assert message.allow_non_finite == sent.allow_non_finite
    assert message.optimizer.clip_value == sent.optimizer.clip_value
    rule = getattr(message.optimizer, message.optimizer.WhichOneof("rule"))
    for field in rule.DESCRIPTOR.fields:
        assert getattr(rule, field.name) == getattr(sent.optimizer, field.name)
    shared_names = {"clip_value", "clip_norm"}
    sent_names = {field.name for field in dataclasses.fields(sent.optimizer)} - shared_names
    assert sent_names == {field.name for field in rule.DESCRIPTOR.fields}


def test_every_rule_of_the_proto_has_its_class() -> None:
    rules = types_pb2.Optimizer.DESCRIPTOR.oneofs_by_name["rule"].fields
    made = {Average(), SGD(learning_rate=1), Adagrad(learning_rate=1), RMSProp(learning_rate=1)}
    others = {Adam(), AdamW(), RowWiseAdagrad(learning_rate=1), FTRL(learning_rate=1)}
    found = {kind.to_proto().WhichOneof("rule") for kind in made | others}
    assert found == {field.name for field in rules}


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_every_number_of_an_optimizer_is_checked(kind: type[Optimizer], bad: Any) -> None:
    good = {} if kind is Average else {"learning_rate": 0.1}
    kind(**good)
    for field in dataclasses.fields(kind):
        if field.name != "nesterov":
            with pytest.raises(ArgumentError, match=rf"{kind.__name__}\.{field.name} must be a"):
                kind(**{**good, field.name: bad})


@pytest.mark.parametrize("huge", [10**400, -(10**400)], ids=["high", "low"])
def test_an_integer_beyond_float64_is_refused(huge: int) -> None:
    with pytest.raises(ArgumentError, match="learning_rate"):
        SGD(learning_rate=huge)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (SGD, "momentum"),
        (RMSProp, "momentum"),
        (RMSProp, "decay"),
        (Adam, "beta1"),
        (Adam, "beta2"),
        (AdamW, "beta1"),
        (AdamW, "beta2"),
    ],
)
def test_decays_are_below_1(kind: Any, field: str) -> None:
    kind(learning_rate=1.0, **{field: 0.0})
    kind(learning_rate=1.0, **{field: math.nextafter(1, 0)})
    for bad in (1.0, 1, 1.5):
        with pytest.raises(ArgumentError, match=rf"{kind.__name__}\.{field}.*in \[0, 1\)"):
            kind(learning_rate=1.0, **{field: bad})


@pytest.mark.parametrize("kind", [SGD, Adagrad, RMSProp, Adam, AdamW, FTRL, RowWiseAdagrad])
def test_the_rate_comes_first_and_the_rest_by_name(kind: Any) -> None:
    assert kind(0.25) == kind(learning_rate=0.25)
    with pytest.raises(TypeError):
        kind(0.25, 0.5)


@pytest.mark.parametrize("kind", [Adagrad, RMSProp, Adam, AdamW])
def test_epsilon_is_above_0(kind: Any) -> None:
    assert kind(learning_rate=1.0, epsilon=5e-324).epsilon > 0
    with pytest.raises(ArgumentError, match=rf"{kind.__name__}\.epsilon must be above 0"):
        kind(learning_rate=1.0, epsilon=0.0)


def test_sgds_own_rules() -> None:
    SGD(learning_rate=0.1, momentum=0.5, dampening=1.0)
    SGD(learning_rate=0.1, momentum=0.5, nesterov=True)
    for bad in (
        {"dampening": 1.1, "momentum": 0.5},
        {"nesterov": True},
        {"nesterov": True, "momentum": 0.5, "dampening": 0.1},
        {"nesterov": 1, "momentum": 0.5},
        {"nesterov": np.True_, "momentum": 0.5},
    ):
        with pytest.raises(ArgumentError, match=r"SGD\."):
            SGD(learning_rate=0.1, **bad)


def test_the_learning_rate_has_no_default_where_it_depends_on_the_model() -> None:
    for kind in (SGD, Adagrad, RMSProp):
        with pytest.raises(ArgumentError, match=rf"{kind.__name__}.learning_rate must be a .*none"):
            kind()


@pytest.mark.parametrize("kind", [SGD, Adagrad, RMSProp, Adam, AdamW, RowWiseAdagrad, FTRL])
def test_the_learning_rate_has_torchs_name_too(kind: type[Optimizer]) -> None:
    rule = kind(lr=0.25)
    assert rule == kind(0.25) == kind(learning_rate=0.25)
    assert Optimizer.from_proto(rule.to_proto()) == rule
    assert dataclasses.replace(rule, learning_rate=0.5) == kind(0.5)
    with pytest.raises(ArgumentError, match=rf"{kind.__name__}.* learning_rate=0.25 and lr=0.5"):
        kind(0.25, lr=0.5)
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number"):
        kind(lr=-1.0)


def test_an_average_has_no_learning_rate() -> None:
    with pytest.raises(ArgumentError, match=r"Average has no learning rate; got lr=0\.1"):
        Average(lr=0.1)


@pytest.mark.parametrize("good", [0, 0.0, 1, 2.5, 1e300])
def test_learning_rates_are_finite_and_not_negative(good: float) -> None:
    found = check_learning_rate("learning_rate", good)
    assert found == good
    assert isinstance(found, float)


@pytest.mark.parametrize("bad", NOT_NUMBERS, ids=repr)
def test_what_is_no_learning_rate(bad: Any) -> None:
    with pytest.raises(ArgumentError, match="learning_rate must be a finite number at least 0"):
        check_learning_rate("learning_rate", bad)


@pytest.mark.parametrize(
    ("field", "bad", "message"),
    [
        ("name", "", "parameter name must be"),
        ("name", "a/b", "parameter name must be"),
        ("name", None, "parameter name must be"),
        ("size", 0, "size must be an integer from 1"),
        ("size", -1, "size must be an integer from 1"),
        ("size", 2**48 + 1, "size must be an integer from 1"),
        ("size", 650.0, "size must be an integer"),
        ("size", True, "size must be an integer"),
        ("size", "650", "size must be an integer"),
        ("worker_count", 0, "worker_count must be an integer from 1"),
        ("worker_count", -1, "worker_count must be"),
        ("worker_count", 2**16 + 1, "worker_count must be"),
        ("worker_count", 2.0, "worker_count must be"),
        ("worker_count", True, "worker_count must be"),
        ("optimizer", None, "optimizer must be one of"),
        ("optimizer", SGD, "optimizer must be one of"),
        ("optimizer", "sgd", "optimizer must be one of"),
        ("optimizer", Optimizer(), "optimizer must be one of"),
        ("codec", "fp8", "codec must be one of"),
        ("codec", "lz4", "codec must be one of"),
        ("codec", "FP16", "codec must be one of"),
        ("codec", None, "codec must be one of"),
        ("codec", [], "codec must be one of"),
        ("mode", "Sync", "mode must be 'sync' or 'async'"),
        ("mode", None, "mode must be 'sync' or 'async'"),
        ("allow_non_finite", 1, "allow_non_finite must be a bool"),
        ("allow_non_finite", None, "allow_non_finite must be a bool"),
    ],
)
def test_every_field_of_a_spec_is_checked(field: str, bad: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        spec(**{field: bad})


def test_the_limits_themselves_are_good() -> None:
    spec(size=1, worker_count=1)
    spec(size=2**48, worker_count=2**16)


@pytest.mark.parametrize("worker_count", [1, 4, -1])
def test_asynchronous_parameters_have_no_worker_count(worker_count: int) -> None:
    assert spec(mode="async", worker_count=0).worker_count == 0
    with pytest.raises(ArgumentError, match="in async mode"):
        spec(mode="async", worker_count=worker_count)


@pytest.mark.parametrize("field", ["codec", "compression", "mode"])
@pytest.mark.parametrize("number", [0, 17])
def test_enums_that_are_unspecified_or_unknown_are_refused(field: str, number: int) -> None:
    message = spec().to_proto()
    setattr(message, field, number)
    with pytest.raises(ArgumentError, match=f"{field} {number} is unspecified or unknown"):
        ParameterSpec.from_proto(message)


def test_a_message_without_a_rule_is_refused() -> None:
    message = spec().to_proto()
    message.optimizer.ClearField("sgd")
    with pytest.raises(ArgumentError, match=r"optimizer\.rule must be set"):
        ParameterSpec.from_proto(message)
    message.ClearField("optimizer")
    with pytest.raises(ArgumentError, match=r"optimizer\.rule must be set"):
        ParameterSpec.from_proto(message)


@pytest.mark.parametrize(
    ("field", "bad"), [("name", "a b"), ("size", 0), ("size", 2**63), ("worker_count", 0)]
)
def test_values_of_a_message_are_checked(field: str, bad: Any) -> None:
    message = spec().to_proto()
    setattr(message, field, bad)
    with pytest.raises(ArgumentError, match=field):
        ParameterSpec.from_proto(message)


def test_numbers_of_an_optimizers_message_are_checked() -> None:
    message = spec().to_proto()
    message.optimizer.sgd.learning_rate = math.nan
    with pytest.raises(ArgumentError, match=r"SGD\.learning_rate"):
        ParameterSpec.from_proto(message)


def test_differences_name_the_field_and_both_values() -> None:
    mine = spec()
    others = {
        "size": 651,
        "worker_count": 5,
        "codec": "bf16",
        "allow_non_finite": True,
    }
    for field, theirs in others.items():
        found = mine.differences(spec(**{field: theirs}))
        here = getattr(mine, field)
        assert found == [f"{field}: {here!r} exists, {theirs!r} was asked for"]
    assert len(mine.differences(spec(**others))) == len(others)
    assert mine.differences(spec()) == []


@pytest.mark.parametrize(
    ("field", "mine", "theirs", "found"),
    [
        (
            "optimizer",
            SGD(learning_rate=0.5, momentum=0.9),
            SGD(learning_rate=0.25, momentum=0.9, clip_norm=1.0),
            [
                "optimizer.clip_norm: 0.0 exists, 1.0 was asked for",
                "optimizer.learning_rate: 0.5 exists, 0.25 was asked for",
            ],
        ),
        (
            "optimizer",
            SGD(learning_rate=0.5),
            Adam(learning_rate=0.5),
            ["optimizer: SGD exists, Adam was asked for"],
        ),
        (
            "members",
            Elastic(max_count=4, min_count=2),
            Elastic(max_count=4),
            ["members.min_count: 2 exists, 1 was asked for"],
        ),
        (
            "members",
            None,
            Elastic(max_count=4),
            ["members: None exists, Elastic was asked for"],
        ),
    ],
)
def test_a_difference_in_a_field_names_what_differs_in_it(
    field: str, mine: Any, theirs: Any, found: list[str]
) -> None:
    here, asked = (spec(worker_count=4, **{field: value}) for value in (mine, theirs))
    assert here.differences(asked) == found


def test_a_difference_in_mode_comes_first_and_explains_the_worker_count() -> None:
    mine = spec()
    found = mine.differences(spec(mode="async", worker_count=0, size=651))
    assert found == [
        "mode: 'sync' exists, 'async' was asked for",
        f"size: {mine.size} exists, 651 was asked for",
    ]


def test_errors_show_a_wrong_optimizer_whole_or_visibly_cut() -> None:
    with pytest.raises(ArgumentError) as caught:
        spec(optimizer=FTRL(learning_rate=0.123456789, beta=0.1, l1=0.123456789, l2=0.123456789))
    assert caught.value.message.endswith("l2=0.123456789)")
    with pytest.raises(ArgumentError) as caught:
        spec(optimizer="x" * 1000)
    assert caught.value.message.endswith("xxx...")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    ("codec", "cuts_blocks", "unit", "block_size"),
    [("fp16", False, 256, 256), ("fp16", True, 1, 256), ("int8", True, 4096, 4096)],
)
def test_where_a_parameter_may_be_cut(
    codec: str, cuts_blocks: bool, unit: int, block_size: int
) -> None:
    made = spec(size=50_001, codec=codec, cuts_blocks=cuts_blocks)
    assert (made.slice_unit, made.block_size) == (unit, block_size)
    assert ParameterSpec.from_proto(made.to_proto()).cuts_blocks == cuts_blocks
    asked = spec(size=50_001, codec=codec)
    assert made == asked
    assert made.differences(asked) == []


def test_specs_are_values() -> None:
    assert spec() == spec()
    assert hash(spec()) == hash(spec())
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec().size = 3  # type: ignore[misc]
    assert spec(codec="bf16+lz4").lz4
    assert spec(codec="bf16+lz4").codec_name == "bf16"
    assert not spec().lz4


def test_a_new_optimizer_touches_four_files() -> None:
    """Its message, its values, its arithmetic and its export; torch's namesake is beside them."""
    root = Path(__file__).parents[3]
    found = {
        path.relative_to(root).as_posix()
        for folder in ("client", "server", "protos")
        for path in (root / folder).rglob("*")
        if path.suffix in (".py", ".proto", ".c", ".h") and not path.stem.endswith("_pb2")
        if re.search(r"RMSProp|rms_prop", path.read_text())
    }
    assert found - {"client/shardwell/torch/loop/rules.py"} == {
        "client/shardwell/__init__.py",
        "client/shardwell/numerics/update_rules.py",
        "client/shardwell/specs/optimizers.py",
        "protos/shardwell/v1/types.proto",
    }


# What a learner says of itself is checked, and comes as it was sent.


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


# A GroupedRate is a float that knows its factors, in comparisons and copies, too.


RATE = shardwell.GroupedRate(0.1, [1.0, 0.3])


def test_it_is_a_float_with_factors_of_float32() -> None:
    assert float(RATE) == 0.1
    assert f"{RATE:g}" == "0.1"
    assert RATE * 2 == 0.2
    assert RATE.factors[0] == 1.0
    assert RATE.factors[1] == pytest.approx(0.3, rel=1e-7)
    assert RATE.factors[1] != 0.3
    assert factors_of(RATE) == RATE.factors
    assert factors_of(0.1) == ()
    assert factors_of(None) == ()
    assert rate_of(0.1, []) == 0.1
    assert rate_of(0.1, [1.0, 0.3]) == RATE
    assert "0.1, [1.0, 0.3" in repr(RATE)


@pytest.mark.parametrize("other", [0.1, shardwell.GroupedRate(0.1, [1.0, 0.5]), None, "0.1"])
def test_another_rate_is_another_one(other: object) -> None:
    for one, two in ((RATE, other), (other, RATE)):
        assert one != two
        assert not one == two  # noqa: SIM201 (each operator has code of its own)


def test_copies_are_equal() -> None:
    for each in (copy.deepcopy(RATE), pickle.loads(pickle.dumps(RATE))):
        assert each == RATE
        assert not each != RATE  # noqa: SIM202
        assert hash(each) == hash(RATE)
        assert each.factors == RATE.factors


@pytest.mark.parametrize(
    "factors", [[], [-1.0], [math.nan], [math.inf], [1e39], [1.0] * (RATE_GROUP_COUNT_MAX + 1)]
)
def test_what_can_be_no_factor(factors: list[float]) -> None:
    with pytest.raises(shardwell.ArgumentError, match="factor"):
        shardwell.GroupedRate(0.1, factors)
