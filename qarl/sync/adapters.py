"""Adapters from learner to engine: of every version they alone are published, for one base; and PEFT's folder of them.

Tensors are as trained, unfused and in Hugging Face's layout, with PEFT's names; alpha / rank is in the description, and
multiplied into B where both sides make what they multiply with (`adapters_of`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from qarl.errors import RunError
from qarl.models.decoder import Decoder
from qarl.models.lora import adapters_named, modules_of, named_tensors, projection_shapes
from qarl.models.save import write_tensors
from qarl.ops.adapter import Adapter, LowRank, adapter_of
from qarl.records import Lora, Snapshot
from qarl.sync.checksum import combine, digests

WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names: `PeftModel.from_pretrained(base, folder)` reads them."""


def take_adapters(adapters: Mapping[str, LowRank], lora: Lora, version: int) -> Snapshot:
    """A copy of the adapters, by module, as they are now. RunError for a NaN or an infinity."""
    tensors = {name: tensor.detach().clone() for name, tensor in named_tensors(adapters).items()}
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise RunError(f"{name}: non-finite values; the update before was too large (learner.lr, max_grad_norm)")
    checksum = adapters_checksum(digests(tensors), lora.base.checksum, lora.rank, lora.alpha)
    return Snapshot(version, tensors, lora.base.schemes, checksum, lora=lora)


def adapters_checksum(tensor_digests: Mapping[str, str], base: str, rank: int, alpha: float) -> str:
    """64 hex digits over the tensors' `digests`, the checksum of the base that they belong to, rank and alpha."""
    scale = hashlib.sha256(f"{rank} {alpha!r}".encode()).hexdigest()
    return combine({**tensor_digests, "base": base, "scale": scale})


def verify_adapters(decoder: Decoder, snapshot: Snapshot) -> None:
    """Refuse adapters that are not this decoder's, not of their base, or not as they were published.

    RunError, before anything is changed.
    """
    lora = snapshot.lora
    assert lora is not None
    try:
        adapters_named(snapshot.tensors, projection_shapes(decoder), lora.rank)
    except ValueError as error:
        raise RunError(f"adapters of version {snapshot.version}: {error}; nothing was loaded") from error
    found = adapters_checksum(digests(snapshot.tensors), lora.base.checksum, lora.rank, lora.alpha)
    if found != snapshot.checksum:
        raise RunError(
            f"adapters of version {snapshot.version} changed between publishing and loading, or belong to another base "
            f"than {lora.base.checksum}: checksum {found}, published {snapshot.checksum}; nothing was loaded"
        )


def adapters_of(decoder: Decoder, snapshot: Snapshot) -> dict[str, Adapter]:
    """What to multiply with, by the first name of each projection that has an adapter."""
    assert snapshot.lora is not None
    adapters = adapters_named(snapshot.tensors, projection_shapes(decoder), snapshot.lora.rank)
    found = {}
    for projection in decoder.projections():
        parts = [adapters.get(name) for name in projection.names]
        if any(part is not None for part in parts):
            heights = [linear.weight.shape[0] for linear in projection.linears]
            found[projection.names[0]] = adapter_of(parts, heights, snapshot.lora.scale)
    return found


def write_peft(folder: Path, tensors: Mapping[str, Tensor], rank: int, alpha: float, base_name: str) -> None:
    """Adapters as a folder that PEFT reads; `base_name` says which model is theirs. OSError when the disk refuses."""
    folder.mkdir(exist_ok=True)
    write_tensors(folder / WEIGHTS_FILE, tensors)
    config = peft_config(modules_of(tensors), rank, alpha, base_name)
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def peft_config(modules: Sequence[str], rank: int, alpha: float, base_name: str) -> dict[str, Any]:
    """PEFT's `LoraConfig` of adapters of these modules, as JSON values."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": list(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }


def read_peft(folder: Path) -> tuple[dict[str, Tensor], int, float]:
    """Tensors, rank and alpha of what `write_peft` wrote; RunError where it cannot be read."""
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        return load_file(folder / WEIGHTS_FILE), int(config["r"]), float(config["lora_alpha"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{folder}: adapters cannot be read: {error!r}") from error
