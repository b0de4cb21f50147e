"""The run folder: what lies where in it, and the lock that keeps a second run out."""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from qarl.checkpoint import Checkpoint, has_checkpoints, newest_checkpoint, open_checkpoint
from qarl.errors import ConfigurationError


def run_at(path: Path) -> RunFolder | None:
    """The run whose folder, or one of whose checkpoints, lies at `path`; None where neither does."""
    folder = RunFolder(path.parent.parent if _is_checkpoint(path) else path)
    # Not `Path.is_file`, which raises for what cannot be a path, such as a model's name that is too long for one.
    return folder if os.path.isfile(folder.recipe) else None


def checkpoint_at(path: Path) -> Checkpoint:
    """The checkpoint at `path`, or the newest whole one of the run there; ConfigurationError where there is none."""
    if _is_checkpoint(path):
        return open_checkpoint(path)
    folder = RunFolder(path).checkpoints
    found = newest_checkpoint(folder)
    if found is None:
        state = "all its checkpoints are damaged" if has_checkpoints(folder) else "it has no checkpoint yet"
        raise ConfigurationError(f"{path}: the run cannot be used, {state}")
    return found


def _is_checkpoint(path: Path) -> bool:
    return path.parent.name == "checkpoints"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; nothing is created by asking for them."""

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe, TOML."""
        return self.path / "recipe.toml"

    @property
    def completions(self) -> Path:
        """Sampled texts with rewards and log-probabilities."""
        return self.path / "completions"

    @property
    def checkpoints(self) -> Path:
        """Where `CheckpointStore` keeps `step-N/` and `latest`."""
        return self.path / "checkpoints"

    @property
    def events(self) -> Path:
        """TensorBoard event files."""
        return self.path / "events"

    @property
    def log(self) -> Path:
        """What the run said."""
        return self.path / "run.log"

    def lock(self) -> RunLock:
        """The right to write here; see `RunLock`."""
        return RunLock(self.path)

    def is_running(self) -> bool:
        """Whether a process holds the lock; nothing is written."""
        try:
            descriptor = os.open(self.path / "run.lock", os.O_RDONLY)
        except OSError:  # there was no run, or it is not for our eyes
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False


class RunLock:
    """Exclusive right to write into a run folder, as a context manager; the system frees it when the process dies.

    Entering creates the folder, and raises ConfigurationError naming the holder's process id when another run holds it;
    `option` is what chooses the folder.
    """

    def __init__(self, folder: Path, option: str = "--run-dir") -> None:
        self._path = folder / "run.lock"
        self._option = option
        self._descriptor: int | None = None

    def __enter__(self) -> RunLock:
        folder = self._path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigurationError(
                f"run folder {folder} cannot be written: {error.strerror}; choose another with {self._option}"
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
            os.close(descriptor)
            cause = f"in use by {holder}" if isinstance(error, BlockingIOError) else f"not lockable: {error.strerror}"
            raise ConfigurationError(
                f"run folder {folder} is {cause}; stop that run or choose another folder with {self._option}"
            ) from error
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(
                f"run folder {folder} cannot be written: {error.strerror}; make room, or choose another with "
                f"{self._option}"
            ) from error
        self._descriptor = descriptor
        # A forked worker that outlives a killed run would otherwise go on holding the lock.
        os.register_at_fork(after_in_child=self._close)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The file stays: were it removed, a third run could lock a new one while a second waits on the old.
        self._close()

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
