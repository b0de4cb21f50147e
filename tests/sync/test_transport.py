"""Versions on their way to an engine elsewhere: what arrives is what was published, and nothing stays behind."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qarl.errors import ConfigurationError, RunError
from qarl.models.lora import LoraConfig
from qarl.quant import SCHEMES, quantize
from qarl.records import Snapshot
from qarl.sync import transport as module
from qarl.sync.adapters import read_peft
from qarl.sync.checksum import checksum, combine, digests
from qarl.sync.compressed_tensors import stored
from qarl.sync.transport import PREFIX, BroadcastTransport, FolderTransport, Transport, receive, transport

MODULES = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
QUANTIZED = sorted(set(SCHEMES) - {"none"})


def snapshot(scheme: str = "w8a8-int8", version: int = 7) -> Snapshot:
    """Two matrices of which one is quantized, and what else there is in other types, down to a single number."""
    generator = torch.Generator().manual_seed(version)
    weight, other = (torch.randn(130, 256, generator=generator) for _ in range(2))
    tensors: dict[str, Tensor] = {"model.norm.weight": torch.randn(5, generator=generator).to(torch.bfloat16)}
    tensors |= {"scale": torch.tensor(float(version)), f"{MODULES[1]}.weight": other.t()}
    schemes = {} if scheme == "none" else {MODULES[0]: scheme}
    if schemes:
        q = quantize(weight, SCHEMES[scheme], MODULES[0])
        tensors |= {f"{MODULES[0]}.weight": q.codes, f"{MODULES[0]}.weight_scale": q.scale}
    return Snapshot(version, tensors, schemes, checksum(tensors))


def offered(sender: Transport, snapshot: Snapshot) -> dict[str, Any]:
    """The message as it arrives: JSON."""
    return dict(json.loads(json.dumps(sender.offer(snapshot, digests(snapshot.tensors)))))


def assert_same(found: Snapshot, published: Snapshot) -> None:
    assert (found.version, dict(found.schemes), found.checksum) == (
        published.version,
        dict(published.schemes),
        published.checksum,
    )
    assert checksum(found.tensors) == published.checksum


@pytest.fixture(scope="module")
def another_process() -> Iterator[ProcessPoolExecutor]:
    """As a worker of an engine is."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def checksum_received(message: dict[str, Any], rank: int) -> str:
    return checksum(receive(message, rank).tensors)


@pytest.mark.parametrize("scheme", ["none", *QUANTIZED])
@pytest.mark.parametrize("way", ["memory", "disk"])
def test_a_folder_brings_every_scheme_to_the_bit_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any, scheme: str
) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    sender = transport(way, str(tmp_path), 1, 20.0)
    published = snapshot(scheme)
    message = offered(sender, published)
    assert Path(message["folder"]).is_relative_to(tmp_path)
    assert_same(receive(message, 0), published)
    assert_same(receive(message, 1), published)  # as many workers as there are
    assert message["bytes"] == sum(tensor.nbytes for tensor in stored(published.tensors, published.schemes).values())
    sender.withdraw()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    sender.withdraw()


def test_a_version_that_was_not_withdrawn_makes_room_for_the_next(tmp_path: Path) -> None:
    sender = FolderTransport(tmp_path / "made" / "when" / "needed")
    first, second = (offered(sender, snapshot(version=version)) for version in (1, 2))
    assert_same(receive(second, 0), snapshot(version=2))
    with pytest.raises(RunError, match="no complete snapshot here"):
        receive(first, 0)


def test_adapters_go_as_a_folder_of_pefts_without_their_base(small: Any, tmp_path: Path) -> None:
    snapshot = small.learner(lora=LoraConfig(rank=4, alpha=6.0, targets=("*.q_proj",))).publish()
    sender = FolderTransport(tmp_path)
    folder = Path(offered(sender, snapshot)["folder"])
    tensors, rank, alpha = read_peft(folder)
    assert (rank, alpha) == (4, 6.0) and digests(tensors) == digests(snapshot.tensors)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 4096 + sum(t.nbytes for t in tensors.values())
    sender.withdraw()
    assert not folder.exists()


def test_a_folder_with_other_tensors_than_were_offered_is_refused(tmp_path: Path) -> None:
    published = snapshot()
    found = digests(published.tensors) | {"scale": 64 * "0"}
    message = FolderTransport(tmp_path).offer(dataclasses.replace(published, checksum=combine(found)), found)
    with pytest.raises(RunError, match="tensor scale is damaged"):
        receive(message, 0)


def test_two_runs_may_share_a_folder(tmp_path: Path) -> None:
    first, second = FolderTransport(tmp_path), FolderTransport(tmp_path)
    messages = [offered(first, snapshot("fp8")), offered(second, snapshot("w4a16"))]
    first.withdraw()
    assert_same(receive(messages[1], 0), snapshot("w4a16"))


def test_a_folder_is_read_by_another_process(tmp_path: Path, another_process: ProcessPoolExecutor) -> None:
    published = snapshot("w4a16")
    message = offered(FolderTransport(tmp_path), published)
    assert another_process.submit(checksum_received, message, 0).result(60) == published.checksum


def test_memory_is_this_systems_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "none")
    with pytest.raises(ConfigurationError, match=r"engine\.transport = 'memory': this system has no .*; set 'disk'"):
        transport("memory", "", 1, 20.0)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rank of the group's member, bytes) of every broadcast in this process."""
    seen: list[tuple[int, int]] = []
    broadcast = module._broadcast

    def noted(group: Any, backend: str, tensor: Tensor) -> Tensor:
        seen.append((group.rank(), tensor.nbytes))
        return broadcast(group, backend, tensor)

    monkeypatch.setattr(module, "_broadcast", noted)
    return seen


@pytest.mark.parametrize("receivers", [1, 2])
def test_a_broadcast_reaches_everybody_to_the_bit_in_as_many_bytes_as_are_stored(
    counted: list[tuple[int, int]], receivers: int
) -> None:
    sender = transport("gloo", "", receivers, 30.0)
    for version, scheme in enumerate(["none", *QUANTIZED]):
        counted.clear()
        published = snapshot(scheme, version)
        message = offered(sender, published)
        with ThreadPoolExecutor(receivers) as pool:
            found = list(pool.map(receive, [message] * receivers, range(receivers)))
        sender.withdraw()
        for one in found:
            assert_same(one, published)
        sizes = [tensor.nbytes for tensor in stored(published.tensors, published.schemes).values()]
        assert message["bytes"] == sum(sizes)
        assert sorted(counted) == sorted((rank, size) for rank in range(1 + receivers) for size in sizes)


def test_codes_of_4_bits_travel_packed(counted: list[tuple[int, int]]) -> None:
    sender = BroadcastTransport("gloo", 1, 20.0)
    message = offered(sender, snapshot("w4a16"))
    receive(message, 0)
    sender.withdraw()
    # 130 x 256 codes of half a byte; two scales a row; the shape; 256 x 130 in fp32; five bfloat16; one number.
    assert sum(size for rank, size in counted if rank == 0) == 130 * 128 + 130 * 8 + 16 + 256 * 130 * 4 + 10 + 4


def test_a_broadcast_reaches_another_process(another_process: ProcessPoolExecutor) -> None:
    sender = BroadcastTransport("gloo", 1, 60.0)
    for version in (1, 2):
        published = snapshot("fp8-block", version)
        message = offered(sender, published)
        assert another_process.submit(checksum_received, message, 0).result(60) == published.checksum
        sender.withdraw()


def test_a_server_holds_the_group_of_the_run_that_it_serves_and_of_none_before(
    another_process: ProcessPoolExecutor,
) -> None:
    another_process.submit(os.getpid).result(60)
    before = 0
    for version in range(4):
        sender = BroadcastTransport("gloo", 1, 60.0)
        message = offered(sender, snapshot("none", version))
        assert another_process.submit(checksum_received, message, 0).result(60) == message["checksum"]
        sender.withdraw()
        files = another_process.submit(open_files).result(60)
        assert before in (0, files)
        before = files


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_receiver_that_never_comes_ends_the_run_in_time() -> None:
    sender = BroadcastTransport("gloo", 2, 1.0)
    offered(sender, snapshot())
    started = time.monotonic()
    with pytest.raises(RunError, match="weights could not be sent by gloo to 2 workers: "):
        sender.withdraw()
    assert time.monotonic() - started < 10.0


def test_nor_does_a_receiver_wait_for_ever_for_another_one() -> None:
    message = offered(BroadcastTransport("gloo", 1, 1.0), snapshot())
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        receive(message | {"size": 3}, 1)
    assert time.monotonic() - started < 10.0


def test_what_a_killed_process_left_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    host = f"{PREFIX}{socket.gethostname()}"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for name in (f"{host}+{gone.pid}+x", f"{host}+{os.getpid()}+x", f"{host}-7+{gone.pid}+x"):
        (tmp_path / name / "version-3").mkdir(parents=True)
    FolderTransport(tmp_path)
    left = {folder.name for folder in tmp_path.iterdir()}
    assert f"{host}+{gone.pid}+x" not in left
    assert {f"{host}+{os.getpid()}+x", f"{host}-7+{gone.pid}+x"} <= left
