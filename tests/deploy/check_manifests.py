"""Checks what lies in deploy/: that Kubernetes takes the manifests, and that lossd has the flags.

  check_manifests.py LOSSD DEPLOY

Objects are compared with the schemas of Kubernetes (package kubernetes-validate, strictly: unknown fields are errors), a
LeaderWorkerSet with leaderworkerset.schema.json and its pods with the schema of a Pod. Every --flag of a manifest, a script or
lossd.flags has to be one that `lossd --helpfull` lists. Services have to select pods that are there. Exit status 1 if something
is wrong.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

KUBERNETES = "1.30"
# Of the programs that start lossd.
FOREIGN_FLAGS = {
    "nnodes", "master_addr", "master_port", "nproc_per_node", "max_restarts", "redirects", "tee", "no_python", "node_rank",
    "kill-on-bad-exit", "nodes", "ntasks-per-node", "gpus-per-node", "requeue", "job-name", "flagfile", "from-file", "help",
}


def documents(path):
    with open(path, encoding="utf-8") as file:
        return [document for document in yaml.safe_load_all(file) if document is not None]


def check_kubernetes(manifest):
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def check_leader_worker_set(manifest):
    schema = json.loads(Path(__file__).with_name("leaderworkerset.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(manifest, schema)
    for template in pod_templates(manifest):
        metadata = {"name": "pod", **template.get("metadata", {})}
        check_kubernetes({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def pod_templates(manifest):
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        of_group = spec["leaderWorkerTemplate"]
        return [of_group[name] for name in ("leaderTemplate", "workerTemplate") if name in of_group]
    return [spec["template"]] if "template" in spec else []


def check_services(manifests):
    labels = [template["metadata"]["labels"] for manifest in manifests for template in pod_templates(manifest)]
    for service in (manifest for manifest in manifests if manifest["kind"] == "Service"):
        # A StatefulSet labels its pods with their index.
        selector = {name: value for name, value in service["spec"]["selector"].items() if "kubernetes.io/" not in name}
        if not any(selector.items() <= pod.items() for pod in labels):
            raise ValueError(f"service {service['metadata']['name']} selects no pod")


def check_file(path):
    manifests = documents(path)
    for manifest in manifests:
        if manifest["kind"] == "LeaderWorkerSet":
            check_leader_worker_set(manifest)
        else:
            check_kubernetes(manifest)
    check_services(manifests)
    return len(manifests)


def flags_of(lossd):
    help_text = subprocess.run([lossd, "--helpfull"], stdout=subprocess.PIPE, check=False, text=True).stdout
    flags = set(re.findall(r"--([a-z_0-9]+) \(", help_text))
    if "listen" not in flags:
        raise ValueError(f"{lossd} --helpfull lists no flags")
    return flags


def unknown_flags(path, known):
    text = path.read_text(encoding="utf-8")
    used = set(re.findall(r"(?<![\w-])--([a-z][a-z_0-9-]*)", text))
    return sorted(used - known - FOREIGN_FLAGS)


def main():
    known = flags_of(sys.argv[1])
    failures = []
    for path in sorted(path for path in Path(sys.argv[2]).iterdir() if path.is_file()):
        try:
            objects = check_file(path) if path.suffix == ".yaml" else 0
            print(f"{path.name}: {objects} objects")
        except Exception as error:  # whatever a schema finds
            failures.append(f"{path.name}: {error}")
        if unknown := unknown_flags(path, known):
            failures.append(f"{path.name}: lossd has no flag {', '.join(unknown)}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
