# SPDX-License-Identifier: Apache-2.0
"""StandIn: a scalar parameter that stands for a head's parameters on the server, in the trainer. Its gradient is the 2-norm
of the gradient of the head's parameters. HeadOptimizer uses it.

If the trainer multiplies the stand-in's gradient by a number, then the server's gradient is multiplied by the same number at
the step. This is right for clipping by a global 2-norm, for GradScaler, and for other code that multiplies all gradients by
one number. It is wrong if the number comes from a norm other than the 2-norm, because all norms of a scalar are equal. The
value of the gradient does not show which norm was taken of it, so the gradient records what is done with it (Notes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# In-place functions of torch that multiply a gradient by a number. All other in-place functions, except those in _NEUTRAL,
# change a gradient in another way.
_SCALINGS = frozenset((
    "mul_", "div_", "multiply_", "divide_", "true_divide_", "__imul__", "__itruediv__", "_foreach_mul_", "_foreach_div_",
    "_amp_non_finite_check_and_unscale_", "_amp_foreach_non_finite_check_and_unscale_"))
_NEUTRAL = frozenset(("requires_grad_", "detach_", "retain_grad", "squeeze_", "unsqueeze_"))
# _PRODUCTS: functions whose results are multiples of the gradient. _SAME: functions whose result has the gradient's value;
# abs() is one, because the gradient is not negative.
_PRODUCTS = frozenset((
    "mul", "div", "multiply", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"))
_SAME = frozenset((
    "detach", "clone", "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "to", "float",
    "double", "cpu", "cuda", "to_dense", "coalesce", "expand_as", "abs", "absolute"))
_NORMS = frozenset(("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "frobenius_norm", "norm_except_dim"))
# Functions with which other code computes a norm that is not the 2-norm.
_LARGEST = frozenset(("max", "amax", "_foreach_max"))
_MAGNITUDES = frozenset(("abs", "absolute", "_foreach_abs"))


class Notes:
    """What was done with one gradient of a stand-in. Copies of the gradient, and its multiples, share the object."""

    def __init__(self, loaded: float, moment: object) -> None:
        self.loaded = loaded  # the gradient's value when it was loaded
        self.moment = moment  # StepTracker.moment of the server's gradient whose norm was loaded
        self._norm: str | None = None  # the last norm that was taken of the gradient; None: none, or the 2-norm
        # Whether that norm of the server's gradient may be larger than the 2-norm. Then even a multiplier of 1 may be wrong,
        # because clipping saw too small a norm.
        self._understates = False
        # The norm (`_norm`) that was taken before the first multiplication that followed a norm; None: there was none.
        self._scaled_by: str | None = None
        self._changed_by: str | None = None  # the first function that changed the gradient, other than a multiplication
        self.touched = False  # whether the gradient's value may differ from `loaded`

    def norm_taken(self, order: float) -> None:
        """A norm of this order was taken of the gradient."""
        self._norm = None if order == 2 else f"a norm with norm_type={order:g}"
        self._understates = order < 2

    def power_taken(self, function: str) -> None:
        """Notes a call of `function`, with which other code computes a norm that is not the 2-norm. Which norm is not known."""
        self._norm, self._understates = f"{function}()", True

    def scaled(self) -> None:
        """The gradient was multiplied."""
        self.touched = True
        if self._norm is not None and self._scaled_by is None:
            self._scaled_by = self._norm

    def changed(self, function: str) -> None:
        """`function` has changed the gradient in another way than by a multiplication."""
        self.touched = True
        self._changed_by = self._changed_by or function

    def refusal(self, multiplier: float, noted: bool, moment: object) -> str | None:
        """Why a step must not multiply the server's gradient by `multiplier`, as the end of a sentence. None: it may.

        `noted`: whether the stand-in's gradient still has these notes. `moment`: the present StepTracker.moment.
        """
        same = math.isclose(multiplier, 1.0, rel_tol=1e-6)
        if self._scaled_by is not None and (not same or self._understates):
            return f"was multiplied after {self._scaled_by} was taken of it"
        if same:
            return None
        if not noted:
            return "was replaced by another tensor"
        if self._changed_by is not None:
            return f"was changed by {self._changed_by}(){', as clip_grad_value_ does' * ('clamp' in self._changed_by)}"
        return None if self.moment == moment else "was multiplied before the last backward of the step"


class Gradient(torch.Tensor):
    """A scalar tensor that records in `notes` what is done with it."""

    notes: Notes

    @staticmethod
    def of(value: torch.Tensor, notes: Notes) -> Gradient:
        with _undisturbed():
            gradient = value.as_subclass(Gradient)
        gradient.notes = notes
        return gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        noted = [each.notes for each in _among((*args, *kwargs.values()))]
        name = getattr(func, "__name__", "")
        with _undisturbed():
            result = func(*args, **kwargs)
            for notes in noted:
                _note(notes, name, args, kwargs)
            # "__get__": the read of a property such as .data.
            if name in _SAME or name in _PRODUCTS or name == "__get__" or _is_in_place(name):
                return _marked(result, noted)
            return _plain(result)


# Within this context, torch's functions treat a Gradient like any tensor. torch 1.13 has the class under the second name.
_undisturbed: Any = getattr(torch._C, "DisableTorchFunctionSubclass", getattr(torch._C, "DisableTorchFunction", None))


def _among(values: Any) -> Iterator[Gradient]:
    """The gradients with notes among the values, and in lists and tuples among them."""
    for value in values:
        if isinstance(value, Gradient) and hasattr(value, "notes"):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _among(value)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i")) and name != "__index__"


def _note(notes: Notes, name: str, args: Any, kwargs: Any) -> None:
    """Records in `notes` what the function `name`, called with these arguments, did with the gradient."""
    if name in _NORMS:
        notes.norm_taken(_order(args, kwargs))
    elif name in _LARGEST:
        notes.norm_taken(math.inf)
    elif name in _MAGNITUDES or (name in ("pow", "__pow__", "float_power") and args[1:] != (2,)):
        notes.power_taken(name)
    elif name in _SCALINGS:
        notes.scaled()
    elif name in ("__set__", "__setitem__") or (_is_in_place(name) and name not in _NEUTRAL):
        notes.changed(name)
    elif kwargs.get("out") is not None and any(each.notes is notes for each in _among([kwargs["out"]])):
        notes.changed(name)


def _order(args: Any, kwargs: Any) -> float:
    """The order of the norm that a function of _NORMS computes with these arguments."""
    for name in ("ord", "p"):
        if name in kwargs:
            return _number(kwargs[name])
    return _number(args[1]) if len(args) > 1 else 2.0


def _number(order: Any) -> float:
    if order is None or order == "fro":
        return 2.0
    return math.nan if order == "nuc" else float(order)


def _marked(result: Any, noted: list[Notes]) -> Any:
    """The result of a function. If the function was called with one gradient and the result is a scalar, the result becomes a
    Gradient with the same notes. `noted`: the notes of the function's arguments."""
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or len(noted) != 1:
        return result
    if type(result) is Gradient and hasattr(result, "notes"):
        return result
    return Gradient.of(result, noted[0])


def _plain(result: Any) -> Any:
    """The result of any other function. A Gradient without notes becomes an ordinary tensor."""
    if type(result) is Gradient and not hasattr(result, "notes"):
        return result.as_subclass(torch.Tensor)
    return result


def _let_foreach_take_it() -> None:
    """Adds Gradient to the types that torch's foreach functions know. torch's clipping handles all gradients of a device at
    once only if it knows all their types."""
    known = getattr(getattr(torch.utils, "_foreach_utils", None), "_foreach_supported_types", None)
    if isinstance(known, list) and Gradient not in known:
        known.append(Gradient)


_let_foreach_take_it()


class StandIn(torch.nn.Parameter):
    """A scalar parameter whose gradient comes from a function. Each read of `grad` calls `fetch`. This function asks the server
    for a new gradient, but only if the open step has changed since the last time."""

    @staticmethod
    def on(device: Any, fetch: Callable[[torch.Tensor | None], torch.Tensor | None]) -> StandIn:
        """Makes a StandIn on a device. `fetch` is called with the present gradient, and returns it or a new one."""
        made = StandIn(torch.zeros((), device=device))
        made.fetch, made.held = fetch, None
        return made

    fetch: Any
    held: torch.Tensor | None  # the present gradient; reading this does not ask the server

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if getattr(self, "fetch", None) is None:  # a copy of the parameter
            return None
        self.held = self.fetch(self.held)
        return self.held

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if isinstance(value, Gradient) and value is not self.held and hasattr(value, "notes"):
            value.notes.scaled()  # a new tensor with notes is most likely a multiple of a gradient
        self.held = value

    @grad.deleter
    def grad(self) -> None:
        self.held = None
