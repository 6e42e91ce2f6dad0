# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a trainer and those of the server that they name: saved, restored and removed together."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lossd
from lossd.transformers._head_module import ServedHead

FILE = "lossd_head.json"  # in a checkpoint of the trainer: what LossHead.save_state() returned


class Rotation:
    """Notes in each checkpoint of a trainer which checkpoint of the server it names.

    When the trainer removes some of its own (save_total_limit), those that they named are removed from the server, unless a
    checkpoint that is left names them too.
    """

    def __init__(self, trainer: Any, served: ServedHead) -> None:
        self.saved: dict[str, Any] | None = None  # the state that was saved last; None: none since the last checkpoint
        self.restored: dict[str, Any] | None = None  # the state that training went on from
        self._trainer, self._served = trainer, served
        self._elsewhere: set[str] = set()  # checkpoints that a folder outside of the trainer's names
        save, finalize = trainer._save_checkpoint, getattr(trainer, "_finalize_training", None)  # old versions have no such
        save_optimizer, load = trainer._save_optimizer_and_scheduler, trainer._load_optimizer_and_scheduler

        def save_checkpoint(model: Any, trial: Any) -> Any:
            with self._following(trial):
                return save(model, trial)

        def finalize_training(trial: Any, *args: Any, **options: Any) -> Any:
            assert finalize is not None
            with self._following(trial):
                return finalize(trial, *args, **options)

        def save_optimizer_and_scheduler(output_dir: str) -> Any:
            self.saved = None
            result = save_optimizer(output_dir)
            if trainer.is_world_process_zero():
                state = self.saved or served.loss_head.save_state()  # DeepSpeed saves optimizers without their hooks
                Path(output_dir, FILE).write_text(json.dumps(state))
            return result

        def load_optimizer_and_scheduler(checkpoint: str | None) -> Any:
            self.restored = None
            result = load(checkpoint)
            if checkpoint is not None:
                self._restore(Path(checkpoint))
            return result

        trainer._save_checkpoint = save_checkpoint
        if finalize is not None:
            trainer._finalize_training = finalize_training
        trainer._save_optimizer_and_scheduler = save_optimizer_and_scheduler
        trainer._load_optimizer_and_scheduler = load_optimizer_and_scheduler

    def _restore(self, checkpoint: Path) -> None:
        if self.restored is None and (checkpoint / FILE).exists():
            self.restored = json.loads((checkpoint / FILE).read_text())
            self._served.loss_head.load_state(self.restored)
        if self.restored is not None and checkpoint.resolve().parent != Path(self._trainer.args.output_dir).resolve():
            self._elsewhere.add(self.restored["checkpoint"])

    @contextlib.contextmanager
    def _following(self, trial: Any) -> Iterator[None]:
        """What the trainer removes inside is removed from the server afterwards. One rank does it."""
        folder = Path(self._trainer._get_output_dir(trial=trial))
        before = _named(folder)
        yield
        if self._trainer.is_world_process_zero():
            self._remove(before, folder)

    def _remove(self, before: dict[Path, str], folder: Path) -> None:
        left = set(_named(folder).values()) | self._elsewhere
        gone = {name for path, name in before.items() if not path.exists()} - left
        for name in sorted(gone):
            try:
                self._served.loss_head.client.delete_checkpoint(name)
            except lossd.NotFound:
                pass  # somebody has removed it
            except lossd.LossdError as error:
                warnings.warn(f"checkpoint {name!r} stays on the server, although the trainer has removed its own: {error}",
                              RuntimeWarning, stacklevel=2)


def _named(folder: Path) -> dict[Path, str]:
    """The checkpoint of the server that each checkpoint in a folder names."""
    found = {}
    for path in folder.glob(f"checkpoint-*/{FILE}"):
        try:
            name = json.loads(path.read_text())["checkpoint"]
        except (OSError, ValueError, KeyError):
            continue  # it is being written or removed
        if name:
            found[path.parent] = name
    return found
