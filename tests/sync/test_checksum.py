import hashlib
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels
from qarl.sync.checksum import CHUNK_WORDS, WORD_BYTES, checksum, combine, digests

CHUNK_BYTES = CHUNK_WORDS * WORD_BYTES


def codes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def test_the_order_of_names_does_not_matter() -> None:
    a, b = codes(4, 8), codes(3, seed=1)
    assert checksum({"a": a, "b": b}) == checksum({"b": b, "a": a})
    assert len(checksum({"a": a})) == 64


def test_it_does_not_change_between_releases() -> None:
    # Stored checksums must stay readable: this value is part of the file format.
    tensors = {"a": torch.arange(5, dtype=torch.int32), "b": torch.tensor([[1.0, -2.0]])}
    assert checksum(tensors) == "743409b097744049c00d80a1c8d7e8cd400302b75364c63263b7407a06fdd3fe"


def as_defined(name: str, octets: np.ndarray) -> str:
    """The digest of a tensor of bytes, written out: whole chunks in blocks of 16, then the rest, padded with zeros."""
    index = np.arange(1, CHUNK_WORDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    index = (index ^ (index >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    index = (index ^ (index >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    multipliers = (index ^ (index >> np.uint64(31))) | np.uint64(1)
    total = hashlib.sha256(f"{name}\0torch.uint8\0[{octets.size}]\0".encode())
    chunks, rest = divmod(octets.size, CHUNK_BYTES)
    parts = [octets[i * CHUNK_BYTES : min(i + 16, chunks) * CHUNK_BYTES] for i in range(0, chunks, 16)]
    parts += [np.pad(octets[octets.size - rest :], (0, -rest % 8))] if rest else []
    for part in parts:
        words = part.view(np.uint64).reshape(-1, min(CHUNK_WORDS, part.size // 8))
        total.update((words @ multipliers[: words.shape[1]]).tobytes())
        total.update(((words >> np.uint64(32)) @ multipliers[: words.shape[1]]).tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(
    "size", [0, 1, 8, CHUNK_BYTES, 16 * CHUNK_BYTES, 17 * CHUNK_BYTES + 5, 33 * CHUNK_BYTES], ids=str
)
def test_the_digest_is_the_defined_one_by_the_kernel_and_in_torch(size: int) -> None:
    octets = codes(size).view(torch.uint8)
    expected = as_defined("x", octets.numpy())
    assert digests({"x": octets}) == {"x": expected}
    with using(ReferenceKernels()):
        assert digests({"x": octets}) == {"x": expected}


@pytest.mark.parametrize("offset", range(1, 8))
def test_bytes_may_begin_anywhere_in_a_word(offset: int) -> None:
    raw = bytearray(codes(CHUNK_BYTES + 16).view(torch.uint8).numpy().tobytes())
    aligned = torch.frombuffer(raw, dtype=torch.uint8, offset=offset)[8 - offset :]
    assert digests({"x": aligned}) == digests({"x": aligned.clone()})
    askew = torch.frombuffer(raw, dtype=torch.uint8, offset=offset)
    assert digests({"x": askew}) == digests({"x": askew.clone()})


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.zeros(4, 6)},
        {"x": torch.zeros(6, 4)},
        {"x": torch.zeros(4, 6, dtype=torch.int32)},
        {"x": torch.zeros(4, 6), "y": torch.zeros(0)},
        {},
    ],
    ids=["name", "shape", "dtype", "more", "none"],
)
def test_name_shape_and_dtype_count_and_not_only_bytes(other) -> None:
    assert checksum({"x": torch.zeros(4, 6)}) != checksum(other)


def test_swapped_names_are_seen() -> None:
    a, b = codes(16), codes(16, seed=1)
    assert checksum({"x": a, "y": b}) != checksum({"x": b, "y": a})


@given(
    size=st.sampled_from([1, 7, 8, 9, 1000, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 3, 17 * CHUNK_BYTES + 5]),
    position=st.floats(0, 1, exclude_max=True),
    bit=st.integers(0, 7),
)
@settings(max_examples=40, deadline=None)
def test_a_single_flipped_bit_is_seen_anywhere(size: int, position: float, bit: int) -> None:
    original = codes(size).view(torch.uint8)
    flipped = original.clone()
    flipped[int(position * size)] ^= 1 << bit
    assert checksum({"x": original}) != checksum({"x": flipped})


def test_every_pair_of_flipped_bits_in_a_small_tensor_is_seen() -> None:
    # Top bits of two words would cancel in a plain sum of products with odd numbers.
    original = torch.zeros(4, dtype=torch.int64)
    seen = {checksum({"x": original})}
    bits = [(word, bit) for word in range(4) for bit in (0, 1, 30, 31, 32, 33, 62, 63)]
    for first in bits:
        for second in bits:
            if first < second:
                flipped = original.clone()
                for word, bit in (first, second):
                    flipped[word] ^= torch.tensor(-(2**63) if bit == 63 else 1 << bit)
                seen.add(checksum({"x": flipped}))
    assert len(seen) == 1 + len(bits) * (len(bits) - 1) // 2


@pytest.mark.parametrize("columns", [8, 100, CHUNK_BYTES, 2 * CHUNK_BYTES])
def test_swapped_rows_are_seen(columns: int) -> None:
    original = codes(4, columns)
    assert checksum({"x": original}) != checksum({"x": original[[0, 2, 1, 3]]})


def test_negating_two_elements_is_seen() -> None:
    original = torch.ones(1000)
    negated = original.clone()
    negated[[1, 7]] = -1.0
    assert checksum({"x": original}) != checksum({"x": negated})


def test_memory_layout_does_not_matter() -> None:
    x = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    assert checksum({"x": x.t()}) == checksum({"x": x.t().contiguous()})
    unaligned = torch.arange(40, dtype=torch.int8)[3:]
    assert checksum({"x": unaligned}) == checksum({"x": unaligned.clone()})


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.bool, torch.float32])
def test_every_stored_dtype_and_scalars_and_empty_tensors_have_a_checksum(dtype: torch.dtype) -> None:
    zero, one = torch.zeros((), dtype=dtype), torch.ones(3).to(dtype)
    values = {checksum({"x": zero}), checksum({"x": one}), checksum({"x": torch.zeros(0, dtype=dtype)})}
    assert len(values) == 3


def test_the_checksum_is_that_of_its_digests() -> None:
    tensors = {"a": codes(9), "b": codes(10)}
    assert combine(digests(tensors)) == checksum(tensors)


def test_bytes_count_not_values() -> None:
    nan = {"x": torch.tensor([float("nan"), 0.0])}
    assert checksum(nan) == checksum({"x": nan["x"].clone()})
    assert checksum(nan) != checksum({"x": torch.tensor([float("nan"), -0.0])})


@pytest.mark.slow
def test_two_hundred_megabytes_take_a_tenth_of_a_second() -> None:
    tensors = {"x": codes(200_000_000)}
    fastest = min(_seconds_of_checksum(tensors) for _ in range(5))
    assert fastest < 0.1


def _seconds_of_checksum(tensors: dict[str, torch.Tensor]) -> float:
    start = time.perf_counter()
    checksum(tensors)
    return time.perf_counter() - start
