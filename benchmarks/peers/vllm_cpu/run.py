"""Tokens a second of vLLM's CPU build: full precision, or int8 weights and int8 activations per token (W8A8).

The rest is in fp32 or bfloat16: on a CPU with AMX, vLLM multiplies int8 only where activations are bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.protocol import System, main

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"

BINDINGS = ("auto", "nobind", f"0-{(os.cpu_count() or 1) - 1}")
"""Ways to bind OpenMP threads to cores: vLLM's choice, which spares a core for the scheduler, none, and all cores."""

W8A8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


class Vllm:
    def __init__(self, precision: str, bind: str, max_batch: int, kv_gigabytes: int) -> None:
        os.environ[BIND_VARIABLE] = bind
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_gigabytes)
        import vllm

        self.name = f"vllm {vllm.__version__}, {precision}, bind {bind}"
        self.sampling_params = vllm.SamplingParams
        self.llm = vllm.LLM(
            model=str(CHECKPOINTS[precision]()),
            dtype="bfloat16" if precision.endswith("bf16") else "float32",
            max_model_len=2048,
            max_num_seqs=max_batch,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        sampling = self.sampling_params(
            temperature=temperature, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def fp32_checkpoint() -> Path:
    from benchmarks.peers.smollm2 import full_precision_checkpoint

    return full_precision_checkpoint()


def int8_checkpoint() -> Path:
    """The fp32 checkpoint with every matrix but embedding and head as int8 codes and one scale a row."""
    from safetensors.torch import load_file, save_file

    from benchmarks.peers.smollm2 import full_precision_checkpoint, made_once

    source = full_precision_checkpoint()

    def quantize(folder: Path) -> None:
        tensors = load_file(source / "model.safetensors")
        for name, weight_NK in list(tensors.items()):
            if name.endswith("_proj.weight"):
                scale_N1 = weight_NK.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 127
                tensors[name] = (weight_NK / scale_N1).round().char()
                tensors[f"{name}_scale"] = scale_N1
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": W8A8}))
        for file in source.glob("token*"):
            (folder / file.name).write_bytes(file.read_bytes())

    return made_once("w8a8-int8", quantize)


CHECKPOINTS = {
    "fp32": fp32_checkpoint,
    "bf16": fp32_checkpoint,
    "int8": int8_checkpoint,
    "int8-bf16": int8_checkpoint,
}


def fastest_binding(options: argparse.Namespace) -> str:
    """Measures each binding in a process of its own, for it is fixed when a process starts; the environment's wins."""
    if chosen := os.environ.get(BIND_VARIABLE):
        return chosen
    rates: dict[str, float] = {}
    setting = ["--batches", str(options.batches[0]), "--prompt-len", str(options.prompt_len)]
    setting += ["--new-tokens", str(options.new_tokens), "--precision", options.precision]
    for bind in BINDINGS:
        command = [sys.executable, "-m", "benchmarks.peers.vllm_cpu.run", "--bind", bind, *setting]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
        rates[bind] = json.loads(done.stdout)["tokens_per_s"] if done.returncode == 0 else 0.0
        print(f"bind {bind}: {rates[bind]:.1f} tokens/s", file=sys.stderr)
    return max(rates, key=lambda bind: rates[bind])


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=sorted(CHECKPOINTS), default="fp32")
    parser.add_argument("--bind", default="auto", help=f"as in {BIND_VARIABLE}")
    parser.add_argument(
        "--search-bind", action="store_true", help=f"try several at the first batch, unless {BIND_VARIABLE} is set"
    )
    parser.add_argument("--max-batch", type=int, default=256, help="most completions at once")
    parser.add_argument("--kv-gigabytes", type=int, default=2, help="room for keys and values")


def load(options: argparse.Namespace) -> System:
    bind = fastest_binding(options) if options.search_bind else options.bind
    return Vllm(options.precision, bind, options.max_batch, options.kv_gigabytes)


if __name__ == "__main__":
    main(__doc__, load, add_options)
