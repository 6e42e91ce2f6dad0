# SPDX-License-Identifier: Apache-2.0
"""Checks the files by which GitHub and GitLab run .ci/run.

  check_ci.py TREE

They are compared with the schemas of the two services (package check-jsonschema, which has copies), and every `.ci/run STEP` of them
with the steps that .ci/run has: none that is not there, none forgotten. Every target of make and every script that they name is there.
Exit status 1 if something is wrong.
"""

import itertools
import json
import re
import sys
from importlib import metadata
from pathlib import Path

import jsonschema
import yaml

SCHEMAS = {
    ".github/workflows/*.yml": "github-workflows", ".gitlab-ci.yml": "gitlab-ci",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config", ".github/ISSUE_TEMPLATE/[!c]*.yml": "github-issue-forms",
}


def load(path):
    loader = yaml.BaseLoader if "workflows" in str(path) else yaml.SafeLoader  # "on" is a name there, not true
    return yaml.load(path.read_text(encoding="utf-8"), loader)


def check_schema(path, name):
    folder = metadata.distribution("check-jsonschema").locate_file("check_jsonschema/builtin_schemas/vendor")
    schema = json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    if True in document:  # YAML 1.1 reads "on" so
        document["on"] = document.pop(True)
    kind = jsonschema.validators.validator_for(schema)
    errors = [f"{'/'.join(map(str, error.absolute_path))}: {error.message[:300]}" for error in kind(schema).iter_errors(document)]
    if errors:
        raise ValueError("; ".join(errors))


def steps_of_github(document):
    matrix = document["jobs"]["steps"]["strategy"]["matrix"]
    pairs = set(itertools.product(matrix["system"], matrix["step"]))
    pairs -= {(each["system"], each["step"]) for each in matrix["exclude"]}
    return {step for _, step in pairs} | {each["step"] for each in matrix["include"]}


def steps_of_gitlab(document):
    return set(document["steps"]["parallel"]["matrix"][0]["STEP"])


def commands_of(document):
    """What the jobs of a file run, with each value of a matrix in its place."""
    for job in [*document.get("jobs", {}).values(), *(job for job in document.values() if isinstance(job, dict) and "script" in job)]:
        lines = [step["run"] for step in job.get("steps", []) if "run" in step]
        script = job.get("script", [])
        lines += [script] if isinstance(script, str) else script
        matrix = job.get("strategy", {}).get("matrix", {})
        for each in job.get("parallel", {}).get("matrix", []):
            matrix = {**matrix, **each}
        for line in lines:
            found = re.search(r"\$\{\{ matrix\.(\w+) \}\}|\$([A-Z]+)\b", line)
            values = matrix.get(found[1] or found[2]) if found else None
            yield from [line] if values is None else [line.replace(found[0], value) for value in values]


def missing_of(tree, path):
    targets = set(re.findall(r"^([a-z-]+):", (tree / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for line in commands_of(load(path)):
        for target in re.findall(r"(?:^|&& )make (\S+)", line):
            if target not in targets:
                yield f"make has no target {target}"
        for script in re.findall(r"(?:^|&& )(scripts/\S+)", line):
            if not (tree / script).is_file():
                yield f"there is no {script}"


def main(tree):
    failed = False
    for pattern, schema in SCHEMAS.items():
        for path in sorted(tree.glob(pattern)) or [None]:
            try:
                if path is None:
                    raise ValueError("there is no such file")
                check_schema(path, schema)
            except ValueError as error:
                print(f"{path or pattern}: {error}")
                failed = True
    steps = set(re.findall(r"^(\w+)_step\(\)", (tree / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE))
    for name, found in ((".github/workflows/ci.yml", steps_of_github(load(tree / ".github/workflows/ci.yml"))),
                        (".gitlab-ci.yml", steps_of_gitlab(load(tree / ".gitlab-ci.yml")))):
        if found != steps:
            print(f"{name}: not steps of .ci/run: {sorted(found - steps)}; forgotten: {sorted(steps - found)}")
            failed = True
    for path in [*sorted(tree.glob(".github/workflows/*.yml")), tree / ".gitlab-ci.yml"]:
        for missing in missing_of(tree, path):
            print(f"{path.relative_to(tree)}: {missing}")
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
