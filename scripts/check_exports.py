# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Exported folders as `transformers` sees them, compared with what we computed.

    python scripts/check_exports.py FOLDER …     # in an environment with torch and transformers

Each folder is an export beside which lies `FOLDER.npz` (tokens, logits in float32, and the ids of a
text) and `FOLDER.json` (the attributes of the original config.json, the text). Prints one JSON
object per folder; exit code 1 if one differs. tests/checkpoint/test_family_export.py makes them.
"""

from __future__ import annotations

import json
import pathlib
import sys

import numpy as np
import torch
import transformers

# Who wrote the file, and in which precision; rules of which layers are windowed or not rotated,
# where the export lists the layers.
IGNORED = {"architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path"}
IGNORED |= {"bos_token_id", "eos_token_id", "pad_token_id", "max_window_layers"}
IGNORED |= {"sliding_window_pattern", "_sliding_window_pattern", "no_rope_layer_interval"}


def check(folder: pathlib.Path) -> dict:
    stored = np.load(f"{folder}.npz")
    told = json.loads(pathlib.Path(f"{folder}.json").read_text())
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    tokens = torch.from_numpy(stored["tokens"].astype(np.int64))
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits.numpy()
    attributes = json.loads(model.config.to_json_string(use_diff=False))
    differing = {
        name: [value, attributes.get(name)]
        for name, value in told["config"].items()
        if name not in IGNORED and attributes.get(name) != value
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.encode(told["text"], add_special_tokens=False)
    return {
        "folder": folder.name,
        "keys": [str(x) for name in ("missing_keys", "unexpected_keys") for x in info[name]],
        "gap": float(np.abs(logits - stored["logits"]).max()),
        "config": differing,
        "tokens": ids == stored["ids"].tolist(),
    }


def main() -> int:
    transformers.logging.set_verbosity_error()
    good = True
    for folder in sys.argv[1:]:
        found = check(pathlib.Path(folder))
        print(json.dumps(found))
        good &= not found["keys"] and found["gap"] < 1e-4 and not found["config"]
        good &= found["tokens"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
