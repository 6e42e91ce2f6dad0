# SPDX-License-Identifier: Apache-2.0
"""The examples in PyTorch, with small sizes, and the parts that they are made of."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

EXAMPLES = Path(__file__).parents[3] / "examples/gpt_torch"
BENCH = Path(__file__).parents[3] / "bench"
TEXT = Path(__file__).parents[3] / "docs/protocol.md"
SMALL = ["--vocab_size=400", "--hidden_size=16", "--layers=2", "--heads=2", "--context=16", f"--text={TEXT}"]


@pytest.fixture
def text_module(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import text
    return text


def run(script, *arguments):
    """The output of a script of the examples, or of the one at an absolute path."""
    done = subprocess.run([sys.executable, EXAMPLES / script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=400, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_tokenizer_spells_what_it_read(text_module):
    text = TEXT.read_text() + "unseen: \u00e4\u00f6\u00fc \U0001f600\n\n  \t x"
    learnt = text_module.Tokenizer.learn(TEXT.read_text(), 600)
    tokens = learnt.encode(text)
    assert learnt.vocab_size == 600 and tokens.max() < 600
    assert learnt.decode(tokens) == text
    assert len(tokens) < 0.6 * len(text.encode())


def test_tokenizer_merges_the_most_frequent_pair(text_module):
    learnt = text_module.Tokenizer.learn("ababab ababab abc", 258)
    assert learnt.merges == [(ord("a"), ord("b")), (256, 256)]
    assert learnt.encode("abababc").tolist() == [257, 256, ord("c")]


def test_local_and_remote_head_train_alike(server, tmp_path):
    output = run("train.py", f"--server={server.target}", "--steps=12", "--batch=4", "--lr=1e-2",
                 f"--folder={tmp_path}", "--device=cpu", *SMALL)
    rows = [list(map(float, line.split(","))) for line in (tmp_path / "curves.csv").read_text().splitlines()[1:]]
    assert len(rows) == 12 and rows[-1][1] < rows[0][1] - 0.3, output
    assert max(abs(local - remote) for _, local, remote in rows) < 1e-3, output


def test_gradients_are_passed_on(server, tmp_path):
    output = run("train.py", f"--server={server.target}", "--heads_to_run", "lossd", "--steps=2", "--batch=4",
                 "--gradients=filtered", "--filter_epsilon=0.5", f"--folder={tmp_path}", "--device=cpu", *SMALL)
    assert float(output.split("left out ")[1].split()[0]) > 0.9, output
    output = run("train.py", f"--server={server.target}", "--heads_to_run", "lossd", "--steps=2", "--batch=4",
                 "--gradients=sampled", "--sample_threshold=0.5", f"--folder={tmp_path}", "--device=cpu", *SMALL)
    assert float(output.split("error from sampling ")[1].split()[0]) > 0.01, output


def test_two_stages(server, tmp_path):
    pytest.importorskip("torch.distributed.pipelining", reason="this torch has no pipelining")
    output = run("pipeline.py", f"--server={server.target}", "--steps=3", "--batch=4", "--microbatches=2",
                 f"--folder={tmp_path}", *SMALL)
    apart = float(output.split("apart by ")[1].split()[0])
    assert apart < 1e-3 and output.count("peak memory") == 6


def test_policy_learns(server):
    assert "reward" in run("policy.py", f"--server={server.target}", "--rounds=40")


def test_convergence_compares_kinds_of_gradients(server, tmp_path):
    output = run(BENCH / "convergence.py", "--servers", server.target, "--kinds", "exact", "sampled, 2^-8", "--seeds=1",
                 "--jobs=1", "--steps=6", "--batch=4", f"--folder={tmp_path}", "--device=cpu",
                 f"--out={tmp_path / 'out.json'}", *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    exact, sampled = result["runs"]
    assert (exact["kind"], sampled["kind"]) == ("exact", "sampled, 2^-8"), output
    assert 0 < abs(exact["held_out"] - sampled["held_out"]) < 0.5  # the same start, other gradients
    assert len(exact["deciles"]) == len(result["text"]["deciles"]) == 10
    assert sampled["predicted_error"] > 0 == exact["predicted_error"]


def test_deciles_have_the_rarest_tokens_first(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import convergence
    tokens = [token for token in range(20) for _ in range(token + 1)]  # token 20 does not occur
    deciles = convergence.decile_of_token(tokens, 21)
    assert deciles.tolist() == [i // 2 for i in range(20)] + [-1]
