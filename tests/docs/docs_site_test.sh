#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The documentation builds as a site, strictly, and its links, anchors, resources and search are in order; faults that are planted in
# a copy of it are found. With chromium at hand, the search of the site also answers in a browser, from the file system.
#
#   docs_site_test.sh BUILD_DIR
set -euo pipefail
build=$1
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*"; exit 1; }

LOSSD_DOCS_PAGES=$work/pages scripts/docs --check "$build" "$work/site" || exit $?

# plant FILE SED: changes a copy of the site; the faults are looked for at once, below.
cp -r "$work/site" "$work/planted"
plant() {
  sed -i "$2" "$work/planted/$1"
  ! cmp -s "$work/site/$1" "$work/planted/$1" || fail "'$2' changes nothing in $1"
}
plant docs/faq.html 's/href="choosing.html"/href="chosing.html"/'
plant docs/security.html 's/id="several-processes"/id="several"/'
plant index.html 's/src="docs\/overview.svg"/src="https:\/\/example.com\/overview.svg"/'
plant docs/choosing.html '0,/<li>/s/<li>/<p>/'
plant search/search_index.js 's/liveness_timeout//g'
if PYTHONPATH=docs/site "${LOSSD_DOCS_VENV:-build/docs/venv}/bin/python" -B -m check_site "$work/planted" "$work/pages" >"$work/report"; then
  fail "nothing of what was planted is found"
fi
while read -r report; do
  grep -qF "$report" "$work/report" || { cat "$work/report"; fail "not reported: $report"; }
done <<'END'
docs/faq.html: chosing.html does not exist
has no such anchor
index.html: loads https://example.com/overview.svg from elsewhere
docs/choosing.md: the site shows
search: liveness_timeout does not find docs/reference/flags.html
END

if command -v chromium >/dev/null; then
  address="file://$work/site/docs/python.html?q=incarnation"
  timeout 60 chromium --headless --no-sandbox --disable-gpu --user-data-dir="$work/browser" --virtual-time-budget=8000 \
    --host-resolver-rules='MAP * ~NOTFOUND' --dump-dom "$address" >"$work/dom" 2>/dev/null || fail "the browser ended with $?"
  grep -q 'class="md-search-result__link"' "$work/dom" || fail "the search found nothing"
  echo "the search answers in a browser"
else
  echo "no chromium: the search was not tried in a browser"
fi
