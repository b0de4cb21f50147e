"""Which tensors a configuration has, under Hugging Face names, and what is refused when a file's tensors differ."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name to shape of every parameter, in the order of the forward; a tied head is no parameter of its own."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _layer_shapes(config).items()}
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def check_names(found: Collection[str], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raises ConfigurationError when a tensor is missing, or is there and belongs to no parameter."""
    if missing := [name for name in shapes if name not in found]:
        remedy = " (is the head tied? then set tie_word_embeddings to true)" if missing == [HEAD] else ""
        raise ConfigurationError(f"{where}: {_listed(missing)} missing{remedy}")
    if unexpected := [name for name in found if name not in shapes]:
        raise ConfigurationError(f"{where}: {_listed(unexpected)} not part of this model's configuration")


def master_weight(tensor: Tensor, name: str, shape: tuple[int, ...], where: str) -> Tensor:
    """A float32 copy, exact, of a floating-point tensor; its file may go away afterwards.

    Raises ConfigurationError for another shape or format, or when a value is NaN or infinite.
    """
    if tuple(tensor.shape) != shape:
        raise ConfigurationError(
            f"{where}: tensor {name} has shape {list(tensor.shape)}, the configuration needs {list(shape)}"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        stored = str(tensor.dtype).removeprefix("torch.")
        raise ConfigurationError(f"{where}: tensor {name} is {stored}; weights must be float32, bfloat16 or float16")
    weight = tensor.to(torch.float32, copy=True)
    # One NaN or infinity makes the sum non-finite, without a mask as large as the tensor.
    if not bool(weight.sum().isfinite()):
        raise ConfigurationError(f"{where}: tensor {name} has NaN or infinite values")
    return weight


def _layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, mlp = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    projections = {
        "self_attn.q_proj": (queries, hidden, config.attention_bias),
        "self_attn.k_proj": (keys, hidden, config.attention_bias),
        "self_attn.v_proj": (keys, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, queries, config.output_bias),
        "mlp.gate_proj": (mlp, hidden, config.mlp_bias),
        "mlp.up_proj": (mlp, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, mlp, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    for name, (rows, columns, biased) in projections.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if biased:
            shapes[f"{name}.bias"] = (rows,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def _listed(names: list[str]) -> str:
    """ "tensor a is" or "tensors a, b, c and 5 more are"."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"tensor {shown} is" if len(names) == 1 else f"tensors {shown} are"
