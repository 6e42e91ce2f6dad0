#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs pytest in the environment that prepare_venv.sh made.
#
#   run_pytest.sh VENV LOSSD ARGUMENT...
#
# A test that hangs for five minutes says where its threads are.
#
# Exit status 77, which means skipped, if there is no such environment or every test was skipped.
set -u
venv=$1 lossd=$2
shift 2
cd "$(dirname "$0")" || exit 1
if [ ! -x "$venv/bin/python" ]; then
  echo "skipped: no Python environment with the client"
  exit 77
fi
# An interpreter cannot load a library with sanitizers: then the client, and the driver of GPUs that are played, are those of
# the plain build, and the server has them.
build=$(dirname "$(dirname "$lossd")")
if grep -qs '^LOSSD_SANITIZE:[A-Z]*=.' "$build/CMakeCache.txt"; then
  export LOSSD_LIBRARY=$PWD/../../../build/cpu-only/bin/liblossd.so
  [ -z "${LOSSD_FAKE_CUDA:-}" ] || export LOSSD_FAKE_CUDA=$PWD/../../../build/cpu-only/tests/client/fake_cuda/libcuda.so.1
  for library in "$LOSSD_LIBRARY" "${LOSSD_FAKE_CUDA:-$LOSSD_LIBRARY}"; do
    if [ ! -e "$library" ]; then
      echo "skipped: the Python client needs $library of the plain build; make build PRESET=cpu-only"
      exit 77
    fi
  done
fi
status=0
LOSSD_BINARY=$lossd "$venv/bin/python" -m pytest -q -ra -p no:cacheprovider \
  -o faulthandler_timeout=300 "$@" || status=$?
if [ "$status" = 5 ]; then exit 77; fi  # nothing was collected: the modules were skipped
exit "$status"
