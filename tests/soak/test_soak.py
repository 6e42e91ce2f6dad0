# SPDX-License-Identifier: Apache-2.0
"""Short runs: of a server that leaks, which is found, and of the server as it is, whose memory is not judged: a process
takes memory at first."""

import json
import os
import subprocess
import sys
from pathlib import Path

def run(tmp_path, binary, seconds):
    report = tmp_path / "report.json"
    subprocess.run([sys.executable, str(Path(__file__).with_name("soak.py")), f"--seconds={seconds}",
                    f"--report={report}"], env={**os.environ, "LOSSD_BINARY": str(binary)}, check=False, timeout=600)
    told = json.loads(report.read_text())
    return {finding["what"]: finding["passed"] for finding in told["findings"]}, told["done"]


def test_planted_leaks_are_found(tmp_path):
    leaking = tmp_path / "lossd"
    leaking.write_text(f"#!/bin/sh\nLD_PRELOAD={os.environ['LOSSD_PLANTED_LEAK']} exec {os.environ['LOSSD_BINARY']} \"$@\"\n")
    leaking.chmod(0o755)
    passed, _ = run(tmp_path, leaking, 30)
    assert not passed["steady memory"] and not passed["descriptors"] and not passed["threads"]


def test_a_run_does_what_it_says(tmp_path):
    passed, done = run(tmp_path, os.environ["LOSSD_BINARY"], 60)
    assert passed["descriptors"] and passed["threads"] and passed["trainer 0"] and passed["trainer 1"]
    for what in ("server killed", "trainer killed", "scrape", "slow_reader_of_a_tensor", "abandoned_microbatch",
                 "heads_that_come_and_go", "half_a_request"):
        assert done[what] > 0, (what, done)
    assert done["silent_writer, ended early"] + done["idle_call, ended early"] > 0
