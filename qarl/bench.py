"""`qarl bench`: how fast this machine rolls out, learns, and makes whole steps; medians, next to a measured roofline.

Operations are counted as in the field: a multiply-add is two. Shape letters: T rows, K in, N out.
"""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from qarl.build import System, build
from qarl.errors import ConfigurationError
from qarl.learner.learner import LocalLearner
from qarl.loop import Stopwatch
from qarl.models.config import ModelConfig
from qarl.ops.kernels import kernels as active_kernels
from qarl.recipe import parse_recipe
from qarl.records import Group, Prompt, Sampling
from qarl.rollout.native import NativeEngine

REPEATS = 5
"""Timed repetitions; one more before them warms caches and builds kernels."""

BEST_OF_SECONDS = 0.3
"""How long calls of one GEMM are repeated to find the fastest."""

PARTS = ("step", "rollout", "reward", "learner", "publish")
"""What is timed of a step."""

PEAK_SIZES = ((256, 576, 1536), (2048, 576, 1536), (512, 2048, 2048), (1024, 4096, 4096))
"""(M, K, N) of GEMMs among which a machine's best rate is looked for."""


def rollout(model: str, scheme: str, batch: int, prompt_len: int, new_tokens: int) -> dict[str, Any]:
    """Tokens a second of the engine: `batch` different prompts of `prompt_len` random tokens, none stopping early."""
    system = _system(model, scheme, batch)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    prompts = _random_prompts(engine.decoder.vocab_size, batch, prompt_len)
    sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, stop_token_ids=())
    seconds = _median_seconds(lambda: engine.generate(prompts, 1, sampling, seed=(0, 0)), "rollout")
    body, head = gemm_operations(engine.decoder.config, engine.decoder.vocab_size)
    operations = batch * ((prompt_len + new_tokens - 1) * body + new_tokens * head)
    peak = measured_peak(scheme)
    return {
        "tokens_per_s": batch * new_tokens / seconds,
        "roofline_fraction": operations / seconds / peak,
        "roofline_gops": peak / 1e9,
        "seconds": seconds,
        "batch": batch,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "model": model,
        "threads": torch.get_num_threads(),
        "median_of": REPEATS,
    }


def learner(model: str, scheme: str, batch: int, prompt_len: int, new_tokens: int) -> dict[str, Any]:
    """Seconds of one update on `batch` completions (groups of 8, as a run has them), and of its forward pass alone."""
    system = _system(model, scheme, batch)
    engine, trainee = system.cast.engine, system.cast.learner
    assert isinstance(engine, NativeEngine) and isinstance(trainee, LocalLearner)
    engine.load(trainee.publish())
    group_size = min(8, batch)
    prompts = _random_prompts(engine.decoder.vocab_size, -(-batch // group_size), prompt_len)
    sampling = Sampling(temperature=1.0, max_new_tokens=new_tokens, stop_token_ids=())
    groups = engine.generate(prompts, group_size, sampling, seed=(0, 0))
    advantages = [torch.linspace(-1, 1, group_size) for _ in groups]

    def update() -> None:
        fresh = [_as_version(group, trainee.version) for group in groups]
        trainee.update(fresh, advantages)

    seconds = _median_seconds(update, "learner")
    trained = len(prompts) * group_size * new_tokens
    return {
        "update_s": seconds,
        "trained_tokens": trained,
        "packed_tokens": len(prompts) * (prompt_len + group_size * (new_tokens - 1)),
        "trained_tokens_per_s": trained / seconds,
        "batch": len(prompts) * group_size,
        "prompt_len": prompt_len,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "model": model,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": peak_memory_bytes(),
        "median_of": REPEATS,
    }


def step(
    model: str, scheme: str, batch: int, group_size: int, prompt_len: int | None, new_tokens: int, alignment: str
) -> dict[str, Any]:
    """Seconds of whole training steps and their parts: `batch` completions in groups of `group_size`.

    Prompts are one-digit sums with the chat template and completions may stop early, as in the quickstart; with
    `prompt_len` they are that many random tokens and nothing stops early.
    """
    if batch % group_size:
        raise ConfigurationError(
            f"command line: --batch {batch} is not a multiple of --group-size {group_size}; a step trains whole groups"
        )
    system = _system(model, scheme, batch, group_size, new_tokens, alignment)
    engine, trainee = system.cast.engine, system.cast.learner
    engine.load(trainee.publish())
    parts: list[dict[str, float]] = []
    tokens: list[int] = []
    for index in range(REPEATS + 1):
        clock = Stopwatch()
        tokens.append(_one_step(system, clock, index, prompt_len, new_tokens))
        parts.append({name: metric.value() for name, metric in clock.metrics().items()})
        _say(f"step {index}: {parts[-1]['time/step']:.2f} s")
    medians = {name: statistics.median(part[f"time/{name}"] for part in parts[1:]) for name in PARTS}
    return {
        "step_s": medians["step"],
        "rollout_s": medians["rollout"],
        "reward_s": medians["reward"],
        "learner_s": medians["learner"],
        "publish_s": medians["publish"],
        "tokens": int(statistics.median(tokens[1:])),
        "batch": batch,
        "group_size": group_size,
        "new_tokens": new_tokens,
        "scheme": scheme,
        "alignment": alignment,
        "model": model,
        "threads": torch.get_num_threads(),
        "peak_memory_bytes": peak_memory_bytes(),
        "median_of": REPEATS,
    }


def kernels(model: str, scheme: str, batch: int) -> dict[str, Any]:
    """GEMM rates at the model's sizes and `batch` rows: torch's integer GEMM, our fixed-order fp32 and torch's fp32."""
    system = _system(model, scheme, batch)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    rows = []
    for name, n, k in gemm_shapes(engine.decoder.config, engine.decoder.vocab_size):
        rows.append({"gemm": name, "m": batch, "k": k, "n": n} | _gemm_rates(batch, k, n))
    return {
        "kernels": active_kernels().name,
        "threads": torch.get_num_threads(),
        "int8_peak_gops": measured_peak("w8a8-int8") / 1e9,
        "fp32_peak_gops": measured_peak("none") / 1e9,
        "copy_gbytes_per_s": copy_bandwidth() / 1e9,
        "gemms": rows,
        "median_of": REPEATS,
    }


def gemm_shapes(config: ModelConfig, vocab_size: int) -> list[tuple[str, int, int]]:
    """(name, N, K) of the GEMMs of one layer and of the head."""
    hidden, dim = config.hidden_size, config.head_dim
    return [
        ("qkv", (config.num_heads + 2 * config.num_kv_heads) * dim, hidden),
        ("output", hidden, config.num_heads * dim),
        ("gate_up", 2 * config.intermediate_size, hidden),
        ("down", hidden, config.intermediate_size),
        ("head", vocab_size, hidden),
    ]


def gemm_operations(config: ModelConfig, vocab_size: int) -> tuple[int, int]:
    """Operations in GEMMs per token: of all layers, and of the head."""
    *layer, (_, head_n, head_k) = gemm_shapes(config, vocab_size)
    return 2 * config.num_layers * sum(n * k for _, n, k in layer), 2 * head_n * head_k


def measured_peak(scheme: str) -> float:
    """Best GEMM rate of this machine, in operations a second, over `PEAK_SIZES`: int8, or fp32 for scheme `none`."""
    gemm = _fp32_gemm if scheme == "none" else _int8_gemm
    return max(2 * m * k * n / _best_seconds(gemm(m, k, n)) for m, k, n in PEAK_SIZES)


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large copy."""
    source = torch.zeros(1 << 26)
    target = torch.empty_like(source)
    return 2 * 4 * source.numel() / _best_seconds(lambda: target.copy_(source))


def peak_memory_bytes() -> int:
    """Largest resident memory of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _system(
    model: str, scheme: str, batch: int, group_size: int = 1, new_tokens: int = 32, alignment: str = "auto"
) -> System:
    table = {
        "model": model,
        "scheme": scheme,
        "alignment": alignment,
        "prompts_per_step": batch // group_size,
        "group_size": group_size,
        "prompts": {"type": "arithmetic"},
        "rewards": [{"type": "answer"}],
        "advantage": {"type": "group_std" if group_size > 1 else "none"},
        "sampling": {"max_new_tokens": new_tokens},
        "engine": {"type": "native", "max_concurrency": batch, "kv_bytes": 4 << 30},
        "learner": {"lr": 1e-6},
    }
    return build(parse_recipe(table, "command line"))


def _one_step(system: System, clock: Stopwatch, index: int, prompt_len: int | None, new_tokens: int) -> int:
    """The loop's step, timed by parts; returns how many tokens were sampled."""
    cast, plan = system.cast, system.plan
    assert isinstance(cast.engine, NativeEngine)
    prompts, sampling = cast.prompts.take(index, plan.prompts_per_step), plan.sampling
    if prompt_len is not None:
        prompts = _random_prompts(cast.engine.decoder.vocab_size, len(prompts), prompt_len)
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


def _random_prompts(vocab_size: int, count: int, length: int) -> list[Prompt]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (count, length), generator=generator)
    return [Prompt(f"random/{i}", tuple(row), "", {}) for i, row in enumerate(tokens.tolist())]


def _as_version(group: Group, version: int) -> Group:
    """The same group as if the current weights had sampled it."""
    fresh = (replace(c, versions=torch.full_like(c.versions, version)) for c in group.completions)
    return Group(group.prompt, tuple(fresh))


def _gemm_rates(m: int, k: int, n: int) -> dict[str, float]:
    gemms = {"int8": _int8_gemm, "fixed_order_fp32": _fixed_order_gemm, "torch_fp32": _fp32_gemm}
    return {f"{name}_gops": 2 * m * k * n / 1e9 / _best_seconds(gemm(m, k, n)) for name, gemm in gemms.items()}


def _int8_gemm(m: int, k: int, n: int) -> Callable[[], object]:
    codes = torch.randint(-127, 128, (m, k), dtype=torch.int8)
    weight_codes = torch.randint(-127, 128, (n, k), dtype=torch.int8).t()
    return lambda: torch._int_mm(codes, weight_codes)


def _fp32_gemm(m: int, k: int, n: int) -> Callable[[], object]:
    x, weight = torch.randn(m, k), torch.randn(n, k)
    return lambda: x @ weight.t()


def _fixed_order_gemm(m: int, k: int, n: int) -> Callable[[], object]:
    x, packed = torch.randn(m, k), active_kernels().pack(torch.randn(n, k))
    return lambda: active_kernels().matmul(x, packed, n, None, None)


def _median_seconds(work: Callable[[], object], what: str) -> float:
    seconds = []
    for index in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
        _say(f"{what} {index}: {seconds[-1]:.3f} s" + (" (warm-up)" if index == 0 else ""))
    return statistics.median(seconds[1:])


def _best_seconds(work: Callable[[], object]) -> float:
    """The fastest of some calls: for a roofline, noise only slows."""
    work()
    best = float("inf")
    deadline = time.perf_counter() + BEST_OF_SECONDS
    while time.perf_counter() < deadline:
        started = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - started)
    return best


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
