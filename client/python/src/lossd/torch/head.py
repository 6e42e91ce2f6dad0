"""LossHead: linear + softmax cross-entropy on a lossd server as a torch module."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import lossd
from lossd._arrays import as_targets
from lossd.torch import _memory
from lossd.torch._job import EXTRAS, Extra, Job, LossOutput
from lossd.torch._step_tracker import StepTracker
from lossd.types import Reduction


class LossHead(torch.nn.Module):
    """The loss of hidden states under a head that a lossd server owns.

        head = lossd.torch.LossHead(client, "lm")
        loss = head(hidden, targets)  # (..., D) and (...)
        loss.backward()

    The weights, their gradient and their optimizer live on the server: the module has no parameters. HeadOptimizer
    applies the steps.

    Forward computes the loss and both gradients at once; the hidden states' is handed out in backward, the weights'
    is accumulated on the server. So what multiplies the loss after this module has to be known in forward:
    `grad_output` (1, unless the loss is scaled or divided). Backward raises if it meets another value. With
    `deferred=True`, and always with reduction "none", the server keeps the hidden states and computes gradients in
    backward from whatever arrives there, at the price of computing the logits twice.

    Under torch.no_grad() only the loss is computed and nothing is accumulated. Hidden states that need no gradient get
    none. Under autocast hidden states travel in autocast's dtype.

    Not thread-safe; a client may serve several modules. The computation on the server is float32 or as the head says;
    second derivatives are not available.
    """

    def __init__(
            self, client: lossd.Client, head: str, *, reduction: Reduction = "mean", class_weights: bool = False,
            shift: bool = False, normalizer: float | None = None, grad_output: float = 1.0, deferred: bool = False,
            train_head: bool = True, extras: Iterable[Extra] = (), rank: int = 0, world_size: int = 1,
            streams: int | None = None, slice_bytes: int = 2 << 20, timeout: float | None = None,
            **loss: Any) -> None:
        """
        Args:
          head: the head's name on the server.
          reduction: as torch.nn.functional.cross_entropy.
          class_weights: use the head's class weights (Client.write_tensor sets them).
          shift: hidden states of position i predict targets of position i + 1 of the last dimension.
          normalizer: what a mean divides by. None: the number (with class weights: weight) of valid targets of the
            microbatch. For means over several microbatches or trainers give the number of the whole batch.
          grad_output: the gradient that the loss will get in backward; may be assigned between calls.
          deferred: compute gradients in backward.
          train_head: accumulate the head's gradients. False for a frozen head.
          extras: what forward returns besides the loss; then it returns (loss, LossExtras).
          rank, world_size: of this trainer among those that feed the head; each counts its microbatches apart.
          streams, slice_bytes, timeout: as lossd.Client.compute_loss_async.
          loss: the other fields of lossd.LossOptions, which describes them: ignore_index and label_smoothing as
            torch.nn.functional.cross_entropy has them, z_loss, softcap, logit_scale, gradients and so on.
        """
        super().__init__()
        self.client = client
        self.head_name = head
        self.reduction: Reduction = reduction
        self.options = lossd.LossOptions(use_class_weights=class_weights, **loss)
        self.shift = shift
        self.normalizer = normalizer
        self.grad_output = grad_output
        self.grad_scale = 1.0  # multiplies the weights' gradient alone, when HeadOptimizer applies the step
        self.deferred = deferred or reduction == "none"
        self.extras = tuple(extras)
        for name in self.extras:
            if name not in EXTRAS:
                raise ValueError(f"extras names {name!r}; there are {', '.join(EXTRAS)}")
        description = client.describe_head(head)
        self.hidden_size: int = description.spec.hidden_size
        self.vocab_size: int = description.spec.vocab_size
        self.train_head = train_head and not description.spec.frozen
        self._deterministic = description.slice_limits.row_grid > 0
        self.steps = StepTracker(description.state.step, rank, world_size)
        self.transport: dict[str, Any] = {"streams": streams, "slice_bytes": slice_bytes, "timeout": timeout}
        self._class_weights: NDArray[Any] | None = None

    def extra_repr(self) -> str:
        return f"{self.head_name!r} at {self.client.target}, D={self.hidden_size}, V={self.vocab_size}"

    @property
    def step(self) -> int:
        """The open step, as far as this module knows."""
        return self.steps.step

    def sync(self) -> None:
        """Takes the head as the server has it now: after a checkpoint was loaded, or another trainer applied a step.

        What this module has accumulated in the open step counts as lost, and the step starts again.
        """
        self.client.acknowledge_restart(self.head_name)
        self.steps.advance(self.client.describe_head(self.head_name).state.step)
        self._class_weights = None

    def forward(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
                normalizer: float | None = None, microbatch: int | None = None) -> LossOutput:
        """The loss; see start()."""
        pending: PendingHeadLoss | None = None
        try:
            pending = self.start(hidden, targets, row_weights=row_weights, normalizer=normalizer, microbatch=microbatch)
            return pending.wait()
        except BaseException:
            if pending is not None:
                pending.cancel()  # after an interrupt; else it has ended
            raise

    def start(self, hidden: torch.Tensor, targets: torch.Tensor, *, row_weights: torch.Tensor | None = None,
              normalizer: float | None = None, microbatch: int | None = None) -> PendingHeadLoss:
        """Begins the computation, so that the trainer can go on meanwhile; wait() of the result is the loss.

        Args:
          hidden: (..., D), float32, float16 or bfloat16, on any device. Must not change before wait().
          targets: (...), integers. On the CPU, for a CUDA model too, they do not wait for the GPU.
          row_weights: (...), multiply the rows' losses and gradients; they do not enter the normalizer.
          normalizer: overrides the module's.
          microbatch: the number, within the step, of a microbatch that failed and is sent again.
        """
        self._check(hidden, targets, row_weights)
        wire = _autocast(hidden)
        labels = _labels(targets, self.shift, self.options.ignore_index)
        needs_hidden = torch.is_grad_enabled() and hidden.requires_grad
        needs_head = torch.is_grad_enabled() and self.train_head
        number = self.steps.number(microbatch) if needs_head else self.steps.number_apart()
        if self._deterministic:
            self.steps.check_order(number)
        job = Job(self, wire, targets.shape, needs_hidden, needs_head, number, self.grad_output)
        weights = None if row_weights is None else row_weights.detach().reshape(-1).to("cpu", torch.float32).numpy()
        if self.reduction == "mean":
            job.normalizer = self._normalizer(labels, normalizer)
        job.start(labels, weights)
        return PendingHeadLoss(job)

    def _normalizer(self, labels: NDArray[np.int32], given: float | None) -> float:
        given = self.normalizer if given is None else given
        if given is not None:
            return given
        valid = labels != self.options.ignore_index
        if not self.options.use_class_weights:
            return float(np.count_nonzero(valid))
        if self._class_weights is None:
            self._class_weights = self.client.read_tensor(self.head_name, "class_weights")
        inside = valid & (labels >= 0) & (labels < self.vocab_size)  # the server names what is not
        return float(self._class_weights[labels[inside]].sum(dtype=np.float64))

    def _check(self, hidden: torch.Tensor, targets: torch.Tensor, row_weights: torch.Tensor | None) -> None:
        self.client.check_usable()
        if hidden.dtype not in _memory.DTYPES:
            raise TypeError(f"hidden is {hidden.dtype}; lossd takes float32, float16 and bfloat16: use hidden.float()")
        if hidden.dim() == 0 or hidden.shape[-1] != self.hidden_size:
            raise ValueError(f"hidden has shape {tuple(hidden.shape)}; head {self.head_name!r} needs "
                             f"(..., {self.hidden_size})")
        for name, tensor in (("targets", targets), ("row_weights", row_weights)):
            if tensor is None:
                continue
            if tensor.shape != hidden.shape[:-1]:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}; hidden of shape {tuple(hidden.shape)} needs "
                                 f"{tuple(hidden.shape[:-1])}")
            if tensor.requires_grad:
                raise ValueError(f"{name} requires a gradient, but lossd computes none for it: use {name}.detach()")
        if targets.dtype.is_floating_point or targets.dtype.is_complex or targets.dtype is torch.bool:
            raise TypeError(f"targets is {targets.dtype}; it must hold class indices: use targets.long()")
        if self.shift and targets.dim() == 0:
            raise ValueError("shift=True needs targets with at least one dimension")


class PendingHeadLoss:
    """A loss that is being computed."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._output: LossOutput | None = None

    def done(self) -> bool:
        """True if wait() will not block."""
        return self._job.pending is not None and self._job.pending.done()

    def wait(self) -> LossOutput:
        """The loss, or (loss, LossExtras) if the module was made with extras. May be repeated."""
        if self._output is None:
            self._output = self._job.output()
        return self._output

    def cancel(self) -> None:
        """Asks for an early end with lossd.Cancelled; no effect when done. wait() says when it has ended."""
        self._job.cancel()

    def lazy(self) -> torch.Tensor:
        """The loss at once, as a tensor whose value is NaN until its backward, which waits for the server.

        For trainers that do other work between a loss and its backward, as pipeline schedules do. Without gradients
        there is no backward to wait in: then this is wait(). RuntimeError with extras and in deferred mode, whose
        results are needed before.
        """
        if self._output is None:
            self._output = self._job.lazy_output()
        assert isinstance(self._output, torch.Tensor)
        return self._output


def _labels(targets: torch.Tensor, shift: bool, ignore_index: int) -> NDArray[np.int32]:
    """One label a row of hidden states. Shifted ones are ignored at the last position; hidden states stay in place."""
    array: NDArray[Any] = targets.detach().to("cpu").numpy()
    labels = as_targets(array.reshape(-1)).reshape(array.shape)
    if shift:
        shifted = np.full_like(labels, ignore_index)
        shifted[..., :-1] = labels[..., 1:]
        labels = shifted
    return labels.reshape(-1)


def _autocast(hidden: torch.Tensor) -> torch.Tensor:
    """As a linear layer would take it."""
    find = _autocast_dtype if hasattr(torch, "get_autocast_dtype") else _old_autocast_dtype
    dtype = find(hidden.device.type)
    return hidden if dtype is None or hidden.dtype is dtype else hidden.to(dtype)


def _autocast_dtype(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _old_autocast_dtype(kind: str) -> torch.dtype | None:
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None
