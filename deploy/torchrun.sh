#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# lossd as one server of several processes, started by torchrun (docs/scaling.md). If a process ends, torchrun starts all of them
# again, and the server then starts from its newest checkpoints.
#
#   deploy/torchrun.sh PROCESSES [FLAG...]        on one host, a process for each GPU
#
# On several hosts each has a torchrun, with --nnodes, --node_rank and --master_addr, and the flags that docs/security.md asks for
# beyond the loopback. --redirects and --tee have values because torch 1.13 fails on their defaults under Python 3.11.
set -euo pipefail
processes=$1
shift
exec "${TORCHRUN:-torchrun}" --nnodes=1 --master_addr=127.0.0.1 --master_port="${MASTER_PORT:-29500}" --nproc_per_node="$processes" --max_restarts=10 \
  --redirects=1 --tee=1 --no_python "${LOSSD:-lossd}" --launcher=torchrun --restore=latest "$@"
