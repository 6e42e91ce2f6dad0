// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/trainer.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "proto/tensorfile/safetensors.h"

namespace lossd::ngram_lm {

// ---- TrainerState ----

namespace {

constexpr char kParameters[] = "parameters";
constexpr char kMoment1[] = "adam.moment1";
constexpr char kMoment2[] = "adam.moment2";

absl::Span<const uint8_t> Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

absl::Status WriteFile(const TrainerState& state, const std::string& path) {
  const std::pair<const char*, const std::vector<float>*> tensors[] = {
      {kParameters, &state.parameters}, {kMoment1, &state.adam.moment1}, {kMoment2, &state.adam.moment2}};
  std::vector<formats::SafetensorsSpec> specs;
  for (const auto& [name, values] : tensors) {
    specs.push_back({name, formats::DType::kFloat32, {static_cast<int64_t>(values->size())}});
  }
  auto file = formats::CreateSafetensors(path, specs,
                                         {{"seed", absl::StrCat(state.seed)},
                                          {"tokens_per_step", absl::StrCat(state.tokens_per_step)},
                                          {"train_tokens", absl::StrCat(state.train_tokens)},
                                          {"steps", absl::StrCat(state.adam.steps)},
                                          {"checkpoint", state.checkpoint}});
  if (!file.ok()) return file.status();
  for (const auto& [name, values] : tensors) {
    if (absl::Status status = (*file)->Append(Bytes(*values)); !status.ok()) return status;
  }
  return (*file)->Finish();
}

absl::StatusOr<std::vector<float>> ReadTensor(const formats::SafetensorsReader& file, const char* name) {
  const auto tensor = file.Find(name);
  if (!tensor.ok()) return tensor.status();
  std::vector<float> values(static_cast<size_t>((*tensor)->rows()));
  const absl::Status read =
      file.ReadBytes(**tensor, 0, {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)});
  if (!read.ok()) return read;
  return values;
}

template <typename T>
absl::Status ReadNumber(const formats::SafetensorsReader& file, const char* name, T* out) {
  const auto entry = file.metadata().find(name);
  if (entry != file.metadata().end() && absl::SimpleAtoi(entry->second, out)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(file.name(), ": no number \"", name, "\" in the metadata"));
}

}  // namespace

absl::Status SaveState(const TrainerState& state, const std::string& path) {
  const std::string temporary = path + ".tmp";
  std::error_code error;
  std::filesystem::remove(temporary, error);  // a leftover
  if (absl::Status status = WriteFile(state, temporary); !status.ok()) return status;
  std::filesystem::rename(temporary, path, error);
  if (error) return formats::FileError(path, "rename to", error.value());
  const std::string folder = std::filesystem::path(path).parent_path();
  return formats::SyncFolder(folder.empty() ? "." : folder);
}

absl::StatusOr<TrainerState> LoadState(const std::string& path) {
  const auto file = formats::SafetensorsReader::Open(path);
  if (!file.ok()) return file.status();
  TrainerState state;
  absl::Status numbers = ReadNumber(**file, "seed", &state.seed);
  numbers.Update(ReadNumber(**file, "tokens_per_step", &state.tokens_per_step));
  numbers.Update(ReadNumber(**file, "train_tokens", &state.train_tokens));
  numbers.Update(ReadNumber(**file, "steps", &state.adam.steps));
  if (!numbers.ok()) return numbers;
  for (const auto& [name, values] :
       {std::pair(kParameters, &state.parameters), std::pair(kMoment1, &state.adam.moment1),
        std::pair(kMoment2, &state.adam.moment2)}) {
    absl::StatusOr<std::vector<float>> read = ReadTensor(**file, name);
    if (!read.ok()) return read.status();
    *values = *std::move(read);
  }
  const auto checkpoint = (*file)->metadata().find("checkpoint");
  if (checkpoint != (*file)->metadata().end()) state.checkpoint = checkpoint->second;
  return state;
}

// ---- Trainer ----

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
