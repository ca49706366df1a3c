# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
"""Write tests/golden/classifiers_transformers.json: scores that transformers gives to reward models
that we exported.

    python scripts/make_classifier_golden.py --torch=/path/to/python-with-torch-and-transformers

The weights are drawn by numpy (tests/tiny_model.py), so the test makes the same folders again.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
TARGET = ROOT / "tests" / "golden" / "classifiers_transformers.json"
TORCH = r"""
import json, sys, torch, transformers
folder, classes, rows = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
kind = {1: "AutoModelForSequenceClassification", 2: "AutoModelForTokenClassification"}[classes]
model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
width = max(map(len, rows))
pad = model.config.pad_token_id
ids = torch.tensor([row + [pad] * (width - len(row)) for row in rows])
seen = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
with torch.no_grad():
    logits = model(input_ids=ids, attention_mask=seen).logits
print(json.dumps(logits.double().numpy().tolist()))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", required=True, help="a Python with torch and transformers")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from score_models import SEQUENCES, write_score_model

    golden = {}
    for classes in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            write_score_model(pathlib.Path(folder) / "model", classes)
            command = [options.torch, "-c", TORCH, f"{folder}/model", str(classes)]
            done = subprocess.run(
                [*command, json.dumps(SEQUENCES)], capture_output=True, text=True, check=True
            )
            golden[str(classes)] = json.loads(done.stdout.splitlines()[-1])
    TARGET.write_text(json.dumps(golden) + "\n")
    print(TARGET, TARGET.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
