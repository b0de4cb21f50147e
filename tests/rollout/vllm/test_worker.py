"""What vLLM serves after a load is what was published, and a load that went wrong is noticed."""

import dataclasses

import pytest
import torch

pytest.importorskip("vllm")

from qarl.errors import RunError
from qarl.records import Completion, Group, Sampling, Snapshot
from qarl.sync.checksum import combine, digests
from qarl.sync.compressed_tensors import stored
from tests.conftest import SMALL
from tests.rollout.vllm.conftest import Started, served_of

pytestmark = pytest.mark.vllm

SAMPLING = Sampling(temperature=0.7, max_new_tokens=12)

CLOSE = {"none": 2e-5, "w4a16": 0.4, "w8a8-int8": 0.6}
"""Largest difference of a log-probability: fp32's last bits; activations in bfloat16; activations of 8 bits, which a
last bit moves by a step (docs/alignment.md)."""


def completions(groups: list[Group]) -> list[Completion]:
    return [completion for group in groups for completion in group.completions]


def largest_difference(started: Started, version: int, groups: list[Group]) -> float:
    decoder = started.learner(seed=version).decoder
    found = []
    for group in groups:
        for completion in group.completions:
            predicted = SMALL.predicted(decoder, group.prompt, completion).double() / SAMPLING.temperature
            expected = predicted.log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
            found.append((completion.engine_logprobs.double() - expected).abs().max())
    return float(torch.stack(found).max())


def test_three_versions_in_a_row_are_served_as_published(started: Started) -> None:
    """`load` compares checksums of what is served. What is sampled is compared here too, after the same prompts, so
    that keys cached under earlier weights would show.
    """
    told = set()
    for version in (1, 2, 3):
        started.engine.load(started.version(version))
        groups = started.engine.generate(SMALL.prompts(40, 20, 9), 3, SAMPLING, (5, version))
        assert all(completion.versions.tolist() == [version] * len(completion) for completion in completions(groups))
        assert largest_difference(started, version, groups) < CLOSE[started.scheme]
        told.add(tuple(completions(groups)[0].token_ids.tolist()))
    assert len(told) == 3


def test_bytes_that_are_sent_are_those_of_the_quantized_weights(started: Started) -> None:
    started.engine.load(started.version(1))
    served = served_of(started.version(1), getattr(torch, started.dtype))
    size = sum(tensor.nbytes for tensor in stored(served.tensors, served.schemes).values())
    assert started.engine.metrics()["publish/bytes"].value() == size
    codes = sum(w.numel() for name, w in served.tensors.items() if name.removesuffix(".weight") in served.schemes)
    bits = {"none": 0, "w8a8-int8": 8, "w4a16": 4}[started.scheme]
    floats = sum(w.nbytes for name, w in served.tensors.items() if name.removesuffix(".weight") not in served.schemes)
    shapes = 16 * len(served.schemes) if bits == 4 else 0  # two int64 a packed matrix
    assert size == codes * bits // 8 + floats + shapes


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.layers.0.mlp.gate_proj.weight_scale",
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.norm.weight",
    ],
)
def test_a_tensor_that_is_served_otherwise_is_named(
    started: Started, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One element differs between what was published and what arrives, whose own checksum is right."""
    good = started.version(1)
    if name not in good.tensors:
        pytest.skip("full precision has no scales")
    started.engine.load(good)
    transport = started.engine._transport
    assert transport is not None
    offer = transport.offer

    def offer_another(snapshot: Snapshot, of_published: dict[str, str]) -> dict[str, object]:
        changed = snapshot.tensors[name].clone()
        element = changed.view(-1)[7:8]
        element.copy_(-element if name.endswith("weight") and element != 0 else element + 1)
        tensors = {**snapshot.tensors, name: changed}
        found = digests(tensors)
        return offer(dataclasses.replace(snapshot, tensors=tensors, checksum=combine(found)), found)

    monkeypatch.setattr(transport, "offer", offer_another)
    with pytest.raises(RunError, match=f"version 2.*{name}") as failure:
        started.engine.load(dataclasses.replace(good, version=2))
    assert "and 0 more" in str(failure.value)
    assert started.engine.version == 1


def test_layers_are_those_of_the_learner(in_full_precision: Started) -> None:
    decoder = in_full_precision.learner(seed=0).decoder
    outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *call: outputs.append(call[2].clone())) for layer in decoder.layers]
    tokens = torch.arange(3, 40)
    expected = decoder.full_logits(tokens)
    layers, best = in_full_precision.engine.layer_outputs(tokens.tolist())
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(layers, torch.stack(outputs), rtol=1e-4, atol=1e-4)
    assert torch.equal(best, expected.argmax(-1))
