# SPDX-License-Identifier: Apache-2.0
"""Checks what lies in deploy/: that Kubernetes and Compose take the manifests, and that lossd has the flags.

  check_manifests.py LOSSD DEPLOY [FOLDER]     FOLDER: only this overlay is rendered, and not by kubectl

Every overlay of deploy/kubernetes is rendered (by the functions below; by kubectl too, and compared, where that is at hand). Objects are compared
with the schemas of Kubernetes (package kubernetes-validate, strictly: unknown fields are errors), a LeaderWorkerSet, a JobSet and the
objects of the Prometheus operator with those of schemas.json, and Jobs and pods in them with those of Kubernetes. The flags of a
JobSet have to name as many ranks as it has pods, and the pod of the first. Compose files are compared with the schema of
check-jsonschema, and what they mount has to be there. The dashboard of Grafana has nothing that Grafana's own types do not know. Every --flag of a file has to be one that `lossd --helpfull` lists. Services,
policies and budgets have to select pods that are there; a pod may take longer to end than its server drains; a file that a flag
names has to lie in a volume of the pod; an address beyond the loopback has TLS, or --insecure; and the secret that kubernetes/README.md makes
has to have the files that an overlay asks of it, and no others. The rules for the Prometheus operator are those of deploy/prometheus. Exit status 1 if something is wrong.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import grafana_foundation_sdk.cog.encoder
import grafana_foundation_sdk.cog.plugins
import grafana_foundation_sdk.models.dashboard
import jsonpatch
import jsonschema
import kubernetes_validate
import yaml


# Renders a kustomization: what `kubectl kustomize` prints, where kubectl is not at hand.
#
# Only what deploy/ uses is known, and anything else refused: resources, images, configMapGenerator with files and
# labels and without suffixes, patches of JSON (RFC 6902) with a target. Both are compared where kubectl is there.

Object = dict[str, Any]


def known(what: str, found: dict[str, Any], *allowed: str) -> None:
    if unknown := sorted(found.keys() - set(allowed)):
        raise ValueError(f"{what} has {', '.join(unknown)}, which tests/deploy/check_manifests.py does not know")


def documents(path: Path) -> list[Object]:
    with open(path, encoding="utf-8") as file:
        # By way of JSON, so that what an alias repeats is a copy, which a patch changes alone.
        return [json.loads(json.dumps(document)) for document in yaml.safe_load_all(file) if document is not None]


def render(folder: Path) -> list[Object]:
    path = folder / "kustomization.yaml"
    (kustomization,) = documents(path)
    known(str(path), kustomization, "apiVersion", "kind", "resources", "images", "configMapGenerator", "generatorOptions", "patches")
    objects: list[Object] = []
    for resource in kustomization.get("resources", []):
        target = folder / resource
        objects += render(target) if target.is_dir() else documents(target)
    for generator in kustomization.get("configMapGenerator", []):
        generate(folder, kustomization, generator, objects)
    for patch in kustomization.get("patches", []):
        known("a patch", patch, "target", "patch")
        known("the target of a patch", patch["target"], "kind", "name")
        chosen = [each for each in objects if each["kind"] == patch["target"]["kind"] and each["metadata"]["name"] == patch["target"]["name"]]
        if len(chosen) != 1:
            raise ValueError(f"{path}: a patch is for {len(chosen)} objects")
        jsonpatch.apply_patch(chosen[0], yaml.safe_load(patch["patch"]), in_place=True)
    for image in kustomization.get("images", []):
        known("an image", image, "name", "newName", "newTag")
        for each in objects:
            set_image(each, image)
    return objects


def generate(folder: Path, kustomization: Object, generator: Object, objects: list[Object]) -> None:
    known("a generator", generator, "name", "behavior", "files", "options")
    if kustomization.get("generatorOptions") != {"disableNameSuffixHash": True}:
        raise ValueError(f"{folder}: generated names have suffixes")
    made: Object = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]},
            "data": {name: (folder / name).read_text(encoding="utf-8") for name in generator["files"]}}
    if "options" in generator:
        known("the options of a generator", generator["options"], "labels")
        made["metadata"]["labels"] = generator["options"]["labels"]
    before = [each for each in objects if each["kind"] == "ConfigMap" and each["metadata"]["name"] == generator["name"]]
    if (generator.get("behavior", "create"), len(before)) not in (("create", 0), ("replace", 1)):
        raise ValueError(f"{folder}: {generator['name']} is there {len(before)} times")
    for each in before:
        objects.remove(each)
    objects.append(made)


def set_image(value: Any, image: Object) -> None:
    if isinstance(value, list):
        for each in value:
            set_image(each, image)
    elif isinstance(value, dict):
        for container in [*value.get("containers", []), *value.get("initContainers", [])]:
            name, _, tag = container["image"].rpartition(":")
            if name == image["name"]:
                container["image"] = f"{image.get('newName', name)}:{image.get('newTag', tag)}"
        for each in value.values():
            set_image(each, image)


def render_by_kubectl(folder: Path) -> list[Object] | None:
    """None without kubectl. One that is older than `patches` does not count."""
    program = shutil.which("kubectl")
    if program is None:
        return None
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode != 0 and 'unknown field "patches"' in done.stderr:
        return None
    if done.returncode != 0:
        raise ValueError(f"kubectl kustomize: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


# Checks of what was rendered.

KUBERNETES = "1.30"
SCHEMAS = json.loads(Path(__file__).with_name("schemas.json").read_text(encoding="utf-8"))  # of kinds that Kubernetes does not know itself
# Overlays of several processes; what the secret has is that of mtls and one file more.
OF_RANKS = ("ranks", "leaderworkerset", "leaderworkerset-gpus", "jobset")
DRAIN_SECONDS = 30  # --drain_timeout's default
DEVICE_SECONDS = 10  # what a server takes after it at the most (docs/operations.md)
# Of the programs that start lossd.
FOREIGN_FLAGS = {
    "nnodes", "master_addr", "master_port", "nproc_per_node", "max_restarts", "redirects", "tee", "no_python", "node_rank",
    "kill-on-bad-exit", "wait", "exact", "gpus", "ntasks", "signal", "nodes", "ntasks-per-node", "gpus-per-node", "requeue", "job-name", "overlap", "exclusive", "nproc-per-node", "flagfile", "from-file", "help", "build", "target",
}


def check_schema(document, schema):
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    errors = [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in kind(schema).iter_errors(document)]
    if errors:
        raise ValueError("; ".join(errors))


def check_object(manifest):
    if manifest["kind"] not in SCHEMAS:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    check_schema(manifest, SCHEMAS[manifest["kind"]])
    for job in jobs_of(manifest):
        described = {"name": "job", **job["template"].get("metadata", {})}
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": described, "spec": job["template"]["spec"]}, KUBERNETES, strict=True)
    for template in pod_templates(manifest):
        described = {"name": "pod", **template.get("metadata", {})}
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": described, "spec": template["spec"]}, KUBERNETES, strict=True)


def jobs_of(manifest):
    return manifest["spec"]["replicatedJobs"] if manifest["kind"] == "JobSet" else []


def pod_templates(manifest):
    spec = manifest.get("spec", {})
    if manifest["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in jobs_of(manifest)]
    if manifest["kind"] == "LeaderWorkerSet":
        of_group = spec["leaderWorkerTemplate"]
        return [of_group[name] for name in ("leaderTemplate", "workerTemplate") if name in of_group]
    return [spec["template"]] if "template" in spec else []


def server_of(template):
    """The container of a pod that runs lossd; it may be a sidecar."""
    for container in template["spec"].get("initContainers", []) + template["spec"]["containers"]:
        if container["name"] == "lossd":
            return container
    raise ValueError("a pod has no container lossd")


def labels_of(manifests):
    return [template["metadata"]["labels"] for manifest in manifests for template in pod_templates(manifest)]


def check_selectors(manifests):
    services = [manifest.get("metadata", {}).get("labels", {}) for manifest in manifests if manifest["kind"] == "Service"]
    for manifest in manifests:
        candidates, selector = labels_of(manifests), {}
        if manifest["kind"] == "Service":
            selector = manifest["spec"]["selector"]
        elif manifest["kind"] in ("NetworkPolicy", "PodDisruptionBudget"):
            selector = manifest["spec"]["podSelector" if manifest["kind"] == "NetworkPolicy" else "selector"]["matchLabels"]
        elif manifest["kind"] == "ServiceMonitor":
            candidates, selector = services, manifest["spec"]["selector"]["matchLabels"]
        # A StatefulSet labels its pods with their index.
        selector = {name: value for name, value in selector.items() if "kubernetes.io/" not in name}
        if not any(selector.items() <= labels.items() for labels in candidates):
            raise ValueError(f"{manifest['kind']} {manifest['metadata']['name']} selects nothing")


def flags_of_pod(template, manifests):
    """What the server of a pod is started with, flag by flag."""
    arguments = server_of(template)["args"]
    files = {f"{mount['mountPath']}/{name}": text for mount in server_of(template)["volumeMounts"]
             for volume in template["spec"]["volumes"] if volume["name"] == mount["name"] and "configMap" in volume
             for manifest in manifests if manifest["kind"] == "ConfigMap" and manifest["metadata"]["name"] == volume["configMap"]["name"]
             for name, text in manifest["data"].items()}
    flags = []
    for argument in arguments:
        if argument.startswith("--flagfile="):
            path = argument.split("=", 1)[1]
            if path not in files:
                raise ValueError(f"{argument}: no ConfigMap has it")
            flags += [line for line in files[path].splitlines() if line.startswith("--")]
        else:
            flags.append(argument)
    return dict(flag[2:].partition("=")[::2] for flag in flags)


def check_jobs(manifests):
    """Which rank a pod is, and where the first one is found, follows from the names and numbers of a JobSet."""
    for manifest in manifests:
        for job in jobs_of(manifest):
            spec, name = job["template"]["spec"], manifest["metadata"]["name"]
            flags = flags_of_pod(spec["template"], manifests)
            if job.get("replicas", 1) != 1 or spec.get("completionMode") != "Indexed" or flags["launcher"] != "jobset":
                raise ValueError(f"replicatedJobs {job['name']}: the ranks are the pods of one indexed Job")
            if not spec["parallelism"] == spec["completions"] == int(flags["ranks"]):
                raise ValueError(f"--ranks={flags['ranks']} with {spec['parallelism']} pods, of which {spec['completions']} complete")
            first = f"{name}-{job['name']}-0-0.{manifest['spec'].get('network', {}).get('subdomain', name)}"
            if flags["leader"].partition(":")[0] != first:
                raise ValueError(f"--leader={flags['leader']}: the first pod is {first}")


def seconds(duration):
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", duration))


def check_pods(manifests):
    for manifest in manifests:
        for template in pod_templates(manifest):
            flags = flags_of_pod(template, manifests)
            drains = seconds(flags["drain_timeout"]) if "drain_timeout" in flags else DRAIN_SECONDS
            grace = template["spec"].get("terminationGracePeriodSeconds", 30)
            if grace <= drains + DEVICE_SECONDS:
                raise ValueError(f"terminationGracePeriodSeconds {grace} is not longer than a drain of {drains} s and {DEVICE_SECONDS} s")
            mounts = [mount["mountPath"] for mount in server_of(template)["volumeMounts"]]
            claims = [claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", [])]
            volumes = [volume["name"] for volume in template["spec"].get("volumes", [])] + claims
            for mount in server_of(template)["volumeMounts"]:
                if mount["name"] not in volumes:
                    raise ValueError(f"volumeMounts: there is no volume {mount['name']}")
            for name, value in flags.items():
                # Of a LeaderWorkerSet only the leader has checkpoints.
                if value.startswith("/") and name != "checkpoint_dir" and not any(value.startswith(mount) for mount in mounts):
                    raise ValueError(f"--{name}={value} is in no volume")
            port = {"grpc": "listen", "http": "http"}
            for each in server_of(template)["ports"]:
                if each["name"] in port and not flags[port[each["name"]]].endswith(f":{each['containerPort']}"):
                    raise ValueError(f"port {each['name']} is not that of --{port[each['name']]}")
            secure = "http_tls" in flags
            for name, has_tls in (("listen", "tls_cert" in flags), ("http", secure), ("worker_http", secure)):
                if flags.get(name, "").startswith("0.0.0.0:") and not has_tls and "insecure" not in flags:
                    raise ValueError(f"the server refuses --{name}={flags[name]} without TLS or --insecure")
            for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
                if (server_of(template)[probe]["httpGet"].get("scheme", "HTTP") == "HTTPS") != secure:
                    raise ValueError(f"{probe} and --http_tls differ")


def keys_asked_of_secrets(manifests):
    """Of each secret: the files that flags of pods name in it, and what a ServiceMonitor takes of it."""
    keys = {}
    for manifest in manifests:
        for template in pod_templates(manifest):
            for volume in template["spec"].get("volumes", []):
                if "secret" not in volume:
                    continue
                for mount in server_of(template)["volumeMounts"]:
                    if mount["name"] == volume["name"]:
                        files = {value[len(mount["mountPath"]) + 1:] for value in flags_of_pod(template, manifests).values()
                                 if value.startswith(mount["mountPath"] + "/")}
                        keys.setdefault(volume["secret"]["secretName"], set()).update(files)
        if manifest["kind"] == "ServiceMonitor":
            for endpoint in manifest["spec"]["endpoints"]:
                for reference in (endpoint.get("authorization", {}).get("credentials"), endpoint.get("tlsConfig", {}).get("ca", {}).get("secret")):
                    if reference:
                        keys.setdefault(reference["name"], set()).add(reference["key"])
    return keys


def keys_made(page, overlay):
    """Of each secret that the page's commands make for this overlay. A comment says which one a command is for; without, it is for the base."""
    made = {}
    named = "mtls" if overlay in ("mtls", *OF_RANKS) else None
    for line in page.read_text(encoding="utf-8").splitlines():
        command = re.match(r" +kubectl create secret generic (\S+) (.*?)(?:# for (\S+))?$", line)
        if command and command[3] == named:
            made[command[1]] = set(re.findall(r"--from-file=(\S+)", command[2]))
    if overlay in OF_RANKS:  # as their first lines say
        for keys in made.values():
            keys.add("ranks")
    return made


def check_secrets(manifests, folder):
    asked = keys_asked_of_secrets(manifests)
    made = keys_made(folder.parents[len(folder.parts) - folder.parts.index("kubernetes") - 2] / "README.md", folder.name)
    for name, keys in asked.items():
        if made.get(name, set()) != keys:
            raise ValueError(f"secret {name}: asked for {', '.join(sorted(keys))}; kubernetes/README.md makes {', '.join(sorted(made.get(name, set())))}")


def by_name(manifests):
    return sorted(manifests, key=lambda each: (each["kind"], each["metadata"]["name"]))


def check_kustomization(folder, ask_kubectl=True):
    manifests = render(folder)
    theirs = render_by_kubectl(folder) if ask_kubectl else None
    if theirs is not None and by_name(theirs) != by_name(manifests):
        raise ValueError("what was rendered here and by kubectl differs")
    for manifest in manifests:
        try:
            check_object(manifest)
        except Exception as error:
            raise ValueError(f"{manifest['kind']} {manifest['metadata'].get('name')}: {error}") from error
    check_selectors(manifests)
    check_pods(manifests)
    check_jobs(manifests)
    check_secrets(manifests, folder)
    return f"{len(manifests)} objects{'' if theirs is None else ', as by kubectl'}"


def check_monitoring(folder):
    """What scripts/monitoring-manifests makes is made of the present files."""
    made, = documents(folder / "prometheusrule.yaml")
    groups = [group for name in ("lossd-recording.yml", "lossd-alerts.yml")
              for group in documents(folder / name)[0]["groups"]]
    if made["spec"] != {"groups": groups}:
        raise ValueError("prometheusrule.yaml does not have the rules of the other files: run scripts/monitoring-manifests")
    return f"{sum(len(group['rules']) for group in groups)} rules"


# Grafana reads these, and its types leave them out.
UNTYPED = re.compile(r"/templating/list/\d+/definition|/annotations/list/\d+/(titleFormat|textFormat)")


def lost(there, back, path=""):
    """What of `there` is not in `back`, place by place."""
    if isinstance(there, dict) and isinstance(back, dict):
        return [place for name in there
                for place in (lost(there[name], back[name], f"{path}/{name}") if name in back else [f"{path}/{name}"])]
    if isinstance(there, list) and isinstance(back, list) and len(there) == len(back):
        return [place for index, (one, other) in enumerate(zip(there, back)) for place in lost(one, other, f"{path}/{index}")]
    return [] if there == back else [path]


def check_dashboard(path):
    """Read by Grafana's types and written again, it is the same: a misspelt name would be gone."""
    there = json.loads(path.read_text(encoding="utf-8"))
    grafana_foundation_sdk.cog.plugins.register_default_plugins()
    read = grafana_foundation_sdk.models.dashboard.Dashboard.from_json(there)
    back = json.loads(grafana_foundation_sdk.cog.encoder.JSONEncoder().encode(read))
    unknown = [place for place in lost(there, back) if not UNTYPED.fullmatch(place)]
    if unknown:
        raise ValueError(f"Grafana knows no {', '.join(unknown)}")
    return f"{len(there['panels'])} panels"


def check_compose(path):
    folder = metadata.distribution("check-jsonschema").locate_file("check_jsonschema/builtin_schemas/vendor")
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    check_schema(document, json.loads(Path(folder, "compose-spec.json").read_text(encoding="utf-8")))
    for name, service in document["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith(".") and not (path.parent / source).exists():
                raise ValueError(f"{name}: {source} does not exist")
            if not source.startswith(".") and source not in document.get("volumes", {}):
                raise ValueError(f"{name}: there is no volume {source}")
        for other in service.get("depends_on", []):
            if other not in document["services"]:
                raise ValueError(f"{name}: there is no service {other}")
    return f"{len(document['services'])} services"


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
    lossd, deploy = sys.argv[1], Path(sys.argv[2])
    known = flags_of(lossd)
    failures = []

    def check(path, how):
        try:
            print(f"{path.relative_to(deploy)}: {how(path)}")
        except Exception as error:  # whatever a schema finds
            failures.append(f"{path.relative_to(deploy)}: {error}")

    if len(sys.argv) > 3:
        check(deploy / sys.argv[3], lambda folder: check_kustomization(folder, ask_kubectl=False))
    else:
        for path in sorted(deploy.glob("kubernetes/overlays/*")) + [deploy / "kubernetes/base"]:
            check(path, check_kustomization)
    check(deploy / "prometheus", check_monitoring)
    check(deploy / "grafana/lossd.json", check_dashboard)
    for path in sorted(deploy.glob("compose/docker-compose*.yml")):
        check(path, check_compose)
    for path in sorted(path for pattern in ("*", "kubernetes/**/*", "compose/**/*") for path in deploy.glob(pattern) if path.is_file()):
        if unknown := unknown_flags(path, known):
            failures.append(f"{path.relative_to(deploy)}: lossd has no flag {', '.join(unknown)}")
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
