# SPDX-License-Identifier: Apache-2.0
"""Client of lossd, a server that owns the loss head of a language model.

lossd.Client speaks the protocol with NumPy arrays. lossd.torch, which must be imported separately, has the PyTorch module.
"""

from lossd._embedded import EmbeddedClient, embedded
from lossd._loss_call import PendingLoss, PendingRows
from lossd._native import VERSION as __version__
from lossd.client import Client
from lossd.errors import (
    Aborted, AlreadyExists, Cancelled, ClientClosed, DataLoss, DeadlineExceeded, FailedPrecondition, ForkedClient, Internal,
    InvalidArgument, LossdError, NonFinite, NotFound, PermissionDenied, ResourceExhausted, Restarted, StepDiscarded,
    Unauthenticated, Unavailable, Unimplemented)
from lossd.types import (
    SGD, AdamW, Depth, DepthResult, Distillation, EmbedResult, LossOptions, LossResult, Objective, ObjectiveSums, RetryOptions,
    TensorFile)
from lossd.v1.descriptions import (
    AddedGradient, CheckpointInfo, Choice, HeadDescription, HeadDevice, HeadHistory, HeadSpec, HeadState, MemoryUsage, Paging,
    PeerDescription, RankDescription, RowRange, SavedCheckpoint, SaveProgress, ServerDescription, SliceLimits, StepResult,
    StreamDescription, StreamList)

__all__ = [
    "Aborted", "AdamW", "AddedGradient", "AlreadyExists", "Cancelled", "CheckpointInfo", "Choice", "Client", "ClientClosed",
    "DataLoss", "DeadlineExceeded", "Depth", "DepthResult", "Distillation", "EmbedResult", "EmbeddedClient", "FailedPrecondition",
    "ForkedClient", "HeadDescription", "HeadDevice", "HeadHistory", "HeadSpec", "HeadState", "Internal", "InvalidArgument",
    "LossOptions", "LossResult", "LossdError", "MemoryUsage", "NonFinite", "NotFound", "Objective", "ObjectiveSums", "Paging",
    "PeerDescription", "PendingLoss", "PendingRows", "PermissionDenied", "RankDescription", "ResourceExhausted", "Restarted",
    "RetryOptions", "RowRange", "SGD", "SaveProgress", "SavedCheckpoint", "ServerDescription", "SliceLimits", "StepDiscarded",
    "StepResult", "StreamDescription", "StreamList", "TensorFile", "Unauthenticated", "Unavailable", "Unimplemented", "__version__",
    "embedded"]
