"""`qarl bench rollout`, `learner` and `step`: the figures fit together; how high they are is the machine's business."""

import pytest

from qarl.bench import runs
from qarl.errors import ConfigurationError
from qarl.rollout.cache import KVFormat

DOWN = 2 * 128 * 256
LAYERS, HEAD = 2 * (256 * 128 + 128 * 128 + 512 * 128) + DOWN, 259 * 128
"""Weights of the tiny model: all layers' down projections, all of the layers, the head."""


@pytest.mark.parametrize(("scheme", "kv_cache"), [("w8a8-int8", "fp32"), ("none", "int8"), ("w4a16", "fp32")])
def test_rollout_figures_fit_together(scheme: str, kv_cache: KVFormat) -> None:
    found = runs.rollout("tiny", scheme, batch=3, prompt_len=5, new_tokens=4, kv_cache=kv_cache)
    assert (found["batch"], found["prompt_len"], found["new_tokens"], found["median_of"]) == (3, 5, 4, 2)
    assert (found["scheme"], found["kv_cache"], found["model"], found["threads"]) == (scheme, kv_cache, "tiny", 1)
    assert found["tokens_per_s"] * found["seconds"] == pytest.approx(3 * 4)
    # The first of four tokens belongs to the prefill; three decode steps follow.
    assert found["prefill_s"] + 3 * found["decode_step_ms"] / 1e3 == pytest.approx(found["seconds"])
    # 5 prompt tokens and 3 of the 4 new ones go through the layers; the head is asked 4 times.
    operations = 3 * 2 * (8 * LAYERS + 4 * HEAD)
    assert found["roofline_fraction"] == pytest.approx(operations / found["seconds"] / (found["roofline_gops"] * 1e9))
    assert found["roofline_gops"] > 0.0


def test_a_rollout_of_one_token_has_no_decode_step() -> None:
    assert runs.rollout("tiny", "none", batch=2, prompt_len=5, new_tokens=1)["decode_step_ms"] is None


def test_learner_figures_fit_together() -> None:
    found = runs.learner("tiny", "w8a8-int8", batch=16, prompt_len=5, new_tokens=4)
    assert (found["batch"], found["trained_tokens"]) == (16, 16 * 4)
    # Two prompts, each computed once for its group of 8; the last token of a completion is only a target.
    assert found["packed_tokens"] == 2 * 5 + 16 * 3
    assert found["trained_tokens_per_s"] * found["update_s"] == pytest.approx(16 * 4)
    assert found["packed_tokens_per_s"] * found["update_s"] == pytest.approx(58)
    operations = 8 * 58 * LAYERS - 2 * 58 * DOWN + 8 * 64 * HEAD  # a layer's last product is not recomputed
    assert found["roofline_fraction"] == pytest.approx(operations / found["update_s"] / (found["roofline_gops"] * 1e9))
    assert found["peak_memory_bytes"] > 1 << 20


def test_a_prompt_that_is_packed_again_counts_again() -> None:
    # 1024 tokens a micro-batch hold the prompt of 300 and 7 x 100 tokens of its completions; the eighth goes apart.
    found = runs.learner("tiny", "w8a8-int8", batch=8, prompt_len=300, new_tokens=101)
    assert found["packed_tokens"] == 2 * 300 + 8 * 100


def test_a_step_is_as_long_as_its_parts() -> None:
    found = runs.step("tiny", "w8a8-int8", 8, group_size=4, prompt_len=None, new_tokens=4, alignment="auto")
    parts = [found[f"{name}_s"] for name in ("rollout", "reward", "learner", "publish")]
    assert all(0.0 < part < found["step_s"] for part in parts)
    assert 0 < found["tokens"] <= 8 * 4
    assert (found["batch"], found["group_size"], found["median_of"]) == (8, 4, 2)


def test_a_step_of_random_prompts_never_stops_early() -> None:
    sizes = {"group_size": 4, "prompt_len": 9, "new_tokens": 6}
    found = runs.step("tiny", "none", 8, **sizes, alignment="none", kv_cache="int8")
    assert (found["tokens"], found["kv_cache"]) == (8 * 6, "int8")
    assert found["reward_s"] < found["rollout_s"]


def test_a_batch_that_is_no_whole_number_of_groups_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--batch 3 is not a multiple of --group-size 2"):
        runs.step("tiny", "none", 3, group_size=2, prompt_len=None, new_tokens=4, alignment="auto")
