"""A checkpoint's parameter as one safetensors file: its tensors by name, in their shapes.

It is what `safetensors.torch.load_file` and `model.load_state_dict` take, whatever the number of
shards that the checkpoint is of. Memory holds a block of it.
"""

from __future__ import annotations

import os
from pathlib import Path

from shardwell.checkpoint.directory import working_directory
from shardwell.checkpoint.export import check_free, give_name
from shardwell.checkpoint.format import Checkpoint, CheckpointParameter
from shardwell.checkpoint.steps import inspect_checkpoint
from shardwell.checkpoint.tensor_files import SliceReader, Tensors, VectorWriter
from shardwell.errors import ArgumentError
from shardwell.process.local_paths import local_path

_BLOCK_ELEMENT_COUNT = 2**20


def export_checkpoint(
    path: str | os.PathLike[str],
    target: str | os.PathLike[str],
    parameter: str | None = None,
) -> CheckpointParameter:
    """Writes the weights of a checkpoint's parameter to a file for other programs.

    Tensors have their names and shapes; a parameter without tensors is one, under its own name.
    Optimizer state is not in it. The checkpoint is verified first. Needs no cluster.

    Args:
        path: The checkpoint's directory; with `{step}` in its name, the newest whole one.
        target: The file, which ends in .safetensors. Must not exist; it appears when it is
            complete. Beside it there must be room for it.
        parameter: Which; default: the only one.

    Returns:
        What was exported.

    Raises:
        ArgumentError: `target` exists or ends otherwise, or there is no such parameter.
        StorageError: the checkpoint is damaged or incomplete, or the file can't be written.
    """
    made = Path(os.path.abspath(local_path(target)))
    if made.suffix != ".safetensors":
        raise ArgumentError(
            f"a model is exported to a file that ends in .safetensors; got {made.name}"
        )
    check_free(made)
    checkpoint = inspect_checkpoint(path, verify=True)
    entry = _chosen(checkpoint, parameter)
    with working_directory(made) as partial:
        _write(checkpoint, entry, partial / made.name)
        give_name(partial / made.name, made)
    return entry


def _chosen(checkpoint: Checkpoint, parameter: str | None) -> CheckpointParameter:
    if parameter is not None:
        return checkpoint.select([parameter])[0]
    if len(checkpoint.parameters) != 1:
        names = [entry.name for entry in checkpoint.parameters]
        raise ArgumentError(
            f"{checkpoint.path} has {len(names)} parameters, {names!r:.200}; say which is to be "
            "exported (parameter=, --parameter)"
        )
    return checkpoint.parameters[0]


def _write(checkpoint: Checkpoint, entry: CheckpointParameter, path: Path) -> None:
    layout = entry.spec.layout
    tensors: Tensors = (
        {entry.name: ("F32", [entry.size])}
        if layout is None
        else {tensor.name: ("F32", list(tensor.shape)) for tensor in layout}
    )
    metadata = {"format": "pt", "parameter": entry.name, "version": str(entry.version)}
    with VectorWriter(path, tensors, metadata) as writer:
        for file in entry.files:
            with SliceReader(checkpoint.path / file.path, entry.tensor_names, file.size) as reader:
                for start in range(0, file.size, _BLOCK_ELEMENT_COUNT):
                    stop = min(start + _BLOCK_ELEMENT_COUNT, file.size)
                    writer.write(file.offset + start, reader.read(0, start, stop))
        writer.finish()
