"""Tokens a second of our own engine, as `qarl bench rollout` measures them."""

from __future__ import annotations

import argparse

from benchmarks.peers.protocol import System, main


class Native:
    def __init__(self, scheme: str, kv_cache: str, max_batch: int) -> None:
        import qarl
        from qarl.process import prepare

        prepare()  # as the `qarl` command does, before torch is imported
        from qarl.build import build
        from qarl.recipe import parse_recipe

        recipe = {
            "model": "smollm2-135m",
            "scheme": scheme,
            "prompts_per_step": max_batch,
            "group_size": 1,
            "prompts": {"type": "arithmetic"},
            "rewards": [{"type": "answer"}],
            "advantage": {"type": "none"},
            "engine": {
                "type": "native",
                "kv_cache": kv_cache,
                "max_concurrency": max_batch,
                "kv_bytes": 4 << 30,
            },
        }
        cast = build(parse_recipe(recipe, "command line")).cast
        self.name = f"qarl {qarl.__version__}, {scheme}, {kv_cache} cache"
        self.engine = cast.engine
        self.engine.load(cast.learner.publish())

    def complete(self, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
        from qarl.records import Prompt, Sampling

        asked = [Prompt(f"random/{i}", tuple(prompt), "", {}) for i, prompt in enumerate(prompts)]
        sampling = Sampling(temperature=temperature, max_new_tokens=new_tokens, stop_token_ids=())
        groups = self.engine.generate(asked, 1, sampling, seed=(0, 0))
        return [group.completions[0].token_ids.tolist() for group in groups]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scheme", default="w8a8-int8", help="as in `qarl bench rollout`")
    parser.add_argument("--kv-cache", default="fp32", choices=["fp32", "int8"], help="as in `qarl bench rollout`")
    parser.add_argument("--max-batch", type=int, default=256, help="most completions at once")


def load(options: argparse.Namespace) -> System:
    return Native(options.scheme, options.kv_cache, options.max_batch)


if __name__ == "__main__":
    main(__doc__, load, add_options)
