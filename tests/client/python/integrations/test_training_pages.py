# SPDX-License-Identifier: Apache-2.0
"""Every code block of docs/training runs, from the top of its page to the end, in as many ranks as the page is for."""

import re
from pathlib import Path

import pytest
from on_cpu import PREPARATIONS
from ranks import run_ranks
from server_process import ServerProcess

import lossd

PAGES = Path(__file__).parents[4] / "docs" / "training"
RANKS = {  # of pages that are for several
    "accelerate.md": 2, "colocated.md": 2, "data-parallel.md": 2, "deepspeed.md": 2, "deepspeed-zero.md": 2, "fsdp2.md": 2, "lightning.md": 2,
    "megatron.md": 2, "pipeline.md": 2, "pipeline-data-parallel.md": 4, "sharded-sequences.md": 2, "torchtitan.md": 2}
# Flags of a server of the page's own.
FLAGS = {"colocated.md": ("--cpu_devices=2", "--split=vocabulary")}
INDEX = "README.md"


def blocks_of(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, page
    return blocks


def run_page(rank, page, target, variables):
    names = {"__name__": page, **variables}
    PREPARATIONS.get(page, lambda: None)()
    for number, block in enumerate(blocks_of(page)):
        code = block.replace("127.0.0.1:7070", target)
        exec(compile(code, f"{page}, block {number + 1}", "exec"), names)
    names["client"].close()


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models
    words = {f"t{i}": i for i in range(500)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t3")),
                                                pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3")


@pytest.fixture
def page_server(request, page):
    """The server that a page's code is run against: its own where the page starts it with other flags."""
    if page not in FLAGS:
        yield request.getfixturevalue("server")
        return
    own = ServerProcess("--backend=cpu", *FLAGS[page])
    yield own
    own.stop()


@pytest.mark.parametrize("page", sorted(each.name for each in PAGES.glob("*.md") if each.name != INDEX))
def test_page(page_server, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    server, client = page_server, lossd.Client(page_server.target)
    try:
        if page in RANKS:
            run_ranks(RANKS[page], run_page, page, server.target, {})
        else:
            run_page(0, page, server.target, {"tokenizer": tokenizer()} if "tokenizer" in "".join(blocks_of(page)) else {})
        heads = client.list_heads()
        assert heads and all(each.state.step > 0 or each.spec.frozen for each in heads)
    finally:
        for head in client.list_heads():
            client.delete_head(head.spec.name)
        client.close()


def test_the_index_names_every_page():
    linked = re.findall(r"\]\(([\w-]+\.md)\)", (PAGES / INDEX).read_text())
    assert sorted(set(linked)) == sorted(each.name for each in PAGES.glob("*.md") if each.name != INDEX)
