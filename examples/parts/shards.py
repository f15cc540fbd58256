"""torch.distributed.checkpoint of tensors only, with a JSON index, in a folder read without unpickling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "index.json"


class Writer(FileSystemWriter):
    """Writer of shards, one process each; the first process also writes the index.

    An entry is [offset in the tensor, its shape, file, first byte, number of bytes].
    """

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        places = {result.index: result.storage_data for written in results for result in written}
        index = {}
        for name, tensor in metadata.state_dict_metadata.items():
            if not isinstance(tensor, TensorStorageMetadata):
                raise TypeError(f"{name} must be a tensor, which is read without unpickling")
            shards = []
            for chunk in tensor.chunks:
                place = places[MetadataIndex(name, chunk.offsets)]
                where = [place.relative_path, place.offset, place.length]
                shards.append([list(chunk.offsets), list(chunk.sizes), *where])
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            index[name] = {"dtype": dtype, "shape": list(tensor.size), "shards": shards}
        Path(self.path, INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


class Reader(FileSystemReader):
    """Reader of `Writer`'s folders. torch reads the shards themselves with weights_only=True.

    Raises:
        ValueError: the index is damaged, or names files outside the folder.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors, places = {}, {}
        try:
            index = json.loads(Path(self.path, INDEX).read_text(encoding="utf-8"))
            for name, entry in index.items():
                chunks = []
                for offset, shape, file, first, count in entry["shards"]:
                    if Path(file).name != file:
                        raise ValueError(f"{name} is in {file!r}, which must be a file of the folder")
                    chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
                    places[MetadataIndex(name, offset)] = _StorageInfo(file, int(first), int(count))
                properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
                tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{INDEX} is damaged: {error!r}") from None
        meta = StorageMeta()
        meta.load_id = self.load_id
        return Metadata(tensors, storage_data=places, storage_meta=meta)  # type: ignore[arg-type]
