"""What a decoder model is: sizes and switches of the Llama, Mistral, Qwen2 and Qwen3 families, from and to config.json.

What our forward does not compute is refused by name here, before a weight is read. Dropout rates are not read: they are
no part of the function that a checkpoint serves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.rope import RopeConfig

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder: sizes in elements, `max_position_embeddings` in tokens.

    `attention_bias` is about the query, key and value projections, `output_bias` about the attention's output
    projection, `mlp_bias` about the three of the MLP, `qk_norm` about an RMSNorm over each query and key head (Qwen3).
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Literal["silu"] = "silu"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a config.json of transformers 4 or 5, with the defaults that transformers gives to absent keys.

        `where` names the file in errors. Raises ConfigurationError for an absent or impossible value, and for every
        feature that is not supported.
        """
        family = _family(hf, where)
        _refuse_unsupported(hf, where)
        heads, hidden = _size(hf, "num_attention_heads", where), _size(hf, "hidden_size", where)
        layers, positions = _size(hf, "num_hidden_layers", where), _size(hf, "max_position_embeddings", where)
        _refuse_sliding_window(hf, family, layers, positions, where)
        kv_heads = _size(hf, "num_key_value_heads", where, heads if family == "llama" else None)
        if heads % kv_heads:
            raise ConfigurationError(
                f"{where}: num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = _head_dim(hf, family, hidden, heads, where)
        # Qwen2's biases are no option; Mistral has none.
        biased = family == "qwen2" or (family in ("llama", "qwen3") and _flag(hf, "attention_bias", where))
        return cls(
            family=family,
            vocab_size=_size(hf, "vocab_size", where),
            hidden_size=hidden,
            intermediate_size=_size(hf, "intermediate_size", where),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=positions,
            rope=_rope(hf, head_dim, where),
            norm_eps=_norm_eps(hf, where),
            tie_embeddings=_flag(hf, "tie_word_embeddings", where),
            attention_bias=biased,
            output_bias=biased and family != "qwen2",
            mlp_bias=family == "llama" and _flag(hf, "mlp_bias", where),
            qk_norm=family == "qwen3",
        )

    def to_hf(self) -> dict[str, Any]:
        """A config.json that transformers 4 and 5 load as this family's causal language model."""
        rope = self.rope.to_hf()
        hf: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": self.activation,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tie_embeddings,
            # Version 4 reads the first two, version 5 the third.
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.type == "default" else rope,
            "rope_parameters": rope,
        }
        if self.family in ("llama", "qwen3"):
            assert self.attention_bias == self.output_bias, f"{self.family} has one switch for both biases"
            hf["attention_bias"] = self.attention_bias
        if self.family == "llama":
            hf["mlp_bias"] = self.mlp_bias
        else:
            hf["sliding_window"] = None
        if self.family in ("qwen2", "qwen3"):
            hf["use_sliding_window"] = False
        return hf


def rope_tables(config: ModelConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to length - 1, each [length, head_dim / 2] float32."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * config.rope.inverse_frequencies(config.head_dim)
    scale = config.rope.table_scale()
    return angles.cos() * scale, angles.sin() * scale


_LARGEST = {"num_hidden_layers": 10_000, "head_dim": 65_536}
"""Of sizes that no stored tensor has to bear out before something is made that large; the others end at 2^31."""

_MIXTURE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_SOFTCAP_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
_QUANTIZED_KEYS = ("quantization_config", "compression_config")


def _family(hf: Mapping[str, Any], where: str) -> Family:
    model_type = hf.get("model_type")
    if isinstance(model_type, str) and (model_type.endswith("_moe") or model_type == "mixtral"):
        raise ConfigurationError(f"{where}: mixture-of-experts models ({model_type!r}) are not supported")
    for family, architecture in ARCHITECTURES.items():
        if model_type == family:
            for named in _names(hf, "architectures", where):
                if named.lower() != architecture.lower():
                    raise ConfigurationError(f"{where}: architecture {named!r} is not supported; {architecture} is")
            return family
    supported = ", ".join(get_args(Family))
    raise ConfigurationError(f"{where}: model_type {model_type!r} is not supported (supported: {supported})")


def _refuse_unsupported(hf: Mapping[str, Any], where: str) -> None:
    for key in _MIXTURE_KEYS:
        if hf.get(key):
            raise ConfigurationError(f"{where}: mixture-of-experts models ({key} = {hf[key]!r}) are not supported")
    for key in _SOFTCAP_KEYS:
        if hf.get(key):
            raise ConfigurationError(f"{where}: soft-capped logits ({key} = {hf[key]!r}) are not supported")
    for key in _QUANTIZED_KEYS:
        if quantized := hf.get(key):
            method = quantized.get("quant_method", "unknown method") if isinstance(quantized, Mapping) else quantized
            raise ConfigurationError(
                f"{where}: the checkpoint is already quantized ({key}: {method!r}); training needs the "
                "full-precision weights, use the checkpoint it was made from"
            )
    if code := hf.get("auto_map"):
        # A repository's own model may compute something else under a known model_type.
        named = code.get("AutoModelForCausalLM") or code.get("AutoModel") if isinstance(code, Mapping) else code
        if named:
            raise ConfigurationError(
                f"{where}: the model is computed by code of its own (auto_map: {named!r}), which is never run; use a "
                "checkpoint that transformers loads without trust_remote_code"
            )
    activation = hf.get("hidden_act", "silu")
    if activation != "silu":
        raise ConfigurationError(f"{where}: hidden_act {activation!r} is not supported; 'silu' is")


def _refuse_sliding_window(hf: Mapping[str, Any], family: Family, layers: int, positions: int, where: str) -> None:
    """Accept a sliding window only where it cannot act: no layer uses it, or the whole context fits in it."""
    layer_types = _names(hf, "layer_types", where)
    if other := sorted(set(layer_types) - {"full_attention", "sliding_attention"}):
        raise ConfigurationError(f"{where}: layer type {other[0]!r} is not supported; 'full_attention' is")
    # An absent key means 4096 in transformers; the first max_window_layers layers do without the window.
    window = None if hf.get("sliding_window", 4096) is None else _size(hf, "sliding_window", where, 4096)
    windowed = "sliding_attention" in layer_types
    if family == "mistral":
        windowed |= window is not None
    elif family in ("qwen2", "qwen3") and not layer_types:
        some_layer = window is not None and _windowed_from(hf, where) < layers
        windowed |= bool(hf.get("use_sliding_window")) and some_layer
    if windowed and (window is None or window < positions):
        raise ConfigurationError(
            f"{where}: sliding-window attention (sliding_window = {window}) is not supported; where shorter contexts "
            f"are enough, lower max_position_embeddings (now {positions}) to the window in the file"
        )


def _windowed_from(hf: Mapping[str, Any], where: str) -> int:
    """The first layer with a window; 0, unlike other sizes, is one."""
    first = hf.get("max_window_layers", 28)
    return 0 if first == 0 else _size(hf, "max_window_layers", where, 28)


def _rope(hf: Mapping[str, Any], head_dim: int, where: str) -> RopeConfig:
    """The rotary embedding, once it is sure that its tables can be computed."""
    for key in ("rope_scaling", "rope_parameters"):
        if not isinstance(hf.get(key) or {}, Mapping):
            raise ConfigurationError(f"{where}: {key} must be an object, not {hf[key]!r}")
    try:
        rope = RopeConfig.from_hf(hf, where)
        finite = rope.inverse_frequencies(head_dim).isfinite().all() and math.isfinite(rope.table_scale())
    except (ArithmeticError, ValueError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{where}: the rope parameters give no rotary embedding: {error}") from error
    if not finite:
        raise ConfigurationError(f"{where}: the rope parameters give frequencies that are not finite")
    return rope


def _names(hf: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A list of names; none where the key is absent or null."""
    names = hf.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"{where}: {key} must be a list of names, not {names!r}")
    return names


def _head_dim(hf: Mapping[str, Any], family: Family, hidden: int, heads: int, where: str) -> int:
    if hf.get("head_dim") is None and family != "qwen3" and hidden % heads:
        raise ConfigurationError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = _size(hf, "head_dim", where, 128 if family == "qwen3" else hidden // heads)
    if head_dim % 2:
        raise ConfigurationError(f"{where}: head_dim {head_dim} is odd; rotary embedding turns pairs of dimensions")
    return head_dim


def _size(hf: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = hf.get(key)
    if value is None:
        value = default
    if value is None:
        raise ConfigurationError(f"{where}: key {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{where}: {key} must be a whole number above 0, not {value!r}")
    if value > (largest := _LARGEST.get(key, 2**31)):
        raise ConfigurationError(
            f"{where}: {key} is {value}, more than any model has ({largest}); is the file damaged?"
        )
    return value


def _flag(hf: Mapping[str, Any], key: str, where: str) -> bool:
    value = hf.get(key, False)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{where}: {key} must be true or false, not {value!r}")
    return value


def _norm_eps(hf: Mapping[str, Any], where: str) -> float:
    value = hf.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ConfigurationError(f"{where}: rms_norm_eps must be a number from 0 to 1, not {value!r}")
    return float(value)
