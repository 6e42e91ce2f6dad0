#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds a source distribution and out of it a wheel, and installs that in a fresh virtual environment, offline, with
# the distribution's packages for the rest.
#
#   prepare_venv.sh PYTHON SOURCE_DIR VENV
#
# Exit status 77, which means skipped, if the distribution's packages are not there.
set -eu
python=$1 source=$2 venv=$3
rm -rf "$venv"

if ! "$python" -c 'import ensurepip, google.protobuf, grpc, numpy, pytest, setuptools, wheel' 2>/dev/null; then
  echo "skipped: $python lacks packages of the Python client; scripts/install-deps test installs them"
  exit 77
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/client" "$work/server/app" "$work/dist"
cp -r "$source/proto" "$source/VERSION" "$work/"
cp -r "$source/client/python" "$source/client/library" "$work/client"
cp "$source/server/app/lossd.h" "$work/server/app"
rm -rf "$work/client/python/build" "$work/client/python/src/"*.egg-info

"$python" -m venv --system-site-packages "$venv"
cd "$work/client/python"
if ! "$venv/bin/python" -c 'import setuptools.build_meta as b; b.build_sdist("../../dist")' >"$work/log" 2>&1; then
  cat "$work/log"
  exit 1
fi
"$venv/bin/pip" install --no-build-isolation --no-deps --no-index "$work/dist/"*.tar.gz
cd /
"$venv/bin/python" -c 'import lossd, lossd.v1.loss_pb2; print("installed", lossd.__file__)'
