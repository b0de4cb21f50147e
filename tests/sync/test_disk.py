import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qarl.errors import RunError
from qarl.ops.adapter import LowRank
from qarl.quant import SCHEMES, quantize, unpack_int4
from qarl.records import Lora, Snapshot
from qarl.sync import disk
from qarl.sync.adapters import take_adapters
from qarl.sync.checksum import checksum
from qarl.sync.disk import DESCRIPTION, MARKER, TENSORS, read_snapshot, write_snapshot

MODULE = "model.layers.0.mlp.down_proj"


def snapshot(scheme: str = "w8a8-int8", version: int = 7) -> Snapshot:
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(version))
    q = quantize(weight, SCHEMES[scheme], MODULE)
    tensors = {
        f"{MODULE}.weight": q.codes,
        f"{MODULE}.weight_scale": q.scale,
        "model.norm.weight": torch.ones(8, dtype=torch.bfloat16),
    }
    return Snapshot(version, tensors, {MODULE: scheme}, checksum(tensors))


@pytest.mark.parametrize("scheme", ["w8a8-int8", "w4a8-int8", "w4a16", "fp8"])
def test_a_snapshot_comes_back_as_it_was_written(scheme: str, tmp_path: Path) -> None:
    written = snapshot(scheme)
    write_snapshot(written, tmp_path / "deep" / "v7")
    read = read_snapshot(tmp_path / "deep" / "v7")
    assert checksum(read.tensors) == checksum(written.tensors)
    assert (read.version, read.schemes, read.checksum) == (7, written.schemes, written.checksum)
    assert [entry.name for entry in (tmp_path / "deep").iterdir()] == ["v7"]


def test_packed_schemes_are_stored_as_other_readers_expect(tmp_path: Path) -> None:
    written = snapshot("w4a16")
    write_snapshot(written, tmp_path / "v7")
    stored = load_file(tmp_path / "v7" / TENSORS)
    assert sorted(stored) == [
        f"{MODULE}.weight_packed",
        f"{MODULE}.weight_scale",
        f"{MODULE}.weight_shape",
        "model.norm.weight",
    ]
    assert stored[f"{MODULE}.weight_packed"].shape == (6, 32)
    assert stored[f"{MODULE}.weight_shape"].tolist() == [6, 256]
    assert torch.equal(unpack_int4(stored[f"{MODULE}.weight_packed"], 256), written.tensors[f"{MODULE}.weight"])


def adapters(base: Snapshot) -> Snapshot:
    low_rank = {MODULE: LowRank(torch.randn(2, 256), torch.randn(6, 2))}
    return take_adapters(low_rank, Lora(base, 2, 3.5), version=8)


def test_adapters_come_back_on_their_base_and_are_written_without_it(tmp_path: Path) -> None:
    base = snapshot("w4a16")
    written = adapters(base)
    write_snapshot(written, tmp_path / "v8")
    assert load_file(tmp_path / "v8" / TENSORS).keys() == written.tensors.keys()
    read = read_snapshot(tmp_path / "v8", base)
    assert checksum(read.tensors) == checksum(written.tensors)
    assert (read.version, read.schemes, read.checksum) == (8, base.schemes, written.checksum)
    assert read.lora is not None and read.lora.base is base and (read.lora.rank, read.lora.alpha) == (2, 3.5)


def test_adapters_without_their_base_or_with_another_scale_are_refused(tmp_path: Path) -> None:
    base = snapshot("w4a16")
    write_snapshot(adapters(base), tmp_path / "v8")
    with pytest.raises(RunError, match=rf"adapters of the base {base.checksum}, but none was given; read that base"):
        read_snapshot(tmp_path / "v8")
    with pytest.raises(RunError, match=rf"adapters of the base {base.checksum}, but what was given is [0-9a-f]+; read"):
        read_snapshot(tmp_path / "v8", snapshot("w4a16", version=6))
    description = tmp_path / "v8" / DESCRIPTION
    description.write_text(description.read_text().replace('"alpha": 3.5', '"alpha": 4.5'))
    with pytest.raises(RunError, match="its checksum does not belong to its digests"):
        read_snapshot(tmp_path / "v8", base)


def test_tied_tensors_and_views_can_be_written(tmp_path: Path) -> None:
    fused = torch.arange(32, dtype=torch.float32).reshape(8, 4)
    tensors = {"q": fused[:4], "k": fused[4:], "tied": fused, "turned": fused.t()}
    write_snapshot(Snapshot(0, tensors, {}, checksum(tensors)), tmp_path / "v0")
    assert checksum(read_snapshot(tmp_path / "v0").tensors) == checksum(tensors)


def test_a_folder_without_its_marker_is_refused(tmp_path: Path) -> None:
    write_snapshot(snapshot(), tmp_path / "v7")
    (tmp_path / "v7" / MARKER).unlink()
    with pytest.raises(RunError, match=r"v7: no complete snapshot here"):
        read_snapshot(tmp_path / "v7")
    with pytest.raises(RunError, match=r"absent: no complete snapshot here"):
        read_snapshot(tmp_path / "absent")


@pytest.mark.parametrize("stage", ["tensors", "description", "rename"])
def test_a_writer_that_dies_leaves_nothing_readable_and_can_be_run_again(stage, tmp_path, monkeypatch) -> None:
    def die(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    owner, name = {"tensors": (disk, "save_file"), "description": (json, "dumps"), "rename": (Path, "rename")}[stage]
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, die)
        with pytest.raises(KeyboardInterrupt):
            write_snapshot(snapshot(), tmp_path / "v7")
    with pytest.raises(RunError, match="no complete snapshot"):
        read_snapshot(tmp_path / "v7")
    write_snapshot(snapshot(), tmp_path / "v7")
    assert read_snapshot(tmp_path / "v7").version == 7


def test_an_incomplete_snapshot_is_replaced_but_nothing_else_is(tmp_path: Path) -> None:
    write_snapshot(snapshot(version=1), tmp_path / "v")
    (tmp_path / "v" / MARKER).unlink()
    write_snapshot(snapshot(version=2), tmp_path / "v")
    assert read_snapshot(tmp_path / "v").version == 2
    with pytest.raises(RunError, match="already holds a complete snapshot"):
        write_snapshot(snapshot(version=3), tmp_path / "v")
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter1.txt").write_text("x")
    with pytest.raises(RunError, match=r"thesis: holds other files, such as chapter1\.txt"):
        write_snapshot(snapshot(), other)
    assert read_snapshot(tmp_path / "v").version == 2


def test_a_flipped_bit_is_found_and_its_tensor_named(tmp_path: Path) -> None:
    write_snapshot(snapshot(), tmp_path / "v7")
    path = tmp_path / "v7" / TENSORS
    tensors = load_file(path)
    tensors[f"{MODULE}.weight"][3, 100] ^= 1
    save_file(tensors, path)
    with pytest.raises(RunError, match=rf"{TENSORS}: tensor {MODULE}\.weight is damaged"):
        read_snapshot(tmp_path / "v7")


@pytest.mark.parametrize(("scheme", "name"), [("w8a8-int8", "model.norm.weight"), ("w4a16", f"{MODULE}.weight_packed")])
def test_a_missing_tensor_is_named(scheme: str, name: str, tmp_path: Path) -> None:
    write_snapshot(snapshot(scheme), tmp_path / "v7")
    path = tmp_path / "v7" / TENSORS
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path)
    with pytest.raises(RunError, match=f"tensor {name} is missing"):
        read_snapshot(tmp_path / "v7")


def test_torn_files_are_named(tmp_path: Path) -> None:
    write_snapshot(snapshot(), tmp_path / "v7")
    tensors, description = tmp_path / "v7" / TENSORS, tmp_path / "v7" / DESCRIPTION
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match=f"{TENSORS}: cannot be read"):
        read_snapshot(tmp_path / "v7")
    tensors.write_bytes(whole)
    description.write_text('{"version": 7')
    with pytest.raises(RunError, match=f"{DESCRIPTION}: not a snapshot's description"):
        read_snapshot(tmp_path / "v7")


def test_tensors_changed_since_publishing_are_not_written(tmp_path: Path) -> None:
    published = snapshot()
    published.tensors[f"{MODULE}.weight_scale"][0] *= 2
    with pytest.raises(RunError, match="version 7 changed after it was published"):
        write_snapshot(published, tmp_path / "v7")
    assert not (tmp_path / "v7").exists()


def test_packed_codes_are_read_by_the_rule_that_other_readers_follow(tmp_path: Path) -> None:
    """compressed-tensors' `pack-quantized`: eight codes + 8 in each int32, the first in its lowest bits."""
    written = snapshot("w4a16")
    write_snapshot(written, tmp_path / "v7")
    words = load_file(tmp_path / "v7" / TENSORS)[f"{MODULE}.weight_packed"].numpy().view(np.uint32)
    codes = np.stack([(words >> 4 * place & 15).astype(np.int64) - 8 for place in range(8)], -1).reshape(6, 256)
    assert np.array_equal(codes, written.tensors[f"{MODULE}.weight"].numpy())
