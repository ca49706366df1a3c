#!/usr/bin/env bash
# SPDX-FileCopyrightText: The jaxrl_llm authors
# SPDX-License-Identifier: Apache-2.0
# Train on several nodes of a Slurm cluster, one process for each GPU:
#
#   sbatch --nodes=2 --gpus-per-node=8 --ntasks-per-node=8 scripts/slurm.sh \
#       --config=grpo.py --run-dir=/shared/run --mesh.fsdp=16
#
# Submit it in the project's folder, which all nodes see, with the environment in .venv. --run-dir
# must lie where all nodes write. When the time limit comes near, Slurm's SIGTERM ends the step at
# hand and saves; the same command continues.
#SBATCH --job-name=jaxrl_llm
#SBATCH --output=%x-%j.log
#SBATCH --signal=TERM@120
set -euo pipefail

if [ -z "${SLURM_JOB_ID:-}" ] || [ $# -eq 0 ]; then
  sed -n '4,11s/^# \{0,1\}//p' "$0"
  exit 2
fi
exec srun --kill-on-bad-exit=1 .venv/bin/python -m jaxrl_llm.train --coordinator=auto "$@"
