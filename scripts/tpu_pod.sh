#!/usr/bin/env bash
# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
# Train on every host of a TPU pod slice, from a machine with gcloud:
#
#   bash scripts/tpu_pod.sh NAME ZONE --config=grpo.py --run-dir=/shared/run --mesh.fsdp=16
#
# Each host has the project at ~/jaxrl_llm with its environment in .venv (SRC=… says another place).
# --run-dir must lie where all hosts write, such as a Filestore mount. Kill it at any time: the same
# command continues. Every host prints its own errors; the first one prints the steps.
set -euo pipefail

if [ $# -lt 3 ]; then
  sed -n '4,12s/^# \{0,1\}//p' "$0"
  exit 2
fi
name=$1 zone=$2
shift 2
arguments=$(printf '%q ' "$@")
exec gcloud compute tpus tpu-vm ssh "$name" --zone="$zone" --worker=all --command \
  "cd ${SRC:-jaxrl_llm} && .venv/bin/python -m jaxrl_llm.train --coordinator=auto $arguments"
