"""Adapters beside a base that stays: what vLLM serves of both after a load, and that a load which went wrong is noticed."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import RunError
from qarl.learner.learner import LocalLearner
from qarl.models.lora import LoraConfig
from qarl.records import Completion, Group, Sampling, Snapshot
from tests.conftest import SMALL
from tests.rollout.vllm.conftest import CASES, Started, start

pytestmark = pytest.mark.vllm

SAMPLING = Sampling(temperature=0.7, max_new_tokens=12)

CLOSE = {("none", "float32"): 2e-5, ("w4a16", "bfloat16"): 0.4}
"""Largest difference of a log-probability, by scheme and type; 0.6 where activations have 8 bits."""

LORA = LoraConfig(rank=4, alpha=6.0, targets=("*.q_proj", "*.v_proj", "*.up_proj", "*.down_proj"))
"""Places for 8 ranks are filled in half, and of fused projections some parts have no adapter."""


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def adapted(request: pytest.FixtureRequest) -> Iterator[Started]:
    found = start(*request.param, lora=LORA)
    yield found
    found.engine.close()


def version(learner: LocalLearner, number: int) -> Snapshot:
    """Other adapters in every version, of one base."""
    generator = torch.Generator().manual_seed(number)
    for tensor in learner.trained().values():
        tensor.detach().normal_(0.0, 0.1, generator=generator)
    return dataclasses.replace(learner.publish(), version=number)


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def largest_difference(learner: LocalLearner, groups: list[Group]) -> float:
    found = []
    for group in groups:
        for completion in group.completions:
            predicted = SMALL.predicted(learner.decoder, group.prompt, completion).double() / SAMPLING.temperature
            expected = predicted.log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            found.append((completion.engine_logprobs.double() - expected).abs().max())
    return float(torch.stack(found).max())


@torch.no_grad()
def test_three_versions_in_a_row_are_served_as_published_and_sent_alone(adapted: Started) -> None:
    learner, told = adapted.learner(), set()
    for number in (1, 2, 3):
        snapshot = version(learner, number)
        adapted.engine.load(snapshot)
        width = getattr(torch, adapted.dtype).itemsize
        sent = adapted.engine.metrics()["publish/bytes"].value()
        assert sent == sum(width * tensor.numel() for tensor in snapshot.tensors.values())
        groups = adapted.engine.generate(SMALL.prompts(40, 20, 9), 3, SAMPLING, (5, number))
        assert all(completion.versions.tolist() == [number] * len(completion) for completion in completions(groups))
        difference = largest_difference(learner, groups)
        print(adapted.scheme, adapted.dtype, number, difference, {k: m.value() for k, m in adapted.engine.metrics().items()})
        assert difference < CLOSE.get((adapted.scheme, adapted.dtype), 0.6)
        told.add(tuple(completions(groups)[0].token_ids.tolist()))
    assert len(told) == 3
