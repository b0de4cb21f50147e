"""What every operation that engine and learner share must hold; a new one is refused until it is in the table.

The law: the bits of a row do not depend on its batch nor on the number of threads. And its counterpart: one last
bit of any operation, changed in the engine alone, ends the agreement of engine and learner, so a check of that
agreement can fail.
"""

from __future__ import annotations

import importlib
import inspect
import math
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from qarl import ops
from qarl.align import align, broken_promise
from qarl.cli import run_command
from qarl.learner.batch import Sample, Share, pack
from qarl.learner.config import LearnerConfig
from qarl.learner.learner import score
from qarl.models.decoder import Decoder
from qarl.models.lora import LoraConfig, new_adapters
from qarl.models.names import TINY_CONFIG
from qarl.ops import attention, embedding, head, library, linear
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import using
from qarl.ops.reference import ReferenceKernels, Scores, Spans
from qarl.quant import E4M3, QuantConfig, Quantizer, plan_schemes, quantize_activations, scheme_named
from qarl.quant.scales import PerGroup, PerRow
from qarl.records import Group, Lora, Prompt, Sampling
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.native import NativeEngine, Rollout
from qarl.sync.adapters import adapters_of, take_adapters
from qarl.sync.snapshot import operands_of, take_snapshot

ROWS, WIDTH, OUT = 30, 600, 1100
"""Wide enough that every kernel divides its work among threads, and no multiple of a vector or a panel."""
HEADS, KV_HEADS, DIM, STORE = 6, 2, 40, 64

Operation = Callable[[ReferenceKernels, Tensor], tuple[Tensor, ...]]
"""Computes the given rows of a fixed batch of `ROWS`; each output has one row for each."""


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    loaded = library.load()
    if loaded is None:
        pytest.skip(f"no C kernels here: {library.built().reason}")
    return CpuKernels(loaded)


@pytest.fixture(scope="module", params=["cpu", pytest.param("triton", marks=pytest.mark.triton)])
def exact(request: pytest.FixtureRequest) -> ReferenceKernels:
    """Every implementation that promises bits."""
    found: ReferenceKernels = request.getfixturevalue("cpu" if request.param == "cpu" else "triton_kernels")
    return found


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)


X, GATE_UP, LOGITS = normal(ROWS, WIDTH), normal(ROWS, 2 * WIDTH) * 3, normal(ROWS, OUT) * 3
X4 = normal(ROWS, 128, seed=6)
WEIGHT_NIBBLES = (normal(OUT, 128, seed=7) * 3).round().clamp(-7, 7).to(torch.int8)
GROUP_SCALES = normal(OUT, 4, seed=8).abs() * 1e-2
X8, WEIGHT8 = normal(ROWS, 256, seed=6), normal(OUT, 256, seed=7)
GAIN, BIAS, RESIDUAL = normal(WIDTH, seed=1), normal(OUT, seed=2), normal(ROWS, OUT, seed=3)
ROW_SCALES, COLUMN_SCALES = normal(ROWS, seed=4).abs() * 1e-2, normal(OUT, seed=5).abs() * 1e-2
CODES, WEIGHT_CODES, WEIGHT = codes(ROWS, WIDTH), codes(OUT, WIDTH, seed=1), normal(OUT, WIDTH, seed=6)
ACCUMULATOR = (CODES.long() @ WEIGHT_CODES.long().t()).int()
TARGETS, UNIFORMS = torch.arange(ROWS) * 7, (torch.arange(ROWS) + 0.5) / ROWS
ANGLES = normal(200, DIM // 2, seed=7)
QKV = normal(ROWS, (HEADS + 2 * KV_HEADS) * DIM, seed=8)
GAINS = (normal(DIM, seed=9), normal(DIM, seed=10))
RANK = 5
LOW_RANK_A, LOW_RANK_B = normal(2 * RANK, WIDTH, seed=12), normal(55, RANK, seed=13)
QUERIES, KEYS, VALUES = (
    normal(n, h, DIM, seed=11 + n) for n, h in ((ROWS, HEADS), (STORE, KV_HEADS), (STORE, KV_HEADS))
)


def prefix_and_two_suffixes(rows: Tensor) -> Spans:
    """Queries 0 to 9 are a prompt; 10 to 19 and 20 to 29 continue it, the second in two pieces."""
    tensors = ([0, 1, 3, 6], [0, 0, 20, 0, 50, 33], [10, 10, 10, 10, 4, 6])
    pointers, starts, lengths = map(torch.tensor, tensors)
    sequences = torch.arange(ROWS) // 10
    visible = torch.cat([torch.arange(1, 11), torch.arange(11, 21), torch.arange(11, 21)])
    whole = torch.tensor([0, len(rows)])
    return Spans(sequences[rows], visible[rows], pointers, starts, lengths, whole, int(visible[rows].max()))


def split_rotate(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    keys, values = (torch.zeros(len(rows), KV_HEADS, DIM) for _ in range(2))
    slots = torch.arange(len(rows)).flip(0)
    q = k.split_rotate(QKV[rows], rows * 6, slots, ANGLES.cos(), ANGLES.sin(), GAINS, 1e-6, HEADS, keys, values)
    return q, keys.flip(0), values.flip(0)


def integer_matmul(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    """With 8-bit codes and, their scales smaller by as much, with 16-bit ones."""
    found = []
    for dtype, factor in ((torch.int8, 1), (torch.int16, 16)):
        weight = k.pack_codes(WEIGHT_CODES.to(dtype) * factor)
        codes, scales = CODES[rows].to(dtype) * factor, ROW_SCALES[rows] / factor**2
        found.append(k.integer_matmul(codes, scales, weight, COLUMN_SCALES, BIAS, RESIDUAL[rows]))
    return tuple(found)


def add_low_rank(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    """Two siblings of three, of no whole panels."""
    table = torch.tensor([[0, 21, 0], [OUT - 34, 34, RANK]])
    b = torch.cat([k.pack(LOW_RANK_B[:21]), k.pack(LOW_RANK_B[21:])])
    return (k.add_low_rank_(RESIDUAL[rows].clone(), X[rows], k.pack(LOW_RANK_A), b, table),)


def fp8_matmul(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    """With one scale a row, and with one for each group of 128."""
    found = []
    for granularity in (PerRow(), PerGroup(128)):
        quantizer = Quantizer(E4M3, granularity)
        x, weight = (quantize_activations(x, quantizer) for x in (X8[rows], WEIGHT8))
        found.append(k.fp8_matmul(*x, *weight, BIAS, RESIDUAL[rows]))
    return tuple(found)


def token_logprobs(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    scores = k.token_logprobs(LOGITS[rows], TARGETS[rows], 1 / 0.7)
    return scores.logprobs, scores.shifts, scores.sums, scores.entropies


def logits_gradient(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    scores = k.token_logprobs(LOGITS[rows], TARGETS[rows], 1 / 0.7)
    grads = (X[rows, 0].contiguous(), X[rows, 1].contiguous())
    return (k.logits_gradient_(LOGITS[rows], TARGETS[rows], scores, *grads, 1 / 0.7),)


def split_rotate_backward(k: ReferenceKernels, rows: Tensor) -> tuple[Tensor, ...]:
    grads = (QUERIES[rows], KEYS[rows], VALUES[rows])
    return (k.split_rotate_backward(*grads, rows * 6, ANGLES.cos(), ANGLES.sin()),)


ROWWISE: dict[str, Operation] = {
    "rms_norm": lambda k, rows: (k.rms_norm(X[rows], GAIN, 1e-6),),
    "rms_norm_quantize": lambda k, rows: k.rms_norm_quantize(X[rows], GAIN, 1e-6),
    "quantize_rows": lambda k, rows: k.quantize_rows(X[rows]),
    "gated": lambda k, rows: (k.gated(GATE_UP[rows]),),
    "gated_quantize": lambda k, rows: k.gated_quantize(GATE_UP[rows]),
    "rms_norm_backward": lambda k, rows: k.rms_norm_backward(GATE_UP[rows, :WIDTH], X[rows], GAIN, 1e-6)[:1],
    "gated_backward": lambda k, rows: (k.gated_backward(X[rows], GATE_UP[rows]),),
    "integer_matmul": integer_matmul,
    "dequantize": lambda k, rows: (
        k.dequantize(ACCUMULATOR[rows], ROW_SCALES[rows], COLUMN_SCALES, BIAS, RESIDUAL[rows]),
    ),
    "matmul": lambda k, rows: (k.matmul(X[rows], k.pack(WEIGHT), OUT, BIAS, RESIDUAL[rows]),),
    "matmul_int4": lambda k, rows: (
        k.matmul_int4(X4[rows], k.pack_int4(WEIGHT_NIBBLES, GROUP_SCALES), BIAS, RESIDUAL[rows]),
    ),
    "add_low_rank_": add_low_rank,
    "fp8_matmul": fp8_matmul,
    "split_rotate": split_rotate,
    "split_rotate_backward": split_rotate_backward,
    "attention": lambda k, rows: k.attention(QUERIES[rows], KEYS, VALUES, prefix_and_two_suffixes(rows), 0.3),
    "token_logprobs": token_logprobs,
    "logits_gradient_": logits_gradient,
    "sample": lambda k, rows: k.sample(LOGITS[rows], UNIFORMS[rows], 1 / 0.7),
}
NO_ROWS = {
    "chunk_sums": "whole numbers, of weights",
    "pack": "lays out a weight",
    "pack_codes": "lays out a weight",
    "pack_int4": "lays out a weight",
    "unpack": "lays out a weight",
    "unpack_codes": "lays out a weight",
    "unpack_int4": "lays out a weight",
    "dense_int4": "expands a weight",
    "changed_codes": "whole numbers, of weights",
    "changed_int4": "whole numbers, of weights",
    "attention_backward": "sums over queries; the engine has no gradient",
    "grad_rows": "the engine has no gradient",
    "add_grad_weight": "the engine has no gradient",
}
every_operation = pytest.mark.parametrize("name", ROWWISE)
ALL = torch.arange(ROWS)


def test_every_operation_is_in_the_table():
    public = {name for name, _ in inspect.getmembers(ReferenceKernels, inspect.isfunction) if not name.startswith("_")}
    assert public == set(ROWWISE) | set(NO_ROWS)
    assert not set(ROWWISE) & set(NO_ROWS)


@every_operation
def test_a_rows_bits_do_not_depend_on_its_batch(exact: ReferenceKernels, name):
    whole = ROWWISE[name](exact, ALL)
    assert all(len(output) == ROWS for output in whole)
    batches = [ALL.flip(0), ALL[3::7], torch.tensor([29, 0, 29, 13]), ALL[:1], ALL[29:], ALL[:17]]
    if exact.name == "cpu" or torch.cuda.is_available():  # the interpreter has not the time
        batches += [ALL[i : i + 1] for i in range(ROWS)] + [ALL[:size] for size in range(2, ROWS)]
    for rows in batches:
        for part, output in zip(ROWWISE[name](exact, rows), whole, strict=True):
            assert torch.equal(part, output[rows]), f"rows {rows.tolist()}"


@every_operation
def test_a_rows_bits_do_not_depend_on_the_number_of_threads(cpu: CpuKernels, name):
    one = ROWWISE[name](cpu, ALL)
    torch.set_num_threads(2)
    two = ROWWISE[name](cpu, ALL)
    assert cpu.library.omp_get_max_threads() == 2
    assert all(map(torch.equal, one, two))


def test_the_gradient_of_attention_does_not_depend_on_the_number_of_threads(cpu: CpuKernels):
    spans = replace(prefix_and_two_suffixes(ALL), families=torch.tensor([0, ROWS]))
    out, lse = cpu.attention(QUERIES, KEYS, VALUES, spans, 0.3)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(cpu.attention_backward(out, QUERIES, KEYS, VALUES, out, lse, spans, 0.3))
    assert all(map(torch.equal, *found))


@every_operation
def test_the_kernel_computes_what_the_reference_defines(exact: ReferenceKernels, name):
    for found, defined in zip(ROWWISE[name](exact, ALL), ROWWISE[name](ReferenceKernels(), ALL), strict=True):
        assert found.dtype == defined.dtype
        # A value at the edge between two codes may fall to either side, one code off.
        off = {"atol": 1, "rtol": 0} if found.dtype == torch.int8 else {"atol": 2e-4, "rtol": 1e-5}
        torch.testing.assert_close(found, defined, **off)
        assert found.double().std() > 1e-3


GRADIENTS = {
    embedding._Embed: "test_embedding.py: test_rows_and_gradient_are_those_of_torch",
    linear._Project: "test_linear.py: test_value_and_gradients_are_those_of_the_straight_through_formula",
    attention._SplitRotate: "test_attention.py: test_split_rotate_has_the_value_and_gradients_of_its_formula",
    attention._Attention: "test_attention.py: test_attention_has_the_value_and_gradients_of_masked_softmax",
    head._TokenLogprobs: "test_head.py: test_value_and_gradients_are_those_of_log_softmax",
}
"""Everything with a gradient of our own, and where it is compared with float64 autograd."""


def test_every_gradient_is_compared_with_float64():
    modules = [
        importlib.import_module(f"{ops.__name__}.{module.name}") for module in pkgutil.iter_modules(ops.__path__)
    ]
    classes = {found for module in modules for _, found in inspect.getmembers(module, inspect.isclass)}
    assert {found for found in classes if issubclass(found, Function)} - {Function} == set(GRADIENTS)
    for place in GRADIENTS.values():
        file, test = place.split(": ")
        assert f"\ndef {test}(" in (Path(__file__).parents[1] / "ops" / file).read_text()


# ------------------------------------------------------------------------------------- one last bit, engine only

CONFIG = replace(TINY_CONFIG, family="qwen3", qk_norm=True)
PROMPTS = [Prompt(str(i), tuple(range(3 + i, 40 + 9 * i, 4)), "", {}) for i in range(2)]


class LastBit(CpuKernels):
    """The kernels, but in one operation every number that comes out is the next one up."""

    def __init__(self, kernels: CpuKernels, operation: str) -> None:
        super().__init__(kernels.library)
        self.integer_level = kernels.integer_level
        self.calls = 0
        exact: Callable[..., Any] = getattr(kernels, operation)

        def nudged(*args: Any) -> Any:
            self.calls += 1
            result = exact(*args)
            output = main_output(result)
            output.copy_(torch.nextafter(output, torch.tensor(math.inf)))
            return result

        setattr(self, operation, nudged)


def main_output(result: Tensor | Scores | tuple[Tensor, Tensor]) -> Tensor:
    """The output proper; of codes and scales the scales, of tokens and log-probabilities the latter."""
    if isinstance(result, Scores):
        return result.logprobs
    return result if isinstance(result, Tensor) else next(part for part in result if part.is_floating_point())


def rollout_and_score(
    scheme: str, temperature: float, engine_kernels: ReferenceKernels, has_adapters: bool = False
) -> tuple[Tensor, Tensor]:
    """The engine's log-probabilities of what it samples with these kernels, and the learner's of the same tokens."""
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 1.0)
    plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig())
    snapshot = take_snapshot(decoder, plan.quantized, version=0)
    decoder.serve(operands_of(decoder, snapshot))
    if has_adapters:
        adapters = new_adapters(decoder, LoraConfig(rank=4, alpha=1.0), seed=0)
        for adapter in adapters.values():
            adapter.b.normal_()
        snapshot = take_adapters(adapters, Lora(snapshot, 4, 1.0), version=0)
        decoder.adapt(adapters_of(decoder, snapshot))
    engine = NativeEngine(NativeEngineConfig(max_concurrency=3), CONFIG, CONFIG.vocab_size, decode=str)
    engine.load(snapshot)
    with using(engine_kernels):
        groups = engine.generate(PROMPTS, 2, Sampling(temperature, max_new_tokens=6), (0,))
    return scored(decoder, groups, temperature or 1.0)


def scored(decoder: Decoder, groups: list[Group], temperature: float) -> tuple[Tensor, Tensor]:
    shares = [Share(group.prompt, tuple(Sample(c, 1.0) for c in group.completions)) for group in groups]
    micro = pack(shares)
    with torch.no_grad():
        found = score(decoder, micro, temperature, LearnerConfig(), False)
    return micro.engine_BL[micro.mask_BL], found[0]


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w12a12-int12"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_and_learner_agree_to_the_bit(cpu: CpuKernels, scheme, temperature):
    with using(cpu):
        engine, learner = rollout_and_score(scheme, temperature, cpu)
    assert len(engine) == 24
    assert torch.equal(engine, learner)


SERVED_BY = {
    "rms_norm": "none",
    "gated": "none",
    "matmul": "none",
    "matmul_int4": "w4a16",
    "split_rotate": "none",
    "attention": "none",
    "sample": "none",
    "token_logprobs": "none",
    "rms_norm_quantize": "w8a8-int8",
    "quantize_rows": "w8a8-int8",
    "gated_quantize": "w8a8-int8",
    "integer_matmul": "w8a8-int8",
    "add_low_rank_": "w8a8-int8",
}
"""Every operation of the engine, and a scheme whose forward calls it."""


def test_every_operation_of_the_engine_is_tried():
    elsewhere = {
        "logits_gradient_": "the backward pass",
        "split_rotate_backward": "the backward pass",
        "rms_norm_backward": "the backward pass",
        "gated_backward": "the backward pass",
        "dequantize": "the end of an integer product, a part of its kernel",
        "fp8_matmul": "GPUs alone; the C kernels multiply what the codes stand for",
    }
    assert set(SERVED_BY) == set(ROWWISE) - set(elsewhere)


@pytest.mark.parametrize(("name", "scheme"), SERVED_BY.items())
def test_one_last_bit_changed_in_the_engine_alone_is_seen(cpu: CpuKernels, name, scheme):
    changed = LastBit(cpu, name)
    with using(cpu):
        temperature = 0.0 if name == "token_logprobs" else 0.8
        engine, learner = rollout_and_score(scheme, temperature, changed, has_adapters=name == "add_low_rank_")
    assert changed.calls > 0
    assert not torch.equal(engine, learner)
    torch.testing.assert_close(engine, learner, rtol=0.1, atol=0.5)


@contextmanager
def engines_alone_use(kernels: ReferenceKernels) -> Iterator[None]:
    """What an engine generates or replays inside the block, it computes with these; learners keep theirs."""
    run = Rollout.all

    def run_with_them(rollout: Rollout, *arguments: Any) -> None:
        with using(kernels):
            run(rollout, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "all", run_with_them)
        yield


# The engine calls the one for greedy tokens alone, and `tiny` has none of the others.
@pytest.mark.parametrize("name", sorted(set(SERVED_BY) - {"token_logprobs", "add_low_rank_"}))
def test_qarl_align_fails_on_one_last_bit_of_the_engine_and_says_where(cpu: CpuKernels, name):
    with using(cpu), engines_alone_use(LastBit(cpu, name)):
        found = align("tiny", SERVED_BY[name], 100, {"type": "native", "kv_cache": "fp32"}, "auto")
        reason = broken_promise(found)
    assert found["level"] == "codes"
    assert found["bit_equal_fraction"] < 1.0 and found["max_abs_logprob_diff"] > 0.0
    place = "no layer differs, so the output head does" if name == "sample" else "layer 0 is the first to differ"
    assert reason is not None and place in reason


def test_a_run_on_such_an_engine_stops_before_it_trains(cpu: CpuKernels, tmp_path, capsys):
    smoke = str(Path(__file__).parents[2] / "recipes" / "smoke.toml")
    small = ["--steps=1", "--prompts_per_step=2", "--sampling.max_new_tokens=8", "--eval.count=1"]
    with using(cpu), engines_alone_use(LastBit(cpu, "integer_matmul")):
        assert run_command(["train", smoke, "--run-dir", str(tmp_path), *small]) == 1
    assert "version 0: engine and learner promise equal log-probabilities, but of " in capsys.readouterr().err
