"""Operations and bytes, worked out by hand for the tiny model.

It has hidden 128, 4 query and 2 key/value heads of 32, feed-forward 256, 2 layers and 259 tokens.
"""

import torch

from qarl.bench.operations import (
    gemm_operations,
    gemm_shapes,
    size_bytes,
    store_row_bytes,
    touched_bytes,
    update_operations,
)
from qarl.models.names import TINY_CONFIG
from qarl.ops.reference import KVCodes, PackedCodes, PackedInt4
from qarl.rollout.request import spans_of

TINY_TOKENS = 259
ONE_LAYER = 256 * 128 + 128 * 128 + 512 * 128 + 128 * 256


def test_gemms_of_the_tiny_model() -> None:
    assert gemm_shapes(TINY_CONFIG, TINY_TOKENS) == [
        ("qkv", 256, 128),
        ("output", 128, 128),
        ("gate_up", 512, 128),
        ("down", 128, 256),
        ("head", 259, 128),
    ]


def test_a_multiply_add_is_two_operations() -> None:
    assert gemm_operations(TINY_CONFIG, TINY_TOKENS) == (2 * 2 * ONE_LAYER, 2 * 259 * 128)


def test_an_update_is_forward_twice_where_recomputed_and_backward() -> None:
    layers, head = 2 * ONE_LAYER, 259 * 128
    down = TINY_CONFIG.num_layers * 128 * 256
    kept = 58 * 6 * layers + 64 * 8 * head
    assert update_operations(TINY_CONFIG, TINY_TOKENS, 58, 64, recomputed=False) == kept
    assert update_operations(TINY_CONFIG, TINY_TOKENS, 58, 64, recomputed=True) == kept + 58 * 2 * (layers - down)


def test_a_weight_counts_in_its_own_format_and_without_padding() -> None:
    bytes_, nibbles = torch.zeros(1, 64 * 64, dtype=torch.int8), torch.zeros(1, 64 * 32, dtype=torch.uint8)
    corrections = torch.zeros(1, 64, dtype=torch.int32)
    assert size_bytes(PackedCodes((6, 64), torch.int8, bytes_, corrections)) == 6 * 64
    assert size_bytes(PackedCodes((6, 64), torch.int8, nibbles, corrections)) == 6 * 64 // 2
    assert size_bytes(PackedCodes((6, 64), torch.int16, bytes_.to(torch.int16))) == 2 * 6 * 64
    assert size_bytes(PackedInt4((6, 64), torch.zeros(6, 2), nibbles)) == 6 * 64 // 2 + 4 * 6 * 2


def test_rows_are_read_and_written_once() -> None:
    x, gain = torch.zeros(3, 128), torch.zeros(128)
    codes, scales = torch.zeros(3, 128, dtype=torch.int8), torch.zeros(3)
    given = {"self": None, "x_TD": x, "gain_D": gain, "eps": 1e-6}
    assert touched_bytes("rms_norm", given, x) == 4 * 3 * 128 + 4 * 128 + 4 * 3 * 128
    assert touched_bytes("rms_norm_quantize", given, (codes, scales)) == 4 * 3 * 128 + 4 * 128 + 3 * 128 + 4 * 3


def test_a_float_gemm_reads_its_weight_without_the_padding_of_panels() -> None:
    given = {"x_TK": torch.zeros(3, 128), "packed": torch.zeros(9, 128, 32), "n": 259, "bias_N": None}
    given["residual_TN"] = torch.zeros(3, 259)
    assert touched_bytes("matmul", given, torch.zeros(3, 259)) == 4 * (3 * 128 + 259 * 128 + 2 * 3 * 259)


def test_attention_reads_the_rows_that_are_visible() -> None:
    # Two queries of 4 heads of 32 see 5 and 7 keys and values of 2 heads; the store has more rows.
    q, store = torch.zeros(2, 4, 32), torch.zeros(100, 2, 32)
    spans = spans_of([[(0, 5)], [(32, 7)]], [[5], [7]])
    given = {"q_THC": q, "keys": store, "values": store, "spans": spans, "scale": 1.0}
    result = (torch.zeros(2, 4, 32), torch.zeros(2, 4))
    assert touched_bytes("attention", given, result) == 4 * (2 * 128 + 12 * 2 * 2 * 32 + 2 * 128 + 2 * 4)
    coded = KVCodes(torch.zeros(100, 2, 32, dtype=torch.int8), torch.zeros(100, 2))
    assert store_row_bytes(coded) == 2 * (32 + 4)
    given |= {"keys": coded, "values": coded}
    assert touched_bytes("attention", given, result) == 4 * (2 * 128 + 2 * 128 + 2 * 4) + 12 * 2 * 2 * 36


def test_the_rotary_split_writes_one_row_of_the_store_a_token() -> None:
    store, table = torch.zeros(100, 2, 32), torch.zeros(256, 16)
    given = {
        "qkv_TN": torch.zeros(3, 256),
        "positions_T": torch.zeros(3, dtype=torch.int64),
        "slots_T": torch.zeros(3, dtype=torch.int64),
        "cosines_PC": table,
        "sines_PC": table,
        "gains": None,
        "keys": store,
        "values": store,
    }
    read, written = 4 * 3 * 256 + 2 * 8 * 3 + 2 * 4 * 3 * 16, 4 * 3 * 128 + 2 * 4 * 3 * 2 * 32
    assert touched_bytes("split_rotate", given, torch.zeros(3, 4, 32)) == read + written
