#!/bin/sh
# Trains on several GPUs of one or more machines under PyTorch's torchrun, which starts one `learner` for
# each GPU and starts all of them again when one is lost. Run it on every machine, with the same values.
#
#   scripts/launch/torchrun.sh ppo recipe.json --output runs/ppo
#
# Change by variables:
#   GPUS    ranks on each machine (1 rank a GPU)                 default: 8
#   NODES   machines                                             default: 1
#   HEAD    name of the machine that runs rank 0                 default: this one
#   RESTARTS how often all ranks are started again               default: 3
#   LEARNER the program                                          default: learner, from PATH
# On more than one machine set ROLLCALL_RANK_SECRET to the same 16 or more characters everywhere, and open
# the ports 29500 (torchrun) and 29501 (the ranks) of HEAD between the machines.
set -eu
: "${GPUS:=8}" "${NODES:=1}" "${HEAD:=127.0.0.1}" "${RESTARTS:=3}" "${LEARNER:=learner}"
# --resume starts the run where there is none, so that a restart is the same command.
exec torchrun --nnodes "$NODES" --nproc-per-node "$GPUS" --max-restarts "$RESTARTS" \
  --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "${RUN_ID:-rollcall}" \
  --no-python "$LEARNER" "$@" --resume
