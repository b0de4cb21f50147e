import json
import os
import resource
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qarl.errors import ConfigurationError
from qarl.models.load import load_folder
from qarl.models.names import TINY_CONFIG, random_weights
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer

CONFIGS = {
    "llama, tied": TINY_CONFIG,
    "llama, biased, untied": replace(
        TINY_CONFIG, tie_embeddings=False, attention_bias=True, output_bias=True, mlp_bias=True
    ),
    "mistral": replace(TINY_CONFIG, family="mistral"),
    "qwen2": replace(TINY_CONFIG, family="qwen2", attention_bias=True),
    "qwen3": replace(TINY_CONFIG, family="qwen3", qk_norm=True, head_dim=64),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
@pytest.mark.parametrize("shard_bytes", [2**30, 100_000])
def test_transformers_reads_back_the_same_weights(tmp_path, config, shard_bytes):
    weights = random_weights(config, seed=2)
    save_folder(tmp_path / "model", config, weights, shard_bytes=shard_bytes)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    theirs, problems = loaded
    assert not any(problems.values()), problems
    found = dict(theirs.named_parameters())
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_shards_stay_below_the_limit_and_the_index_counts_their_bytes(tmp_path):
    weights = random_weights(TINY_CONFIG, seed=0)
    save_folder(tmp_path / "model", TINY_CONFIG, weights, shard_bytes=200_000)
    shards = sorted(tmp_path.glob("model/*.safetensors"))
    assert [shard.name for shard in shards[:2]] == [f"model-0000{n}-of-{len(shards):05}.safetensors" for n in (1, 2)]
    assert all(shard.stat().st_size < 200_000 + 10_000 for shard in shards)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * weight.numel() for weight in weights.values())
    assert set(index["weight_map"]) == set(weights)


def test_the_tokenizer_and_the_stop_tokens_are_written(tmp_path):
    tokenizer = byte_tokenizer()
    weights = random_weights(TINY_CONFIG, seed=0)
    save_folder(tmp_path / "model", TINY_CONFIG, weights, tokenizer, stop_token_ids=(256, 258))
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again("aé<|im_end|>")["input_ids"] == [97, 195, 169, 258]
    assert again.chat_template == tokenizer.chat_template
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.generation_config.eos_token_id == [256, 258]
    assert theirs.generation_config.pad_token_id == 256


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path):
    weights = random_weights(TINY_CONFIG, seed=0)
    save_folder(tmp_path / "model", TINY_CONFIG, weights, dtype=torch.bfloat16)
    _, tensors = load_folder(tmp_path / "model")
    assert all(torch.equal(tensors[name], weights[name].bfloat16().float()) for name in weights)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == torch.bfloat16


def test_what_exists_is_never_overwritten(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="not an empty folder"):
        save_folder(tmp_path / "model", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0))
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "notes.txt"]


def test_a_save_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr("qarl.models.save.save_file", full_disk)
    with pytest.raises(OSError, match="No space left"):
        save_folder(tmp_path / "model", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0))
    assert list(tmp_path.iterdir()) == []


def test_an_incomplete_set_of_tensors_is_refused(tmp_path):
    weights = random_weights(TINY_CONFIG, seed=0)
    del weights["model.norm.weight"]
    with pytest.raises(ConfigurationError, match=r"model\.norm\.weight is missing"):
        save_folder(tmp_path / "model", TINY_CONFIG, weights)


def test_weights_that_the_disk_refuses_are_an_os_error_and_nothing_is_left(tmp_path):
    """In a child: the limit to the size of a file stands in for a full disk, and cannot be raised again."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            with pytest.raises(OSError, match="File too large"):
                save_folder(tmp_path / "model", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0))
            assert list(tmp_path.iterdir()) == []
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_tokenizer_that_the_disk_refuses_is_an_os_error_and_nothing_is_left(tmp_path, monkeypatch):
    def refused(folder):
        raise Exception("No space left on device (os error 28)")  # as the library in Rust has it

    tokenizer = byte_tokenizer()
    monkeypatch.setattr(tokenizer, "save_pretrained", refused)
    with pytest.raises(OSError, match="No space left on device"):
        save_folder(tmp_path / "model", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0), tokenizer)
    assert list(tmp_path.iterdir()) == []
