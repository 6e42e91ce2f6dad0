# SPDX-License-Identifier: Apache-2.0
"""lossd.torch.sequences against the loss functions of trl's trainers, and trl's DistillationTrainer with a loss on the server."""

import copy
from collections import defaultdict
from unittest.mock import MagicMock

import pytest
import torch
import trl
from datasets import Dataset
from test_frameworks import blocks_of
from tiny_models import make_tokenizer
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer

import lossd
import lossd.transformers
from lossd.torch import LossHead, sequences

D, V, B, T = 16, 70, 8, 13


def trainer(**options):
    """What a loss function of trl's takes for its trainer: one rank, that trains, with these options."""
    stand_in = MagicMock(**options)
    stand_in.model.training = True
    stand_in.aux_loss_enabled = False
    stand_in._metrics = {"train": defaultdict(list)}
    stand_in._total_train_tokens, stand_in._tp_size = 0, 1
    stand_in.accelerator.device, stand_in.accelerator.num_processes = torch.device("cpu"), 1
    for name in ("gather", "gather_for_metrics"):
        setattr(stand_in.accelerator, name, lambda value: value)
    stand_in.accelerator.reduce = lambda value, reduction: value
    return stand_in


class Rows:
    """Log-probabilities of tokens as a deferred head gives them, and what objectives compare them with."""

    def __init__(self, client, name, seed):
        generator = torch.Generator().manual_seed(seed % 2**31)
        self.head = LossHead(client, name, reduction="none")
        self.hidden = torch.randn(B, T, D, generator=generator, requires_grad=True)
        self.targets = torch.randint(0, V, (B, T), generator=generator)
        self.targets[torch.rand(B, T, generator=generator) < 0.3] = -100
        self.targets[:, 0] = 1
        self.mask = self.targets != -100
        self.logprobs = -self.head(self.hidden, self.targets)
        noise = torch.randn(B, T, generator=generator)
        self.old = torch.where(self.mask, self.logprobs.detach() + 0.05 * noise, torch.zeros(()))
        self.reference = torch.where(self.mask, self.logprobs.detach() + 0.3 * noise, torch.zeros(()))
        self.advantages = torch.randn(B, generator=generator)
        self.desirable = torch.arange(B) % 3 != 0

    def padded(self):
        """With a position in front that nothing is predicted for, as trl's batches have it."""
        mask = torch.nn.functional.pad(self.mask.long(), (1, 0))
        return {"input_ids": torch.ones_like(mask), "attention_mask": torch.ones_like(mask), "completion_mask": mask}

    def model(self, leaf, reference=False):
        """What trl asks a model for; the numbers that are for its log alone are 0."""
        answer = MagicMock(log_probs=self.reference if reference else leaf)
        answer.entropy = answer.mean_logits = torch.zeros(B, T)
        answer.is_top1 = torch.zeros(B, T, dtype=torch.bool)
        return lambda **_: answer


def gspo(rows, leaf):
    batch = {"prompt_ids": torch.ones(B, 1), "prompt_mask": torch.ones(B, 1), "completion_ids": torch.ones(B, T),
             "completion_mask": rows.mask.long(), "advantages": rows.advantages, "old_per_token_logps": rows.old}
    stand_in = trainer(importance_sampling_level="sequence", loss_type="grpo", beta=0.0, epsilon_low=0.02, epsilon_high=0.03,
                       top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
                       current_gradient_accumulation_steps=1)
    stand_in.args.delta = None
    stand_in._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros(B, T), None)
    theirs = trl.GRPOTrainer._compute_loss(stand_in, None, batch)
    return theirs, sequences.gspo(rows.logprobs, rows.old, rows.advantages, rows.mask, clip_low=0.02, clip_high=0.03)


def dpo(rows, leaf):
    chosen, rejected = sequences.sums(rows.reference, rows.mask).chunk(2)
    stand_in = trainer(ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl", loss_types=["sigmoid"],
                       loss_weights=[1.0], beta=0.3, use_weighting=False)
    batch = rows.padded() | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    theirs = trl.DPOTrainer._compute_loss(stand_in, rows.model(leaf), batch, False)
    return theirs, sequences.dpo(*sequences.sums(rows.logprobs, rows.mask).chunk(2), chosen, rejected, beta=0.3)


def simpo(rows, leaf):
    stand_in = trainer(alpha=0.0, beta=2.0, loss_type="simpo", simpo_gamma=0.7, label_smoothing=0.0)
    theirs = CPOTrainer.cpo_loss(stand_in, *sequences.means(leaf, rows.mask).chunk(2))[0].mean()
    return theirs, sequences.simpo(*sequences.means(rows.logprobs, rows.mask).chunk(2), beta=2.0, gamma=0.7)


def orpo(rows, leaf):
    """trl adds the likelihood of all chosen tokens, which is that of the sequences where they are as long as each other."""
    stand_in = trainer(beta=0.4)
    chosen, rejected = sequences.means(leaf, rows.mask).chunk(2)
    theirs = -chosen.mean() - ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)[0].mean()
    return theirs, sequences.orpo(*sequences.means(rows.logprobs, rows.mask).chunk(2), beta=0.4)


def kto(rows, leaf):
    divergence = torch.tensor(0.6)
    stand_in = trainer(precompute_ref_logps=True, calculate_KL=True, loss_type="kto", beta=0.2, desirable_weight=1.5,
                       undesirable_weight=0.8)
    reference = sequences.sums(rows.reference, rows.mask)
    stand_in._compute_kl_logps = lambda *_: torch.zeros(B)
    batch = rows.padded() | {"label": rows.desirable, "ref_logps": reference, "ref_KL_logps": -divergence.expand(B)}
    theirs = trl.KTOTrainer._compute_loss(stand_in, rows.model(leaf), batch, False)
    return theirs, sequences.kto(sequences.sums(rows.logprobs, rows.mask), reference, rows.desirable, divergence, beta=0.2,
                                 desirable_weight=1.5, undesirable_weight=0.8)


@pytest.mark.parametrize("objective", [gspo, dpo, simpo, orpo, kto])
def test_objectives_of_sequences(client, make_head, seed, objective):
    """trl's function of the same log-probabilities: the same loss, and the same gradient for each token."""
    rows = Rows(client, make_head(hidden_size=D, vocab_size=V), seed)
    leaf = torch.where(rows.mask, rows.logprobs.detach(), torch.zeros(())).requires_grad_(True)
    theirs, ours = objective(rows, leaf)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5, abs=1e-7)
    expected = torch.autograd.grad(theirs, leaf)[0]
    weight = torch.from_numpy(client.read_tensor(rows.head.head_name))
    ours.backward()
    # The gradient of each hidden state is that of its token's log-probability, times what the objective gives the token.
    hidden = rows.hidden.detach().requires_grad_(True)
    logprobs = torch.log_softmax(hidden @ weight.T, -1).gather(-1, rows.targets.clamp(min=0)[..., None])[..., 0]
    torch.autograd.backward(logprobs, expected * rows.mask)
    torch.testing.assert_close(rows.hidden.grad, hidden.grad, atol=1e-6, rtol=1e-4)


# What trl's trainer calls by a number from 0 to 1.
DIVERGENCES = {0.0: {"divergence": "forward_kl"}, 1.0: {"divergence": "reverse_kl"}, 0.3: {"divergence": "jensen_shannon", "beta": 0.3}}


@pytest.mark.parametrize("beta", DIVERGENCES)
def test_distillation_trainer(client, tmp_path, beta):
    """The page's subclass of trl's trainer, and trl's own."""
    block = next(each for each in blocks_of("distillation.md") if "class ServedDistillation" in each)
    names = {"__name__": "page", "torch": torch, "lossd": lossd}
    exec(compile(block.split("\n\n\nteacher = ")[0], "distillation.md", "exec"), names)
    torch.manual_seed(3)
    teacher, stock = names["llama"](48), names["llama"](32)
    with torch.no_grad():
        for model in (teacher, stock):  # further apart than new models are
            model.get_output_embeddings().weight *= 20
    client.create_head("teacher-of-trl", hidden_size=48, vocab_size=500, frozen=True)
    client.write_tensor("teacher-of-trl", "weight", teacher.get_output_embeddings().weight.detach().numpy())
    names["ServedDistillation"].from_teacher = lossd.Distillation("teacher-of-trl", temperature=1.3, **DIVERGENCES[beta])
    served = lossd.transformers.patch(copy.deepcopy(stock), client, "student-of-trl", compute_dtype="fp32")
    served.get_output_embeddings().loss_head.extras = ("entropy",)
    logs = []
    for model, kind in ((served, names["ServedDistillation"]), (stock, trl.DistillationTrainer)):
        arguments = trl.DistillationConfig(
            str(tmp_path), beta=beta, temperature=1.3, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            max_completion_length=8, learning_rate=5e-3, logging_steps=1, seed=3, use_cpu=True, bf16=False, report_to=[],
            gradient_checkpointing=False, save_strategy="no", disable_tqdm=True)
        one = kind(model, teacher, arguments, processing_class=make_tokenizer(),
                   train_dataset=Dataset.from_list([{"prompt": f"t{10 + i} t{11 + i}"} for i in range(16)]))
        if model is served:
            lossd.transformers.attach(one)
        one.train()
        logs.append([log for log in one.state.log_history if "loss" in log])
    for name in ("student-of-trl", "teacher-of-trl"):
        client.delete_head(name)
    assert len(logs[0]) == len(logs[1]) == 3 and logs[0][0]["loss"] > 0.01
    for got, expected in zip(*logs):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert got["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-3)
