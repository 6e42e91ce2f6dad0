// SPDX-License-Identifier: Apache-2.0
// The training loop with every call to the server (trainer.h).
#include "examples/ngram_lm/trainer.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numbers>
#include <random>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "proto/tensorfile/safetensors.h"

namespace lossd::ngram_lm {

double RateMultiplier(double done) {
  constexpr double kWarmUp = 0.03, kLast = 0.05;
  if (done < kWarmUp) return (done + 0.003) / (kWarmUp + 0.003);
  const double cosine = 0.5 + 0.5 * std::cos(std::numbers::pi * (done - kWarmUp) / (1 - kWarmUp));
  return kLast + (1 - kLast) * cosine;
}

bool ServerWasLost(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsAborted(status) || absl::IsNotFound(status);
}

// ---- The head ----

Trainer::Trainer(const TrainerOptions& options, const Text* text, std::unique_ptr<client::Client> client)
    : options_(options),
      text_(text),
      client_(std::move(client)),
      stage_one_(options.shape, /*seed=*/1),
      adam_(stage_one_.parameters().size()) {}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Open(const TrainerOptions& options, const Text* text) {
  absl::StatusOr<std::unique_ptr<client::Client>> client =
      client::Client::Connect({.target = options.server});
  if (!client.ok()) return client.status();
  std::unique_ptr<Trainer> trainer(new Trainer(options, text, *std::move(client)));
  const bool resumes = !options.state_file.empty() && std::filesystem::exists(options.state_file);
  absl::Status status = resumes ? trainer->GoBack() : trainer->CreateHead();
  if (!status.ok()) return status;
  return trainer;
}

absl::Status Trainer::CreateHead() {
  v1::CreateHeadRequest request;
  v1::HeadSpec* spec = request.mutable_spec();
  spec->set_name(options_.head);
  spec->set_hidden_size(options_.shape.output);
  spec->set_vocab_size(text_->vocab_size);
  spec->set_bias(true);
  spec->set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  request.mutable_kaiming_uniform()->set_seed(1);
  if (absl::Status status = client_->CreateHead(request).status(); !status.ok()) return status;
  return options_.state_file.empty() ? absl::OkStatus() : Save();
}

// ---- A step ----

// The rows of a microbatch depend only on the step and the index of the microbatch, so that a resumed
// training draws the same rows.
void Trainer::Send(int64_t index, Slot* slot) {
  std::mt19937_64 random(static_cast<uint64_t>(steps() * options_.microbatches + index));
  std::uniform_int_distribution<int64_t> position(options_.shape.context,
                                                  static_cast<int64_t>(text_->train.size()) - 1);
  std::vector<int64_t> positions(options_.microbatch_rows);
  for (int64_t& p : positions) p = position(random);
  slot->activations = stage_one_.Forward(text_->train, positions);
  slot->grad_hidden.resize(slot->activations.output.size());

  client::Microbatch microbatch;
  microbatch.head = options_.head;
  microbatch.step = steps();
  microbatch.id = index;
  microbatch.hidden_size = options_.shape.output;
  microbatch.hidden_dtype = v1::DTYPE_FP32;
  microbatch.hidden = slot->activations.output.data();
  microbatch.targets = slot->activations.targets;
  client::LossOutputs outputs;
  outputs.grad_hidden = slot->grad_hidden.data();
  client::ComputeOptions compute;
  compute.normalizer = static_cast<double>(tokens_per_step());
  compute.accumulate_gradients = true;
  compute.streams = 1;
  slot->loss = client_->ComputeLossAsync(microbatch, outputs, compute);
}

// Waits for the gradients of a microbatch and runs stage one backward. Returns the sum of the losses.
absl::StatusOr<double> Trainer::Receive(Slot* slot) {
  const absl::StatusOr<client::LossResult> result = slot->loss.Wait();
  if (!result.ok()) return result.status();
  stage_one_.Backward(slot->activations, slot->grad_hidden);
  return result->loss_sum;
}

// Applies the step to the head. The server has counted each row once, even if connections broke. Because the
// request names the expected microbatches, the server refuses a step in which one is missing.
absl::Status Trainer::ApplyStep(double learning_rate) {
  v1::ApplyStepRequest request;
  request.set_head(options_.head);
  request.set_step(steps());
  v1::AdamW* adamw = request.mutable_optimizer()->mutable_adamw();
  adamw->set_learning_rate(learning_rate);
  adamw->set_beta2(0.99);
  adamw->set_weight_decay(0.01);
  for (int64_t id = 0; id < options_.microbatches; ++id) request.add_expected_microbatches(id);
  return client_->ApplyStep(request).status();
}

absl::StatusOr<double> Trainer::Step(double rate_multiplier) {
  std::vector<Slot> slots(options_.microbatches);
  stage_one_.ZeroGradients();
  double loss = 0;
  // While the server computes a microbatch, this thread runs stage one forward for the next microbatch and
  // backward for the one before.
  for (int64_t i = 0; i <= options_.microbatches; ++i) {
    if (i < options_.microbatches) Send(i, &slots[i]);
    if (i == 0) continue;
    const absl::StatusOr<double> sum = Receive(&slots[i - 1]);
    if (!sum.ok()) return sum.status();
    loss += *sum;
  }
  absl::Status applied = ApplyStep(rate_multiplier * options_.head_learning_rate);
  if (!applied.ok()) return applied;
  adam_.Step(static_cast<float>(rate_multiplier) * options_.learning_rate, stage_one_.gradients(),
             stage_one_.parameters());
  return loss / static_cast<double>(tokens_per_step());
}

absl::StatusOr<double> Trainer::Evaluate(int64_t rows) {
  constexpr int64_t kMicrobatchRows = 1024;
  const int64_t positions = static_cast<int64_t>(text_->held_out.size()) - options_.shape.context;
  rows = std::min(rows, positions);
  double loss = 0;
  for (int64_t begin = 0; begin < rows; begin += kMicrobatchRows) {
    std::vector<int64_t> chosen;
    for (int64_t i = begin; i < std::min(begin + kMicrobatchRows, rows); ++i)
      chosen.push_back(options_.shape.context + i * positions / rows);
    const Activations activations = stage_one_.Forward(text_->held_out, chosen);
    client::Microbatch microbatch;
    microbatch.head = options_.head;
    microbatch.hidden_size = options_.shape.output;
    microbatch.hidden_dtype = v1::DTYPE_FP32;
    microbatch.hidden = activations.output.data();
    microbatch.targets = activations.targets;
    const absl::StatusOr<client::LossResult> result = client_->ComputeLoss(microbatch, {});
    if (!result.ok()) return result.status();
    loss += result->loss_sum;
  }
  return loss / static_cast<double>(rows);
}

// ---- Saving and going back ----

namespace {

struct NamedTensor {
  const char* name;
  absl::Span<float> values;
};

std::vector<NamedTensor> TensorsOf(StageOne& stage_one, Adam& adam) {
  return {{"parameters", stage_one.parameters()},
          {"adam.moment1", absl::MakeSpan(adam.moment1)},
          {"adam.moment2", absl::MakeSpan(adam.moment2)}};
}

absl::Span<uint8_t> Bytes(absl::Span<float> values) {
  return {reinterpret_cast<uint8_t*>(values.data()), values.size() * sizeof(float)};
}

}  // namespace

std::string Trainer::Identity() const {
  return absl::StrCat(text_->train.size(), " tokens, ", tokens_per_step(), " a step, ", adam_.moment1.size(),
                      " parameters");
}

// Saves the head on the server first, so that the checkpoint exists when the state file names it.
absl::Status Trainer::Save() {
  absl::StatusOr<v1::SaveCheckpointResponse> saved = client_->SaveCheckpoint(options_.head);
  // The server names the checkpoint after the step. The name is taken if the training went back and reaches a
  // saved step again.
  for (int i = 2; absl::IsAlreadyExists(saved.status()) && i < 100; ++i)
    saved = client_->SaveCheckpoint(options_.head, absl::StrCat("step-", steps(), "-", i));
  if (!saved.ok()) return saved.status();
  return WriteState(saved->checkpoint());
}

// Writes a temporary file and renames it, so that the state file holds either the new state or the old one,
// even after a crash.
absl::Status Trainer::WriteState(const std::string& checkpoint) {
  const std::string temporary = options_.state_file + ".tmp";
  std::error_code error;
  std::filesystem::remove(temporary, error);  // left over from an earlier attempt
  const std::vector<NamedTensor> tensors = TensorsOf(stage_one_, adam_);
  std::vector<formats::SafetensorsSpec> specs;
  for (const NamedTensor& tensor : tensors)
    specs.push_back({tensor.name, formats::DType::kFloat32, {static_cast<int64_t>(tensor.values.size())}});
  const std::map<std::string, std::string> metadata = {
      {"training", Identity()}, {"steps", absl::StrCat(steps())}, {"checkpoint", checkpoint}};
  const auto file = formats::CreateSafetensors(temporary, specs, metadata);
  if (!file.ok()) return file.status();
  for (const NamedTensor& tensor : tensors) {
    if (absl::Status status = (*file)->Append(Bytes(tensor.values)); !status.ok()) return status;
  }
  if (absl::Status status = (*file)->Finish(); !status.ok()) return status;
  std::filesystem::rename(temporary, options_.state_file, error);
  if (error) return formats::FileError(options_.state_file, "rename to", error.value());
  const std::string folder = std::filesystem::path(options_.state_file).parent_path();
  return formats::SyncFolder(folder.empty() ? "." : folder);
}

absl::StatusOr<std::string> Trainer::ReadState() {
  const auto file = formats::SafetensorsReader::Open(options_.state_file);
  if (!file.ok()) return file.status();
  std::map<std::string, std::string> metadata = (*file)->metadata();
  int64_t steps = 0;
  if (metadata["training"] != Identity() || !absl::SimpleAtoi(metadata["steps"], &steps)) {
    return absl::InvalidArgumentError(absl::StrCat(options_.state_file, " is the state of a training with ",
                                                   metadata["training"], "; this one has ", Identity()));
  }
  for (const NamedTensor& tensor : TensorsOf(stage_one_, adam_)) {
    const auto found = (*file)->Find(tensor.name);
    if (!found.ok()) return found.status();
    if (absl::Status read = (*file)->ReadBytes(**found, 0, Bytes(tensor.values)); !read.ok()) return read;
  }
  adam_.steps = steps;
  return metadata["checkpoint"];
}

absl::Status Trainer::GoBack(absl::Duration patience) {
  const absl::StatusOr<std::string> checkpoint = ReadState();
  if (!checkpoint.ok()) return checkpoint.status();
  const absl::Time deadline = clocks::SteadyNow() + patience;
  while (true) {
    const absl::StatusOr<v1::HeadDescription> head = client_->LoadCheckpoint(*checkpoint, options_.head);
    if (head.ok() && head->state().step() != static_cast<uint64_t>(steps())) {
      return absl::FailedPreconditionError(absl::StrCat("checkpoint ", *checkpoint, " is of step ",
                                                        head->state().step(), ", the state of ", steps()));
    }
    if (!absl::IsUnavailable(head.status()) || clocks::SteadyNow() >= deadline) return head.status();
    absl::SleepFor(absl::Milliseconds(200));
  }
}

}  // namespace lossd::ngram_lm
