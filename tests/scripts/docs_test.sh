#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The documentation passes its check, and the check finds every fault planted in bad_docs/.
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/planted.sh"

expect_found "$here/../../scripts/check-docs" "$here/bad_docs" \
  "docs/operations.md: no metric lossd_gone in the code" \
  "docs/operations.md: metric lossd_forgotten is not there" \
  "docs/operations.md: no flag --gone in the code" \
  "docs/operations.md: flag --forgotten is not there" \
  "./docs/operations.md: #nowhere has no such heading" \
  "./docs/operations.md: missing.md does not exist" \
  "check-docs: 6 faults"
