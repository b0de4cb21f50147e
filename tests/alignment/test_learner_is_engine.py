"""The learner's log-probabilities are the engine's, bit for bit: the promise that everything else rests on."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from qarl.errors import RunError
from qarl.learner.batch import micro_batches, pack, shares_of
from qarl.learner.learner import LocalLearner
from qarl.metrics import values
from qarl.models.lora import LoraConfig
from qarl.ops.kernels import kernels
from qarl.quant import SCHEMES
from qarl.records import Group, Sampling
from qarl.roles import Stop
from qarl.rollout.cache import PAGE
from qarl.rollout.native import NativeEngine
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


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("targets", [("*",), ("*.v_proj", "*.0.mlp.up_proj", "*.down_proj")], ids=" ".join)
def test_adapters_on_every_scheme_are_exact_through_several_updates(small, scheme: str, kv, targets):
    small = dataclasses.replace(small, kv=kv)
    learner = small.learner(scheme, lora=LoraConfig(rank=5, alpha=7.0, targets=targets), lr=0.03)
    engine = small.engine(prefill_tokens=24, max_concurrency=5)
    checksums = set()
    for step in range(3):
        engine.load(learner.publish())
        checksums.add(learner.publish().checksum)
        groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0, step))
        assert_aligned(learner, groups)
        found = values(learner.update(groups, small.advantages(groups)))
        assert (found["mismatch/bit_equal"], found["mismatch/max_abs"]) == (1.0, 0.0)
    assert len(checksums) == 3


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_every_family_are_exact(small, family, scheme: str):
    small = dataclasses.replace(small, config=dataclasses.replace(small.config, family=family, **FAMILIES[family]))
    learner = small.learner(scheme, lora=LoraConfig(rank=3))
    for _ in range(3):
        groups = small.rollout(learner, *LENGTHS)
        assert_aligned(learner, groups)
        learner.update(groups, small.advantages(groups))


@pytest.mark.parametrize("kv", ["fp32", "int8"])
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16"])
@pytest.mark.parametrize("brings_operands", [True, False])
def test_a_learner_restored_from_a_checkpoint_is_exact_from_its_first_step_on(
    small, tmp_path, scheme: str, kv, brings_operands: bool
):
    small = dataclasses.replace(small, kv=kv)
    unbroken = small.learner(scheme, updates_per_batch=2)
    for _ in range(2):
        groups = small.rollout(unbroken, *LENGTHS)
        unbroken.update(groups, small.advantages(groups))
    unbroken.save(tmp_path)
    learner, engine = small.learner(scheme, seed=1, updates_per_batch=2), small.engine()
    learner.restore(tmp_path)
    for step in (2, 3):
        snapshot = learner.publish()
        engine.load(snapshot if brings_operands else dataclasses.replace(snapshot, operands=None))
        groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0, step))
        assert_aligned(learner, groups)
        found = values(learner.update(groups, small.advantages(groups)))
        assert (found["mismatch/bit_equal"], found["mismatch/max_abs"]) == (1.0, 0.0)


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
@pytest.mark.parametrize(("head", "tied"), [("w8a8-int8", True), ("w8a8-int8", False), ("w12a12-int12", True)])
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


def rollout(small, engine: NativeEngine, stop: Stop | None = None) -> list[Group]:
    """One completion a prompt, of more than a page."""
    return engine.generate(small.prompts(*LENGTHS), 1, small.sampling, (0,), stop)


def after(steps: int) -> Stop:
    """Stops a rollout after that many steps."""
    asked = itertools.count(1)
    return lambda finished, total: next(asked) >= steps


@pytest.fixture
def long(small):
    """Completions of two pages that no token stops."""
    return dataclasses.replace(small, sampling=Sampling(temperature=0.8, max_new_tokens=PAGE + 5))


aborted = pytest.mark.parametrize("cut", [1, PAGE - 1, PAGE, PAGE + 2])
in_three_ways = pytest.mark.parametrize(
    ("scheme", "kv"), [("none", "fp32"), ("w8a8-int8", "int8"), ("w4a16", "int8")], ids=str
)


@aborted
@in_three_ways
def test_a_completion_aborted_and_resumed_is_the_unbroken_one(long, scheme: str, kv, cut: int):
    long = dataclasses.replace(long, kv=kv)
    engine = long.engine(long.learner(scheme).publish(), prefill_tokens=24, max_concurrency=3)
    unbroken, groups = rollout(long, engine), rollout(long, engine, after(cut))
    assert [len(group.completions[0]) for group in groups] == [cut, cut, cut, 0]
    for found, expected in zip(engine.resume(groups, long.sampling, (0,)), unbroken, strict=True):
        assert torch.equal(found.completions[0].token_ids, expected.completions[0].token_ids)
        assert torch.equal(found.completions[0].engine_logprobs, expected.completions[0].engine_logprobs)


@aborted
@in_three_ways
def test_resumed_with_new_weights_each_token_has_the_logprob_of_its_versions_learner(long, scheme: str, kv, cut: int):
    long = dataclasses.replace(long, kv=kv)
    learner, engine = long.learner(scheme), long.engine(prefill_tokens=24)
    engine.load(learner.publish())
    groups = rollout(long, engine, after(cut))
    assert_aligned(learner, groups)
    learner.update(groups, long.advantages(groups))
    engine.load(learner.publish())
    for old, group in zip(groups, engine.resume(groups, long.sampling, (0,)), strict=True):
        whole = group.completions[0]
        assert whole.versions.tolist() == [0] * cut + [1] * (PAGE + 5 - cut)
        assert torch.equal(whole.token_ids[:cut], old.completions[0].token_ids)
        assert torch.equal(whole.engine_logprobs[:cut], old.completions[0].engine_logprobs)
        found = learner.logprobs(pack(shares_of([group], [torch.ones(1)])))[0]
        assert torch.equal(found[cut:], whole.engine_logprobs[cut:])
        assert not torch.equal(found[:cut], whole.engine_logprobs[:cut]), "those are the old version's"


@in_three_ways
def test_resumed_twice_each_token_has_the_logprob_of_its_versions_learner(long, scheme: str, kv):
    long = dataclasses.replace(long, kv=kv)
    learners = [long.learner(scheme, seed=version) for version in range(3)]
    engine = long.engine(prefill_tokens=24, max_concurrency=2)
    groups: list[Group] = []
    for version, learner in enumerate(learners):
        engine.load(dataclasses.replace(learner.publish(), version=version))
        stop = after(9) if version < 2 else None
        groups = engine.resume(groups, long.sampling, (0,), stop) if groups else rollout(long, engine, stop)
    versions = [group.completions[0].versions.tolist() for group in groups]
    assert versions == [[0] * 9 + [1] * 9 + [2] * (PAGE - 13)] * 2 + [[2] * (PAGE + 5)] * 2
    micro = pack(shares_of(groups, [torch.ones(1)] * len(groups)))
    reported, made_by = micro.engine_BL[micro.mask_BL], torch.tensor([*itertools.chain(*versions)])
    for version, learner in enumerate(learners):
        learner.publish()
        found = learner.logprobs(micro)[0]
        assert torch.equal(found[made_by == version], reported[made_by == version])


def test_of_a_stopped_rollout_the_learner_trains_on_what_is_finished(small):
    learner = small.learner("w8a8-int8")
    engine = small.engine(learner.publish(), max_concurrency=6)
    groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0,), lambda finished, total: finished >= 5)
    completions = [completion for group in groups for completion in group.completions]
    lengths = [len(completion) for completion in completions if completion.finish_reason == "aborted"]
    assert len(lengths) <= 7 and min(lengths) == 0 < max(lengths)
    advantages = [
        torch.where(torch.tensor([c.finish_reason == "aborted" for c in group.completions]), torch.nan, ones)
        for group, ones in zip(groups, small.advantages(groups), strict=True)
    ]
    assert_aligned(learner, groups)
    found = values(learner.update(groups, advantages))
    assert (found["mismatch/bit_equal"], found["mismatch/max_abs"]) == (1.0, 0.0)


@pytest.mark.parametrize("threads", [(1, 2), (2, 1)], ids=str)
def test_the_number_of_threads_on_either_side_does_not_matter(small, threads: tuple[int, int]):
    learner = small.learner("w8a8-int8")
    torch.set_num_threads(threads[0])
    groups = small.rollout(learner, 3, 35)
    torch.set_num_threads(threads[1])
    assert_aligned(learner, groups)


def test_one_wrong_code_on_the_engines_side_stops_training_before_the_step(small):
    learner = small.learner("w8a8-int8")
    snapshot = learner.publish()
    name = "model.layers.0.mlp.up_proj.weight"
    codes = snapshot.tensors[name].clone()
    codes[3, 5] ^= 64
    tensors = {**snapshot.tensors, name: codes}
    engine = small.engine(dataclasses.replace(snapshot, tensors=tensors, checksum=checksum(tensors), operands=None))
    groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, (0,))
    said = (
        r"of \d+ tokens \d+ differ, by up to 0\.\d+, in completions of \d prompts, .* small/\d; .* Nothing was trained"
    )
    with pytest.raises(RunError, match=said):
        learner.update(groups, small.advantages(groups))
    assert learner.version == 0
    assert learner.publish() is snapshot
