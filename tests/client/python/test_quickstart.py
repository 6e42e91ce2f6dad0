# SPDX-License-Identifier: Apache-2.0
"""`python -m lossd.quickstart` and its parts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lossd
from lossd import _native
from lossd.quickstart.__main__ import main
from lossd.quickstart.chart import draw
from lossd.quickstart.model import CONTEXT, Trunk
from lossd.quickstart.text import CLASSES, Text


def test_it_learns_and_leaves_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert main(["--steps=100", "--seconds=600"]) == 0
    told = capsys.readouterr().out
    assert "the model has learnt: yes" in told and "100 steps" in told
    assert list(tmp_path.iterdir()) == []


def test_too_few_steps_have_learnt_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--steps=2"]) == 1
    assert "the model has learnt: no" in capsys.readouterr().out


def test_no_library_of_the_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("LOSSD_LIBRARY", "/no/such")
    _native.library.cache_clear()
    assert main([]) == 2
    told = capsys.readouterr().err
    assert "LOSSD_LIBRARY is /no/such" in told and "pip install" not in told  # on an index the name is anyone's


@pytest.mark.parametrize(("arguments", "words"), [
    (["--seconds=-1"], "argument --seconds: must be a number above 0, got '-1'"),
    (["--seconds=nan"], "must be a number above 0, got 'nan'"),
    (["--steps=0"], "argument --steps: must be a whole number from 1 on, got '0'"),
    (["--steps=1.5"], "must be a whole number from 1 on, got '1.5'"),
    (["--seed=-1"], "argument --seed: must be a whole number from 0 on, got '-1'"),
])
def test_numbers_that_make_no_sense(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_a_plot_that_cannot_be_drawn_is_said_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([f"--plot={tmp_path}/curve.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_a_server_that_is_used_by_others_keeps_no_head_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with lossd.embedded(checkpoint_dir=tmp_path) as client:
        client.create_head("quickstart", hidden_size=8, vocab_size=8)  # as somebody left it
        assert main([f"--server={client.target}", "--steps=2"]) == 1
        assert [head.spec.name for head in client.list_heads()] == ["quickstart"]
    assert "the model has learnt: no" in capsys.readouterr().out


def test_no_server_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--server=127.0.0.1:1"]) == 2
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_interrupting_stops_the_server(tmp_path: Path) -> None:
    def heed_interrupts() -> None:  # which a shell has its background jobs ignore
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    trainer = subprocess.Popen([sys.executable, "-u", "-m", "lossd.quickstart", "--seconds=600"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                               env={**os.environ, "TMPDIR": str(tmp_path)}, preexec_fn=heed_interrupts)
    assert trainer.stdout is not None
    for line in trainer.stdout:
        if line.startswith("training on"):
            break
    trainer.send_signal(signal.SIGINT)
    assert trainer.wait(timeout=120) != 0
    assert list(tmp_path.iterdir()) == []


def test_chart() -> None:
    assert draw([]) == ""
    lines = draw([4.0, 3.0, 2.0, 1.0], width=80, height=3).splitlines()
    assert lines[0] == "loss [nats]"
    assert [line[:7] for line in lines[1:4]] == ["  4.000", "  2.500", "  1.000"]
    assert lines[1].endswith("|█   ") and lines[3].startswith("  1.000 |███")
    assert lines[4].strip() == "1 to 4 steps"
    assert all(len(line) <= 40 for line in draw([float(i % 7) for i in range(1000)], width=40).splitlines())
    assert draw([2.0, 2.0]).count("\n") == 13  # level


def test_text() -> None:
    text = Text.of("ab\tc\n\u00e4\u4e00")
    assert text.shown([int(code) for code in text.codes]) == repr("ab c\n ?")
    assert Text.of_the_standard_library().codes.max() < CLASSES
    contexts, targets = next(Text.of("abcdefgh" * 40).batches(3, 5, seed=1))
    assert contexts.shape == (5, 3) and targets.shape == (5,)
    following = (contexts[:, -1] - contexts[0, -1] + targets[0] - targets) % 8
    assert not following.any()  # each target follows its context


def test_gradients_of_the_trunk() -> None:
    """Against differences, in float64 (tolerance 1e-5 of the largest)."""
    random = np.random.default_rng(3)
    contexts = random.integers(0, CLASSES, size=(4, CONTEXT))
    direction = random.normal(size=(4, 8))
    trunk = Trunk(CLASSES, 8, seed=5)
    values = {name: value.astype(np.float64) for name, value in trunk._values.items()}
    trunk._values = {name: value.copy() for name, value in values.items()}
    taken: dict[str, np.ndarray] = {}
    trunk._update = lambda name, gradient: taken.__setitem__(name, gradient)  # type: ignore[method-assign]
    trunk.forward(contexts)
    trunk.backward(direction)
    for name, value in values.items():
        at = tuple(int(random.integers(0, size)) for size in value.shape)
        if name == "embedding":
            at = (int(contexts[1, 2]), at[1])
        difference = []
        for sign in (1.0, -1.0):
            trunk._values = {each: array.copy() for each, array in values.items()}
            trunk._values[name][at] += sign * 1e-5
            difference.append(float((trunk.forward(contexts) * direction).sum()))
        assert taken[name][at] == pytest.approx((difference[0] - difference[1]) / 2e-5, abs=1e-5 * abs(taken[name]).max())
