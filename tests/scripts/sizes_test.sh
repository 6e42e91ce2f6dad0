#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# No class and no file of the tree is too large, no module too small, and the check finds those that are. Skipped where libclang is missing.
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
lines() { seq 60 | sed 's/^/\/\/ /'; }  # below the classes, so that their modules are long enough
{ echo "class Large {"; echo " public:"; echo "  Large();"; echo "  ~Large();"; methods 29; echo "};"; lines; } >"$tree/kernels/large.h"
{ echo "struct Fits {"; methods 30 | grep -v Large; echo "};"; lines; } >"$tree/kernels/fits.h"
{ echo "namespace {"; echo "struct Local {"; methods 31 | grep -v Large; echo "};"; echo "}  // namespace"; lines; } >"$tree/server/local.cc"
{ echo "class Wide:"; for i in $(seq 31); do echo "    def method$i(self): pass"; done; } >"$tree/client/wide.py"
seq 1201 | sed 's/^/# /' >"$tree/tests/long.py"
cp "$tree/tests/long.py" "$tree/client/python/build/lib/copy.py"  # what pip leaves of an installation
{ echo "# This is longer than 1,200 lines because it is a test."; seq 1200 | sed 's/^/# /'; } >"$tree/tests/reason.py"
{ seq 29 | sed 's/^/\/\/ /'; } >"$tree/server/short.h"  # with its source 59 lines
{ seq 30 | sed 's/^/\/\/ /'; } >"$tree/server/short.cc"
{ seq 30 | sed 's/^/\/\/ /'; } >"$tree/server/together.h"  # with its source 60
cp "$tree/server/short.cc" "$tree/server/together.cc"
echo "// It is shorter than 60 lines because it is a test." >"$tree/server/because.h"

check() { "$here/../../scripts/check-sizes" --build "$build" "$@"; }
build=$1
expect_found check "$tree" \
  "kernels/large.h:1: class Large has 31 methods" \
  "server/local.cc:2: class Local has 31 methods" \
  "client/wide.py:1: class Wide has 31 methods" \
  "tests/long.py: 1201 lines" \
  "server/short: 59 lines"
if check "$tree" | grep -E 'Fits|reason.py|copy.py|together|because'; then exit 1; fi
