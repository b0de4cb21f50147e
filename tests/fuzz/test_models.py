"""Model files that are damaged or lie: a model that can be computed, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig, rope_tables
from qarl.models.gguf import load_gguf
from qarl.models.load import load_folder
from qarl.models.names import TINY_CONFIG, load_model, random_weights
from qarl.models.parameters import parameter_shapes
from qarl.models.rope import RopeConfig
from qarl.models.save import save_folder
from qarl.models.tokenizer import byte_tokenizer, load_tokenizer, sampleable_tokens, stop_token_ids

FUZZ = settings.get_profile("fuzz")  # of conftest.py
SECONDS = 20.0

CONFIG = replace(
    TINY_CONFIG, hidden_size=32, intermediate_size=32, num_layers=1, head_dim=8, rope=RopeConfig("linear", 1e4, 2.0)
)
SPOIL = Callable[[st.DataObject, Any], Any]
WITHIN = Callable[[float], AbstractContextManager[None]]

ONCE_READ = {
    "architectures": ["LlamaForCausalLM"],
    "auto_map": None,
    "layer_types": ["full_attention"],
    "sliding_window": None,
    "max_window_layers": 1,
    "use_sliding_window": False,
    "quantization_config": None,
    "num_experts": 0,
    "final_logit_softcapping": None,
    "partial_rotary_factor": 1,
    "original_max_position_embeddings": 64,
}
"""Keys of config.json that are read where they are there."""

ROPES = [
    RopeConfig(),
    RopeConfig("linear", 1e4, 2.0),
    RopeConfig("llama3", 5e5, 8.0, 64, 1.0, 4.0),
    RopeConfig("yarn", 1e4, 4.0, 64, mscale=1.0, mscale_all_dim=0.5),
]


@pytest.fixture(scope="session")
def whole() -> dict[str, bytes]:
    """The files of a small model folder."""
    with tempfile.TemporaryDirectory() as name:
        save_folder(Path(name, "m"), CONFIG, random_weights(CONFIG, 0), byte_tokenizer(), stop_token_ids=(256, 258))
        return {path.name: path.read_bytes() for path in Path(name, "m").iterdir()}


@pytest.fixture(scope="session")
def whole_gguf() -> bytes:
    """The same in GGUF, with some of the metadata that is read where it is there."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "m.gguf")
        config = replace(CONFIG, rope=RopeConfig())
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_block_count(config.num_layers)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_heads)
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_key_length(config.head_dim)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope.theta)
        writer.add_layer_norm_rms_eps(2.0**-17)
        writer.add_array("tokenizer.ggml.scores", [0.5, 1.5, 2.5])
        writer.add_array("tokenizer.ggml.tokens", ["a", "b", "c"])
        for name_, weight in random_weights(config, 0).items():
            writer.add_tensor(_gguf_name(name_), weight.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def _gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attn_output",
        **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
        **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
    }
    stem = name.removesuffix(".weight").removeprefix("model.layers.0.")
    return f"blk.0.{parts[stem]}.weight" if "layers.0" in name else f"{parts[stem]}.weight"


@contextmanager
def laid_out(files: dict[str, bytes]) -> Iterator[Path]:
    """A folder with these files."""
    with tempfile.TemporaryDirectory() as name:
        for file, content in files.items():
            Path(name, file).write_bytes(content)
        yield Path(name)


def assert_one_line(error: ConfigurationError, folder: Path) -> None:
    assert "\n" not in str(error) and len(str(error)) > 20
    assert str(folder) in str(error), "the message names the file"


def assert_computable(config: ModelConfig, tensors: dict[str, torch.Tensor]) -> None:
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == parameter_shapes(config)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    assert all(table.isfinite().all() for table in rope_tables(config, 4))


def try_folder(files: dict[str, bytes]) -> None:
    with laid_out(files) as folder:
        try:
            model = load_model(str(folder))
        except ConfigurationError as error:
            assert_one_line(error, folder)
        else:
            assert_computable(model.config, model.tensors)
            assert 0 <= model.sampleable <= model.config.vocab_size


@settings(FUZZ, max_examples=150 * FUZZ.max_examples)
@given(data=st.data())
def test_a_config_with_anything_in_it(
    whole: dict[str, bytes], spoil_values: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    rope = data.draw(st.sampled_from(ROPES)).to_hf()
    written = json.loads(whole["config.json"]) | ONCE_READ | {"rope_scaling": rope, "rope_parameters": rope}
    config = spoil_values(data, written)
    with laid_out(whole | {"config.json": json.dumps(config).encode()}) as folder, within(SECONDS):
        try:
            assert_computable(*load_folder(folder))
        except ConfigurationError as error:
            assert_one_line(error, folder)


@settings(FUZZ, max_examples=60 * FUZZ.max_examples)
@given(data=st.data())
def test_a_json_file_with_damaged_bytes(
    whole: dict[str, bytes], spoil_bytes: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([name for name in sorted(whole) if name.endswith(".json")]))
    with within(SECONDS):
        try_folder(whole | {name: spoil_bytes(data, whole[name])})


@pytest.mark.parametrize("content", [b"[" * 100_000, b"9" * 10_000, b'{"a":' * 100_000, b"", b"null", b"\xff\xfe{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_json_without_end_or_sense(whole: dict[str, bytes], within: WITHIN, name: str, content: bytes) -> None:
    with within(SECONDS):
        try_folder(whole | {name: content})


@settings(FUZZ, max_examples=80 * FUZZ.max_examples)
@given(data=st.data())
def test_a_weights_file_with_damaged_bytes(
    whole: dict[str, bytes], spoil_bytes: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    """Half of the damage falls on the header, which is a small part of the file."""
    content = whole["model.safetensors"]
    header = 8 + struct.unpack("<Q", content[:8])[0]
    if data.draw(st.booleans()):
        spoiled = spoil_bytes(data, content[:header]) + content[header:]
    else:
        spoiled = spoil_bytes(data, content)
    with laid_out(whole | {"model.safetensors": spoiled}) as folder, within(SECONDS):
        try:
            assert_computable(*load_folder(folder))
        except ConfigurationError as error:
            assert_one_line(error, folder)


@settings(FUZZ, max_examples=150 * FUZZ.max_examples)
@given(data=st.data())
def test_a_weights_header_that_lies(
    whole: dict[str, bytes], spoil_values: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    content = whole["model.safetensors"]
    length = struct.unpack("<Q", content[:8])[0]
    tensors = json.loads(content[8 : 8 + length])
    for name in data.draw(st.sets(st.sampled_from([name for name in tensors if name != "__metadata__"]), max_size=2)):
        dtypes = ["F64", "F16", "BF16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F4", "C64", "I64", "F6_E2M3"]
        tensors[name]["dtype"] = data.draw(st.sampled_from(dtypes))
    header = json.dumps(spoil_values(data, tensors)).encode()
    claimed = data.draw(st.sampled_from([len(header)] * 4 + [0, 7, len(header) + 1, 2**40, 2**63]))
    spoiled = struct.pack("<Q", claimed) + header + content[8 + length :]
    with laid_out(whole | {"model.safetensors": spoiled}) as folder, within(SECONDS):
        try:
            assert_computable(*load_folder(folder))
        except ConfigurationError as error:
            assert_one_line(error, folder)


@settings(FUZZ, max_examples=80 * FUZZ.max_examples)
@given(data=st.data())
def test_a_tokenizer_with_anything_in_it(
    whole: dict[str, bytes], spoil_values: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json"]))
    tree = json.loads(whole[name])
    if name == "tokenizer.json":
        # Of 256 bytes some are enough; the rest would take all the damage.
        tree["model"]["vocab"] = dict(list(tree["model"]["vocab"].items())[:4])
    files = whole | {name: json.dumps(spoil_values(data, tree)).encode()}
    with laid_out(files) as folder, within(SECONDS):
        try:
            tokenizer = load_tokenizer(folder)
        except ConfigurationError as error:
            assert_one_line(error, folder)
        else:
            assert 0 <= sampleable_tokens(tokenizer, 320) <= 320
            assert all(stop < 320 for stop in stop_token_ids(tokenizer, 320))


@settings(FUZZ, max_examples=120 * FUZZ.max_examples)
@given(data=st.data())
def test_a_gguf_file_with_damaged_bytes(
    whole_gguf: bytes, spoil_bytes: SPOIL, within: WITHIN, data: st.DataObject
) -> None:
    """Most of the damage falls on the header: what damage does to a weight, nothing in the file can tell."""
    header = whole_gguf.index(b"blk.0.ffn_norm.weight") + 100
    spoiled = spoil_bytes(data, whole_gguf[:header]) + whole_gguf[header:]
    if data.draw(st.integers(0, 4)) == 0:
        spoiled = spoil_bytes(data, whole_gguf)
    with laid_out({"m.gguf": spoiled}) as folder, within(SECONDS):
        try:
            assert_computable(*load_gguf(folder / "m.gguf"))
        except ConfigurationError as error:
            assert_one_line(error, folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_hidden_layers", 10**9), ("head_dim", 2**40), ("vocab_size", 10**12), ("max_position_embeddings", 10**15)],
)
def test_an_absurd_size_is_refused_before_anything_is_made_so_large(
    whole: dict[str, bytes], within: WITHIN, key: str, value: int
) -> None:
    config = json.dumps(json.loads(whole["config.json"]) | {key: value}).encode()
    with laid_out(whole | {"config.json": config}) as folder, within(2.0):
        with pytest.raises(ConfigurationError, match=rf"config\.json: {key} is {value}, more than"):
            load_folder(folder)


def test_an_array_longer_than_its_gguf_file_is_refused_at_once(whole_gguf: bytes, within: WITHIN) -> None:
    key = b"tokenizer.ggml.scores"
    length = whole_gguf.index(key) + len(key) + 8  # the type of the value and that of its items
    assert struct.unpack_from("<Q", whole_gguf, length) == (3,)
    rest = whole_gguf[length + 8 :]
    # To the end there are whole numbers of four bytes, so that no last piece of one gives the lie away.
    spoiled = whole_gguf[:length] + struct.pack("<Q", 2**40) + rest[: len(rest) // 4 * 4]
    with laid_out({"m.gguf": spoiled}) as folder, within(5.0):
        with pytest.raises(ConfigurationError, match=r"m\.gguf: not a GGUF file, or cut short"):
            load_gguf(folder / "m.gguf")


def test_a_model_with_code_of_its_own_is_refused_by_the_name_of_that_code(whole: dict[str, bytes]) -> None:
    auto_map = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config = json.dumps(json.loads(whole["config.json"]) | {"auto_map": auto_map}).encode()
    code = b"raise SystemExit('code of a model was run')"
    own = {"config.json": config, "modeling_own.py": code, "configuration_own.py": code}
    with laid_out(whole | own) as folder:
        with pytest.raises(ConfigurationError, match=r"config\.json: .*'modeling_own\.OwnForCausalLM'.* never run"):
            load_model(str(folder))


def test_a_tokenizer_with_code_of_its_own_is_not_run(whole: dict[str, bytes]) -> None:
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}, "tokenizer_class": "OwnTokenizer"}
    tokenizer_config = json.dumps(json.loads(whole["tokenizer_config.json"]) | own).encode()
    code = b"raise SystemExit('code of a tokenizer was run')"
    files = whole | {"tokenizer_config.json": tokenizer_config, "tokenization_own.py": code}
    with laid_out(files) as folder, pytest.raises(ConfigurationError, match=r"no usable tokenizer: .*custom code"):
        load_model(str(folder))


class Bomb:
    """What a pickle can do to those who open it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_a_folder_of_pickles_is_refused_and_no_pickle_is_opened(whole: dict[str, bytes], name: str) -> None:
    files = {file: content for file, content in whole.items() if file != "model.safetensors"}
    with laid_out(files) as folder:
        (folder / name).write_bytes(pickle.dumps(Bomb(folder / "opened")))
        with pytest.raises(ConfigurationError, match=f"{name}: a pickle file"):
            load_model(str(folder))
        assert not (folder / "opened").exists()
        pickle.loads((folder / name).read_bytes())
        assert (folder / "opened").exists(), "the bomb works"
