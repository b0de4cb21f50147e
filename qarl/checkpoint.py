"""Run state on disk that survives a crash at any moment: whole checkpoints or none.

A checkpoint is a folder `step-N`. It is written under a temporary name, described by a manifest of sizes and digests,
flushed to the disk and renamed; a folder that bears its final name is therefore complete, and damage that happens
later is found by its manifest, and damage to the manifest by a digest of its own. What is inside is the writer's
business: tensors as safetensors, the rest as JSON.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qarl.config import Config
from qarl.errors import ConfigurationError, RunError

LATEST = "latest"
METADATA = "metadata.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
"""The names that safetensors has for the numbers of a run's state."""

_WRITING = ".tmp-"
_REPLACED = ".old-"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A whole checkpoint. `metadata` is what its writer passed to `save`; `score` is None until it is rated."""

    step: int
    folder: Path
    metadata: Mapping[str, JsonValue]
    score: float | None


class CheckpointStore:
    """The checkpoints of one run, seen by the one process that writes them; hold the run's lock while it exists.

    Keeps the `keep_last` (>= 1) newest and, with `keep_best`, the one with the highest score. RunError when the disk
    refuses.
    """

    def __init__(self, folder: Path, keep_last: int = 2, keep_best: bool = False) -> None:
        assert keep_last >= 1, "the newest checkpoint is never removed"
        self._folder = folder
        self._keep_last = keep_last
        self._keep_best = keep_best
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._tidy()
        except OSError as error:
            raise RunError(f"{folder}: checkpoints cannot be written here: {error.strerror or error}") from error

    def save(self, step: int, write: Callable[[Path], None], metadata: Mapping[str, JsonValue]) -> Checkpoint:
        """Store one checkpoint: `write` fills an empty folder, which then becomes `step-N` in one motion.

        `metadata` is JSON without NaN. A checkpoint of the same step is replaced. Raises RunError when the disk
        refuses; whatever else `write` raises passes through. Either way nothing of the attempt is left and earlier
        checkpoints are untouched.
        """
        unfinished = self._folder / f"{_WRITING}step-{step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        try:
            unfinished.mkdir()
            write(unfinished)
            self._seal(unfinished, step, metadata)
            self._put_in_place(unfinished, step)
            write_atomically(self._folder / LATEST, f"step-{step}\n")
        except OSError as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise RunError(self._failure(step, error)) from error
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self._prune()
        return Checkpoint(step, self._folder / f"step-{step}", dict(metadata), None)

    def rate(self, step: int, score: float) -> None:
        """Note how good a checkpoint is, higher being better; a score that is not finite says nothing."""
        folder = self._folder / f"step-{step}"
        record = self._records().get(folder)
        if record is None or not math.isfinite(score):
            return
        try:
            write_atomically(folder / METADATA, _written(record.model_copy(update={"score": float(score)})))
        except OSError as error:
            raise RunError(f"{folder}: its score could not be noted: {error.strerror or error}") from error
        self._prune()

    def go_on_from(self, checkpoint: Checkpoint) -> None:
        """Make this checkpoint the newest, where it is not: a run that went back to it goes on from it until it saves
        another one.
        """
        latest, record = last_saved(self._folder), self._records()[checkpoint.folder]
        if record.serial < latest:
            newest = record.model_copy(update={"serial": latest + 1})
            try:
                write_atomically(checkpoint.folder / METADATA, _written(newest))
                write_atomically(self._folder / LATEST, f"{checkpoint.folder.name}\n")
            except OSError as error:
                raise RunError(
                    f"{checkpoint.folder}: could not be made the newest: {error.strerror or error}"
                ) from error

    def newest(self) -> Checkpoint | None:
        """The whole checkpoint that was saved last; see `newest_checkpoint`."""
        return newest_checkpoint(self._folder)

    def best(self) -> Checkpoint | None:
        """The one with the highest score; of equals the newest, which has seen more training."""
        folder = _best(self._records())
        return None if folder is None else open_checkpoint(folder)

    def _records(self) -> dict[Path, _Record]:
        return {folder: record for folder in _step_folders(self._folder) if (record := _record_or_reason(folder)[0])}

    def _seal(self, folder: Path, step: int, metadata: Mapping[str, JsonValue]) -> None:
        """Add the manifest and force everything onto the disk."""
        assert not (folder / METADATA).exists(), f"{METADATA} is the store's own"
        serial = 1 + last_saved(self._folder)
        record = _Record(step=step, serial=serial, score=None, metadata=dict(metadata), files=_manifest(folder))
        _write_flushed(folder / METADATA, _written(record))
        _flush_folders(folder)

    def _put_in_place(self, finished: Path, step: int) -> None:
        """Rename; a folder already there steps aside first, and `_tidy` puts it back if we die in between."""
        place, aside = self._folder / f"step-{step}", self._folder / f"{_REPLACED}step-{step}"
        if place.exists():
            place.rename(aside)
        finished.rename(place)
        _flush(self._folder)
        if aside.exists():
            shutil.rmtree(aside)

    def _prune(self) -> None:
        records = self._records()
        newest_first = sorted(records, key=lambda folder: records[folder].serial, reverse=True)
        keep = set(newest_first[: self._keep_last])
        best = _best(records) if self._keep_best else None
        try:
            for folder in set(records) - keep - {best}:
                # Renamed first, so that a kill cannot leave a half-removed folder under a checkpoint's name.
                condemned = folder.rename(self._folder / f"{_WRITING}removing-{folder.name}")
                shutil.rmtree(condemned)
        except OSError as error:
            # No state is lost; if it matters the disk fills, and the next save says so.
            _log.warning("%s: old checkpoints could not be removed: %s", self._folder, error)

    def _tidy(self) -> None:
        """Clear away what a killed process left."""
        for aside in self._folder.glob(f"{_REPLACED}step-*"):
            place = self._folder / aside.name.removeprefix(_REPLACED)
            if place.exists():
                shutil.rmtree(aside)
            else:
                _log.warning("%s: put back, its replacement was never finished", place)
                aside.rename(place)
        for unfinished in self._folder.glob(f"{_WRITING}*"):
            _log.warning("%s: removed, it was never finished", unfinished)
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            else:
                unfinished.unlink()

    def _failure(self, step: int, error: OSError) -> str:
        survivor = self.newest()
        rest = f"{survivor.folder} is whole" if survivor else "there is no earlier checkpoint"
        reason = error.strerror or error
        return f"the checkpoint of step {step} could not be written to {self._folder}: {reason}; {rest}"


def newest_checkpoint(folder: Path) -> Checkpoint | None:
    """The whole checkpoint in `folder` that was saved last; changes nothing, so a run may be writing there.

    Damaged ones are passed over and the reason is logged. "Last" is the order of saving, not the step: a run that went
    back to an earlier step continues from where it is now.
    """
    found = []
    for candidate in _step_folders(folder):
        record, reason = _record_or_reason(candidate)
        if record is None:
            _log.warning("%s: passed over, %s", candidate, reason)
        else:
            found.append((record.serial, candidate))
    for _, candidate in sorted(found, reverse=True):
        try:
            return open_checkpoint(candidate)
        except ConfigurationError as error:
            _log.warning("passed over, %s", error)
    return None


def last_saved(folder: Path) -> int:
    """The number of the last save of the run whose checkpoints these are; 0 where there is none that can be read."""
    records = (_record_or_reason(candidate)[0] for candidate in _step_folders(folder))
    return max((record.serial for record in records if record is not None), default=0)


def has_checkpoints(folder: Path) -> bool:
    """Whether checkpoints were saved here, be they whole or damaged by now."""
    return bool(_step_folders(folder))


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in this folder, every byte checked against its manifest; ConfigurationError when damaged.

    So is a file that was not written with it, for a model or tokenizer may be read differently beside it; hidden files
    are nobody's.
    """
    record, reason = _record_or_reason(folder)
    if record is None:
        raise ConfigurationError(f"{folder}: {reason}; choose another checkpoint")
    if added := sorted(_file_names(folder) - record.files.keys() - {METADATA}):
        raise ConfigurationError(f"{folder / added[0]}: was not written with the checkpoint; remove it")
    for name, expected in record.files.items():
        try:
            actual = _describe_file(folder / name)
        except OSError as error:
            raise ConfigurationError(f"{folder / name}: {error.strerror}; choose another checkpoint") from error
        if actual != expected:
            raise ConfigurationError(
                f"{folder / name}: damaged, {actual.size} bytes where {expected.size} were written"
                f"{'' if actual.size != expected.size else ' but with other content'}; choose another checkpoint"
            )
    return Checkpoint(record.step, folder, record.metadata, record.score)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor] | None = None) -> None:
    """Write tensors as safetensors, one at a time, flushed to the disk. OSError when the disk refuses.

    A tensor that is not all in this process is read by `read` when it is written. (The library's own writer wants all
    at once; the format is a length of 8 bytes, as much JSON, and the tensors' bytes.)
    """
    header: dict[str, JsonValue] = {}
    end = 0
    # The largest numbers first, as the library does, so that all are aligned.
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    for name in names:
        start, end = end, end + tensors[name].numel() * tensors[name].dtype.itemsize
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            tensor = (read or tensors.__getitem__)(name).detach().cpu().contiguous()
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    _flush(path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors written by `save_tensors`, on the CPU; backed by the file until copied. RunError when unreadable."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise RunError(f"{path}: cannot be read as safetensors: {error}") from error


def write_atomically(path: Path, text: str) -> None:
    """Replace a text file so that a reader, or a crash, sees the old or the new content and nothing between."""
    unfinished = path.with_name(f"{_WRITING}{path.name}")
    _write_flushed(unfinished, text)
    unfinished.replace(path)
    _flush(path.parent)


class _File(Config):
    size: int
    sha256: str


class _Record(Config):
    """What a checkpoint is. `serial` counts saves of a run, and so tells which checkpoint is newest."""

    step: int
    serial: int
    score: float | None
    metadata: dict[str, JsonValue]
    files: dict[str, _File]


class _Sealed(_Record):
    """The content of metadata.json: a record, and the digest of its other keys."""

    sha256: str


def _written(record: _Record) -> str:
    content = record.model_dump(include=set(_Record.model_fields))
    return json.dumps({**content, "sha256": _digest(record)}, allow_nan=False, indent=1)


def _digest(record: _Record) -> str:
    content = record.model_dump(include=set(_Record.model_fields))
    return hashlib.sha256(json.dumps(content, allow_nan=False, sort_keys=True).encode()).hexdigest()


def _best(records: Mapping[Path, _Record]) -> Path | None:
    scores = {folder: record.score for folder, record in records.items() if record.score is not None}
    return max(scores, key=lambda folder: (scores[folder], records[folder].serial), default=None)


def _step_folders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdigit())


def _record_or_reason(folder: Path) -> tuple[_Record | None, str]:
    """The manifest of a checkpoint, or why there is none."""
    try:
        record = _Sealed.model_validate_json((folder / METADATA).read_bytes())
    except OSError as error:
        return None, f"its {METADATA} cannot be read ({error.strerror})"
    except ValidationError as error:
        problem = error.errors()[0]
        what = ": ".join(filter(None, (".".join(map(str, problem["loc"])), problem["msg"])))
        return None, f"its {METADATA} is damaged or of another version ({what})"
    if record.sha256 != _digest(record):
        return None, f"its {METADATA} is damaged (its content is not what was written)"
    return record, ""


def _manifest(folder: Path) -> dict[str, _File]:
    """Every file below, flushed to the disk."""
    files: dict[str, _File] = {}
    for name in sorted(_file_names(folder)):
        _flush(folder / name)
        files[name] = _describe_file(folder / name)
    return files


def _file_names(folder: Path) -> set[str]:
    """Paths of the files below, hidden ones left out."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if not any(part.startswith(".") for part in path.parts)}


def _describe_file(path: Path) -> _File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _File(size=file.tell(), sha256=digest)


def _write_flushed(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _flush_folders(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        if path.is_dir():
            _flush(path)


def _flush(path: Path) -> None:
    """Force a file's content, or a folder's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
