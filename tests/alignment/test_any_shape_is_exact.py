"""Any model shape, batch and way of running: engine and learner have the same bits, and so have two engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from qarl.learner.batch import micro_batches, shares_of
from qarl.learner.learner import LocalLearner
from qarl.metrics import values
from qarl.models.config import ModelConfig
from qarl.models.lora import LoraConfig
from qarl.models.rope import RopeConfig
from qarl.ops.kernels import kernels
from qarl.records import Group, Sampling
from qarl.rollout.cache import PAGE, bytes_per_token, pages_for

pytestmark = pytest.mark.skipif(
    not kernels().exact_matmul, reason="without the C kernels floating-point GEMMs depend on the batch"
)

SEED = (5, 1)


@dataclass(frozen=True)
class Run:
    """How an engine is run, none of which may show in what it returns."""

    max_concurrency: int
    prefill_tokens: int
    threads: int
    is_short_of_memory: bool


@dataclass(frozen=True)
class Case:
    """A model, its scheme, what it is asked, and how: two ways of running the engine and one of the learner.

    The second run is asked the prompts `others` only, in that order.
    """

    config: ModelConfig
    scheme: str
    kv: Literal["fp32", "int8"]
    lengths: tuple[int, ...]
    group_size: int
    sampling: Sampling
    runs: tuple[Run, Run]
    others: tuple[int, ...]
    learner_threads: int
    learner: dict[str, Any]


@st.composite
def configs(draw: st.DrawFn, width_step: int) -> ModelConfig:
    """Widths are multiples of `width_step`, seldom of a vector, a panel or 64."""
    kv_heads, repeat = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    widest = 128 if kv_heads * repeat <= 5 else 80
    dims = [d for d in (8, 16, 32, 40, 48, 64, 80, 128) if d <= widest and kv_heads * repeat * d % width_step == 0]
    widths = st.integers(1, 160 // width_step).map(lambda n: n * width_step)
    return ModelConfig(
        family="llama",
        vocab_size=96,
        hidden_size=draw(widths),
        intermediate_size=draw(widths),
        num_layers=draw(st.integers(1, 2)),
        num_heads=kv_heads * repeat,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from(dims)),
        max_position_embeddings=160,
        rope=RopeConfig(),
        tie_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        output_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
    )


THREADS = st.sampled_from([1, 1, 1, 2])
"""Seldom several: on a busy machine they wait for each other."""

RUNS = st.builds(
    Run,
    max_concurrency=st.integers(1, 9),
    prefill_tokens=st.sampled_from([1, 7, PAGE - 1, PAGE, PAGE + 1, 2048]),
    threads=THREADS,
    is_short_of_memory=st.booleans(),
)


LORAS = st.builds(
    LoraConfig,
    rank=st.sampled_from([1, 3, 16, 40]),
    targets=st.sampled_from([("*",), ("*.k_proj", "*.up_proj"), ("*.0.*.o_proj", "*.down_proj")]),
)


@st.composite
def cases(draw: st.DrawFn, longest: int) -> Case:
    scheme = draw(st.sampled_from(["none", "w8a8-int8", "w4a8-int8", "w4a16"]))
    near_a_page = st.sampled_from([1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 2 * PAGE + 4])
    lengths = draw(st.lists(near_a_page | st.integers(1, 70), min_size=1, max_size=3))
    max_new_tokens = draw(st.sampled_from([1, 4, longest]))
    return Case(
        config=draw(configs(32 if scheme == "w4a16" else 2)),
        scheme=scheme,
        kv=draw(st.sampled_from(["fp32", "int8"])),
        lengths=tuple(lengths),
        group_size=draw(st.integers(1, 3)),
        sampling=Sampling(draw(st.sampled_from([0.7, 1.0, 1.3])), max_new_tokens, (0, 1, 2, 3)),
        runs=(draw(RUNS), draw(RUNS)),
        others=tuple(draw(st.permutations(range(len(lengths))))[: draw(st.integers(1, 3))]),
        learner_threads=draw(THREADS),
        learner={
            "micro_batch_tokens": draw(st.sampled_from([1, 40, 100, 1024])),
            "head_chunk_tokens": draw(st.sampled_from([1, 5, 256])),
            "activation_checkpointing": draw(st.booleans()),
            "lora": draw(st.none() | LORAS),
        },
    )


def rollout(small, learner: LocalLearner, case: Case, run: Run, order: Sequence[int]) -> list[Group]:
    """These prompts of the case, completed in this way."""
    torch.set_num_threads(run.threads)
    pages = pages_for(max(case.lengths)) + pages_for(case.sampling.max_new_tokens)
    kv_bytes = max(1 << 16, pages * PAGE * bytes_per_token(case.config, case.kv))
    engine = small.engine(
        learner.publish(),
        max_concurrency=run.max_concurrency,
        prefill_tokens=run.prefill_tokens,
        kv_bytes=kv_bytes if run.is_short_of_memory else 1 << 30,
    )
    prompts = small.prompts(*case.lengths)
    return engine.generate([prompts[i] for i in order], case.group_size, case.sampling, SEED)


def assert_same(found: list[Group], expected: list[Group]) -> None:
    for one, other in zip(found, expected, strict=True):
        for a, b in zip(one.completions, other.completions, strict=True):
            assert torch.equal(a.token_ids, b.token_ids)
            assert torch.equal(a.engine_logprobs, b.engine_logprobs)


def assert_aligned(learner: LocalLearner, groups: list[Group], case: Case) -> None:
    torch.set_num_threads(case.learner_threads)
    shares = shares_of(groups, [torch.ones(case.group_size)] * len(groups))
    for micro in micro_batches(shares, case.learner["micro_batch_tokens"]):
        assert torch.equal(learner.logprobs(micro)[0], micro.engine_BL[micro.mask_BL])


def assert_exact(small, case: Case) -> None:
    """Two ways of running, then the learner; and once more after an update."""
    small = dataclasses.replace(small, config=case.config, kv=case.kv, sampling=case.sampling)
    learner = small.learner(case.scheme, **case.learner)
    everyone = range(len(case.lengths))
    groups = rollout(small, learner, case, case.runs[0], everyone)
    assert_same(rollout(small, learner, case, case.runs[1], case.others), [groups[i] for i in case.others])
    assert_aligned(learner, groups, case)
    assert values(learner.update(groups, small.advantages(groups)))["mismatch/bit_equal"] == 1.0
    assert_aligned(learner, rollout(small, learner, case, case.runs[1], case.others), case)


fixed = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@settings(fixed, max_examples=25)
@given(case=cases(longest=8))
def test_whatever_the_shape_and_however_it_is_run_the_bits_agree(small, case):
    assert_exact(small, case)


@pytest.mark.slow
@settings(fixed, max_examples=300)
@given(case=cases(longest=PAGE + 2))
def test_so_they_do_in_hundreds_of_cases_and_over_several_pages(small, case):
    assert_exact(small, case)
