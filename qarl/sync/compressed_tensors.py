"""Quantized weights as `compressed-tensors` names and describes them: what vLLM and that library read.

https://github.com/vllm-project/compressed-tensors: per module `weight` (int8 or E4M3 codes), or `weight_packed` and
`weight_shape` (eight 4-bit codes an int32), and `weight_scale`; in config.json a `quantization_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.models.decoder import HEAD
from qarl.quant import E4M3, INT4, INT8, SCHEMES, Quantizer, Scheme, pack_int4, unpack_int4
from qarl.quant.scales import PerBlock, PerGroup, PerRow

QUANTIZATION_CONFIG = "quantization_config"

FORMATS = {
    "w8a8-int8": "int-quantized",
    "w4a16": "pack-quantized",
    "w4a16-g64": "pack-quantized",
    "w4a16-g32": "pack-quantized",
    "fp8": "float-quantized",
    "fp8-block": "float-quantized",
}
"""The library's name for how each scheme is stored; others it has none for, or no engine reads."""


def stored(tensors: Mapping[str, Tensor], schemes: Mapping[str, str]) -> dict[str, Tensor]:
    """A version's tensors by the names they are stored under; codes of packed schemes are packed."""
    found = dict(tensors)
    for module in packed_modules(schemes):
        codes = found.pop(f"{module}.weight")
        found[f"{module}.weight_packed"] = pack_int4(codes)
        found[f"{module}.weight_shape"] = torch.tensor(codes.shape, dtype=torch.int64)
    return found


def unstored(found: Mapping[str, Tensor], schemes: Mapping[str, str], where: object) -> dict[str, Tensor]:
    """A version's tensors from their stored form; RunError, naming `where` they lie, for a part that is missing."""
    tensors = dict(found)
    for module in packed_modules(schemes):
        for part in ("weight_packed", "weight_shape"):
            if f"{module}.{part}" not in tensors:
                raise RunError(f"{where}: tensor {module}.{part} is missing; write the snapshot again")
        columns = int(tensors.pop(f"{module}.weight_shape")[1])
        tensors[f"{module}.weight"] = unpack_int4(tensors.pop(f"{module}.weight_packed"), columns)
    return tensors


def packed_modules(schemes: Mapping[str, str]) -> list[str]:
    """Modules whose codes are stored eight to an int32."""
    return [module for module, scheme in schemes.items() if SCHEMES[scheme].packed]


def check_exportable(schemes: Mapping[str, str]) -> None:
    """ConfigurationError for a module whose scheme has no stored form that others read."""
    for module, scheme in schemes.items():
        if scheme not in FORMATS:
            raise ConfigurationError(
                f"{module}: scheme '{scheme}' has no compressed-tensors form that engines read; export a run of "
                f"{', '.join(FORMATS)}, or the masters with --format hf"
            )


def quantization_config(schemes: Mapping[str, str], linears: Collection[str]) -> dict[str, Any]:
    """The `quantization_config` of a model whose modules have these schemes; `linears` are all matrices there are.

    Where all quantized modules share a scheme, it is that of every linear layer but those under `ignore`; otherwise
    each scheme lists its modules.
    """
    names = sorted(set(schemes.values()))
    modules = {name: sorted(module for module, scheme in schemes.items() if scheme == name) for name in names}
    groups = {
        f"group_{index}": _group(SCHEMES[name], ["Linear"] if len(names) == 1 else modules[name])
        for index, name in enumerate(names)
    }
    formats = {FORMATS[name] for name in names}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": groups,
        "ignore": sorted(({*linears} | {HEAD}) - {*schemes}),
    }


def _group(scheme: Scheme, targets: list[str]) -> dict[str, Any]:
    assert scheme.weight is not None
    return {
        "targets": targets,
        "format": FORMATS[scheme.name],
        "weights": _arguments(scheme.weight, dynamic=False),
        "input_activations": None if scheme.activation is None else _arguments(scheme.activation, dynamic=True),
        "output_activations": None,
    }


def _arguments(quantizer: Quantizer, dynamic: bool) -> dict[str, Any]:
    """The library's `QuantizationArgs`."""
    kinds = {INT8: ("int", 8), INT4: ("int", 4), E4M3: ("float", 8)}
    kind, bits = kinds[quantizer.format]
    arguments = {"num_bits": bits, "type": kind, "symmetric": True, "dynamic": dynamic}
    match quantizer.granularity:
        case PerRow():
            return arguments | {"strategy": "token" if dynamic else "channel"}
        case PerGroup(size):
            return arguments | {"strategy": "group", "group_size": size}
        case PerBlock(rows, columns):
            return arguments | {"strategy": "block", "block_structure": [rows, columns]}
