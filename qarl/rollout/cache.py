"""Where keys and values of every request live: rows of one store per layer, handed out in pages.

Bookkeeping is plain Python over row numbers; only the stores are tensors. Pages of one request need not be
neighbours: attention takes any list of spans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from qarl.models.config import ModelConfig
from qarl.ops.device import HOST
from qarl.ops.reference import KVCodes, KVStore

PAGE = 32
"""Rows (tokens) a page."""


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


KVFormat = Literal["fp32", "int8"]


def bytes_per_token(config: ModelConfig, kv: KVFormat = "fp32") -> int:
    """Keys and values of one token in every layer; int8 has one fp32 scale a head."""
    head_bytes = 4 * config.head_dim if kv == "fp32" else config.head_dim + 4
    return 2 * config.num_layers * config.num_kv_heads * head_bytes


def empty_store(shape: tuple[int, int, int], kv: KVFormat, device: torch.device) -> KVStore:
    """Room for keys or values [rows, heads, dim] of one layer; the rows of one head are neighbours in memory."""
    rows, heads, dim = shape
    if kv == "fp32":
        return torch.zeros(heads, rows, dim, device=device).transpose(0, 1)
    codes = torch.zeros(heads, rows, dim, dtype=torch.int8, device=device)
    scales = torch.ones(heads, rows, device=device)
    return KVCodes(codes.transpose(0, 1), scales.transpose(0, 1))


@dataclass(slots=True)
class Region:
    """The rows of one request (or of a shared prompt): `length` of them are written. No pages: none reserved yet."""

    pages: list[int] = field(default_factory=list)
    length: int = 0

    def next_rows(self, count: int) -> list[int]:
        """Rows for the next `count` tokens, which count as written from now on."""
        positions = range(self.length, self.length + count)
        self.length += count
        return [self.pages[p // PAGE] * PAGE + p % PAGE for p in positions]

    def spans(self) -> list[tuple[int, int]]:
        """(first row, length) of the written rows in order, neighbouring pages joined."""
        found: list[tuple[int, int]] = []
        left = self.length
        for page in self.pages:
            rows = min(left, PAGE)
            if rows <= 0:
                break
            if found and sum(found[-1]) == page * PAGE:
                found[-1] = (found[-1][0], found[-1][1] + rows)
            else:
                found.append((page * PAGE, rows))
            left -= rows
        return found


class KVCache:
    """Stores for every layer, `num_pages` pages long, with a free list of pages.

    A request reserves all the pages it can come to need before it starts, so nothing is ever evicted.
    """

    def __init__(self, config: ModelConfig, num_pages: int, kv: KVFormat = "fp32", device: torch.device = HOST) -> None:
        self.num_pages = num_pages
        shape = (self.num_pages * PAGE, config.num_kv_heads, config.head_dim)
        self.keys = tuple(empty_store(shape, kv, device) for _ in range(config.num_layers))
        self.values = tuple(empty_store(shape, kv, device) for _ in range(config.num_layers))
        self._free: list[int] = []
        self.release_all()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def reserve(self, tokens: int) -> Region:
        """Pages for `tokens`; the caller has checked `free_pages`."""
        count = pages_for(tokens)
        assert count <= len(self._free), "admission let in more than the cache holds"
        return Region([self._free.pop() for _ in range(count)])

    def release_all(self) -> None:
        """Forget every region, as after a rollout that was interrupted."""
        self._free = list(range(self.num_pages - 1, -1, -1))

    def release(self, region: Region) -> None:
        self._free.extend(reversed(region.pages))
        region.pages = []
        region.length = 0
