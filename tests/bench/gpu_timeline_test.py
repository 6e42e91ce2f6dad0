# SPDX-License-Identifier: Apache-2.0
"""bench/gpu_timeline.py on traces that are written here, and bench/thread_times.py on this process."""

import io
import os
import pathlib
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import gpu_timeline  # noqa: E402
import thread_times  # noqa: E402

# Two clocks: the second is 1 s later in both times, and 5 us ahead.
TRACE = """\
clock,1000,5000000000
kernel,0,7,2000,3000,lossd::kernels::cuda::hopper::LogitPassKernel
kernel,1,7,2000,3000,of another GPU
copy,0,9,2500,4500,4096
clock,1000001000,6000005000
kernel,0,7,1000002000,1000003000,name, with a comma
end,0,0
"""


def span(begin, end, stream=1, name="gemm"):
    return gpu_timeline.Span(begin, end, stream, name)


class Traces(unittest.TestCase):
    def test_times_are_of_the_clock_before_them(self):
        spans = gpu_timeline.parse_trace(io.StringIO(TRACE), 0)
        self.assertEqual([each.name for each in spans],
                         ["lossd::kernels::cuda::hopper::LogitPassKernel", "copy", "name, with a comma"])
        self.assertEqual([each.stream for each in spans], [7, 9, 7])
        self.assertAlmostEqual(spans[0].begin, 5.000001, 9)
        self.assertAlmostEqual(spans[2].begin, 6.000006, 9)

    def test_a_trace_without_a_clock_is_refused(self):
        with self.assertRaisesRegex(ValueError, "no clock"):
            gpu_timeline.parse_trace(["kernel,0,7,2000,3000,a\n"], 0)

    def test_lanes_that_cannot_be_read_say_why(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "lossd.1.csv"
            path.write_text(TRACE)
            self.assertEqual(gpu_timeline.read_lane(f"head={path}:1")[0], "head")
            with self.assertRaisesRegex(ValueError, "has nothing of GPU 2"):
                gpu_timeline.read_lane(f"head={path}:2")
        with self.assertRaisesRegex(ValueError, "a lane is NAME=FILE:DEVICE"):
            gpu_timeline.read_lane("head")

    def test_kernels_have_classes(self):
        for name, kind in {"ncclDevKernel_AllGather_RING_LL": "exchange", "LogitPassKernel": "logits and loss",
                           "nvjet_hsh_128x256": "product", "flash_fwd_kernel": "attention", "copy": "copy",
                           "vectorized_elementwise_kernel": "other"}.items():
            self.assertEqual(gpu_timeline.class_of(name), kind, name)


class Sums(unittest.TestCase):
    def test_what_overlaps_counts_once(self):
        self.assertEqual(gpu_timeline.covered([(3, 4), (0, 2), (1, 2.5), (1, 1.5)]), [(0, 2.5), (3, 4)])
        self.assertEqual(gpu_timeline.common([(0, 2), (3, 5)], [(1, 4)]), 2)
        self.assertEqual(gpu_timeline.common([], [(1, 4)]), 0)

    def test_microbatches_are_bursts(self):
        spans = [span(0.000, 0.010), span(0.0105, 0.020, 2), span(0.050, 0.060)]
        found = gpu_timeline.bursts(spans)
        self.assertEqual([(round(a, 6), round(b, 6), round(c, 6)) for a, b, c in found],
                         [(0.0, 0.02, 0.0195), (0.05, 0.06, 0.01)])

    def test_summary_is_of_the_window(self):
        lanes = {"head": [span(0.0, 1.0), span(1.5, 2.5)], "stage": [span(0.5, 2.0, 3, "flash_fwd")]}
        summary = gpu_timeline.summarize(lanes, 0.5, 2.5)
        head, stage = summary["lanes"]["head"], summary["lanes"]["stage"]
        self.assertAlmostEqual(head["busy_share"], 0.75)
        self.assertAlmostEqual(head["beside"]["stage"], 0.5)
        self.assertAlmostEqual(stage["busy_share"], 0.75)
        self.assertEqual(list(stage["kernel_seconds"]), ["attention"])
        self.assertIsNone(stage["median_burst_seconds"], "it begins before the window")

    def test_the_window_lies_in_what_all_have_recorded(self):
        lanes = {"a": [span(0.0, 10.0)], "b": [span(4.0, 12.0)]}
        self.assertEqual(gpu_timeline.window(lanes, None, 2.0), (6.0, 8.0))
        self.assertEqual(gpu_timeline.window(lanes, 1.0, 2.0), (5.0, 7.0))
        with self.assertRaisesRegex(ValueError, "no time in common"):
            gpu_timeline.window({"a": [span(0, 1)], "b": [span(2, 3)]}, None, 1.0)


class Threads(unittest.TestCase):
    def test_a_name_may_hold_anything(self):
        fields = " ".join(["S"] + ["0"] * 10 + ["150", "50"] + ["0"] * 5)
        self.assertEqual(thread_times.parse_stat(f"12 (a (b) c) {fields}", 100), thread_times.Times("a (b) c", 1.5, 0.5))

    def test_a_thread_that_computes_is_the_busiest(self):
        stop = threading.Event()
        thread = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
        thread.start()
        try:
            before = thread_times.read_threads(os.getpid())
            begin = time.monotonic()
            time.sleep(0.5)
            after = thread_times.read_threads(os.getpid())
            rows = thread_times.cores_by_name(before, after, time.monotonic() - begin)
        finally:
            stop.set()
            thread.join()
        self.assertGreater(sum(row["user"] + row["system"] for row in rows), 0.05)
        self.assertEqual(sum(row["threads"] for row in rows), len(after))

    def test_threads_that_began_later_count_from_their_begin(self):
        rows = thread_times.cores_by_name({}, {1: thread_times.Times("new", 1.0, 1.0)}, 4.0)
        self.assertEqual(rows, [{"name": "new", "threads": 1, "user": 0.25, "system": 0.25, "busiest": 0.5}])


if __name__ == "__main__":
    unittest.main()
