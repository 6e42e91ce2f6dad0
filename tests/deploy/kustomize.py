# SPDX-License-Identifier: Apache-2.0
"""Renders a kustomization: what `kubectl kustomize` prints, where kubectl is not at hand.

Only what deploy/ uses is known, and anything else refused: resources, images, configMapGenerator with files and
labels and without suffixes, patches of JSON (RFC 6902) with a target. check_manifests.py compares both where kubectl is there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

Object = dict[str, Any]


def known(what: str, found: dict[str, Any], *allowed: str) -> None:
    if unknown := sorted(found.keys() - set(allowed)):
        raise ValueError(f"{what} has {', '.join(unknown)}, which tests/deploy/kustomize.py does not know")


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
