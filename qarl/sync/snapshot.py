"""A learner's weights, quantized once, as what both sides multiply with; and back, from a snapshot's tensors alone.

Shape letters: N output channels, K input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.models.decoder import HEAD, Decoder
from qarl.models.parameters import EMBEDDING, parameter_shapes
from qarl.ops.linear import Projection
from qarl.ops.masters import WHOLE, Masters
from qarl.ops.operand import Operand, operand_of
from qarl.quant.qtensor import QTensor
from qarl.quant.scheme import Scheme, scheme_named
from qarl.records import Snapshot
from qarl.sync.checksum import combine, digests


class Published(Mapping[str, Tensor]):
    """A version's tensors by name. Codes, and matrices in full precision that are nowhere else, are read back from the
    operand that multiplies them whenever they are asked for: they are not held twice, and a byte that changes there is
    seen.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}
        self._packed: dict[str, Callable[[], Tensor]] = {}
        self._digests: dict[str, str] = {}

    def hold(self, name: str, tensor: Tensor) -> None:
        """Publish a tensor as it is."""
        self._digests |= digests({name: tensor})
        self._held[name] = tensor

    def hold_packed(self, name: str, tensor: Tensor, read_back: Callable[[], Tensor]) -> None:
        """Publish a tensor that an operand holds in its own form; `tensor` itself is not kept."""
        self._digests |= digests({name: tensor})
        self._packed[name] = read_back

    def checksum(self) -> str:
        """Of the tensors as they were when they were published."""
        return combine(self._digests)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._held:
            return self._held[name]
        return self._packed[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def __len__(self) -> int:
        return len(self._digests)


def take_snapshot(decoder: Decoder, schemes: Mapping[str, Scheme], version: int) -> Snapshot:
    """Quantize the decoder's master weights; `schemes` names the quantized modules, the rest stay full precision.

    Norms and biases are copied. Embeddings, and a matrix that is served in full precision, are the masters themselves
    where they are all here, valid until the learner's next update; what multiplies such a matrix is a copy. RunError
    for a NaN or an infinity.
    """
    published = Published()
    operands: dict[str, Operand] = {}
    with torch.no_grad():
        for projection in decoder.projections():
            biases = [None if x.bias is None else x.bias.detach().clone() for x in projection.linears]
            masters = [_Master(linear.weight, len(linear.weight), decoder.holder) for linear in projection.linears]
            operands[projection.names[0]] = _publish(projection.names, masters, biases, schemes, published)
        table = _finite(EMBEDDING, decoder.holder.whole(decoder.model.embed_tokens.weight))
        published.hold(EMBEDDING, table)
        if not decoder.config.tie_embeddings:
            head = _Master(decoder.lm_head.weight, decoder.vocab_size, decoder.holder)
            operands[HEAD] = _publish((HEAD,), [head], [None], schemes, published)
        elif HEAD in schemes:
            operands[HEAD] = _publish((HEAD,), [_Master(table, decoder.vocab_size)], [None], schemes, published)
        else:
            operands[HEAD] = operand_of([table[: decoder.vocab_size]], [None])
        for name, parameter in decoder.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                published.hold(name, _finite(name, parameter.detach().clone()))
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


def verify(decoder: Decoder, snapshot: Snapshot) -> dict[str, str]:
    """Refuse a snapshot that is not this decoder's, whole, or whose tensors are not those that were published.

    Returns its tensors' digests. RunError, before anything is changed.
    """
    wanted = _names(decoder, snapshot.schemes)
    for name in sorted(wanted ^ set(snapshot.tensors)):
        state = "is missing" if name in wanted else "does not belong to this model"
        raise RunError(f"weights of version {snapshot.version}: tensor {name} {state}; nothing was loaded")
    found = digests(snapshot.tensors)
    if combine(found) != snapshot.checksum:
        raise RunError(
            f"weights of version {snapshot.version} changed between publishing and loading: checksum {combine(found)}, "
            f"published {snapshot.checksum}; nothing was loaded"
        )
    return found


def _names(decoder: Decoder, schemes: Mapping[str, str]) -> set[str]:
    """What a snapshot of this decoder's weights holds."""
    head = {f"{HEAD}.weight"} if HEAD in schemes else set()
    return set(parameter_shapes(decoder.config)) | head | {f"{module}.weight_scale" for module in schemes}


@dataclass(frozen=True, slots=True, eq=False)
class _Master:
    """A matrix whose first `height` rows are served, and who holds it."""

    weight: Tensor
    height: int
    holder: Masters = WHOLE

    def quantized(self, scheme: Scheme, name: str) -> QTensor:
        return self.holder.quantize(self.weight, self.height, scheme, name)

    def whole(self) -> Tensor:
        return self.holder.whole(self.weight)[: self.height]

    def in_memory(self) -> Tensor | None:
        """The rows served, where they are all in memory here without an operand."""
        values = self.holder.values(self.weight)
        return None if values is None else values[: self.height]


def _publish(
    names: tuple[str, ...],
    masters: Sequence[_Master],
    biases: Sequence[Tensor | None],
    schemes: Mapping[str, Scheme],
    published: Published,
) -> Operand:
    """One operand of sibling matrices; their codes and scales, or themselves, are published."""
    parts: list[QTensor | Tensor] = [
        master.quantized(schemes[name], f"{name}.weight")
        if name in schemes
        else _finite(f"{name}.weight", master.whole())
        for name, master in zip(names, masters, strict=True)
    ]
    operand = operand_of(parts, biases)
    first_row = 0
    for name, master, part, bias in zip(names, masters, parts, biases, strict=True):
        rows = range(first_row, first_row := first_row + master.height)
        if bias is not None:
            published.hold(f"{name}.bias", _finite(f"{name}.bias", bias))
        if isinstance(part, QTensor):
            published.hold_packed(f"{name}.weight", part.codes, partial(operand.codes, rows))
            published.hold(f"{name}.weight_scale", part.scale)
        elif (values := master.in_memory()) is not None:
            published.hold(f"{name}.weight", values)
        else:
            published.hold_packed(f"{name}.weight", part, partial(_dense_rows, operand, rows))
    return operand


def _dense_rows(operand: Operand, rows: range) -> Tensor:
    return operand.dense()[rows.start : rows.stop]


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
