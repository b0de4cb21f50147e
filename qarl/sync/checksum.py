"""Checksums of published weights: the proof that an engine serves the bytes the learner published.

Made against accidents (a stale, renamed, permuted or torn tensor), not against forgery. Each chunk of a
tensor's bytes, read as 64-bit words, is multiplied with fixed odd pseudo-random numbers and summed, modulo
2^64; the sums of all chunks, the name, dtype and shape go through SHA-256. A second sum of the words' upper
halves is kept because the top bits of two words could cancel in the first alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from qarl.ops.kernels import kernels

WORD_BYTES = 8
CHUNK_WORDS = 16384
"""128 KiB a chunk: with its multipliers it fits a core's cache. Part of the checksum's definition."""

BLOCK_CHUNKS = 16
"""Chunks whose first sums come before their second ones. Part of the checksum's definition."""


MANY_BYTES = 64 << 20
"""From here on a tensor's digest is worth more than one thread: waking the others takes as long as a small one."""


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """64 hex digits over names, dtypes, shapes and bytes; the mapping's order does not matter."""
    return combine(digests(tensors))


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """One digest a tensor, over its name, dtype, shape and bytes, summed where they are."""
    with one_thread():
        found = {name: _digest(name, tensor) for name, tensor in tensors.items() if tensor.nbytes < MANY_BYTES}
    return {name: found.get(name) or _digest(name, tensor) for name, tensor in tensors.items()}


def combine(tensor_digests: Mapping[str, str]) -> str:
    """The `checksum` of the tensors whose `digests` these are."""
    total = hashlib.sha256()
    for name in sorted(tensor_digests):
        total.update(bytes.fromhex(tensor_digests[name]))
    return total.hexdigest()


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with this thread alone inside the block: for many small operations, between which others fall asleep."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _digest(name: str, tensor: Tensor) -> str:
    total = hashlib.sha256(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
    for words in _chunks(_bytes(tensor)):
        multipliers = _multipliers(words.device)[: words.shape[1]]
        for sums in kernels().chunk_sums(words, multipliers).cpu().split(BLOCK_CHUNKS, 1):
            total.update(sums.contiguous().numpy().tobytes())
    return total.hexdigest()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _chunks(octets: Tensor) -> Iterator[Tensor]:
    """The bytes as 64-bit words: whole chunks [chunks, CHUNK_WORDS], then the rest, padded with zeros, [1, words]."""
    chunk_bytes = CHUNK_WORDS * WORD_BYTES
    whole, rest = octets.split([len(octets) // chunk_bytes * chunk_bytes, len(octets) % chunk_bytes])
    if len(whole):
        is_aligned = whole.data_ptr() % WORD_BYTES == 0 and whole.storage_offset() % WORD_BYTES == 0
        aligned = whole if is_aligned else whole.clone()
        yield aligned.view(torch.int64).view(-1, CHUNK_WORDS)
    if len(rest):
        padded = rest.new_zeros(-(-len(rest) // WORD_BYTES) * WORD_BYTES)
        padded[: len(rest)] = rest
        yield padded.view(torch.int64)[None]


@cache
def _multipliers(device: torch.device) -> Tensor:
    """Odd 64-bit numbers [CHUNK_WORDS] from SplitMix64 (Steele, Lea, Flood 2014), the same everywhere."""
    z = torch.arange(1, CHUNK_WORDS + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)) | 1


def _signed(bits: int) -> int:
    return bits - (1 << 64)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shifted right as if without a sign."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
