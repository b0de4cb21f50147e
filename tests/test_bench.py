"""`qarl bench`: what the figures mean, on sizes worked out by hand; how high they are is the machine's business."""

import json

import pytest
import torch

from qarl import bench
from qarl.cli import run_command
from qarl.errors import ConfigurationError
from qarl.models.names import TINY_CONFIG

TINY_TOKENS = 259


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test needs no steady figures."""
    monkeypatch.setattr(bench, "REPEATS", 2)
    monkeypatch.setattr(bench, "BEST_OF_SECONDS", 0.01)
    monkeypatch.setattr(bench, "PEAK_SIZES", ((64, 256, 256), (32, 128, 128)))


def test_gemms_of_the_tiny_model_by_hand() -> None:
    # Hidden 128, 4 query and 2 key/value heads of 32, feed-forward 256.
    assert bench.gemm_shapes(TINY_CONFIG, TINY_TOKENS) == [
        ("qkv", 256, 128),
        ("output", 128, 128),
        ("gate_up", 512, 128),
        ("down", 128, 256),
        ("head", 259, 128),
    ]


def test_a_multiply_add_is_two_operations() -> None:
    one_layer = 256 * 128 + 128 * 128 + 512 * 128 + 128 * 256
    assert bench.gemm_operations(TINY_CONFIG, TINY_TOKENS) == (2 * 2 * one_layer, 2 * 259 * 128)


@pytest.mark.parametrize("scheme", ["w8a8-int8", "none"])
def test_rollout_figures_fit_together(scheme: str) -> None:
    found = bench.rollout("tiny", scheme, batch=3, prompt_len=5, new_tokens=4)
    keys = "tokens_per_s roofline_fraction batch prompt_len new_tokens scheme model threads median_of"
    assert set(keys.split()) <= set(found)
    assert (found["batch"], found["prompt_len"], found["new_tokens"], found["median_of"]) == (3, 5, 4, 2)
    assert (found["scheme"], found["model"], found["threads"]) == (scheme, "tiny", 1)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(3 * 4)
    # 5 prompt tokens and 3 of the 4 new ones go through the layers; the head is asked 4 times.
    operations = 3 * (8 * 589_824 + 4 * 66_304)
    assert found["roofline_fraction"] == pytest.approx(operations / found["seconds"] / (found["roofline_gops"] * 1e9))
    assert found["roofline_gops"] > 0.0


def test_learner_figures_fit_together() -> None:
    found = bench.learner("tiny", "w8a8-int8", batch=16, prompt_len=5, new_tokens=4)
    assert (found["batch"], found["trained_tokens"]) == (16, 16 * 4)
    # Two prompts, each computed once for its group of 8; the last token of a completion is only a target.
    assert found["packed_tokens"] == 2 * 5 + 16 * 3
    assert found["trained_tokens_per_s"] * found["update_s"] == pytest.approx(16 * 4)
    assert found["peak_memory_bytes"] > 1 << 20


def test_a_step_is_as_long_as_its_parts() -> None:
    found = bench.step("tiny", "w8a8-int8", 8, group_size=4, prompt_len=None, new_tokens=4, alignment="auto")
    parts = [found[f"{name}_s"] for name in ("rollout", "reward", "learner", "publish")]
    assert all(0.0 < part < found["step_s"] for part in parts)
    assert 0 < found["tokens"] <= 8 * 4
    assert (found["batch"], found["group_size"], found["median_of"]) == (8, 4, 2)


def test_a_step_of_random_prompts_never_stops_early() -> None:
    found = bench.step("tiny", "none", 8, group_size=4, prompt_len=9, new_tokens=6, alignment="none")
    assert found["tokens"] == 8 * 6
    assert found["reward_s"] < found["rollout_s"]


def test_a_batch_that_is_no_whole_number_of_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--batch 3 is not a multiple of --group-size 2"):
        bench.step("tiny", "none", 3, group_size=2, prompt_len=None, new_tokens=4, alignment="auto")


def test_kernels_are_timed_at_the_model_s_sizes() -> None:
    found = bench.kernels("tiny", "w8a8-int8", batch=3)
    assert [(row["gemm"], row["m"], row["n"], row["k"]) for row in found["gemms"]] == [
        ("qkv", 3, 256, 128),
        ("output", 3, 128, 128),
        ("gate_up", 3, 512, 128),
        ("down", 3, 128, 256),
        ("head", 3, 259, 128),
    ]
    for row in found["gemms"]:
        assert all(row[rate] > 0.0 for rate in ("int8_gops", "fixed_order_fp32_gops", "torch_fp32_gops"))
    assert min(found["int8_peak_gops"], found["fp32_peak_gops"], found["copy_gbytes_per_s"]) > 0.0


def test_the_best_of_some_calls_is_taken_and_the_first_only_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    # Readings: the deadline's, then start and end of the timed calls, of 3, 1 and 2 seconds.
    clock = iter([0.0, 0.0, 0.0, 3.0, 3.0, 3.0, 4.0, 4.0, 4.0, 6.0, 9.0])
    monkeypatch.setattr(bench, "BEST_OF_SECONDS", 5.0)
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    calls: list[int] = []
    assert bench._best_seconds(lambda: calls.append(1)) == 1.0
    assert len(calls) == 4


def test_the_peak_is_the_best_of_its_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 0.5])
    monkeypatch.setattr(bench, "_best_seconds", lambda work: next(seconds))
    assert bench.measured_peak("w8a8-int8") == max(2 * 64 * 256 * 256 / 2.0, 2 * 32 * 128 * 128 / 0.5)


def test_the_command_answers_in_json_and_tells_progress_apart(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--batch", "2", "--prompt-len", "4", "--new-tokens", "3"]
    assert run_command(["bench", "rollout", "--model", "tiny", *sizes, "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["new_tokens"] == 3
    assert "rollout 0:" in said.err and "(warm-up)" in said.err


def test_prompts_are_the_same_random_tokens_every_time() -> None:
    first, again = (bench._random_prompts(50, 3, 7) for _ in range(2))
    assert [prompt.token_ids for prompt in first] == [prompt.token_ids for prompt in again]
    assert len({prompt.token_ids for prompt in first}) == 3
    assert torch.tensor([prompt.token_ids for prompt in first]).shape == (3, 7)
    assert max(max(prompt.token_ids) for prompt in first) < 50
