"""Tensors of any dtype as float32 that travels without loss: their bytes, two a number."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from shardwell.numerics.codec import Float32


def word_count(tensors: Sequence[torch.Tensor]) -> int:
    """How many numbers `words_of` makes of them."""
    return sum(-(-tensor.numel() * tensor.element_size() // 2) for tensor in tensors)


def words_of(tensors: Sequence[torch.Tensor]) -> Float32:
    """The bytes of tensors, whatever they mean, one behind the other."""
    parts = [np.frombuffer(_bytes(tensor), "<u2").astype(np.float32) for tensor in tensors]
    return np.concatenate(parts)


def put_back(words: Float32, tensors: Sequence[torch.Tensor]) -> None:
    """Puts into tensors, of the same dtypes and shapes, what `words_of` took from others."""
    data, start = words.astype("<u2").tobytes(), 0
    with torch.no_grad():
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                own = torch.frombuffer(bytearray(data[start : start + size]), dtype=tensor.dtype)
                tensor.copy_(own.view(tensor.shape))
            start += size + size % 2


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return data + bytes(len(data) % 2)
