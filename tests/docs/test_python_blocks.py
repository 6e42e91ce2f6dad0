# SPDX-License-Identifier: Apache-2.0
"""Runs the Python of README.md, docs/python.md and docs/protocol.md as it stands, but for the address. Each page's blocks run from the top to the end,
with what the page takes for granted. The pages of docs/training run in tests/client/python/integrations."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "client" / "python"))

from page_commands import ROOT, pages  # noqa: E402
from servers import ServerProcess  # noqa: E402

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
        "TiedEmbedding": """
            class Model:
                embedding = torch.nn.Embedding(50304, 1024)
            model = Model()
            loss = head(model.embedding(tokens), targets)
        """,
        "compute_loss(": """
            head_optimizer.step()
            client.delete_head("lm")
            client.create_head("lm", hidden_size=16, vocab_size=64)
            import numpy
            hidden = numpy.random.default_rng(1).standard_normal((5, 16), dtype=numpy.float32)
            targets = numpy.arange(5)
        """,
    },
    "docs/protocol.md": {},
}
# Of packages that only the integrations have: there every option of this module is tested.
NEEDS_PYPI = "from lossd.transformers import"


def blocks_of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--backend=cpu")
    yield server
    server.stop()


def test_no_page_is_forgotten() -> None:
    with_blocks = {page for page in pages() if blocks_of(page)}
    assert {page for page in with_blocks if not page.startswith("docs/training/")} == set(GRANTED)


@pytest.mark.parametrize("page", sorted(GRANTED))
def test_what_is_granted_is_used(page: str) -> None:
    for key in GRANTED[page]:
        assert any(key in block for block in blocks_of(page)), key


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_blocks_run(page: str, server: ServerProcess) -> None:
    pytest.importorskip("torch")
    names: dict[str, object] = {}
    granted = dict(GRANTED[page])
    for number, block in enumerate(blocks_of(page), 1):
        if NEEDS_PYPI in block:
            continue
        for key in [key for key in granted if key in block]:
            exec(textwrap.dedent(granted.pop(key)), names)
        exec(compile(block.replace("127.0.0.1:7070", server.target), f"{page}, block {number}", "exec"), names)


def test_the_minimal_client_runs(server: ServerProcess, tmp_path: Path) -> None:
    """docs/protocol.md: without this project's client, with stubs that are generated from proto/."""
    generated = subprocess.run(
        ["protoc", f"--proto_path={ROOT / 'proto'}", f"--python_out={tmp_path}", f"--grpc_python_out={tmp_path}",
         f"--plugin=protoc-gen-grpc_python={shutil.which('grpc_python_plugin')}",
         *(str(path.relative_to(ROOT / "proto")) for path in sorted((ROOT / "proto" / "lossd" / "v1").glob("*.proto")))],
        capture_output=True, text=True, check=False)
    assert generated.returncode == 0, generated.stderr
    block, = blocks_of("docs/protocol.md")
    (tmp_path / "client.py").write_text(block.replace("127.0.0.1:7070", server.target))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(["/usr/bin/python3", "client.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and re.match(r"loss \d", done.stdout), done

