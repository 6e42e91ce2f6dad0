# SPDX-License-Identifier: Apache-2.0
"""What HeadCalls needs to create and reset heads: initial values, shares, and what becomes of a head that exists already."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Literal

from lossd import errors, types
from lossd.descriptions import HeadSpec, TensorFile
from lossd.v1 import head_pb2, types_pb2

IfExists = Literal["error", "keep", "reset"]
ResetScope = Literal["optimizer", "all"]
_IF_EXISTS: Mapping[str, IfExists] = {"error": "error", "keep": "keep", "reset": "reset"}
_SCOPES: Mapping[str, head_pb2.ResetScope] = {
    "optimizer": head_pb2.RESET_SCOPE_OPTIMIZER, "all": head_pb2.RESET_SCOPE_ALL}

WAYS_OUT = ('; if_exists="keep" goes on with the head as it is, if_exists="reset" makes it as new, delete_head() removes it')


@dataclasses.dataclass(frozen=True)
class InitialValues:
    """The values of a new head, as create_head and reset_head take them."""

    seed: int
    zeros: bool
    tensor_file: TensorFile | None

    def put_into(self, request: head_pb2.CreateHeadRequest | head_pb2.ResetHeadRequest) -> None:
        if self.tensor_file is not None:
            request.tensor_file.CopyFrom(self.tensor_file.to_proto())
        elif self.zeros:
            request.zeros.SetInParent()
        else:
            request.kaiming_uniform.seed = self.seed

    def given(self) -> bool:
        return bool(self.seed or self.zeros or self.tensor_file is not None)


def chosen(if_exists: IfExists | None, exist_ok: bool | None) -> IfExists:
    """What to do with a head that exists. InvalidArgument if both are given, or for another word."""
    if exist_ok is None:
        choice: IfExists = types.enum_value("if_exists", _IF_EXISTS, "error" if if_exists is None else if_exists)
        return choice
    if if_exists is not None:
        raise errors.InvalidArgument(
            f"if_exists is {if_exists!r} and exist_ok is {exist_ok}; give if_exists alone (exist_ok=True is its \"keep\")")
    if exist_ok:
        warnings.warn('exist_ok=True is the earlier name of if_exists="keep", and goes away', DeprecationWarning,
                      stacklevel=3)
    return "keep" if exist_ok else "error"


def scope_number(scope: ResetScope, values: InitialValues) -> head_pb2.ResetScope:
    """InvalidArgument for another word, or if values are given that the scope does not take."""
    number: head_pb2.ResetScope = types.enum_value("scope", _SCOPES, scope)
    if number == head_pb2.RESET_SCOPE_OPTIMIZER and values.given():
        raise errors.InvalidArgument("scope is 'optimizer'; seed, zeros and tensor_file go with 'all'")
    return number


def check_same(has: HeadSpec, wanted: HeadSpec) -> None:
    """AlreadyExists, naming every field, unless what is wanted is what a head has. What is not said may be anything.

    Flags are always said; numbers and words unless they are left to the server (0, None).
    """
    pairs = {field.name: (getattr(has, field.name), getattr(wanted, field.name)) for field in dataclasses.fields(wanted)}
    different = {name: pair for name, pair in pairs.items()
                 if pair[0] != pair[1] and (isinstance(pair[1], bool) or pair[1])}
    if different:
        words = ", ".join(f"{name} {is_} instead of {wants}" for name, (is_, wants) in different.items())
        first = next(iter(different))
        raise errors.AlreadyExists(
            f'head "{wanted.name}" exists with {words}. Give what it has, or another name, or delete it first',
            types_pb2.ErrorDetail(field=f"spec.{first}", value=str(different[first][1])))


def checked_shares(shares: Sequence[int], field: str) -> Sequence[int]:
    """InvalidArgument, naming the entry, if one is no share."""
    for index, share in enumerate(shares):
        if not isinstance(share, Integral) or not 0 <= int(share) < 1 << 31:
            raise errors.InvalidArgument(f"{field}[{index}] must be a whole number in [0, 2^31), got {share!r}",
                                         types_pb2.ErrorDetail(field=f"{field}[{index}]", value=str(share)))
    return shares


def checked_replicas(replicas: int) -> int:
    """InvalidArgument if it is no number of replicas."""
    if not isinstance(replicas, Integral) or not 0 <= int(replicas) <= 1 << 16:
        raise errors.InvalidArgument(f"spec.replicas must be a whole number in [0, 65536], got {replicas!r}",
                                     types_pb2.ErrorDetail(field="spec.replicas", value=str(replicas)))
    return int(replicas)
