# SPDX-License-Identifier: Apache-2.0
"""client/plan/measured.json is what bench/plan_data.py makes from bench/results as they are."""

import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import plan_data  # noqa: E402


class PlanData(unittest.TestCase):
    def test_the_committed_file_is_of_the_results(self):
        self.assertEqual(plan_data.MEASURED.read_text(encoding="utf-8"), plan_data.text(plan_data.collect()),
                         "python3 bench/plan_data.py")

    def test_every_number_has_a_source_that_is_in_the_tree(self):
        content = json.loads(plan_data.MEASURED.read_text(encoding="utf-8"))
        for key in ("loss", "last_stage", "optimizer", "transports", "devices", "pipelines"):
            self.assertTrue(content[key], key)
            for entry in content[key]:
                source = content["sources"][entry["source"]]
                self.assertTrue((ROOT / source["file"]).is_file(), source)
                self.assertRegex(source["date"], r"^\d{4}-\d{2}-\d{2}$")

    def test_no_way_was_measured_twice(self):
        content = json.loads(plan_data.MEASURED.read_text(encoding="utf-8"))
        keys = [(e["logits"], e["gradients"], e["data"], e["shape"]) for e in content["loss"]]
        self.assertEqual(len(keys), len(set(keys)))


if __name__ == "__main__":
    unittest.main()
