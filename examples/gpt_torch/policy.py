# SPDX-License-Identifier: Apache-2.0
"""A toy of reinforcement learning with groups (as in GRPO): the gradient of each token is known only after its loss.

    lossd &
    python3 policy.py

The policy sees a number and writes a few; each is rewarded for being the one before plus three. Sampling needs the
head's weights and reads them from the server once a round, as a separate sampler would. Training sends hidden states
only: the server returns each token's log probability and entropy, the clipped objective is formed here, and backward()
brings its gradients to the server, which computes the logits again (LossHead with reduction "none").
"""

from __future__ import annotations

import argparse

import torch
from model import add_loss_arguments, loss_options
from torch import nn

import lossd
from lossd.torch import HeadOptimizer, LossHead

HEAD = "policy"


class Policy(nn.Module):
    """Hidden states for the next number, given the one before."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, hidden_size), nn.Tanh())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(tokens)


@torch.no_grad()
def sample(policy: Policy, weight: torch.Tensor, prompts: torch.Tensor, length: int) -> torch.Tensor:
    """[rows, 1 + length]: the prompts and what the policy writes."""
    tokens = prompts[:, None]
    for _ in range(length):
        logits = policy(tokens[:, -1]) @ weight.T
        tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
    return tokens


def advantages(tokens: torch.Tensor, vocab_size: int, group: int) -> tuple[torch.Tensor, float]:
    """Of each written token, within its group: rewards less their mean, over their spread. And the mean reward."""
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 3) % vocab_size).float()
    grouped = rewards.reshape(-1, group, rewards.shape[1])
    spread = grouped.std((1, 2), keepdim=True) + 1e-3
    return ((grouped - grouped.mean((1, 2), keepdim=True)) / spread).reshape(rewards.shape), float(rewards.mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", default="127.0.0.1:7070")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--vocab_size", type=int, default=24)
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--group", type=int, default=16, help="answers to the same prompt")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_loss_arguments(parser)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    vocab_size = arguments.vocab_size

    with lossd.Client(arguments.server) as client:
        if HEAD in [head.spec.name for head in client.list_heads()]:
            client.delete_head(HEAD)
        client.create_head(HEAD, hidden_size=arguments.hidden_size, vocab_size=vocab_size, seed=arguments.seed)
        policy = Policy(vocab_size, arguments.hidden_size).to(arguments.device)
        head = LossHead(client, HEAD, reduction="none", extras=("entropy",), **loss_options(arguments))
        optimizers = [torch.optim.AdamW(policy.parameters(), lr=3e-3),
                      HeadOptimizer(head, lr=3e-3, device=arguments.device)]
        for round_ in range(arguments.rounds):
            weight = torch.from_numpy(client.read_tensor(HEAD)).to(arguments.device)
            prompts = torch.arange(vocab_size, device=arguments.device).repeat_interleave(arguments.group)
            tokens = sample(policy, weight, prompts, length=4)
            advantage, reward = advantages(tokens, vocab_size, arguments.group)
            with torch.no_grad():
                old_logprob = -head(policy(tokens[:, :-1]), tokens[:, 1:])[0]
            for _ in range(2):
                loss, extras = head(policy(tokens[:, :-1]), tokens[:, 1:])
                ratio = torch.exp(-loss - old_logprob)  # the loss of a row is -log p
                objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                (-objective.mean() - 0.003 * extras.entropy.mean()).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if round_ % 15 == 0 or round_ + 1 == arguments.rounds:
                print(f"round {round_:4}  reward {reward:.3f}", flush=True)
    if reward < 0.5:
        raise SystemExit("the policy did not learn")


if __name__ == "__main__":
    main()
