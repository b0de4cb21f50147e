import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl.errors import ConfigurationError
from qarl.models.load import load_folder
from qarl.models.names import TINY_CONFIG, random_weights
from qarl.models.save import save_folder

CONFIG = replace(TINY_CONFIG, vocab_size=16, num_layers=1)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.fixture
def weights():
    return random_weights(CONFIG, seed=1)


@pytest.fixture
def folder(tmp_path, weights):
    save_folder(tmp_path / "model", CONFIG, weights)
    return tmp_path / "model"


@pytest.fixture
def sharded(tmp_path, weights):
    save_folder(tmp_path / "sharded", CONFIG, weights, shard_bytes=200_000)
    return tmp_path / "sharded"


def edit(folder, change):
    """Rewrite the single weights file after `change` edited its tensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_single_file_and_shards_give_the_same(folder, sharded, weights):
    assert len(list(sharded.glob("*.safetensors"))) > 1
    for path in (folder, sharded):
        config, tensors = load_folder(path)
        assert config == CONFIG
        assert_equal(tensors, weights)


def test_bfloat16_becomes_float32_exactly(folder, weights):
    edit(folder, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    _, tensors = load_folder(folder)
    assert_equal(tensors, {name: weight.bfloat16().float() for name, weight in weights.items()})


def test_rotary_buffers_are_ignored(folder, weights):
    edit(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert_equal(load_folder(folder)[1], weights)


def test_a_tied_head_may_be_stored_again(folder, weights):
    edit(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    assert_equal(load_folder(folder)[1], weights)


def test_a_tied_head_may_be_stored_instead_of_the_embedding(folder, weights):
    edit(folder, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    assert_equal(load_folder(folder)[1], weights)


def test_a_tied_head_that_differs_is_refused(folder):
    edit(folder, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] + 1}))
    with pytest.raises(ConfigurationError, match=rf"model\.safetensors: tensor {HEAD} differs.*tie_word_embeddings"):
        load_folder(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(GATE), f"{GATE} is missing"),
        (lambda tensors: tensors.update(mystery=torch.ones(1)), "mystery is not part"),
        (lambda tensors: tensors.update({GATE: torch.ones(2, 2)}), rf"model\.safetensors: tensor {GATE} has shape"),
        (lambda tensors: tensors[GATE].fill_(float("nan")), rf"model\.safetensors: tensor {GATE} has NaN"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(folder, change, message):
    edit(folder, change)
    with pytest.raises(ConfigurationError, match=message):
        load_folder(folder)


@pytest.mark.parametrize("kept", [0, 5, 100, 50_000])
def test_a_truncated_file_is_named(folder, kept):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ConfigurationError, match=rf"^{file}: damaged or cut short"):
        load_folder(folder)


def test_a_missing_shard_is_named(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ConfigurationError, match=rf"^{shard}: missing"):
        load_folder(sharded)


def test_an_index_that_disagrees_with_its_shards_is_refused(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    first, last = EMBEDDING, "model.norm.weight"
    swapped = content["weight_map"] | {first: content["weight_map"][last]}
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(ConfigurationError, match=rf"{EMBEDDING} is (missing|here), though"):
        load_folder(sharded)


def test_a_shard_with_a_tensor_that_the_index_does_not_know_is_refused(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    save_file(load_file(shard) | {"stale": torch.ones(1)}, shard)
    with pytest.raises(ConfigurationError, match=rf"^{shard}: tensor stale is here, though"):
        load_folder(sharded)


def test_an_index_cannot_point_outside_its_folder(sharded):
    index = sharded / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {EMBEDDING: "../secret.safetensors"}}))
    with pytest.raises(ConfigurationError, match=r"'\.\./secret\.safetensors' is not a plain file name"):
        load_folder(sharded)


def test_a_pickle_is_never_opened(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin: a pickle file.*save_pretrained"):
        load_folder(folder)


def test_a_folder_without_weights_or_config_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigurationError, match="no weights"):
        load_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigurationError, match=r"config\.json: not valid JSON"):
        load_folder(folder)
    for content in (b"[" * 100_000, b"9" * 10_000, b"\xff"):
        (folder / "config.json").write_bytes(content)
        with pytest.raises(ConfigurationError, match=r"config\.json: not valid JSON"):
            load_folder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ConfigurationError, match=r"has no config\.json"):
        load_folder(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="LoRA adapter"):
        load_folder(folder)
