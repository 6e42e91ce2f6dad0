#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The demo trainer against a running server, as two processes: it learns a small text, says so with its exit status,
# and the server stops cleanly afterwards.
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
