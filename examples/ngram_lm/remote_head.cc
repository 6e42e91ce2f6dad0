// SPDX-License-Identifier: Apache-2.0
#include "examples/ngram_lm/remote_head.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"

namespace lossd::ngram_lm {

absl::StatusOr<std::unique_ptr<client::Client>> RemoteHead::Connect(const Options& options) {
  return client::Client::Connect({.target = options.target});
}

absl::StatusOr<std::unique_ptr<RemoteHead>> RemoteHead::Create(const Options& options) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(options);
  if (!client.ok()) return client.status();
  v1::CreateHeadRequest request;
  v1::HeadSpec* spec = request.mutable_spec();
  spec->set_name(options.name);
  spec->set_hidden_size(options.hidden_size);
  spec->set_vocab_size(options.vocab_size);
  spec->set_bias(true);
  spec->set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  request.mutable_kaiming_uniform()->set_seed(options.seed);
  absl::StatusOr<v1::HeadDescription> description = (*client)->CreateHead(request);
  if (!description.ok()) return description.status();
  return std::unique_ptr<RemoteHead>(new RemoteHead(options, *std::move(client), *std::move(description)));
}

absl::StatusOr<std::unique_ptr<RemoteHead>> RemoteHead::Restore(const Options& options,
                                                                const std::string& checkpoint) {
  absl::StatusOr<std::unique_ptr<client::Client>> client = Connect(options);
  if (!client.ok()) return client.status();
  std::unique_ptr<RemoteHead> head(new RemoteHead(options, *std::move(client), {}));
  if (absl::Status status = head->Load(checkpoint); !status.ok()) return status;
  return head;
}

absl::Status RemoteHead::Load(const std::string& checkpoint) {
  absl::StatusOr<v1::HeadDescription> description = client_->LoadCheckpoint(checkpoint, options_.name);
  if (!description.ok()) return description.status();
  const v1::HeadSpec& spec = description->spec();
  if (spec.hidden_size() != static_cast<uint64_t>(options_.hidden_size) ||
      spec.vocab_size() != static_cast<uint64_t>(options_.vocab_size)) {
    return absl::InvalidArgumentError(absl::StrCat("checkpoint ", checkpoint, " is of a head [",
                                                   spec.vocab_size(), ", ", spec.hidden_size(), "], not [",
                                                   options_.vocab_size, ", ", options_.hidden_size, "]"));
  }
  description_ = *std::move(description);
  step_ = description_.state().step();
  return absl::OkStatus();
}

absl::StatusOr<std::string> RemoteHead::Save() {
  // The name that the server gives may be taken by a checkpoint of a history that ended: a step trained
  // again.
  constexpr int kMostNames = 100;
  std::string name;
  for (int i = 2; i <= kMostNames; ++i) {
    const absl::StatusOr<v1::SaveCheckpointResponse> saved = client_->SaveCheckpoint(options_.name, name);
    if (saved.ok()) return saved->checkpoint();
    if (!absl::IsAlreadyExists(saved.status())) return saved.status();
    name = absl::StrCat("step-", step_, "-", i);
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("there are ", kMostNames, " checkpoints of step ", step_, " already"));
}

absl::Status RemoteHead::GoBack(const std::string& checkpoint, absl::Duration patience) {
  const absl::Time deadline = clocks::SteadyNow() + patience;
  while (true) {
    absl::Status status = Load(checkpoint);
    if (!absl::IsUnavailable(status) || clocks::SteadyNow() >= deadline) return status;
    absl::SleepFor(absl::Milliseconds(200));
  }
}

RemoteHead::RemoteHead(const Options& options, std::unique_ptr<client::Client> client,
                       v1::HeadDescription description)
    : options_(options),
      client_(std::move(client)),
      description_(std::move(description)),
      step_(description_.state().step()) {}

LossHead::Ticket RemoteHead::Start(const LossRequest& request) {
  const bool train = !request.grad_hidden.empty();
  client::Microbatch microbatch;
  microbatch.head = options_.name;
  if (train) microbatch.step = request.step;
  microbatch.id = request.microbatch;
  microbatch.hidden_size = options_.hidden_size;
  microbatch.hidden_dtype = v1::DTYPE_FP32;
  microbatch.hidden = request.hidden.data();
  microbatch.targets = request.targets;
  client::LossOutputs outputs;
  if (train) outputs.grad_hidden = request.grad_hidden.data();
  outputs.row_argmax = request.argmax;
  client::ComputeOptions compute;
  compute.normalizer = request.normalizer;
  compute.accumulate_gradients = train;
  compute.streams = 1;
  return [pending =
              client_->ComputeLossAsync(microbatch, outputs, compute)]() mutable -> absl::StatusOr<LossSums> {
    const absl::StatusOr<client::LossResult> result = pending.Wait();
    if (!result.ok()) return result.status();
    return LossSums{result->loss_sum, static_cast<int64_t>(result->valid_rows),
                    static_cast<int64_t>(result->correct_rows)};
  };
}

absl::Status RemoteHead::ApplyStep(int64_t microbatches, double learning_rate) {
  v1::ApplyStepRequest request;
  request.set_head(options_.name);
  request.set_step(step_);
  v1::AdamW* adamw = request.mutable_optimizer()->mutable_adamw();
  adamw->set_learning_rate(learning_rate);
  adamw->set_beta2(0.99);
  adamw->set_weight_decay(options_.weight_decay);
  for (int64_t id = 0; id < microbatches; ++id) request.add_expected_microbatches(id);
  const absl::StatusOr<v1::ApplyStepResponse> response = client_->ApplyStep(request);
  if (!response.ok()) return response.status();
  step_ = response->state().step();
  return absl::OkStatus();
}

absl::Status RemoteHead::Delete() { return client_->DeleteHead(options_.name); }

}  // namespace lossd::ngram_lm
