"""Random numbers as a function of who asks, so that a completion does not depend on its batch mates."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: Sequence[int], prompt_id: str, index: int) -> int:
    """The 64-bit key of one completion's stream: run seed, step, prompt and its place in the group."""
    text = "/".join([*map(str, seed), prompt_id, str(index)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniforms(keys: Sequence[int], positions: Sequence[int]) -> Tensor:
    """float32 in [0, 1), one for each (stream key, position): splitmix64 (Steele et al. 2014) at that position."""
    state = np.asarray(keys, dtype=np.uint64)
    with np.errstate(over="ignore"):
        z = state + (np.asarray(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
        z = (z ^ (z >> np.uint64(30))) * _MIX1
        z = (z ^ (z >> np.uint64(27))) * _MIX2
        z = z ^ (z >> np.uint64(31))
    # 24 bits: every value is an exact float32 below 1.
    return torch.from_numpy((z >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24))
