#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The files in deploy/ are in order, and check_manifests.py finds what is planted in a copy of them.
#   manifests_test.sh LOSSD
set -euo pipefail
cd "$(dirname "$0")/../.."
lossd=$1
scripts/check-manifests "$lossd" || exit $?

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
base=kubernetes/base overlays=kubernetes/overlays
# plant FILE SED [WHERE]: the check of a copy with this change fails, and says so of WHERE, by default the file.
plant() {
  rm -rf "$folder/deploy"
  cp -r deploy "$folder/deploy"
  sed -i "$2" "$folder/deploy/$1"
  if cmp -s "deploy/$1" "$folder/deploy/$1"; then
    echo "'$2' changes nothing in $1" >&2
    exit 1
  fi
  if "${LOSSD_MANIFESTS_VENV:-build/manifests-venv}/bin/python" -B tests/deploy/check_manifests.py "$lossd" "$folder/deploy" "${3:-$base}" >/dev/null 2>"$folder/errors"; then
    echo "'$2' in $1 is not found" >&2
    exit 1
  fi
  grep -q "^${3:-$1}" "$folder/errors" || { cat "$folder/errors" >&2; echo "'$2' in $1 is not reported of ${3:-$1}" >&2; exit 1; }
}
plant $base/lossd.yaml 's/containerPort: 7071/containerPort: http/' $overlays/one-gpu
plant $base/lossd.yaml 's/terminationGracePeriodSeconds: 150/terminationGracePeriodSeconds: 60/' $overlays/mtls
plant $base/lossd.yaml 's/name: access, mountPath/name: acces, mountPath/' $overlays/one-gpu
plant $base/lossd.yaml 's/scheme: HTTPS/scheme: HTTP/' $overlays/one-gpu
plant $base/lossd.flags 's/--listen=0.0.0.0:7070/--listen=0.0.0.0:7000/' $overlays/one-gpu
plant $base/lossd.flags 's/access\/server.key/secret\/server.key/' $overlays/one-gpu
plant $base/lossd.flags 's/access\/tokens/access\/token/' $overlays/one-gpu
plant $base/lossd.yaml 's/key: prometheus-token/key: prometheus/' $overlays/one-gpu
plant $overlays/leaderworkerset/lossd.yaml 's/lossd\/ranks/lossd\/rank/' $overlays/leaderworkerset
# A page that forgets a file of the secret.
plant kubernetes/README.md 's/ --from-file=roles / /' $overlays/mtls
plant $overlays/colocated/job.yaml '/--insecure/d' $overlays/colocated
plant $base/lossd.yaml '/kind: NetworkPolicy/,/^---/s/^    matchLabels: {app: lossd}/    matchLabels: {app: other}/' $overlays/one-gpu
plant kubernetes/several-pods/network.yaml '/podSelector/,/policyTypes/s/app: lossd/app: other/' $overlays/jobset
plant $overlays/ranks/lossd.yaml 's/type: OnDelete/kind: OnDelete/' $overlays/ranks
plant $base/lossd.yaml 's/maxUnavailable/maxUnvailable/' $overlays/one-gpu
plant $base/lossd.yaml 's/interval: 15s/interval: 15 s/' $overlays/one-gpu
plant $overlays/cpu-trial/kustomization.yaml 's/volumes\/1/volumes\/7/' $overlays/cpu-trial
plant $overlays/cpu-trial/lossd.flags 's/--insecure/--unsecure/'
plant $overlays/ranks/lossd.yaml 's/podManagementPolicy/podManagmentPolicy/' $overlays/ranks
plant $overlays/ranks/lossd.yaml 's/--rank_timeout/--rank_timout/'
plant $overlays/ranks/lossd.yaml 's/selector: {app: lossd}$/selector: {app: other}/' $overlays/ranks
plant $overlays/leaderworkerset/lossd.yaml 's/RecreateGroupOnPodRestart/RecreateGroup/' $overlays/leaderworkerset
plant $overlays/leaderworkerset/lossd.yaml 's/fsGroup: 7070/fsGroup: group/' $overlays/leaderworkerset
plant $overlays/leaderworkerset/lossd.yaml 's/leaderTemplate:/leader:/' $overlays/leaderworkerset
plant $overlays/jobset/lossd.yaml 's/BlockingRecreate/RecreateBlocking/' $overlays/jobset
plant $overlays/jobset/lossd.yaml 's/backoffLimit/backofLimit/' $overlays/jobset
plant $overlays/jobset/lossd.yaml 's/restartPolicy: Never/restartPolicies: Never/' $overlays/jobset
plant $overlays/jobset/lossd.yaml 's/parallelism: 2/parallelism: 3/' $overlays/jobset
plant $overlays/jobset/lossd.yaml 's/- name: ranks$/- name: rank/' $overlays/jobset
plant $overlays/jobset/lossd.yaml 's/--rank_timeout/--rank_timout/'
plant $overlays/jobset/lossd.yaml 's/\[PodFailurePolicy\]/[PodFailure]/' $overlays/jobset
plant $overlays/leaderworkerset-gpus/kustomization.yaml 's/gpu: 8/gpu: [8]/' $overlays/leaderworkerset-gpus
plant $overlays/leaderworkerset-gpus/kustomization.yaml 's/workerTemplate/workTemplate/' $overlays/leaderworkerset-gpus
plant $overlays/leaderworkerset-gpus/kustomization.yaml 's/--devices/--device_list/'
plant prometheus/prometheusrule.yaml 's/^      expr: /      exp: /' $overlays/monitored
plant prometheus/prometheusrule.yaml 's/for: 15m/for: 15 minutes/' $overlays/monitored
plant grafana/kustomization.yaml 's/grafana_dashboard: "1"/grafana_dashboard: [1]/' $overlays/monitored
plant grafana/kustomization.yaml 's/lossd.json/losd.json/' $overlays/monitored
plant prometheus/lossd-alerts.yml 's/> 0.95/> 0.96/' prometheus
plant grafana/lossd.json 's/"legendFormat"/"legend_format"/' grafana/lossd.json
plant grafana/lossd.json 's/"overrides"/"override"/' grafana/lossd.json
plant compose/docker-compose.yml 's/restart: unless-stopped/restrat: unless-stopped/'
plant compose/docker-compose.yml 's/\.\.\/grafana\/lossd.json/..\/grafana\/losd.json/'
plant slurm.sbatch 's/--launcher=/--launch=/'
plant slurm-trainer.sbatch 's/--port_file=/--ports_file=/'
plant torchrun.sh 's/--launcher=/--starter=/'

# plant_ci FILE SED: the same of the files of CI services.
plant_ci() {
  rm -rf "$folder/tree"
  mkdir "$folder/tree"
  cp -r .ci .github .gitlab-ci.yml Makefile scripts "$folder/tree/"
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
plant_ci .github/workflows/nightly.yml 's/cron:/corn:/'
plant_ci .github/workflows/nightly.yml 's/test-threads, /test-thread, /'
plant_ci .github/workflows/nightly.yml 's/try-packages/try-package/'
plant_ci .github/workflows/docs.yml 's/make docs/make doc/'
plant_ci .gitlab-ci.yml 's/test-threads, /test-thread, /'
plant_ci .gitlab-ci.yml 's/- make docs/- make doc/'
plant_ci .github/ISSUE_TEMPLATE/feature.yml 's/label: What do/labels: What do/'
plant_ci .gitlab-ci.yml 's/interruptible: true/interruptible: perhaps/'
plant_ci .github/ISSUE_TEMPLATE/bug.yml 's/type: textarea/type: area/'
plant_ci .ci/run 's/^docs_step/document_step/' gitlab-ci
