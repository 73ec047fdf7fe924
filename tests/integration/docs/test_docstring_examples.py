"""Goal: every public name's docstring has an example, and the example does what it says.

Method: the examples are doctests, which run beside one cluster, one client and a group of one rank.
Names come from each module's `__all__`, by source, so that each is found whether its framework is
installed or not; examples of a framework run where that is installed.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import shardwell
import shardwell_server
from shardwell_server import LocalCluster
from unit.test_reference_pages import MODULES, ROOT, exported

FRAMEWORKS = {"shardwell.torch": "torch", "shardwell.jax": "jax", "shardwell.ray": "ray"}
"""What a module needs."""
CALLBACKS = ("LightningCallback", "TrainerCallback")
"""Their frameworks are imported by tests/integration/torch, which runs them; here by source."""


def names() -> Iterator[str]:
    """Public names that have an example: all but single errors and the version."""
    for module, path in MODULES.items():
        framework = FRAMEWORKS.get(module, "numpy")
        if importlib.util.find_spec(framework) is None:
            continue
        for name in exported(path):
            if name in CALLBACKS:
                continue
            if name == "ShardwellError" or not name.endswith(("Error", "__version__")):
                yield f"{module}.{name}"


class Checker(doctest.OutputChecker):
    """Compares the outputs that an example shows, and no others."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.mark.extras
def test_every_example_does_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    with (
        LocalCluster(2) as cluster,
        shardwell.connect(cluster.target, worker_id="w0") as client,
        shardwell.join_group("examples", rank=0, size=1, rendezvous=cluster.target) as group,
    ):
        monkeypatch.setenv("SHARDWELL_SHARDS", cluster.target)
        for name in names():
            module, _, attribute = name.rpartition(".")
            docstring = inspect.getdoc(getattr(importlib.import_module(module), attribute)) or ""
            given = {
                "client": client,
                "cluster": cluster,
                "group": group,
                "np": np,
                "shardwell": shardwell,
                "shardwell_server": shardwell_server,
            }
            if module == "shardwell.torch":
                given["torch"] = importlib.import_module("torch")
            if module == "shardwell.jax":
                given["jax"], given["jnp"] = map(importlib.import_module, ("jax", "jax.numpy"))
            example = doctest.DocTestParser().get_doctest(docstring, given, name, None, 0)
            if not example.examples:
                wrong.append(f"{name} has no example")
            doctest.DocTestRunner(Checker()).run(example, out=wrong.append)
    assert not wrong, "\n".join(wrong)


def test_framework_modules_have_examples_by_source() -> None:
    for path in ("client/shardwell/torch", "client/shardwell/jax"):
        found = {}
        for file in Path(ROOT, path).rglob("*.py"):
            for node in ast.parse(file.read_text()).body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found[node.name] = ast.get_docstring(node) or ""
        for name in exported(f"{path}/__init__.py"):
            assert ">>> " in found[name], f"{path}: {name}"
