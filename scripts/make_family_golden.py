# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Golden numbers of tiny models of every family, as `transformers` computes them.

In an environment with torch, transformers, safetensors and numpy (5.24 wrote tests/golden):

    python scripts/make_family_golden.py            # all of tests/golden/family_*.json
    python scripts/make_family_golden.py gemma2 …   # some

Weights follow from a formula (tests/formula_weights.py), so the files hold names, logits, tokens
and projections of gradients only. A checkpoint is written with its names on disk, read again by
`from_pretrained`, and run with plain ("eager") attention in float32; left padding is checked here
to give the same logits as none.
"""

from __future__ import annotations

import argparse
import base64
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file

HERE = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(HERE / "tests"))
from formula_weights import formula_weight, projections  # noqa: E402

VOCAB, LENGTH, PROMPT, NEW = 40, 36, 20, 10
_BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {**_BASE, "head_dim": 8}
_FOUR = {**_BASE, "num_hidden_layers": 4}


def _rope(kind: str, **values) -> dict:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


# Name → (configuration class, its values, flags): "gradients", "greedy"; the sequences are longer
# than every window and than every original context.
CASES = {
    "llama": ("LlamaConfig", {**_HEADS, "attention_bias": True, "mlp_bias": True}, "greedy"),
    "llama31": (
        "LlamaConfig",
        {
            **_HEADS,
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=16,
            ),
        },
        "greedy",
    ),
    "llama_linear": ("LlamaConfig", {**_HEADS, **_rope("linear", factor=4.0)}, ""),
    "llama_dynamic": (
        "LlamaConfig",
        {**_HEADS, "max_position_embeddings": 16, **_rope("dynamic", factor=2.0)},
        "",
    ),
    "llama_yarn": (
        "LlamaConfig",
        {**_HEADS, **_rope("yarn", factor=4.0, original_max_position_embeddings=16)},
        "",
    ),
    "mistral": ("MistralConfig", {**_HEADS, "sliding_window": 8}, "greedy"),
    "qwen2": (
        "Qwen2Config",
        {
            **_FOUR,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "tie_word_embeddings": True,
            **_rope("default", rope_theta=1e6),
        },
        "greedy",
    ),
    "qwen3": ("Qwen3Config", {**_HEADS, "tie_word_embeddings": True}, "greedy gradients"),
    "gemma2": (
        "Gemma2Config",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
        },
        "greedy gradients",
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            **_HEADS,
            "num_hidden_layers": 4,
            "sliding_window": 8,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 8,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "greedy",
    ),
    "olmo2": ("Olmo2Config", {**_BASE, **_rope("default", rope_theta=5e5)}, "greedy"),
    "phi3": (
        "Phi3Config",
        {**_BASE, "hidden_size": 32, "sliding_window": 12},
        "greedy",
    ),
    "phi3_longrope": (
        "Phi3Config",
        {
            **_BASE,
            "hidden_size": 32,
            "original_max_position_embeddings": 16,
            **_rope(
                "longrope",
                short_factor=[1.0, 1.1, 1.3],
                long_factor=[1.2, 3.0, 5.5],
                partial_rotary_factor=0.75,
                original_max_position_embeddings=16,
            ),
        },
        "greedy",
    ),
    "granite": (
        "GraniteConfig",
        {
            **_BASE,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.3,
            "logits_scaling": 0.7,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "greedy",
    ),
    "smollm3": (
        "SmolLM3Config",
        {
            **_FOUR,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
            **_rope("default", rope_theta=2e6),
        },
        "greedy",
    ),
    "mixtral": (
        "MixtralConfig",
        {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2},
        "greedy gradients",
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_HEADS,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "tie_word_embeddings": True,
        },
        "greedy",
    ),
    "qwen3_moe_plain": (
        "Qwen3MoeConfig",
        {
            **_HEADS,
            "moe_intermediate_size": 12,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
        "",
    ),
}


def build(name: str, folder: pathlib.Path) -> tuple[torch.nn.Module, dict[str, list[int]], float]:
    """The model with formula weights, the tensors of its checkpoint, and where its norms centre."""
    kind, values, _ = CASES[name]
    config = getattr(transformers, kind)(**values)
    centre = 0.0 if kind.startswith("Gemma") else 1.0
    blank = transformers.AutoModelForCausalLM.from_config(config).float()
    blank.save_pretrained(folder)
    file = folder / "model.safetensors"
    shapes = {key: list(value.shape) for key, value in load_file(file).items()}
    save_file(
        {key: formula_weight(key, shape, centre) for key, shape in shapes.items()},
        file,
        metadata={"format": "pt"},
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), shapes, centre


def golden(name: str) -> dict:
    flags = CASES[name][2]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model, shapes, centre = build(name, folder)
        written = json.loads((folder / "config.json").read_text())
        tokens = torch.from_numpy(np.random.default_rng(7).integers(3, VOCAB, (2, LENGTH)))
        with torch.no_grad():
            logits = model(tokens, use_cache=False).logits
        check_left_padding(model, tokens, logits)
        result = {
            "config": json.loads(model.config.to_json_string(use_diff=False)),
            "config_written": written,
            "norm_centre": centre,
            "tensors": shapes,
            "parameters": model.num_parameters(),
            "tokens": tokens.tolist(),
            "logits": {"shape": list(logits.shape), "float32": _pack(logits)},
        }
        if "greedy" in flags:
            result["greedy"] = [greedy(model, row[:PROMPT].tolist()) for row in tokens]
        if "gradients" in flags:
            result["gradients"] = gradients(model, tokens, folder)
    return result


def check_left_padding(model, tokens, logits) -> None:
    pad = 5
    padded = torch.nn.functional.pad(tokens, (pad, 0))
    mask = torch.ones_like(padded)
    mask[:, :pad] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        again = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits
    gap = (again[:, pad:] - logits).abs().max().item()
    assert gap < 1e-4, gap


def greedy(model, prompt: list[int]) -> dict:
    """The likeliest tokens one by one, without a cache, and their log-probabilities."""
    tokens, logps = list(prompt), []
    for _ in range(NEW):
        with torch.no_grad():
            logp = model(torch.tensor([tokens]), use_cache=False).logits[0, -1].log_softmax(-1)
        best, second = logp.topk(2).values.tolist()
        assert best - second > 1e-3, "a tie: other weights, please"
        tokens.append(int(logp.argmax()))
        logps.append(best)
    return {"prompt": prompt, "tokens": tokens[len(prompt) :], "logp": logps}


def gradients(model, tokens, folder: pathlib.Path) -> dict:
    """Of the mean log-probability of tokens 1…, by the names on disk: projections of each."""
    logp = model(tokens, use_cache=False).logits[:, :-1].log_softmax(-1)
    mean = logp.gather(-1, tokens[:, 1:, None]).mean()
    mean.backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(folder / "gradients")  # with the names on disk
    found = load_file(folder / "gradients" / "model.safetensors")
    return {
        "mean_logp": mean.item(),
        "projections": {key: projections(key, value) for key, value in found.items()},
    }


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(np.ascontiguousarray(tensor.numpy(), "<f4").tobytes()).decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of " + ", ".join(CASES))
    transformers.logging.set_verbosity_error()
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    for name in parser.parse_args().names or CASES:
        path = HERE / "tests" / "golden" / f"family_{name}.json"
        text = json.dumps({"versions": versions, **golden(name)}, separators=(",", ":"))
        path.write_text(text + "\n", encoding="utf-8")
        print(f"{path.name}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
