"""Hugging Face folders (config.json and safetensors) to a configuration and float32 master weights, checked by name."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qarl.errors import ConfigurationError
from qarl.models.config import ModelConfig
from qarl.models.parameters import EMBEDDING, HEAD, check_names, master_weight, parameter_shapes

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def load_folder(path: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and every parameter, by Hugging Face name, as float32 on the CPU.

    Reads tensor by tensor, so that the peak is the result plus one tensor. Raises ConfigurationError, naming file and
    tensor, for whatever is missing, left over, misshaped, truncated or not supported.
    """
    config = read_config(path)
    shapes = parameter_shapes(config)
    files = {name: file for name, file in _locate(path).items() if not name.endswith("rotary_emb.inv_freq")}
    renamed_head = config.tie_embeddings and HEAD in files and EMBEDDING not in files
    if renamed_head:
        # Of two names for one tensor, some writers keep the head's.
        files[EMBEDDING] = files.pop(HEAD)
    repeated_head = files.pop(HEAD, None) if config.tie_embeddings else None
    check_names(files, shapes, str(path))
    stored_as = {EMBEDDING: HEAD} if renamed_head else {}
    tensors: dict[str, Tensor] = {}
    for file, names in _by_file(files).items():
        with _opened(file) as opened:
            for name in names:
                stored = stored_as.get(name, name)
                tensors[name] = master_weight(opened.get_tensor(stored), stored, shapes[name], str(file))
    if repeated_head is not None:
        _require_head_is_embedding(repeated_head, tensors[EMBEDDING])
    return config, {name: tensors[name] for name in shapes}


def read_config(path: Path) -> ModelConfig:
    """The configuration in a folder's config.json; raises ConfigurationError when there is none."""
    file = path / "config.json"
    if not file.is_file():
        if (path / "adapter_config.json").is_file():
            raise ConfigurationError(f"{path}: a LoRA adapter, not a model; merge it into its base model and save that")
        raise ConfigurationError(f"{path}: not a model folder, it has no config.json")
    return ModelConfig.from_hf(read_json(file), str(file))


def read_json(file: Path) -> dict[str, Any]:
    """One JSON object; raises ConfigurationError with the place when the file holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # no JSON, no UTF-8, digits or brackets without end
        raise ConfigurationError(f"{file}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file}: must hold a JSON object")
    return content


def _locate(path: Path) -> dict[str, Path]:
    """Tensor name to the safetensors file that holds it."""
    single, index = path / WEIGHTS_FILE, path / INDEX_FILE
    if single.is_file():
        return dict.fromkeys(_names_in(single), single)
    if index.is_file():
        return _locate_shards(path, index)
    for pickled in sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        raise ConfigurationError(
            f"{pickled}: a pickle file, which may run code when it is read, and is never opened; convert it where you "
            f"trust it: AutoModelForCausalLM.from_pretrained('{path}').save_pretrained(...) writes safetensors"
        )
    raise ConfigurationError(f"{path}: no weights, neither {WEIGHTS_FILE} nor {INDEX_FILE}")


def _locate_shards(path: Path, index: Path) -> dict[str, Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ConfigurationError(f"{index}: weight_map must map tensor names to file names")
    if outside := [shard for shard in weight_map.values() if Path(shard).name != shard]:
        raise ConfigurationError(f"{index}: {outside[0]!r} is not a plain file name in the same folder")
    files = {name: path / shard for name, shard in weight_map.items()}
    for file, names in _by_file(files).items():
        if not file.is_file():
            raise ConfigurationError(f"{file}: missing, though {index.name} says it holds {names[0]}")
        present = set(_names_in(file))
        if absent := [name for name in names if name not in present]:
            raise ConfigurationError(f"{file}: tensor {absent[0]} is missing, though {index.name} says it is here")
        if extra := sorted(present - set(names)):
            raise ConfigurationError(f"{file}: tensor {extra[0]} is here, though {index.name} does not say so")
    return files


def _by_file(files: dict[str, Path]) -> dict[Path, list[str]]:
    names: dict[Path, list[str]] = defaultdict(list)
    for name, file in files.items():
        names[file].append(name)
    return names


def _names_in(file: Path) -> list[str]:
    with _opened(file) as opened:
        return list(opened.keys())


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """The tensors of a safetensors file, whose header is checked as a whole before any is read."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ConfigurationError(f"{file}: damaged or cut short, download or copy it again ({error})") from error


def _require_head_is_embedding(file: Path, embedding: Tensor) -> None:
    with _opened(file) as opened:
        head = master_weight(opened.get_tensor(HEAD), HEAD, tuple(embedding.shape), str(file))
    if not head.equal(embedding):
        raise ConfigurationError(
            f"{file}: tensor {HEAD} differs from {EMBEDDING}, though config.json ties them; set tie_word_embeddings "
            "to false"
        )
