"""A checkpoint's parameter or family as one safetensors file: tensors by name, in their shapes.

It is what `safetensors.torch.load_file` and `model.load_state_dict` take, whatever the number of
shards that the checkpoint is of. Memory holds a block of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardwell.checkpoint.directory import working_directory
from shardwell.checkpoint.export import check_free, give_name
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter
from shardwell.checkpoint.steps import inspect_checkpoint
from shardwell.checkpoint.tensor_files import SliceReader, Tensors, VectorWriter
from shardwell.errors import ArgumentError
from shardwell.process.local_paths import local_path
from shardwell.specs.fragments import grouped

_BLOCK_ELEMENT_COUNT = 2**20


@dataclass(frozen=True, kw_only=True)
class ModelExport:
    """The contents of an exported file.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> saved = client.save_checkpoint("model", parameters=["saved"])
        >>> shardwell.export_checkpoint("model", "model.safetensors", "saved").tensor_count
        1
    """

    name: str
    """Name of the parameter, or of the family whose fragments it has."""
    version: int
    """Updates that all of it has seen; of fragments of several versions, the fewest."""
    size: int
    """Number of float32 elements."""
    tensor_count: int
    """Tensors in the file."""


def export_checkpoint(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    parameter: str | None = None,
) -> ModelExport:
    """Writes the weights of a checkpoint's parameter to a file for other programs.

    Tensors have their names and shapes; a parameter without tensors is one, under its own name.
    Of a family of outer training, the file has the tensors of all fragments. Optimizer state is
    not in it. The checkpoint is verified first. Needs no cluster.

    Args:
        path: The checkpoint's directory; with `{step}` in its name, the newest whole one.
        target: The file, which ends in .safetensors. Must not exist; it appears when it is
            complete. Beside it there must be room for it.
        parameter: Name of the parameter or family; default: the only one.

    Returns:
        The contents of the file.

    Raises:
        ArgumentError: `target` exists or ends otherwise, or there is no such parameter.
        StorageError: the checkpoint is damaged or incomplete, or the file can't be written.

    Examples:
        >>> net = client.parameter("saved", size=3, optimizer=shardwell.SGD(lr=0.5))
        >>> net.init(np.zeros(3))
        >>> saved = client.save_checkpoint("exported", parameters=["saved"])
        >>> shardwell.export_checkpoint("exported", "saved.safetensors", "saved")
        ModelExport(name='saved', version=0, size=3, tensor_count=1)
    """
    made = Path(os.path.abspath(local_path(target)))
    if made.suffix != ".safetensors":
        raise ArgumentError(
            f"a model is exported to a file that ends in .safetensors; got {made.name}"
        )
    check_free(made)
    checkpoint = inspect_checkpoint(path, verify=True)
    name = _chosen(checkpoint) if parameter is None else parameter
    entries = checkpoint.select([name])
    tensors = _tensors(name, entries)
    export = ModelExport(
        name=name,
        version=min(entry.version for entry in entries),
        size=sum(entry.size for entry in entries),
        tensor_count=len(tensors),
    )
    metadata = {"format": "pt", "parameter": name, "version": str(export.version)}
    with working_directory(made) as partial:
        with VectorWriter(partial / made.name, tensors, metadata) as writer:
            _write(checkpoint.path, entries, writer)
            writer.finish()
        give_name(partial / made.name, made)
    return export


def _chosen(checkpoint: Checkpoint) -> str:
    """The name of the only parameter, or of the only family."""
    groups = grouped(checkpoint.parameters)
    names = {*groups.alone, *groups.families}
    if len(names) != 1:
        raise ArgumentError(
            f"{checkpoint.path} has {len(names)} parameters, {sorted(names)!r:.200}; say which is "
            "to be exported (parameter=, --parameter)"
        )
    return names.pop()


def _tensors(name: str, entries: Sequence[CheckpointParameter]) -> Tensors:
    """The tensors of all entries, one entry's behind the other's.

    Raises:
        ArgumentError: two have the same name.
    """
    found: dict[str, tuple[str, list[int]]] = {}
    for entry in entries:
        layout = entry.spec.layout
        own = (
            {entry.name: ("F32", [entry.size])}
            if layout is None
            else {tensor.name: ("F32", list(tensor.shape)) for tensor in layout}
        )
        for tensor in own:
            if tensor in found:
                raise ArgumentError(
                    f"two fragments of {name!r} have a tensor {tensor!r}; export them one by one"
                )
        found |= own
    return found


def _write(folder: Path, entries: Sequence[CheckpointParameter], writer: VectorWriter) -> None:
    begin = 0
    for entry in entries:
        for file in entry.files:
            with SliceReader(folder / file.path, entry.tensor_names, file.size) as reader:
                for start in range(0, file.size, _BLOCK_ELEMENT_COUNT):
                    stop = min(start + _BLOCK_ELEMENT_COUNT, file.size)
                    writer.write(begin + file.offset + start, reader.read(0, start, stop))
        begin += entry.size
