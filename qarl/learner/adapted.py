"""A frozen base, published once, and the adapters that are trained on it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from qarl.errors import RunError
from qarl.models.decoder import HEAD, Decoder
from qarl.models.lora import LoraConfig, named_tensors, new_adapters, train_adapters
from qarl.quant.scheme import Scheme
from qarl.records import Lora, Snapshot
from qarl.sync.adapters import adapters_of, read_peft, take_adapters, write_peft
from qarl.sync.checksum import checksum
from qarl.sync.snapshot import operands_of, take_snapshot, unquantized


class Adapted:
    """The decoder serves its masters' published form from now on; of the projections' masters nothing is kept.

    `identity` is the checksum of the masters, by which another base is told.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LoraConfig,
        schemes: Mapping[str, Scheme],
        alignment: str,
        seed: int,
        model_name: str,
    ) -> None:
        self.decoder = decoder
        self.model_name = model_name
        self.adapters = new_adapters(decoder, config, seed)
        train_adapters(decoder, self.adapters)
        self.identity = checksum(dict(decoder.named_parameters()))
        self.lora = Lora(take_snapshot(decoder, schemes, version=0), config.rank, config.alpha)
        if alignment == "none":
            decoder.serve_masters()
        else:
            decoder.serve(operands_of(decoder, self.lora.base))
        decoder.drop_masters()

    def tensors(self) -> dict[str, Tensor]:
        """What is trained, by PEFT's names."""
        return named_tensors(self.adapters)

    def publish(self, version: int) -> Snapshot:
        """The adapters as they are now, which are served from now on."""
        snapshot = take_adapters(self.adapters, self.lora, version)
        self.decoder.adapt(adapters_of(self.decoder, snapshot))
        return snapshot

    def save(self, folder: Path, published: Snapshot) -> None:
        """What was published last, as a folder that PEFT reads."""
        write_peft(folder, published.tensors, self.lora.rank, self.lora.alpha, self.model_name)

    def read(self, folder: Path) -> dict[str, Tensor]:
        """The tensors of a folder that `save` wrote. RunError when they are of other adapters."""
        tensors, rank, alpha = read_peft(folder)
        if tensors.keys() != self.tensors().keys() or (rank, alpha) != (self.lora.rank, self.lora.alpha):
            raise RunError(
                f"{folder}: adapters of other targets, rank or alpha (rank {rank}, alpha {alpha:g}); set learner.lora "
                "as it was"
            )
        return tensors

    def without_adapters(self) -> Decoder:
        """The base alone, made of the same tensors: a reference policy that takes no memory."""
        with torch.device("meta"):
            base = Decoder(self.decoder.config, self.decoder.vocab_size, self.decoder.rounds_kv)
        base.assign(unquantized(self.lora.base), requires_grad=False)
        operands = {p.names[0]: p.operand for p in self.decoder.projections() if p.operand is not None}
        assert self.decoder.head_operand is not None
        base.serve({**operands, HEAD: self.decoder.head_operand})
        return base
