# SPDX-License-Identifier: Apache-2.0
"""bench/results/trainer_memory.json is what lossctl says, and what was published of these models.

    trainer_memory_test.py LOSSCTL
"""

import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import trainer_memory  # noqa: E402

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
