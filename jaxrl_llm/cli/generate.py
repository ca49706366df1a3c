# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Complete text with a model: `python -m jaxrl_llm.cli.generate --prompt "12+30="`.

Prompts come from --prompt, from --input (JSON lines with "prompt": text or chat messages), or from
standard input. With --output each line comes back with "completion" added, in order of completion.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import secrets
import sys
import time
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.errors import DataError, UserError

SAMPLING = {"max-tokens": 128, "min-tokens": 0, "temperature": 1.0, "top-p": 1.0, "top-k": 0}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.cli.generate", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="HF folder, .gguf file, hub id, name")
    add("--prompt", action="append", help="a prompt; may be given several times")
    add("--input", help="JSON lines, each with a prompt")
    add("--output", help="JSON lines to write")
    add("--chat", action="store_true", help="prompts are a user's message, put in the template")
    add("--n", type=int, default=1, help="completions of each prompt")
    add("--stop", action="append", default=[], help="a string that ends a completion")
    add("--seed", type=int, help="drawn and told when not given")
    add("--weights", choices=["native", "bfloat16", "int8"], default="native")
    for name, value in SAMPLING.items():
        add(f"--{name}", type=type(value), default=value, help=f"default {value}")
    return parser


def main(args: Sequence[str] | None = None) -> int:
    """Sample, print or write; returns the exit code."""
    try:
        _run(_parser().parse_args(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace) -> None:
    records = _records(options)
    from jaxrl_llm.checkpoint.pretrained import load
    from jaxrl_llm.rollout.engine import Engine, EngineConfig, Request, SamplingParams
    from jaxrl_llm.text.chat import encode_prompt
    from jaxrl_llm.types import Prompt

    model = load(options.model)
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    params = SamplingParams(
        **{name: getattr(options, name) for name in (n.replace("-", "_") for n in SAMPLING)},
        stop_ids=model.tokenizer.eos_ids,
        stop_strings=tuple(options.stop),
        seed=seed,
    )
    requests = []
    for uid, record in enumerate(records):
        chat = options.chat and isinstance(record["prompt"], str)
        prompt = [{"role": "user", "content": record["prompt"]}] if chat else record["prompt"]
        tokens, text = encode_prompt(prompt, model.tokenizer)
        requests.append(Request(Prompt(str(uid), tuple(tokens), text), params, options.n, uid))
    config = EngineConfig(
        max_prompt_tokens=max(1, 1, *(len(request.prompt.tokens) for request in requests)),
        max_new_tokens=options.max_tokens,
        slots=min(64, max(1, len(requests) * options.n)),
        group_size=options.n,
        weights=options.weights,
    )
    engine = Engine(model.config, model.params, config, decode_text=model.tokenizer.decode)
    rollouts, count = engine.generate(requests), len(requests) * options.n
    start, total = time.monotonic(), 0
    with open(options.output, "w") if options.output else contextlib.nullcontext() as out:
        for done, rollout in enumerate(rollouts, 1):
            total += len(rollout.tokens)
            text = model.tokenizer.decode(rollout.tokens.tolist(), skip_special=True)
            _show(records[int(rollout.prompt.id)], rollout, text, out, count > 1)
            if sys.stderr.isatty() or done == count:
                rate = total / (time.monotonic() - start)
                bar = f"\r{'█' * (20 * done // count):20} {done}/{count} · {rate:.0f} tok/s"
                print(bar, end="", file=sys.stderr)
    print(f" · {total} tokens · seed {seed}", file=sys.stderr)


def _records(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be completed, each with a `prompt`."""
    if options.prompt or not options.input:
        return [{"prompt": prompt} for prompt in options.prompt or [sys.stdin.read()]]
    try:
        with open(options.input) as lines:
            records = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{options.input} can't be read as JSON lines", got=error) from error
    if not records or not all(isinstance(r, dict) and "prompt" in r for r in records):
        raise DataError(f"not every line of {options.input} has a prompt")
    return records


def _show(record: dict[str, Any], rollout: Any, text: str, out: Any, many: bool) -> None:
    if out is not None:
        extra = {"completion": text, "sample": rollout.sample, "finish": rollout.finish_reason}
        print(json.dumps({**record, **extra}, ensure_ascii=False), file=out, flush=True)
    else:
        print(f"── {rollout.prompt.id}.{rollout.sample}\n{text}" if many else text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
