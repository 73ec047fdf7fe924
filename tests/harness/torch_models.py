"""Models of torch, compared."""

from __future__ import annotations

from typing import Any


def assert_same(model: Any, other: Any, *, rtol: float = 0.0, atol: float = 0.0) -> None:
    """Asserts that the parameters of two models agree: bit for bit, or within a tolerance."""
    import torch  # in tests that need it

    of_each = [list(each.parameters()) for each in (model, other)]
    torch.testing.assert_close(*of_each, rtol=rtol, atol=atol)
