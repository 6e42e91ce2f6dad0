#!/usr/bin/env bash
# The files in deploy/ are in order, and check_manifests.py finds what is planted in a copy of them.
#   manifests_test.sh LOSSD
set -euo pipefail
cd "$(dirname "$0")/../.."
lossd=$1
scripts/check-manifests "$lossd" || exit $?

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# plant FILE SED: the check of a copy with this change fails, and says so of the file.
plant() {
  rm -rf "$folder/deploy"
  cp -r deploy "$folder/deploy"
  sed -i "$2" "$folder/deploy/$1"
  if cmp -s "deploy/$1" "$folder/deploy/$1"; then
    echo "'$2' changes nothing in $1" >&2
    exit 1
  fi
  if "${LOSSD_MANIFESTS_VENV:-build/manifests-venv}/bin/python" -B tests/deploy/check_manifests.py "$lossd" "$folder/deploy" >/dev/null 2>"$folder/errors"; then
    echo "'$2' in $1 is not found" >&2
    exit 1
  fi
  grep -q "^$1" "$folder/errors"
}
plant kubernetes.yaml 's/containerPort: 7071/containerPort: http/'
plant kubernetes-statefulset.yaml 's/podManagementPolicy/podManagmentPolicy/'
plant kubernetes-statefulset.yaml 's/--rank_timeout/--rank_timout/'
plant kubernetes-statefulset.yaml 's/selector: {app: lossd}$/selector: {app: other}/'
plant kubernetes-leaderworkerset.yaml 's/RecreateGroupOnPodRestart/RecreateGroup/'
plant kubernetes-leaderworkerset.yaml 's/fsGroup: 7070/fsGroup: group/'
plant kubernetes-leaderworkerset.yaml 's/leaderTemplate:/leader:/'
plant slurm.sbatch 's/--launcher=/--launch=/'
plant torchrun.sh 's/--launcher=/--starter=/'

# plant_ci FILE SED: the same of the files of CI services.
plant_ci() {
  rm -rf "$folder/tree"
  mkdir "$folder/tree"
  cp -r .ci .github .gitlab-ci.yml "$folder/tree/"
  sed -i "$2" "$folder/tree/$1"
  if cmp -s "$1" "$folder/tree/$1"; then
    echo "'$2' changes nothing in $1" >&2
    exit 1
  fi
  if "${LOSSD_MANIFESTS_VENV:-build/manifests-venv}/bin/python" -B tests/deploy/check_ci.py "$folder/tree" >"$folder/errors"; then
    echo "'$2' in $1 is not found" >&2
    exit 1
  fi
  grep -q "${3:-$1}" "$folder/errors"
}
plant_ci .github/workflows/ci.yml 's/runs-on/run-on/'
plant_ci .github/workflows/ci.yml 's/step: layers/step: layer/'
plant_ci .github/workflows/release.yml 's/needs: packages/need: packages/'
plant_ci .gitlab-ci.yml 's/format, //'
plant_ci .gitlab-ci.yml 's/interruptible: true/interruptible: perhaps/'
plant_ci .github/ISSUE_TEMPLATE/bug.yml 's/type: textarea/type: area/'
plant_ci .ci/run 's/^docs_step/document_step/' gitlab-ci
