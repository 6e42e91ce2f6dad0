#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# No class and no file of the tree is too large, and the check finds those that are. Skipped where libclang is missing.
#
#   sizes_test.sh BUILD_FOLDER
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/planted.sh"
/usr/bin/python3 -c 'import clang.cindex' 2>/dev/null || exit 77

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
mkdir -p "$tree/kernels" "$tree/server" "$tree/client/python/build/lib" "$tree/tests"

# methods COUNT: so many declarations, and some that do not count.
methods() {
  for i in $(seq "$1"); do echo "  int Method$i(int value) const;"; done
  echo "  Large(const Large&) = delete;"
  echo "  Large& operator=(const Large&) = default;"
}
{ echo "class Large {"; echo " public:"; echo "  Large();"; echo "  ~Large();"; methods 29; echo "};"; } >"$tree/kernels/large.h"
{ echo "struct Fits {"; methods 30 | grep -v Large; echo "};"; } >"$tree/kernels/fits.h"
{ echo "namespace {"; echo "struct Local {"; methods 31 | grep -v Large; echo "};"; echo "}  // namespace"; } >"$tree/server/local.cc"
{ echo "class Wide:"; for i in $(seq 31); do echo "    def method$i(self): pass"; done; } >"$tree/client/wide.py"
seq 401 | sed 's/^/# /' >"$tree/tests/long.py"
cp "$tree/tests/long.py" "$tree/client/python/build/lib/copy.py"  # what pip leaves of an installation
{ echo "# This is longer than 400 lines because it is a test."; seq 400 | sed 's/^/# /'; } >"$tree/tests/reason.py"

check() { "$here/../../scripts/check-sizes" --build "$build" "$@"; }
build=$1
expect_found check "$tree" \
  "kernels/large.h:1: class Large has 31 methods" \
  "server/local.cc:2: class Local has 31 methods" \
  "client/wide.py:1: class Wide has 31 methods" \
  "tests/long.py: 401 lines"
if check "$tree" | grep -E 'Fits|reason.py|copy.py'; then exit 1; fi
