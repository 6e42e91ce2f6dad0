# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# For tests of checks over the tree; to be sourced.

# expect_found CHECK TREE REPORT...: the check passes this repository, and fails TREE with each of these reports.
expect_found() {
  local check=$1 tree=$2 output report
  shift 2
  "$check" || exit 1
  output=$("$check" "$tree" 2>&1) && { echo "nothing was found in $tree" >&2; exit 1; }
  for report in "$@"; do
    if [[ $output != *"$report"* ]]; then
      echo "not reported: $report" >&2
      echo "$output" >&2
      exit 1
    fi
  done
}
