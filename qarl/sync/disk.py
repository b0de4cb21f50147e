"""A snapshot as a folder: safetensors and JSON, complete or refused.

`tensors.safetensors` holds the tensors, those of packed schemes as compressed-tensors `pack-quantized` does
(`weight_packed`, `weight_scale`, `weight_shape`); `snapshot.json` the version, schemes and checksums; `COMPLETE`
is written last. Writing happens in a neighbouring temporary folder, so a killed writer leaves no half snapshot
under the final name.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qarl.errors import RunError
from qarl.records import Snapshot
from qarl.sync.checksum import combine, digests
from qarl.sync.compressed_tensors import stored, unstored

TENSORS = "tensors.safetensors"
DESCRIPTION = "snapshot.json"
MARKER = "COMPLETE"


class _Description(TypedDict):
    version: int
    schemes: dict[str, str]
    checksum: str
    digests: dict[str, str]


def write_snapshot(snapshot: Snapshot, folder: Path) -> None:
    """Write a snapshot as `folder`, which must not exist, be empty, or hold an incomplete snapshot.

    RunError if it holds anything else, or if the tensors are no longer those of the snapshot's checksum.
    """
    _check_replaceable(folder)
    tensor_digests = digests(snapshot.tensors)
    if combine(tensor_digests) != snapshot.checksum:
        raise RunError(f"snapshot of version {snapshot.version} changed after it was published: its checksum is stale")
    description = _Description(
        version=snapshot.version,
        schemes=dict(snapshot.schemes),
        checksum=snapshot.checksum,
        digests=tensor_digests,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.writing")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    save_file(_unshared(stored(snapshot.tensors, snapshot.schemes)), aside / TENSORS)
    (aside / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
    for path in (aside / TENSORS, aside / DESCRIPTION, aside):
        _sync(path)
    _remove_incomplete(folder)
    aside.rename(folder)
    _sync(folder.parent)
    (folder / MARKER).write_text(f"version {snapshot.version}\n", encoding="utf-8")
    _sync(folder / MARKER)
    _sync(folder)


def read_snapshot(folder: Path) -> Snapshot:
    """Read a snapshot back, equal to the one written to the bit.

    RunError naming the file or the tensor if the snapshot is incomplete or damaged.
    """
    if not (folder / MARKER).is_file():
        raise RunError(f"{folder}: no complete snapshot here (no file {MARKER}); it was never written or not finished")
    description = _read_description(folder / DESCRIPTION)
    try:
        found = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder / TENSORS}: cannot be read: {error}") from error
    tensors = unstored(found, description["schemes"], folder / TENSORS)
    _check_digests(digests(tensors), description, folder)
    return Snapshot(description["version"], tensors, description["schemes"], description["checksum"])


def _read_description(path: Path) -> _Description:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _Description(
            version=int(content["version"]),
            schemes=dict(content["schemes"]),
            checksum=str(content["checksum"]),
            digests=dict(content["digests"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a snapshot's description: {error!r}") from error


def _check_digests(found: Mapping[str, str], description: _Description, folder: Path) -> None:
    expected = description["digests"]
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            kind = "missing" if name not in found else "unexpected" if name not in expected else "damaged"
            raise RunError(f"{folder / TENSORS}: tensor {name} is {kind}; write the snapshot again")
    if combine(expected) != description["checksum"]:
        raise RunError(f"{folder / DESCRIPTION}: its checksum does not belong to its digests; write the snapshot again")


def _unshared(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous CPU tensors, each with its own storage: safetensors refuses tied tensors and views."""
    seen: set[int] = set()
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        candidate = tensor.detach().cpu().contiguous()
        storage = candidate.untyped_storage().data_ptr()
        own[name] = candidate.clone() if storage in seen else candidate
        seen.add(storage)
    return own


def _check_replaceable(folder: Path) -> None:
    if (folder / MARKER).exists():
        raise RunError(f"{folder}: already holds a complete snapshot; remove it or write to another folder")
    if folder.exists():
        foreign = sorted(entry.name for entry in folder.iterdir() if entry.name not in (TENSORS, DESCRIPTION))
        if foreign:
            raise RunError(f"{folder}: holds other files, such as {foreign[0]}; write the snapshot to another folder")


def _remove_incomplete(folder: Path) -> None:
    for name in (TENSORS, DESCRIPTION):
        (folder / name).unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Force a file's or folder's content to the disk, so that a power cut cannot reorder it past the marker."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
