# SPDX-License-Identifier: Apache-2.0
"""StandIn: a scalar parameter that stands for the server's parameters in a trainer. Its gradient is the 2-norm of their
gradient.

Whatever multiplies this gradient in the trainer multiplies the server's gradient at the step. That is right for clipping by a
global 2-norm, for GradScaler, and for anything else that multiplies all gradients by one number, unless the number comes from
another norm. The value alone does not tell an infinity norm or a 1-norm from a 2-norm, so the gradient records what is done
with it (Notes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

# In-place functions that multiply by a number. Other functions that end in "_", except _NEUTRAL, change a gradient in another
# way.
_SCALINGS = frozenset((
    "mul_", "div_", "multiply_", "divide_", "true_divide_", "__imul__", "__itruediv__", "_foreach_mul_", "_foreach_div_",
    "_amp_non_finite_check_and_unscale_", "_amp_foreach_non_finite_check_and_unscale_"))
_NEUTRAL = frozenset(("requires_grad_", "detach_", "retain_grad", "squeeze_", "unsqueeze_"))
# Functions whose results are multiples of the gradient; and functions whose result is the gradient itself, which is not
# negative.
_PRODUCTS = frozenset((
    "mul", "div", "multiply", "divide", "true_divide", "__mul__", "__rmul__", "__truediv__"))
_SAME = frozenset((
    "detach", "clone", "view", "view_as", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous", "to", "float",
    "double", "cpu", "cuda", "to_dense", "coalesce", "expand_as", "abs", "absolute"))
_NORMS = frozenset(("norm", "vector_norm", "linalg_vector_norm", "_foreach_norm", "frobenius_norm", "norm_except_dim"))
# The functions of which norms of other orders consist.
_LARGEST = frozenset(("max", "amax", "_foreach_max"))
_MAGNITUDES = frozenset(("abs", "absolute", "_foreach_abs"))


class Notes:
    """What was done with one gradient. Copies of the gradient share the object."""

    def __init__(self, loaded: float, moment: object) -> None:
        self.loaded = loaded  # the value that was loaded
        self.moment = moment  # identifies the gradient whose norm it is; differs if something was accumulated since
        self._norm: str | None = None  # the last norm that was taken of it, if that was not the 2-norm
        self._understates = False  # for the server's gradient, that norm may be larger than the 2-norm
        self._scaled_by: str | None = None  # the first such norm that was taken before it was multiplied
        self._changed_by: str | None = None  # the first function that changed it other than by a multiplication
        self.touched = False  # its value may differ from `loaded`

    def norm_taken(self, order: float) -> None:
        self._norm = None if order == 2 else f"a norm with norm_type={order:g}"
        self._understates = order < 2

    def power_taken(self, function: str) -> None:
        """Notes a function that is a part of some other norm; it is not known of which norm."""
        self._norm, self._understates = f"{function}()", True

    def scaled(self) -> None:
        self.touched = True
        if self._norm is not None and self._scaled_by is None:
            self._scaled_by = self._norm

    def changed(self, function: str) -> None:
        self.touched = True
        self._changed_by = self._changed_by or function

    def refusal(self, multiplier: float, noted: bool, moment: object) -> str | None:
        """What is wrong with a step that multiplies the gradient by `multiplier`. None: nothing.

        `noted`: whether the stand-in's gradient still has these notes. `moment`: the current one.
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
            if name in _SAME or name in _PRODUCTS or name == "__get__" or _is_in_place(name):
                return _marked(result, noted)
            return _plain(result)


# Within it, functions treat the subclass like any tensor. torch 1.13 has the class under the second name.
_undisturbed: Any = getattr(torch._C, "DisableTorchFunctionSubclass", getattr(torch._C, "DisableTorchFunction", None))


def _among(values: Any) -> Iterator[Gradient]:
    for value in values:
        if isinstance(value, Gradient) and hasattr(value, "notes"):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _among(value)


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and (not name.endswith("__") or name.startswith("__i")) and name != "__index__"


def _note(notes: Notes, name: str, args: Any, kwargs: Any) -> None:
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
    for name in ("ord", "p"):
        if name in kwargs:
            return _number(kwargs[name])
    return _number(args[1]) if len(args) > 1 else 2.0


def _number(order: Any) -> float:
    if order is None or order == "fro":
        return 2.0
    return math.nan if order == "nuc" else float(order)


def _marked(result: Any, noted: list[Notes]) -> Any:
    """If a result is a multiple of a gradient, it shares the gradient's notes."""
    if not isinstance(result, torch.Tensor) or result.numel() != 1 or len(noted) != 1:
        return result
    if type(result) is Gradient and hasattr(result, "notes"):
        return result
    return Gradient.of(result, noted[0])


def _plain(result: Any) -> Any:
    if type(result) is Gradient and not hasattr(result, "notes"):
        return result.as_subclass(torch.Tensor)
    return result


def _let_foreach_take_it() -> None:
    """torch's clipping handles all gradients of a device at once if it knows the types of all. So this adds Gradient to the
    known types."""
    known = getattr(getattr(torch.utils, "_foreach_utils", None), "_foreach_supported_types", None)
    if isinstance(known, list) and Gradient not in known:
        known.append(Gradient)


_let_foreach_take_it()


class StandIn(torch.nn.Parameter):
    """A scalar whose gradient is fetched from the server when it is read, if the open step has more gradients than at the
    last time."""

    @staticmethod
    def on(device: Any, fetch: Callable[[torch.Tensor | None], torch.Tensor | None]) -> StandIn:
        """`fetch` gets the present gradient, and returns it or a new one."""
        made = StandIn(torch.zeros((), device=device))
        made.fetch, made.held = fetch, None
        return made

    fetch: Any
    held: torch.Tensor | None  # the present gradient, without asking the server

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        if getattr(self, "fetch", None) is None:  # a copy of the parameter
            return None
        self.held = self.fetch(self.held)
        return self.held

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if isinstance(value, Gradient) and value is not self.held and hasattr(value, "notes"):
            value.notes.scaled()  # most likely a product
        self.held = value

    @grad.deleter
    def grad(self) -> None:
        self.held = None
