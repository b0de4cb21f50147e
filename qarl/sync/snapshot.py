"""A learner's weights, quantized once, as what both sides multiply with; and back, from a snapshot's tensors alone.

Shape letters: N output channels, K input features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.models.decoder import HEAD, Decoder
from qarl.models.parameters import parameter_shapes
from qarl.ops.linear import Projection
from qarl.ops.operand import Operand, operand_of, quantize_weight
from qarl.quant.qtensor import QTensor
from qarl.quant.scheme import Scheme, scheme_named
from qarl.records import Snapshot
from qarl.sync.checksum import checksum, combine, digests


class Published(Mapping[str, Tensor]):
    """A version's tensors by name. Codes are read back from the operand that multiplies them whenever they are asked
    for: they are not held twice, and a byte that changes there is seen.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._packed: dict[str, tuple[Operand, range]] = {}
        self._digests: dict[str, str] = {}

    def hold(self, name: str, tensor: Tensor) -> None:
        """Publish a tensor as it is."""
        self._digests |= digests({name: tensor})
        self._held[name] = tensor

    def hold_codes(self, name: str, codes: Tensor, operand: Operand, rows: range) -> None:
        """Publish codes that are these rows of the operand's; `codes` itself is not kept."""
        self._digests |= digests({name: codes})
        self._packed[name] = operand, rows

    def checksum(self) -> str:
        """Of the tensors as they were when they were published."""
        return combine(self._digests)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._held:
            return self._held[name]
        operand, rows = self._packed[name]
        return operand.codes(rows)

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


def take_snapshot(decoder: Decoder, schemes: Mapping[str, Scheme], version: int) -> Snapshot:
    """Quantize the decoder's master weights; `schemes` names the quantized modules, the rest stay full precision.

    Norms and biases are copied. Embeddings, and a matrix that is served in full precision, are the masters themselves,
    valid until the learner's next update; what multiplies such a matrix is a copy. RunError for a NaN or an infinity.
    """
    published = Published()
    operands: dict[str, Operand] = {}
    with torch.no_grad():
        for projection in decoder.projections():
            biases = [None if x.bias is None else x.bias.detach().clone() for x in projection.linears]
            weights = [linear.weight.detach() for linear in projection.linears]
            operands[projection.names[0]] = _publish(projection.names, weights, biases, schemes, published)
        head = decoder.head_weight().detach()[: decoder.vocab_size]
        is_apart = HEAD in schemes or not decoder.config.tie_embeddings
        operands[HEAD] = (
            _publish((HEAD,), [head], [None], schemes, published) if is_apart else operand_of([head], [None])
        )
        for name, parameter in decoder.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                published.hold(name, _finite(name, parameter.detach().clone()))
            elif name.endswith("embed_tokens.weight"):
                published.hold(name, _finite(name, parameter.detach()))
    names = {module: scheme.name for module, scheme in schemes.items()}
    return Snapshot(version, published, names, published.checksum(), operands)


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


def verify(decoder: Decoder, snapshot: Snapshot) -> None:
    """Refuse a snapshot that is not this decoder's, whole, or whose tensors are not those that were published.

    RunError, before anything is changed.
    """
    wanted = _names(decoder, snapshot.schemes)
    for name in sorted(wanted ^ set(snapshot.tensors)):
        state = "is missing" if name in wanted else "does not belong to this model"
        raise RunError(f"weights of version {snapshot.version}: tensor {name} {state}; nothing was loaded")
    found = checksum(snapshot.tensors)
    if found != snapshot.checksum:
        raise RunError(
            f"weights of version {snapshot.version} changed between publishing and loading: checksum {found}, "
            f"published {snapshot.checksum}; nothing was loaded"
        )


def _names(decoder: Decoder, schemes: Mapping[str, str]) -> set[str]:
    """What a snapshot of this decoder's weights holds."""
    head = {f"{HEAD}.weight"} if HEAD in schemes else set()
    return set(parameter_shapes(decoder.config)) | head | {f"{module}.weight_scale" for module in schemes}


def _publish(
    names: tuple[str, ...],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    schemes: Mapping[str, Scheme],
    published: Published,
) -> Operand:
    """One operand of sibling matrices; their codes and scales, or themselves, are published."""
    parts: list[QTensor | Tensor] = [
        quantize_weight(weight, schemes[name], f"{name}.weight")
        if name in schemes
        else _finite(f"{name}.weight", weight)
        for name, weight in zip(names, weights, strict=True)
    ]
    operand = operand_of(parts, biases)
    first_row = 0
    for name, part, bias in zip(names, parts, biases, strict=True):
        if bias is not None:
            published.hold(f"{name}.bias", _finite(f"{name}.bias", bias))
        if isinstance(part, Tensor):
            published.hold(f"{name}.weight", part)
            continue
        rows = range(first_row, first_row := first_row + len(part.codes))
        published.hold_codes(f"{name}.weight", part.codes, operand, rows)
        published.hold(f"{name}.weight_scale", part.scale)
    return operand


def _finite(name: str, tensor: Tensor) -> Tensor:
    """The tensor, checked before it is served or saved; what is quantized is checked by its quantizer."""
    # The extremes of a tensor show a NaN or an infinity without a mask as large as the tensor.
    if not all(bool(x.isfinite()) for x in torch.aminmax(tensor)):
        raise RunError(f"{name}: non-finite values; the update before was too large (learner.lr, max_grad_norm)")
    return tensor


def _receive(projection: Projection, snapshot: Snapshot) -> Operand:
    biases = [snapshot.tensors.get(f"{name}.bias") for name in projection.names]
    return operand_of([_part(name, snapshot) for name in projection.names], biases)


def _part(name: str, snapshot: Snapshot) -> QTensor | Tensor:
    tensor = snapshot.tensors[f"{name}.weight"]
    if name not in snapshot.schemes:
        return tensor
    return QTensor(tensor, snapshot.tensors[f"{name}.weight_scale"], scheme_named(snapshot.schemes[name]))
