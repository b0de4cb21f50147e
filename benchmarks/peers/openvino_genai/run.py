"""Tokens a second of OpenVINO GenAI's continuous batching: int8 weights, what else it chooses by default."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.peers.protocol import System, main


class OpenVino:
    def __init__(self, max_batch: int, kv_gigabytes: int) -> None:
        import openvino_genai

        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = kv_gigabytes
        scheduler.max_num_seqs = max_batch
        scheduler.max_num_batched_tokens = 2048
        scheduler.enable_prefix_caching = False
        self.name = f"openvino-genai {openvino_genai.__version__}, int8 weights"
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(str(int8_checkpoint()), scheduler, "CPU")

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        import numpy
        import openvino
        import openvino_genai

        how = {"do_sample": True, "temperature": temperature} if temperature else {}
        config = openvino_genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, **how)
        inputs = [openvino.Tensor(numpy.array([prompt], dtype=numpy.int64)) for prompt in prompts]
        results = self.pipeline.generate(inputs, [config] * len(inputs))
        return [list(result.m_generation_ids[0]) for result in results]


def int8_checkpoint() -> Path:
    """The model as OpenVINO's exporter makes it, weights compressed to int8."""
    from benchmarks.peers.smollm2 import full_precision_checkpoint, made_once

    source = full_precision_checkpoint()

    def export(folder: Path) -> None:
        from optimum.exporters.openvino import main_export
        from optimum.intel import OVConfig, OVWeightQuantizationConfig

        int8 = OVConfig(quantization_config=OVWeightQuantizationConfig(bits=8))
        main_export(str(source), folder, task="text-generation-with-past", ov_config=int8)

    return made_once("openvino-int8", export)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-batch", type=int, default=256, help="most completions at once")
    parser.add_argument("--kv-gigabytes", type=int, default=2, help="room for keys and values")


def load(options: argparse.Namespace) -> System:
    return OpenVino(options.max_batch, options.kv_gigabytes)


if __name__ == "__main__":
    main(__doc__, load, add_options)
