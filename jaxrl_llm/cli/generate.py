# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Complete text with a model: `python -m jaxrl_llm.cli.generate --prompt "12+30="`.

Prompts come from --prompt, from --input (JSON lines with "prompt": text or chat messages), or from
standard input. With --output each line comes back with "completion", "finish" and where it came
from ("index" of the line among those of --input, "sample") added, in order of completion; a line
that can't be completed comes back with "error", and the exit code is then 2. An --output that
exists is not touched; --resume goes on with what it lacks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from jaxrl_llm.errors import ConfigError, DataError, UserError

SAMPLING = {
    "max-tokens": 128, "min-tokens": 0, "temperature": 1.0, "top-p": 1.0, "top-k": 0, "min-p": 0.0,
}  # fmt: skip
OWN = ("completion", "finish", "error", "index", "sample", "seed")  # columns of the output


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m jaxrl_llm.cli.generate", description=__doc__)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="HF folder, .gguf file, hub id, name")
    add("--prompt", action="append", help="a prompt; may be given several times")
    add("--input", help="JSON lines, each with a prompt")
    add("--output", help="JSON lines to write; must not exist")
    add("--resume", action="store_true", help="go on with an --output that exists")
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
        return _run(_parser().parse_args(args))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(options: argparse.Namespace) -> int:
    _check(options)
    records = _records(options)
    with _output(options, records) as (out, done, seed):
        return _complete(options, records, out, done, seed)


def _complete(
    options: argparse.Namespace,
    records: list[dict[str, Any]],
    out: IO[str] | None,
    done: set[tuple[int, int]],
    seed: int,
) -> int:
    from jaxrl_llm.checkpoint.pretrained import load
    from jaxrl_llm.rollout.engine import Engine, EngineConfig, SamplingParams

    model = load(options.model)
    params = SamplingParams(
        **{name: getattr(options, name) for name in (n.replace("-", "_") for n in SAMPLING)},
        stop_ids=model.tokenizer.eos_ids,
        stop_strings=tuple(options.stop),
        seed=seed,
    )
    params.check()
    requests, refused = _requests(options, records, model, params, done)
    count = len(requests) * options.n
    total, start = 0, time.monotonic()
    if requests:
        config = EngineConfig(
            max_prompt_tokens=max(len(request.prompt.tokens) for request in requests),
            max_new_tokens=options.max_tokens,
            slots=min(64, count),
            group_size=options.n,
            weights=options.weights,
        )
        engine = Engine(model.config, model.params, config, decode_text=model.tokenizer.decode)
        for number, rollout in enumerate(engine.generate(requests), 1):
            total += len(rollout.tokens)
            text = model.tokenizer.decode(rollout.tokens.tolist(), skip_special=True)
            index = int(rollout.prompt.id)
            if (index, rollout.sample) not in done:
                own = {"completion": text, "finish": rollout.finish_reason, "seed": seed}
                _show(records[index], index, rollout.sample, own, out, count > 1)
            if sys.stderr.isatty() or number == count:
                rate = total / (time.monotonic() - start)
                bar = f"\r{'█' * (20 * number // count):20} {number}/{count} · {rate:.0f} tok/s"
                print(bar, end="", file=sys.stderr)
    print(f" · {total} tokens · seed {seed}", file=sys.stderr)
    for index, error in refused.items():
        place = f"{options.input}: prompt {index + 1}: {error}"
        print(f"error: {place}", file=sys.stderr)
        if out is not None and (index, 0) not in done:
            _show(records[index], index, 0, {"error": str(error), "seed": seed}, out, True)
    return 2 if refused else 0


def _requests(
    options: argparse.Namespace, records, model, params, done
) -> tuple[list[Any], dict[int, UserError]]:
    """What is still to be sampled, and why some records can't be."""
    from jaxrl_llm.rollout.engine import Request
    from jaxrl_llm.types import Prompt

    refused: dict[int, UserError] = {}
    requests = []
    for uid, record in enumerate(records):
        try:
            tokens, text = _encode(record["prompt"], options.chat, model.tokenizer)
            room = model.config.max_position_embeddings - options.max_tokens
            if not 0 < len(tokens) <= room:
                raise DataError("bad prompt", got=f"{len(tokens)} tokens", expected=f"1 … {room}")
        except UserError as error:
            if not options.input:
                raise
            refused[uid] = error
            continue
        if any((uid, sample) not in done for sample in range(options.n)):
            requests.append(Request(Prompt(str(uid), tuple(tokens), text), params, options.n, uid))
    return requests, refused


def _encode(prompt: Any, chat: bool, tokenizer: Any) -> tuple[list[int], str]:
    from jaxrl_llm.text.chat import encode_prompt

    if not isinstance(prompt, str | list):
        raise DataError(
            "bad prompt", got=type(prompt).__name__, expected="text, or a list of chat messages"
        )
    if chat and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    return encode_prompt(prompt, tokenizer)


def _check(options: argparse.Namespace) -> None:
    for name in ("n", "max_tokens"):
        if getattr(options, name) < 1:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is too small", got=getattr(options, name), expected="≥ 1")
    if options.prompt and options.input:
        raise ConfigError("both --prompt and --input", expected="one of them")
    if options.resume and not options.output:
        raise ConfigError("--resume without --output", hint="--output=FILE that it goes on with")


def _records(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What is to be completed, each with a `prompt`."""
    if not options.input:
        return [{"prompt": prompt} for prompt in options.prompt or [sys.stdin.read()]]
    from jaxrl_llm.data.sources import json_lines

    records, path = [], pathlib.Path(options.input)
    for line, record in json_lines(path, '{"prompt": …}'):
        where = f"{path}:{line}"
        if "prompt" not in record:
            raise DataError(f"{where} has no prompt", got=", ".join(record) or "no columns")
        if options.output and (taken := [name for name in OWN if name in record]):
            raise DataError(
                f"{where} has columns that the output has, too",
                got=", ".join(taken),
                hint="rename them",
            )
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise DataError(f"{where} has half of a character (a lone surrogate)") from None
        records.append(record)
    if not records:
        raise DataError(f"{path} has no lines")
    return records


@contextlib.contextmanager
def _output(
    options: argparse.Namespace, records: list[dict[str, Any]]
) -> Iterator[tuple[IO[str] | None, set[tuple[int, int]], int]]:
    """The file to write to, what it has already (index, sample), and the seed of the run."""
    seed = secrets.randbelow(2**32) if options.seed is None else options.seed
    if not options.output:
        yield None, set(), seed
        return
    path, done = pathlib.Path(options.output), set()
    try:
        new = not (options.resume and path.exists())
        if not new:
            done, seed, end = _written(path, records, seed, fixed=options.seed is not None)
        out = path.open("x" if new else "a", encoding="utf-8")
        if not new:
            out.truncate(end)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists", hint="another --output, or --resume to go on with it"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} can't be written", got=error.strerror) from error
    try:
        with out:
            yield out, done, seed
    finally:
        if new and path.stat().st_size == 0:  # nothing came of it: the same command may come again
            path.unlink()


def _written(
    path: pathlib.Path, records: list[dict[str, Any]], seed: int, *, fixed: bool
) -> tuple[set[tuple[int, int]], int, int]:
    """What an earlier run wrote, its seed, and where its last whole line ends.

    Args:
        fixed: whether the seed must be that of the earlier run.
    """
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    try:
        lines = [json.loads(line) for line in whole.splitlines()]
        ours = all(
            {k: v for k, v in line.items() if k not in OWN} == records[line["index"]]
            for line in lines
        )
        done = {(line["index"], line["sample"]) for line in lines}
        seeds = {line["seed"] for line in lines}
    except (ValueError, AttributeError, LookupError, TypeError):
        ours, done, seeds = False, set(), set()
    if not ours or len(seeds) > 1 or (content and not lines):
        raise ConfigError(
            f"{path} is not what these prompts were completed to", hint="another --output"
        )
    before = seeds.pop() if seeds else seed
    if fixed and seed != before:
        raise ConfigError(f"{path} was written with another seed", got=seed, expected=before)
    return done, before, len(whole)


def _show(
    record: dict[str, Any], index: int, sample: int, own: dict[str, Any], out: Any, many: bool
) -> None:
    if out is not None:
        line = {**record, "index": index, "sample": sample, **own}
        print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
    else:
        text = own["completion"]
        print(f"── {index}.{sample}\n{text}" if many else text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
