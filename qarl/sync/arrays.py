"""A snapshot as plain arrays of bytes, in the form it is stored in: what is sent to engines in other processes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qarl.records import Lora, Snapshot
from qarl.sync.compressed_tensors import from_stored, stored

Octets = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Parcel:
    """The bytes of every stored tensor, with its dtype's name and its shape; `num_bytes` is what they take.

    Of adapters, `adapts` are the checksum of their base, which goes apart, rank and alpha.
    """

    version: int
    schemes: Mapping[str, str]
    checksum: str
    octets: Mapping[str, Octets]
    kinds: Mapping[str, tuple[str, tuple[int, ...]]]
    adapts: tuple[str, int, float] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(len(octets) for octets in self.octets.values())


def pack(snapshot: Snapshot) -> Parcel:
    """Arrays that share the tensors' memory, where those lie on the CPU and are stored as they are."""
    lora = snapshot.lora
    in_store = snapshot.tensors if lora is not None else stored(snapshot.tensors, snapshot.schemes)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in in_store.items()}
    return Parcel(
        snapshot.version,
        dict(snapshot.schemes),
        snapshot.checksum,
        {name: tensor.reshape(-1).view(torch.uint8).numpy() for name, tensor in tensors.items()},
        {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()},
        None if lora is None else (lora.base.checksum, lora.rank, lora.alpha),
    )


def unpack(parcel: Parcel, base: Snapshot | None = None) -> Snapshot:
    """The snapshot, its checksum not verified yet; tensors share the arrays' memory, which may be read-only.

    `base` is that of adapters. RunError naming a tensor that a packed module lacks.
    """
    found = {name: _tensor(octets, *parcel.kinds[name]) for name, octets in parcel.octets.items()}
    if parcel.adapts is not None:
        checksum, rank, alpha = parcel.adapts
        assert base is not None and base.checksum == checksum, "adapters go to who has their base"
        return Snapshot(parcel.version, found, parcel.schemes, parcel.checksum, lora=Lora(base, rank, alpha))
    tensors = from_stored(found, parcel.schemes, f"weights of version {parcel.version}")
    return Snapshot(parcel.version, tensors, parcel.schemes, parcel.checksum)


def _tensor(octets: Octets, dtype: str, shape: tuple[int, ...]) -> Tensor:
    with warnings.catch_warnings():
        # Of memory that must not be written to: an engine only reads its weights.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(octets).view(getattr(torch, dtype)).view(shape)
