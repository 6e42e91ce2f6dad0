#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The demo trainer against a running server, as two processes: it learns a small text, says so with its exit status,
# and the server stops cleanly afterwards. Then scripts/demo with the same programs: it shows what the server measured, and
# says with its exit status whose fault it is.
#
#   demo_test.sh LOSSD NGRAM_LM_DEMO SOURCE_DIR
set -u
lossd=$1 trainer=$2 source=$3
work=$(mktemp -d)
server=
clean_up() {
  if [ -n "$server" ]; then kill -KILL "$server" 2>/dev/null; fi
  rm -rf "$work"
}
trap clean_up EXIT
fail() {
  echo "FAILED: $1" >&2
  cat "$work"/*.log >&2
  exit 1
}

"$trainer" --help >"$work/help.log" 2>&1
grep -q -- --microbatch_rows "$work/help.log" || fail "--help does not list the flags"

"$lossd" --listen=127.0.0.1:0 --http= --port_file="$work/ports" --checkpoint_dir="$work" --threads=1 \
  >"$work/server.log" 2>&1 &
server=$!
for _ in $(seq 300); do
  if [ -s "$work/ports" ]; then break; fi
  sleep 0.1
done
grpc=$(sed -nE 's/.*"grpc" *: *"([^"]+)".*/\1/p' "$work/ports")
[ -n "$grpc" ] || fail "no address in the port file"

cat "$source"/proto/lossd/v1/*.proto >"$work/text"
train() {
  "$trainer" --server="$grpc" --text="$work/text" --vocab=600 --hidden_state=32 --hidden=48 --embedding=24 --context=4 \
    --microbatches=3 --microbatch_rows=101 "$@" >"$work/trainer.log" 2>&1
}

train --steps=120 --margin=0.3 || fail "the trainer ended with status $?"
grep -q '^learned: ' "$work/trainer.log" || fail "no verdict"

# The head was deleted at the end, so the name is free; too little training is reported as such.
train --steps=2 --margin=0.3 --keep_head
[ $? = 1 ] || fail "two steps passed for training"

# The head was kept: creating it again is refused.
train --steps=1
[ $? = 2 ] || fail "a second head of the same name was accepted"
grep -q ALREADY_EXISTS "$work/trainer.log" || fail "the reason was not given"

kill -TERM "$server"
wait "$server" || fail "the server ended with status $?"
server=

# demo PROGRAMS STEPS: scripts/demo with a small model.
demo() {
  "$source/scripts/demo" --programs="$1" --text="$work/text" --vocab=600 --hidden_state=32 --hidden=48 --embedding=24 --context=4 \
    --microbatches=3 --microbatch_rows=101 --margin=0.3 --steps="$2" >"$work/demo.log" 2>&1
}
shows() { grep -Eq "$1" "$work/demo.log" || fail "the demo does not show $1"; }

mkdir "$work/programs" "$work/broken"
ln -s "$lossd" "$work/programs/lossd"
ln -s "$trainer" "$work/programs/ngram_lm_demo"
ln -s "$trainer" "$work/broken/ngram_lm_demo"
printf '#!/bin/sh\necho no device >&2\nexit 1\n' >"$work/broken/lossd"
chmod +x "$work/broken/lossd"

demo "$work/programs" 120 || fail "the demo ended with status $?"
shows '^lossd is ready at 127\.0\.0\.1:[0-9]+$'
shows '^learned: '
shows '^  demo +[0-9]+ +119( +[0-9][0-9.e-]*){3}$'
shows '^  weights +[0-9.]+ MiB +[0-9.]+ MiB$'
shows '^  compute +[0-9.]+ (us|ms|s)$'
shows '^work +[0-9]+ rows, 120 steps, '
shows '^lossd drained and ended with status 0$'

demo "$work/programs" 2
[ $? = 1 ] || fail "the demo does not say that the model learned nothing"
demo "$work/broken" 2
[ $? = 3 ] || fail "the demo does not say that the server failed"
shows '^no device$'
