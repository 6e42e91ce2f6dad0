#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Each check over the tree passes this repository, and finds every fault that is planted in a folder.
#
#   checks_test.sh layers|docs|clocks|license       scripts/check-$1
#   checks_test.sh sizes BUILD_FOLDER               the same; skipped where libclang is missing
set -u
what=$1 build=${2:-}
here=$(cd "$(dirname "$0")" && pwd)
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
check() { "$here/../../scripts/check-$what" ${build:+--build "$build"} "$@"; }

# expect_found REPORT...: the check passes this repository, and fails the folder with each of these reports.
expect_found() {
  local output report
  check || exit 1
  output=$(check "$tree" 2>&1) && { echo "nothing was found in $tree" >&2; exit 1; }
  for report in "$@"; do
    if [[ $output != *"$report"* ]]; then
      echo "not reported: $report" >&2
      echo "$output" >&2
      exit 1
    fi
  done
}

# plant FILE LINE...: a file of the folder.
plant() {
  mkdir -p "$(dirname "$tree/$1")"
  printf '%s\n' "${@:2}" >"$tree/$1"
}

test_layers() {
  plant client/cpp/knows_kernels.h '#include <vector>' '#  include "kernels/backend.h"'
  plant kernels/cpu/reaches_up.cc '#include "server/head/head.h"'
  plant server/engine/knows_grpc.cc '#include <grpcpp/grpcpp.h>'
  plant server/rpc/knows_prometheus.h '#include <prometheus/registry.h>'
  plant server/rpc/uses_tests.cc '#include "tests/reference.h"'
  plant server/stray.cc '#include "tests/reference.h"'
  expect_found \
    "kernels/cpu/reaches_up.cc:1: layer kernels must not include server/head/head.h" \
    "server/engine/knows_grpc.cc:1: layer engine must not include grpcpp/grpcpp.h" \
    "client/cpp/knows_kernels.h:2: layer client must not include kernels/backend.h" \
    "server/rpc/uses_tests.cc:1: layer service must not include tests/reference.h" \
    "server/rpc/knows_prometheus.h:1: layer service must not include prometheus/registry.h" \
    "server/stray.cc:1: server belongs to no layer of cmake/layers.txt" \
    "6 breaches"
}

test_docs() {
  plant docs/operations.md '# Running it' \
    '' \
    '`--listen` is a flag and so is `--lost`. [There](#metrics) is a heading, [not here](#nowhere), and no [file](missing.md).' \
    '' \
    '## Metrics' \
    '' \
    '`lossd_lost`'
  plant docs/watching.md '`lossd_heads`'
  plant docs/reference/flags.md '`--listen`, `--gone`'
  plant docs/reference/metrics.md '`lossd_heads`, `lossd_gone`'
  plant server/app/main.cc 'ABSL_FLAG(std::string, listen, "", "");' 'ABSL_FLAG(' '    bool, forgotten, false, "");'
  plant server/metrics/metrics.cc 'const char* kNames[] = {"lossd_heads", "lossd_forgotten"};'
  expect_found \
    "docs/operations.md: no metric lossd_lost in the code" \
    "docs/operations.md: no flag --lost in the code" \
    "docs/reference/metrics.md: no metric lossd_gone in the code" \
    "docs/reference/metrics.md: metric lossd_forgotten is not there" \
    "docs/reference/flags.md: no flag --gone in the code" \
    "docs/reference/flags.md: flag --forgotten is not there" \
    "./docs/operations.md: #nowhere has no such heading" \
    "./docs/operations.md: missing.md does not exist" \
    "check-docs: 8 faults"
}

test_clocks() {
  local failed=0
  check || failed=1
  number=0
  expect() {  # expect SUFFIX LINE: found;  expect_none: not
    number=$((number + 1))
    printf '%s\n' "$2" >"$tree/$number.$1"
    if check "$tree/$number.$1" >/dev/null; then echo "not found: $2"; failed=1; fi
  }
  expect_none() {
    number=$((number + 1))
    printf '%s\n' "$2" >"$tree/$number.$1"
    check "$tree/$number.$1" || { echo "found, though it is right: $2"; failed=1; }
  }
  expect cc 'const absl::Time now = absl::Now();'
  expect h 'explicit Log(Clock now = &absl::Now);'
  expect cc 'auto t = std::chrono::system_clock::now();'
  expect cc 'clock_gettime(CLOCK_REALTIME, &t);'
  expect cc 'const time_t t = time(nullptr);'
  expect cc 'mutex_.AwaitWithTimeout(absl::Condition(&done_), kLimit);'
  expect cc 'mutex_.AwaitWithDeadline(absl::Condition(&done_), end);'
  expect cc 'wake_.WaitWithTimeout(&mutex_, kBeat);'
  expect cc 'done.WaitForNotificationWithTimeout(kLimit);'
  expect cc 'context.set_deadline(absl::ToChronoTime(end));'
  expect py 'end = time.time() + 5'
  expect py 'now = datetime.now()'
  expect_none cc 'const absl::Time now = clocks::SteadyNow();'
  expect_none cc '// absl::Now() would be the wall clock'
  expect_none cc 'clocks::AwaitFor(mutex_, absl::Condition(&done_), kLimit);'
  expect_none cc 'const double t = report.time(0);'
  expect_none py 'end = time.monotonic() + 5  # not time.time()'
  exit $failed
}

test_license() {
  mkdir -p "$tree/server" "$tree/scripts" "$tree/proto" "$tree/client/python/build"
  printf '// A class.\n' >"$tree/server/none.h"
  printf '// SPDX-License-Identifier: MIT\n' >"$tree/server/other.cc"
  printf '// A class.\n// SPDX-License-Identifier: Apache-2.0\n' >"$tree/server/late.cc"
  printf '/* SPDX-License-Identifier: Apache-2.0 */\n' >"$tree/server/page.css"
  printf '# SPDX-License-Identifier: Apache-2.0\n' >"$tree/server/CMakeLists.txt"
  printf 'no code\n' >"$tree/server/data.json"
  printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n' >"$tree/scripts/right"
  printf '#!/bin/sh\n# What it does.\n' >"$tree/scripts/wrong"
  printf '// Messages.\nsyntax = "proto3";\n' >"$tree/proto/some.proto"
  printf 'x = 1\n' >"$tree/client/python/build/copy.py"

  expect_found \
    "proto/some.proto:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
    "scripts/wrong:2: the line is not '# SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
    "server/late.cc:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
    "server/none.h:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
    "server/other.cc:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)"
  check --fix "$tree" || exit 1
  check "$tree" || exit 1
  printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n# What it does.\n' | cmp - "$tree/scripts/wrong" || exit 1
  printf '// SPDX-License-Identifier: Apache-2.0\n\n// Messages.\nsyntax = "proto3";\n' | cmp - "$tree/proto/some.proto" || exit 1
}

test_sizes() {
  /usr/bin/python3 -c 'import clang.cindex' 2>/dev/null || exit 77
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

  expect_found \
    "kernels/large.h:1: class Large has 31 methods" \
    "server/local.cc:2: class Local has 31 methods" \
    "client/wide.py:1: class Wide has 31 methods" \
    "tests/long.py: 1201 lines" \
    "server/short: 59 lines"
  if check "$tree" | grep -E 'Fits|reason.py|copy.py|together|because'; then exit 1; fi
}

"test_$what"
