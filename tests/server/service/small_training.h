// SPDX-License-Identifier: Apache-2.0
// A small head, random rows for it in the form of the C++ client, and training runs of that head, which tests
// use to compare several kinds of servers.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_
#define LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"

namespace lossd::app::testing {

inline constexpr uint64_t kSmallHidden = 24;
inline constexpr uint64_t kSmallVocab = 97;

// The request that creates head "head", always with the same weights.
inline v1::CreateHeadRequest SmallHead() {
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("head");
  request.mutable_spec()->set_hidden_size(kSmallHidden);
  request.mutable_spec()->set_vocab_size(kSmallVocab);
  request.mutable_kaiming_uniform()->set_seed(7);
  return request;
}

struct SmallRows {
  std::vector<float> hidden;     // [rows, kSmallHidden]
  std::vector<int32_t> targets;  // about every tenth row has no target
};

inline SmallRows MakeSmallRows(size_t rows, std::mt19937_64& rng) {
  std::normal_distribution<float> normal;
  SmallRows data;
  for (size_t i = 0; i < rows * kSmallHidden; ++i) data.hidden.push_back(normal(rng));
  for (size_t i = 0; i < rows; ++i) {
    const bool ignored = rng() % 10 == 0;
    data.targets.push_back(ignored ? -100 : static_cast<int32_t>(rng() % kSmallVocab));
  }
  return data;
}

// The rows as microbatch `id` of a step. `data` must outlive it.
inline client::Microbatch SmallMicrobatch(const SmallRows& data, uint64_t step, uint64_t id) {
  client::Microbatch microbatch;
  microbatch.head = "head";
  microbatch.step = step;
  microbatch.id = id;
  microbatch.hidden_size = kSmallHidden;
  microbatch.hidden_dtype = v1::DTYPE_FP32;
  microbatch.hidden = data.hidden.data();
  microbatch.targets = data.targets;
  return microbatch;
}

// The opening message of a microbatch of head "head" with all of its rows, in fp32, that asks for the sum of
// the losses and dL/dx.
inline v1::OpenMicrobatch OpenSum(const std::vector<int32_t>& targets) {
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_microbatch_rows(targets.size());
  open.mutable_rows()->set_end(targets.size());
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_want_grad_hidden(true);
  open.mutable_targets()->Add(targets.begin(), targets.end());
  return open;
}

inline v1::ApplyStepRequest AdamStep(uint64_t step, size_t microbatches) {
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  apply.set_step(step);
  apply.mutable_optimizer()->mutable_adamw()->set_learning_rate(0.01);
  for (uint64_t i = 0; i < microbatches; ++i) apply.add_expected_microbatches(i);
  return apply;
}

struct Trained {
  std::vector<std::vector<float>> tensors;  // the weight and its moments
  // For each microbatch of the last step: the gradient of its hidden states.
  std::vector<std::vector<float>> grads;
  std::vector<double> losses;  // the losses of all microbatches
  std::vector<double> norms;   // the norm of the gradient at each step
};

inline std::vector<std::vector<float>> Tensors(client::Client& client) {
  std::vector<std::vector<float>> all;
  for (const v1::Role role : {v1::ROLE_VALUE, v1::ROLE_MOMENT1, v1::ROLE_MOMENT2}) {
    const auto tensor = client.ReadTensor("head", v1::PARAM_WEIGHT, role);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    all.push_back(tensor.ok() ? tensor->values : std::vector<float>());
  }
  return all;
}

inline std::unique_ptr<client::Client> Connect(const std::string& target, int channels = 1) {
  client::ClientOptions options;
  options.target = target;
  options.channels = channels;
  auto client = client::Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

// Trains steps [first, end) with all microbatches. `rng` chooses the order and the slices.
inline void Train(client::Client& client, const std::vector<SmallRows>& data, uint64_t first, uint64_t end,
                  std::mt19937_64& rng, Trained& trained) {
  trained.grads.resize(data.size());
  for (uint64_t step = first; step < end; ++step) {
    std::vector<size_t> order(data.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<std::pair<size_t, client::PendingLoss>> pending;
    for (const size_t i : order) {
      trained.grads[i].assign(data[i].hidden.size(), 0.0f);
      client::ComputeOptions compute;
      compute.accumulate_gradients = true;
      compute.streams = 1 + static_cast<int>(rng() % 4);
      compute.slice_bytes = 1 + rng() % (64 << 10);
      pending.emplace_back(i, client.ComputeLossAsync(SmallMicrobatch(data[i], step, i),
                                                      {.grad_hidden = trained.grads[i].data()}, compute));
    }
    std::vector<double> losses(data.size());
    for (auto& [i, loss] : pending) {
      const auto result = loss.Wait();
      ASSERT_TRUE(result.ok()) << result.status();
      losses[i] = result->loss;
    }
    trained.losses.insert(trained.losses.end(), losses.begin(), losses.end());
    const auto applied = client.ApplyStep(AdamStep(step, data.size()));
    ASSERT_TRUE(applied.ok()) << applied.status();
    trained.norms.push_back(applied->grad_norm());
  }
  trained.tensors = Tensors(client);
}

inline std::vector<SmallRows> RandomData(std::mt19937_64& rng) {
  std::vector<SmallRows> data;
  for (const size_t most : {3000, 3000, 1500, 400, 60}) data.push_back(MakeSmallRows(1 + rng() % most, rng));
  return data;
}

// Creates the head and trains it for three steps.
inline Trained TrainAt(const std::string& target, const std::vector<SmallRows>& data, uint64_t seed,
                       v1::Split split = v1::SPLIT_UNSPECIFIED, const std::vector<uint32_t>& shares = {}) {
  std::mt19937_64 rng(seed);
  const auto client = Connect(target, 1 + static_cast<int>(rng() % 3));
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_split(split);
  head.mutable_spec()->mutable_shares()->Add(shares.begin(), shares.end());
  EXPECT_TRUE(client->CreateHead(head).ok());
  Trained trained;
  Train(*client, data, 0, 3, rng, trained);
  return trained;
}

inline void ExpectSameBits(const Trained& got, const Trained& want) {
  EXPECT_EQ(got.tensors, want.tensors);
  EXPECT_EQ(got.grads, want.grads);
  EXPECT_EQ(got.norms, want.norms);
}

// The tolerance is relative to the largest value, because thousands of rows are added in different orders.
inline void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, double tolerance) {
  ASSERT_EQ(got.size(), want.size());
  double largest = 0.0;
  double difference = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::fabs(double{want[i]}));
    difference = std::max(difference, std::fabs(double{got[i]} - double{want[i]}));
  }
  EXPECT_LE(difference, tolerance * largest);
}

// The gradient of the objective with respect to each row's loss. It is the same each time.
inline std::vector<float> UpstreamGradients(size_t rows, bool ones) {
  std::vector<float> gradients(rows, 1.0f);
  for (size_t i = 0; i < rows && !ones; ++i) gradients[i] = static_cast<float>(i % 17) / 8.0f - 1.0f;
  return gradients;
}

// A training of the small head in which all or some microbatches are deferred.
class DeferredTraining {
 public:
  // The objective of direct microbatches is the sum of their losses. With `ones`, it is the same for deferred
  // ones.
  DeferredTraining(client::Client& client, const std::vector<SmallRows>& data, bool ones)
      : client_(client), data_(data), ones_(ones) {}

  // Trains steps [0, end). `defers` says which microbatches are deferred. `rng` chooses the rest. Other
  // microbatches are retained without a use, and some of them are released.
  Trained Run(uint64_t end, const std::function<bool(size_t)>& defers, std::mt19937_64& rng) {
    Trained trained;
    trained.grads.resize(data_.size());
    for (uint64_t step = 0; step < end; ++step) {
      Forward(step, defers, rng, trained);
      Gradients(step, defers, rng, trained);
      const auto applied = client_.ApplyStep(AdamStep(step, data_.size()));
      EXPECT_TRUE(applied.ok()) << applied.status();
      if (applied.ok()) trained.norms.push_back(applied->grad_norm());
    }
    trained.tensors = Tensors(client_);
    return trained;
  }

 private:
  using Pending = std::vector<client::PendingLoss>;

  static std::vector<size_t> Shuffled(size_t count, std::mt19937_64& rng) {
    std::vector<size_t> order(count);
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), rng);
    return order;
  }

  static client::ComputeOptions Slices(client::ComputeOptions compute, std::mt19937_64& rng) {
    compute.streams = 1 + static_cast<int>(rng() % 4);
    compute.slice_bytes = 1 + rng() % (64 << 10);
    return compute;
  }

  static void WaitFor(Pending& pending) {
    for (client::PendingLoss& loss : pending) {
      const auto result = loss.Wait();
      ASSERT_TRUE(result.ok()) << result.status();
    }
    pending.clear();
  }

  void Forward(uint64_t step, const std::function<bool(size_t)>& defers, std::mt19937_64& rng,
               Trained& trained) {
    const client::ComputeOptions retain = {.reduction = v1::REDUCTION_NONE, .retain = true};
    std::vector<std::vector<float>> losses(data_.size());
    const uint64_t in_vain = data_.size();  // microbatch ids from here on are retained without a use
    Pending pending;
    for (const size_t i : Shuffled(data_.size(), rng)) {
      if (!defers(i)) continue;
      losses[i].resize(data_[i].targets.size());
      pending.push_back(client_.ComputeLossAsync(
          SmallMicrobatch(data_[i], step, i), {.row_loss = absl::MakeSpan(losses[i])}, Slices(retain, rng)));
      if (rng() % 3 == 0 && data_[i].targets.size() < 500) {
        WaitFor(pending);
        const auto kept = client_.ComputeLoss(SmallMicrobatch(data_[i], step, in_vain + i), {}, retain);
        EXPECT_TRUE(kept.ok()) << kept.status();
        if (rng() % 2 == 0) {
          EXPECT_TRUE(client_.ReleaseMicrobatch("head", in_vain + i).ok());
        }
      }
    }
    WaitFor(pending);
    for (const auto& rows : losses) trained.losses.insert(trained.losses.end(), rows.begin(), rows.end());
  }

  void Gradients(uint64_t step, const std::function<bool(size_t)>& defers, std::mt19937_64& rng,
                 Trained& trained) {
    Pending pending;
    for (const size_t i : Shuffled(data_.size(), rng)) {
      trained.grads[i].assign(data_[i].hidden.size(), 0.0f);
      float* const grads = trained.grads[i].data();
      if (!defers(i)) {
        pending.push_back(client_.ComputeLossAsync(
            SmallMicrobatch(data_[i], step, i), {.grad_hidden = grads},
            Slices({.reduction = v1::REDUCTION_SUM, .accumulate_gradients = true}, rng)));
        continue;
      }
      client::RetainedGradients gradients;
      gradients.head = "head";
      gradients.step = step;
      gradients.id = i;
      gradients.hidden_size = kSmallHidden;
      gradients.hidden_dtype = v1::DTYPE_FP32;
      const std::vector<float> upstream = UpstreamGradients(data_[i].targets.size(), ones_);
      gradients.grad_loss = upstream;
      pending.push_back(client_.BackwardAsync(
          gradients, grads, {.accumulate_gradients = true, .streams = 1 + static_cast<int>(rng() % 3)}));
    }
    WaitFor(pending);
  }

  client::Client& client_;
  const std::vector<SmallRows>& data_;
  const bool ones_;
};

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_
