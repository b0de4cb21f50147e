"""`qarl align`: exact where it is, and where it is not, by how much and in which layer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.align import align, broken_promise
from qarl.cli import run_command
from qarl.learner.learner import LocalLearner
from qarl.models import names
from qarl.models.names import TINY_CONFIG
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import kernels, using
from qarl.ops.reference import ReferenceKernels, Spans
from qarl.quant import SCHEMES

KEYS = (
    "level",
    "tokens",
    "max_abs_logprob_diff",
    "mean_abs_logprob_diff",
    "k3_kl",
    "bit_equal_fraction",
    "argmax_flips",
    "per_layer",
)
"""What other programs read from `qarl align --json`."""

FP32 = {"type": "native", "kv_cache": "fp32"}

needs_c_kernels = pytest.mark.skipif(not kernels().exact_matmul, reason="`exact` needs the C kernels")


class Nudged(CpuKernels):
    """The engine's attention is one step of the last bit too high, in one layer."""

    def __init__(self, layer: int) -> None:
        loaded = library.load()
        assert loaded is not None
        super().__init__(loaded)
        self.layer = layer
        self.calls = 0

    def attention(
        self, q_THC: Tensor, keys_RGC: Any, values_RGC: Any, spans: Spans, scale: float
    ) -> tuple[Tensor, Tensor]:
        out, lse = super().attention(q_THC, keys_RGC, values_RGC, spans, scale)
        is_cached = len(keys_RGC) != len(q_THC)  # the learner's keys are those of its own tokens
        if not is_cached:
            return out, lse
        layer = self.calls % TINY_CONFIG.num_layers
        self.calls += 1
        return (torch.nextafter(out, torch.tensor(torch.inf)) if layer == self.layer else out), lse


@needs_c_kernels
def test_layers_are_compared_as_they_were_not_as_later_ones_left_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's memory is used again two layers later."""
    monkeypatch.setattr(names, "TINY_CONFIG", replace(TINY_CONFIG, num_layers=5))
    found = align("tiny", "w8a8-int8", 1, FP32, "auto")
    assert [row["bit_equal_fraction"] for row in found["per_layer"]] == [1.0] * 5


def test_equal_logprobs_of_other_hidden_states_are_no_good_answer() -> None:
    layers = [{"layer": i, "max_abs_diff": i / 2, "bit_equal_fraction": 1.0 - i / 4} for i in range(2)]
    found = {"level": "exact", "tokens": 8, "bit_equal_fraction": 1.0, "per_layer": layers}
    reason = broken_promise(found)
    if kernels().exact_matmul:
        assert reason is not None and "of 8 tokens are equal, but not the hidden" in reason
        assert "layer 1 is the first to differ" in reason


@needs_c_kernels
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_exact(scheme: str) -> None:
    found = align("tiny", scheme, 1, FP32, "auto")
    assert tuple(found) == KEYS
    assert found["level"] == "exact"
    assert (found["max_abs_logprob_diff"], found["mean_abs_logprob_diff"], found["k3_kl"]) == (0.0, 0.0, 0.0)
    assert (found["bit_equal_fraction"], found["argmax_flips"]) == (1.0, 0)
    equal = {"max_abs_diff": 0.0, "bit_equal_fraction": 1.0, "relative_error": 0.0}
    assert found["per_layer"] == [{"layer": 0, **equal}, {"layer": 1, **equal}]
    assert broken_promise(found) is None


@needs_c_kernels
def test_a_run_with_adapters_is_compared_with_them_under_any_scheme(tmp_path: Path, monkeypatch) -> None:
    smoke = Path(__file__).resolve().parents[1] / "recipes" / "smoke.toml"
    options = ("--steps=2", "--learner.lora.rank=4", "--learner.optimizer.type=muon", "--eval.count=1")
    assert run_command(["train", str(smoke), "--run-dir", str(tmp_path / "run"), *options]) == 0
    restored = []
    restore = LocalLearner.restore
    monkeypatch.setattr(LocalLearner, "restore", lambda learner, folder: restored.append(restore(learner, folder)))
    for scheme in ("w8a8-int8", "w4a16"):
        found = align(str(tmp_path / "run"), scheme, 1, FP32, "auto")
        assert (found["level"], found["bit_equal_fraction"]) == ("exact", 1.0)
        assert [row["bit_equal_fraction"] for row in found["per_layer"]] == [1.0, 1.0]
    assert len(restored) == 2


def test_tokens_are_at_least_as_many_as_asked_for() -> None:
    told: list[tuple[int, int]] = []
    found = align("tiny", "w8a8-int8", 600, FP32, "auto", lambda done, total: told.append((done, total)))
    # Four prompts of four completions of 32 tokens, then one prompt of four completions of 128.
    assert found["tokens"] == 4 * 4 * 32 + 4 * 128
    assert told == [(128, 600), (256, 600), (384, 600), (512, 600), (600, 600)]
    assert align("tiny", "w8a8-int8", 100, FP32, "auto")["tokens"] == 4 * 32


def test_an_unaligned_learner_is_apart_from_the_first_layer_on() -> None:
    found = align("tiny", "w8a8-int8", 100, FP32, "none")
    assert found["level"] == "none"
    assert found["bit_equal_fraction"] < 0.1
    assert 0.0 < found["mean_abs_logprob_diff"] <= found["max_abs_logprob_diff"] < 1.0
    assert found["k3_kl"] > 0.0
    assert all(layer["bit_equal_fraction"] < 0.1 and layer["max_abs_diff"] > 0.0 for layer in found["per_layer"])
    assert broken_promise(found) is None


def test_a_full_precision_engine_needs_no_alignment() -> None:
    found = align("tiny", "none", 100, FP32, "none")
    assert found["level"] == "none"
    assert found["max_abs_logprob_diff"] == 0.0 or not kernels().exact_matmul


@needs_c_kernels
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
def test_a_last_bit_that_differs_is_seen_and_found_in_its_layer(scheme: str) -> None:
    with using(Nudged(layer=1)):
        found = align("tiny", scheme, 100, FP32, "auto")
        reason = broken_promise(found)
    assert found["level"] == "codes"
    assert found["bit_equal_fraction"] < 1.0
    assert 0.0 < found["max_abs_logprob_diff"] < 1e-2
    first, second = found["per_layer"]
    assert (first["max_abs_diff"], first["bit_equal_fraction"]) == (0.0, 1.0)
    assert second["max_abs_diff"] > 0.0 and second["bit_equal_fraction"] < 1.0
    assert reason is not None and "layer 1 is the first to differ" in reason


@needs_c_kernels
def test_the_first_layer_that_differs_is_named_though_later_ones_follow() -> None:
    with using(Nudged(layer=0)):
        reason = broken_promise(align("tiny", "none", 100, FP32, "auto"))
    assert reason is not None and "layer 0 is the first to differ" in reason


@needs_c_kernels
def test_the_command_answers_and_then_fails_when_less_than_exact_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with using(Nudged(layer=1)):
        code = run_command(["align", "tiny", "--scheme", "w8a8-int8", "--tokens", "100", "--json"])
    said = capsys.readouterr()
    assert code == 1
    assert json.loads(said.out.splitlines()[-1])["level"] == "codes"
    assert "alignment is codes where exact is promised" in said.err.splitlines()[-1]


@needs_c_kernels
def test_the_command_answers_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["align", "tiny", "--scheme", "w4a16", "--tokens", "100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["level"] == "exact"


def test_without_the_c_kernels_less_than_exact_is_no_failure() -> None:
    found: dict[str, Any] = {"level": "codes", "tokens": 8, "bit_equal_fraction": 0.5, "per_layer": []}
    found["max_abs_logprob_diff"] = 1e-6
    with using(ReferenceKernels()):
        assert broken_promise(found) is None
    if kernels().exact_matmul:
        assert "50.00% of 8 tokens" in (broken_promise(found) or "")
