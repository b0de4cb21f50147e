"""What vLLM's workers learn from us: to take a published version in place, and to tell what they serve of it.

vLLM imports this in its own processes (`worker_extension_cls`) and mixes the class into its worker.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from threading import Thread
from typing import Any

import vllm
from safetensors.torch import save_file
from vllm import envs
from vllm.utils.torch_utils import set_default_torch_dtype

from qarl.rollout.vllm import repairs
from qarl.rollout.vllm.layers import LayerOutputs
from qarl.rollout.vllm.served import served, served_adapters
from qarl.rollout.vllm.service import RUN, SERVED
from qarl.sync.adapters import read_peft
from qarl.sync.checksum import digests, one_thread
from qarl.sync.compressed_tensors import stored
from qarl.sync.transport import receive

repairs.apply()


def _end_with_the_run() -> None:
    """End this process when that of the run is gone, however it went: vLLM itself would live on."""
    while True:
        time.sleep(2.0)
        try:
            os.kill(int(os.environ[RUN]), 0)
        except ProcessLookupError:
            os._exit(1)


if RUN in os.environ:
    Thread(target=_end_with_the_run, daemon=True).start()


class Worker:
    """Mixed into vLLM's worker, whose `model_runner`, `vllm_config` and `rank` are used. Messages are JSON texts."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _qarl_watched: LayerOutputs
    _qarl_serving: str = ""

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
            "rounds_activations_of_int4": bool(envs.VLLM_CPU_INT4_W4A8),
            "model": getattr(model, "qarl_fingerprint", None),
            "max_model_len": config.model_config.max_model_len,
            "world_size": config.parallel_config.world_size,
            "device": config.device_config.device_type,
            "max_lora_rank": 0 if lora is None else lora.max_lora_rank,
            "lora_target_modules": [] if lora is None else sorted(lora.target_modules or []),
            **json.loads(os.environ.get(SERVED, "{}")),
        }

    def qarl_watch(self, _: str) -> dict[str, Any]:
        """Keep what every layer gives from now on, until it is asked for. Without compilation or graphs only."""
        self._qarl_watched = LayerOutputs(self.model_runner.get_model())
        return {}

    def qarl_watched(self, _: str) -> dict[str, Any]:
        """Write what was kept to a new file, as safetensors; who asked removes it."""
        handle, file = tempfile.mkstemp(prefix="qarl-layers-", suffix=".safetensors")
        os.close(handle)
        save_file(self._qarl_watched.take(), file)
        del self._qarl_watched
        return {"file": file}

    def qarl_serving(self, _: str) -> dict[str, Any]:
        """What the last load was called by who asked for it."""
        return {"load": self._qarl_serving}

    def qarl_load(self, message: str) -> dict[str, Any]:
        """Serve the version that the message tells how to receive, by vLLM's own reload, in place; then read it back.

        Returns a digest of every tensor as it is served now.
        """
        started, asked = time.perf_counter(), json.loads(message)
        self._qarl_serving = asked["load"]
        snapshot = receive(asked, self.rank)
        received = time.perf_counter()
        weights = stored(snapshot.tensors, snapshot.schemes)
        # As when vLLM loads a model: its kernels take the type of their outputs from here.
        before = self._qarl_addresses()
        with set_default_torch_dtype(self.vllm_config.model_config.dtype):
            self.model_runner.reload_weights(weights_iterator=iter(weights.items()))
            repairs.after_reload(self.model_runner.get_model())
        self._qarl_check_addresses(before)
        loaded = time.perf_counter()
        with one_thread():
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

    def _qarl_addresses(self) -> dict[str, int]:
        """Where tensors lie that graphs and compiled code may have been made for."""
        if self.vllm_config.model_config.enforce_eager:
            return {}
        model = self.model_runner.get_model()
        return {name: tensor.data_ptr() for name, tensor in (*model.named_parameters(), *model.named_buffers())}

    def _qarl_check_addresses(self, before: dict[str, int]) -> None:
        moved = sorted(name for name, place in self._qarl_addresses().items() if before.get(name) != place)
        if moved:
            raise RuntimeError(
                f"a reload moved {moved[0]} and {len(moved) - 1} more tensors, which compiled code goes on reading "
                "where they were; set engine.compiled = false"
            )

    def qarl_adapters(self, message: str) -> dict[str, Any]:
        """A digest of every tensor of adapters as it is served now; they were loaded from the message's `folder`."""
        asked = json.loads(message)
        self._qarl_serving = asked["load"]
        sent, _, _ = read_peft(Path(asked["folder"]))
        return {"rank": self.rank, "digests": digests(served_adapters(self.model_runner.get_model(), sent))}
