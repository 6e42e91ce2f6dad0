# SPDX-License-Identifier: Apache-2.0
"""What is made of bench/results is of the files that are there now: figures, rates, tables, and the memory of trainers.

    results_test.py LOSSCTL
"""

import json
import pathlib
import re
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import figures  # noqa: E402
import plan_data  # noqa: E402
import report  # noqa: E402
import step_factors  # noqa: E402
import trainer_memory  # noqa: E402


# docs/figures has the figures that bench/figures.py makes, drawn from the files that are in bench/results now.

class Figures(unittest.TestCase):
    def test_every_figure_in_the_tree_is_one_that_the_script_makes(self):
        found = {path.relative_to(figures.FOLDER).as_posix() if path.is_relative_to(figures.FOLDER) else str(path)
                 for folder in ("docs", "bench") for path in (ROOT / folder).rglob("*.svg")}
        drawn_by_hand = {str(ROOT / "docs" / "overview.svg")}
        self.assertEqual(found - drawn_by_hand, set(figures.FIGURES))

    def test_each_figure_is_of_the_files_that_are_there(self):
        for name, (files, _) in figures.FIGURES.items():
            text = (figures.FOLDER / name).read_text(encoding="utf-8")
            self.assertEqual(re.findall(r"<dc:identifier>(.*?)</dc:identifier>", text), [figures.digest(files)],
                             f"{name} is not of {', '.join(files)} as they are: make figures")

    def test_figures_hold_nothing_that_differs_from_run_to_run(self):
        for name in figures.FIGURES:
            self.assertNotIn("<dc:date>", (figures.FOLDER / name).read_text(encoding="utf-8"), name)

    def test_curves_are_columns(self):
        path = ROOT / "bench" / "results" / "h200" / "loss_curves.csv"
        curves = figures.curves(path)
        self.assertEqual(list(curves), ["local", "lossd"])
        self.assertEqual({len(values) for values in curves.values()}, {500})


# client/plan/measured.json is what bench/plan_data.py makes from bench/results as they are.

class PlanData(unittest.TestCase):
    def test_the_committed_file_is_of_the_results(self):
        self.assertEqual(plan_data.MEASURED.read_text(encoding="utf-8"), plan_data.text(plan_data.collect()),
                         "python3 bench/plan_data.py")

    def test_the_table_of_the_page_is_of_the_results(self):
        self.assertEqual(plan_data.PAGE.read_text(encoding="utf-8"), plan_data.page(plan_data.collect()),
                         "python3 bench/plan_data.py")

    def test_every_number_has_a_source_that_is_in_the_tree(self):
        content = json.loads(plan_data.MEASURED.read_text(encoding="utf-8"))
        for key in ("loss", "last_stage", "optimizer", "transports", "devices", "pipelines", "steps"):
            self.assertTrue(content[key], key)
            for entry in content[key]:
                source = content["sources"][entry["source"]]
                self.assertTrue((ROOT / source["file"]).is_file(), source)
                self.assertRegex(source["date"], r"^\d{4}-\d{2}-\d{2}$")

    def test_the_latest_steps_of_a_kind_count(self):
        run = {"kind": "colocated", "head": "lossd", "gradients": "exact", "schedule": "overlapped 1F1B", "replicas": 1,
               "layers": [6, 7, 7, 6], "shares": [3, 1, 1, 3], "gpus": 4, "step_seconds": 2.0, "tokens_per_second": 98304.0,
               "mps": True, "memory": [{"role": "trainer", "peak_bytes": 5}, {"role": "server", "peak_bytes": 7}]}
        content = {"card": "a card", "commit": "abc", "measured_seconds": {"layer": 0.007},
                   "settings": {"shape": "gemma2-2b", "sequences": 4, "context": None}}
        runs = {date: content | {"date": date, "configurations": configurations} for date, configurations in (
            ("2026-11-26", [run, run | {"mps": False}]),
            ("2026-11-27", [run | {"step_seconds": 1.0}, run | {"slack": 1, "step_seconds": 1.5}]))}
        runs["failed"] = content | {"date": "2026-11-28", "configurations": [
            {"kind": "colocated", "error": "out of memory"}, run | {"replicas": 2}, run | {"schedule": "1F1B"},
            run | {"kind": "local", "head": "liger"}]}
        steps = step_factors.read("pipelines.json", runs, plan_data.Sources())
        self.assertEqual(sorted((each["mps"], each["step_seconds"]) for each in steps), [(False, 2.0), (True, 1.0)])
        self.assertEqual([each["microbatches"] for each in steps], [12, 24])
        self.assertEqual(steps[0]["shares"], [3, 1, 1, 3])
        self.assertEqual(steps[0]["peak_bytes"], [5])

    def test_factors_are_those_that_steps_were_made_with(self):
        loss = [{"logits": "stored", "gradients": gradients, "data": "real", "hidden": 8, "vocab": 16, "rows": 4, "ms": ms}
                for gradients, ms in (("exact", 40.0), ("sampled", 16.0))]
        local = [{"method": "compiled", "data": "real", "hidden": 8, "vocab": 16, "rows": 4, "ms": 48.0}]
        made, factors = [], {("exact", True): 1.2, ("sampled", True): 1.7, ("exact", False): 1.9}
        for layers, gradients, mps in (((5, 5, 5, 1), "", False), ((4, 4, 4, 0), "", False), ((5, 5, 6), "exact", False),
                                       *(((4, 4, 4, 4), *each) for each in factors)):
            kind = "local" if not gradients else "server" if len(layers) == 3 else "colocated"
            step = {"kind": kind, "gradients": gradients, "mps": mps, "hidden": 8, "vocab": 16, "microbatches": 24,
                    "microbatch_rows": 4, "layers": layers, "shares": [], "layer_seconds": 0.01}
            seconds = step_factors.predict(step, step_factors.head_seconds(step, loss, local), 1.08, 1.03,
                                           factors.get((gradients, mps), 1.0))
            made.append(step | {"step_seconds": seconds})
        fitted = step_factors.fit(made + [made[0] | {"hidden": 9, "step_seconds": 1e9}], loss, local)  # of no known shape
        self.assertEqual(fitted, {"layer": 1.08, "local_head": 1.03, "worst_error": 0.0, "colocated": [
            {"gradients": "exact", "mps": True, "factor": 1.2}, {"gradients": "sampled", "mps": True, "factor": 1.7},
            {"gradients": "exact", "mps": False, "factor": 1.9}]})

    def test_no_way_was_measured_twice(self):
        content = json.loads(plan_data.MEASURED.read_text(encoding="utf-8"))
        keys = [(e["logits"], e["gradients"], e["data"], e["shape"]) for e in content["loss"]]
        self.assertEqual(len(keys), len(set(keys)))


# bench/report.py on results it has to cope with: several files, missing ways, the files in bench/results.

def times(milliseconds):
    return {"median_ms": milliseconds, "min_ms": milliseconds, "max_ms": milliseconds}


def result(gradients, milliseconds, floor_ms=10.0, data="peaked", logits="stored"):
    return {"logits": logits, "gradients": gradients, "data": data,
            "shape": {"name": "small", "rows": 1000, "hidden": 1000, "vocab": 1000},
            "floor": {"total_ms": floor_ms, "logits": times(floor_ms / 4)}, "loss_and_gradients": times(milliseconds),
            "loss_only": times(3.0), "workspace_mib": 100.0 if (logits, gradients) == ("stored", "exact") else 120.4, "dropped_mass": 0.01,
            "errors": {"hidden_gradient": 1e-3, "weight_gradient": 2e-3, "lse": 3e-6, "loss": 4e-6}}


def peer(milliseconds, floor_ms=10.0, data="peaked"):
    return {"shape": "small", "data": data, "floor": {"total_ms": floor_ms},
            "methods": {name: {"loss_and_gradients": times(ms), "peak_mib": 7.4} for name, ms in milliseconds.items()}}


def cells(text, first):
    """The cells of the lines that begin with this one."""
    return [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| " + first)]


class Report(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, *results):
        path = str(pathlib.Path(self.folder.name) / name)
        with open(path, "w") as file:
            json.dump({"card": "a card", "date": "today", "commit": "abc", "loss": results}, file)
        return path

    def test_ratios_are_to_the_floor_of_the_same_run(self):
        one = self.write("one.json", result("exact", 11.0))
        other = self.write("other.json", result("exact", 8.0, floor_ms=16.0, logits="recomputed"))
        text = report.report([one, other])
        self.assertEqual(cells(text, "shape")[0],
                         ["shape (N, D, V)", "data", "floor ms (TFLOP/s)", "exact", "recomputed exact", "loss alone",
                          "TFLOP/s of exact", "workspace MiB"])
        self.assertEqual(cells(text, "small")[0],
                         ["small (1000, 1000, 1000)", "peaked", "10.00 (1)", "11.00 (1.100)", "8.00 (0.500)",
                          "3.00 (1.200)", "1", "120"])

    def test_every_way_and_peer_has_a_column(self):
        ways = (("stored", "new"), ("stored", "auto"), ("recomputed", "filtered"), ("recomputed", "exact"),
                ("stored", "filtered"), ("stored", "exact"))
        path = self.write("one.json", *(result(each, 10.0 + i, logits=logits) for i, (logits, each) in enumerate(ways)),
                          *(result(each, 20.0 + i, data="flat", logits=logits) for i, (logits, each) in enumerate(ways)))
        peers = str(pathlib.Path(self.folder.name) / "peers.json")
        with open(peers, "w") as file:
            json.dump({"card": "a card", "date": "today", "versions": {"torch": "2"},
                       "loss": [peer({"liger": 30.0, "another": 5.0, "torch": 15.0}),
                                peer({"liger": 32.0}, 16.0, "flat")]}, file)
        text = report.report([path], peers)
        header, peer_header = cells(text, "shape")[0], cells(text, "shape")[-1]
        self.assertEqual(header[3:13], ["exact", "filtered", "auto", "recomputed exact", "recomputed filtered", "new",
                                        "loss alone", "torch", "liger", "another"])
        peaked, flat = cells(text, "small (")[:2]
        self.assertEqual([line[1] for line in (peaked, flat)], ["peaked", "flat"])
        self.assertEqual(peaked[3:9], ["15.00 (1.500)", "14.00 (1.400)", "11.00 (1.100)", "13.00 (1.300)",
                                       "12.00 (1.200)", "10.00 (1.000)"])
        self.assertEqual(peaked[9:13], ["3.00 (1.200)", "15.00 (1.500)", "30.00 (3.000)", "5.00 (0.500)"])
        self.assertEqual(flat[7], "22.00 (2.200)")
        self.assertEqual(flat[10:13], ["-", "32.00 (2.000)", "-"])
        self.assertEqual(peer_header[3:], ["torch", "liger", "another"])
        self.assertEqual(cells(text, "small |")[-1], ["small", "flat", "16.00", "-", "32.00 (2.000), 7 MiB", "-"])
        errors = [line[2] for line in cells(text, "small (")[2:8]]
        self.assertEqual(errors, ["exact", "filtered", "auto", "recomputed exact", "recomputed filtered", "new"])

    def test_what_was_not_run_is_a_dash(self):
        text = report.report([self.write("one.json", result("exact", 11.0), result("auto", 9.0, data="flat"))])
        peaked, flat = cells(text, "small")[:2]
        self.assertEqual(peaked[3:5], ["11.00 (1.100)", "-"])
        self.assertEqual(flat[3:5], ["-", "9.00 (0.900)"])

    def test_the_last_result_counts(self):
        paths = [self.write("one.json", result("exact", 11.0)), self.write("two.json", result("exact", 12.0))]
        self.assertEqual(cells(report.report(paths), "small")[0][3], "12.00 (1.200)")

    def test_errors_have_a_line_for_each_way(self):
        text = report.report([self.write("one.json", result("exact", 11.0), result("filtered", 4.0))])
        self.assertEqual([line[2:] for line in cells(text, "small")[1:]],
                         [[name, "1.0e-03", "2.0e-03", "3.0e-06", "4.0e-06", "0.0100"] for name in ("exact", "filtered")])

    def test_earlier_names_are_read(self):
        earlier = []
        for name in ("auto", "cut-filtered", "cut"):
            each = result(name, 8.0)
            del each["logits"], each["gradients"]
            earlier.append({**each, "algorithm": name})
        text = report.report([self.write("one.json", *earlier)])
        self.assertEqual(cells(text, "shape")[0][3:6], ["auto", "recomputed exact", "recomputed filtered"])

    def test_recorded_results(self):
        folder = ROOT / "bench" / "results" / "h200"
        losses = [str(folder / f"loss_{name}.json") for name in ("peaked", "flat")]
        text = report.report(losses, str(folder / "peers.json"))
        for shape in ("gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"):
            self.assertEqual([line[1] for line in cells(text, f"{shape} (")][:2], ["peaked", "flat"], shape)
        self.assertNotIn("nan", text)
        self.assertIn("| recomputed exact |", text)  # of one of the runs in loss_flat.json
        self.assertIn("| n4096 (4096, 4096, 128256) | peaked ", report.report([str(folder / "loss_512mib.json")]))


# bench/results/trainer_memory.json is what lossctl says, and what was published of these models.

LOSSCTL = None
MIB = 2 ** 20


class TrainerMemory(unittest.TestCase):
    def test_the_committed_file_is_what_lossctl_says(self):
        self.assertEqual(trainer_memory.PLANNED.read_text(encoding="utf-8"),
                         trainer_memory.text(trainer_memory.planned(LOSSCTL)),
                         f"python3 bench/trainer_memory.py {LOSSCTL}")

    def test_it_is_what_was_published(self):
        published = json.loads(trainer_memory.PUBLISHED.read_text(encoding="utf-8"))["models"]
        planned = json.loads(trainer_memory.PLANNED.read_text(encoding="utf-8"))["models"]
        self.assertEqual([model["name"] for model in planned], [model["name"] for model in published])
        self.assertEqual(len(published), 15)
        for theirs, ours in zip(published, planned):
            with self.subTest(theirs["name"]):
                stored, fused, _ = ours["heads"]
                for part, megabytes in theirs["megabytes"].items():
                    key = {"state": "state_bytes", "logits": "logit_bytes", "activations": "activation_bytes"}[part]
                    self.assertAlmostEqual(stored[key] / MIB, megabytes, delta=0.5, msg=part)
                for head, when in ((stored, "before"), (fused, "after")):
                    rows = theirs["largest_batch"][when]
                    self.assertAlmostEqual(head["largest_batch"], rows, delta=1, msg=when)  # they round


if __name__ == "__main__":
    LOSSCTL = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main()
