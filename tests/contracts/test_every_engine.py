"""What every engine must hold; a new one gets these tests for a line in the table."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from qarl.errors import ConfigurationError, RunError
from qarl.learner.learner import LocalLearner
from qarl.models.lora import LoraConfig
from qarl.quant import SCHEMES
from qarl.records import Completion, Group, Prompt, Snapshot
from qarl.roles import Engine
from qarl.rollout.fleet import Fleet
from qarl.rollout.native import NativeEngine


class TakesTurns:
    """A native engine that computes while no other one does, as those in one process must."""

    lock = threading.Lock()

    def __init__(self, engine: NativeEngine) -> None:
        self.version = engine.version
        self._engine = engine
        self.metrics = engine.metrics

    def load(self, snapshot: Snapshot) -> None:
        with self.lock:
            self._engine.load(snapshot)
        self.version = self._engine.version

    def generate(self, *question: Any) -> list[Group]:
        with self.lock:
            return self._engine.generate(*question)


FLEETS: list[Fleet] = []


def fleet(small: Any, snapshot: Snapshot | None) -> Fleet:
    found = Fleet(lambda index, progress: TakesTurns(small.engine(None, progress)), 2, 60.0)
    FLEETS.append(found)
    if snapshot is not None:
        found.load(snapshot)
    return found


@pytest.fixture(autouse=True)
def _nobody_computes_any_more() -> Iterator[None]:
    """A fleet tells of a refusal at once: its other engine may be at work, and the next test computes here too."""
    yield
    for one in FLEETS:
        for thread in one._threads:
            thread.join()
    FLEETS.clear()


ENGINES: dict[str, Callable[[Any, Snapshot | None], Engine]] = {
    "native": lambda small, snapshot: small.engine(snapshot),
    "native, one at a time": lambda small, snapshot: small.engine(snapshot, max_concurrency=1, prefill_tokens=4),
    "native, short of memory": lambda small, snapshot: small.engine(snapshot, kv_bytes=3 * 32768),
    "a fleet": fleet,
}
every_engine = pytest.mark.parametrize("engine_of", ENGINES.values(), ids=ENGINES.keys())

LENGTHS = (5, 40, 9)
SEED = (3, 8)


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def tokens(groups: list[Group]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions(groups)]


def assert_same(found: list[Group], expected: list[Group]) -> None:
    assert tokens(found) == tokens(expected)
    for one, other in zip(completions(found), completions(expected), strict=True):
        assert torch.equal(one.engine_logprobs, other.engine_logprobs)


@every_engine
def test_a_group_for_every_prompt_in_order_and_every_record_is_whole(small, engine_of):
    prompts = small.prompts(*LENGTHS)
    groups = engine_of(small, small.learner().publish()).generate(prompts, 4, small.sampling, SEED)
    assert [group.prompt for group in groups] == prompts
    assert [len(group.completions) for group in groups] == [4, 4, 4]
    for completion in completions(groups):
        assert 1 <= len(completion) <= small.sampling.max_new_tokens
        assert len(completion.engine_logprobs) == len(completion.versions) == len(completion)
        assert (completion.token_ids.dtype, completion.versions.dtype) == (torch.int64, torch.int64)
        assert completion.engine_logprobs.dtype == torch.float32
        assert bool((completion.engine_logprobs <= 0).all()) and bool(completion.engine_logprobs.isfinite().all())
        assert int(completion.token_ids.min()) >= 0 and int(completion.token_ids.max()) < small.sampleable
        assert completion.text == str(completion.token_ids.tolist())


@every_engine
@pytest.mark.parametrize("enough", [0, 5], ids=["at once", "after five"])
def test_what_is_stopped_is_handed_back_as_far_as_it_is(small, engine_of, enough: int):
    engine, prompts = engine_of(small, small.learner().publish()), small.prompts(*LENGTHS)
    whole = completions(engine.generate(prompts, 4, small.sampling, SEED))
    asked: list[tuple[int, int]] = []

    def stop(finished: int, total: int) -> bool:
        asked.append((finished, total))
        return finished >= enough

    found = completions(engine.generate(prompts, 4, small.sampling, SEED, stop))
    for one, other in zip(found, whole, strict=True):
        assert torch.equal(one.token_ids, other.token_ids[: len(one)])
        assert one.finish_reason in ("aborted", other.finish_reason)
        assert len(one) == len(other) or one.finish_reason == "aborted"
    assert enough <= sum(one.finish_reason != "aborted" for one in found) < 12
    assert {total for _, total in asked} == {12} and asked[-1][0] >= enough
    assert_same(engine.generate(prompts, 4, small.sampling, SEED), engine.generate(prompts, 4, small.sampling, SEED))


@every_engine
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
def test_logprobs_belong_to_the_tokens_returned(small, engine_of, scheme: str):
    learner = small.learner(scheme)
    for group in engine_of(small, learner.publish()).generate(small.prompts(*LENGTHS), 3, small.sampling, SEED):
        for completion in group.completions:
            predicted = small.predicted(learner.decoder, group.prompt, completion).double()
            expected = (
                (predicted / small.sampling.temperature).log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            )
            torch.testing.assert_close(completion.engine_logprobs.double(), expected, rtol=0, atol=1e-5)


@every_engine
def test_the_same_seed_gives_the_same_completions_and_another_one_others(small, engine_of):
    snapshot, prompts = small.learner().publish(), small.prompts(*LENGTHS)
    engine = engine_of(small, snapshot)
    first = engine.generate(prompts, 4, small.sampling, SEED)
    engine.generate(prompts[:1], 2, small.sampling, (99, 0))
    assert_same(engine.generate(prompts, 4, small.sampling, SEED), first)
    assert_same(engine_of(small, snapshot).generate(prompts, 4, small.sampling, SEED), first)
    for other in ((4, 8), (3, 9)):
        assert tokens(engine.generate(prompts, 4, small.sampling, other)) != tokens(first)
    assert len({tuple(ids) for ids in tokens(first[:1])}) > 1


@every_engine
def test_batch_mates_do_not_matter(small, engine_of):
    engine, prompts = engine_of(small, small.learner("w8a8-int8").publish()), small.prompts(*LENGTHS)
    together = engine.generate(prompts, 3, small.sampling, SEED)
    assert_same(engine.generate(prompts[::-1], 3, small.sampling, SEED), together[::-1])
    for prompt, group in zip(prompts, together, strict=True):
        assert_same(engine.generate([prompt], 3, small.sampling, SEED), [group])


@every_engine
def test_after_load_the_new_version_is_served_and_written_on_every_token(small, engine_of):
    engine, prompts = engine_of(small, small.learner().publish()), small.prompts(*LENGTHS)
    old = engine.generate(prompts, 2, small.sampling, SEED)
    assert engine.version == 0
    assert all(completion.versions.tolist() == [0] * len(completion) for completion in completions(old))
    new = dataclasses.replace(small.learner(seed=1).publish(), version=7)
    engine.load(new)
    assert engine.version == 7
    found = engine.generate(prompts, 2, small.sampling, SEED)
    assert all(completion.versions.tolist() == [7] * len(completion) for completion in completions(found))
    assert_same(found, engine_of(small, new).generate(prompts, 2, small.sampling, SEED))
    assert tokens(found) != tokens(old)


@every_engine
def test_a_snapshot_that_is_not_what_was_published_is_refused(small, engine_of):
    snapshot, prompts = small.learner("w8a8-int8").publish(), small.prompts(*LENGTHS)
    engine = engine_of(small, snapshot)
    before = engine.generate(prompts, 2, small.sampling, SEED)
    name = "model.layers.0.self_attn.k_proj.weight"
    codes = snapshot.tensors[name].clone()
    codes[0, 0] ^= 1
    damaged = dataclasses.replace(snapshot, version=1, tensors={**snapshot.tensors, name: codes}, operands=None)
    with pytest.raises(RunError, match="version 1"):
        engine.load(damaged)
    assert engine.version == 0
    assert_same(engine.generate(prompts, 2, small.sampling, SEED), before)


def adapted(small, updates: int) -> LocalLearner:
    """A learner of adapters, after so many updates."""
    learner = small.learner("w8a8-int8", lora=LoraConfig(rank=4), lr=0.05)
    for _ in range(updates):
        groups = small.rollout(learner, *LENGTHS)
        learner.update(groups, small.advantages(groups))
    return learner


@every_engine
def test_adapters_are_served_on_the_base_they_bring_or_that_is_served_already(small, engine_of):
    learner, prompts = adapted(small, 1), small.prompts(*LENGTHS)
    first = learner.publish()
    engine = engine_of(small, first)
    before = engine.generate(prompts, 2, small.sampling, SEED)
    groups = small.rollout(learner, *LENGTHS)
    learner.update(groups, small.advantages(groups))
    second = learner.publish()
    engine.load(second)
    found = engine.generate(prompts, 2, small.sampling, SEED)
    assert engine.version == 2
    assert all(completion.versions.tolist() == [2] * len(completion) for completion in completions(found))
    assert_same(found, engine_of(small, second).generate(prompts, 2, small.sampling, SEED))
    assert tokens(found) != tokens(before)
    engine.load(first)
    assert_same(engine.generate(prompts, 2, small.sampling, SEED), before)


@every_engine
def test_without_adapters_the_engine_serves_weights_alone_again(small, engine_of):
    prompts, plain = small.prompts(*LENGTHS), small.learner("w8a8-int8").publish()
    engine = engine_of(small, plain)
    before = engine.generate(prompts, 2, small.sampling, SEED)
    engine.load(adapted(small, 1).publish())
    assert tokens(engine.generate(prompts, 2, small.sampling, SEED)) != tokens(before)
    engine.load(plain)
    assert_same(engine.generate(prompts, 2, small.sampling, SEED), before)


@every_engine
@pytest.mark.parametrize("what", ["an adapter", "the base", "a byte of the base"])
def test_adapters_that_are_not_what_was_published_are_refused(small, engine_of, what: str):
    snapshot, prompts = adapted(small, 1).publish(), small.prompts(*LENGTHS)
    assert snapshot.lora is not None
    engine = engine_of(small, small.learner("w8a8-int8", seed=1).publish())
    before = engine.generate(prompts, 2, small.sampling, SEED)
    if what == "an adapter":
        name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
        tensors = {**snapshot.tensors, name: snapshot.tensors[name] + 1e-3}
        damaged = dataclasses.replace(snapshot, tensors=tensors)
    else:
        base, name = snapshot.lora.base, "model.layers.0.self_attn.k_proj.weight"
        if what == "the base":
            base = small.learner("w8a8-int8", seed=1).publish()
        else:
            tensors = {**base.tensors, name: base.tensors[name] ^ 1}
            base = dataclasses.replace(base, tensors=tensors, operands=None)
        damaged = dataclasses.replace(snapshot, lora=dataclasses.replace(snapshot.lora, base=base))
    with pytest.raises(RunError, match="nothing was loaded"):
        engine.load(damaged)
    assert engine.version == 0
    assert_same(engine.generate(prompts, 2, small.sampling, SEED), before)


@every_engine
def test_a_completion_stops_at_a_stop_token_and_at_the_limit(small, engine_of):
    sampling = dataclasses.replace(small.sampling, stop_token_ids=tuple(range(10)), max_new_tokens=6)
    groups = engine_of(small, small.learner().publish()).generate(small.prompts(*LENGTHS), 12, sampling, SEED)
    ended = {reason: [c for c in completions(groups) if c.finish_reason == reason] for reason in ("stop", "length")}
    assert ended["stop"] and ended["length"]
    assert len(ended["stop"]) + len(ended["length"]) == 36
    for completion in completions(groups):
        stops = [token in sampling.stop_token_ids for token in completion.token_ids.tolist()]
        assert not any(stops[:-1])
        assert stops[-1] == (completion.finish_reason == "stop")
    assert {len(completion) for completion in ended["length"]} == {6}


@every_engine
def test_greedy_is_the_likeliest_token_each_time(small, engine_of):
    learner = small.learner("w8a8-int8")
    sampling = dataclasses.replace(small.sampling, temperature=0.0, stop_token_ids=())
    for group in engine_of(small, learner.publish()).generate(small.prompts(*LENGTHS), 2, sampling, SEED):
        for completion in group.completions:
            predicted = small.predicted(learner.decoder, group.prompt, completion)
            assert torch.equal(predicted.argmax(-1), completion.token_ids)


@every_engine
def test_what_cannot_be_completed_is_refused_by_the_prompts_name(small, engine_of):
    engine = engine_of(small, small.learner().publish())
    for prompt in (Prompt("nothing", (), "", {}), Prompt("long", (1,) * small.config.max_position_embeddings, "", {})):
        with pytest.raises(ConfigurationError, match=f"prompt {prompt.id}:"):
            engine.generate([*small.prompts(3), prompt], 2, small.sampling, SEED)


@every_engine
def test_its_readings_are_numbers(small, engine_of):
    engine = engine_of(small, small.learner().publish())
    engine.generate(small.prompts(*LENGTHS), 2, small.sampling, SEED)
    readings = {name: metric.value() for name, metric in engine.metrics().items()}
    assert all(name.startswith(("perf/", "engine/", "publish/")) for name in readings)
    assert all(math.isfinite(value) for value in readings.values())
    assert 0.0 <= readings["perf/bubble"] < 1.0


@every_engine
@pytest.mark.parametrize("scheme", SCHEMES)
def test_versions_loaded_again_and_again_are_served_as_at_first(small, engine_of, scheme: str):
    first, second = (small.learner(scheme, seed=seed).publish() for seed in (0, 1))
    engine, prompts = engine_of(small, first), small.prompts(*LENGTHS)

    def completed() -> list[Group]:
        return engine.generate(prompts, 2, small.sampling, SEED)

    before = completed()
    engine.load(first)
    assert_same(completed(), before)
    engine.load(second)
    assert tokens(completed()) != tokens(before)
    engine.load(first)
    assert_same(completed(), before)
