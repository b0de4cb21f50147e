"""What is sent to engines elsewhere: the stored form, no byte more, and the same weights when it is opened."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from qarl.errors import RunError
from qarl.quant import SCHEMES, scheme_named
from qarl.sync.arrays import pack, unpack
from qarl.sync.snapshot import verify


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_arrives_is_what_was_published(small, scheme: str) -> None:
    snapshot = small.learner(scheme).publish()
    found = unpack(pickle.loads(pickle.dumps(pack(snapshot))))
    assert (found.version, found.checksum, found.schemes) == (snapshot.version, snapshot.checksum, snapshot.schemes)
    assert found.tensors.keys() == set(snapshot.tensors)
    for name, tensor in snapshot.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype
        assert torch.equal(found.tensors[name], tensor), name
    verify(small.decoder(), found)


@pytest.mark.parametrize("scheme", ["none", "w8a8-int8", "w4a16", "fp8"])
def test_no_more_is_sent_than_the_scheme_stores(small, scheme: str) -> None:
    snapshot = small.learner(scheme, rules={"lm_head": "none"}).publish()
    shapes = dict(small.decoder().matrices())
    matrices = {f"{module}.weight": shapes[module] for module in snapshot.schemes}
    whole = [t for n, t in snapshot.tensors.items() if n not in matrices and not n.endswith("_scale")]
    expected = sum(scheme_named(scheme).stored_bytes(shape) for shape in matrices.values())
    expected += sum(4 * tensor.numel() for tensor in whole)
    expected += 16 * len(matrices) * (scheme == "w4a16")  # the shape of every packed matrix
    assert pack(snapshot).num_bytes == expected


def test_read_only_memory_is_read_without_copying_or_complaint(small, recwarn: pytest.WarningsRecorder) -> None:
    parcel = pack(small.learner("w8a8-int8").publish())
    name = "model.layers.0.mlp.up_proj.weight"
    octets = np.array(parcel.octets[name])
    octets.flags.writeable = False
    found = unpack(dataclasses.replace(parcel, octets={**parcel.octets, name: octets}))
    assert found.tensors[name].data_ptr() == octets.ctypes.data
    assert len(recwarn) == 0


def test_a_part_that_did_not_arrive_is_named(small) -> None:
    parcel = pack(small.learner("w4a16").publish())
    name = "model.layers.0.mlp.up_proj.weight_shape"
    octets = {key: value for key, value in parcel.octets.items() if key != name}
    with pytest.raises(RunError, match=f"weights of version 0: tensor {name} is missing"):
        unpack(dataclasses.replace(parcel, octets=octets))
