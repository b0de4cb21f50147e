"""`qarl bench kernels`: which operations a decode step of the tiny model is made of, in every scheme."""

import pytest
import torch

from qarl.bench import kernels as bench
from qarl.bench.system import system_for
from qarl.errors import ConfigurationError
from qarl.ops.kernels import kernels
from qarl.ops.operand import activation_grid
from qarl.ops.reference import KVCodes
from qarl.quant import scheme_named
from qarl.quant.rules import HEAD_SCHEME
from qarl.rollout.cache import KVFormat
from qarl.rollout.native import NativeEngine

pytestmark = pytest.mark.skipif(not kernels().exact_matmul, reason="what is timed are calls of the C kernels")

INTEGER_STEP = [
    ("rms_norm_quantize", 4),
    ("qkv GEMM", 2),
    ("split_rotate", 2),
    ("attention", 2),
    ("quantize_rows", 2),
    ("output GEMM", 2),
    ("gate_up GEMM", 2),
    ("gated_quantize", 2),
    ("down GEMM", 2),
    ("rms_norm", 1),  # the head's rows have more than 8 bits
    (f"quantize_rows {activation_grid(scheme_named(HEAD_SCHEME)).name}", 1),
    ("head GEMM", 1),
    ("sample", 1),
]
FLOAT_STEP = [
    ("rms_norm", 5),
    ("qkv GEMM", 2),
    ("split_rotate", 2),
    ("attention", 2),
    ("output GEMM", 2),
    ("gate_up GEMM", 2),
    ("gated", 2),
    ("down GEMM", 2),
    ("head GEMM", 1),
    ("sample", 1),
]


def engine_of(scheme: str, **options: object) -> NativeEngine:
    system = system_for("tiny", scheme, 3, **options)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    return engine


@pytest.mark.parametrize(
    ("scheme", "kv_cache", "expected"),
    [
        ("w8a8-int8", "fp32", INTEGER_STEP),
        ("w4a8-int8", "int8", INTEGER_STEP),
        ("none", "fp32", FLOAT_STEP),
        ("w4a16", "int8", FLOAT_STEP),
    ],
)
def test_a_step_is_made_of_the_scheme_s_operations(
    scheme: str, kv_cache: KVFormat, expected: list[tuple[str, int]]
) -> None:
    found = bench.kernels("tiny", scheme, batch=3, context=40, kv_cache=kv_cache)
    rows = found["operations"]
    assert [(row["operation"], row["calls"]) for row in rows] == expected
    assert (found["batch"], found["context"], found["scheme"], found["kv_cache"]) == (3, 40, scheme, kv_cache)
    assert sum(row["calls"] * row["us_per_call"] for row in rows) == pytest.approx(1e3 * found["step_ms"])
    assert sum(row["step_fraction"] for row in rows) == pytest.approx(1.0)
    assert found["outside_ms"] > 0.0


@pytest.mark.parametrize(
    ("scheme", "layer_bytes_a_weight", "head_bytes_a_weight"),
    [("w8a8-int8", 1, 2), ("none", 4, 4)],
)
def test_rates_are_those_of_the_model_s_sizes(scheme: str, layer_bytes_a_weight: int, head_bytes_a_weight: int) -> None:
    found = bench.kernels("tiny", scheme, batch=3, context=40)
    rows = {row["operation"]: row for row in found["operations"]}
    gemms = {name: (row["n"], row["k"]) for name, row in rows.items() if name.endswith("GEMM")}
    assert gemms == {
        "qkv GEMM": (256, 128),
        "output GEMM": (128, 128),
        "gate_up GEMM": (512, 128),
        "down GEMM": (128, 256),
        "head GEMM": (259, 128),
    }
    peak = found["fp32_peak_gops" if scheme == "none" else "int8_peak_gops"]
    for name, (n, k) in gemms.items():
        row = rows[name]
        assert row["gops"] * row["us_per_call"] == pytest.approx(2 * 3 * n * k / 1e3)
        assert row["roofline_fraction"] == pytest.approx(row["gops"] / peak)
        assert min(row["torch_int8_gops"], row["torch_fp32_gops"]) > 0.0
        # Rows with a scale each, the weight with a scale a column, and the fp32 result; some add a residual.
        each = head_bytes_a_weight if name == "head GEMM" else layer_bytes_a_weight
        scales = 0 if scheme == "none" else 4 * (3 + n)
        results = 2 if name in ("output GEMM", "down GEMM") else 1
        expected = each * (3 * k + n * k) + scales + results * 4 * 3 * n
        assert row["gbytes_per_s"] * row["us_per_call"] == pytest.approx(expected / 1e3)
    # 3 queries of 4 heads of 32, the same out with a log-sum-exp a head, and 3 x 40 keys and values of 2 heads.
    attention = 4 * (2 * 3 * 128 + 3 * 4 + 3 * 40 * 2 * 2 * 32)
    assert rows["attention"]["gbytes_per_s"] * rows["attention"]["us_per_call"] == pytest.approx(attention / 1e3)
    sample = 4 * 3 * 259 + 4 * 3 + 3 * (8 + 4)
    assert rows["sample"]["gbytes_per_s"] * rows["sample"]["us_per_call"] == pytest.approx(sample / 1e3)
    assert rows["sample"]["gops"] is None and rows["attention"]["roofline_fraction"] is None
    copied = rows["sample"]["gbytes_per_s"] / found["copy_gbytes_per_s"]
    assert rows["sample"]["copy_fraction"] == pytest.approx(copied)


def test_a_scheme_that_torch_computes_has_no_calls_to_time() -> None:
    with pytest.raises(ConfigurationError, match="--scheme fp8 is not computed by the C kernels alone"):
        bench.kernels("tiny", "fp8", batch=3, context=40)


def test_the_best_step_of_each_kind_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.timing, "best_seconds", lambda work: (work(), work()))
    gated, quantize = bench.Call("gated", 1), bench.Call("quantize_rows", 1)
    steps = iter([([1, 2, 4], 9), ([3, 1, 1], 8)])
    sample = bench.best_sample(lambda: next(steps), [gated, quantize, gated])
    # Gated took 1 + 4, then 3 + 1 nanoseconds, quantize 2, then 1, and the rest of the step 2, then 3.
    assert sample.seconds == pytest.approx({gated: 4e-9, quantize: 1e-9})
    assert (sample.total, sample.outside) == pytest.approx((8e-9, 2e-9))


def test_timed_and_described_steps_are_the_engine_s() -> None:
    step = bench.DecodeStep(engine_of("w8a8-int8"), batch=3, context=40)
    plain = step.run()
    calls = step.calls()
    assert len(calls) == sum(count for _, count in INTEGER_STEP)
    of_calls, whole = step.nanoseconds()
    assert len(of_calls) == len(calls) and min(of_calls) > 0 and sum(of_calls) < whole
    assert torch.equal(step.run(), plain)


def test_weights_of_four_bits_count_half_a_byte() -> None:
    rows = {row["operation"]: row for row in bench.kernels("tiny", "w4a8-int8", batch=1, context=40)["operations"]}
    read = 128 + 4 + 512 * 128 // 2 + 4 * 512 + 4 * 512  # a row with its scale, nibbles, scales of columns, the result
    row = rows["gate_up GEMM"]
    assert row["gbytes_per_s"] * row["us_per_call"] == pytest.approx(read / 1e3)


def test_every_sequence_sees_keys_of_its_own_and_fills_its_last_row() -> None:
    engine = engine_of("none", kv_cache="int8")
    cache, slots, spans = bench.full_cache(engine, 3, 40, torch.Generator().manual_seed(0))
    assert spans.visible.tolist() == [40, 40, 40]
    # 40 tokens take two pages of 32 rows: sequences begin 64 rows apart, and their last token is the 39th after.
    assert sorted((spans.starts + 39).tolist()) == sorted(slots.tolist()) == [39, 103, 167]
    stores = [store for store in (*cache.keys, *cache.values) if isinstance(store, KVCodes)]
    assert len({tuple(store.codes[0, 0].tolist()) for store in stores}) == 4


def test_what_the_model_or_the_budget_cannot_hold_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--context 2049 exceeds the model's context of 2048"):
        bench.kernels("tiny", "none", batch=3, context=2049)
    engine = engine_of("none")
    with pytest.raises(ConfigurationError, match="--batch 9000 at --context 2048 needs 18874368000 bytes"):
        bench.full_cache(engine, 9000, 2048, torch.Generator())
