"""`qarl align`: sample with the engine, score the same tokens with the learner, and say how far they disagree.

A second pass runs the engine's decode path over the sampled tokens and compares hidden states layer by layer, so
that a disagreement points at its layer. Shape letters: B sequences, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qarl.build import System, build
from qarl.learner.batch import MicroBatch, Sample, Share, micro_batches
from qarl.learner.learner import LocalLearner
from qarl.learner.mismatch import mismatch_metrics
from qarl.metrics import Metrics, merge, values
from qarl.models.decoder import Decoder
from qarl.ops.device import moved
from qarl.ops.head import logits
from qarl.ops.kernels import kernels
from qarl.recipe import parse_recipe
from qarl.records import Completion, Group, Sampling
from qarl.rollout.native import NativeEngine, Rollout
from qarl.rollout.request import Progress, Request, make_requests
from qarl.rollout.vllm.engine import VllmEngine
from qarl.runfolder import checkpoint_at
from qarl.trained import adapters_at

LENGTHS = (32, 128, 512)
"""Completion lengths that rounds of sampling take in turn; none stops early, so that all are reached."""

GROUPS, GROUP_SIZE = 4, 4
"""Prompts of a round, and completions of each: prompts are shared, batches are mixed."""


@dataclass(slots=True)
class LayerGap:
    """How far one layer's outputs are apart over the compared tokens."""

    max_abs: float = 0.0
    equal: int = 0
    elements: int = 0
    squares_apart: float = 0.0
    squares: float = 0.0

    def add(self, engine_BD: Tensor, learner_BD: Tensor) -> None:
        apart = engine_BD - learner_BD
        self.max_abs = max(self.max_abs, float(apart.abs().max()))
        self.equal += int((engine_BD == learner_BD).sum())
        self.elements += engine_BD.numel()
        self.squares_apart += float(apart.double().square().sum())
        self.squares += float(learner_BD.double().square().sum())

    def report(self, layer: int) -> dict[str, Any]:
        """A row of `per_layer`; `relative_error` is the difference's 2-norm over that of the learner's outputs."""
        return {
            "layer": layer,
            "max_abs_diff": self.max_abs,
            "bit_equal_fraction": self.equal / self.elements if self.elements else 1.0,
            "relative_error": math.sqrt(self.squares_apart / self.squares) if self.squares else 0.0,
        }


@dataclass(slots=True)
class Findings:
    """What was measured so far."""

    layers: list[LayerGap]
    tokens: int = 0
    argmax_flips: int = 0
    mismatch: list[Metrics] = field(default_factory=list)


def align(
    model: str,
    scheme: str,
    tokens: int,
    engine_config: Mapping[str, Any],
    alignment: str,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Compare at least `tokens` sampled tokens; returns the contract's keys, `per_layer` in the order of the layers.

    `engine_config` is a recipe's `engine`. `level` is what was measured: `exact` when every log-probability has the
    same bits, else `codes`; `none` where that alignment was asked for. A run with adapters is compared with them
    beside its base.
    """
    trained = adapters_at(Path(model))
    recipe = _recipe(model, scheme, engine_config, alignment)
    if trained is not None:
        recipe["model"] = trained.recipe.model
        recipe["learner"] |= trained.recipe.model_dump(include={"learner": {"lora", "optimizer"}})["learner"]
    system = build(parse_recipe(recipe, "command line"))
    engine, learner = system.cast.engine, system.cast.learner
    assert isinstance(engine, NativeEngine | VllmEngine) and isinstance(learner, LocalLearner)
    if trained is not None:
        learner.restore(checkpoint_at(Path(model)).folder)
    engine.load(learner.publish())
    findings = Findings([LayerGap() for _ in learner.decoder.layers])
    step = 0
    while findings.tokens < tokens:
        for group in _sample(system, LENGTHS[step % len(LENGTHS)], step, tokens - findings.tokens):
            _compare(engine, learner, group, findings)
            if progress is not None:
                progress(min(findings.tokens, tokens), tokens)
        step += 1
    return _report(findings, alignment)


def broken_promise(found: Mapping[str, Any]) -> str | None:
    """What to say when an answer of `align` falls short of what is promised, else None.

    Of our own engine: with the C kernels that is `exact`, unless `none` was asked for. Without them floating-point
    GEMMs may depend on the batch, and `codes` is the truth.
    """
    layers = [row["layer"] for row in found["per_layer"] if row["bit_equal_fraction"] < 1.0]
    is_exact = found["level"] == "exact"
    if not kernels().exact_matmul or found["level"] == "none" or (is_exact and not layers):
        return None
    place = f"layer {layers[0]} is the first to differ" if layers else "no layer differs, so the output head does"
    logprobs = (
        f"the log-probabilities of {found['tokens']} tokens are equal, but not the hidden states of the same tokens "
        "decoded again"
        if is_exact
        else f"alignment is {found['level']} where exact is promised: {1.0 - found['bit_equal_fraction']:.2%} of "
        f"{found['tokens']} tokens have another log-probability in the learner than in the engine, by up to "
        f"{found['max_abs_logprob_diff']:.3g}"
    )
    return f"{logprobs}; {place}. A fault of the kernels on this machine: please report it with what `qarl doctor` says"


def _recipe(model: str, scheme: str, engine_config: Mapping[str, Any], alignment: str) -> dict[str, Any]:
    is_native = engine_config["type"] == "native"
    return {
        "model": model,
        "scheme": scheme,
        "alignment": alignment,
        "group_size": GROUP_SIZE,
        "prompts": {"type": "arithmetic", "maximum": 999},
        "rewards": [{"type": "answer"}],
        "engine": dict(engine_config),
        "learner": {"micro_batch_tokens": 2 * GROUP_SIZE * LENGTHS[-1]},  # a group in one piece: it is replayed as one
        # Rounds set their own length: for our engine what any context has, while vLLM is told the longest.
        "sampling": {"max_new_tokens": LENGTHS[0 if is_native else -1]},
    }


def _sample(system: System, length: int, step: int, wanted: int) -> list[Group]:
    engine, learner = system.cast.engine, system.cast.learner
    assert isinstance(learner, LocalLearner)
    prompts = system.cast.prompts.take(step, GROUPS)
    room = learner.decoder.config.max_position_embeddings - max(len(p.token_ids) for p in prompts)
    length = min(length, room)
    needed = -(-wanted // (length * GROUP_SIZE))
    sampling = Sampling(temperature=1.0, max_new_tokens=length, stop_token_ids=())
    return engine.generate(prompts[:needed], GROUP_SIZE, sampling, seed=(0, step))


@torch.no_grad()
def _compare(engine: NativeEngine | VllmEngine, learner: LocalLearner, group: Group, findings: Findings) -> None:
    samples = tuple(Sample(completion, 0.0) for completion in group.completions)
    budget = learner.config.micro_batch_tokens
    for packed, share in _micro_batches(Share(group.prompt, samples), budget):
        micro = moved(packed, learner.decoder.device)
        with _layer_outputs(learner.decoder) as learner_layers:
            scored = learner.logprobs(micro)[0]
            outputs_LTD = list(learner_layers)
        findings.mismatch.append(mismatch_metrics(scored, micro.engine_BL[micro.mask_BL]))
        best = _argmax(learner.decoder, outputs_LTD[-1][micro.scored_rows_S], learner.config.head_chunk_tokens)
        completions = [sample.completion for sample in share.samples]
        if isinstance(engine, VllmEngine):
            _compare_vllm(engine, share, completions, outputs_LTD, micro, best, findings)
        else:
            _Replay(engine, share, completions, outputs_LTD, micro, best, findings).run()
        findings.tokens += len(micro.targets_S)


def _micro_batches(share: Share, budget: int) -> list[tuple[MicroBatch, Share]]:
    """One micro-batch per sample that does not fit with its siblings, each with the samples it holds."""
    found: list[tuple[MicroBatch, Share]] = []
    rest = list(share.samples)
    for micro in micro_batches([share], budget):
        count = len(micro.advantages_B)
        found.append((micro, Share(share.prompt, tuple(rest[:count]))))
        rest = rest[count:]
    return found


def _argmax(decoder: Decoder, hidden_TD: Tensor, chunk: int) -> Tensor:
    return torch.cat([logits(decoder.head(), rows).argmax(-1) for rows in hidden_TD.split(chunk)])


@contextmanager
def _layer_outputs(decoder: Decoder) -> Iterator[list[Tensor]]:
    """Every layer's output of the forward passes inside the block; of the newest pass only."""
    outputs: list[Tensor] = []

    def keep(layer: torch.nn.Module, _: Any, output: Tensor) -> None:
        if layer is decoder.layers[0]:
            outputs.clear()
        outputs.append(output.clone())  # an engine's output lasts until the layer after the next

    handles = [layer.register_forward_hook(keep) for layer in decoder.layers]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


def _compare_vllm(
    engine: VllmEngine,
    share: Share,
    completions: Sequence[Completion],
    learner_LTD: Sequence[Tensor],
    micro: MicroBatch,
    learner_argmax_S: Tensor,
    findings: Findings,
) -> None:
    """Let vLLM compute every completion again with its prompt, in one forward, and compare what its layers give."""
    counts, prompt = [len(completion) for completion in completions], share.prompt.token_ids
    for completion, rows, best in zip(
        completions, micro.scored_rows_S.split(counts), learner_argmax_S.split(counts), strict=True
    ):
        engine_LTD, engine_best_T = engine.layer_outputs([*prompt, *completion.token_ids[:-1].tolist()])
        scored = slice(len(prompt) - 1, None)
        for gap, engine_TD, learner_TD in zip(findings.layers, engine_LTD, learner_LTD, strict=True):
            gap.add(engine_TD[scored], learner_TD[rows])
        findings.argmax_flips += int((engine_best_T[scored] != best).sum())


class _Replay(Rollout):
    """The engine's own decode steps over tokens already sampled, compared with what the learner computed for them."""

    def __init__(
        self,
        engine: NativeEngine,
        share: Share,
        completions: Sequence[Completion],
        learner_LTD: Sequence[Tensor],
        micro: MicroBatch,
        learner_argmax_S: Tensor,
        findings: Findings,
    ) -> None:
        longest = max(len(completion) for completion in completions)
        sampling = Sampling(temperature=1.0, max_new_tokens=longest, stop_token_ids=())
        cache = engine.cache_for([share.prompt], len(completions), sampling)
        super().__init__(engine, sampling, len(completions), cache, len(share.prompt.token_ids) + longest)
        self.forward.allows_graphs = False  # a graph does not say what its layers give
        self.share = share
        self.completions = completions
        self.learner_LTD = learner_LTD
        self.findings = findings
        counts = [len(completion) for completion in completions]
        self.rows = micro.scored_rows_S.split(counts)
        self.learner_argmax = learner_argmax_S.split(counts)
        self.engine_LBD: list[Tensor] = []

    def run(self) -> None:
        requests = make_requests([self.share.prompt], len(self.completions), seed=(0,))
        with _layer_outputs(self.decoder) as self.engine_LBD:
            self.all(requests)

    def _sample(self, requests: Sequence[Request], logits_BV: Tensor) -> None:
        """Take the tokens that were sampled before; every request is at the same time step."""
        times = [len(request.token_ids) for request in requests]
        rows = torch.stack([self.rows[r.index][t] for r, t in zip(requests, times, strict=True)])
        if times[0] > 0:  # the first token comes from the prompt's forward, whose rows are laid out otherwise
            for gap, engine_BD, learner_TD in zip(self.findings.layers, self.engine_LBD, self.learner_LTD, strict=True):
                gap.add(engine_BD, learner_TD[rows])
        best = logits_BV.argmax(-1)
        theirs = torch.stack([self.learner_argmax[r.index][t] for r, t in zip(requests, times, strict=True)])
        self.findings.argmax_flips += int((best != theirs).sum())
        for request, t in zip(requests, times, strict=True):
            completion = self.completions[request.index]
            token, logprob = int(completion.token_ids[t]), float(completion.engine_logprobs[t])
            request.take(token, logprob, (), len(completion))


def _report(findings: Findings, alignment: str) -> dict[str, Any]:
    measured = values(merge(findings.mismatch))
    equal = measured["mismatch/bit_equal"]
    return {
        "level": "none" if alignment == "none" else "exact" if equal == 1.0 else "codes",
        "tokens": findings.tokens,
        "max_abs_logprob_diff": measured["mismatch/max_abs"],
        "mean_abs_logprob_diff": measured["mismatch/mean_abs"],
        "k3_kl": measured["mismatch/k3"],
        "bit_equal_fraction": equal,
        "argmax_flips": findings.argmax_flips,
        "per_layer": [gap.report(layer) for layer, gap in enumerate(findings.layers)],
    }
