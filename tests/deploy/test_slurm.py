# SPDX-License-Identifier: Apache-2.0
"""deploy/slurm.sbatch with srun and scontrol played: the job is queued again where starting again can help, and nowhere else."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm.sbatch"
PROGRAMS = Path(os.environ["LOSSD_BINARY"]).resolve().parent

# Runs its command as two tasks, or ends as $PLAYED_STATUS says; its status is the largest of theirs.
SRUN = """#!/usr/bin/env bash
[[ -z ${PLAYED_STATUS:-} ]] || exit "$PLAYED_STATUS"
while [[ $1 == -* ]]; do shift; done
largest=0
for rank in 0 1; do SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank SLURM_JOB_NODELIST=localhost "$@" & tasks[rank]=$!; done
for task in "${tasks[@]}"; do
  status=0
  wait "$task" || status=$?
  ((status <= largest)) || largest=$status
done
exit "$largest"
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" >>"$PLAYED_CALLS"
"""


class Slurm:
    """The script as Slurm runs it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def run(self, *flags: str, **environment: str) -> tuple[int, list[str], str]:
        """The status, the calls of scontrol, and what the tasks said. `flags` follow the script's name."""
        calls = self._folder / "calls"
        calls.write_text("")
        ended = subprocess.run(
            [SCRIPT, *flags], capture_output=True, text=True, timeout=240,
            env={"PATH": f"{self._folder}:{PROGRAMS}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "PLAYED_CALLS": str(calls), **environment})
        return ended.returncode, calls.read_text().splitlines(), ended.stdout + ended.stderr


@pytest.fixture()
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


REQUEUED = ["requeue 17"]


@pytest.mark.parametrize("status", [3, 128 + signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGSEGV])
def test_what_may_go_better_the_next_time_is_queued_again(slurm: Slurm, status: int) -> None:
    assert slurm.run(PLAYED_STATUS=str(status))[:2] == (status, REQUEUED)


@pytest.mark.parametrize("status", [0, 1, 2, 127])
def test_the_end_and_what_stays_wrong_are_not(slurm: Slurm, status: int) -> None:
    assert slurm.run(PLAYED_STATUS=str(status))[:2] == (status, [])


def test_not_for_ever(slurm: Slurm) -> None:
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="99")[:2] == (3, REQUEUED)
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="100")[:2] == (3, [])
    assert slurm.run(PLAYED_STATUS="3", SLURM_RESTART_COUNT="2", LOSSD_RESTARTS="2")[:2] == (3, [])


def test_tasks_that_refuse_their_flags_end_the_job(slurm: Slurm, tmp_path: Path) -> None:
    status, calls, said = slurm.run(LOSSD_ACCESS=str(tmp_path / "nothing"), LOSSD_CHECKPOINTS=str(tmp_path))
    assert (status, calls) == (2, []), said
    assert str(tmp_path / "nothing") in said


def test_flags_that_follow_the_script_are_those_of_all_tasks(slurm: Slurm, tmp_path: Path) -> None:
    status, calls, said = slurm.run("--cpu_devices=0", LOSSD_CHECKPOINTS=str(tmp_path))
    assert (status, calls) == (2, []), said
    assert said.count("cpu_devices must be at least 1, got 0") >= 2
