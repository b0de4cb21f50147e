"""What vLLM's workers learn from us: to take a published version in place, and to tell what they serve of it.

vLLM imports this in its own processes (`worker_extension_cls`) and mixes the class into its worker.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import vllm
from safetensors.torch import save_file
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.rollout.vllm import repairs
from qarl.rollout.vllm.layers import LayerOutputs
from qarl.rollout.vllm.served import served, served_adapters
from qarl.sync.adapters import read_peft
from qarl.sync.checksum import digests
from qarl.sync.compressed_tensors import stored
from qarl.sync.transport import receive

repairs.apply()


class Worker:
    """Mixed into vLLM's worker, whose `model_runner`, `vllm_config` and `rank` are used. Messages are JSON texts."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _qarl_watched: LayerOutputs

    def qarl_describe(self, _: str) -> dict[str, Any]:
        """What a client must know before it trusts this server."""
        config = self.vllm_config
        model = config.model_config.hf_config
        lora = config.lora_config
        return {
            "vllm": vllm.__version__,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "head_dtype": str(config.model_config.head_dtype).removeprefix("torch."),
            "logprobs_mode": config.model_config.logprobs_mode,
            "vocab_size": model.vocab_size,
            "max_model_len": config.model_config.max_model_len,
            "world_size": config.parallel_config.world_size,
            "device": config.device_config.device_type,
            "hidden_size": model.hidden_size,
            "num_hidden_layers": model.num_hidden_layers,
            "max_lora_rank": 0 if lora is None else lora.max_lora_rank,
            "lora_target_modules": [] if lora is None else sorted(lora.target_modules or []),
        }

    def qarl_watch(self, _: str) -> dict[str, Any]:
        """Keep what every layer gives from now on, until it is asked for. Without compilation or graphs only."""
        self._qarl_watched = LayerOutputs(self.model_runner.get_model())
        return {}

    def qarl_watched(self, message: str) -> dict[str, Any]:
        """Write what was kept to the message's `file`, as safetensors."""
        save_file(self._qarl_watched.take(), json.loads(message)["file"])
        del self._qarl_watched
        return {}

    def qarl_load(self, message: str) -> dict[str, Any]:
        """Serve the version that the message tells how to receive, by vLLM's own reload, in place; then read it back.

        Returns a digest of every tensor as it is served now.
        """
        started = time.perf_counter()
        snapshot = receive(json.loads(message), self.rank)
        received = time.perf_counter()
        weights = stored(snapshot.tensors, snapshot.schemes)
        # As when vLLM loads a model: its kernels take the type of their outputs from here.
        with set_default_torch_dtype(self.vllm_config.model_config.dtype):
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
            repairs.after_reload(self.model_runner.get_model())
        loaded = time.perf_counter()
        found = digests(served(self.model_runner.get_model(), snapshot))
        return {
            "rank": self.rank,
            "digests": found,
            "seconds": {
                "receive": received - started,
                "load": loaded - received,
                "read_back": time.perf_counter() - loaded,
            },
        }

    def qarl_adapters(self, message: str) -> dict[str, Any]:
        """A digest of every tensor of adapters as it is served now; they were loaded from the message's `folder`."""
        sent, _, _ = read_peft(Path(json.loads(message)["folder"]))
        return {"rank": self.rank, "digests": digests(served_adapters(self.model_runner.get_model(), sent))}
