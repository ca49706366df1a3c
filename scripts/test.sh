#!/usr/bin/env bash
# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
#
# Makes .venv with what the tests need, then checks style, layers and behaviour.
#   bash scripts/test.sh                             the default suite
#   bash scripts/test.sh --full                      the longer proofs too
#   bash scripts/test.sh tests/rollout -k greedy     any arguments of pytest
#   PYTHON=python3.12 VENV=.venv-3.12 bash scripts/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

selection=(-m "not full")
if [ "${1:-}" = "--full" ]; then
  selection=()
  shift
fi
need_bubblewrap
make_environment ".[dev]"
"$VENV/bin/ruff" check .
"$VENV/bin/ruff" format --check .
"$VENV/bin/lint-imports"
exec "$VENV/bin/python" -m pytest "${selection[@]}" "$@"
