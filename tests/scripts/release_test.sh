#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# scripts/release in a repository of its own: it tags what agrees, and says what does not.
#   release_test.sh SOURCE_DIR
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/scripts"
cp "$1/scripts/release" "$folder/scripts/"
cd "$folder"
printf '1.2.3\n' >VERSION
printf 'ARG LOSSD_VERSION=1.2.3\nFROM scratch\n' >Dockerfile
printf '# Changes\n\n## Unreleased\n\n- later\n\n## 1.2.3 (2026-11-23)\n\n- this\n- and that\n\n## 1.2.2\n\n- before\n' >CHANGELOG.md
mkdir -p proto/lossd/v1 tests/proto/previous
printf 'syntax = "proto3";\npackage lossd.v1;\nmessage Released {}\n' >proto/lossd/v1/types.proto
git init --quiet .
git config user.name test
git config user.email test@example.org
git add .
git commit --quiet --message first

# refuses MESSAGE ARGUMENT...
refuses() {
  local message=$1 told
  shift
  if told=$(scripts/release "$@" 2>&1); then echo "release $* passes" >&2; exit 1; fi
  [[ $told == *"$message"* ]] || { echo "$told" >&2; exit 1; }
}
[ "$(scripts/release --notes v1.2.3 | grep -v '^$')" = $'- this\n- and that' ]
refuses 'there is no release yet' --keep-protocol
scripts/release --check v1.2.3
refuses 'the tag v1.2.4 is not v1.2.3' --check v1.2.4
printf 'x\n' >left-over
refuses 'the tree has changes' v1.2.3
rm left-over
scripts/release v1.2.3 >/dev/null
[ "$(git tag)" = v1.2.3 ]
printf '1.3.0\n' >VERSION
git commit --quiet --all --message second
refuses 'LOSSD_VERSION in Dockerfile is not 1.3.0' --check v1.3.0
sed -i 's/1.2.3/1.3.0/' Dockerfile
git commit --quiet --all --message third
refuses "CHANGELOG.md has nothing under '## 1.3.0'" --check v1.3.0

printf 'message Later {}\n' >>proto/lossd/v1/types.proto
scripts/release --keep-protocol >/dev/null
protoc --decode_raw <tests/proto/previous/protocol.binpb | grep -q '"Released"'
if protoc --decode_raw <tests/proto/previous/protocol.binpb | grep -q '"Later"'; then echo "the protocol kept is not the release's" >&2; exit 1; fi

mkdir -p from/a from/b
for system in a:2_35:debian12 b:2_100:ubuntu24.04; do
  IFS=: read -r at glibc distribution <<<"$system"
  at=from/$at
  printf 'client\n' >"$at/lossd-1.3.0-py3-none-any.whl"
  printf '%s\n' "$system" >"$at/lossd_server-1.3.0-py3-none-manylinux_${glibc}_x86_64.whl"
  printf '%s\n' "$system" >"$at/lossd_1.3.0-1${distribution}_amd64.deb"
  printf 'sums\n' >"$at/SHA256SUMS"
done
printf 'x\n' >not-of-the-commit
scripts/release --collect from to
[ "$(ls to | tr '\n' ' ')" = "SHA256SUMS lossd-1.3.0-image.tar.gz lossd-1.3.0-py3-none-any.whl lossd_1.3.0-1debian12_amd64.deb lossd_1.3.0-1ubuntu24.04_amd64.deb lossd_server-1.3.0-py3-none-manylinux_2_35_x86_64.whl " ]
(cd to && sha256sum --check --quiet SHA256SUMS)
[ "$(wc -l <to/SHA256SUMS)" = 5 ]
# Docker looks for the Dockerfile at the root of what it is given.
[ "$(tar --extract --to-stdout --file to/lossd-1.3.0-image.tar.gz Dockerfile)" = $'ARG LOSSD_VERSION=1.3.0\nFROM scratch' ]
if tar --list --file to/lossd-1.3.0-image.tar.gz | grep -q not-of-the-commit; then echo "the recipe is not of the commit" >&2; exit 1; fi
scripts/release --collect from again
cmp to/SHA256SUMS again/SHA256SUMS
