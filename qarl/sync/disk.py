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
from qarl.records import Lora, Snapshot
from qarl.sync.adapters import adapters_checksum
from qarl.sync.checksum import combine, digests
from qarl.sync.compressed_tensors import from_stored, stored

TENSORS = "tensors.safetensors"
DESCRIPTION = "snapshot.json"
MARKER = "COMPLETE"


class _Adapts(TypedDict):
    """What adapters belong to: the checksum of their base, and how they are scaled."""

    base: str
    rank: int
    alpha: float


class _Description(TypedDict):
    version: int
    schemes: dict[str, str]
    checksum: str
    digests: dict[str, str]
    lora: _Adapts | None


def write_snapshot(snapshot: Snapshot, folder: Path, known: Mapping[str, str] | None = None) -> int:
    """Write a snapshot as `folder`, which must not exist, be empty, or hold an incomplete snapshot; returns the bytes
    of its tensors as they are stored.

    `known` are the tensors' digests, where they have been made already: who reads the snapshot compares them. RunError
    if the folder holds anything else, or if the tensors are no longer those of the snapshot's checksum.
    """
    _check_replaceable(folder)
    lora = snapshot.lora
    description = _Description(
        version=snapshot.version,
        schemes=dict(snapshot.schemes),
        checksum=snapshot.checksum,
        digests=dict(digests(snapshot.tensors) if known is None else known),
        lora=None if lora is None else _Adapts(base=lora.base.checksum, rank=lora.rank, alpha=lora.alpha),
    )
    if _checksum(description) != snapshot.checksum:
        raise RunError(f"snapshot of version {snapshot.version} changed after it was published: its checksum is stale")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.writing")
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir()
    tensors = stored(snapshot.tensors, snapshot.schemes) if lora is None else snapshot.tensors
    save_file(_unshared(tensors), aside / TENSORS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (aside / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
    for path in (aside / TENSORS, aside / DESCRIPTION, aside):
        _sync(path)
    _remove_incomplete(folder)
    aside.rename(folder)
    _sync(folder.parent)
    (folder / MARKER).write_text(f"version {snapshot.version}\n", encoding="utf-8")
    _sync(folder / MARKER)
    _sync(folder)
    return size


def read_snapshot(folder: Path, base: Snapshot | None = None) -> Snapshot:
    """Read a snapshot back, equal to the one written to the bit; one of adapters together with their `base`.

    RunError naming the file or the tensor if the snapshot is incomplete or damaged, or if its base is another one.
    """
    if not (folder / MARKER).is_file():
        raise RunError(f"{folder}: no complete snapshot here (no file {MARKER}); it was never written or not finished")
    description = _read_description(folder / DESCRIPTION)
    try:
        found = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{folder / TENSORS}: cannot be read: {error}") from error
    lora = _of_base(description, base, folder)
    tensors = found if lora is not None else from_stored(found, description["schemes"], str(folder / TENSORS))
    _check_digests(digests(tensors), description, folder)
    return Snapshot(description["version"], tensors, description["schemes"], description["checksum"], lora=lora)


def _of_base(description: _Description, base: Snapshot | None, folder: Path) -> Lora | None:
    adapts = description["lora"]
    if adapts is None:
        return None
    if base is None or base.checksum != adapts["base"]:
        given = "none was given" if base is None else f"what was given is {base.checksum}"
        raise RunError(f"{folder}: adapters of the base {adapts['base']}, but {given}; read that base first")
    return Lora(base, adapts["rank"], adapts["alpha"])


def _checksum(description: _Description) -> str:
    """What the snapshot's checksum should be."""
    adapts = description["lora"]
    return combine(description["digests"]) if adapts is None else adapters_checksum(description["digests"], **adapts)


def _read_description(path: Path) -> _Description:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        lora = content["lora"]
        return _Description(
            version=int(content["version"]),
            schemes=dict(content["schemes"]),
            checksum=str(content["checksum"]),
            digests=dict(content["digests"]),
            lora=None if lora is None else _Adapts(base=lora["base"], rank=lora["rank"], alpha=lora["alpha"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path}: not a snapshot's description: {error!r}") from error


def _check_digests(found: Mapping[str, str], description: _Description, folder: Path) -> None:
    expected = description["digests"]
    for name in sorted(expected.keys() | found.keys()):
        if found.get(name) != expected.get(name):
            kind = "missing" if name not in found else "unexpected" if name not in expected else "damaged"
            raise RunError(f"{folder / TENSORS}: tensor {name} is {kind}; write the snapshot again")
    if _checksum(description) != description["checksum"]:
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
