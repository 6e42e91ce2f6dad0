# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of the pages as plan.py says, and the Python of README.md, docs/python.md, docs/python-client.md and docs/protocol.md as it stands.

LOSSD_BINARY: the server; lossctl is beside it. LOSSD_BUILD: the build folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from plan import (  # noqa: E402
    PLAN, ROOT, Command, Known, Run, RunBy, Serve, Step, all_commands, commands_of, how, pages, shape, without_comment)
from servers import ServerProcess  # noqa: E402

COMMANDS = all_commands()
PROGRAMS = Path(os.environ["LOSSD_BINARY"]).resolve().parent


def planned(kind: type) -> list[Command]:
    return [command for command in COMMANDS if isinstance(how(*command.key), kind)]


def where(command: Command) -> str:
    return f"{command.page}:{command.line}"


def test_every_command_has_a_plan() -> None:
    unknown = [f"{where(command)}: {command.text}" for command in COMMANDS if how(*command.key) is None]
    assert not unknown, "commands that nothing runs; tests/docs/plan.py says how each is tested:\n" + "\n".join(unknown)


def test_every_plan_has_a_command() -> None:
    for page, text, plan in PLAN:
        assert any(how(*command.key) is plan and re.fullmatch(page, command.page) and re.fullmatch(text, command.key[1])
                   for command in COMMANDS), f"no page has {text} of {page}"


def test_the_tests_and_steps_exist() -> None:
    listed = subprocess.run(["ctest", "-N", "--test-dir", os.environ["LOSSD_BUILD"]], capture_output=True, text=True, check=True).stdout
    tests = set(re.findall(r"Test +#\d+: (\S+)", listed))
    steps = set(re.findall(r"^(\w+)_step\(\)", (ROOT / ".ci/run").read_text(), re.M))
    for command in COMMANDS:
        plan = how(*command.key)
        if isinstance(plan, RunBy):
            assert plan.name in tests, f"{where(command)}: no test {plan.name}"
        if isinstance(plan, Step):
            assert plan.name in steps, f"{where(command)}: no step {plan.name}"


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.text.startswith("make ")], ids=where)
def test_make_knows_the_target(command: Command) -> None:
    done = subprocess.run(["bash", "-c", without_comment(command.text).replace("make ", "make --dry-run ", 1)], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_takes_too_long_says_why() -> None:
    for command in planned(Known):
        plan = how(*command.key)
        assert isinstance(plan, Known) and len(plan.why) > 10, where(command)


def test_pip_installs_in_a_virtual_environment() -> None:
    """Debian 12 and Ubuntu 24.04 refuse pip elsewhere (PEP 668), and have no program `python` elsewhere."""
    inside = set()
    for command in COMMANDS:
        if "python3 -m venv" in command.text and "bin/activate" in command.text:
            inside.add(command.page)
        if command.text.split()[0] in ("pip", "python"):
            assert command.page in inside, f"{where(command)}: no `python3 -m venv` above {command.text}"


def test_no_page_takes_lossd_from_an_index() -> None:
    """The names are not ours there."""
    for page in (*pages(), "client/python/src/lossd/_embedded.py"):
        for line in (ROOT / page).read_text().split("\n"):
            for words in re.findall(r"pip install ([^`#]*)", line):
                assert not re.search(r"(^|[\s\"'])lossd([-_]server)?(\[[\w-]*\])?($|[\s\"',.])", words), f"{page}: {line}"


def lossctl(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PROGRAMS / "lossctl", "--server", server.target, *words], capture_output=True, text=True, check=False)


def changed(text: str, instead: tuple[tuple[str, str], ...]) -> str:
    for old, new in instead:
        text = text.replace(old, new)
    return text.replace("ROOT/", f"{ROOT}/")


@pytest.mark.parametrize("command", planned(Serve), ids=where)
def test_a_server_starts(command: Command, tmp_path: Path) -> None:
    plan = how(*command.key)
    assert isinstance(plan, Serve)
    flags = changed(without_comment(command.text), plan.instead).split()[1:]
    if "--backend=cpu" not in flags:
        flags.append("--backend=cpu")  # on a machine with a GPU the test shares it with others
    os.chdir(tmp_path)
    server = ServerProcess(*flags)
    try:
        said = lossctl(server, "health")
        assert said.stdout == f"{server.target}: serving\n", said
    finally:
        server.stop()


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    # The flags of a server that someone starts to try these pages, but for the ports.
    server = ServerProcess("--backend=cpu", "--cpu_devices=1")
    yield server
    server.stop()


def prepare(page: str, server: ServerProcess) -> None:
    """What a page takes for granted: docs/operations.md a head, and models in the shapes of plan.SMALL."""
    if page != "docs/operations.md":
        return
    lossctl(server, "create", "lm_head", "--hidden", "16", "--vocab", "64").check_returncode()
    for name, tensor, shape_ in (("Llama-3-8B", "lm_head.weight", (512, 64)), ("gemma-2-2b", "model.embed_tokens.weight", (500, 48))):
        folder = server.folder / "checkpoints" / name
        folder.mkdir(parents=True)
        values = np.random.default_rng(1).standard_normal(shape_, dtype=np.float32)
        header = json.dumps({tensor: {"dtype": "F32", "shape": list(shape_), "data_offsets": [0, values.nbytes]}}).encode()
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + values.tobytes())


@pytest.mark.parametrize("page", sorted({command.page for command in planned(Run)}))
def test_the_commands_work(page: str, server: ServerProcess, tmp_path: Path) -> None:
    """In the order of the page, in one shell's folder. What a page shows of the output is compared but for numbers."""
    prepare(page, server)
    environment = os.environ | {"PATH": f"{PROGRAMS}:{os.environ['PATH']}", "LOSSD_SERVER": server.target}
    failures = []
    for command in planned(Run):
        if command.page != page:
            continue
        plan = how(*command.key)
        assert isinstance(plan, Run)
        text = changed(without_comment(command.text), plan.instead)
        done = subprocess.run(["bash", "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != plan.fails:
            failures.append(f"{where(command)}: {text}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        elif plan.says and not re.search(plan.says, done.stdout):
            failures.append(f"{where(command)}: {text}: no {plan.says} in\n{done.stdout}")
        elif command.said:
            printed = done.stdout + done.stderr
            if shape(printed) != shape("\n".join(command.said)):
                failures.append(f"{where(command)}: the page shows\n" + "\n".join(command.said) + "\nand the program says\n" + printed)
    for head in json.loads(lossctl(server, "heads", "--json").stdout)["heads"]:
        lossctl(server, "delete", head["name"], "--yes").check_returncode()
    assert not failures, "\n".join(failures)


def test_commands_are_found() -> None:
    """What counts as a command."""
    found = commands_of("page.md", "\n".join([
        "Text:", "", "    make test   # all of it", "    a = b", "", "```sh", "# a comment", "x=1 \\", "  y", "make z", "```",
        "```", "$ lossctl heads", "NAME", "$ lossctl health", "```", "```python", "lossctl = 1", "```", "- item", "      lossd in a list"]))
    assert [(c.line, c.key[1], c.said) for c in found] == [
        (3, "make test", []), (8, "x=1 \\\n  y", []), (10, "make z", []), (13, "lossctl heads", ["NAME"]), (15, "lossctl health", [])]
    assert shape("a  12,345 rows in 3.2 ms\nid c5dba9125bea7800") == shape("a 1 rows in 400 s\nid 0000000000000000")
    assert shape("loss 1") != shape("rows 1")


# Runs the Python of README.md, docs/python.md, docs/python-client.md and docs/protocol.md as it stands, but for the address.
# Each page's blocks run from the top to the end,
# with what the page takes for granted. The pages of docs/training run in tests/client/python/integrations.

# What a page takes for granted, before the blocks whose text has the key.
GRANTED: dict[str, dict[str, str]] = {
    "README.md": {
        "LossHead": """
            import torch
            hidden = torch.randn(4, 8, 1024, requires_grad=True)
            targets = torch.randint(50304, (4, 8))
        """,
    },
    "docs/python.md": {
        "for tokens, targets in batches": """
            import torch
            model = torch.nn.Embedding(50304, 1024)
            batches = [(torch.randint(50304, (2, 4)), torch.randint(50304, (2, 4))) for _ in range(2)]
        """,
        "clip_grad_norm_": "loss = head(model(tokens), targets)",
        "scaler": """
            optimizer.zero_grad(); head_optimizer.step(); head_optimizer.zero_grad()
            scaler = torch.cuda.amp.GradScaler(enabled=False)  # what a GradScaler does on a machine without a GPU
        """,
        "ServedEmbedding": """
            trunk, next_tokens = torch.nn.Linear(1024, 1024), tokens
        """,
        "TiedEmbedding": """
            class Model:
                embedding = torch.nn.Embedding(50304, 1024)
            model = Model()
            loss = head(model.embedding(tokens), targets)
        """,
    },
    "docs/protocol.md": {},
    "docs/python-client.md": {},
}
# Of packages that only the integrations have: there every option of this module is tested.
NEEDS_PYPI = "from lossd.transformers import"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture
def server_of_blocks() -> Iterator[ServerProcess]:
    server_of_blocks = ServerProcess("--backend=cpu")
    yield server_of_blocks
    server_of_blocks.stop()


def test_no_page_is_forgotten() -> None:
    with_blocks = {page for page in pages() if blocks_of(page)}
    assert {page for page in with_blocks if not page.startswith("docs/training/")} == set(GRANTED)


@pytest.mark.parametrize("page", sorted(GRANTED))
def test_what_is_granted_is_used(page: str) -> None:
    for key in GRANTED[page]:
        assert any(key in block for block in blocks_of(page)), key


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/python-client.md"])
def test_the_blocks_run(page: str, server_of_blocks: ServerProcess) -> None:
    pytest.importorskip("torch")
    names: dict[str, object] = {}
    granted = dict(GRANTED[page])
    for number, block in enumerate(blocks_of(page), 1):
        if NEEDS_PYPI in block:
            continue
        for key in [key for key in granted if key in block]:
            exec(textwrap.dedent(granted.pop(key)), names)
        exec(compile(block.replace("127.0.0.1:7070", server_of_blocks.target), f"{page}, block {number}", "exec"), names)


def test_the_minimal_client_runs(server_of_blocks: ServerProcess, tmp_path: Path) -> None:
    """docs/protocol.md: without this project's client, with stubs that are generated from proto/."""
    generated = subprocess.run(
        ["protoc", f"--proto_path={ROOT / 'proto'}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}",
         f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}",
         *(str(path.relative_to(ROOT / "proto")) for path in sorted((ROOT / "proto" / "lossd" / "v1").glob("*.proto")))],
        capture_output=True, text=True, check=False)
    assert generated.returncode == 0, generated.stderr
    block, = blocks_of("docs/protocol.md")
    (tmp_path / "client.py").write_text(block.replace("127.0.0.1:7070", server_of_blocks.target))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(["/usr/bin/python3", "client.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and re.match(r"loss \d", done.stdout), done
