# SPDX-License-Identifier: Apache-2.0
"""bench/report.py on results it has to cope with: several files, missing ways, the files in bench/results."""

import json
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import report  # noqa: E402


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


if __name__ == "__main__":
    unittest.main()
