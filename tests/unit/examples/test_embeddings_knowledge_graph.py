"""Facts as they are read, and batches that depend on nothing but their numbers."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from embeddings.batches import Batches
from embeddings.knowledge_graph import find_data, read_graph
from shardwell import ArgumentError
from shardwell_server.demo.reports import DemoError

PARTS = {
    "train": "virus\tcauses\tdisease\nfungus\tcauses\tdisease\nvirus\tisa\tthing\n",
    "valid": "disease\tisa\tthing\n",
    "test": "fungus\tisa\tthing\n",
}
needs_pykeen = pytest.mark.skipif(
    importlib.util.find_spec("pykeen") is None, reason="PyKEEN brings the facts"
)


def write(folder: Path, **changed: str | bytes) -> Path:
    for part, text in {**PARTS, **changed}.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"{part}.txt").write_bytes(data)
    return folder


def test_facts_come_back_by_name(tmp_path):
    graph = read_graph(write(tmp_path))
    assert graph.entity_names == ("disease", "fungus", "thing", "virus")
    assert graph.relation_names == ("causes", "isa")
    lines = [
        f"{graph.entity_names[h]}\t{graph.relation_names[r]}\t{graph.entity_names[t]}"
        for h, r, t in graph.all_facts.tolist()
    ]
    assert lines == "".join(PARTS.values()).splitlines()
    assert [len(part) for part in (graph.training, graph.validation, graph.test)] == [3, 1, 1]
    assert (graph.entity_count, graph.relation_count) == (4, 2)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("virus\tisa\n", r"train\.txt, line 1: expected head, relation and tail"),
        ("virus\tisa\tthing\n\n", r"train\.txt, line 2: .* got ''"),
        ("virus\t\tthing\n", "line 1"),
        ("a\tb\tc\td\n", "line 1"),
        ("", r"train\.txt has no facts"),
        (b"\xff\xfe", r"train\.txt can't be read"),
        ("virus\tisa\tthing\nvirus\tisa\tthing\n", "'virus isa thing' more than once"),
        ("fungus\tisa\tthing\n", "'fungus isa thing' more than once"),
    ],
)
def test_what_is_no_list_of_facts_is_refused(tmp_path, text, shown):
    with pytest.raises(DemoError, match=shown):
        read_graph(write(tmp_path, train=text))


def test_a_missing_file_is_named(tmp_path):
    write(tmp_path)
    (tmp_path / "valid.txt").unlink()
    with pytest.raises(DemoError, match=r"valid\.txt can't be read"):
        read_graph(tmp_path)


def test_without_pykeen_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoError, match=r"run: pip install --no-deps pykeen==1\.11\.1"):
        find_data("umls")


@needs_pykeen
@pytest.mark.parametrize(
    ("data_set", "sizes"),
    [
        ("nations", (14, 55, 1592, 199, 201)),
        ("kinships", (104, 25, 8544, 1068, 1074)),
        ("umls", (135, 46, 5216, 652, 661)),
    ],
)
def test_the_sets_of_pykeen_are_as_it_documents_them(data_set, sizes):
    had_torch = "torch" in sys.modules  # of another test of this process
    graph = read_graph(find_data(data_set))
    parts = (graph.training, graph.validation, graph.test)
    assert (graph.entity_count, graph.relation_count, *map(len, parts)) == sizes
    for facts in parts:
        assert facts.dtype == np.int64
        assert facts.min() >= 0
        assert facts[:, [0, 2]].max() < graph.entity_count
        assert facts[:, 1].max() < graph.relation_count
    assert "pykeen" not in sys.modules
    assert ("torch" in sys.modules) == had_torch


@needs_pykeen
def test_a_set_that_is_not_there_is_named():
    with pytest.raises(DemoError, match=r"no .*hamlets.*train\.txt"):
        find_data("hamlets")


FACTS = np.stack([np.arange(17), np.arange(17) % 3, np.arange(17) % 5], axis=1)


def batches(seed: int = 0) -> Batches:
    return Batches(FACTS, entity_count=17, batch_size=4, negative_count=6, seed=seed)


def shown(batch) -> list[list[int]]:
    return [batch.facts[:, 0].tolist(), batch.negatives.tolist()]


def test_batches_of_triples_are_the_same_in_any_order_of_asking():
    forwards = batches()
    expected = [shown(forwards[number]) for number in range(20)]
    again = batches()
    assert [shown(again[number]) for number in reversed(range(20))] == expected[::-1]
    assert [shown(batches(seed=1)[number]) for number in range(20)] != expected


def test_a_pass_has_each_fact_once_at_most_and_passes_differ():
    one = batches()
    assert one.count_per_pass == 4
    passes = [[h for n in range(first, first + 4) for h in one[n].facts[:, 0]] for first in (0, 4)]
    for heads in passes:
        assert len(set(heads)) == len(heads) == 16
    assert passes[0] != passes[1]
    assert len({h for n in range(80) for h in one[n].facts[:, 0]}) == 17, "none is left out"


def test_a_batch_names_the_rows_that_it_needs():
    batch = batches()[3]
    assert batch.entity_ids.tolist() == [
        *batch.facts[:, 0].tolist(),
        *batch.facts[:, 2].tolist(),
        *batch.negatives.tolist(),
    ]
    assert batch.relation_ids.tolist() == batch.facts[:, 1].tolist()
    assert len(batch.negatives) == 6
    drawn = np.concatenate([batches()[number].negatives for number in range(100)])
    assert set(drawn.tolist()) == set(range(17))


@pytest.mark.parametrize("batch_size", [0, 18])
def test_a_batch_that_facts_can_not_fill_is_refused(batch_size):
    with pytest.raises(ArgumentError, match="1 to 17"):
        Batches(FACTS, entity_count=17, batch_size=batch_size, negative_count=1, seed=0)
