// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/trainer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace lossd::ngram_lm {
namespace {

constexpr int64_t kEvaluationRows = 1024;  // a microbatch

template <typename T>
absl::Status CheckSame(const char* what, T saved, T own) {
  if (saved == own) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the saved training has ", saved, " ", what, ", this one ", own));
}

}  // namespace

Trainer::Trainer(const TrainerOptions& options, std::vector<int32_t> train, int32_t padding, StageOne* model,
                 LossHead* head)
    : options_(options),
      train_(std::move(train)),
      padding_(padding),
      model_(model),
      head_(head),
      adam_(model->parameters().size(), Adam::Options{}),
      order_(static_cast<int64_t>(train_.size()), options.seed),
      slots_(options.microbatches) {}

Trainer::~Trainer() {
  for (Slot& slot : slots_) slot.ticket = nullptr;  // before the buffers the request uses
}

void Trainer::Send(int64_t index) {
  Slot& slot = slots_[index];
  GatherRows(train_, order_.Next(options_.microbatch_rows), model_->shape().context, padding_,
             &slot.activations.contexts, &slot.targets);
  model_->Forward(&slot.activations);
  slot.grad_hidden.resize(slot.activations.output.size());
  LossRequest request;
  request.step = head_->step();
  request.microbatch = index;
  request.hidden = slot.activations.output;
  request.targets = slot.targets;
  request.normalizer = static_cast<double>(tokens_per_step());
  request.grad_hidden = absl::MakeSpan(slot.grad_hidden);
  slot.ticket = head_->Start(request);
}

absl::StatusOr<double> Trainer::Receive(int64_t index) {
  Slot& slot = slots_[index];
  const absl::StatusOr<LossSums> sums = slot.ticket();
  slot.ticket = nullptr;
  if (!sums.ok()) return sums.status();
  model_->Backward(slot.activations, slot.grad_hidden);
  return sums->loss;
}

absl::StatusOr<double> Trainer::Step(float learning_rate, double head_learning_rate) {
  model_->ZeroGradients();
  double loss = 0;
  for (int64_t i = 0; i < options_.microbatches + options_.in_flight; ++i) {
    if (i < options_.microbatches) Send(i);
    const int64_t oldest = i + 1 - options_.in_flight;
    if (oldest < 0 || oldest >= options_.microbatches) continue;
    const absl::StatusOr<double> sum = Receive(oldest);
    if (!sum.ok()) return sum.status();
    loss += *sum;
  }
  const absl::Status applied = head_->ApplyStep(options_.microbatches, head_learning_rate);
  if (!applied.ok()) return applied;
  adam_.Step(learning_rate, model_->gradients(), model_->parameters());
  return loss / static_cast<double>(tokens_per_step());
}

TrainerState Trainer::State() const {
  TrainerState state;
  state.seed = options_.seed;
  state.tokens_per_step = tokens_per_step();
  state.train_tokens = static_cast<int64_t>(train_.size());
  state.parameters.assign(model_->parameters().begin(), model_->parameters().end());
  state.adam = adam_.state();
  return state;
}

absl::Status Trainer::Restore(const TrainerState& state) {
  absl::Status same = CheckSame("as seed", state.seed, options_.seed);
  same.Update(CheckSame("tokens a step", state.tokens_per_step, tokens_per_step()));
  same.Update(CheckSame("tokens", state.train_tokens, static_cast<int64_t>(train_.size())));
  for (const auto* values : {&state.parameters, &state.adam.moment1, &state.adam.moment2}) {
    same.Update(CheckSame("parameters", values->size(), model_->parameters().size()));
  }
  if (!same.ok()) return same;
  for (Slot& slot : slots_) slot.ticket = nullptr;
  std::copy(state.parameters.begin(), state.parameters.end(), model_->parameters().begin());
  adam_.Restore(state.adam);
  order_ = Shuffler(state.train_tokens, options_.seed);
  order_.Skip(steps() * tokens_per_step());
  return absl::OkStatus();
}

absl::StatusOr<double> Trainer::Evaluate(absl::Span<const int32_t> tokens, int64_t max_tokens) {
  const std::vector<int64_t> positions = EvenlySpaced(static_cast<int64_t>(tokens.size()), max_tokens);
  LossSums total;
  Slot slot;
  for (size_t begin = 0; begin < positions.size(); begin += kEvaluationRows) {
    const auto rows = absl::MakeConstSpan(positions).subspan(begin, kEvaluationRows);
    GatherRows(tokens, rows, model_->shape().context, padding_, &slot.activations.contexts, &slot.targets);
    model_->Forward(&slot.activations);
    LossRequest request;
    request.hidden = slot.activations.output;
    request.targets = slot.targets;
    const absl::StatusOr<LossSums> sums = head_->Start(request)();
    if (!sums.ok()) return sums.status();
    total.loss += sums->loss;
    total.rows += sums->rows;
  }
  return total.loss / static_cast<double>(total.rows);
}

absl::Status Trainer::Continue(int64_t count, std::vector<std::vector<int32_t>>* sequences) {
  std::vector<int32_t> next(sequences->size());
  const std::vector<int32_t> targets(sequences->size(), 0);  // only the argmax is of interest
  for (int64_t i = 0; i < count; ++i) {
    Activations activations;
    for (const std::vector<int32_t>& sequence : *sequences) {
      const auto length = static_cast<int64_t>(sequence.size());
      for (int64_t t = length - model_->shape().context; t < length; ++t) {
        activations.contexts.push_back(t < 0 ? padding_ : sequence[t]);
      }
    }
    model_->Forward(&activations);
    LossRequest request;
    request.hidden = activations.output;
    request.targets = targets;
    request.argmax = absl::MakeSpan(next);
    const absl::StatusOr<LossSums> sums = head_->Start(request)();
    if (!sums.ok()) return sums.status();
    for (size_t s = 0; s < sequences->size(); ++s) (*sequences)[s].push_back(next[s]);
  }
  return absl::OkStatus();
}

}  // namespace lossd::ngram_lm
