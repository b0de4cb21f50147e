"""Checksums of published weights: the proof that an engine serves the bytes the learner published.

Made against accidents (a stale, renamed, permuted or torn tensor), not against forgery. Each chunk of a
tensor's bytes, read as 64-bit words, is multiplied with fixed odd pseudo-random numbers and summed, modulo
2^64; the sums of all chunks, the name, dtype and shape go through SHA-256. A second sum of the words' upper
halves is kept because the top bits of two words could cancel in the first alone. It is numpy on one thread, at
about 3 GB/s, so that it does not wait for torch's threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 16384
"""128 KiB a chunk: with its multipliers it fits a core's cache. Part of the checksum's definition."""

UPPER_HALF = np.uint64(32)

BLOCK_CHUNKS = 16
"""Chunks in one operation: bounds the temporary of the upper halves to 2 MiB. Not part of the definition."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """64 hex digits over names, dtypes, shapes and bytes; the mapping's order does not matter."""
    return combine(digests(tensors))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """One digest a tensor, over its name, dtype, shape and bytes (copied to the CPU if they are elsewhere)."""
    return {name: _digest(name, tensor) for name, tensor in tensors.items()}


def combine(tensor_digests: Mapping[str, str]) -> str:
    """The `checksum` of the tensors whose `digests` these are."""
    total = hashlib.sha256()
    for name in sorted(tensor_digests):
        total.update(bytes.fromhex(tensor_digests[name]))
    return total.hexdigest()


def _digest(name: str, tensor: Tensor) -> str:
    total = hashlib.sha256(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
    for words in _blocks(_bytes(tensor).numpy()):
        multipliers = _multipliers()[: words.shape[1]]
        total.update((words @ multipliers).tobytes())
        total.update(((words >> UPPER_HALF) @ multipliers).tobytes())
    return total.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _blocks(octets: NDArray[np.uint8]) -> Iterator[NDArray[np.uint64]]:
    """The bytes as 64-bit words: whole chunks [up to BLOCK_CHUNKS, CHUNK_WORDS], then the rest [1, words]."""
    chunk_bytes = CHUNK_WORDS * WORD_BYTES
    whole = octets.size // chunk_bytes * chunk_bytes
    chunks = octets[:whole].view(np.uint64).reshape(-1, CHUNK_WORDS)
    for start in range(0, len(chunks), BLOCK_CHUNKS):
        yield chunks[start : start + BLOCK_CHUNKS]
    if whole < octets.size:
        rest = np.pad(octets[whole:], (0, -octets.size % WORD_BYTES))
        yield rest.view(np.uint64)[None]


@cache
def _multipliers() -> NDArray[np.uint64]:
    """Odd 64-bit numbers [CHUNK_WORDS] from SplitMix64 (Steele, Lea, Flood 2014), the same everywhere."""
    z = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) | np.uint64(1)
