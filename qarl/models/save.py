"""Master weights to a Hugging Face folder that `transformers` and every reader of its layout load."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig
from qarl.models.load import INDEX_FILE, WEIGHTS_FILE
from qarl.models.parameters import check_names, parameter_shapes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHARD_BYTES = 5 * 2**30


def save_folder(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    stop_token_ids: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write config.json, safetensors (in shards of at most `shard_bytes`, each at least one tensor) and the tokenizer.

    Weights are rounded to `dtype`. Everything is written beside `path` and renamed at the end, so that `path` is either
    whole or absent. A tensor that is not all in this process is read by `read` when its file is written. Raises
    ConfigurationError when `path` exists and is not an empty folder, OSError when the disk refuses.
    """
    shapes = parameter_shapes(config)
    check_names(tensors, shapes, str(path))
    in_order = {name: tensors[name] for name in shapes}
    write_folder(path, config, in_order, tokenizer, stop_token_ids, dtype, shard_bytes=shard_bytes, read=read)


def write_folder(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
    stop_token_ids: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    also_in_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """`save_folder` of any tensors, as they are where `dtype` is None, and with more keys in config.json."""
    with new_folder(path) as aside:
        _write_configs(aside, config, tokenizer, stop_token_ids, dtype or torch.float32, also_in_config or {})
        _write_weights(aside, tensors, dtype, shard_bytes, read or tensors.__getitem__)
        if tokenizer is not None:
            _write_tokenizer(aside, tokenizer)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to be filled in the block, which then is renamed to `path`: that is whole or absent.

    ConfigurationError when `path` exists and is not an empty folder.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigurationError(f"{path}: exists and is not an empty folder; choose another or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.partial-{os.getpid()}")
    aside.mkdir()
    try:
        yield aside
        # Replaces an empty folder; fails on any other.
        aside.rename(path)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _write_configs(
    folder: Path,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    stop_token_ids: Collection[int],
    dtype: torch.dtype,
    also: Mapping[str, Any],
) -> None:
    stops = list(stop_token_ids)
    if tokenizer is not None and not stops and tokenizer.eos_token_id is not None:
        stops = [tokenizer.eos_token_id]
    special = {
        "bos_token_id": None if tokenizer is None else tokenizer.bos_token_id,
        "eos_token_id": (stops[0] if len(stops) == 1 else stops) or None,
        "pad_token_id": None if tokenizer is None else tokenizer.pad_token_id,
    }
    content = {**config.to_hf(), **special, "dtype": str(dtype).removeprefix("torch."), **also}
    _write_json(folder / "config.json", content)
    if stops:
        _write_json(folder / "generation_config.json", special)


def _write_weights(
    folder: Path,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype | None,
    shard_bytes: int,
    read: Callable[[str], Tensor],
) -> None:
    sizes = {name: tensor.numel() * (dtype or tensor.dtype).itemsize for name, tensor in tensors.items()}
    shards = _split(sizes, shard_bytes)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= dict.fromkeys(names, file)
        rounded = {name: read(name).detach().to("cpu", dtype or tensors[name].dtype).contiguous() for name in names}
        write_tensors(folder / file, rounded)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        _write_json(folder / INDEX_FILE, index)


def write_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Contiguous CPU tensors as safetensors; OSError when the disk refuses."""
    file.touch()
    mode = file.stat().st_mode
    try:
        save_file(dict(tensors), file, metadata={"format": "pt"})
        # The library leaves the file readable by its owner alone, whatever the umask says.
        file.chmod(mode)
    except SafetensorError as error:
        # The library wraps what the operating system said; callers have one plan for a full disk.
        raise OSError(None, str(error), str(file)) from error


def _write_tokenizer(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    # Its part in Rust has no exception of its own for what the operating system said.
    except Exception as error:
        raise OSError(None, str(error), str(folder)) from error


def _split(sizes: Mapping[str, int], shard_bytes: int) -> list[list[str]]:
    """Names in their order, cut before a shard would grow past the limit."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
