# SPDX-License-Identifier: Apache-2.0
"""ServedEmbedding: the weight of a head on a lossd server as the embedding of a torch model."""

from __future__ import annotations

import hashlib
import math
import numbers
import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd.function import once_differentiable

import lossd
from lossd import errors
from lossd.torch import _data_parallel, _input, _modes
from lossd.torch._input import known_arguments
from lossd.torch._modes import Pass, checkpoint_pass, outside_of_compile
from lossd.torch.head import LossHead

_MOST_PREFETCHED = 4  # how many lookups of prefetch() are kept until a forward uses them


class ServedEmbedding(torch.nn.Module):
    """A torch.nn.Embedding whose weight [V, D] is the weight of a head on a lossd server. It maps ids (...) to rows (..., D).

        head = lossd.torch.LossHead(client, "lm")
        embedding = lossd.torch.ServedEmbedding(head)     # a tied model: one matrix at both ends
        loss = head(trunk(embedding(tokens)), targets)
        loss.backward()
        head_optimizer.step()                             # HeadOptimizer(head, ...): one for both

    Forward asks the server for the rows. Backward sends the gradients of the rows as a microbatch of its own. The server adds
    each of them exactly once to the gradient of the head's weight in the open step. So the trainer has neither the weight nor
    its gradient, and none of the trainer's own optimizers has the weight.

    There are two ways to make an embedding. An embedding from a LossHead shares the steps of the LossHead, and one
    HeadOptimizer serves both. An embedding from a client and a head's name is a trainer of that head. Either the head serves
    only this embedding (an untied model), with HeadOptimizer(embedding, ...). Or the embedding is the first stage of a
    pipeline, and another process, the last stage, has the LossHead of the same head; then give rank= and world_size= to both.

    Under torch.no_grad(), and if the head is not trained, the rows have no gradient. In evaluation mode a backward raises,
    like the backward of a LossHead's loss. Under activation checkpointing the gradients are sent once. The rows have the
    dtype `dtype`, or else autocast's dtype, or else torch's default dtype.

    With CUDA tensors, backward may return before the gradients are sent. HeadOptimizer waits for them.

    prefetch() may be called on any thread. The other methods are not thread-safe. Second derivatives are not available.
    """

    @known_arguments
    def __init__(self, head: LossHead | lossd.Client, head_name: str | None = None, *, scale: float = 1.0,
                 padding_idx: int | None = None, dtype: torch.dtype | None = None, device: torch.device | str | None = None,
                 train_head: bool | None = None, n_microbatches: int | None = None, scale_grads: bool = True,
                 process_group: Any = _data_parallel.UNSAID, averaged_over: int | None = None, rank: int | None = None,
                 world_size: int | None = None, state: Literal["checkpoint", "none"] = "checkpoint",
                 streams: int | None = None, timeout: float | None = None) -> None:
        """
        Args:
          head: the LossHead in this program that has the same matrix; or a client.
          head_name: only with a client: the head's name on the server.
          scale: a factor of the rows, and of their gradients.
          padding_idx: as in torch.nn.Embedding: gradients of rows with this id are left out. Unlike there, the row itself has
            the values of the weight.
          dtype: the dtype of the rows: float32, float16, bfloat16 or float64. float64 rows are sent in float32. None: see the
            class comment.
          device: the device for the rows. None: the device of the ids. If the ids are on the CPU, the lookup does not wait
            for the GPU.
          n_microbatches, scale_grads: only if the LossHead is in another process: the arguments of the schedule of
            torch.distributed.pipelining, as given to PipelineLoss in that process.
          train_head, process_group, averaged_over, rank, world_size, state: as in LossHead, and only with a client. With a
            LossHead, its own values apply.
          streams, timeout: as in lossd.Client.embed_async.

        TypeError or ValueError if an argument is wrong; NotFound if there is no such head. A head with a draft vocabulary
        cannot be an embedding.
        """
        super().__init__()
        own = not isinstance(head, LossHead)
        if isinstance(head, LossHead):
            said = {"head_name": head_name, "train_head": train_head, "n_microbatches": n_microbatches,
                    "averaged_over": averaged_over, "rank": rank, "world_size": world_size,
                    "process_group": None if process_group is _data_parallel.UNSAID else process_group,
                    "scale_grads": None if scale_grads else False, "state": None if state == "checkpoint" else state}
            for name, value in said.items():
                if value is not None:
                    raise ValueError(f"{name} is {value!r}; the LossHead of {head.head_name!r}, which the embedding shares, says it")
        else:
            _check_client(head, head_name)
            assert head_name is not None
            head = LossHead(head, head_name, train_head=True if train_head is None else train_head,
                            process_group=process_group, averaged_over=averaged_over, rank=rank, world_size=world_size,
                            state=state, streams=streams, timeout=timeout)
            if n_microbatches is not None:
                if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
                    raise ValueError(f"n_microbatches is {n_microbatches!r}; it must be a positive integer")
                head.steps.group = n_microbatches
                head.scale.schedule = 1.0 / n_microbatches if scale_grads else 1.0
        if head.has_draft_vocabulary:
            raise ValueError(f"head {head.head_name!r} has a draft vocabulary, some classes of a larger one, so its weight is no "
                             "embedding")
        _input.check_numbers({"scale": scale}, {"streams": streams, "timeout": timeout})
        if not math.isfinite(scale):
            raise ValueError(f"scale is {scale}; it must be finite")
        if own:
            self.head = head  # a submodule, so this module's state_dict has the head's state
        else:
            object.__setattr__(self, "head", head)  # not a submodule: it is a part of another module already
        self._shares = not own
        self.num_embeddings, self.embedding_dim = head.vocab_size, head.hidden_size
        self.padding_idx = _padding(padding_idx, head.vocab_size)
        self.scale = float(scale)
        self.dtype = _known_dtype(dtype)
        self.device = None if device is None else torch.device(device)
        self._transport: dict[str, Any] = {"streams": streams, "timeout": timeout}
        self._prefetched = _Prefetched()

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise TypeError(f"ServedEmbedding of {self.head_name!r} has no weight of its own, so it cannot be copied or pickled: make "
                        "another one")

    def __reduce__(self) -> NoReturn:
        self.__deepcopy__(None)

    def requires_grad_(self, requires_grad: bool = True) -> ServedEmbedding:
        """Sets whether the head is trained, like LossHead.requires_grad_(). For a tied matrix this concerns embedding and
        LossHead."""
        self.head.requires_grad_(requires_grad)
        return self

    def named_modules(self, memo: set[torch.nn.Module] | None = None, prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, torch.nn.Module]]:
        """As in any module. If requires_grad_() of a module that contains this one calls it, then that requires_grad_()
        applies to the head, too."""
        _modes.heed_requires_grad(self.head)
        return super().named_modules(memo, prefix, remove_duplicate)

    def extra_repr(self) -> str:
        """The text in repr(): the head, its shape, and the options whose values are not the defaults."""
        options = {"scale": (self.scale, 1.0), "padding_idx": (self.padding_idx, None), "dtype": (self.dtype, None),
                   "device": (self.device, None)}
        unusual = [f"{name}={value}" for name, (value, usual) in options.items() if value != usual]
        return ", ".join([f"{self.num_embeddings}, {self.embedding_dim}, {self.head_name!r} at {self.head.client.target}",
                          *unusual])

    @property
    def head_name(self) -> str:
        """The head's name on the server."""
        return self.head.head_name

    @outside_of_compile
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows (..., D) of ids (...), which must be integers in [0, V). InvalidArgument names the place and the value of
        a wrong id."""
        head = self.head
        head.client.check_usable()
        head.row_gradients.settle(wait=False)  # raises the error of an earlier gradient, if there is one
        lookup = self._lookup(ids)
        if not (torch.is_grad_enabled() and head.train_head):
            return lookup.rows(step=None)
        step = None
        if self.training:
            step = head.step
            if checkpoint_pass() is not Pass.REPEATED:
                head.join_step()
        lookup.joins_step = self.training
        rows: torch.Tensor = _Rows.apply(torch.zeros((), requires_grad=True), lookup, step)
        return rows

    def prefetch(self, ids: torch.Tensor) -> None:
        """Asks for the rows of ids (...) early. A forward with the same ids uses them, unless the weights have changed since.

        Use it if the trainer knows the ids of its next microbatch. Forward may get another tensor with the same values. The
        rows get the dtype and device that forward would give them now. So call prefetch() under the same autocast as forward,
        or give the module a dtype. At most 4 lookups are kept until a forward uses them; a fifth replaces the oldest. If a
        prefetched lookup fails, forward asks again, and raises the error if it fails again.
        """
        self.head.client.check_usable()
        self._prefetched.add(self._lookup(ids))

    def _lookup(self, ids: torch.Tensor) -> _Lookup:
        _input.check_ids(ids)
        device = self.device or ids.device
        dtype = self._dtype_on(device)
        return _Lookup(self.head, _input.ids_of_rows(ids, self.num_embeddings), ids.shape, dtype, device, self.scale,
                       self.padding_idx, self._transport, self._prefetched)

    def _dtype_on(self, device: torch.device) -> torch.dtype:
        """The dtype that rows on this device have now."""
        return self.dtype or _input.autocast_dtype(device) or torch.get_default_dtype()


class _Lookup:
    """One lookup of ids: it gets their rows from the server, and sends the rows' gradients back."""

    def __init__(self, head: LossHead, ids: NDArray[np.int32], shape: torch.Size, dtype: torch.dtype, device: torch.device,
                 scale: float, padding_idx: int | None, transport: dict[str, Any], prefetched: _Prefetched) -> None:
        self.head = head
        self.ids = ids
        self._shape = torch.Size((*shape, head.hidden_size))
        self._dtype, self._device = dtype, device
        self._wire = dtype if dtype in _input.DTYPES else torch.float32
        self._scale, self._padding_idx = scale, padding_idx
        self._transport = transport
        self._prefetched = prefetched
        self.joins_step = False

    @property
    def key(self) -> bytes:
        """A key that is equal for two lookups of the same ids with the same shape, dtype and device."""
        text = f"{tuple(self._shape)} {self._wire} {self._device}".encode()
        return hashlib.blake2b(self.ids.tobytes() + text, digest_size=16).digest()

    def begin(self, step: int | None, is_waited_for: bool = False) -> _Coming:
        """Asks the server for the rows. `step`: as in rows(). `is_waited_for`: whether this thread waits for the rows next."""
        head = self.head
        place = _input.place_on(self._device, head.client)
        memory = _input.empty(self._shape, self._wire, self._device, place)
        out = _input.as_sent(memory.view(len(self.ids), head.hidden_size))
        return _Coming(memory, head.client.embed_async(
            head.head_name, self.ids, dtype=_input.DTYPES[self._wire], step=step, out=out,
            ready=_input.settled(memory, by_caller=is_waited_for), **self._transport))

    def rows(self, step: int | None) -> torch.Tensor:
        """The rows of the present weights, multiplied by `scale`. `step`: the step that must be open. None: any step may be."""
        memory = self._prefetched.take(self)
        if memory is None:
            coming = self.begin(step, is_waited_for=True)
            try:
                coming.pending.wait()
            except errors.LossdError as error:
                self.head.continuation.explain(error)
                raise
            memory = coming.memory
        rows = _input.to_device(memory, self._device)
        if self._wire is not self._dtype:
            rows = rows.to(self._dtype)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)

    def send(self, gradient: torch.Tensor) -> None:
        """Sends the gradient of the rows. The server adds it to the head's gradient in the open step."""
        head, steps = self.head, self.head.steps
        head.row_gradients.settle(wait=False)
        undo = head.scale.of_rows(head.step)
        if undo == 0.0 and bool(gradient.any()):
            raise RuntimeError("the losses of this step were multiplied by 0, so no other gradient can be added to theirs")
        number = steps.number(None)
        if head.deterministic:
            steps.check_order(number)
        rows = gradient.to(self._wire).reshape(len(self.ids), head.hidden_size)
        sent = _input.to_send(rows, _input.place_of(rows, head.client))
        with steps.sending(number, accumulates=True):
            pending = head.client.add_row_gradients_async(
                head.head_name, self.ids, sent.array, step=head.step, id=steps.wire_id(number),
                scale=self._scale * (undo or 1.0), padding_idx=self._padding_idx, dtype=_input.DTYPES[self._wire],
                ready=sent.ready, **self._transport)
        head.row_gradients.add(pending, number, head.step, (rows, sent))
        steps.had_backward(number)
        if _waits_in_backward(gradient.device):
            head.row_gradients.settle()


def _waits_in_backward(device: torch.device) -> bool:
    """Whether backward waits until the gradient is sent. For host memory it does, because autograd reuses this memory after
    backward. GPU memory is kept until the gradient is sent, and the trainer continues meanwhile."""
    return device.type != "cuda"


class _Rows(torch.autograd.Function):
    """The rows of a lookup in autograd's graph; backward sends their gradient. It saves no tensors, so activation
    checkpointing does not have to compute anything again for it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, lookup: _Lookup, step: int | None) -> torch.Tensor:
        ctx.lookup = lookup
        return lookup.rows(step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        lookup: _Lookup = ctx.lookup
        if not lookup.joins_step:
            raise RuntimeError(
                f"these rows of head {lookup.head.head_name!r} were looked up in evaluation mode, which accumulates nothing on the "
                "server, so they have no backward: call .train() on the ServedEmbedding, or the model that holds it, before "
                "forward; of a head that is not to be trained, requires_grad_(False)")
        lookup.send(gradient)
        return torch.zeros(()), None, None


@dataclass(frozen=True)
class _Coming:
    """Rows that were asked for and that the client is receiving."""

    memory: torch.Tensor  # [..., D], which the client writes: on the device, or in host memory that is copied to it later
    pending: lossd.PendingRows  # the call


class _Prefetched:
    """The lookups that prefetch() has begun and no forward has used. Thread-safe; bounded."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._coming: OrderedDict[bytes, _Coming] = OrderedDict()  # guarded by _lock

    def add(self, lookup: _Lookup) -> None:
        key = lookup.key
        with self._lock:
            if key in self._coming:
                return
        coming = lookup.begin(step=None)
        dropped = []
        with self._lock:
            if key in self._coming:  # another thread was faster
                dropped.append(coming)
            else:
                self._coming[key] = coming
            while len(self._coming) > _MOST_PREFETCHED:
                dropped.append(self._coming.popitem(last=False)[1])
        for each in dropped:
            each.pending.cancel()

    def take(self, lookup: _Lookup) -> torch.Tensor | None:
        """Waits for the rows of a prefetched lookup and returns their memory. None if they were not prefetched, if the call
        has failed, or if the weights have changed since."""
        with self._lock:
            if not self._coming:
                return None
            coming = self._coming.pop(lookup.key, None)
        if coming is None:
            return None
        try:
            found = coming.pending.wait()
            now = lookup.head.client.describe_head(lookup.head.head_name).state
        except errors.LossdError:
            return None
        same = (found.incarnation, found.weights_version, found.step) == (now.incarnation, now.weights_version, now.step)
        return coming.memory if same and (not lookup.joins_step or now.step == lookup.head.step) else None


def _check_client(client: Any, head_name: Any) -> None:
    if not hasattr(client, "embed_async"):
        raise TypeError(f"head is a {type(client).__name__}; it must be a LossHead, or a lossd.Client with head_name=")
    if not isinstance(head_name, str):
        raise TypeError(f"head_name is {head_name!r}; with a client it must be the name of a head on the server")


def _padding(padding_idx: Any, vocab_size: int) -> int | None:
    """`padding_idx` as a number in [0, V). TypeError or ValueError if it is no row."""
    if padding_idx is None:
        return None
    if not isinstance(padding_idx, numbers.Integral) or isinstance(padding_idx, bool):
        raise TypeError(f"padding_idx is {padding_idx!r}; it must be an integer or None")
    row = int(padding_idx)
    if not -vocab_size <= row < vocab_size:
        raise ValueError(f"padding_idx is {row}; it must be in [-{vocab_size}, {vocab_size})")
    return row % vocab_size


def _known_dtype(dtype: Any) -> torch.dtype | None:
    if dtype is not None and dtype not in _input.DTYPES and dtype is not torch.float64:
        raise TypeError(f"dtype is {dtype!r}; it must be torch.float32, float16, bfloat16 or float64, or None")
    return dtype
