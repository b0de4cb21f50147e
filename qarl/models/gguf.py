"""GGUF files (llama.cpp) of the Llama, Qwen2 and Qwen3 architectures to a configuration and float32 master weights.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; `gguf`, its own package, decodes
the blocks. Low-bit blocks are dequantized exactly: training starts from the weights that the file stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig
from qarl.models.parameters import EMBEDDING, HEAD, check_names, master_weight, parameter_shapes

if TYPE_CHECKING:
    from gguf import ReaderTensor

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_OUTSIDE_LAYERS = {"token_embd.weight": EMBEDDING, "output_norm.weight": "model.norm.weight", "output.weight": HEAD}
_IN_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SIZES = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}


def load_gguf(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and every parameter, by Hugging Face name, as float32 on the CPU.

    Raises ConfigurationError, naming file and tensor, for what is missing, damaged or not supported.
    """
    metadata, found = _read(path)
    architecture = _architecture(metadata, path)
    stored = {_hf_name(tensor.name, path): tensor for tensor in found}
    config = ModelConfig.from_hf(_hf_config(architecture, metadata, stored, path), str(path))
    shapes = parameter_shapes(config)
    check_names(stored, shapes, str(path))
    permuted = {}
    if config.family == "llama":
        permuted = {".q_proj.": config.num_heads, ".k_proj.": config.num_kv_heads}
    tensors = {}
    for name, shape in shapes.items():
        weight = _dequantize(stored[name], path)
        for part, heads in permuted.items():
            # Of another shape it is refused below.
            if part in name and tuple(weight.shape) == shape:
                weight = _half_split(weight, heads)
        tensors[name] = master_weight(weight, name, shape, str(path))
    return config, tensors


def _read(path: Path) -> tuple[dict[str, Any], list[ReaderTensor]]:
    """What the header says, but for the tokenizer, and the tensors, whose values stay in the file until asked for."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ConfigurationError(
            f"{path}: reading GGUF needs the package gguf: pip install 'qarl-llm[demo]'"
        ) from error

    class CompleteReader(GGUFReader):
        """The package's reader takes what lies past the end as empty, and reads on for as long as a length says."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            values = super()._get(offset, dtype, count, override_order)
            if len(values) != count:
                raise ValueError(f"it ends before the {count} values at byte {offset}")
            return values

    try:
        reader = CompleteReader(path)
        fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        return {name: field.contents() for name, field in fields.items()}, reader.tensors
    except (ValueError, LookupError, OSError, RecursionError, ArithmeticError) as error:
        raise ConfigurationError(f"{path}: not a GGUF file, or cut short: {error}") from error


def _hf_name(name: str, path: Path) -> str:
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    match name.split("."):
        case ["blk", layer, part, ("weight" | "bias") as kind] if part in _IN_LAYERS:
            return f"model.layers.{layer}.{_IN_LAYERS[part]}.{kind}"
        case ["rope_freqs", "weight"]:
            raise ConfigurationError(
                f"{path}: tensor rope_freqs.weight (Llama 3's frequency factors) is not supported in GGUF; use "
                "the model's Hugging Face folder"
            )
    raise ConfigurationError(f"{path}: tensor {name} is not supported")


def _architecture(metadata: Mapping[str, Any], path: Path) -> str:
    architecture = metadata.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        supported = ", ".join(_ARCHITECTURES)
        raise ConfigurationError(f"{path}: architecture {architecture!r} is not supported in GGUF ({supported} are)")
    if metadata.get(f"{architecture}.expert_count"):
        raise ConfigurationError(f"{path}: mixture-of-experts models are not supported")
    if (_whole(metadata, "split.count", path) or 0) > 1:
        raise ConfigurationError(f"{path}: one part of several; join them first with llama-gguf-split --merge")
    return str(architecture)


def _hf_config(
    architecture: str, metadata: Mapping[str, Any], stored: Mapping[str, ReaderTensor], path: Path
) -> dict[str, Any]:
    """What config.json would say."""
    values = {key.removeprefix(f"{architecture}."): value for key, value in metadata.items()}
    hf: dict[str, Any] = {hf_key: values[key] for key, hf_key in _SIZES.items() if key in values}
    head_dim = _whole(values, "attention.key_length", path)
    rotated = _whole(values, "rope.dimension_count", path)
    query_bias, output_bias, mlp_bias = (
        f"model.layers.0.{part}.bias" in stored for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    )
    if architecture == "llama" and query_bias != output_bias:
        raise ConfigurationError(f"{path}: biases on only some of the attention projections are not supported")
    hf |= {
        "model_type": architecture,
        "head_dim": head_dim or rotated,
        "attention_bias": output_bias,
        "mlp_bias": mlp_bias,
        "tie_word_embeddings": HEAD not in stored,
        "rope_scaling": _rope_scaling(values, path),
        # A window in the file is one that llama.cpp applies.
        "layer_types": ["sliding_attention"] if values.get("attention.sliding_window") else None,
        "sliding_window": values.get("attention.sliding_window"),
    }
    if EMBEDDING in stored:
        dims = stored[EMBEDDING].shape.tolist()
        if len(dims) != 2:
            raise ConfigurationError(f"{path}: tensor {stored[EMBEDDING].name} has {len(dims)} dimensions instead of 2")
        hf["vocab_size"] = dims[1]
    if head_dim and rotated and head_dim != rotated:
        hf["partial_rotary_factor"] = rotated / head_dim
    return hf


def _whole(values: Mapping[str, Any], key: str, path: Path) -> int | None:
    value = values.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigurationError(f"{path}: {key} must be a whole number, not {value!r}")
    return value


def _rope_scaling(values: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    kind = values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if values.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise ConfigurationError(f"{path}: rope.scaling.attn_factor is not supported")
    scaling = {"rope_type": kind, "factor": values.get("rope.scaling.factor")}
    if "rope.scaling.original_context_length" in values:
        scaling["original_max_position_embeddings"] = values["rope.scaling.original_context_length"]
    return scaling


def _dequantize(tensor: ReaderTensor, path: Path) -> Tensor:
    from gguf.quants import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ConfigurationError(
            f"{path}: tensor {tensor.name} has type {tensor.tensor_type.name}, which is not supported"
        ) from error
    # The file is mapped read-only, which torch warns about; the copy that follows never writes to it.
    return torch.from_numpy(np.require(values, np.float32, "W"))


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo llama.cpp's reordering of query and key rows: there a rotated pair is adjacent, here half a head apart."""
    return weight.reshape(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape)
