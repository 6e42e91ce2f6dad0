#!/usr/bin/env bash
# The tree keeps the dependency rule, and the check finds every breach planted in bad_layers/.
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/planted.sh"

expect_found "$here/../../scripts/check-layers" "$here/bad_layers" \
  "kernels/cpu/reaches_up.cc:1: kernels must not include server/head/head.h" \
  "server/engine/knows_grpc.cc:1: server/engine must not include grpcpp/grpcpp.h" \
  "client/cpp/knows_kernels.h:2: client/cpp must not include kernels/backend.h" \
  "server/uses_tests.cc:1: server must not include tests/reference.h" \
  "4 includes break"
