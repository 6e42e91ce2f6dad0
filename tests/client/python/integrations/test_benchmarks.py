# SPDX-License-Identifier: Apache-2.0
"""The benchmarks of several GPUs in bench/, on the CPU with small sizes: every part runs, and their results are right."""

import argparse
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import run_ranks
from servers import free_port

BENCH = Path(__file__).parents[4] / "bench"
LOSSCTL = Path(os.environ["LOSSD_BINARY"]).with_name("lossctl")
SMALL = ["--device=cpu", "--vocab_size=4096", "--hidden_size=32", "--heads=4", "--context=16", "--sequences=2",
         "--microbatches=6", "--warm_up=1", "--local_heads=torch,no-such-head", "--lr=5e-3"]
ON_STAGES = ("colocated", "embedded")  # the head is on the stages' own devices
ALL = {  # kind, head and gradients, replicas, stages, schedule
    ("local", "torch", 1, 3, "1F1B"), ("local replicas", "torch", 3, 1, "1F1B"),
    *((kind, f"lossd {gradients}", replicas, stages, schedule)
      for kind, replicas, stages in (*((kind, 1, 3) for kind in ON_STAGES), ("server", 1, 2), ("server replicas", 2, 1))
      for gradients in ("exact", "sampled") for schedule in ("1F1B", "overlapped 1F1B"))}
CONTROL = """#!/bin/sh
# Stands for nvidia-cuda-mps-control: writes down how it is called.
echo "$* $(basename "$CUDA_MPS_PIPE_DIRECTORY") $([ "$1" = -d ] || cat)" >> {calls}
[ -d "$CUDA_MPS_PIPE_DIRECTORY" ] && [ -d "$CUDA_MPS_LOG_DIRECTORY" ] && exit {status}
"""


@pytest.fixture
def layouts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import pipeline_layouts
    return pipeline_layouts


@pytest.fixture
def pipeline_bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import pipeline_bench
    return pipeline_bench


def run(script, *arguments, status=0, launcher=()):
    done = subprocess.run([sys.executable, *launcher, BENCH / script, *map(str, arguments)], capture_output=True, text=True,
                          timeout=400, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_pipelines_of_three_processes_learn_alike(tmp_path):
    output = run("pipeline_bench.py", f"--lossd={os.environ['LOSSD_BINARY']}", "--gpus=3", "--layers=4", "--steps=3",
                 f"--json={tmp_path / 'out.json'}", *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    entries = result["configurations"]
    assert {(entry["kind"], f"{entry['head']} {entry['gradients']}".strip(), entry["replicas"], len(entry["layers"]),
             entry["schedule"]) for entry in entries} == ALL
    assert len({tuple(entry["layers"]) for entry in entries if entry["kind"] == "local"}) in (2, 3)  # and its neighbours
    assert list(result["measured_seconds"]["without"]) == ["no-such-head"] and result["left_out"] == []
    assert {(each["kind"], each["gradients"]) for each in result["fastest"]} == {
        (entry["kind"], entry["gradients"]) for entry in entries}
    assert result["agreement"]["agree"] and result["card"] == "cpu" and result["versions"]["torch"], output
    for entry in entries:
        assert entry["gpus"] == 3 and sum(entry["layers"]) == 4
        assert entry["tokens_per_second"] == pytest.approx(6 * 2 * 16 / entry["step_seconds"])
        assert entry["tokens_per_second_and_gpu"] == pytest.approx(entry["tokens_per_second"] / 3)
        assert len(entry["all_step_seconds"]) == 3 and len(entry["losses"]) == 4
        assert entry["losses"][0] == pytest.approx(8.35, abs=0.1) and entry["losses"][-1] < entry["losses"][0] - 0.02
        server = entry["head"] == "lossd"
        assert [each["role"] for each in entry["memory"]] == (
            ["trainer"] * (2 if server and entry["kind"] not in ON_STAGES else 3) + ["server"] * server)
        assert all(each["peak_bytes"] > 0 for each in entry["memory"])
        assert entry["seconds_without_gaps"] > 0 and entry["plan"]["measured_over_predicted"] > 0
        apart = result["agreement"]["apart"][entry["name"]]
        assert max(apart.values()) <= 1e-4 if entry["exact"] else 0 < apart["losses"] < 0.1, output
    for entry in entries:
        if entry["head"] != "lossd":
            continue
        server = entry["server"]
        assert 0 < server["busy_share"] < 1.5 and server["microbatch_seconds"] > 0
        assert (server["cores"] is None) == (entry["kind"] == "embedded") and server["cores"] != 0
        assert server["latency_seconds"] >= 0.5 * server["microbatch_seconds"]
        assert set(server["slice_seconds"]) == {"receive", "queue", "compute", "send"}
        assert 0 < server["slice_seconds"]["compute"] < sum(server["slice_seconds"].values()) < 2 * server["latency_seconds"]
        (transport, calls), = server["transport"]["took"].items()  # of the last stage; 4 steps, in all replicas 6 microbatches
        assert transport == "shared_memory" == server["transport"]["host"][0] and calls in (24, 12), server
    for entry in entries:
        if entry["kind"] in ON_STAGES:
            whole = result["measured_seconds"]["server"][entry["gradients"]]
            layers = 4 * result["measured_seconds"]["layer"]
            evenly = 6 * (layers + whole) / 3 + 2 * layers / 3
            assert entry["evenly_divided_seconds"] == pytest.approx(evenly) and len(entry["shares"]) == 3
            assert entry["over_evenly_divided"] == pytest.approx(entry["step_seconds"] / evenly)
            devices = entry["server"]["devices"]
            assert len(devices) == 3 and sum(each["classes"] for each in devices) == 4096
            assert all(0 < each["busy_share"] < 1.5 and each["exchange_share"] <= each["busy_share"] for each in devices)
            assert entry["name"] in output and not entry["mps"] and entry["slack"] == 1


def test_a_tied_model_whose_first_stage_has_rows_of_the_server_or_a_copy(tmp_path):
    output = run("pipeline_bench.py", f"--lossd={os.environ['LOSSD_BINARY']}", "--gpus=2", "--layers=2", "--steps=3",
                 "--kinds=colocated,embedded,local", "--gradients=exact", "--schedules=overlapped 1F1B", "--embeddings=own,rows,exchange",
                 f"--json={tmp_path / 'out.json'}", *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["agreement"]["agree"], output
    for kind in ON_STAGES:
        entries = {entry["embedding"]: entry for entry in result["configurations"] if entry["kind"] == kind}
        assert set(entries) == {"own", "rows", "exchange"}
        for entry in entries.values():
            assert max(result["agreement"]["apart"][entry["name"]].values()) <= 1e-4, output
        rows, exchange, own = (entries[name]["losses"] for name in ("rows", "exchange", "own"))
        assert rows == pytest.approx(exchange, abs=1e-5) and rows[-1] < rows[0]
        assert abs(rows[-1] - own[-1]) > 1e-4  # another model learns otherwise
    assert {each["embedding"] for each in result["fastest"]} == set(entries)
    local = {entry["embedding"]: entry["losses"] for entry in result["configurations"] if entry["kind"] == "local"}
    assert set(local) == {"own", "exchange"}
    assert local["exchange"] == pytest.approx(rows, abs=1e-4) and local["own"] == pytest.approx(own, abs=1e-4)


KNOWN = ["--gpus=2", "--layers=2", "--splits=1-1", "--kinds=local,colocated", "--schedules=overlapped 1F1B"]


def losses_in_one_process(pipeline_bench, arguments, tokens):
    """Of a known, tied model in plain torch: one stage, one matrix for embedding and head, one optimizer."""
    arguments = pipeline_bench.parse_arguments(arguments)
    ranks = sys.modules["pipeline_ranks"]
    shape, model = pipeline_bench.shape_of(arguments), pipeline_bench.MODELS[arguments.model]
    stage = ranks.make_stage(shape, (shape.layers,), 0, arguments.seed, torch.device("cpu"), model)
    weight = torch.nn.Parameter(ranks.make_head_weight(shape, arguments.seed, torch.device("cpu")))
    stage.parts[0].token.weight = weight
    optimizer = torch.optim.AdamW(stage.parameters(), lr=arguments.lr, weight_decay=0.01)
    losses = []
    for step in range(arguments.warm_up + arguments.steps):
        optimizer.param_groups[0]["lr"] = arguments.lr * min(1.0, (step + 1) / arguments.lr_warm_up)
        batch = torch.from_numpy(sys.modules["pipeline_text"].draw(
            tokens, arguments.sequences * arguments.microbatches, shape.context, arguments.seed, step))
        loss = torch.nn.functional.cross_entropy((stage(batch[:, :-1]) @ weight.T).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_known_model_learns_text_with_one_matrix_at_both_ends(pipeline_bench, tmp_path, monkeypatch):
    arguments = ["--model=llama-3.2-1b", f"--lossd={os.environ['LOSSD_BINARY']}", "--steps=8", "--lr_warm_up=2",
                 f"--text={BENCH}/*.py,{BENCH}/no*such", f"--text_folder={tmp_path / 'text'}", "--text_bytes=150000", *KNOWN, *SMALL]
    output = run("pipeline_bench.py", *arguments, "--embeddings=rows,exchange", f"--json={tmp_path / 'out.json'}")
    result = json.loads((tmp_path / "out.json").read_text())
    entries = {(entry["kind"], entry["gradients"], entry["embedding"]): entry for entry in result["configurations"]}
    assert set(entries) == {("local", "", "exchange"), *(("colocated", gradients, embedding) for gradients in ("exact", "sampled")
                                                         for embedding in ("rows", "exchange"))}
    tokens, = (tmp_path / "text").glob("*.npy")
    expected = losses_in_one_process(pipeline_bench, ["--device=cpu", *arguments], str(tokens))
    assert len(expected) == 9 and expected[-1] < expected[0] - 0.2  # of whatever text: its order follows from where the tree lies
    for (_, gradients, _), entry in entries.items():
        assert entry["losses"] == pytest.approx(expected, abs=0.1 if gradients == "sampled" else 1e-4), output
        assert entry["losses"] != entries["local", "", "exchange"]["losses"] or not gradients
    assert result["agreement"]["agree"] and result["settings"]["model"] == "llama-3.2-1b", output
    assert "text" not in result["settings"] and 257 < result["text"]["vocabulary"] <= 4096
    assert 0 < result["text"]["bytes"] <= 150000 and result["text"]["tokens"] == len(np.load(tokens)) > 30000

    monkeypatch.syspath_prepend(str(BENCH))
    import figures
    with mock.patch.object(figures.plots, "pyplot") as pyplot:  # without matplotlib
        panels = [[mock.MagicMock(), mock.MagicMock()], [mock.MagicMock(), mock.MagicMock()]]
        pyplot.return_value.subplots.return_value = (mock.MagicMock(), panels)
        figures.draw_real_model(tmp_path / "out.json")
    (loss, speed), (apart, memory) = panels
    assert [call.kwargs["label"] for call in loss.plot.call_args_list] == [
        "head on the last stage", "lossd exact", "lossd sampled"]
    assert loss.plot.call_args_list[0].args[0] == entries["local", "", "exchange"]["losses"]
    assert max(map(abs, apart.plot.call_args_list[1].args[0])) < 2e-4 and speed.barh.call_count == 3
    assert sum(call.args[1] > 0 for call in memory.bar.call_args_list) == 3 * 2  # two GPUs each


def test_a_known_model_that_is_not_tied(tmp_path):
    output = run("pipeline_bench.py", f"--lossd={os.environ['LOSSD_BINARY']}", "--model=llama-3.1-8b", "--steps=2",
                 "--gradients=exact", f"--json={tmp_path / 'out.json'}", *KNOWN, *SMALL)
    result = json.loads((tmp_path / "out.json").read_text())
    assert [(entry["kind"], entry["embedding"]) for entry in result["configurations"]] == [("local", "own"), ("colocated", "own")]
    assert result["agreement"]["agree"] and result["text"] is None, output


def test_known_models_are_those_of_transformers(pipeline_bench, seed):
    from transformers.models.llama.modeling_llama import LlamaModel
    ranks, models = sys.modules["pipeline_ranks"], pipeline_bench.MODELS
    for name, parameters in (("llama-3.2-1b", 1235814400), ("llama-3.2-3b", 3212749824), ("llama-3.1-8b", 8030261248)):
        model = models[name]
        with torch.device("meta"):
            parts = model.parts(model.vocab_size, model.hidden_size, model.heads)
            embedding, layer, norm = (sum(each.numel() for each in make().parameters())
                                      for make in (parts.embedding, parts.layer, parts.norm))
        assert (1 if model.tied else 2) * embedding + model.layers * layer + norm == parameters
    # Positions as Llama 3 has them: long waves are stretched by a factor, short ones are not, and between there is a transition.
    model = models["llama-3.2-1b"]
    config = model.config(model.vocab_size, model.hidden_size, model.heads)
    expected = []
    for place in range(32):
        frequency = 500000.0 ** (-place / 32)
        turns = 8192 * frequency / (2 * math.pi)
        kept = min(1.0, max(0.0, (turns - 1.0) / (4.0 - 1.0)))
        expected.append(kept * frequency + (1.0 - kept) * frequency / 32.0)
    rotary = sys.modules["pipeline_models"].Rotary(config)
    assert rotary.embedding.inv_freq.tolist() == pytest.approx(expected, rel=1e-5)
    # A stage is the model of transformers, wherever stages begin.
    shape = ranks.Shape(300, 64, 3, 8, 20)
    config = model.config(300, 64, 8)
    config.num_hidden_layers = 3
    whole, stage = LlamaModel(config), ranks.make_stage(shape, (3,), 0, seed, torch.device("cpu"), model)
    whole.embed_tokens.load_state_dict(stage.parts[0].token.state_dict())
    whole.norm.load_state_dict(stage.parts[-1].state_dict())
    for theirs, ours in zip(whole.layers, stage.parts[1:-1], strict=True):
        theirs.load_state_dict(ours.layer.state_dict())
    tokens = torch.randint(0, 300, (2, 20))
    found = stage(tokens)
    torch.testing.assert_close(found, whole(tokens).last_hidden_state)
    torch.manual_seed(0)
    first, last = (ranks.make_stage(shape, (1, 2), index, seed, torch.device("cpu"), model) for index in (0, 1))
    assert torch.equal(last(first(tokens)), found)


def test_tokens_of_text(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import pipeline_text
    for name, text in (("a.txt", "to be or not to be, that is the question " * 20), ("b.txt", "to be or not to be " * 20),
                       ("again.txt", "to be or not to be " * 20), ("empty.txt", ""), ("large.txt", "x" * 5000)):
        (tmp_path / name).write_text(text)
    folder = tmp_path / "tokens"
    path, found = pipeline_text.tokenize([f"{tmp_path}/*.txt", f"{tmp_path}/a.*"], 4000, 300, folder)
    tokens = np.load(path)
    assert tokens.dtype == np.uint32 and tokens.max() < 300 and found == {
        "files": 2, "bytes": 820 + 380, "tokens": len(tokens), "vocabulary": found["vocabulary"]}
    assert 257 < found["vocabulary"] <= 300 and len(tokens) < 1200 / 2 and (tokens == 0).sum() == 2  # the end of each
    with monkeypatch.context() as once:
        once.setattr(pipeline_text, "learn_and_encode", None)
        assert pipeline_text.tokenize([f"{tmp_path}/*.txt"], 4000, 300, folder) == (path, found)
    (tmp_path / "b.txt").write_text("another text")
    assert pipeline_text.tokenize([f"{tmp_path}/*.txt"], 4000, 300, folder)[0] != path
    assert sorted(each.suffix for each in folder.iterdir()) == [".json", ".json", ".npy", ".npy"]
    for patterns, vocabulary, message in (([f"{tmp_path}/no*"], 300, "no file of at most 4000 bytes matches"),
                                          ([f"{tmp_path}/*.txt"], 256, "vocab_size is 256")):
        with pytest.raises(ValueError, match=message):
            pipeline_text.tokenize(patterns, 4000, vocabulary, folder)

    np.save(tmp_path / "numbers.npy", np.arange(1000, dtype=np.uint32))
    numbers = str(tmp_path / "numbers.npy")
    batches = [pipeline_text.draw(numbers, 64, 9, 1, step) for step in range(400)]
    assert all(each.shape == (64, 10) and (np.diff(each) == 1).all() for each in batches)
    assert min(each.min() for each in batches) == 0 and max(each.max() for each in batches) == 979  # 2 % are kept apart
    assert np.array_equal(batches[3], pipeline_text.draw(numbers, 64, 9, 1, 3)) and not np.array_equal(*batches[:2])
    assert not np.array_equal(batches[0], pipeline_text.draw(numbers, 64, 9, 2, 0))
    with pytest.raises(ValueError, match="the text has 980 tokens; a sequence needs 981"):
        pipeline_text.draw(numbers, 1, 980, 1, 0)


def mps_control(folder, status=0):
    program = folder / "control"
    program.write_text(CONTROL.format(calls=folder / "calls", status=status))
    program.chmod(0o755)
    return program


def test_a_colocated_head_with_given_parts(tmp_path):
    options = ["pipeline_bench.py", f"--lossd={os.environ['LOSSD_BINARY']}", "--gpus=2", "--layers=2", "--steps=1",
               "--kinds=colocated", "--gradients=exact", "--schedules=overlapped 1F1B", *SMALL]
    run(*options, "--shares=even", f"--json={tmp_path / 'first.json'}", f"--mps_control={tmp_path / 'none'}")
    output = run(*options, "--shares=3-1,balanced", "--slack=2", "--mps=on", f"--mps_control={mps_control(tmp_path)}",
                 f"--parts={tmp_path / 'first.json'}", "--colocated_splits=2-0", f"--json={tmp_path / 'second.json'}",
                 "--server_flags=--workspace_bytes=4MiB --log_level=warning")
    even, given = (json.loads((tmp_path / name).read_text()) for name in ("first.json", "second.json"))
    assert given["measured_seconds"] == even["measured_seconds"]
    assert [(each["layers"], each["shares"], each["slack"], each["mps"]) for each in even["configurations"]] == [
        ([1, 1], [], 1, False)]
    three, balanced = given["configurations"]
    assert (three["layers"], three["shares"], three["slack"], three["mps"]) == ([2, 0], [3, 1], 2, True)
    assert three["losses"] == pytest.approx(even["configurations"][0]["losses"], abs=1e-4)
    assert balanced["shares"][0] < balanced["shares"][1] and "slack 2, shares 3-1, MPS" in output
    calls = (tmp_path / "calls").read_text().splitlines()  # for each of the two: MPS begins, and it ends
    assert calls == ["-d pipe ", " pipe quit -t 5"] * 2
    other = [*options, f"--parts={tmp_path / 'first.json'}", "--gradients=sampled"]
    for arguments, message in ((other, "no time of a head with sampled gradients"),
                               ([*other, "--hidden_size=16"], "hidden_size 32")):
        done = subprocess.run([sys.executable, BENCH / arguments[0], *arguments[1:]], capture_output=True, text=True,
                              check=False)
        assert done.returncode == 1 and message in done.stderr


def test_a_host_without_mps(tmp_path):
    output = run("pipeline_bench.py", f"--lossd={os.environ['LOSSD_BINARY']}", "--gpus=2", "--layers=2", "--steps=1",
                 "--kinds=colocated", "--gradients=exact", "--schedules=1F1B", "--mps=on", f"--mps_control={tmp_path / 'none'}",
                 f"--json={tmp_path / 'out.json'}", *SMALL, status=1)
    result = json.loads((tmp_path / "out.json").read_text())
    assert "the head is measured without MPS: MPS did not start" in output and result["measured_seconds"]["server"]["exact"] > 0
    assert "MPS did not start" in result["configurations"][0]["error"]


def test_mps_that_does_not_start(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import pipeline_server
    with pytest.raises(RuntimeError, match="MPS did not start: .*none"), pipeline_server.Mps(str(tmp_path / "none")):
        pass
    with pytest.raises(RuntimeError, match="MPS did not start: .*exit status 3"):
        pipeline_server.Mps(str(mps_control(tmp_path, 3))).__enter__()
    with pipeline_server.Mps(str(mps_control(tmp_path))) as mps:
        trainer = pipeline_server.of_trainer(mps.environment, 1)
        assert trainer["CUDA_MPS_CLIENT_PRIORITY"] == "1" and trainer.items() > mps.environment.items()
        assert pipeline_server.of_trainer({}, 1) == {}  # without MPS
        folder = Path(mps.environment["CUDA_MPS_PIPE_DIRECTORY"])
    assert not folder.exists()


def test_what_metrics_say(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import pipeline_server
    assert pipeline_server.parse_metrics(
        "# HELP lossd_rows_total rows\nlossd_rows_total{head=\"a\"} 3\nlossd_rows_total{head=\"b\"} 4\n"
        "lossd_phase_seconds_bucket{phase=\"queue\",le=\"1\"} 9\nlossd_phase_seconds_sum{phase=\"queue\"} 1.5\n"
        "lossd_phase_seconds_count{phase=\"queue\"} 9\nlossd_other_total 3\n") == {
            "lossd_rows_total": 7.0, "sum of queue": 1.5, "count of queue": 9.0}


def test_a_configuration_that_fails_is_told(tmp_path):
    output = run("pipeline_bench.py", "--lossd=/bin/false", "--gpus=2", "--layers=2", "--steps=1", "--kinds=server",
                 "--gradients=exact", "--schedules=1F1B", f"--json={tmp_path / 'out.json'}", *SMALL, status=1)
    failed, = json.loads((tmp_path / "out.json").read_text())["configurations"]
    assert "/bin/false did not come up" in failed["error"] and "step_seconds" not in failed, output


def test_what_configurations_say_together(pipeline_bench):
    def entry(kind, head, gradients, speed):
        return {"name": f"{kind} {speed}", "kind": kind, "head": head, "gradients": gradients, "step_seconds": 1.0,
                "tokens_per_second_and_gpu": speed}
    entries = [{"name": "failed", "kind": "local", "head": "torch", "gradients": ""}, entry("local", "torch", "", 80.0),
               entry("local", "liger", "", 100.0), entry("local replicas", "liger", "", 50.0),
               entry("server", "lossd", "exact", 90.0), entry("server", "lossd", "exact", 110.0),
               entry("server", "lossd", "sampled", 120.0)]
    found = {(each["kind"], each["gradients"]): (each["name"], each["over_local"]) for each in pipeline_bench.fastest(entries)}
    assert found == {("local", ""): ("local 100.0", 1.0), ("local replicas", ""): ("local replicas 50.0", 0.5),
                     ("server", "exact"): ("server 110.0", 1.1), ("server", "sampled"): ("server 120.0", 1.2)}
    assert pipeline_bench.fastest(entries[-1:])[0]["over_local"] is None and pipeline_bench.fastest([]) == []
    with_mps = [{**entries[-1], "mps": True, "tokens_per_second_and_gpu": 150.0}, entries[-1]]
    assert [(each["mps"], each["tokens_per_second_and_gpu"]) for each in pipeline_bench.fastest(with_mps)] == [
        (True, 150.0), (False, 120.0)]
    assert pipeline_bench.table([]) == [] == pipeline_bench.table([{"name": "failed"}])
    rows = pipeline_bench.table([
        {"name": "a", "head": "torch", "step_seconds": 2.0, "tokens_per_second": 100.0},
        {"name": "b", "head": "lossd", "step_seconds": 1.6, "tokens_per_second": 125.0, "over_evenly_divided": 1.1,
         "plan": {"measured_over_predicted": 1.02}, "server": {"cores": 0.5, "latency_seconds": 0.021}}, {"name": "failed", "head": "lossd"}])
    assert rows[1].split() == ["2000.0", "1.000", "a"] and rows[2].split() == [
        "1600.0", "1.250", "1.100", "1.020", "0.50", "21.0", "b"]
    assert len(rows) == 3 and pipeline_bench.table([{"name": "b", "head": "lossd", "step_seconds": 1.6,
                                                     "tokens_per_second": 1.0}])[1].split() == ["1600.0", "b"]
    memory = [{"role": "trainer", "replica": replica, "stage": stage, "peak_bytes": peak}
              for replica, peaks in enumerate(((9, 4, 6, 10), (9, 5, 5, 5))) for stage, peak in enumerate(peaks)]
    memory.append({"role": "server", "peak_bytes": 1000})
    assert pipeline_bench.last_over_middle({"layers": [1] * 4, "replicas": 2, "memory": memory}) == 2.0
    assert pipeline_bench.last_over_middle({"layers": [1, 1], "replicas": 1, "memory": []}) is None


def sleep(_rank, _rendezvous):
    time.sleep(600)


def fail(rank, _rendezvous):
    if rank == 1:
        raise ValueError("of rank 1")
    time.sleep(600)


def test_processes_that_fail_or_hang_are_ended(pipeline_bench):
    context = multiprocessing.get_context("fork")
    begin, limit = time.monotonic(), 300.0
    assert "of rank 1" in pipeline_bench.run_processes(context, 3, limit, fail)[0]["error"]
    assert time.monotonic() - begin < limit  # the others sleep for longer
    assert "no answer within 0 s" in pipeline_bench.run_processes(context, 2, 0.3, sleep)[0]["error"]
    assert multiprocessing.active_children() == []


def test_bad_arguments_of_the_pipelines(pipeline_bench, capsys):
    for arguments, message in ((["--layers=0"], "layers is 0"), (["--kinds=all"], "kinds has 'all'"),
                               (["--splits=2-2"], "'2-2' of 4 layers"), (["--splits=6-6"], "must have 4 stages"),
                               (["--layers=2", "--gpus=4"], "layers is 2"), (["--splits=a"], "a split is like"),
                               (["--layers=3", "--gpus=4"], "--colocated_splits, or other --kinds"),
                               (["--mps=yes"], "mps has 'yes'"), (["--slack=1,0"], "slack is '1,0'"),
                               (["--slack="], "slack is ''"), (["--shares=3-1"], "'3-1' of 2 numbers; it must have 4"),
                               (["--shares=all"], "shares has 'all'"), (["--shares=0-0-0-0"], "must be positive"),
                               (["--shares=2--1-1-1"], "shares has '2--1-1-1'"), (["--most_splits=0"], "most_splits is 0"),
                               (["--colocated_splits=6-6"], "must have 4 stages"),
                               (["--model=llama-3.2-1b", "--shape=gemma2-2b"], "there can be one of them"),
                               (["--model=llama-3.2-1b", "--heads=6"], "heads is 6"),
                               (["--model=llama-3.2-1b", "--hidden_size=100"], "hidden_size is 100"),
                               (["--lr_warm_up=-1"], "lr_warm_up is -1"), (["--compared_steps=0"], "compared_steps is 0"),
                               (["--text_bytes=0"], "text_bytes is 0")):
        with pytest.raises(SystemExit):
            pipeline_bench.parse_arguments(["--device=cpu", *arguments])
        assert message in capsys.readouterr().err


def test_splits_of_layers(layouts):
    assert layouts.even_split(8, 3) == (2, 3, 3) and layouts.even_split(20, 4) == (5, 5, 5, 5)
    # A head as slow as six layers is as good alone as beside one layer; of 26 layers it takes two.
    assert layouts.local_splits(20, 4, 0.008, 0.048, 1) == [(6, 7, 7, 0), (6, 7, 6, 1)]
    assert layouts.local_splits(26, 4, 0.008, 0.048, 1) == [(8, 8, 8, 2), (8, 9, 8, 1), (7, 8, 8, 3)]
    assert layouts.local_splits(12, 4, 0.008, 0.048, 0) == [(4, 4, 4, 0)]
    assert layouts.local_splits(5, 1, 0.008, 0.048, 2) == [(5,)]
    assert layouts.replica_counts(3) == [3] and layouts.replica_counts(4) == [2, 4] and layouts.replica_counts(1) == []
    local = layouts.Configuration("local", "torch", (6, 7, 6, 1))
    assert layouts.seconds_without_gaps(local, 24, 0.008, 0.048, 0.0) == pytest.approx(20 * 0.008 + 0.048 + 23 * 0.056)
    shared = layouts.Configuration("server replicas", "lossd", (4,), 3, gradients="exact")
    assert layouts.seconds_without_gaps(shared, 24, 0.008, 1.0, 0.010) == pytest.approx(8 * 0.032)
    assert layouts.seconds_without_gaps(shared, 24, 0.008, 1.0, 0.020) == pytest.approx(0.032 + 7 * 0.060)


def test_embeddings_of_heads_on_servers_and_local_ones(layouts):
    local = layouts.Configuration("local", "torch", (2, 2))
    served = layouts.Configuration("colocated", "lossd", (2, 2), gradients="exact")
    def found(configuration, *embeddings):
        return [each.embedding for each in layouts.with_embeddings(configuration, embeddings)]
    assert found(served, "own", "rows", "exchange") == ["own", "rows", "exchange"]
    assert found(local, "own", "rows", "exchange") == ["own", "exchange"] and found(local, "rows") == ["exchange"]
    for alone in (layouts.Configuration("local", "torch", (4,)), layouts.Configuration("local replicas", "torch", (2, 2), 2)):
        assert found(alone, "own", "rows", "exchange") == ["own"] and found(alone, "exchange") == []


def test_colocated_configurations(layouts):
    wanted = layouts.Wanted(4, 26, ["local", "colocated", "local replicas"], ["exact", "sampled"], ["overlapped 1F1B"],
                            most_splits=2, fastest_local=True, shares=["balanced", "even", "3-2-2-3"], mps=[True, False],
                            slacks=[1, 2])
    found = layouts.configurations(wanted, 0.00698, {"torch.compile": 0.049, "liger": 0.06},
                                   {"exact": 0.0455, "sampled": 0.0178})
    assert all(each.gpus == 4 and sum(each.layers) == 26 for each in found) and len({each.name for each in found}) == len(found)
    assert [each.layers for each in found if each.kind == "local"] == [(8, 8, 8, 2), (8, 9, 8, 1)]  # as measured
    assert found[0].kind == "local" and found[-1].layers == (8, 9, 8, 1)  # after all others
    assert {each.head for each in found if not each.on_server} == {"torch.compile"}
    colocated = [each for each in found if each.kind == "colocated"]
    assert len(colocated) == 3 * 2 * 2 * 2 and [each.mps for each in colocated] == [True] * 12 + [False] * 12
    first, even, given = colocated[0], colocated[1], colocated[2]
    assert sorted(first.layers) == [6, 6, 7, 7] and even.layers == layouts.even_split(26, 4) and even.shares == ()
    assert given.shares == (3, 2, 2, 3) and given.layers == first.layers and "shares even, MPS" in even.name
    # All GPUs end together: the step is that of evenly divided work.
    evenly = layouts.evenly_divided_seconds(4, 24, 26 * 0.00698, 0.0455)
    assert evenly == pytest.approx(1.498, abs=1e-3)
    assert layouts.seconds_without_gaps(first, 24, 0.00698, 1.0, 0.0455) == pytest.approx(evenly, rel=0.01)
    assert layouts.seconds_without_gaps(even, 24, 0.00698, 1.0, 0.0455) == pytest.approx(
        26 * 0.00698 + 0.0455 / 4 + 23 * (7 * 0.00698 + 0.0455 / 4))


def test_the_plan_of_a_head_that_was_measured(layouts, pipeline_bench):
    settings = pipeline_bench.Settings(pipeline_bench.Shape(256000, 2304, 20, 18, 2048), "cuda", 4, 24, 1, 1, 1e-4, 1, None, 1)
    parts = {"layer": 0.008, "heads": {"liger": 0.048}, "server": {"exact": 0.045, "sampled": 0.018}}
    steps = {}
    for configuration, head in ((layouts.Configuration("local", "liger", (6, 7, 6, 1)), 0.0),
                                (layouts.Configuration("server", "lossd", (6, 7, 7), gradients="exact"), 0.0),
                                (layouts.Configuration("server replicas", "lossd", (20,), 3, gradients="sampled"), 0.0),
                                *((layouts.Configuration("colocated", "lossd", (5, 5, 5, 5), gradients="exact", mps=mps), 0.045)
                                  for mps in (True, False))):
        planned = pipeline_bench.plan(configuration, settings, parts, str(LOSSCTL))
        assert configuration.gpus == 4 and planned["card"] == "NVIDIA H200", planned
        assert len(planned["layers"]) == configuration.stages and sum(planned["layers"]) == 20
        expected = layouts.seconds_without_gaps(configuration, 24, 0.008, 0.048, head)
        assert planned["least_step_seconds"] == pytest.approx(expected, rel=0.1)
        assert planned["step_seconds"] > planned["least_step_seconds"]
        assert ("shares" in planned) is configuration.colocated
        steps[configuration.name] = planned["step_seconds"]
    with_mps, without = (steps[name] for name in steps if "colocated" in name)
    assert with_mps < without
    assert "No such file" in pipeline_bench.plan(configuration, settings, parts, "/no/lossctl")["reason"]


def test_losses_and_norms_that_disagree_are_found(pipeline_bench):
    def entry(name, exact, *losses, head=2.0):
        return {"name": name, "exact": exact, "losses": losses, "gradient_norms": {"layers": 4.0, "head": head}}
    entries = [{"name": "failed", "exact": True}, entry("a", True, 5.0, 4.0), entry("b", False, 5.0, 3.0)]
    assert pipeline_bench.compare(entries, 0.01) == {
        "tolerance": 0.01, "reference": "a", "apart": {"a": {"losses": 0.0, "layers": 0.0, "head": 0.0},
                                                       "b": {"losses": 1.0, "layers": 0.0, "head": 0.0}}, "agree": True}
    for other in (entry("c", True, 5.0, 3.98), entry("c", True, 5.0, float("nan")), entry("c", True, 5.0, 4.0, head=2.04)):
        assert not pipeline_bench.compare([*entries, other], 0.01)["agree"]
    assert pipeline_bench.compare([*entries, entry("c", True, 5.005, 3.98)], 0.01, 1)["agree"]
    assert not pipeline_bench.compare([*entries, entry("c", True, 5.02, 4.0)], 0.01, 1)["agree"]


def measure_divided_classes(rank, seed):
    """Of 50 rows and 120 classes on two ranks: the data of this rank, and what was measured of some methods."""
    sys.path.insert(0, str(BENCH))
    import peers
    import vocabulary_parallel_peers
    import vocabulary_parallel_peers as program
    peers.DEVICE = "cpu"
    torch.manual_seed(seed)
    loss_parallel = vocabulary_parallel_peers.torch_loss_parallel("cpu")

    def needs_memory(hidden, weight, targets, factor):
        if len(targets) > 16:
            raise torch.OutOfMemoryError("no memory")
        return loss_parallel(hidden, weight, targets, factor)

    def without_sum(hidden, weight, targets, factor):  # each rank's own part of dx
        total = torch.distributed.all_reduce
        torch.distributed.all_reduce = lambda *_, **__: argparse.Namespace(wait=lambda: None)
        try:
            return loss_parallel(hidden, weight, targets, factor)
        finally:
            torch.distributed.all_reduce = total

    def fails(*_):
        raise ValueError("bad shape")

    data = program.distribute("flat", (50, 24, 120), torch.device("cpu"))
    reference = program.Reference(data)
    options = argparse.Namespace(warm_up=1, iterations=2)
    measured = {method.__name__: program.measure(method, data, reference, options)
                for method in (loss_parallel, needs_memory, without_sum, fails)}
    work = program.Work(loss_parallel, data, 3)
    return data, work(), work.hidden_gradient(), work.weight.grad, reference.lse, measured


def test_a_loss_with_divided_classes(seed):
    (first, loss, of_hidden, of_first, lse, measured), (second, *_, of_second, _, _) = run_ranks(
        2, measure_divided_classes, seed)
    hidden, targets = first[0].double().requires_grad_(), first[2]
    weight = torch.cat([first[1], second[1]]).double().requires_grad_()
    assert weight.shape == (120, 24) and torch.equal(first[0], second[0]) and torch.equal(targets, second[2])
    logits = hidden @ weight.T
    expected = torch.nn.functional.cross_entropy(logits, targets)
    expected.backward()
    torch.testing.assert_close(lse, logits.logsumexp(1).detach())
    for got, wanted in ((loss, expected.detach()), (of_hidden, hidden.grad), (torch.cat([of_first, of_second]), weight.grad)):
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-8)
    assert max(measured["run"]["errors"].values()) < 1e-6 and measured["run"]["parts"] == 1, measured
    assert max(measured["needs_memory"]["errors"].values()) < 1e-6 and measured["needs_memory"]["parts"] == 4, measured
    assert measured["without_sum"]["errors"]["hidden_gradient"] > 0.1, measured
    assert measured["fails"] == {"failed": "bad shape"}


def test_peers_with_divided_classes(tmp_path):
    output = run("vocabulary_parallel_peers.py", "--device=cpu", "--data=flat", "--shapes=96x32x400,40x16x1000", "--warm_up=1",
                 "--iterations=3", "--methods=torch,megatron,cce", f"--out={tmp_path / 'out.json'}",
                 launcher=("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1",
                           f"--master_port={free_port()}"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["gpus"] == 2 and set(result["without"]) == {"liger", "cce"} and result["versions"]["megatron-core"], output
    assert [entry["shape"]["vocab"] for entry in result["results"]] == [400, 1000]
    for entry in result["results"]:
        assert entry["loss"] > 5 and set(entry["methods"]) == {"torch", "megatron"}
        for method in entry["methods"].values():
            assert max(method["errors"].values()) < 1e-6, output  # float32
            assert 0 < method["min_ms"] <= method["median_ms"] <= method["max_ms"] and method["parts"] == 1
            assert 0 < method["communication_ms"]["least"] <= method["communication_ms"]["most"]


def test_bad_arguments_of_the_peers(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCH))
    import vocabulary_parallel_peers
    for ranks, arguments, message in ((2, ["--shapes=8x8x9"], "'8x8x9' with 9 classes, which do not divide among 2 ranks"),
                                      (2, ["--shapes=gemma"], "shapes has 'gemma'"), (2, ["--shapes=8x0x8"], "'8x0x8'"),
                                      (2, ["--iterations=0"], "iterations is 0"), (0, [], "start this with torchrun")):
        if ranks:
            monkeypatch.setenv("RANK", "0")
        else:
            monkeypatch.delenv("RANK")
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        with pytest.raises(SystemExit):
            vocabulary_parallel_peers.parse_arguments(arguments)
        assert message in capsys.readouterr().err
