# SPDX-License-Identifier: Apache-2.0
"""Makes tokens of text files for pipeline_bench.py: tokenize() learns a byte-level BPE from the files and encodes them; draw() makes
batches of the tokens.

Needs the package tokenizers, which is installed with transformers.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

END = "<|endoftext|>"  # the token after each file
HELD_OUT = 0.02  # this part of the tokens, at the end, is in no batch
_AT_A_TIME = 256  # the number of files that are encoded together; a limit, so that memory stays small


def read_texts(patterns: list[str], most_bytes: int) -> dict[str, bytes]:
    """The contents of the files that match `patterns`, by their digest. Equal files occur once. A file that would make the total
    larger than `most_bytes` is left out. The files are ordered by digests of their paths, which mixes the folders."""
    paths = {path for pattern in patterns for path in glob.glob(pattern, recursive=True) if Path(path).is_file()}
    texts: dict[str, bytes] = {}
    total = 0
    for path in sorted(paths, key=_digest):
        if 0 < Path(path).stat().st_size <= most_bytes - total:
            text = Path(path).read_bytes()
            if (digest := hashlib.sha256(text).hexdigest()) not in texts:
                texts[digest] = text
                total += len(text)
    return texts


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def tokenize(patterns: list[str], most_bytes: int, vocab_size: int, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Writes the tokens of the files that match `patterns` to a .npy file in `folder`, as uint32 below `vocab_size`. Returns the
    path of the .npy file, and its numbers: {"files", "bytes", "tokens", "vocabulary"}. The name of the .npy file depends on the
    texts and on `vocab_size`; if such a file exists, it is used. ValueError if no file matches."""
    texts = read_texts(patterns, most_bytes)
    if not texts:
        raise ValueError(f"text is {','.join(patterns)}; no file of at most {most_bytes} bytes matches")
    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}; bytes and the end of a file need 257")
    path = folder / f"tokens-{vocab_size}-{_digest(''.join(texts))[:16]}.npy"
    notes = path.with_suffix(".json")
    if not (path.exists() and notes.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        tokens, learnt = learn_and_encode([text.decode("utf-8", "replace") for text in texts.values()], vocab_size)
        found = {"files": len(texts), "bytes": sum(map(len, texts.values())), "tokens": len(tokens), "vocabulary": learnt}
        with tempfile.TemporaryDirectory(dir=folder) as beside:  # renamed at the end, so another run never sees half a file
            np.save(Path(beside, "tokens.npy"), tokens)
            Path(beside, "tokens.npy").rename(path)
            Path(beside, "notes.json").write_text(json.dumps(found))
            Path(beside, "notes.json").rename(notes)
    return path, json.loads(notes.read_text())


def learn_and_encode(texts: list[str], vocab_size: int) -> tuple[NDArray[np.uint32], int]:
    """The tokens of all texts, with END after each text, and the size of the vocabulary. The vocabulary is smaller than
    `vocab_size` if the texts do not have enough pairs that occur twice."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, special_tokens=[END], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainer)
    end = np.array([tokenizer.token_to_id(END)], np.uint32)
    parts = []
    for begin in range(0, len(texts), _AT_A_TIME):
        for encoded in tokenizer.encode_batch(texts[begin:begin + _AT_A_TIME]):
            parts += [np.array(encoded.ids, np.uint32), end]
    return np.concatenate(parts), tokenizer.get_vocab_size()


@functools.cache
def _stream(path: str) -> NDArray[np.uint32]:
    """The tokens in a file, without those that are held out."""
    tokens: NDArray[np.uint32] = np.load(path, mmap_mode="r")
    return tokens[:len(tokens) - int(len(tokens) * HELD_OUT)]


def draw(path: str, sequences: int, context: int, seed: int, step: int) -> NDArray[np.int64]:
    """A batch, [sequences, context + 1]: pieces of the tokens in `path` at random places, which depend only on `seed` and `step`.
    ValueError if there are too few tokens."""
    tokens = _stream(path)
    if len(tokens) <= context:
        raise ValueError(f"the text has {len(tokens)} tokens; a sequence needs {context + 1}")
    begins = np.random.default_rng([seed, step]).integers(0, len(tokens) - context, sequences)
    return np.stack([tokens[begin:begin + context + 1] for begin in begins]).astype(np.int64)
