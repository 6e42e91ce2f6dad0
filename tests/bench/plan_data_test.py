# SPDX-License-Identifier: Apache-2.0
"""client/plan/measured.json is what bench/plan_data.py makes from bench/results as they are."""

import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import plan_data  # noqa: E402
import step_factors  # noqa: E402


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


if __name__ == "__main__":
    unittest.main()
