"""Publishing adapters: what is carried, what the checksum covers, what is multiplied; and PEFT's folder."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from qarl.errors import RunError
from qarl.models.decoder import Decoder
from qarl.models.lora import LoraConfig, named_tensors, new_adapters
from qarl.ops.adapter import LowRank
from qarl.records import Lora, Snapshot
from qarl.sync.adapters import adapters_of, read_peft, take_adapters, verify_adapters, write_peft
from qarl.sync.snapshot import take_snapshot

Q = "model.layers.0.self_attn.q_proj"
TARGETS = ("*.q_proj", "*.v_proj", "*.down_proj")


def adapters_for(decoder: Decoder) -> dict[str, LowRank]:
    adapters = new_adapters(decoder, LoraConfig(rank=4, targets=TARGETS), seed=0)
    for adapter in adapters.values():
        adapter.b.normal_()
    return adapters


def published(decoder: Decoder) -> Snapshot:
    return take_adapters(adapters_for(decoder), Lora(take_snapshot(decoder, {}, 0), 4, 8.0), version=3)


def test_adapters_alone_are_published_with_their_base_and_as_copies(small):
    decoder = small.decoder()
    adapters, base = adapters_for(decoder), take_snapshot(decoder, {}, 0)
    snapshot = take_adapters(adapters, Lora(base, 4, 8.0), version=3)
    assert snapshot.tensors.keys() == named_tensors(adapters).keys()
    assert (snapshot.version, snapshot.schemes, snapshot.operands) == (3, base.schemes, None)
    assert snapshot.lora is not None and snapshot.lora.base is base and snapshot.lora.scale == 2.0
    verify_adapters(decoder, snapshot)
    adapters[Q].a.add_(1.0)
    verify_adapters(decoder, snapshot)


def test_what_is_multiplied_are_the_published_tensors_and_the_scale_once(small):
    decoder = small.decoder()
    snapshot = published(decoder)
    found = adapters_of(decoder, snapshot)
    assert list(found) == [p.names[0] for p in decoder.projections() if p.names[0].endswith(("q_proj", "down_proj"))]
    a, b = (snapshot.tensors[f"base_model.model.{Q}.lora_{part}.weight"] for part in "AB")
    x, y = torch.randn(5, 128), torch.randn(5, 256)
    added = found[Q].add_to_(y.clone(), x) - y
    torch.testing.assert_close(added[:, :128], 2.0 * (x @ a.t() @ b.t()), rtol=1e-4, atol=1e-4)
    assert not added[:, 128:192].any(), "k has no adapter"
    assert added[:, 192:].any(1).all()


@pytest.mark.parametrize("change", ["byte", "alpha", "rank", "base", "missing"])
def test_adapters_that_are_not_the_published_ones_are_refused(small, change: str):
    decoder, other = small.decoder(), small.decoder(seed=1)
    snapshot = published(decoder)
    lora = snapshot.lora
    assert lora is not None
    tensors = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    if change == "byte":
        tensors[f"base_model.model.{Q}.lora_B.weight"][3, 1] += 1e-3
    elif change == "missing":
        del tensors[f"base_model.model.{Q}.lora_B.weight"]
    elif change == "base":
        lora = dataclasses.replace(lora, base=take_snapshot(other, {}, 0))
    else:
        lora = dataclasses.replace(lora, **{change: 5})
    with pytest.raises(RunError, match=r"adapters of version 3.*; nothing was loaded"):
        verify_adapters(decoder, dataclasses.replace(snapshot, tensors=tensors, lora=lora))


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_adapters_that_are_not_finite_are_not_published(small, value: float):
    decoder = small.decoder()
    adapters = adapters_for(decoder)
    adapters[Q].b[0, 0] = value
    with pytest.raises(RunError, match=rf"base_model\.model\.{Q}\.lora_B\.weight: non-finite values"):
        take_adapters(adapters, Lora(take_snapshot(decoder, {}, 0), 4, 8.0), version=1)


@pytest.mark.parametrize(("alpha", "written"), [(8.0, "8"), (2.5, "2.5")])
def test_a_folder_has_pefts_names_and_comes_back(small, tmp_path: Path, alpha: float, written: str):
    snapshot = published(small.decoder())
    write_peft(tmp_path / "adapter", snapshot.tensors, 4, alpha, "owner/model")
    text = (tmp_path / "adapter" / "adapter_config.json").read_text()
    config = json.loads(text)
    assert f'"lora_alpha": {written},' in text
    assert (config["peft_type"], config["r"], config["base_model_name_or_path"]) == ("LORA", 4, "owner/model")
    assert config["target_modules"][:3] == [Q, Q.replace("q_proj", "v_proj"), "model.layers.0.mlp.down_proj"]
    tensors, rank, found = read_peft(tmp_path / "adapter")
    assert (rank, found) == (4, alpha)
    assert tensors.keys() == snapshot.tensors.keys()
    assert all(torch.equal(tensors[name], snapshot.tensors[name]) for name in tensors)


@pytest.mark.parametrize("damage", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_damaged_folder_is_named(small, tmp_path: Path, damage: str):
    write_peft(tmp_path / "adapter", published(small.decoder()).tensors, 4, 8.0, "")
    (tmp_path / "adapter" / damage).write_text("{")
    with pytest.raises(RunError, match="adapter: adapters cannot be read"):
        read_peft(tmp_path / "adapter")
