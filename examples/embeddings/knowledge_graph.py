"""The data: a graph of facts (head, relation, tail), as the package PyKEEN ships it.

PyKEEN is found and its files are read, but it is never imported: that would need torch. Nothing is
downloaded. Everything that a file says is checked, and names become ids in the order of the
alphabet, so every process has the same ids.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from shardwell_server.demo.reports import DemoError

INSTALL_COMMAND = "pip install --no-deps pykeen==1.11.1"
"""Without what PyKEEN depends on, which is torch: only its data are read."""
PARTS = ("train", "valid", "test")

Ids: TypeAlias = npt.NDArray[np.int64]
Facts: TypeAlias = npt.NDArray[np.int64]
"""(n, 3): ids of head, relation, tail."""
_Names: TypeAlias = npt.NDArray[np.str_]


@dataclass(frozen=True, kw_only=True)
class KnowledgeGraph:
    """Facts in three parts; no fact is in two."""

    entity_names: tuple[str, ...]
    """By id; an entity may be head and tail."""
    relation_names: tuple[str, ...]
    """By id."""
    training: Facts
    validation: Facts
    """Never trained on; what is measured as the training goes on."""
    test: Facts
    """Never trained on; what is measured at the end."""

    @property
    def entity_count(self) -> int:
        """Ids of entities are 0 to below it."""
        return len(self.entity_names)

    @property
    def relation_count(self) -> int:
        """Ids of relations are 0 to below it."""
        return len(self.relation_names)

    @property
    def all_facts(self) -> Facts:
        """The three parts, one after another."""
        return np.concatenate([self.training, self.validation, self.test])


def find_data(data_set: str) -> Path:
    """The folder of one of PyKEEN's data sets, such as "umls"; imports nothing.

    Raises:
        DemoError: PyKEEN is not installed, or has no such data set.
    """
    spec = importlib.util.find_spec("pykeen")
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(
            f"the facts come with PyKEEN, which is not installed; run: {INSTALL_COMMAND}"
        )
    folder = Path(spec.submodule_search_locations[0], "datasets", data_set)
    for part in PARTS:
        if not (folder / f"{part}.txt").is_file():
            raise DemoError(
                f"the installed PyKEEN has no {folder / f'{part}.txt'}; run: {INSTALL_COMMAND}"
            )
    return folder


def read_graph(folder: Path) -> KnowledgeGraph:
    """A graph from its three files of lines "head TAB relation TAB tail".

    Raises:
        DemoError: a file can't be read, or is no such list; names file and line.
    """
    parts = [_read_facts(folder / f"{part}.txt") for part in PARTS]
    names = np.concatenate(parts)
    entity_names, entity_ids = np.unique(names[:, [0, 2]], return_inverse=True)
    relation_names, relation_ids = np.unique(names[:, 1], return_inverse=True)
    entity_ids = entity_ids.reshape(-1, 2)  # NumPy 1 gives it flat
    facts = np.stack([entity_ids[:, 0], relation_ids, entity_ids[:, 1]], axis=1).astype(np.int64)
    _check_distinct(folder, facts, names)
    ends = np.cumsum([len(part) for part in parts])[:-1]
    training, validation, test = np.split(facts, ends)
    return KnowledgeGraph(
        entity_names=tuple(entity_names.tolist()),
        relation_names=tuple(relation_names.tolist()),
        training=training,
        validation=validation,
        test=test,
    )


def _read_facts(path: Path) -> _Names:
    """(n, 3) names."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DemoError(f"{path} can't be read: {error}") from error
    facts = [line.split("\t") for line in lines]
    for number, fields in enumerate(facts, 1):
        if len(fields) != 3 or not all(fields):
            raise DemoError(
                f"{path}, line {number}: expected head, relation and tail with tabs between them; "
                f"got {lines[number - 1]!r:.80}"
            )
    if not facts:
        raise DemoError(f"{path} has no facts")
    return np.array(facts)


def _check_distinct(folder: Path, facts: Facts, names: _Names) -> None:
    """Refuses a fact that occurs twice: one in two parts would be known before it is asked."""
    _, first_places, counts = np.unique(facts, axis=0, return_index=True, return_counts=True)
    if (counts > 1).any():
        fact: Sequence[str] = names[first_places[counts > 1][0]].tolist()
        raise DemoError(f"{folder} has the fact {' '.join(fact)!r:.120} more than once")
