"""How a published version reaches an engine in another process: through a folder, or over a process group.

The sender's `message` says how to receive; it is JSON, and goes to the engine by whatever way it is called. A folder in
memory (`/dev/shm`) or on a disk serves workers that see it; gloo or NCCL serves those on other machines. Both carry
what `sync.compressed_tensors.stored` gives: 4-bit codes packed, so that as many bytes move as quantized weights have.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from qarl.errors import ConfigurationError, RunError
from qarl.records import Snapshot
from qarl.sync.adapters import write_peft
from qarl.sync.compressed_tensors import from_stored, stored
from qarl.sync.disk import read_snapshot, write_snapshot

SHARED_MEMORY = Path("/dev/shm")

PREFIX = "qarl-version-"
"""Of the folders in which versions are offered; then the machine and the process that made it."""

Way = Literal["memory", "disk", "gloo", "nccl"]
"""A recipe's `engine.transport`."""


class Transport(Protocol):
    """The sending side."""

    def offer(self, snapshot: Snapshot, digests: Mapping[str, str]) -> dict[str, Any]:
        """Make this version, whose tensors have these digests, available.

        Returns the message by which it is received, with the `bytes` of what is sent.
        """
        ...

    def withdraw(self) -> None:
        """Everybody has it, or never will: free what is held for receivers. RunError where sending failed."""
        ...


def transport(way: Way, folder: str, receivers: int, timeout_s: float) -> Transport:
    """The sender of a recipe's `engine.transport`, for so many workers; `folder` is a place for "disk"."""
    if way == "memory" and not SHARED_MEMORY.is_dir():
        raise ConfigurationError(
            f"engine.transport = 'memory': this system has no {SHARED_MEMORY}; set 'disk' and engine.folder"
        )
    if way == "memory":
        return FolderTransport(SHARED_MEMORY)
    if way == "disk":
        return FolderTransport(Path(folder))
    return BroadcastTransport(way, receivers, timeout_s)


def receive(message: Mapping[str, Any], rank: int) -> Snapshot:
    """The version that a message offers; `rank` counts the receivers from 0. RunError where it is not whole."""
    if message["way"] == "folder":
        return read_snapshot(Path(message["folder"]))
    return _receive_broadcast(message, rank)


class FolderTransport:
    """Versions as folders below `parent`, each of which is removed once it was received; adapters as PEFT has them."""

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(parent)
        self._home = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{socket.gethostname()}+{os.getpid()}+", dir=parent))
        self._offered: Path | None = None
        atexit.register(shutil.rmtree, self._home, ignore_errors=True)

    def offer(self, snapshot: Snapshot, digests: Mapping[str, str]) -> dict[str, Any]:
        self.withdraw()
        self._offered = self._home / f"version-{snapshot.version}"
        try:
            size = self._write(snapshot, digests, self._offered)
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(self._home).free
            raise RunError(
                f"weights of version {snapshot.version} could not be put into {self._home}, where {free} bytes are "
                f"free: {error}; make room, or set engine.transport = 'disk' and engine.folder"
            ) from error
        return {"way": "folder", "folder": str(self._offered), "bytes": size}

    def _write(self, snapshot: Snapshot, digests: Mapping[str, str], folder: Path) -> int:
        lora = snapshot.lora
        if lora is None:
            return write_snapshot(snapshot, folder, digests)
        write_peft(folder, snapshot.tensors, lora.rank, lora.alpha, lora.base.checksum)
        return sum(tensor.nbytes for tensor in snapshot.tensors.values())

    def withdraw(self) -> None:
        if self._offered is not None:
            shutil.rmtree(self._offered, ignore_errors=True)
            self._offered = None


def _remove_orphans(parent: Path) -> None:
    """Folders of processes of this machine that were killed before they could remove theirs."""
    for folder in parent.glob(f"{PREFIX}{socket.gethostname()}+*"):
        process = folder.name.split("+")[1]  # no name of a host has this sign
        if process.isdigit() and not _is_running(int(process)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # somebody else's
        return True
    return True


class BroadcastTransport:
    """Versions sent to every worker at once over a process group of which this process is the first member.

    The group is made at the first version, when the workers have been told where to meet.
    """

    def __init__(self, backend: Literal["gloo", "nccl"], receivers: int, timeout_s: float) -> None:
        self._backend = backend
        self._size = 1 + receivers
        self._timeout = timeout_s
        self._host = _address_of_this_host()
        self._store = TCPStore(
            self._host, 0, self._size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self._group: Any = None
        self._sending: Thread | None = None
        self._failure: list[BaseException] = []

    def offer(self, snapshot: Snapshot, digests: Mapping[str, str]) -> dict[str, Any]:
        assert snapshot.lora is None, "adapters go through a folder"
        self.withdraw()
        tensors = {
            name: tensor.detach().contiguous() for name, tensor in stored(snapshot.tensors, snapshot.schemes).items()
        }
        message = {
            "way": "broadcast",
            "bytes": sum(tensor.nbytes for tensor in tensors.values()),
            "backend": self._backend,
            "host": self._host,
            "port": self._store.port,
            "size": self._size,
            "timeout_s": self._timeout,
            "version": snapshot.version,
            "schemes": dict(snapshot.schemes),
            "checksum": snapshot.checksum,
            "tensors": [
                [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()
            ],
        }
        self._sending = Thread(target=self._send, args=(message, list(tensors.values())), daemon=True)
        self._sending.start()
        return message

    def withdraw(self) -> None:
        if self._sending is None:
            return
        self._sending.join(self._timeout)
        is_stuck, self._sending = self._sending.is_alive(), None
        if is_stuck or self._failure:
            reason = self._failure[0] if self._failure else f"no end after {self._timeout:g} s"
            raise RunError(f"weights could not be sent by {self._backend} to {self._size - 1} workers: {reason}")

    def _send(self, message: Mapping[str, Any], tensors: list[Tensor]) -> None:
        try:
            with torch.no_grad():
                self._group = self._group or _group(_meeting(message), self._store, 0)
                for tensor in tensors:
                    _broadcast(self._group, message["backend"], tensor)
        except BaseException as error:  # told by `withdraw`, in the thread that waits
            self._failure.append(error)


_Meeting = tuple[str, str, int, int, float]


def _meeting(message: Mapping[str, Any]) -> _Meeting:
    return message["backend"], message["host"], message["port"], message["size"], message["timeout_s"]


def _receive_broadcast(message: Mapping[str, Any], rank: int) -> Snapshot:
    group = _group_of_receiver(_meeting(message), 1 + rank)
    found = {}
    for name, dtype, shape in message["tensors"]:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        found[name] = _broadcast(group, message["backend"], tensor)
    schemes = message["schemes"]
    return Snapshot(message["version"], from_stored(found, schemes, "broadcast"), schemes, message["checksum"])


def _broadcast(group: Any, backend: str, tensor: Tensor) -> Tensor:
    """The first member's bytes, in every member's tensor."""
    place = tensor.cuda() if backend == "nccl" else tensor
    octets = place.reshape(-1).view(torch.uint8)  # of any dtype, and no tensor is without elements
    group.broadcast(octets, 0).wait()
    return tensor.copy_(place) if place is not tensor else tensor


_joined: dict[int, tuple[_Meeting, Any]] = {}
"""The group that each receiver of this process is in. A sender may be gone without a word: the next one's group takes
the place of the last one's, so that a server of many runs holds no more than one.
"""


def _group_of_receiver(meeting: _Meeting, rank: int) -> Any:
    if rank not in _joined or _joined[rank][0] != meeting:
        _joined.pop(rank, None)
        _, host, port, size, timeout_s = meeting
        store = TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
        _joined[rank] = meeting, _group(meeting, store, rank)
    return _joined[rank][1]


def _group(meeting: _Meeting, store: Store, rank: int) -> Any:
    """A process group of its own, beside those that vLLM or the learner's ranks have."""
    backend, _, _, size, timeout_s = meeting
    timeout = timedelta(seconds=timeout_s)
    if backend == "gloo":
        return dist.ProcessGroupGloo(PrefixStore("qarl", store), rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("qarl", store), rank, size, options)


def _address_of_this_host() -> str:
    """By which others reach it; its own loopback where it has no network."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the system only chooses the way there
        return str(probe.getsockname()[0])
    return "127.0.0.1"
