#!/usr/bin/env bash
# The documentation passes its check, and the check finds every fault planted in bad_docs/.
set -u
here=$(cd "$(dirname "$0")" && pwd)
check=$here/../../scripts/check-docs

"$check" || exit 1

output=$("$check" "$here/bad_docs" 2>&1) && { echo "faults were not found" >&2; exit 1; }
for fault in "docs/operations.md: no metric lossd_gone in the code" \
  "docs/operations.md: metric lossd_forgotten is not there" \
  "docs/operations.md: no flag --gone in the code" \
  "docs/operations.md: flag --forgotten is not there" \
  "./docs/operations.md: #nowhere has no such heading" \
  "./docs/operations.md: missing.md does not exist" \
  "check-docs: 6 faults"; do
  if [[ $output != *"$fault"* ]]; then
    echo "not reported: $fault" >&2
    echo "$output" >&2
    exit 1
  fi
done
