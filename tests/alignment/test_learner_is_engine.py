"""The learner's log-probabilities are the engine's, bit for bit: the promise that everything else rests on."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from qarl.learner.batch import micro_batches, pack, shares_of
from qarl.learner.learner import LocalLearner
from qarl.metrics import values
from qarl.ops.kernels import kernels
from qarl.quant import SCHEMES
from qarl.records import Group
from qarl.sync.checksum import checksum

pytestmark = pytest.mark.skipif(
    not kernels().exact_matmul, reason="without the C kernels floating-point GEMMs depend on the batch"
)

LENGTHS = (3, 70, 7, 33)
"""Prompts of less and more than a page of the engine's cache, and just past one."""

FAMILIES = {
    "llama": {"mlp_bias": True, "tie_embeddings": False},
    "mistral": {"num_kv_heads": 1},
    "qwen2": {"attention_bias": True, "num_kv_heads": 4},
    "qwen3": {"qk_norm": True, "head_dim": 16},
}


def assert_aligned(learner: LocalLearner, groups: list[Group]) -> None:
    """However the completions are packed, scores are the very floats the engine reported."""
    shares = shares_of(groups, [torch.ones(len(group.completions)) for group in groups])
    for micros in ([pack(shares)], micro_batches(shares, 1), micro_batches(shares, 90)):
        for micro in micros:
            scored = learner.logprobs(micro)[0].detach()
            assert torch.equal(scored, micro.engine_BL[micro.mask_BL])
            with torch.no_grad():
                assert torch.equal(learner.logprobs(micro)[0], scored)


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_is_exact_through_several_updates(small, scheme: str, kv):
    small = dataclasses.replace(small, kv=kv)
    learner = small.learner(scheme)
    engine = small.engine(prefill_tokens=24, max_concurrency=5)
    checksums = set()
    for step in range(3):
        engine.load(learner.publish())
        checksums.add(learner.publish().checksum)
        groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0, step))
        assert_aligned(learner, groups)
        found = values(learner.update(groups, small.advantages(groups)))
        assert found["mismatch/bit_equal"] == 1.0
        assert found["mismatch/max_abs"] == 0.0
    assert len(checksums) == 3


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_exact(small, family, scheme: str):
    config = dataclasses.replace(small.config, family=family, **FAMILIES[family])
    small = dataclasses.replace(small, config=config)
    learner = small.learner(scheme)
    for _ in range(2):
        groups = small.rollout(learner, *LENGTHS)
        assert_aligned(learner, groups)
        learner.update(groups, small.advantages(groups))


@pytest.mark.parametrize("temperature", [0.3, 0.6, 1.0, 1.7])
def test_every_temperature_is_exact(small, temperature: float):
    small = dataclasses.replace(small, sampling=dataclasses.replace(small.sampling, temperature=temperature))
    learner = small.learner("w4a8-int8")
    assert_aligned(learner, small.rollout(learner, *LENGTHS))


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16", "fp8"])
@pytest.mark.parametrize(("head", "tied"), [("w8a8-int8", True), ("w8a8-int8", False), ("w16a16-int16", True)])
def test_a_quantized_head_is_exact_and_still_learns(small, scheme: str, head: str, tied: bool):
    small = dataclasses.replace(small, config=dataclasses.replace(small.config, tie_embeddings=tied))
    learner = small.learner(scheme, rules={"lm_head": head})
    before = learner.decoder.head_weight().detach().clone()
    assert learner.publish().schemes["lm_head"] == head
    for _ in range(2):
        groups = small.rollout(learner, *LENGTHS)
        assert_aligned(learner, groups)
        learner.update(groups, small.advantages(groups))
    moved = learner.decoder.head_weight().detach() != before
    assert moved[: small.sampleable].any(-1).all()


def test_completions_of_several_pages_are_exact(small):
    small = dataclasses.replace(
        small, sampling=dataclasses.replace(small.sampling, max_new_tokens=90, stop_token_ids=())
    )
    learner = small.learner("w8a8-int8")
    groups = small.rollout(learner, 3, 35)
    assert all(len(completion) == 90 for group in groups for completion in group.completions)
    assert_aligned(learner, groups)


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)], ids=str)
def test_the_number_of_threads_on_either_side_does_not_matter(small, threads: tuple[int, int]):
    learner = small.learner("w8a8-int8")
    torch.set_num_threads(threads[0])
    groups = small.rollout(learner, 3, 35)
    torch.set_num_threads(threads[1])
    assert_aligned(learner, groups)


def test_one_wrong_code_on_the_engines_side_is_seen(small):
    """The measure itself works."""
    learner = small.learner("w8a8-int8")
    snapshot = learner.publish()
    name = "model.layers.0.mlp.up_proj.weight"
    codes = snapshot.tensors[name].clone()
    codes[3, 5] ^= 64
    tensors = {**snapshot.tensors, name: codes}
    engine = small.engine(dataclasses.replace(snapshot, tensors=tensors, checksum=checksum(tensors), operands=None))
    groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0,))
    found = values(learner.update(groups, small.advantages(groups)))
    assert found["mismatch/bit_equal"] < 0.5
    assert 0.0 < found["mismatch/max_abs"] < 1.0
