"""bench/report.py on results it has to cope with: several files, missing algorithms, the files in bench/results."""

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


def result(algorithm, milliseconds, floor_ms=10.0, data="peaked"):
    return {"algorithm": algorithm, "data": data, "shape": {"name": "small", "rows": 1000, "hidden": 1000, "vocab": 1000},
            "floor": {"total_ms": floor_ms, "logits": times(floor_ms / 4)}, "loss_and_gradients": times(milliseconds),
            "loss_only": times(3.0), "workspace_mib": 100.0 if algorithm == "exact" else 120.4, "dropped_mass": 0.01,
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
        other = self.write("other.json", result("cut", 8.0, floor_ms=16.0))
        text = report.report([one, other])
        self.assertEqual(cells(text, "shape")[0],
                         ["shape (N, D, V)", "data", "floor ms (TFLOP/s)", "exact", "cut", "loss alone",
                          "TFLOP/s of exact", "workspace MiB"])
        self.assertEqual(cells(text, "small")[0],
                         ["small (1000, 1000, 1000)", "peaked", "10.00 (1)", "11.00 (1.100)", "8.00 (0.500)",
                          "3.00 (1.200)", "1", "120"])

    def test_every_algorithm_and_peer_has_a_column(self):
        algorithms = ("new", "auto", "cut-filtered", "cut", "filtered", "exact")
        path = self.write("one.json", *(result(name, 10.0 + i) for i, name in enumerate(algorithms)),
                          *(result(name, 20.0 + i, data="flat") for i, name in enumerate(algorithms)))
        peers = str(pathlib.Path(self.folder.name) / "peers.json")
        with open(peers, "w") as file:
            json.dump({"card": "a card", "date": "today", "versions": {"torch": "2"},
                       "loss": [peer({"liger": 30.0, "another": 5.0, "torch": 15.0}),
                                peer({"liger": 32.0}, 16.0, "flat")]}, file)
        text = report.report([path], peers)
        header, peer_header = cells(text, "shape")[0], cells(text, "shape")[-1]
        self.assertEqual(header[3:13], ["exact", "filtered", "cut", "cut-filtered", "auto", "new", "loss alone",
                                        "torch", "liger", "another"])
        peaked, flat = cells(text, "small (")[:2]
        self.assertEqual([line[1] for line in (peaked, flat)], ["peaked", "flat"])
        self.assertEqual(peaked[3:9], ["15.00 (1.500)", "14.00 (1.400)", "13.00 (1.300)", "12.00 (1.200)",
                                       "11.00 (1.100)", "10.00 (1.000)"])
        self.assertEqual(peaked[9:13], ["3.00 (1.200)", "15.00 (1.500)", "30.00 (3.000)", "5.00 (0.500)"])
        self.assertEqual(flat[6], "22.00 (2.200)")
        self.assertEqual(flat[10:13], ["-", "32.00 (2.000)", "-"])
        self.assertEqual(peer_header[3:], ["torch", "liger", "another"])
        self.assertEqual(cells(text, "small |")[-1], ["small", "flat", "16.00", "-", "32.00 (2.000), 7 MiB", "-"])
        errors = [line[2] for line in cells(text, "small (")[2:8]]
        self.assertEqual(errors, ["exact", "filtered", "cut", "cut-filtered", "auto", "new"])

    def test_what_was_not_run_is_a_dash(self):
        text = report.report([self.write("one.json", result("exact", 11.0), result("auto", 9.0, data="flat"))])
        peaked, flat = cells(text, "small")[:2]
        self.assertEqual(peaked[3:5], ["11.00 (1.100)", "-"])
        self.assertEqual(flat[3:5], ["-", "9.00 (0.900)"])

    def test_the_last_result_counts(self):
        paths = [self.write("one.json", result("exact", 11.0)), self.write("two.json", result("exact", 12.0))]
        self.assertEqual(cells(report.report(paths), "small")[0][3], "12.00 (1.200)")

    def test_errors_have_a_line_for_each_algorithm(self):
        text = report.report([self.write("one.json", result("exact", 11.0), result("filtered", 4.0))])
        self.assertEqual([line[2:] for line in cells(text, "small")[1:]],
                         [[name, "1.0e-03", "2.0e-03", "3.0e-06", "4.0e-06", "0.0100"] for name in ("exact", "filtered")])

    def test_recorded_results(self):
        for folder in sorted((ROOT / "bench" / "results").glob("h200-*")):
            peers = folder / "report_peers.json"
            losses = [str(path) for path in sorted(folder.glob("report_*.json")) if path != peers]
            text = report.report(losses, str(peers) if peers.exists() else None)
            for shape in ("gemma2-2b", "llama3-8b", "phi3.5-mini", "mistral-nemo", "n4096"):
                self.assertTrue(cells(text, shape), f"{folder}: {shape}")
            for line in text.splitlines():
                self.assertNotIn("nan", line)


if __name__ == "__main__":
    unittest.main()
