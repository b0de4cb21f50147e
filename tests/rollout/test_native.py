import dataclasses
import itertools
import math
import weakref
from typing import Any

import pytest
import torch

from qarl.errors import ConfigurationError, RunError
from qarl.ops.kernels import kernels
from qarl.quant import SCHEMES
from qarl.readings import completion_metrics
from qarl.records import Completion, Group, Prompt, Sampling
from qarl.rewards.scorer import Scorer
from qarl.rewards.shape import Length, Repetition
from qarl.roles import Stop
from qarl.rollout import native
from qarl.rollout.cache import PAGE, KVCache, bytes_per_token
from qarl.rollout.request import make_requests
from qarl.sync.disk import read_snapshot, write_snapshot
from qarl.sync.snapshot import take_snapshot

LENGTHS = (3, 40, 7, 33)
SEED = (11, 4)
NO_STOP = Sampling(temperature=0.8, max_new_tokens=10)


def assert_same(found: list[Group], expected: list[Group]) -> None:
    """Same tokens, bit-equal log-probabilities."""
    assert [group.prompt.id for group in found] == [group.prompt.id for group in expected]
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert a.token_ids.tolist() == b.token_ids.tolist()
            assert torch.equal(a.engine_logprobs, b.engine_logprobs)
            assert a.finish_reason == b.finish_reason


def tokens_of(groups: list[Group]) -> list[list[int]]:
    return [completion.token_ids.tolist() for group in groups for completion in group.completions]


def completions_of(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def after(steps: int) -> Stop:
    """Stops a rollout after that many steps."""
    asked = itertools.count(1)
    return lambda finished, total: next(asked) >= steps


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KVCache]:
    """Every cache that an engine makes."""
    made: list[KVCache] = []

    class Noted(KVCache):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(native, "KVCache", Noted)
    return made


@pytest.fixture
def published(small):
    """A quantized snapshot and the learner's decoder, which serves it too."""
    learner = small.learner("w8a8-int8")
    return learner.publish(), learner.decoder


@pytest.fixture
def expected(small, published) -> list[Group]:
    return small.engine(published[0]).generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)


@pytest.mark.parametrize(
    "config",
    [
        {"max_concurrency": 1},
        {"max_concurrency": 3},
        {"prefill_tokens": 1},
        {"prefill_tokens": 5},
        {"max_concurrency": 5, "prefill_tokens": 38},
        {"kv_bytes": 3 * 32768},
    ],
    ids=str,
)
def test_how_the_engine_is_run_does_not_change_a_completion(small, published, expected, config):
    engine = small.engine(published[0], **config)
    assert_same(engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED), expected)


def test_neither_do_batch_mates_nor_the_order_of_prompts(small, published, expected):
    engine = small.engine(published[0])
    prompts = small.prompts(*LENGTHS)
    assert_same(engine.generate(prompts[::-1], 3, small.sampling, SEED), expected[::-1])
    for index in range(len(prompts)):
        assert_same(engine.generate([prompts[index]], 3, small.sampling, SEED), [expected[index]])


def test_a_larger_group_begins_with_the_smaller_one(small, published, expected):
    larger = small.engine(published[0]).generate(small.prompts(*LENGTHS), 5, small.sampling, SEED)
    assert_same([Group(group.prompt, group.completions[:3]) for group in larger], expected)


def test_threads_do_not_change_a_completion(small, published, expected):
    torch.set_num_threads(2)
    assert_same(small.engine(published[0]).generate(small.prompts(*LENGTHS), 3, small.sampling, SEED), expected)


def test_the_seed_decides_and_every_completion_has_its_own(small, published, expected):
    engine = small.engine(published[0])
    prompts = small.prompts(*LENGTHS)
    assert_same(engine.generate(prompts, 3, small.sampling, SEED), expected)
    for other in ((11, 5), (12, 4)):
        changed = engine.generate(prompts, 3, small.sampling, other)
        same = [a == b for a, b in zip(tokens_of(changed), tokens_of(expected), strict=True)]
        assert sum(same) <= 1
    distinct = {tuple(tokens) for tokens in tokens_of(engine.generate(prompts, 3, NO_STOP, SEED))}
    assert len(distinct) == 3 * len(LENGTHS)


def test_two_equal_prompts_of_one_batch_get_different_completions(small, published):
    [prompt] = small.prompts(6)
    twice = small.engine(published[0]).generate([prompt, prompt], 2, NO_STOP, SEED)
    assert len({tuple(tokens) for tokens in tokens_of(twice)}) == 4
    assert len({request.stream for request in make_requests([prompt, prompt], 2, SEED)}) == 4


def test_a_completion_ends_with_its_stop_token_or_at_the_limit(small, published):
    sampling = dataclasses.replace(small.sampling, stop_token_ids=tuple(range(12)))
    groups = small.engine(published[0]).generate(small.prompts(*LENGTHS), 8, sampling, SEED)
    reasons = set()
    for completion in (completion for group in groups for completion in group.completions):
        tokens = completion.token_ids.tolist()
        reasons.add(completion.finish_reason)
        assert not set(tokens[:-1]) & set(sampling.stop_token_ids)
        if completion.finish_reason == "stop":
            assert tokens[-1] in sampling.stop_token_ids
        else:
            assert completion.finish_reason == "length"
            assert len(tokens) == sampling.max_new_tokens and tokens[-1] not in sampling.stop_token_ids
    assert reasons == {"stop", "length"}


def test_one_token_is_a_completion(small, published, expected):
    sampling = Sampling(temperature=0.8, max_new_tokens=1)
    groups = small.engine(published[0]).generate(small.prompts(*LENGTHS), 3, sampling, SEED)
    assert tokens_of(groups) == [tokens[:1] for tokens in tokens_of(expected)]
    assert {completion.finish_reason for group in groups for completion in group.completions} == {"length"}


def test_records_are_as_promised(small, published, expected):
    for completion in (completion for group in expected for completion in group.completions):
        assert completion.token_ids.dtype == completion.versions.dtype == torch.int64
        assert completion.engine_logprobs.dtype == torch.float32
        assert len(completion) == len(completion.engine_logprobs) == len(completion.versions)
        assert completion.text == str(completion.token_ids.tolist())


def test_greedy_takes_the_likeliest_token_of_the_untempered_distribution(small, published):
    snapshot, decoder = published
    sampling = Sampling(temperature=0.0, max_new_tokens=8)
    for group in small.engine(snapshot).generate(small.prompts(*LENGTHS), 2, sampling, SEED):
        first, second = group.completions
        assert first.token_ids.tolist() == second.token_ids.tolist()
        predicted = small.predicted(decoder, group.prompt, first)
        assert torch.equal(predicted.argmax(-1), first.token_ids)
        expected = predicted.double().log_softmax(-1).gather(-1, first.token_ids[:, None])[:, 0]
        torch.testing.assert_close(first.engine_logprobs.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_logprobs_are_those_of_the_tempered_distribution(small, published, temperature: float):
    snapshot, decoder = published
    sampling = Sampling(temperature, max_new_tokens=8)
    for group in small.engine(snapshot).generate(small.prompts(*LENGTHS), 2, sampling, SEED):
        for completion in group.completions:
            predicted = small.predicted(decoder, group.prompt, completion).double()
            expected = (predicted / temperature).log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            torch.testing.assert_close(completion.engine_logprobs.double(), expected, rtol=0, atol=1e-5)


def test_tokens_come_as_often_as_their_probability_says(small, published):
    snapshot, decoder = published
    [prompt] = small.prompts(9)
    sampling, count = Sampling(temperature=1.3, max_new_tokens=1), 6000
    [group] = small.engine(snapshot, max_concurrency=count).generate([prompt], count, sampling, SEED)
    drawn = torch.cat([completion.token_ids for completion in group.completions])
    logits = decoder.full_logits(torch.tensor(prompt.token_ids))[-1].double()
    expected = (logits / sampling.temperature).softmax(-1) * count
    common = expected > 10
    observed = torch.bincount(drawn, minlength=small.sampleable).double()
    chi_square = float(((observed - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert freedom > 20
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_rows_that_pad_the_vocabulary_are_never_sampled(small):
    decoder = small.decoder()
    with torch.no_grad():
        decoder.head_weight()[small.sampleable :] *= 100.0
    engine = small.engine(take_snapshot(decoder, {}, version=1))
    assert max(map(max, tokens_of(engine.generate(small.prompts(*LENGTHS), 8, NO_STOP, SEED)))) < small.sampleable
    # Where the same rows are tokens, they are drawn all the time.
    decoder.vocab_size = small.config.vocab_size
    unpadded = dataclasses.replace(small, sampleable=small.config.vocab_size)
    engine = unpadded.engine(take_snapshot(decoder, {}, version=1))
    drawn = torch.tensor(tokens_of(engine.generate(small.prompts(*LENGTHS), 8, NO_STOP, SEED)))
    assert (drawn >= small.sampleable).float().mean() > 0.5


def test_every_token_carries_the_version_that_made_it(small, published):
    engine = small.engine(published[0])
    assert engine.version == 0
    engine.load(dataclasses.replace(published[0], version=5))
    assert engine.version == 5
    [group] = engine.generate(small.prompts(4), 2, small.sampling, SEED)
    assert all(set(completion.versions.tolist()) == {5} for completion in group.completions)


def test_a_new_version_is_what_is_served_and_nothing_of_the_old(small, published, expected):
    engine = small.engine(published[0])
    engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)
    other = small.learner("w8a8-int8", seed=1).publish()
    engine.load(other)
    after = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)
    assert_same(after, small.engine(other).generate(small.prompts(*LENGTHS), 3, small.sampling, SEED))
    assert tokens_of(after) != tokens_of(expected)
    engine.load(published[0])
    assert_same(engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED), expected)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
@pytest.mark.parametrize("brings_operands", [True, False])
def test_a_flipped_bit_is_refused_and_the_old_version_goes_on(small, published, expected, name, brings_operands):
    snapshot, _ = published
    engine = small.engine(snapshot)
    damaged = snapshot.tensors[name].clone()
    damaged.view(torch.uint8).view(-1)[3] ^= 1
    fields = {"version": 1, "tensors": {**snapshot.tensors, name: damaged}}
    if not brings_operands:
        fields["operands"] = None
    with pytest.raises(RunError, match="version 1 changed between publishing and loading"):
        engine.load(dataclasses.replace(snapshot, **fields))
    assert engine.version == 0
    assert_same(engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED), expected)


@pytest.mark.parametrize("head", ["none", "w8a8-int8"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tensors_alone_in_memory_or_from_disk_serve_the_same_bits(small, tmp_path, scheme, tied, head):
    small = dataclasses.replace(small, config=dataclasses.replace(small.config, tie_embeddings=tied))
    snapshot = small.learner(scheme, rules={"lm_head": head}).publish()
    prompts = small.prompts(3, 35)
    expected = small.engine(snapshot).generate(prompts, 2, NO_STOP, SEED)
    alone = dataclasses.replace(snapshot, operands=None)
    assert_same(small.engine(alone).generate(prompts, 2, NO_STOP, SEED), expected)
    write_snapshot(snapshot, tmp_path / "snapshot")
    read = read_snapshot(tmp_path / "snapshot")
    assert read.operands is None
    assert_same(small.engine(read).generate(prompts, 2, NO_STOP, SEED), expected)


def test_a_prompt_without_tokens_is_refused(small, published):
    with pytest.raises(ConfigurationError, match="prompt empty: has no tokens"):
        small.engine(published[0]).generate([Prompt("empty", (), "", {})], 2, small.sampling, SEED)


def test_a_prompt_that_leaves_no_room_in_the_context_is_refused_by_name(small, published):
    engine = small.engine(published[0])
    fits = small.config.max_position_embeddings - NO_STOP.max_new_tokens
    [group] = engine.generate(small.prompts(fits), 1, NO_STOP, SEED)
    assert len(group.completions[0]) == NO_STOP.max_new_tokens
    with pytest.raises(ConfigurationError, match=r"prompt small/1: 119 prompt tokens .* = 10 exceed .* of 128"):
        engine.generate(small.prompts(3, fits + 1), 1, NO_STOP, SEED)


def test_a_budget_too_small_for_one_completion_is_refused_naming_kv_bytes(small, published):
    engine = small.engine(published[0], kv_bytes=3 * 32768 - 1)
    with pytest.raises(ConfigurationError, match=rf"prompt small/1: .* {3 * 32768} bytes.*engine\.kv_bytes = 98303"):
        engine.generate(small.prompts(3, PAGE + 1), 1, small.sampling, SEED)
    assert len(engine.generate(small.prompts(PAGE), 1, small.sampling, SEED)) == 1


@pytest.mark.parametrize("pages", [3, 4, 7, 1000])
def test_the_cache_stays_within_its_budget_and_is_empty_in_the_end(small, published, caches, pages: int):
    engine = small.engine(published[0], kv_bytes=pages * 32768)
    page_bytes = PAGE * bytes_per_token(small.config)
    for lengths in ((3,), LENGTHS, (5, 5)):
        engine.generate(small.prompts(*lengths), 3, small.sampling, SEED)
        assert caches[-1].num_pages * page_bytes <= engine.config.kv_bytes
        assert caches[-1].free_pages == caches[-1].num_pages
    assert len(caches) == 3


def test_between_rollouts_there_is_no_cache(small, published, caches):
    engine = small.engine(published[0])
    engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)
    left = weakref.ref(caches.pop())
    assert left() is None


def test_an_interrupted_rollout_leaves_nothing_behind(small, published, expected):
    def stop(finished: int, total: int) -> None:
        if interrupts and finished > 3:
            interrupts.clear()
            raise KeyboardInterrupt

    interrupts = [True]
    engine = small.engine(published[0], stop, kv_bytes=8 * 32768)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)
    assert_same(engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED), expected)


def test_progress_counts_up_to_all_completions(small, published):
    seen: list[tuple[int, int]] = []
    engine = small.engine(published[0], lambda *counts: seen.append(counts), max_concurrency=4)
    engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED)
    finished = [count for count, _ in seen]
    assert {total for _, total in seen} == {12}
    assert finished == sorted(finished)
    assert finished[-1] == 12
    # After every step, also one in which nobody finishes: whoever watches sees that the engine is alive.
    assert len(finished) > len(set(finished))


def test_the_bubble_is_the_idle_share_of_places(small, published):
    alone = small.engine(published[0], max_concurrency=1)
    assert alone.metrics()["perf/bubble"].value() == 0.0
    alone.generate(small.prompts(3, 4), 2, small.sampling, SEED)
    assert alone.metrics()["perf/bubble"].value() == 0.0
    # Both groups fit by count, but the cache holds one completion at a time: half of the places stay empty.
    starved = small.engine(published[0], max_concurrency=2, kv_bytes=2 * 32768)
    starved.generate(small.prompts(3, 4), 2, small.sampling, SEED)
    assert starved.metrics()["perf/bubble"].value() == pytest.approx(0.5)


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_weights_that_overflow_stop_the_run_and_name_the_prompt(small, value: float):
    engine = small.engine(take_snapshot(small.decoder(), {}, version=1))
    with torch.no_grad():  # publishing refuses NaN and infinity; here they arise later
        engine.decoder.model.norm.weight.fill_(value)
    with pytest.raises(RunError, match=r"prompt small/0, completion 0, token 0: .* version 1 overflow"):
        engine.generate(small.prompts(3), 2, small.sampling, SEED)


def test_nothing_is_generated_before_weights_are_loaded(small):
    engine = small.engine()
    assert engine.version == -1
    with pytest.raises(RunError, match="load a snapshot before generating"):
        engine.generate(small.prompts(3), 1, small.sampling, SEED)


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 16])
@pytest.mark.parametrize(
    "config", [{}, {"max_concurrency": 5, "prefill_tokens": 3}, {"kv_bytes": 4 * 32768, "prefill_tokens": 38}], ids=str
)
def test_a_rollout_stopped_at_any_moment_and_resumed_is_the_unbroken_one(small, published, expected, config, steps):
    engine = small.engine(published[0], **config)
    partial = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED, after(steps))
    for found, whole in zip(completions_of(partial), completions_of(expected), strict=True):
        length = len(found)
        assert found.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert torch.equal(found.engine_logprobs, whole.engine_logprobs[:length])
        assert found.versions.tolist() == [0] * length
        assert found.finish_reason == (whole.finish_reason if length == len(whole) else "aborted")
        assert found.text == str(found.token_ids.tolist())
    assert_same(engine.resume(partial, small.sampling, SEED), expected)


def test_stopped_before_anything_is_finished_the_running_have_a_token_and_the_waiting_none(small, published, expected):
    seen: list[tuple[int, int]] = []
    engine = small.engine(published[0], lambda *counts: seen.append(counts), max_concurrency=4)
    partial = engine.generate(small.prompts(*LENGTHS), 3, NO_STOP, SEED, lambda *_: True)
    assert seen == [(0, 12)]
    assert [len(completion) for completion in completions_of(partial)] == [1] * 4 + [0] * 8
    for completion in completions_of(partial):
        assert completion.finish_reason == "aborted"
        assert (completion.token_ids.dtype, completion.versions.dtype) == (torch.int64, torch.int64)
        assert completion.engine_logprobs.dtype == torch.float32
        assert len(completion) == len(completion.engine_logprobs) == len(completion.versions)


def test_stop_is_asked_after_every_step_until_it_says_so(small, published):
    asked: list[tuple[int, int]] = []

    def stop(finished: int, total: int) -> bool:
        asked.append((finished, total))
        return finished >= 4

    engine = small.engine(published[0], max_concurrency=4)
    partial = engine.generate(small.prompts(*LENGTHS), 3, NO_STOP, SEED, stop)
    assert asked == [(0, 12)] * 9 + [(4, 12)]
    asked.clear()
    engine.resume(partial, NO_STOP, SEED, lambda finished, total: stop(finished, total) and finished == total)
    assert asked == [(4, 12)] * 9 + [(8, 12)] * 10 + [(12, 12)]


@pytest.mark.skipif(not kernels().exact_matmul, reason="floating-point GEMMs depend on the batch")
@pytest.mark.parametrize("cut", [PAGE - 1, PAGE, PAGE + 1])
@pytest.mark.parametrize(
    ("scheme", "kv"), [("none", "fp32"), ("none", "int8"), ("w8a8-int8", "fp32"), ("w8a8-int8", "int8")]
)
@pytest.mark.parametrize("prefill_tokens", [20, 2048])
def test_stopped_at_the_edge_of_a_page_and_resumed_is_unbroken_too(small, scheme, kv, cut: int, prefill_tokens: int):
    """In chunks shorter than prompt and completion, and in one forward with the prompt."""
    small = dataclasses.replace(small, kv=kv)
    sampling = Sampling(temperature=0.8, max_new_tokens=PAGE + 5)
    engine = small.engine(small.learner(scheme).publish(), prefill_tokens=prefill_tokens)
    prompts = small.prompts(3, 40)
    unbroken = engine.generate(prompts, 2, sampling, SEED)
    partial = engine.generate(prompts, 2, sampling, SEED, after(cut))
    assert [len(completion) for completion in completions_of(partial)] == [cut] * 4
    assert_same(engine.resume(partial, sampling, SEED), unbroken)


def test_resumed_again_and_again_for_a_single_step_is_unbroken_too(small, published, expected):
    engine = small.engine(published[0], max_concurrency=5, prefill_tokens=7)
    groups = engine.generate(small.prompts(*LENGTHS), 3, small.sampling, SEED, after(1))
    resumed = 0
    while any(completion.finish_reason == "aborted" for completion in completions_of(groups)):
        groups = engine.resume(groups, small.sampling, SEED, after(1))
        resumed += 1
    assert resumed > small.sampling.max_new_tokens
    assert_same(groups, expected)


def test_what_is_finished_is_returned_as_it_is(small, published):
    engine = small.engine(published[0], max_concurrency=4)
    partial = engine.generate(small.prompts(*LENGTHS), 3, NO_STOP, SEED, lambda finished, _: finished > 0)
    whole = engine.resume(partial, NO_STOP, SEED)
    same = [a is b for a, b in zip(completions_of(partial), completions_of(whole), strict=True)]
    assert same == [True] * 4 + [False] * 8
    again = engine.resume(whole, NO_STOP, SEED, lambda *_: pytest.fail("there is no step to make"))
    assert all(a is b for a, b in zip(completions_of(whole), completions_of(again), strict=True))


def test_the_second_of_two_equal_prompts_keeps_its_randomness_when_the_first_is_finished(small, published):
    [prompt] = small.prompts(6)
    engine = small.engine(published[0], max_concurrency=2)
    unbroken = engine.generate([prompt, prompt], 2, NO_STOP, SEED)
    partial = engine.generate([prompt, prompt], 2, NO_STOP, SEED, after(13))
    assert [len(completion) for completion in completions_of(partial)] == [10, 10, 3, 3]
    assert_same(engine.resume(partial, NO_STOP, SEED), unbroken)


def test_resumed_greedily_is_unbroken_too(small, published):
    greedy = Sampling(temperature=0.0, max_new_tokens=8)
    engine, prompts = small.engine(published[0]), small.prompts(*LENGTHS)
    partial = engine.generate(prompts, 1, greedy, SEED, after(3))
    assert_same(engine.resume(partial, greedy, SEED), engine.generate(prompts, 1, greedy, SEED))


def test_new_tokens_carry_the_version_that_made_them_and_old_ones_keep_theirs(small, published):
    engine = small.engine(published[0], max_concurrency=5)
    partial = engine.generate(small.prompts(*LENGTHS), 3, NO_STOP, SEED, after(4))
    engine.load(dataclasses.replace(small.learner("w8a8-int8", seed=1).publish(), version=6))
    for old, new in zip(completions_of(partial), completions_of(engine.resume(partial, NO_STOP, SEED)), strict=True):
        assert new.versions.tolist() == [0] * len(old) + [6] * (10 - len(old))
        assert new.token_ids[: len(old)].tolist() == old.token_ids.tolist()
        assert torch.equal(new.engine_logprobs[: len(old)], old.engine_logprobs)
        assert new.text == str(new.token_ids.tolist())


def test_the_limit_counts_the_tokens_there_are(small, published):
    engine = small.engine(published[0])
    unbroken = engine.generate(small.prompts(4), 2, NO_STOP, SEED)
    partial = engine.generate(small.prompts(4), 2, NO_STOP, SEED, after(6))
    [group] = engine.resume(partial, dataclasses.replace(NO_STOP, max_new_tokens=7), SEED)
    assert [c.token_ids.tolist() for c in group.completions] == [tokens[:7] for tokens in tokens_of(unbroken)]
    assert {completion.finish_reason for completion in group.completions} == {"length"}
    with pytest.raises(ConfigurationError, match=r"prompt small/0, completion 0: .* 6 tokens .*max_new_tokens = 6"):
        engine.resume(partial, dataclasses.replace(NO_STOP, max_new_tokens=6), SEED)


def test_resuming_takes_no_idle_time_for_what_was_finished_before(small, published):
    engine = small.engine(published[0])
    partial = engine.generate(small.prompts(3, 4), 2, NO_STOP, SEED, after(3))
    finished = Completion(*(torch.zeros(0),) * 3, "stop", "")
    mixed = [Group(group.prompt, (finished, *group.completions[1:])) for group in partial]
    engine.resume(mixed, NO_STOP, SEED)
    assert engine.metrics()["perf/bubble"].value() == 0.0


def test_an_aborted_completion_without_tokens_is_scored_and_measured(small, published):
    engine = small.engine(published[0], max_concurrency=1)
    groups = engine.generate(small.prompts(3, 4), 2, NO_STOP, SEED, after(12))
    assert [len(completion) for completion in completions_of(groups)] == [10, 2, 0, 0]
    first, second = Scorer([Length(token_cost=0.01), Repetition()])(groups)
    assert first.total.isnan().tolist() == [False, True] and second.total.isnan().tolist() == [True, True]
    found = completion_metrics(groups)
    assert found["completion/length_mean"].value() == 3.0
    assert found["completion/truncated"].value() == 0.25
