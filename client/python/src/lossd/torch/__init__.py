# SPDX-License-Identifier: Apache-2.0
"""lossd for PyTorch: a loss head as a module, and the optimizer that steps it. Needs torch 1.13 or later."""

from lossd.torch._balance import Balance, balance
from lossd.torch._colocate import colocate
from lossd.torch._depths import DepthLosses
from lossd.torch._job import LossExtras
from lossd.torch.embedding import ServedEmbedding
from lossd.torch.head import LossHead, PendingHeadLoss
from lossd.torch.optimizer import HeadOptimizer
from lossd.torch.pipelining import PipelineLoss
from lossd.torch.tied import TiedEmbedding

__all__ = ["Balance", "DepthLosses", "HeadOptimizer", "LossExtras", "LossHead", "PendingHeadLoss", "PipelineLoss", "ServedEmbedding",
           "TiedEmbedding", "balance", "colocate"]
