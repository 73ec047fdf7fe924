"""All that this shard knows of one parameter, family or table, for its page."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from shardwell.specs.fragments import grouped
from shardwell.specs.parameter import ParameterSpec
from shardwell_server.admin.history import Key, version_of
from shardwell_server.admin.metrics import Vitals
from shardwell_server.operations.cluster_status import as_json
from shardwell_server.operations.timeline import closed_steps
from shardwell_server.shard.parameter.slice import ParameterSlice
from shardwell_server.shard.table.slice import TableSlice

_TENSOR_COUNT_MAX = 2000
_STEP_COUNT_MAX = 20
_SPAN_S = 600.0

_SHOWN_ELSEWHERE = ("name", "size", "layout", "fragment")
"""Fields of a spec that are no settings, or that the page has beside."""

_OF_STEP = ("step", "took_s", "last", "waited_s", "worker_count")

_Part: TypeAlias = ParameterSlice | TableSlice


def details(vitals: Vitals, is_shown: Callable[[str], bool], key: Key) -> dict[str, Any] | None:
    """Returns the details on the page of one name; None: nothing of that name is shown."""
    kind, name = key
    parts = [part for part in _parts(vitals, kind, name) if is_shown(part.spec.name)]
    if not parts:
        return None
    layouts = [spec.layout for part in parts if isinstance(spec := part.spec, ParameterSpec)]
    return {
        "kind": kind,
        "name": name,
        "shard_index": vitals.shard.config.shard_index,
        "of": parts[0].spec.name,
        "settings": {
            field.name: as_json(getattr(parts[0].spec, field.name))
            for field in dataclasses.fields(parts[0].spec)
            if field.name not in _SHOWN_ELSEWHERE
        },
        "tensors": list(itertools.islice(_tensors(parts), _TENSOR_COUNT_MAX)),
        "tensor_count": sum(len(layout) for layout in layouts if layout is not None),
        "last_steps": _last_steps(vitals, parts),
    }


def _parts(vitals: Vitals, kind: str, name: str) -> Sequence[_Part]:
    if kind == "table":
        table = vitals.shard.tables.find(name)
        return [] if table is None else [table]
    parameter = vitals.shard.parameters.find(name)
    if parameter is not None:
        return [parameter]
    family = grouped(vitals.shard.parameters.all()).families.get(name)
    return [] if family is None else family.all


def _tensors(parts: Sequence[_Part]) -> Iterator[dict[str, Any]]:
    """A vector without a layout, or a table, has none."""
    for spec in (part.spec for part in parts):
        if not isinstance(spec, ParameterSpec) or spec.layout is None:
            continue
        for tensor in spec.layout:
            fields = dataclasses.fields(tensor.options)
            options = {field.name: getattr(tensor.options, field.name) for field in fields}
            yield {
                "name": tensor.name,
                "shape": list(tensor.shape),
                "size": tensor.size,
                "fragment": spec.fragment and spec.fragment.index,
                "options": {
                    f.name: options[f.name] for f in fields if options[f.name] != f.default
                },
            }


def _last_steps(vitals: Vitals, parts: Sequence[_Part]) -> list[dict[str, Any]]:
    spans = vitals.shard.spans
    now_ns = time.monotonic_ns()
    since_ns = now_ns - int(_SPAN_S * 1e9)
    found = [
        step
        for part in parts
        for step in closed_steps(spans.since(since_ns, part.spec.name))
        if part.spec.mode == "async" or step.step < version_of(part)
    ]
    found.sort(key=lambda step: -step.end_ns)
    return [
        {
            "name": step.subject,
            "ago_s": round((now_ns - step.end_ns) / 1e9, 1),
            **{name: getattr(step, name) for name in _OF_STEP},
        }
        for step in found[:_STEP_COUNT_MAX]
    ]
