"""vLLM in processes of this one: seeds, limits, what log-probabilities mean, stopping, and its death."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import ConfigurationError, RunError
from qarl.records import Completion, Group, Sampling
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.vllm.engine import VllmEngine
from tests.conftest import SMALL
from tests.rollout.vllm.conftest import Started, start

pytestmark = pytest.mark.vllm

SEED = (3, 8)


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def tokens(groups: list[Group]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions(groups)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_of_the_distribution_that_was_sampled_from(in_full_precision: Started, temperature: float) -> None:
    """After the temperature, over tokens that may be sampled; vLLM's default is before it."""
    sampling = Sampling(temperature, max_new_tokens=12)
    decoder = in_full_precision.learner(seed=0).decoder
    for group in in_full_precision.engine.generate(SMALL.prompts(5, 40, 9), 4, sampling, SEED):
        for completion in group.completions:
            predicted = SMALL.predicted(decoder, group.prompt, completion).double()
            expected = (predicted / temperature).log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            torch.testing.assert_close(completion.engine_logprobs.double(), expected, rtol=0, atol=2e-5)


def test_tokens_are_drawn_with_their_probabilities(in_full_precision: Started) -> None:
    """2000 first tokens against the softmax at this temperature: no top-p, no top-k, no default of a model's folder."""
    sampling = Sampling(1.3, max_new_tokens=1)
    prompt = SMALL.prompts(12)[0]
    decoder = in_full_precision.learner(seed=0).decoder
    drawn = torch.tensor(tokens(in_full_precision.engine.generate([prompt], 2000, sampling, SEED)))[:, 0]
    expected = (decoder.full_logits(torch.tensor(prompt.token_ids))[-1] / 1.3).softmax(-1)
    counts = torch.bincount(drawn, minlength=SMALL.sampleable).float()
    spread = (2000 * expected * (1 - expected)).sqrt()
    assert bool(((counts - 2000 * expected).abs() <= 5 * spread + 3).all())


def test_the_seed_decides_and_the_order_does_not(in_full_precision: Started) -> None:
    engine, prompts = in_full_precision.engine, SMALL.prompts(5, 40, 9)
    first = engine.generate(prompts, 4, SMALL.sampling, SEED)
    assert tokens(engine.generate(prompts, 4, SMALL.sampling, SEED)) == tokens(first)
    assert tokens(engine.generate(prompts[::-1], 4, SMALL.sampling, SEED)[::-1]) == tokens(first)
    for other in ((4, 8), (3, 9)):
        assert tokens(engine.generate(prompts, 4, SMALL.sampling, other)) != tokens(first)
    assert len({tuple(ids) for ids in tokens(first[:1])}) == 4


def test_greedy_is_the_likeliest_token_each_time(in_full_precision: Started) -> None:
    decoder = in_full_precision.learner(seed=0).decoder
    for group in in_full_precision.engine.generate(SMALL.prompts(5, 40), 2, Sampling(0.0, 10), SEED):
        for completion in group.completions:
            predicted = SMALL.predicted(decoder, group.prompt, completion)
            assert torch.equal(predicted.argmax(-1), completion.token_ids)


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(in_full_precision: Started) -> None:
    sampling = Sampling(0.8, max_new_tokens=6, stop_token_ids=tuple(range(10)))
    found = completions(in_full_precision.engine.generate(SMALL.prompts(5, 40, 9), 12, sampling, SEED))
    assert {completion.finish_reason for completion in found} == {"stop", "length"}
    for completion in found:
        stops = [token < 10 for token in completion.token_ids.tolist()]
        assert not any(stops[:-1])
        assert stops[-1] == (completion.finish_reason == "stop")
        assert len(completion) == 6 or completion.finish_reason == "stop"


def test_what_is_stopped_keeps_its_tokens_and_is_resumed(in_full_precision: Started) -> None:
    engine, prompts = in_full_precision.engine, SMALL.prompts(5, 40, 9)
    sampling = Sampling(0.8, max_new_tokens=60)
    asked = []

    def stop(finished: int, total: int) -> bool:
        asked.append((finished, total))
        return len(asked) > 8

    aborted = engine.generate(prompts, 3, sampling, SEED, stop)
    assert {c.finish_reason for c in completions(aborted)} == {"aborted"}
    assert all(0 < len(c) < 60 for c in completions(aborted)) and asked[0] == (0, 9)
    resumed = engine.resume(aborted, sampling, SEED)
    whole = engine.generate(prompts, 3, sampling, SEED)
    decoder = in_full_precision.learner(seed=0).decoder
    for part, rest, once in zip(completions(aborted), completions(resumed), completions(whole), strict=True):
        assert rest.token_ids.tolist()[: len(part)] == part.token_ids.tolist() == once.token_ids.tolist()[: len(part)]
        assert (rest.finish_reason, len(rest)) == ("length", 60)
    for group in resumed:
        for completion in group.completions:
            predicted = SMALL.predicted(decoder, group.prompt, completion).double() / 0.8
            expected = predicted.log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            torch.testing.assert_close(completion.engine_logprobs.double(), expected, rtol=0, atol=2e-5)


def test_vllm_that_cannot_start_says_so() -> None:
    settings = VllmEngineConfig(kv_bytes=1 << 20, options={"block_size": 7})
    engine = VllmEngine(settings, None, SMALL.config, SMALL.sampleable, 128, str)
    with pytest.raises(ConfigurationError, match="vLLM does not start with this recipe"):
        engine.load(SMALL.learner(rules={}).publish())


def test_the_first_cause_of_a_failure_in_another_process_is_told() -> None:
    engine = start("none", "float32", options={"num_gpu_blocks_override": 1}).engine
    with pytest.raises(ConfigurationError, match="does not start with this recipe: ValueError: No available memory"):
        engine.load(SMALL.learner(rules={}).publish())


def test_a_start_that_takes_too_long_is_ended() -> None:
    found = start("none", "float32", start_timeout_s=0.1)
    started = time.monotonic()
    with pytest.raises(RunError, match=r"vLLM did not start within 0\.1 s \(engine\.start_timeout_s\); it was ended"):
        found.engine.load(found.version(0))
    assert time.monotonic() - started < 60
    assert not [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


def test_what_vllm_reads_from_the_environment_is_not_there_for_others(in_full_precision: Started) -> None:
    environment = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout.splitlines()
    ours = ("PYTHONWARNINGS=", "QARL_RUN=", "VLLM_WORKER_MULTIPROC_METHOD=", "VLLM_CPU_INT4_W4A8=")
    assert not [line for line in environment if line.startswith(ours)]


@pytest.fixture
def mortal() -> Started:
    found = start("none", "float32", timeout_s=20.0)
    found.engine.load(found.version(0))
    return found


def after_a_while(action: signal.Signals) -> None:
    def act() -> None:
        time.sleep(1.0)
        for process in multiprocessing.active_children():
            if process.name.startswith("EngineCore") and process.pid is not None:
                os.kill(process.pid, action)

    threading.Thread(target=act, daemon=True).start()


@pytest.mark.parametrize("action", [signal.SIGKILL, signal.SIGSTOP], ids=lambda action: action.name)
def test_its_death_or_silence_ends_a_rollout_in_bounded_time(mortal: Started, action: signal.Signals) -> None:
    after_a_while(action)
    started = time.monotonic()
    with pytest.raises(RunError, match="sign of life" if action == signal.SIGSTOP else "vLLM failed"):
        for step in range(1000):
            mortal.engine.generate(SMALL.prompts(5, 40, 9) * 4, 8, Sampling(1.0, 64), (0, step))
    assert time.monotonic() - started < 60


def test_vllm_ends_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Its processes would live on, and keep their memory."""
    program = tmp_path / "run.py"
    program.write_text(
        "import multiprocessing, os, signal\n"
        "from tests.rollout.vllm.conftest import start\n"
        "if __name__ == '__main__':\n"
        "    found = start('none', 'float32')\n"
        "    found.engine.load(found.version(0))\n"
        "    print([process.pid for process in multiprocessing.active_children()], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with (tmp_path / "out").open("w") as out:
        root = Path(__file__).parents[3]
        subprocess.run(
            [sys.executable, str(program)], stdout=out, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
        )
    engines = json.loads((tmp_path / "out").read_text().strip().splitlines()[-1])
    assert engines
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in engines) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not [process for process in engines if Path(f"/proc/{process}").exists()]
