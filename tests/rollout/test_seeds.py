import numpy as np
import pytest
import torch

from qarl.rollout.seeds import stream_key, uniforms


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        # The published test vectors of splitmix64 (Vigna, splitmix64.c).
        (0, [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]),
    ],
)
def test_positions_are_the_outputs_of_splitmix64_from_the_key(seed: int, outputs: list[int]):
    drawn = uniforms([seed] * 3, [0, 1, 2])
    assert drawn.tolist() == [(output >> 40) / 2**24 for output in outputs]


def test_numbers_are_float32_from_0_up_to_but_not_1():
    drawn = uniforms([2**64 - 1] * 200_000, range(200_000))
    assert drawn.dtype == torch.float32
    assert 0.0 <= float(drawn.min()) < 1e-4
    assert 1 - 1e-4 < float(drawn.max()) < 1.0


@pytest.mark.parametrize("across", ["positions", "keys"])
def test_numbers_are_uniform_and_neighbours_independent(across: str):
    count, bins = 40_000, 20
    if across == "positions":
        drawn = uniforms([stream_key((3, 1), "arithmetic/17", 0)] * count, range(count))
    else:
        drawn = uniforms([stream_key((3, 1), "arithmetic/17", i) for i in range(count)], [0] * count)
    counts = torch.histc(drawn, bins, 0.0, 1.0)
    chi_square = float(((counts - count / bins) ** 2 / (count / bins)).sum())
    assert chi_square < 43.8  # the 0.1 % point of 19 degrees of freedom
    correlation = np.corrcoef(drawn[:-1], drawn[1:])[0, 1]
    assert abs(correlation) < 4 / count**0.5


def test_a_number_does_not_depend_on_what_is_drawn_with_it():
    keys, positions = [5, 6, 7], [0, 9, 4]
    together = uniforms(keys, positions)
    alone = [uniforms([key], [position]) for key, position in zip(keys, positions, strict=True)]
    assert torch.equal(together, torch.cat(alone))


def test_every_part_of_a_key_counts():
    keys = [
        stream_key((1, 2), "a", 0),
        stream_key((1, 3), "a", 0),
        stream_key((2, 2), "a", 0),
        stream_key((1, 2), "b", 0),
        stream_key((1, 2), "a", 1),
        stream_key((12,), "a", 0),
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)


def test_a_key_is_the_same_in_every_process_and_release():
    # A resumed run must draw what the unbroken one would have drawn.
    assert stream_key((0, 5), "arithmetic/17", 3) == 0x95C86A70C7851C2A
