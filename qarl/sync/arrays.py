"""A snapshot as plain arrays of bytes, in the form it is stored in: what is sent to engines in other processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qarl.records import Snapshot
from qarl.sync.compressed_tensors import stored, unstored

Octets = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """The bytes of every stored tensor, with its dtype's name and its shape; `num_bytes` is what they take."""

    version: int
    schemes: Mapping[str, str]
    checksum: str
    octets: Mapping[str, Octets]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]

    @property
    def num_bytes(self) -> int:
        return sum(len(octets) for octets in self.octets.values())


def pack(snapshot: Snapshot) -> Parcel:
    """Arrays that share the tensors' memory, where those lie on the CPU and are stored as they are."""
    tensors = {n: t.detach().cpu().contiguous() for n, t in stored(snapshot.tensors, snapshot.schemes).items()}
    return Parcel(
        snapshot.version,
        dict(snapshot.schemes),
        snapshot.checksum,
        {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()},
        {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()},
    )


def unpack(parcel: Parcel) -> Snapshot:
    """The snapshot, its checksum not verified yet; tensors share the arrays' memory, which may be read-only.

    RunError naming a tensor that a packed module lacks.
    """
    found = {name: _tensor(octets, *parcel.kinds[name]) for name, octets in parcel.octets.items()}
    tensors = unstored(found, parcel.schemes, f"weights of version {parcel.version}")
    return Snapshot(parcel.version, tensors, parcel.schemes, parcel.checksum)


def _tensor(octets: Octets, dtype: str, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        # Of memory that must not be written to: an engine only reads its weights.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(octets).view(getattr(torch, dtype)).view(shape)
