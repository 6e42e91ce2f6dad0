# SPDX-License-Identifier: Apache-2.0
"""Makes bench/results/trainer_memory.json: the memory that `lossctl plan` predicts for the models and the setting in
bench/results/published_memory.json. bench/figures.py draws both files.

    python3 bench/trainer_memory.py build/cpu-only/bin/lossctl            # write the file
    python3 bench/trainer_memory.py build/cpu-only/bin/lossctl --check    # exit status 1 if the file is not what lossctl predicts
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

RESULTS = pathlib.Path(__file__).resolve().parent / "results"
PUBLISHED = RESULTS / "published_memory.json"
PLANNED = RESULTS / "trainer_memory.json"


def plan(lossctl, config, *options):
    """The JSON that `lossctl plan` prints for a model. `config`: the content of the model's config.json."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "config.json")
        path.write_text(json.dumps(config), encoding="utf-8")
        done = subprocess.run([lossctl, "--json", "plan", path, *options], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        sys.exit(f"lossctl plan {' '.join(options)} with {json.dumps(config)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def options_of(setting, model, parameters):
    """The options of `lossctl plan` for the setting and a model. The number of parameters is an option only if the published
    table has another number than the configuration."""
    options = {"--trainer-gpus": setting["gpus"], "--trainer-memory": setting["gpu_memory_bytes"],
               "--trainer-rows": setting["rows"], "--bytes-per-parameter": setting["bytes_per_parameter"],
               "--logit-bytes": setting["bytes_per_logit"]}
    if model["vocab"] != model["config"]["vocab_size"]:
        options["--vocab"] = model["vocab"]
    if model["vocab"] != model["config"]["vocab_size"] or model["masks"]:
        options["--parameters"] = parameters + model["masks"]
    return [str(word) for option in options.items() for word in option]


def planned(lossctl):
    published = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    models = []
    for model in published["models"]:
        parameters = plan(lossctl, model["config"])["model"]["parameters"]
        made = plan(lossctl, model["config"], *options_of(published["setting"], model, parameters))
        models.append({"name": model["name"], **made["trainer_memory"]})
    return models


def text(models):
    def head(values):
        return "    " + json.dumps(values)

    def entry(model):
        sizes = json.dumps({key: value for key, value in model.items() if key != "heads"})
        return f"  {sizes[:-1]},\n   \"heads\": [\n" + ",\n".join(map(head, model["heads"])) + "]}"
    return '{"models": [\n' + ",\n".join(map(entry, models)) + "\n]}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lossctl", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    made = text(planned(args.lossctl.resolve()))
    if not args.check:
        PLANNED.write_text(made, encoding="utf-8")
    elif PLANNED.read_text(encoding="utf-8") != made:
        sys.exit(f"{PLANNED} is not what {args.lossctl} says: python3 {sys.argv[0]} {args.lossctl}")


if __name__ == "__main__":
    main()
