"""Our forward against the model classes of `transformers`, family by family, in full precision."""

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from qarl.models.decoder import Decoder
from qarl.models.load import load_folder

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
ODD_SIZES = {"hidden_size": 52, "intermediate_size": 37, "vocab_size": 7}
SMOLLM2 = {**SIZES, "hidden_size": 144, "num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5}

MODELS = {
    "llama, untied": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "llama, tied": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama, one query a key": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 4})),
    "llama, one key for all": (LlamaForCausalLM, LlamaConfig(**{**SIZES, "num_key_value_heads": 1})),
    "llama, biased": (LlamaForCausalLM, LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama, own head size": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=32)),
    "llama, head size 24": (LlamaForCausalLM, LlamaConfig(**SIZES, head_dim=24)),
    "llama, odd sizes": (LlamaForCausalLM, LlamaConfig(**{**SIZES, **ODD_SIZES}, head_dim=16)),
    "llama, llama3 rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
    "llama, linear rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=LINEAR)),
    "llama, yarn rope": (LlamaForCausalLM, LlamaConfig(**SIZES, rope_parameters=YARN)),
    "smollm2": (LlamaForCausalLM, LlamaConfig(**SMOLLM2, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "qwen2, tied": (Qwen2ForCausalLM, Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=32)),
    "qwen3, biased": (Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16, attention_bias=True)),
}


@pytest.mark.parametrize(("model_class", "config"), MODELS.values(), ids=list(MODELS))
def test_logits_are_those_of_transformers(tmp_path, model_class, config):
    torch.manual_seed(0)
    theirs = model_class(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            # Norms near 1 and biases away from 0, else a forgotten one would not show; large enough to attend sharply.
            weight.copy_(torch.randn(weight.shape) * 0.3 + (1.0 if name.endswith("norm.weight") else 0.0))
    theirs.save_pretrained(tmp_path)

    ours_config, tensors = load_folder(tmp_path)
    ours = Decoder(ours_config)
    ours.assign(tensors, requires_grad=False)
    ours.serve_masters()

    token_ids_T = torch.randint(config.vocab_size, (100,))
    with torch.no_grad():
        expected_TV = theirs(token_ids_T[None]).logits[0]
    assert expected_TV.std() > 0.5
    torch.testing.assert_close(ours.full_logits(token_ids_T), expected_TV, rtol=1e-4, atol=1e-4)
