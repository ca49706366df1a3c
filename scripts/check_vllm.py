# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""An exported folder as vLLM runs it: the same greedy tokens, and their log-probabilities.

    python scripts/check_vllm.py make FOLDER [MODEL]   # our environment: export, generate, store
    python scripts/check_vllm.py check FOLDER          # an environment with vLLM

`make` exports MODEL (the embedded SmolLM2 by default) to FOLDER and stores prompts, greedy tokens
and log-probabilities in FOLDER.json; `check` compares. Exit code 1 if a token differs.
"""

from __future__ import annotations

import json
import pathlib
import sys

PROMPTS = ("The capital of France is", "def add(a, b):\n    return", "1 2 3 4 5 6")
NEW = 24


def make(folder: str, model: str) -> int:
    from jaxrl_llm.checkpoint.huggingface import save_folder
    from jaxrl_llm.checkpoint.pretrained import load
    from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
    from jaxrl_llm.types import Prompt

    loaded = load(model)
    save_folder(folder, loaded.params, loaded.config, loaded.tokenizer)
    engine = Engine(
        loaded.config,
        loaded.params,
        EngineConfig(max_prompt_tokens=32, max_new_tokens=NEW, slots=8),
    )
    requests = [
        Request(
            Prompt(id=text, tokens=tuple(loaded.tokenizer.encode(text)), text=text),
            SamplingParams(max_tokens=NEW, temperature=0.0),
            n=1,
            uid=index,
        )
        for index, text in enumerate(PROMPTS)
    ]
    stored = [
        {
            "prompt": list(rollout.prompt.tokens),
            "tokens": rollout.tokens.tolist(),
            "logp": rollout.logp_sampler.tolist(),
        }
        for rollout in engine.generate(requests)
    ]
    pathlib.Path(f"{folder}.json").write_text(json.dumps(stored))
    print(f"{folder}: {len(stored)} prompts, {NEW} tokens each")
    return 0


def check(folder: str) -> int:
    import vllm

    stored = json.loads(pathlib.Path(f"{folder}.json").read_text())
    model = vllm.LLM(folder, dtype="float32", max_model_len=128, max_num_seqs=8, enforce_eager=True)
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=NEW, logprobs=0, ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt"]} for case in stored]
    equal, gap = True, 0.0
    for case, result in zip(stored, model.generate(prompts, sampling), strict=True):
        out = result.outputs[0]
        count = len(case["tokens"])
        equal &= list(out.token_ids)[:count] == case["tokens"]
        for token, logp, entry in zip(case["tokens"], case["logp"], out.logprobs, strict=False):
            if token in entry:
                gap = max(gap, abs(entry[token].logprob - logp))
    print(f"vLLM {vllm.__version__}: tokens equal: {equal}, largest gap of a logp: {gap:.2e}")
    return 0 if equal else 1


if __name__ == "__main__":
    what, where, *rest = sys.argv[1:]
    sys.exit(check(where) if what == "check" else make(where, *(rest or ["smollm2-135m-instruct"])))
