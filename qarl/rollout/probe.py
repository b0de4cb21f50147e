"""What decides the bits of a native engine's answers in this process; equal in two processes that are to agree."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from qarl import __version__
from qarl.models.decoder import Decoder
from qarl.models.names import TINY_CONFIG, random_weights
from qarl.ops import library
from qarl.ops.cpu import CpuKernels
from qarl.ops.kernels import kernels
from qarl.quant import QuantConfig, plan_schemes, scheme_named
from qarl.records import Prompt, Sampling
from qarl.rollout.config import NativeEngineConfig
from qarl.rollout.native import NativeEngine
from qarl.sync.snapshot import take_snapshot

PROMPTS = (5, 40)
"""Lengths: one that fits a block of attention and one that does not fill a page."""


def identity(config: NativeEngineConfig, scheme: str) -> dict[str, str]:
    """Versions, kernels and instructions in use, the compiled library's hash, and that of what a small engine samples.

    The last one is of tokens and log-probabilities, so that it also sees what nobody listed.
    """
    chosen = kernels()
    versions = {"qarl": __version__, "torch": torch.__version__, "kernels": chosen.name}
    if isinstance(chosen, CpuKernels):
        versions |= {
            "integer instructions": f"level {chosen.integer_level}",
            "vector width": f"{chosen.panel // 2} floats",
            "compiled kernels": _library_hash(),
        }
    return versions | {f"log-probabilities of a small model in {scheme}": _sampled(config, scheme)}


def differences(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What is not the same, in words."""
    names = dict.fromkeys((*ours, *theirs))
    return [
        f"{name}: {ours.get(name, 'none')} here, {theirs.get(name, 'none')} there"
        for name in names
        if ours.get(name) != theirs.get(name)
    ]


def _library_hash() -> str:
    path = library.built().path
    assert path is not None, "compiled kernels come from a file"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def _sampled(config: NativeEngineConfig, scheme: str) -> str:
    decoder = Decoder(TINY_CONFIG, TINY_CONFIG.vocab_size)
    decoder.assign(random_weights(TINY_CONFIG, seed=0), requires_grad=False)
    plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig())
    engine = NativeEngine(config, TINY_CONFIG, TINY_CONFIG.vocab_size, str)
    engine.load(take_snapshot(decoder, plan.quantized, version=0))
    prompts = [Prompt(f"probe/{length}", tuple(range(length)), "", {}) for length in PROMPTS]
    total = hashlib.sha256()
    for group in engine.generate(prompts, 2, Sampling(max_new_tokens=8), seed=(0,)):
        for completion in group.completions:
            total.update(completion.token_ids.numpy().tobytes())
            total.update(completion.engine_logprobs.numpy().tobytes())
    return total.hexdigest()[:16]
