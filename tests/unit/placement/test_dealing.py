"""Goal: whatever is ready first lies in front of every shard's slice.

Method: arithmetic alone. The tensors of models as users have them are written down, backward
announces them from the last to the first, and the pieces that may leave are counted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwell.placement.dealing import dealt
from shardwell.placement.readiness import PIECE_COUNT_MAX, ReadyChunks
from shardwell.placement.slices import slice_of
from shardwell.specs.parameter import block_size_of

CHUNK = 2**19
"""Elements of a chunk of 1 MiB in fp16."""


def gpt2(layer_count: int, width: int) -> dict[str, int]:
    """Its output layer is tied to `wte`, whose gradient is complete last."""
    sizes = {"wte": 50257 * width, "wpe": 1024 * width}
    for layer in range(layer_count):
        for name, size in (
            ("ln_1.weight", width),
            ("ln_1.bias", width),
            ("attn.c_attn.weight", 3 * width * width),
            ("attn.c_attn.bias", 3 * width),
            ("attn.c_proj.weight", width * width),
            ("attn.c_proj.bias", width),
            ("ln_2.weight", width),
            ("ln_2.bias", width),
            ("mlp.c_fc.weight", 4 * width * width),
            ("mlp.c_fc.bias", 4 * width),
            ("mlp.c_proj.weight", 4 * width * width),
            ("mlp.c_proj.bias", width),
        ):
            sizes[f"h.{layer}.{name}"] = size
    return sizes | {"ln_f.weight": width, "ln_f.bias": width}


def llama(
    layer_count: int, width: int, hidden: int, key_width: int, vocabulary: int, *, tied: bool
) -> dict[str, int]:
    sizes = {"embed_tokens": vocabulary * width}
    for layer in range(layer_count):
        for name, size in (
            ("q_proj", width * width),
            ("k_proj", width * key_width),
            ("v_proj", width * key_width),
            ("o_proj", width * width),
            ("gate_proj", width * hidden),
            ("up_proj", width * hidden),
            ("down_proj", hidden * width),
            ("input_layernorm", width),
            ("post_attention_layernorm", width),
        ):
            sizes[f"layers.{layer}.{name}"] = size
    sizes["norm"] = width
    return sizes if tied else sizes | {"lm_head": vocabulary * width}


def resnet50() -> dict[str, int]:
    sizes = {"conv1": 3 * 64 * 49, "bn1.weight": 64, "bn1.bias": 64}
    inputs = 64
    for layer, (width, block_count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for block in range(block_count):
            name, outputs = f"layer{layer}.{block}", 4 * width
            sizes |= {
                f"{name}.conv1": inputs * width,
                f"{name}.bn1.weight": width,
                f"{name}.bn1.bias": width,
                f"{name}.conv2": width * width * 9,
                f"{name}.bn2.weight": width,
                f"{name}.bn2.bias": width,
                f"{name}.conv3": width * outputs,
                f"{name}.bn3.weight": outputs,
                f"{name}.bn3.bias": outputs,
            }
            if not block:
                sizes |= {
                    f"{name}.downsample.0": inputs * outputs,
                    f"{name}.downsample.1.weight": outputs,
                    f"{name}.downsample.1.bias": outputs,
                }
            inputs = outputs
    return sizes | {"fc.weight": 2048 * 1000, "fc.bias": 1000}


MODELS = {
    "gpt2": (gpt2(12, 768), 124_439_808),
    "gpt2-xl": (gpt2(48, 1600), 1_557_611_200),
    "llama-1b": (llama(22, 2048, 5632, 256, 32_000, tied=False), 1_100_048_384),
    "llama-1b-tied": (llama(16, 2048, 8192, 512, 128_256, tied=True), 1_235_814_400),
    "resnet50": (resnet50(), 25_557_032),
}
"""The tensors in the order of `named_parameters`, and how many elements they have together."""


class Leaving(NamedTuple):
    """Parts of a gradient that are there when something leaves."""

    first: float
    """When the first piece does."""
    by_shard: list[float]
    """When each shard gets its first; 1.0: only at the end."""
    left: float
    """Part of the gradient that no piece had when all was there."""


def leaving(sizes: dict[str, int], shard_count: int) -> Leaving:
    """What leaves when of a model whose tensors are ready in the order of `sizes`."""
    total, start = sum(sizes.values()), 0
    places: dict[str, tuple[int, int]] = {}
    for name in dealt(sizes, shard_count):
        places[name] = start, start + sizes[name]
        start += sizes[name]
    block_size = block_size_of(total)
    slices = [slice_of(total, index, shard_count, block_size) for index in range(shard_count)]
    chunks = [
        [where.chunk(index, CHUNK) for index in range(where.chunk_count(CHUNK))] for where in slices
    ]
    ready = ReadyChunks(chunks)
    there, by_shard = 0, [1.0] * shard_count
    for name, size in sizes.items():
        ready.announce(*places[name])
        there += size
        for shard, (first, stop) in enumerate(ready.take() or ()):
            if first == 0 < stop:
                by_shard[shard] = there / total
    left = sum(
        where.stop - each[first].offset
        for where, each, (first, _) in zip(slices, chunks, ready.rest(), strict=True)
    )
    return Leaving(min(by_shard), by_shard, left / total)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shard_count", range(1, 9))
def test_the_first_piece_leaves_early(model: str, shard_count: int) -> None:
    tensors, size = MODELS[model]
    assert sum(tensors.values()) == size
    found = leaving(dict(reversed(tensors.items())), shard_count)
    assert found.first <= 0.13
    # A slice that lies in the last tensor waits for it, and no others do.
    largest_last = next(iter(tensors.values()))
    waiting_count = math.ceil(largest_last / (size / shard_count)) - 1
    at_the_end = [each for each in found.by_shard if each == 1.0]
    assert len(at_the_end) == max(waiting_count, 0)
    limit = {"gpt2": 0.4, "resnet50": 0.66}.get(model, 0.21)
    assert max(each for each in found.by_shard if each < 1.0) <= limit


def test_equal_tensors_are_dealt_in_turns() -> None:
    sizes = dict.fromkeys("abcdef", 10)
    assert dealt(sizes, 2) == ["a", "c", "e", "b", "d", "f"]
    assert dealt(sizes, 1) == list(sizes)
    assert dealt({"a": 1}, 3) == ["a"]


def test_what_fits_nowhere_joins_slices() -> None:
    """Its own stay behind one another, in the order in which they are ready."""
    assert dealt(dict.fromkeys("abc", 10), 2) == ["a", "b", "c"]
    assert dealt({"a": 1, "b": 2, "c": 1, "d": 12}, 4) == ["a", "b", "c", "d"]
    # One that is ready last ends a slice, and none begins with its end.
    assert dealt({"a": 4, "b": 4, "c": 4, "d": 4, "e": 16}, 4) == ["a", "c", "b", "d", "e"]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(1, 5))
@example([0, 0], 2)
def test_every_tensor_is_dealt_once(sizes: list[int], shard_count: int) -> None:
    named = {str(number): size for number, size in enumerate(sizes)}
    order = dealt(named, shard_count)
    assert sorted(order) == sorted(named)
    assert dealt(named, shard_count) == order
    assert dealt(named, 1) == list(named)


def test_layers_of_a_network_keep_all_shards_busy() -> None:
    """Of each slice, what is ready last lies behind: half of it, at the end of the network."""
    sizes = {f"{layer}.{part}": n for layer in range(40) for part, n in (("b", 60), ("w", 3600))}
    order, total = dealt(sizes, 3), sum(sizes.values())
    offsets, offset = {}, 0
    for name in order:
        offsets[name], offset = offset, offset + sizes[name]
    early = {name for name in sizes if int(name.split(".")[0]) < 20}
    for index in range(3):
        where = slice_of(total, index, 3, block_size_of(total))
        late = min(
            max(offsets[name], where.offset) - where.offset
            for name in sizes
            if name not in early and offsets[name] + sizes[name] > where.offset
        )
        assert late > 0.4 * where.size


def test_most_of_a_large_model_has_left_when_backward_ends() -> None:
    for model in ("gpt2-xl", "llama-1b"):
        for shard_count in (1, 2, 4, 8):
            found = leaving(dict(reversed(MODELS[model][0].items())), shard_count)
            assert found.left < 1 / PIECE_COUNT_MAX
