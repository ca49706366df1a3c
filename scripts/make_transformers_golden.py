# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Golden numbers from `transformers`, so that the tests need no torch.

In an environment with torch, transformers and numpy (5.24 wrote what lies in tests/golden):

    python scripts/make_transformers_golden.py                   # three tiny random Llamas
    python scripts/make_transformers_golden.py --smollm FOLDER   # our export of SmolLM2

FOLDER comes from this package's own environment (the parity check is the other way round: the
test compares our logits and tokens with what transformers makes of that export):

    python -c "from jaxrl_llm.checkpoint import huggingface, pretrained as p; \\
        m = p.load('smollm2-135m-instruct'); \\
        huggingface.save_folder('FOLDER', m.params, m.config, m.tokenizer)"
"""

from __future__ import annotations

import argparse
import base64
import json
import pathlib

import numpy as np
import torch
import transformers

GOLDEN = pathlib.Path(__file__).parent.parent / "tests" / "golden"

# Multi-head and tied; grouped and untied with another RoPE base; heads wider than D/H.
TINY = {
    "mha_tied": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rms_norm_eps": 1e-6,
    },
    "gqa_untied": {
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
    },
    "wide_heads": {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
        "rms_norm_eps": 1e-5,
    },
}
VOCAB, LAYERS, ROWS, LENGTH = 61, 3, 2, 20

TEXTS = ["75+4=79\n21+4=25\n13+4=", "The capital of France is", "def add(a, b):\n    return a"]
CONVERSATIONS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "system", "content": "Answer in one word."},
        {"role": "user", "content": "Capital of Italy?"},
        {"role": "assistant", "content": "Rome"},
        {"role": "user", "content": "And of Spain?"},
    ],
]
HAIRY = [
    "",
    " ",
    "\n",
    "\n\n\n  \n",
    "  leading and   inner  spaces ",
    "tabs\tand\r\nline ends\r",
    "0123456789 3.14159 1,000,000 ٣٤ Ⅷ ½ x²",
    "I'm sure they'll say it's fine; we've DON'T 'S",
    "naïve café Ångström e\u0301",
    "日本語 中文 한국어 Россия مرحبا",
    "👍🏽🇺🇸❤️‍🔥",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_end|> <|im_end",
    "def f(x):\n    return x ** 2  # comment",
    "zero\u200bwidth nb\u00a0sp \u2028 \x00 \x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "{% if x %}{{ y }}{% endif %}",
]
# Templates in the manner of those that models carry, for what jinja's settings decide.
TEMPLATES = {
    "generation": "{% for m in messages %}\n  {% if m.role == 'assistant' %}\n"
    "    {% generation %}\n<a>{{ m['content'] }}</a>\n{% endgeneration %}\n"
    "  {%- else %}\n<u>{{ m.content | trim }}\n  {% endif %}\n{% endfor %}end",
    "json": "{{ bos_token }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
    "{{ m | tojson }}{{ m | tojson(indent=2) }}{% endfor %}{% if tools %}T{% endif %}"
    "{{ eos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% endfor %}{{ ns.n }}<é&'\">",
}


def tiny(name: str) -> dict:
    torch.manual_seed(sum(map(ord, name)))
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        max_position_embeddings=64,
        attn_implementation="eager",
        **TINY[name],
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    with torch.no_grad():  # far from uniform attention, norms unlike one
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.3 * torch.randn_like(parameter))
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH))
    with torch.no_grad():
        logits = model(tokens).logits
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    state = {k: v for k, v in model.state_dict().items() if k not in tied}
    return {
        "config": json.loads(config.to_json_string(use_diff=False)),
        "config_short": json.loads(config.to_json_string()),
        "weights": {k: {"shape": list(v.shape), "float32": _pack(v)} for k, v in state.items()},
        "tokens": tokens.tolist(),
        "logits": {"shape": list(logits.shape), "float32": _pack(logits)},
    }


def _pack(tensor: torch.Tensor) -> str:
    return base64.b64encode(np.ascontiguousarray(tensor.numpy(), "<f4").tobytes()).decode("ascii")


def smollm(folder: pathlib.Path) -> dict:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    chats = [
        tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True)
        for c in CONVERSATIONS
    ]
    cases = []
    for text in TEXTS + chats:
        ids = tokenizer.encode(text, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        columns = logits[-1].topk(32).indices.tolist() + list(range(0, VOCAB * 32, VOCAB))
        part = logits[-3:, columns]
        cases.append(
            {
                "text": text,
                "ids": ids,
                "columns": columns,
                "logits": {"shape": list(part.shape), "float32": _pack(part)},
            }
        )
    return {
        "special": {
            "bos": tokenizer.bos_token_id,
            "eos": tokenizer.eos_token_id,
            "pad": tokenizer.pad_token_id,
            "generation_eos": model.generation_config.eos_token_id,
            "with_special_tokens": tokenizer.encode("hi"),
        },
        "strings": [
            {"text": s, "ids": tokenizer.encode(s, add_special_tokens=False)} for s in HAIRY
        ],
        "decoded": [tokenizer.decode([i]) for i in range(0, 49152, 997)],
        "conversations": CONVERSATIONS,
        "rendered": chats,
        "templates": [
            {
                "template": template,
                "rendered": [
                    tokenizer.apply_chat_template(c, chat_template=template, tokenize=False)
                    for c in CONVERSATIONS
                ],
            }
            for template in TEMPLATES.values()
        ],
        "cases": cases,
    }


def _write(name: str, value: dict) -> None:
    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    path = GOLDEN / name
    path.write_text(json.dumps({"versions": versions, **value}, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm", type=pathlib.Path, metavar="FOLDER")
    folder = parser.parse_args().smollm
    if folder is not None:
        _write("smollm2_transformers.json", smollm(folder))
        return
    for name in TINY:
        _write(f"llama_{name}_transformers.json", tiny(name))


if __name__ == "__main__":
    main()
