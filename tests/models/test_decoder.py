"""The decoder: packed as the learner runs it and cached as the engine does, to the bit; and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.models.config import ModelConfig
from qarl.models.decoder import HEAD, Cache, Decoder, one_sequence
from qarl.models.names import TINY_CONFIG
from qarl.ops.head import logits, token_logprobs
from qarl.ops.kernels import kernels, using
from qarl.ops.reference import ReferenceKernels, Spans
from qarl.quant import QuantConfig, plan_schemes, scheme_named
from qarl.sync.snapshot import operands_of, take_snapshot

CONFIGS = {
    "llama": TINY_CONFIG,
    "qwen2, untied": replace(TINY_CONFIG, family="qwen2", attention_bias=True, tie_embeddings=False),
    "qwen3, odd sizes": replace(
        TINY_CONFIG, family="qwen3", qk_norm=True, head_dim=24, num_heads=4, num_kv_heads=2, vocab_size=301
    ),
}
SCHEMES = ["none", "w8a8-int8", "w4a8-int8", "w4a16", "fp8"]

PROMPT, SUFFIXES = 21, (9, 14)
"""Tokens of one prompt and of its two completions."""
LENGTH = PROMPT + sum(SUFFIXES)

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
exact_alone = pytest.mark.skipif(
    not kernels().exact_matmul, reason="the reference's float products depend on the batch"
)


def decoder_of(config: ModelConfig, scheme: str = "none", vocab_size: int | None = None) -> Decoder:
    """Random weights, away from what they start as, served under a scheme."""
    decoder = Decoder(config, vocab_size)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            weight.copy_(torch.randn(weight.shape) * 0.2 + (1.0 if name.endswith("norm.weight") else 0.0))
    plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig())
    decoder.serve(operands_of(decoder, take_snapshot(decoder, plan.quantized, version=0)))
    return decoder


def spans_over(sequences: Sequence[Sequence[tuple[int, int]]], visible: Sequence[Sequence[int]]) -> Spans:
    """Sequence s reads the spans `sequences[s]`; its queries see the first `visible[s]` keys. One family."""
    flat = torch.tensor([span for spans in sequences for span in spans])
    pointers = torch.tensor([0, *(len(spans) for spans in sequences)]).cumsum(0)
    owners = torch.tensor([s for s, counts in enumerate(visible) for _ in counts])
    seen = torch.tensor([count for counts in visible for count in counts])
    starts, lengths = flat[:, 0].contiguous(), flat[:, 1].contiguous()
    return Spans(owners, seen, pointers, starts, lengths, torch.tensor([0, len(seen)]), int(seen.max()))


def packed_inputs(config: ModelConfig) -> tuple[Tensor, Tensor, Spans, int]:
    """The prompt, then both completions behind it, as a learner packs them."""
    token_ids = torch.randint(config.vocab_size, (LENGTH,))
    ranges = [range(PROMPT), *(range(PROMPT, PROMPT + length) for length in SUFFIXES)]
    own_starts = [PROMPT, PROMPT + SUFFIXES[0]]
    spans = [[(0, PROMPT)], *([(0, PROMPT), own] for own in zip(own_starts, SUFFIXES, strict=True))]
    positions = torch.tensor([position for run in ranges for position in run])
    visible = [[position + 1 for position in run] for run in ranges]
    return token_ids, positions, spans_over(spans, visible), PROMPT + max(SUFFIXES)


class Engine:
    """The least that serves: a store of 200 rows, pieces of sequences anywhere in it."""

    def __init__(self, decoder: Decoder, token_ids: Tensor) -> None:
        self.decoder, self.token_ids = decoder, token_ids
        shape = (200, decoder.config.num_kv_heads, decoder.config.head_dim)
        layers = range(decoder.config.num_layers)
        self.keys, self.values = (tuple(torch.full(shape, torch.nan) for _ in layers) for _ in range(2))

    def forward(
        self,
        tokens: Sequence[int],
        slots: Sequence[int],
        sequences: Sequence[Sequence[tuple[int, int]]],
        visible: Sequence[Sequence[int]],
    ) -> Tensor:
        """`tokens` counts in the packed order of `packed_inputs`."""
        cache = Cache(self.keys, self.values, torch.tensor(slots))
        positions = torch.tensor([count - 1 for counts in visible for count in counts])
        spans = spans_over(sequences, visible)
        embeddings = self.decoder.embeddings(self.token_ids[list(tokens)])
        *_, hidden = self.decoder.layers_cached(embeddings, positions, spans, spans.longest, cache)
        return hidden

    def all_hidden(self) -> Tensor:
        """The prompt in two chunks, stored in two pieces; then one token at a time of both completions together."""
        prompt = [(150, 8), (30, 13)]
        found = [self.forward(range(8), range(150, 158), [prompt[:1]], [range(1, 9)])]
        found.append(self.forward(range(8, PROMPT), range(30, 43), [prompt], [range(9, PROMPT + 1)]))
        own_starts, packed_starts = (60, 110), (PROMPT, PROMPT + SUFFIXES[0])
        completions: list[list[Tensor]] = [[], []]
        for step in range(max(SUFFIXES)):
            going = [s for s in (1, 0) if step < SUFFIXES[s]]
            hidden = self.forward(
                [packed_starts[s] + step for s in going],
                [own_starts[s] + step for s in going],
                [[*prompt, (own_starts[s], step + 1)] for s in going],
                [[PROMPT + step + 1] for _ in going],
            )
            for s, row in zip(going, hidden, strict=True):
                completions[s].append(row)
        return torch.cat([*found, *(torch.stack(rows) for rows in completions)])


@exact_alone
@pytest.mark.parametrize("scheme", SCHEMES)
@every_config
def test_a_learners_packed_forward_has_the_bits_of_an_engines_cached_one(config, scheme):
    decoder = decoder_of(config, scheme)
    inputs = packed_inputs(config)
    packed = decoder.hidden(*inputs)
    cached = Engine(decoder, inputs[0]).all_hidden()
    assert packed.requires_grad and not cached.requires_grad
    assert packed.std() > 0.1
    assert torch.equal(packed, cached)
    # And from there to the log-probabilities that are sampled with and trained on.
    tokens, logprobs = kernels().sample(logits(decoder.head(), cached), torch.rand(LENGTH), 1 / 0.8)
    assert torch.equal(token_logprobs(decoder.head(), packed, tokens, 0.8, 10)[0], logprobs)


@exact_alone
def test_the_number_of_threads_changes_no_bit():
    decoder, inputs = decoder_of(TINY_CONFIG, "w8a8-int8"), packed_inputs(TINY_CONFIG)
    one = decoder.hidden(*inputs)
    torch.set_num_threads(2)
    assert torch.equal(decoder.hidden(*inputs), one)


@exact_alone
def test_another_weight_or_token_or_position_is_another_hidden_state():
    """The comparison above can fail: each part of the input reaches the last token."""
    decoder = decoder_of(TINY_CONFIG)
    token_ids, positions, spans, longest = packed_inputs(TINY_CONFIG)
    before = decoder.hidden(token_ids, positions, spans, longest)
    other = token_ids.clone()
    other[0] = (other[0] + 1) % TINY_CONFIG.vocab_size
    assert not torch.equal(decoder.hidden(other, positions, spans, longest)[-1], before[-1])
    moved = positions.clone()
    moved[-1] += 1
    assert not torch.equal(decoder.hidden(token_ids, moved, spans, longest)[-1], before[-1])
    unseen = spans_over([[(0, PROMPT)]] * LENGTH, [[min(int(count), PROMPT)] for count in spans.visible])
    assert not torch.equal(decoder.hidden(token_ids, positions, unseen, longest)[-1], before[-1])


def gradients(decoder: Decoder, inputs: tuple[Tensor, Tensor, Spans, int], recompute: bool) -> dict[str, Tensor]:
    decoder.zero_grad()
    hidden = decoder.hidden(*inputs, recompute)
    logprobs, entropy = token_logprobs(decoder.head(), hidden, inputs[0].roll(-1), 0.9, 16, True)
    (logprobs.sum() + 0.1 * entropy.sum()).backward()
    return {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "fp8"])
def test_recomputing_activations_changes_no_bit_of_the_gradients(scheme):
    config = CONFIGS["qwen3, odd sizes"]
    decoder, inputs = decoder_of(config, scheme), packed_inputs(config)
    kept, again = (gradients(decoder, inputs, recompute) for recompute in (False, True))
    assert set(kept) == {name for name, _ in decoder.named_parameters()}
    for name, gradient in kept.items():
        assert gradient.abs().max() > 0, name
        assert torch.equal(again[name], gradient), name


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_those_of_transformers_in_float64(name):
    config = CONFIGS[name]
    decoder = decoder_of(config)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_hf())).double()
    theirs.load_state_dict({key: value.double() for key, value in decoder.state_dict().items()}, strict=False)
    token_ids, targets = torch.randint(config.vocab_size, (2, 17))

    log_p = theirs(token_ids[None]).logits[0].log_softmax(-1)
    log_p.gather(1, targets[:, None]).sum().backward()
    hidden = decoder.hidden(token_ids, torch.arange(17), one_sequence(17), 17)
    token_logprobs(decoder.head(), hidden, targets, 1.0, 5)[0].sum().backward()

    for key, exact in theirs.named_parameters():
        found = decoder.get_parameter(key).grad
        assert found is not None and exact.grad is not None and exact.grad.abs().max() > 0
        bound = 1e-4 * float(exact.grad.abs().max())
        torch.testing.assert_close(
            found.double(), exact.grad, rtol=1e-3, atol=bound, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize(("scheme", "off"), [("none", 1e-4), ("w4a16", 1e-4), ("w8a8-int8", 0.05)])
def test_the_reference_kernels_give_the_same_logits_but_for_rounding(scheme, off):
    """An activation between two codes may fall to either side, so integer schemes differ by more than the others."""
    decoder = decoder_of(TINY_CONFIG, scheme)
    token_ids = torch.randint(TINY_CONFIG.vocab_size, (30,))
    found = decoder.full_logits(token_ids)
    with using(ReferenceKernels()):
        reference = decoder_of(TINY_CONFIG)
        reference.load_state_dict(decoder.state_dict())
        plan = plan_schemes(reference.matrices(), scheme_named(scheme), QuantConfig())
        reference.serve(operands_of(reference, take_snapshot(reference, plan.quantized, version=0)))
        defined = reference.full_logits(token_ids)
    assert defined.std() > 1.0
    assert (found - defined).abs().max() < off * defined.abs().max()


def test_a_decoder_that_serves_nothing_says_so():
    decoder = Decoder(TINY_CONFIG)
    with pytest.raises(AssertionError, match="no weights are served yet"):
        decoder.full_logits(torch.tensor([1, 2]))
    with pytest.raises(AssertionError, match=r"layers\.0\.self_attn\.q_proj: no weights are served yet"):
        decoder.hidden(torch.tensor([1, 2]), torch.arange(2), one_sequence(2), 2)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("scheme", ["none", "w8a8-int8"])
def test_padding_rows_of_the_vocabulary_are_neither_scored_nor_trained(tied, scheme):
    config = replace(TINY_CONFIG, tie_embeddings=tied)
    decoder = decoder_of(config, vocab_size=259)
    token_ids = torch.randint(259, (12,))
    whole = Decoder(config)
    whole.assign({name: p.detach() for name, p in decoder.named_parameters()}, requires_grad=False)
    whole.serve_masters()
    assert decoder.full_logits(token_ids).shape == (12, 259)
    assert torch.equal(decoder.full_logits(token_ids), whole.full_logits(token_ids)[:, :259])
    decoder.serve_masters()
    assert decoder.full_logits(token_ids).shape == (12, 259)
    assert dict(decoder.matrices())[HEAD] == (259, config.hidden_size)

    plan = plan_schemes(decoder.matrices(), scheme_named("none"), QuantConfig(rules={HEAD: scheme}))
    decoder.serve(operands_of(decoder, take_snapshot(decoder, plan.quantized, version=0)))
    hidden = decoder.hidden(token_ids, torch.arange(12), one_sequence(12), 12)
    token_logprobs(decoder.head(), hidden, token_ids, 1.0, 5)[0].sum().backward()
    gradient = decoder.head_weight().grad
    assert gradient is not None and gradient.shape == (config.vocab_size, config.hidden_size)
    assert gradient[:259].abs().max() > 0
    assert not gradient[259:].any()


def test_assigned_tensors_are_the_parameters_themselves():
    decoder = Decoder(TINY_CONFIG)
    name = "model.layers.1.mlp.down_proj.weight"
    weight = torch.randn(TINY_CONFIG.hidden_size, TINY_CONFIG.intermediate_size)
    decoder.assign({name: weight}, requires_grad=True)
    parameter = decoder.get_parameter(name)
    assert parameter.data_ptr() == weight.data_ptr()
    assert parameter.requires_grad
    decoder.assign({name: weight}, requires_grad=False)
    assert not decoder.get_parameter(name).requires_grad
    with pytest.raises(AssertionError, match=r"down_proj\.weight: shape \(2, 3\)"):
        decoder.assign({name: torch.zeros(2, 3)}, requires_grad=True)


def test_masters_are_served_as_they_are_now():
    decoder, token_ids = decoder_of(TINY_CONFIG), torch.tensor([1, 2, 3])
    before = decoder.full_logits(token_ids)
    with torch.no_grad():
        decoder.get_parameter("model.layers.0.mlp.up_proj.weight").mul_(2)
    assert torch.equal(decoder.full_logits(token_ids), before)
    decoder.serve_masters()
    assert not torch.equal(decoder.full_logits(token_ids), before)


def test_matrices_are_named_as_checkpoints_name_them_and_come_in_the_order_of_the_forward():
    matrices = Decoder(TINY_CONFIG).matrices()
    attention = [("q", 128, 128), ("k", 64, 128), ("v", 64, 128), ("o", 128, 128)]
    mlp = [("gate", 256, 128), ("up", 256, 128), ("down", 128, 256)]
    expected = [(f"model.layers.0.self_attn.{part}_proj", (n, k)) for part, n, k in attention]
    expected += [(f"model.layers.0.mlp.{part}_proj", (n, k)) for part, n, k in mlp]
    assert matrices[:7] == expected
    assert [name for name, _ in matrices[7:14]] == [name.replace("layers.0", "layers.1") for name, _ in expected]
    assert matrices[14:] == [(HEAD, (320, 128))]


def test_rotary_tables_grow_when_needed_and_a_positions_rows_do_not_depend_on_their_length():
    decoder = Decoder(TINY_CONFIG)
    first = decoder.rotation(10)
    assert decoder.rotation(len(first.cosines)) is first
    for length in (257, 300, 1023):
        longer = decoder.rotation(length)
        assert len(longer.cosines) >= length
        assert torch.equal(longer.cosines[: len(first.cosines)], first.cosines)
        assert torch.equal(longer.sines[: len(first.sines)], first.sines)
