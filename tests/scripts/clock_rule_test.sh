#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# No code of the tree asks the wall clock past kernels/clocks, and the check finds each way of asking.
set -u
here=$(cd "$(dirname "$0")" && pwd)
check=$here/../../scripts/check-clocks
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=0

"$check" || failed=1

number=0
expect() {  # expect SUFFIX LINE: found;  expect_none: not
  number=$((number + 1))
  printf '%s\n' "$2" >"$folder/$number.$1"
  if "$check" "$folder/$number.$1" >/dev/null; then echo "not found: $2"; failed=1; fi
}
expect_none() {
  number=$((number + 1))
  printf '%s\n' "$2" >"$folder/$number.$1"
  "$check" "$folder/$number.$1" || { echo "found, though it is right: $2"; failed=1; }
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
