"""`qarl bench rollout`, `learner` and `step`: medians of whole runs, next to a measured roofline."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

import torch

from qarl.bench import timing
from qarl.bench.operations import gemm_operations, update_operations
from qarl.bench.roofline import measured_peak
from qarl.bench.system import random_prompts, system_for
from qarl.build import System
from qarl.errors import ConfigurationError
from qarl.learner.batch import micro_batches, shares_of
from qarl.learner.learner import LocalLearner
from qarl.loop import Stopwatch
from qarl.records import Group, Sampling
from qarl.rollout.cache import KVFormat
from qarl.rollout.native import NativeEngine

PARTS = ("step", "rollout", "reward", "learner", "publish")
"""What is timed of a step."""


AT_A_TIME = 64
"""Completions that the engine of `learner` decodes at a time, as a run's does by default."""


def rollout(
    model: str,
    scheme: str,
    batch: int,
    prompt_len: int,
    new_tokens: int,
    kv_cache: KVFormat = "fp32",
    repeats: int | None = None,
) -> dict[str, Any]:
    """Tokens a second of the engine: `batch` different prompts of `prompt_len` random tokens, none stopping early.

    `prefill_s` is a rollout of one new token (prompts, and the first token of each); the rest of the whole rollout,
    divided by the tokens that are left, is `decode_step_ms`, None where no more than one is asked for.
    """
    repeats = repeats or timing.REPEATS
    system = system_for(model, scheme, batch, kv_cache=kv_cache)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    prompts = random_prompts(engine.decoder.vocab_size, batch, prompt_len)

    def generate(count: int) -> None:
        engine.generate(prompts, 1, Sampling(temperature=1.0, max_new_tokens=count, stop_token_ids=()), seed=(0, 0))

    found = timing.repeated_seconds(lambda: generate(1), lambda: generate(new_tokens), what="rollout", repeats=repeats)
    prefill, seconds = map(statistics.median, found)
    body, head = gemm_operations(engine.decoder.config, engine.decoder.vocab_size)
    operations = batch * ((prompt_len + new_tokens - 1) * body + new_tokens * head)
    peak = measured_peak(scheme)
    return {
        "tokens_per_s": batch * new_tokens / seconds,
        "prefill_s": prefill,
        "decode_step_ms": 1e3 * (seconds - prefill) / (new_tokens - 1) if new_tokens > 1 else None,
        "roofline_fraction": operations / seconds / peak,
        "roofline_gops": peak / 1e9,
        "seconds": seconds,
        "batch": batch,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "kv_cache": kv_cache,
        "model": model,
        "threads": torch.get_num_threads(),
        "median_of": repeats,
    }


def learner(
    model: str, scheme: str, batch: int, prompt_len: int, new_tokens: int, repeats: int | None = None
) -> dict[str, Any]:
    """Seconds of one update on `batch` completions (groups of 8, as a run has them).

    `packed_tokens` go through the layers: prompts, again wherever a group is divided among micro-batches, and all of
    a completion but its last token. `roofline_fraction` counts GEMMs as `update_operations` says: 6 operations for
    every packed token and weight (and 2 for all but a layer's last product with activation checkpointing), 8 for every
    trained token and head weight.
    """
    repeats = repeats or timing.REPEATS
    system = system_for(model, scheme, min(batch, AT_A_TIME))  # the learner is measured, not an engine of any size
    engine, trainee = system.cast.engine, system.cast.learner
    assert isinstance(engine, NativeEngine) and isinstance(trainee, LocalLearner)
    engine.load(trainee.publish())
    group_size = min(8, batch)
    prompts = random_prompts(engine.decoder.vocab_size, -(-batch // group_size), prompt_len)
    sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, stop_token_ids=())
    groups = engine.generate(prompts, group_size, sampling, seed=(0, 0))
    advantages = [torch.linspace(-1, 1, group_size) for _ in groups]

    def update() -> None:
        fresh = [_as_version(group, trainee.version) for group in groups]
        trainee.update(fresh, advantages)

    def publish() -> None:
        engine.load(trainee.publish())  # else the engine would keep a version that a run has forgotten

    found, _ = timing.repeated_seconds(update, publish, what="learner", repeats=repeats)
    seconds = statistics.median(found)
    micros = micro_batches(shares_of(groups, advantages), trainee.config.micro_batch_tokens)
    packed = sum(len(micro.token_ids_T) for micro in micros)
    trained = len(prompts) * group_size * new_tokens
    sizes = (engine.decoder.config, engine.decoder.vocab_size)
    operations = update_operations(*sizes, packed, trained, trainee.config.activation_checkpointing)
    peak = measured_peak(scheme)
    return {
        "update_s": seconds,
        "trained_tokens_per_s": trained / seconds,
        "packed_tokens_per_s": packed / seconds,
        "roofline_fraction": operations / seconds / peak,
        "roofline_gops": peak / 1e9,
        "trained_tokens": trained,
        "packed_tokens": packed,
        "batch": len(prompts) * group_size,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "model": model,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": timing.peak_memory_bytes(),
        "median_of": repeats,
    }


def step(
    model: str,
    scheme: str,
    batch: int,
    group_size: int,
    prompt_len: int | None,
    new_tokens: int,
    alignment: str,
    kv_cache: KVFormat = "fp32",
    repeats: int | None = None,
) -> dict[str, Any]:
    """Seconds of whole training steps and their parts: `batch` completions in groups of `group_size`.

    Prompts are one-digit sums with the chat template and completions may stop early, as in the quickstart; with
    `prompt_len` they are that many random tokens and nothing stops early.
    """
    if batch % group_size:
        raise ConfigurationError(
            f"command line: --batch {batch} is not a multiple of --group-size {group_size}; a step trains whole groups"
        )
    repeats = repeats or timing.REPEATS
    options = {"group_size": group_size, "new_tokens": new_tokens}
    system = system_for(model, scheme, batch, **options, alignment=alignment, kv_cache=kv_cache)
    engine, trainee = system.cast.engine, system.cast.learner
    engine.load(trainee.publish())
    parts: list[dict[str, float]] = []
    tokens: list[int] = []
    for index in range(repeats + 1):
        clock = Stopwatch()
        tokens.append(_one_step(system, clock, index, prompt_len, new_tokens))
        parts.append({name: metric.value() for name, metric in clock.metrics().items()})
        timing.say(f"step {index}: {parts[-1]['time/step']:.2f} s")
    return {
        **{f"{name}_s": statistics.median(part[f"time/{name}"] for part in parts[1:]) for name in PARTS},
        "tokens": int(statistics.median(tokens[1:])),
        "batch": batch,
        "group_size": group_size,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "alignment": alignment,
        "kv_cache": kv_cache,
        "model": model,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": timing.peak_memory_bytes(),
        "median_of": repeats,
    }


def _one_step(system: System, clock: Stopwatch, index: int, prompt_len: int | None, new_tokens: int) -> int:
    """The loop's step, timed by parts; returns how many tokens were sampled."""
    cast, plan = system.cast, system.plan
    assert isinstance(cast.engine, NativeEngine)
    prompts, sampling = cast.prompts.take(index, plan.prompts_per_step), plan.sampling
    if prompt_len is not None:
        prompts = random_prompts(cast.engine.decoder.vocab_size, len(prompts), prompt_len)
        sampling = Sampling(sampling.temperature, new_tokens, ())
    with clock.lap("rollout"):
        groups = cast.engine.generate(prompts, plan.group_size, sampling, seed=(plan.seed, index))
    with clock.lap("reward"):
        rewards = cast.reward(groups) if prompt_len is None else []
    with clock.lap("learner"):
        random = [torch.linspace(-1, 1, plan.group_size) for _ in groups]
        advantages = cast.advantage([group.total for group in rewards]) if rewards else random
        cast.learner.update(groups, advantages)
    with clock.lap("publish"):
        cast.engine.load(cast.learner.publish())
    return sum(len(completion) for group in groups for completion in group.completions)


def _as_version(group: Group, version: int) -> Group:
    """The same group as if the current weights had sampled it."""
    fresh = (replace(c, versions=torch.full_like(c.versions, version)) for c in group.completions)
    return Group(group.prompt, tuple(fresh))
