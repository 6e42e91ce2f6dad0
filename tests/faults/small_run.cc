// SPDX-License-Identifier: Apache-2.0
#include "tests/faults/small_run.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lossd::test {
namespace {

using client::Client;

constexpr int32_t kIgnored = -100;
constexpr float kRate = 0.5f;  // of the hidden states

bool SameBits(absl::Span<const float> a, absl::Span<const float> b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

struct HeadTensor {
  v1::Param param;
  v1::Role role;
};

std::string Name(const HeadTensor& tensor) {
  return absl::StrCat(v1::Param_Name(tensor.param), " ", v1::Role_Name(tensor.role));
}

std::vector<HeadTensor> HeadTensors() {
  std::vector<HeadTensor> tensors;
  for (const v1::Param param : {v1::PARAM_WEIGHT, v1::PARAM_BIAS, v1::PARAM_NORM_GAIN}) {
    for (const v1::Role role : {v1::ROLE_VALUE, v1::ROLE_MOMENT1, v1::ROLE_MOMENT2}) {
      tensors.push_back({param, role});
    }
  }
  return tensors;
}

}  // namespace

v1::CreateHeadRequest HeadOf(const RunShape& shape) {
  v1::CreateHeadRequest request;
  v1::HeadSpec* spec = request.mutable_spec();
  spec->set_name(shape.head);
  spec->set_hidden_size(shape.hidden_size);
  spec->set_vocab_size(shape.vocab_size);
  spec->set_bias(true);
  spec->set_norm(v1::NORM_RMSNORM);
  spec->set_optimizer_state(v1::OPTIMIZER_STATE_ADAM);
  request.mutable_kaiming_uniform()->set_seed(shape.seed);
  if (const char* const shares = std::getenv("LOSSD_TEST_SHARES")) {
    spec->set_split(v1::SPLIT_VOCABULARY);
    for (const absl::string_view share : absl::StrSplit(shares, ',')) {
      uint32_t value = 0;
      EXPECT_TRUE(absl::SimpleAtoi(share, &value)) << shares;
      spec->add_shares(value);
    }
  }
  return request;
}

SmallTrainer::SmallTrainer(const RunShape& shape)
    : shape_(shape),
      hidden_(shape.microbatches, std::vector<float>(shape.microbatch_rows * shape.hidden_size)),
      last_losses_(shape.microbatches),
      received_(shape.microbatches),
      losses_(shape.microbatches),
      gradients_(shape.microbatches) {
  std::mt19937_64 random(shape.seed);
  for (std::vector<float>& hidden : hidden_) {
    for (float& x : hidden) x = std::normal_distribution<float>()(random);
  }
}

std::vector<int32_t> SmallTrainer::Targets(uint64_t id) const {
  std::mt19937_64 random(shape_.seed + step_ * shape_.microbatches + id);
  std::vector<int32_t> targets(shape_.microbatch_rows);
  for (int32_t& target : targets) {
    target = random() % 8 == 0 ? kIgnored : static_cast<int32_t>(random() % shape_.vocab_size);
  }
  return targets;
}

absl::Status SmallTrainer::Embed(uint64_t id, SentMicrobatch* sent) const {
  const std::vector<int32_t> ids = Targets(id);
  std::vector<float> rows(ids.size() * shape_.hidden_size);
  client::ComputeOptions options{.streams = sent->travel.streams, .slice_bytes = sent->travel.slice_bytes};
  options.loss.set_ignore_index(kIgnored);
  const auto result = sent->client->ComputeLoss({.head = shape_.head,
                                                 .step = step_,
                                                 .hidden_size = shape_.hidden_size,
                                                 .hidden_dtype = v1::DTYPE_FP32,
                                                 .targets = ids,
                                                 .embedding = v1::EMBEDDING_ROWS},
                                                {.grad_hidden = rows.data()}, options);
  if (!result.ok()) return result.status();
  sent->input = hidden_[id];
  for (size_t i = 0; i < rows.size(); ++i) sent->input[i] += rows[i];
  return absl::OkStatus();
}

absl::Status SmallTrainer::AddRowGradients(const SentMicrobatch& last) const {
  std::vector<client::PendingLoss> pending;
  for (uint64_t id = 0; id < shape_.microbatches; ++id) {
    client::ComputeOptions options{
        .accumulate_gradients = true, .streams = last.travel.streams, .slice_bytes = last.travel.slice_bytes};
    options.loss.set_ignore_index(kIgnored);
    const std::vector<int32_t> ids = Targets(id);
    pending.push_back(last.client->ComputeLossAsync({.head = shape_.head,
                                                     .step = step_,
                                                     .id = shape_.microbatches + id,
                                                     .hidden_size = shape_.hidden_size,
                                                     .hidden_dtype = v1::DTYPE_FP32,
                                                     .hidden = gradients_[id].data(),
                                                     .targets = ids,
                                                     .embedding = v1::EMBEDDING_GRADIENTS},
                                                    {}, options));
  }
  absl::Status status;
  for (client::PendingLoss& call : pending) status.Update(call.Wait().status());
  return status;
}

std::unique_ptr<SentMicrobatch> SmallTrainer::Send(Client& client, uint64_t id, const Travel& travel) const {
  auto sent = std::make_unique<SentMicrobatch>();
  sent->client = &client;
  sent->travel = travel;
  if (tied_) {
    sent->embedded = Embed(id, sent.get());
    if (!sent->embedded.ok()) return sent;
  }
  const std::vector<float>& input = tied_ ? sent->input : hidden_[id];
  sent->row_loss.resize(shape_.microbatch_rows);
  sent->grad_hidden.resize(shape_.microbatch_rows * shape_.hidden_size);
  const std::vector<int32_t> targets = Targets(id);
  client::ComputeOptions options{
      .accumulate_gradients = true, .streams = travel.streams, .slice_bytes = travel.slice_bytes};
  options.loss.set_ignore_index(kIgnored);
  options.loss.set_z_loss(1e-4f);
  options.normalizer = static_cast<double>(shape_.microbatches * shape_.microbatch_rows);
  client::Microbatch microbatch{.head = shape_.head,
                                .step = step_,
                                .id = id,
                                .hidden_size = shape_.hidden_size,
                                .hidden_dtype = v1::DTYPE_FP32,
                                .hidden = input.data(),
                                .targets = targets};
  client::LossOutputs outputs{.grad_hidden = sent->grad_hidden.data(),
                              .row_loss = absl::MakeSpan(sent->row_loss)};
  if (RowsAreOnGpu()) {
    sent->hidden_on_gpu = std::make_unique<GpuRows>(input);
    sent->gradient_on_gpu = std::make_unique<GpuRows>(sent->grad_hidden);
    microbatch.memory = client::Memory::kDevice;
    microbatch.hidden = sent->hidden_on_gpu->data();
    outputs.grad_hidden = sent->gradient_on_gpu->data();
  }
  sent->pending = client.ComputeLossAsync(microbatch, outputs, options);
  return sent;
}

absl::Status SmallTrainer::Receive(uint64_t id, SentMicrobatch& sent) {
  if (const auto result = sent.Wait(); !result.ok()) return result.status();
  if (sent.gradient_on_gpu != nullptr) {
    if (absl::Status read = sent.gradient_on_gpu->Read(&sent.grad_hidden); !read.ok()) return read;
  }
  if (!gradients_[id].empty() &&
      !(SameBits(gradients_[id], sent.grad_hidden) && SameBits(losses_[id], sent.row_loss))) {
    return absl::InternalError(absl::StrCat("microbatch ", id, " of step ", step_,
                                            ": another answer than to the same microbatch before"));
  }
  gradients_[id] = std::move(sent.grad_hidden);
  losses_[id] = std::move(sent.row_loss);
  received_[id] = true;
  if (!tied_ || std::find(received_.begin(), received_.end(), false) != received_.end())
    return absl::OkStatus();
  const absl::Status added = AddRowGradients(sent);
  received_[id] = added.ok();
  return added;
}

void SmallTrainer::Repeat() { received_.assign(received_.size(), false); }

v1::ApplyStepRequest SmallTrainer::StepRequest(uint64_t step) const {
  v1::ApplyStepRequest request;
  request.set_head(shape_.head);
  request.set_step(step);
  request.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-2);
  request.mutable_optimizer()->mutable_adamw()->set_weight_decay(0.1);
  for (uint64_t id = 0; id < wire_microbatches(); ++id) request.add_expected_microbatches(id);
  return request;
}

void SmallTrainer::Advance() {
  for (uint64_t id = 0; id < shape_.microbatches; ++id) {
    for (size_t i = 0; i < hidden_[id].size(); ++i) hidden_[id][i] -= kRate * gradients_[id].at(i);
    last_losses_[id] = std::exchange(losses_[id], {});
    gradients_[id].clear();
  }
  Repeat();
  ++step_;
}

std::string SmallTrainer::Encode() const {
  std::string state(reinterpret_cast<const char*>(&step_), sizeof(step_));
  for (const auto* part : {&hidden_, &last_losses_}) {
    for (const std::vector<float>& values : *part) {
      const uint64_t size = values.size();
      state.append(reinterpret_cast<const char*>(&size), sizeof(size));
      state.append(reinterpret_cast<const char*>(values.data()), size * sizeof(float));
    }
  }
  return state;
}

void SmallTrainer::Decode(absl::string_view state) {
  const auto take = [&state](void* out, size_t bytes) {
    ASSERT_LE(bytes, state.size());
    std::memcpy(out, state.data(), bytes);
    state.remove_prefix(bytes);
  };
  take(&step_, sizeof(step_));
  for (auto* part : {&hidden_, &last_losses_}) {
    for (std::vector<float>& values : *part) {
      uint64_t size = 0;
      take(&size, sizeof(size));
      values.resize(size);
      take(values.data(), size * sizeof(float));
    }
  }
  for (auto* results : {&losses_, &gradients_}) {
    for (std::vector<float>& values : *results) values.clear();
  }
  Repeat();
}

absl::Status TrainStep(SmallTrainer& trainer, Client& client, const Travel& travel) {
  std::map<uint64_t, std::unique_ptr<SentMicrobatch>> sent;
  for (uint64_t id = 0; id < trainer.shape().microbatches; ++id) {
    if (!trainer.received(id)) sent[id] = trainer.Send(client, id, travel);
  }
  for (const auto& [id, microbatch] : sent) {
    if (absl::Status status = trainer.Receive(id, *microbatch); !status.ok()) return status;
  }
  if (const auto applied = client.ApplyStep(trainer.StepRequest()); !applied.ok()) return applied.status();
  trainer.Advance();
  return absl::OkStatus();
}

absl::StatusOr<RunImage> TakeImage(const SmallTrainer& trainer, Client& client, const RunShape& shape) {
  const auto head = client.DescribeHead(shape.head);
  if (!head.ok()) return head.status();
  RunImage image{.step = head->state().step()};
  for (const HeadTensor& tensor : HeadTensors()) {
    auto read = client.ReadTensor(shape.head, tensor.param, tensor.role);
    if (!read.ok()) return read.status();
    image.tensors[Name(tensor)] = std::move(read->values);
  }
  for (uint64_t id = 0; id < shape.microbatches; ++id) {
    image.tensors[absl::StrCat("hidden states of microbatch ", id)] = trainer.hidden()[id];
    image.tensors[absl::StrCat("losses of microbatch ", id)] = trainer.last_losses()[id];
  }
  return image;
}

std::string Difference(const RunImage& got, const RunImage& want) {
  if (got.step != want.step) return absl::StrCat("step ", got.step, ", not ", want.step);
  for (const auto& [name, values] : want.tensors) {
    const std::vector<float>& other = got.tensors.at(name);
    if (SameBits(other, values)) continue;
    size_t differing = 0, first = 0;
    for (size_t i = values.size(); i-- > 0;) {
      if (std::bit_cast<uint32_t>(other.at(i)) == std::bit_cast<uint32_t>(values[i])) continue;
      ++differing;
      first = i;
    }
    return absl::StrCat(name, ": ", differing, " of ", values.size(), " values differ; [", first, "] is ",
                        other[first], ", not ", values[first]);
  }
  return "";
}

UndisturbedRun::UndisturbedRun(const RunShape& shape, const std::string& lossd,
                               const std::vector<std::string>& flags)
    : shape_(shape),
      server_(lossd, flags),
      client_(Client::Connect({.target = server_.target()}).value()),
      trainer_(shape) {
  const auto created = client_->CreateHead(HeadOf(shape));
  EXPECT_TRUE(created.ok()) << created.status();
}

const RunImage& UndisturbedRun::After(uint64_t steps) {
  constexpr size_t kKept = 8;
  while (images_.empty() || images_.rbegin()->first < steps) {
    if (!images_.empty()) {
      const absl::Status status = TrainStep(trainer_, *client_);
      if (!status.ok()) throw std::runtime_error(status.ToString());  // ends the test
    }
    images_[trainer_.step()] = TakeImage(trainer_, *client_, shape_).value();
    if (images_.size() > kKept) images_.erase(images_.begin());
  }
  return images_.at(steps);
}

}  // namespace lossd::test
