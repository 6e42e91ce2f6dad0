#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A job with a trainer and its server, with an srun, and a control program of MPS, that are played: srun runs the command here. Server and
# lossctl are real.
#   slurm_trainer_test.sh LOSSD LOSSCTL trainer|colocated      deploy/slurm-$3.sbatch
set -euo pipefail
kind=$3
job=$(cd "$(dirname "$0")/../.." && pwd)/deploy/slurm-$kind.sbatch
folder=$(mktemp -d)
finish() {
  if [ -e "$folder/lossd.pid" ]; then kill -KILL "$(<"$folder/lossd.pid")" 2>/dev/null || true; fi
  rm -rf "$folder"
}
trap finish EXIT
fail() { echo "slurm_trainer_test: $*" >&2; cat "$folder/log" >&2; exit 1; }

mkdir "$folder/bin" "$folder/tmp"
ln -s "$1" "$folder/bin/lossd"
ln -s "$2" "$folder/bin/lossctl"
# As srun: its own options first; the command then has its signals.
cat >"$folder/bin/srun" <<'PLAYED'
#!/usr/bin/env bash
set -euo pipefail
options=()
while [[ $1 == --* ]]; do options+=("$1"); shift; done
echo "${options[*]} $1" >>"$PLAYED/sruns"
echo $$ >"$PLAYED/$1.pid"
exec "$@"
PLAYED
# As nvidia-cuda-mps-control: -d starts it, and `quit` on its input ends it.
cat >"$folder/bin/nvidia-cuda-mps-control" <<'PLAYED'
#!/usr/bin/env bash
set -euo pipefail
if [ "${1:-}" = -d ]; then
  [ ! -e "$PLAYED/no_mps" ] && [ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && touch "$PLAYED/mps"
else
  [ "$(cat)" = quit ] && rm "$PLAYED/mps"
fi
PLAYED
chmod +x "$folder/bin/srun" "$folder/bin/nvidia-cuda-mps-control"
export PLAYED=$folder PATH=$folder/bin:$PATH TMPDIR=$folder/tmp LOSSD_CHECKPOINTS=$folder/checkpoints LOSSD_FLAGS=--backend=cpu SLURM_GPUS_ON_NODE=4
if [ "$kind" = colocated ]; then LOSSD_FLAGS='--backend=cpu --devices= --cpu_devices=2'; fi
unset LOSSD_CONFIG LOSSD_CONTEXT

# run STATUS COMMAND...: the job with this trainer ends with that status, and leaves neither processes nor files.
run() {
  local status=0 wanted=$1
  rm -f "$folder"/*.pid "$folder/sruns"
  "$job" "${@:2}" >"$folder/log" 2>&1 || status=$?
  [ "$status" = "$wanted" ] || fail "status $status instead of $wanted: ${*:2}"
  nothing_left
}
nothing_left() {
  local file
  for file in "$folder"/*.pid; do
    [ -e "$file" ] || continue
    if kill -0 "$(<"$file")" 2>/dev/null; then fail "$file still runs"; fi
  done
  [ ! -e "$folder/mps" ] || fail "MPS still runs"
  [ -z "$(ls -A "$folder/tmp")" ] || fail "files are left: $(ls "$folder/tmp")"
}

run 0 bash -euc 'lossctl create head --hidden 8 --vocab 50; lossctl loss head --random 16 --accumulate; lossctl step head --lr 1e-3; lossctl save head'
if [ "$kind" = trainer ]; then
  wanted=$'--ntasks=1 --gpus=1 --exact lossd\n--ntasks=1 --gpus=3 --exact bash'
else
  wanted=$'--ntasks=1 --gpus=4 --overlap lossd\n--ntasks=1 --gpus=4 --overlap bash'
fi
[ "$(<"$folder/sruns")" = "$wanted" ] || fail "not these: $(<"$folder/sruns")"
# The next job has the heads of the last one.
run 0 bash -euc 'lossctl describe head | grep -q "step.*1"; lossctl delete head --yes'
run 7 bash -c 'exit 7'

# Without a server there is no training, and it does not go on without one.
LOSSD_FLAGS=--no_such_flag run 1 bash -c 'touch "$PLAYED/trained"'
grep -q 'lossd does not start' "$folder/log" || fail "it does not say that the server does not start"
[ ! -e "$folder/trained" ] || fail "it trains without a server"
run 1 bash -c 'kill -KILL "$(<"$PLAYED/lossd.pid")"; exec sleep 600'
grep -q 'lossd has ended before the trainer' "$folder/log" || fail "it does not say that the server has ended"

# The time is over: the trainer is told, and has a server while it ends.
"$job" bash -c 'trap "lossctl health >$PLAYED/said; exit 0" TERM; touch "$PLAYED/trains"; while :; do sleep 0.1; done' >"$folder/log" 2>&1 &
running=$!
until [ -e "$folder/trains" ]; do
  kill -0 "$running" 2>/dev/null || fail "the job ends at once"
  sleep 0.1
done
kill -TERM "$running"
status=0
wait "$running" || status=$?
[ "$status" = 143 ] || fail "status $status instead of 143 after SIGTERM"
grep -q serving "$folder/said" || fail "the server ended before the trainer"
nothing_left

if [ "$kind" = colocated ]; then
  # Both programs are under MPS, and the job does not go on without it unless it is told to.
  run 0 bash -c '[ -e "$PLAYED/mps" ] && [ -n "$CUDA_MPS_PIPE_DIRECTORY" ]'
  touch "$folder/no_mps"
  run 1 bash -c 'touch "$PLAYED/trained"'
  grep -q 'MPS does not start; LOSSD_MPS=0' "$folder/log" || fail "it does not say that MPS does not start"
  [ ! -e "$folder/trained" ] || fail "it trains without MPS"
  LOSSD_MPS=0 run 0 bash -c '[ ! -e "$PLAYED/mps" ] && [ -z "${CUDA_MPS_PIPE_DIRECTORY:-}" ]'
fi
