"""The decoder of the Llama, Mistral, Qwen2 and Qwen3 families, written once for engine and learner.

Both run the same operations (`ops/`) on the same published operands. They differ in where keys and values live:
a learner's packed tensor of this very forward, or an engine's cache. Parameters have Hugging Face names.
Shape letters: T tokens, D hidden, V vocabulary, G key/value heads, C head dimension, R cache rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from qarl.models.config import ModelConfig, rope_tables
from qarl.ops.adapter import Adapter
from qarl.ops.attention import Rotation, Store, attention, split_rotate, split_rotate_into
from qarl.ops.device import HOST, moved
from qarl.ops.embedding import embedding
from qarl.ops.head import Head, logits
from qarl.ops.linear import Norm, Projection
from qarl.ops.masters import WHOLE, Masters
from qarl.ops.operand import Operand, operand_of
from qarl.ops.reference import KVStore, Spans

HEAD = "lm_head"


@dataclass(frozen=True, slots=True, eq=False)
class Cache:
    """Where an engine keeps keys and values: `slots_T` are the rows of each layer's store that this forward fills."""

    keys: tuple[KVStore, ...]
    values: tuple[KVStore, ...]
    slots_T: Tensor


class RMSNorm(nn.Module):
    """Holds a gain; the arithmetic happens inside the projection that follows."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def as_operand(self) -> Norm:
        return Norm(self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention; q, k and v are one GEMM."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=config.output_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.norm_eps)
            self.k_norm = RMSNorm(dim, config.norm_eps)
        self.has_qk_norm = config.qk_norm
        names = [f"{name}.{part}" for part in ("q_proj", "k_proj", "v_proj")]
        self.qkv = Projection(names, (self.q_proj, self.k_proj, self.v_proj))
        self.output = Projection((f"{name}.o_proj",), (self.o_proj,))

    def gains(self) -> tuple[Tensor, Tensor] | None:
        return (self.q_norm.weight, self.k_norm.weight) if self.has_qk_norm else None


class Mlp(nn.Module):
    """down(silu(gate(x)) * up(x)); gate and up are one GEMM."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        hidden, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, width, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, width, bias=config.mlp_bias)
        self.down_proj = nn.Linear(width, hidden, bias=config.mlp_bias)
        self.gate_up = Projection((f"{name}.gate_proj", f"{name}.up_proj"), (self.gate_proj, self.up_proj))
        self.down = Projection((f"{name}.down_proj",), (self.down_proj,))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, f"{name}.self_attn")
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config, f"{name}.mlp")

    def projections(self) -> list[Projection]:
        return [self.self_attn.qkv, self.self_attn.output, self.mlp.gate_up, self.mlp.down]

    def trained(self) -> list[Tensor]:
        """What takes a gradient here, adapters included."""
        gains = [gain for name, gain in self.named_parameters() if name.endswith("norm.weight") and gain.requires_grad]
        return gains + [tensor for projection in self.projections() for tensor in projection.trained()]

    def forward(
        self, x_TD: Tensor, positions_T: Tensor, rotation: Rotation, spans: Spans, store: Store | None = None
    ) -> Tensor:
        """One layer of T tokens; keys and values are this forward's own, or those of an engine's store."""
        x_TD, gate_up = self.until_gated(x_TD, positions_T, rotation, spans, store)
        return self.mlp.down.of_gated(gate_up, residual=x_TD)

    def until_gated(
        self, x_TD: Tensor, positions_T: Tensor, rotation: Rotation, spans: Spans, store: Store | None = None
    ) -> tuple[Tensor, Tensor]:
        """All but the last product: hidden states after attention [T, D], and gate and up [T, 2F]."""
        attn = self.self_attn
        qkv = attn.qkv.of_norm(x_TD, self.input_layernorm.as_operand())
        keys: KVStore
        values: KVStore
        if store is None:
            q, keys, values = split_rotate(qkv, positions_T, rotation, attn.gains())
        else:
            q, keys, values = split_rotate_into(store, qkv, positions_T, rotation, attn.gains())
        x_TD = attn.output(attention(q, keys, values, spans).flatten(1), residual=x_TD)
        return x_TD, self.mlp.gate_up.of_norm(x_TD, self.post_attention_layernorm.as_operand())


class _Recomputed(torch.autograd.Function):
    """A layer that keeps its input alone. What the backward pass needs of the rest is computed again: not the last
    product, a quarter of a layer's work, which only what follows the layer has read. Its output takes a gradient where
    its input or `trained`, what the layer trains, does; the input of a frozen embedding does not.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: Layer, x_TD: Tensor, positions_T: Tensor, rotation: Rotation, spans: Spans, *trained: Tensor
    ) -> Tensor:
        ctx.layer, ctx.rest, ctx.num_trained = layer, (positions_T, rotation, spans), len(trained)
        ctx.save_for_backward(x_TD)
        return layer(x_TD, positions_T, rotation, spans)  # type: ignore[no-any-return]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor | None, ...]:
        (x_TD,) = ctx.saved_tensors
        x_TD = x_TD.detach().requires_grad_(ctx.needs_input_grad[1])
        with torch.enable_grad():
            outputs = ctx.layer.until_gated(x_TD, *ctx.rest)
        grad_gate_up = ctx.layer.mlp.down.gated_backward(outputs[1].detach(), grad_TD)
        pairs = [(y, grad) for y, grad in zip(outputs, (grad_TD, grad_gate_up), strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
        return None, x_TD.grad, None, None, None, *[None] * ctx.num_trained


class Body(nn.Module):
    """Embedding, layers and final norm: everything Hugging Face puts under `model.`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, f"model.layers.{i}") for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)


class Decoder(nn.Module):
    """A decoder whose GEMMs multiply what `serve` was given; parameters are masters (learner) or absent (engine).

    `vocab_size` may be smaller than the checkpoint's: rows past it are padding, never sampled nor scored. With
    `rounds_kv`, `hidden` rounds keys and values as an int8 cache does.
    """

    def __init__(self, config: ModelConfig, vocab_size: int | None = None, rounds_kv: bool = False) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size or config.vocab_size
        self.model = Body(config)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rounds_kv = rounds_kv
        self.head_operand: Operand | None = None
        self.holder: Masters = WHOLE
        self._table: Tensor | None = None
        self._rotation: Rotation | None = None

    @property
    def layers(self) -> list[Layer]:
        return [layer for layer in self.model.layers if isinstance(layer, Layer)]

    @property
    def device(self) -> torch.device:
        """Where it computes: where its parameters are."""
        return self.model.embed_tokens.weight.device

    def head_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.config.tie_embeddings else self.lm_head.weight

    def assign(self, tensors: Mapping[str, Tensor], requires_grad: bool) -> None:
        """Let the named parameters be these very tensors (no copy); names are Hugging Face's."""
        for name, tensor in tensors.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            assert getattr(module, leaf).shape == tensor.shape, f"{name}: shape {tuple(tensor.shape)}"
            setattr(module, leaf, nn.Parameter(tensor, requires_grad=requires_grad))

    def held_by(self, holder: Masters) -> None:
        """Say who holds the masters; without this, they are all here."""
        self.holder = holder
        for projection in self.projections():
            projection.holder = holder

    def projections(self) -> list[Projection]:
        """Every group of sibling matrices but the head, in the order of the forward."""
        return [projection for layer in self.layers for projection in layer.projections()]

    def matrices(self) -> list[tuple[str, tuple[int, int]]]:
        """Names and shapes [N, K] of everything a quantization rule may name, the head included."""
        found = [
            (name, (linear.weight.shape[0], linear.weight.shape[1]))
            for projection in self.projections()
            for name, linear in zip(projection.names, projection.linears, strict=True)
        ]
        return [*found, (HEAD, (self.vocab_size, self.config.hidden_size))]

    def serve(self, operands: Mapping[str, Operand], table: Tensor | None = None) -> None:
        """Multiply with these from now on; one per projection (keyed by its first name) and one for the head.

        Embeddings are read from `table` [V, D], where their master is not all here.
        """
        self._table = table
        for projection in self.projections():
            projection.operand = operands[projection.names[0]]
        self.head_operand = operands[HEAD]

    def adapt(self, adapters: Mapping[str, Adapter]) -> None:
        """Add these to what is served from now on, in place of those before; keys as those of `serve`."""
        for projection in self.projections():
            projection.adapter = adapters.get(projection.names[0])

    def drop_masters(self) -> None:
        """Forget the projections' weights, which are frozen and served; their shapes stay."""
        for projection in self.projections():
            for linear in projection.linears:
                linear.weight = nn.Parameter(linear.weight.to("meta"), requires_grad=False)

    def rotation(self, length: int) -> Rotation:
        """Rotary tables that reach at least `length` positions."""
        if self._rotation is None or len(self._rotation.cosines) < length:
            config = self.config
            with HOST:  # the same tables for every device
                cosines, sines = rope_tables(config, max(length, 256))
            sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
            tables = (cosines.to(self.device), sines.to(self.device))
            self._rotation = Rotation(*sizes, config.norm_eps, *tables, rounds_kv=self.rounds_kv)
        return self._rotation

    def embeddings(self, token_ids_T: Tensor) -> Tensor:
        """[T, D] of these tokens."""
        return embedding(token_ids_T, self.model.embed_tokens.weight, self._table, self.holder)

    def hidden(
        self, token_ids_T: Tensor, positions_T: Tensor, spans: Spans, longest: int, recompute: bool = False
    ) -> Tensor:
        """Hidden states [T, D] before the final norm, keys and values being this forward's own.

        `longest` exceeds every position. With `recompute` a layer keeps only its input for the backward pass.
        """
        rotation = self.rotation(longest)
        x_TD = self.embeddings(token_ids_T)
        for layer in self.layers:
            if recompute:
                x_TD = _Recomputed.apply(layer, x_TD, positions_T, rotation, spans, *layer.trained())
            else:
                x_TD = layer(x_TD, positions_T, rotation, spans)
        return x_TD

    @torch.no_grad()
    def layers_cached(
        self, x_TD: Tensor, positions_T: Tensor, spans: Spans, longest: int, cache: Cache
    ) -> Iterator[Tensor]:
        """The outputs [T, D] of the layers in turn, from embeddings; keys and values live in an engine's cache."""
        rotation = self.rotation(longest)
        for index, layer in enumerate(self.layers):
            store = Store(cache.keys[index], cache.values[index], cache.slots_T)
            x_TD = layer(x_TD, positions_T, rotation, spans, store)
            yield x_TD

    def head(self) -> Head:
        """The output projection as served."""
        assert self.head_operand is not None, "no weights are served yet"
        weight = self.head_weight()
        is_table = self.config.tie_embeddings and self._table is not None
        values = self._table if is_table else self.holder.values(weight)
        return Head(self.head_operand, self.model.norm.as_operand(), weight, values, self.holder)

    @torch.no_grad()
    def full_logits(self, token_ids_T: Tensor) -> Tensor:
        """[T, V] logits of one whole sequence."""
        length, spans = len(token_ids_T), moved(one_sequence(len(token_ids_T)), self.device)
        return logits(self.head(), self.hidden(token_ids_T, spans.visible - 1, spans, length))

    def operands(self) -> list[Operand]:
        """Everything that is multiplied with, the head last."""
        found = [*(projection.operand for projection in self.projections()), self.head_operand]
        return [operand for operand in found if operand is not None]

    def serve_masters(self, table: Tensor | None = None) -> None:
        """Serve the full-precision masters themselves (scheme `none`); `table` as of `serve`."""
        whole = self.holder.whole
        operands = {
            p.names[0]: operand_of([whole(linear.weight) for linear in p.linears], [x.bias for x in p.linears])
            for p in self.projections()
        }
        head = table if self.config.tie_embeddings and table is not None else whole(self.head_weight())
        self.serve(operands | {HEAD: operand_of([head[: self.vocab_size]], [None])}, table)


def one_sequence(length: int) -> Spans:
    """The plain causal layout: one sequence, one span."""
    return Spans(
        sequences=torch.zeros(length, dtype=torch.int64),
        visible=torch.arange(1, length + 1),
        pointers=torch.tensor([0, 1]),
        starts=torch.tensor([0]),
        lengths=torch.tensor([length]),
        families=torch.tensor([0, length]),
        longest=length,
    )
