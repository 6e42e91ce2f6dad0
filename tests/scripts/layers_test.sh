#!/usr/bin/env bash
# The tree keeps the dependency rule, and the check finds every breach planted in bad_layers/.
set -u
here=$(cd "$(dirname "$0")" && pwd)
check=$here/../../scripts/check-layers

"$check" || exit 1

output=$("$check" "$here/bad_layers" 2>&1) && { echo "breaches were not found" >&2; exit 1; }
for breach in "kernels/cpu/reaches_up.cc:1: kernels must not include server/head/head.h" \
  "server/engine/knows_grpc.cc:1: server/engine must not include grpcpp/grpcpp.h" \
  "client/cpp/knows_kernels.h:2: client/cpp must not include kernels/backend.h" \
  "server/uses_tests.cc:1: server must not include tests/reference.h"; do
  if [[ $output != *"$breach"* ]]; then
    echo "not reported: $breach" >&2
    echo "$output" >&2
    exit 1
  fi
done
[[ $output == *"4 includes break"* ]] || { echo "$output" >&2; exit 1; }
