#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the commands of "Mutual TLS in ten lines" in docs/security.md as they stand, then checks that the server they
# start knows its clients.
#
#   mutual_tls_test.sh SECURITY_MD LOSSD LOSSCTL
set -euo pipefail
page=$1 lossd_program=$2 lossctl_program=$3
work=$(mktemp -d)
server=
finish() {
  if [ -n "$server" ]; then kill "$server" 2>/dev/null && wait "$server" || true; fi
  rm -rf "$work"
}
trap finish EXIT
cd "$work"

awk '/^## /{ section = /Mutual TLS in ten lines/ } section && /^```$/{ exit } section && code; section && /^```sh$/{ code = 1 }' \
  "$page" >commands
[ "$(wc -l <commands)" -le 12 ] && grep -q '^lossd ' commands || { echo "no commands in $page"; cat commands; exit 1; }

# The programs that were built, on a port of the test's own.
lossd() { exec "$lossd_program" --listen=127.0.0.1:0 --http= --port_file=ports --threads=1 --backend=cpu "$@"; }
lossctl() {
  for _ in $(seq 1200); do [ -s ports ] && break || sleep 0.1; done
  LOSSD_SERVER=$(sed -E 's/.*"grpc":"([^"]*)".*/\1/' ports) "$lossctl_program" "$@"
}
# shellcheck disable=SC1091
source ./commands
server=$!

fail() { echo "FAILED: $*"; exit 1; }
lossctl heads | grep -q lm_head || fail "the operator's head is not there"
export LOSSD_CERT=trainer-1.pem LOSSD_KEY=trainer-1.key
lossctl heads | grep -q lm_head || fail "the trainer does not see the head"
status=0
lossctl delete lm_head --yes 2>said || status=$?
[ "$status" = 4 ] && grep -q 'DeleteHead needs the role admin; dns:trainer-1 has the role trainer' said ||
  fail "the trainer deleted a head: $status $(cat said)"
unset LOSSD_CERT LOSSD_KEY
status=0
lossctl heads 2>said || status=$?
[ "$status" = 4 ] && grep -q 'LOSSD_CERT' said || fail "without a certificate: $status $(cat said)"
openssl x509 -in trainer-1.pem -noout -text | grep -q 'CA:FALSE' || fail "the trainer can issue certificates"
echo "the commands work"
