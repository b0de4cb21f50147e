"""A learner's weights, quantized once, as what both sides multiply with; and back, from a snapshot's tensors alone.

Shape letters: N output channels, K input features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.models.decoder import HEAD, Decoder
from qarl.ops.linear import Projection
from qarl.ops.operand import IntegerOperand, Operand, operand_of, quantize_weight
from qarl.quant.qtensor import QTensor
from qarl.quant.scheme import Scheme, scheme_named
from qarl.records import Snapshot
from qarl.sync.checksum import checksum


def take_snapshot(decoder: Decoder, schemes: Mapping[str, Scheme], version: int) -> Snapshot:
    """Quantize the decoder's master weights; `schemes` names the quantized modules, the rest stay full precision.

    Embeddings, norms and biases are copied. A matrix served in full precision is the master itself, valid until
    the learner's next update; the copy that is served is its operand. RunError for a NaN or an infinity.
    """
    tensors: dict[str, Tensor] = {}
    operands: dict[str, Operand] = {}
    with torch.no_grad():
        for projection in decoder.projections():
            biases = [None if x.bias is None else x.bias.detach().clone() for x in projection.linears]
            weights = [linear.weight.detach() for linear in projection.linears]
            operand = _publish(projection.names, weights, biases, schemes, tensors)
            operands[projection.names[0]] = operand
        head = decoder.head_weight().detach()[: decoder.vocab_size]
        head_tensors: dict[str, Tensor] = {}
        operands[HEAD] = _publish((HEAD,), [head], [None], schemes, head_tensors)
        if HEAD in schemes or not decoder.config.tie_embeddings:
            tensors |= head_tensors
        for name, parameter in decoder.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "embed_tokens.weight")):
                tensors[name] = parameter.detach().clone()
    _refuse_non_finite(tensors)
    names = {module: scheme.name for module, scheme in schemes.items()}
    return Snapshot(version, tensors, names, checksum(tensors), operands)


def operands_of(decoder: Decoder, snapshot: Snapshot) -> Mapping[str, Operand]:
    """What to multiply with: the snapshot's own operands where it brings them, else built from its tensors."""
    if snapshot.operands is not None:
        return snapshot.operands
    operands = {p.names[0]: _receive(p, snapshot) for p in decoder.projections()}
    name = HEAD if f"{HEAD}.weight" in snapshot.tensors else "model.embed_tokens"
    part = _part(name, snapshot)
    if isinstance(part, Tensor):
        part = part[: decoder.vocab_size]
    return operands | {HEAD: operand_of([part], [None])}


def unquantized(snapshot: Snapshot) -> dict[str, Tensor]:
    """Embeddings and norm gains: what an engine holds as it is."""
    ends = ("norm.weight", "layernorm.weight", "embed_tokens.weight")
    return {name: tensor for name, tensor in snapshot.tensors.items() if name.endswith(ends)}


def verify(snapshot: Snapshot) -> None:
    """Refuse a snapshot whose tensors are not those that were published (RunError)."""
    found = checksum(snapshot.tensors)
    if found != snapshot.checksum:
        raise RunError(
            f"weights of version {snapshot.version} changed between publishing and loading: checksum {found}, "
            f"published {snapshot.checksum}; nothing was loaded"
        )


def _publish(
    names: tuple[str, ...],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    schemes: Mapping[str, Scheme],
    tensors: dict[str, Tensor],
) -> Operand:
    """One operand of sibling matrices; their codes and scales, or themselves, go to `tensors`."""
    parts: list[QTensor | Tensor] = [
        quantize_weight(weight, schemes[name], f"{name}.weight") if name in schemes else weight
        for name, weight in zip(names, weights, strict=True)
    ]
    operand = operand_of(parts, biases)
    first_row = 0
    for name, part, bias in zip(names, parts, biases, strict=True):
        if bias is not None:
            tensors[f"{name}.bias"] = bias
        if isinstance(part, Tensor):
            tensors[f"{name}.weight"] = part
            continue
        rows = slice(first_row, first_row := first_row + len(part.codes))
        # Siblings' codes are views of the stacked operand: the bytes that are served are the bytes that are summed.
        codes = operand.codes[rows] if isinstance(operand, IntegerOperand) else part.codes
        tensors[f"{name}.weight"] = codes
        tensors[f"{name}.weight_scale"] = part.scale
    return operand


def _refuse_non_finite(tensors: Mapping[str, Tensor]) -> None:
    """What is quantized was checked by its quantizer; this is for the rest, before it is served or saved."""
    for name, tensor in tensors.items():
        # The extremes of a tensor show a NaN or an infinity without a mask as large as the tensor.
        if tensor.dtype == torch.float32 and not all(bool(x.isfinite()) for x in torch.aminmax(tensor)):
            raise RunError(f"{name}: non-finite values; the update before was too large (learner.lr, max_grad_norm)")


def _receive(projection: Projection, snapshot: Snapshot) -> Operand:
    biases = [snapshot.tensors.get(f"{name}.bias") for name in projection.names]
    return operand_of([_part(name, snapshot) for name in projection.names], biases)


def _part(name: str, snapshot: Snapshot) -> QTensor | Tensor:
    tensor = snapshot.tensors[f"{name}.weight"]
    if name not in snapshot.schemes:
        return tensor
    return QTensor(tensor, snapshot.tensors[f"{name}.weight_scale"], scheme_named(snapshot.schemes[name]))
