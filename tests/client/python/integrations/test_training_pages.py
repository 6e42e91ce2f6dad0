"""Every code block of docs/training runs, from the top of its page to the end, in two ranks where it is for ranks."""

import re
from pathlib import Path

import pytest
from ranks import run_ranks

PAGES = Path(__file__).parents[4] / "docs" / "training"
FOR_RANKS = {"data-parallel.md"}


def run_page(rank, page, target, variables):
    blocks = re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    assert blocks, page
    names = {"__name__": page, **variables}
    for number, block in enumerate(blocks):
        code = block.replace("127.0.0.1:7070", target)
        exec(compile(code, f"{page}, block {number + 1}", "exec"), names)
    names["client"].close()
    return len(blocks)


def tokenizer():
    import transformers
    from tokenizers import Tokenizer, models
    words = {f"t{i}": i for i in range(500)}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t3")),
                                                pad_token="t0", bos_token="t1", eos_token="t2", unk_token="t3")


@pytest.mark.parametrize("page", sorted(each.name for each in PAGES.glob("*.md")))
def test_page(server, client, tmp_path, monkeypatch, page):
    monkeypatch.chdir(tmp_path)
    if page in FOR_RANKS:
        run_ranks(2, run_page, page, server.target, {})
    else:
        run_page(0, page, server.target, {"tokenizer": tokenizer()} if page == "hugging-face.md" else {})
    for head in client.list_heads():
        client.delete_head(head.spec.name)
