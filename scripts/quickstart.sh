#!/usr/bin/env bash
# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv, installs the package and trains SmolLM2-135M-Instruct on a small task by GRPO.
#   bash scripts/quickstart.sh                       everything
#   bash scripts/quickstart.sh --train.steps=40      any option of `python -m jaxrl_llm.train`
#   PYTHON=python3.12 bash scripts/quickstart.sh     another Python (3.11 or newer)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

make_environment .
exec "$VENV/bin/python" -m jaxrl_llm.train --config=grpo.py "$@"
