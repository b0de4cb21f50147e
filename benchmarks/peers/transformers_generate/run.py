"""Tokens a second of `transformers`' `generate`, fp32."""

from __future__ import annotations

import argparse

from benchmarks.peers.protocol import System, main


class Transformers:
    def __init__(self) -> None:
        import torch
        import transformers

        from benchmarks.peers.smollm2 import model

        self.name = f"transformers {transformers.__version__}, torch {torch.__version__}, fp32"
        self.model = model()

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        import torch

        token_ids = torch.tensor(prompts)
        how = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        output = self.model.generate(
            token_ids,
            attention_mask=torch.ones_like(token_ids),
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        completions: list[list[int]] = output[:, token_ids.shape[1] :].tolist()
        return completions


def load(_: argparse.Namespace) -> System:
    return Transformers()


if __name__ == "__main__":
    main(__doc__, load, lambda parser: None)
