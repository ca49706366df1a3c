#!/usr/bin/env bash
# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
#
# For whoever has a GPU: does everything work there, and how fast is it? Under eight minutes.
#   bash scripts/gpu_check.sh                        the GPU, a random model of half a billion
#   bash scripts/gpu_check.sh --size=tiny --cpu      the same parts on a CPU, in a minute or two
#   PYTHON=/path/to/python bash scripts/gpu_check.sh another Python, with jax[cuda] in it
# Nothing is installed: what is missing is named, with the command that fetches it elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" scripts/gpu_check.py "$@"
