#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tree keeps the dependency rule, and the check finds every breach planted in bad_layers/.
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/planted.sh"

expect_found "$here/../../scripts/check-layers" "$here/bad_layers" \
  "kernels/cpu/reaches_up.cc:1: layer kernels must not include server/head/head.h" \
  "server/engine/knows_grpc.cc:1: layer engine must not include grpcpp/grpcpp.h" \
  "client/cpp/knows_kernels.h:2: layer client must not include kernels/backend.h" \
  "server/rpc/uses_tests.cc:1: layer service must not include tests/reference.h" \
  "server/rpc/knows_prometheus.h:1: layer service must not include prometheus/registry.h" \
  "server/stray.cc:1: server belongs to no layer of cmake/layers.txt" \
  "6 breaches"
