# SPDX-License-Identifier: Apache-2.0
"""Commands and flags of programs of benchmarks (bench/command.h), on the program server_bench: command_test.py SERVER_BENCH."""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SERVER_BENCH = sys.argv[1]


def run(*arguments):
    done = subprocess.run([SERVER_BENCH, *arguments], capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


class Commands(unittest.TestCase):
    def test_without_a_command_all_are_listed(self):
        for arguments, status in ([], 2), (["--help"], 0), (["sevice"], 2):
            with self.subTest(arguments):
                returned, out, error = run(*arguments)
                self.assertEqual(returned, status)
                listed = out if status == 0 else error
                for command in "service", "checkpoint", "parts":
                    self.assertRegex(listed, rf"(?m)^  {command} ")
        self.assertIn("unknown command 'sevice'", run("sevice")[2])

    def test_flags_are_those_of_the_command(self):
        status, out, _ = run("checkpoint", "--help")
        self.assertEqual(status, 0)
        self.assertIn("--rounds (saves and loads); default: 5", out)
        self.assertNotIn("--channels", out)
        self.assertIn("unknown flag '--channels=1'", run("checkpoint", "--channels=1")[2])

    def test_what_is_wrong_is_named(self):
        for arguments, expected in ((["--rounds=many"], "--rounds: invalid value 'many'"), (["--rounds"], "--rounds needs a value"),
                                    (["--norounds"], "unknown flag '--norounds'"), (["--nocold=true"], "unknown flag '--nocold=true'"),
                                    (["--cold=perhaps"], "--cold: invalid value 'perhaps'"), (["rounds"], "unexpected argument 'rounds'")):
            with self.subTest(arguments):
                status, _, error = run("checkpoint", *arguments)
                self.assertEqual(status, 2)
                self.assertIn(f"checkpoint: {expected}", error)

    def test_a_checkpoint_is_timed(self):
        with tempfile.TemporaryDirectory() as folder:
            status, out, error = run("checkpoint", f"--directory={folder}", "--hidden", "16", "--vocab=64", "--rounds=2", "--nocold",
                                     "--verify_first=false")
            self.assertEqual((status, list(pathlib.Path(folder).iterdir())), (0, []), error)
            self.assertEqual([line.split()[0] for line in out.splitlines()], ["0", "1", "median"])
            self.assertEqual(run("checkpoint", f"--directory={folder}/none")[0], 1)

    def test_a_service_is_timed(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "out.json")
            status, _, error = run("service", "--rows=16", "--hidden_size=8", "--vocab_size=32", "--seconds=0.1", "--channels=1,2",
                                   f"--json={path}")
            self.assertEqual(status, 0, error)
            results = json.loads(path.read_text())["results"]
        self.assertEqual([each["name"] for each in results], ["kernels", "engine", "service, 1 channel", "service, 2 channels"])
        for each in results:
            self.assertGreater(each["rows_per_second"], 0.0)

    def test_parts_have_the_flags_of_google_benchmark(self):
        status, out, error = run("parts", "--benchmark_filter=BM_RepeatedMicrobatch/rows:1024/", "--benchmark_min_time=0.01")
        self.assertEqual(status, 0, error)
        self.assertIn("BM_RepeatedMicrobatch/rows:1024/", out)
        self.assertNotIn("BM_Chunk", out)
        self.assertEqual(run("parts", "--rounds=1")[0], 2)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
