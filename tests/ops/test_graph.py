"""Recorded kernel calls: they happen again, on the same addresses, with the same bits."""

import ctypes
import struct

import pytest
import torch

from qarl.ops.cpu import CpuKernels
from qarl.ops.graph import Memory, can_record, encode, recording, results_in
from qarl.ops.kernels import kernels, using
from qarl.ops.reference import ReferenceKernels


def test_a_graph_repeats_its_calls_on_what_its_inputs_hold_now(cpu: CpuKernels) -> None:
    x, gain = torch.randn(5, 48), torch.rand(48)
    weight = cpu.pack_codes(torch.randint(-127, 128, (20, 48), dtype=torch.int8))
    column_scales = torch.rand(20)

    def product() -> torch.Tensor:
        codes, scales = kernels().rms_norm_quantize(x, gain, 1e-5)
        return kernels().integer_matmul(codes, scales, weight, column_scales, None, None)

    with using(cpu):
        with recording(Memory()) as graph:
            recorded = product()
        assert torch.equal(recorded, product())
        x.copy_(torch.randn(5, 48))
        expected = product()
        assert not torch.equal(recorded, expected)
        graph.run()
        assert torch.equal(recorded, expected)
        x.copy_(torch.randn(5, 48))
        nanoseconds = graph.run_timed()
    assert len(nanoseconds) == 2 and min(nanoseconds) >= 0
    with using(cpu):
        assert torch.equal(recorded, product())


def test_numbers_of_every_kind_reach_a_recorded_call(cpu: CpuKernels) -> None:
    """Pointers, int64_t and float."""
    x, gain = torch.randn(3, 32), torch.rand(32)
    with using(cpu), recording(Memory()) as graph:
        found = kernels().rms_norm(x, gain, 0.25)
    expected = x / (x.square().mean(1, keepdim=True) + 0.25).sqrt() * gain
    found.zero_()
    graph.run()
    torch.testing.assert_close(found, expected)


def test_floats_are_written_bit_by_bit_and_none_as_null() -> None:
    assert encode(ctypes.c_float, 1.5) == struct.unpack("<i", struct.pack("<f", 1.5))[0] == 0x3FC00000
    assert encode(ctypes.c_float, -2.0) & 0xFFFFFFFF == 0xC0000000
    assert encode(ctypes.c_void_p, None) == 0
    assert encode(ctypes.c_int64, -3) == -3


def test_memory_is_handed_out_again_two_turns_later() -> None:
    memory = Memory()
    first = memory.take((4, 8), torch.float32)
    second = memory.take((3,), torch.int8)
    assert first.shape == (4, 8) and first.dtype == torch.float32 and second.dtype == torch.int8
    memory.turn()
    third = memory.take((4, 8), torch.float32)
    assert len({first.data_ptr(), second.data_ptr(), third.data_ptr()}) == 3
    memory.turn()
    assert memory.take((2, 8), torch.float32).data_ptr() == first.data_ptr()
    larger = memory.take((100,), torch.float32)
    assert larger.data_ptr() != second.data_ptr() and len(larger) == 100


def test_results_stay_in_memory_and_have_the_same_bits(cpu: CpuKernels) -> None:
    memory, x = Memory(), torch.randn(4, 64)
    with using(cpu):
        plain = kernels().gated(x)
        with results_in(memory):
            kept = kernels().gated(x)
        memory.turn()
        memory.turn()
        assert torch.equal(kept, plain) and memory.take((4, 32), torch.float32).data_ptr() == kept.data_ptr()


def test_kernels_that_leave_their_results_in_memory_multiply_at_the_level_of_those_they_stand_for(
    cpu: CpuKernels,
) -> None:
    cpu.integer_level = -1
    with using(cpu):
        with results_in(Memory()):
            assert isinstance(found := kernels(), CpuKernels) and found.integer_level == -1
        with recording(Memory()):
            assert isinstance(found := kernels(), CpuKernels) and found.integer_level == -1


def test_only_the_plain_kernels_are_recorded() -> None:
    with using(ReferenceKernels()):
        assert not can_record()
        with results_in(Memory()):
            assert type(kernels()) is ReferenceKernels


def test_a_graph_that_ran_takes_no_more_calls(cpu: CpuKernels) -> None:
    x = torch.randn(2, 32)
    with using(cpu), recording(Memory()) as graph:
        kernels().gated(x)
        graph.run()
        with pytest.raises(AssertionError, match="complete"):
            kernels().gated(x)
