"""Goal: tuning the allocator says whether it did, and never fails.

Method: call it twice, and where the C library has no such call.
"""

from __future__ import annotations

import ctypes
import platform
import sys

import pytest

from shardwell.process.allocator import tune_malloc


def test_it_may_be_repeated() -> None:
    first = tune_malloc()
    assert isinstance(first, bool)
    assert tune_malloc() == first
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        assert first


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert tune_malloc() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert tune_malloc() is False
