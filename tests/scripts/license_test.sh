#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Every file of code of the tree names its license, and the check finds those that do not and mends them.
set -u
here=$(cd "$(dirname "$0")" && pwd)
. "$here/planted.sh"

tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
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

check() { "$here/../../scripts/check-license" "$@"; }
expect_found check "$tree" \
  "proto/some.proto:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
  "scripts/wrong:2: the line is not '# SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
  "server/late.cc:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
  "server/none.h:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)" \
  "server/other.cc:1: the line is not '// SPDX-License-Identifier: Apache-2.0' (scripts/check-license --fix)"
check --fix "$tree" || exit 1
check "$tree" || exit 1
printf '#!/bin/sh\n# SPDX-License-Identifier: Apache-2.0\n# What it does.\n' | cmp - "$tree/scripts/wrong" || exit 1
printf '// SPDX-License-Identifier: Apache-2.0\n\n// Messages.\nsyntax = "proto3";\n' | cmp - "$tree/proto/some.proto" || exit 1
