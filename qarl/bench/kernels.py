"""`qarl bench kernels`: every kernel call of one decode step, timed where it happens.

The step is the engine's own graph, whose calls follow one another without Python between them, so that each finds in
the caches of the processor what it would find in a rollout. What each call is, a run of the same step through kernels
that describe their calls has told.
Shape letters: B sequences, V vocabulary, M rows, K in, N out.
"""

from __future__ import annotations

import inspect
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from qarl.bench import timing
from qarl.bench.operations import LAYER_GEMMS, touched_bytes
from qarl.bench.roofline import Arithmetic, best_gemm_rate, copy_bandwidth, gemm_rate, torch_fp32, torch_int8
from qarl.bench.system import system_for
from qarl.errors import ConfigurationError
from qarl.models.decoder import Decoder
from qarl.ops.graph import can_record
from qarl.ops.kernels import kernels as active_kernels
from qarl.ops.kernels import using
from qarl.ops.operand import FloatOperand, Operand
from qarl.ops.reference import KVCodes, KVStore, ReferenceKernels, Spans
from qarl.rollout.cache import PAGE, KVCache, KVFormat, bytes_per_token, pages_for
from qarl.rollout.forward import Forward, Inputs
from qarl.rollout.native import NativeEngine
from qarl.rollout.request import spans_of

GEMMS: dict[str, Arithmetic] = {"integer_matmul": "int8", "matmul": "fp32", "matmul_int4": "fp32"}
"""Which methods are GEMMs, and by which roofline they are measured."""


@dataclass(frozen=True, slots=True)
class Call:
    """One kernel call: the bytes it reads and writes and, of a GEMM, its sizes (M, K, N); equal calls are one row."""

    operation: str
    bytes: int
    gemm: tuple[int, int, int] | None = None
    arithmetic: Arithmetic | None = None


@dataclass(frozen=True, slots=True)
class Peaks:
    """What this machine can do at best, a second."""

    operations: Mapping[Arithmetic, float]
    copied_bytes: float


def kernels(model: str, scheme: str, batch: int, context: int, kv_cache: KVFormat = "fp32") -> dict[str, Any]:
    """Microseconds of each operation of one decode step of `batch` sequences that see `context` tokens each.

    Rates stand beside the best measured here: of GEMMs `gops` (a product of wider codes, as the head's, counts like one
    of 8 bits), of everything `gbytes_per_s` beside that of a large copy; more than that came out of caches.
    `step_ms` is the sum of the calls. `outside_ms` is what the step takes besides: writing its inputs, the embedding.
    ConfigurationError for a scheme that is not computed by the C kernels alone, or without them.
    """
    system = system_for(model, scheme, batch, kv_cache=kv_cache)
    engine = system.cast.engine
    assert isinstance(engine, NativeEngine)
    engine.load(system.cast.learner.publish())
    if not can_record() or not (step := DecodeStep(engine, batch, context)).forward.uses_graphs():
        raise ConfigurationError(
            f"command line: --scheme {scheme} is not computed by the C kernels alone here, so there are no calls to "
            "time; `qarl doctor` says which kernels there are, and which schemes have them"
        )
    calls = step.calls()
    samples = []
    for index in range(timing.REPEATS):
        samples.append(best_sample(step.nanoseconds, calls))
        timing.say(f"decode steps {index}: the best took {1e3 * samples[-1].total:.2f} ms")
    peaks = Peaks({"int8": best_gemm_rate("int8"), "fp32": best_gemm_rate("fp32")}, copy_bandwidth())
    seconds = {call: statistics.median(sample.seconds[call] for sample in samples) for call in samples[0].seconds}
    return {
        "step_ms": 1e3 * sum(seconds.values()),
        "outside_ms": 1e3 * statistics.median(sample.outside for sample in samples),
        "int8_peak_gops": peaks.operations["int8"] / 1e9,
        "fp32_peak_gops": peaks.operations["fp32"] / 1e9,
        "copy_gbytes_per_s": peaks.copied_bytes / 1e9,
        "batch": batch,
        "context": context,
        "scheme": scheme,
        "kv_cache": kv_cache,
        "model": model,
        "kernels": active_kernels().name,
        "threads": torch.get_num_threads(),
        "median_of": timing.REPEATS,
        "operations": rows_of(Counter(calls), seconds, peaks),
    }


class DecodeStep:
    """One more token for `batch` sequences over a cache full of random numbers.

    ConfigurationError where the model's context or the cache's budget does not hold them.
    """

    def __init__(self, engine: NativeEngine, batch: int, context: int) -> None:
        generator = torch.Generator().manual_seed(0)
        cache, slots_B, spans = full_cache(engine, batch, context, generator)
        tokens_B = torch.randint(0, engine.decoder.vocab_size, (batch,), generator=generator)
        self.inputs = Inputs(tokens_B, torch.full((batch,), context - 1), slots_B, spans)
        self.draws = torch.rand(batch, generator=generator)
        self.forward = Forward(engine.decoder, cache, context)

    def run(self) -> Tensor:
        """The tokens sampled [B]."""
        return active_kernels().sample(self.forward.logits(self.inputs), self.draws, 1.0)[0]

    def calls(self) -> list[Call]:
        """The kernel calls in their order, that of sampling last."""
        names = gemm_names(self.forward.decoder)
        described = DescribedKernels(active_kernels(), lambda *call: describe_call(names, *call))
        with using(cast(ReferenceKernels, described)):  # which are not recorded
            self.run()
        return described.calls

    def nanoseconds(self) -> tuple[list[int], int]:
        """How long each of the calls took in one step, and how long the step."""
        started = time.perf_counter_ns()
        logits_BV, of_calls = self.forward.timed_logits(self.inputs)
        sampling = time.perf_counter_ns()
        active_kernels().sample(logits_BV, self.draws, 1.0)
        done = time.perf_counter_ns()
        return [*of_calls, done - sampling], done - started


def full_cache(
    engine: NativeEngine, batch: int, context: int, generator: torch.Generator
) -> tuple[KVCache, Tensor, Spans]:
    """Keys and values of `batch` sequences of `context` tokens, and the rows [B] where the last of each is written."""
    config, kv, budget = engine.decoder.config, engine.config.kv_cache, engine.config.kv_bytes
    if context > config.max_position_embeddings:
        raise ConfigurationError(
            f"command line: --context {context} exceeds the model's context of {config.max_position_embeddings} tokens"
        )
    pages = batch * pages_for(context)
    if (needed := pages * PAGE * bytes_per_token(config, kv)) > budget:
        raise ConfigurationError(
            f"command line: --batch {batch} at --context {context} needs {needed} bytes of key/value cache, more than "
            f"{budget}; lower one of them"
        )
    cache = KVCache(config, pages, kv)
    for store in (*cache.keys, *cache.values):
        fill(store, generator)
    regions = [cache.reserve(context) for _ in range(batch)]
    slots = [region.next_rows(context)[-1] for region in regions]
    spans = spans_of([region.spans() for region in regions], [[context]] * batch)
    return cache, torch.tensor(slots), spans


def fill(store: KVStore, generator: torch.Generator) -> None:
    """Random numbers in [-1, 1]: memory that was never written would be one page of the system's, always at hand."""
    if isinstance(store, KVCodes):
        store.codes.random_(-127, 128, generator=generator)
        store.scales.fill_(1 / 127)
    else:
        store.uniform_(-1, 1, generator=generator)


class DescribedKernels:
    """Stands in for kernels: passes every call on, and notes what it was."""

    def __init__(self, inner: ReferenceKernels, describe: Callable[[str, Sequence[Any], Any], Call]) -> None:
        self.inner = inner
        self.describe = describe
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.inner, name)
        if not callable(inner):
            return inner

        def call(*arguments: Any) -> Any:
            result = inner(*arguments)
            self.calls.append(self.describe(name, arguments, result))
            return result

        return call


def gemm_names(decoder: Decoder) -> dict[int, str]:
    """Which GEMM a packed weight, told by its identity, belongs to."""
    assert decoder.head_operand is not None
    names = {id(_packed(decoder.head_operand)): "head"}
    for layer in decoder.layers:
        for name, projection in zip(LAYER_GEMMS, layer.projections(), strict=True):
            assert projection.operand is not None
            names[id(_packed(projection.operand))] = name
    return names


def describe_call(names: Mapping[int, str], method: str, arguments: Sequence[Any], result: Any) -> Call:
    """What a call of this method was."""
    given = inspect.signature(getattr(ReferenceKernels, method)).bind(None, *arguments).arguments
    count = touched_bytes(method, given, result)
    if method in GEMMS:
        (m, k), n = arguments[0].shape, result.shape[1]
        weight = given["packed" if method == "matmul" else "weight"]
        return Call(f"{names[id(weight)]} GEMM", count, (m, k, n), GEMMS[method])
    grid = given.get("grid")
    return Call(method if grid is None else f"{method} {grid.name}", count)


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of a step's calls of each kind, of the whole step and of its rest: of some steps the best of each."""

    seconds: Mapping[Call, float]
    total: float
    outside: float


def best_sample(step: Callable[[], tuple[Sequence[int], int]], calls: Sequence[Call]) -> Sample:
    """Steps for a while, each telling the nanoseconds of its calls and of itself."""
    best = dict.fromkeys(calls, float("inf"))
    total = outside = float("inf")

    def run() -> None:
        nonlocal total, outside
        of_calls, whole = step()
        found = dict.fromkeys(best, 0.0)
        for call, nanoseconds in zip(calls, of_calls, strict=True):
            found[call] += nanoseconds / 1e9
        best.update({call: min(best[call], found[call]) for call in best})
        total, outside = min(total, whole / 1e9), min(outside, (whole - sum(of_calls)) / 1e9)

    timing.best_seconds(run)
    return Sample(best, total, outside)


def rows_of(counts: Mapping[Call, int], seconds: Mapping[Call, float], peaks: Peaks) -> list[dict[str, Any]]:
    """The table: one row a kind of call, in the order of the step."""
    step = sum(seconds.values())
    rows = []
    for call, count in counts.items():
        each = seconds[call] / count
        row = {
            "operation": call.operation,
            "calls": count,
            "us_per_call": 1e6 * each,
            "step_fraction": seconds[call] / step,
            "gbytes_per_s": call.bytes / each / 1e9,
            "copy_fraction": call.bytes / each / peaks.copied_bytes,
        }
        rows.append(row | _gemm_columns(call, each, peaks))
    return rows


def _gemm_columns(call: Call, seconds: float, peaks: Peaks) -> dict[str, Any]:
    """What is known of GEMMs alone; None elsewhere, so that all rows have the same columns."""
    if call.gemm is None or call.arithmetic is None:
        return dict.fromkeys(("gops", "roofline_fraction", "torch_int8_gops", "torch_fp32_gops", "k", "n"))
    m, k, n = call.gemm
    rate = 2 * m * k * n / seconds
    return {
        "gops": rate / 1e9,
        "roofline_fraction": rate / peaks.operations[call.arithmetic],
        "torch_int8_gops": gemm_rate(torch_int8, m, k, n) / 1e9,
        "torch_fp32_gops": gemm_rate(torch_fp32, m, k, n) / 1e9,
        "k": k,
        "n": n,
    }


def _packed(operand: Operand) -> object:
    return operand.packed if isinstance(operand, FloatOperand) else operand.weight
