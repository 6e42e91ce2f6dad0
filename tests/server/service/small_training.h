// SPDX-License-Identifier: Apache-2.0
// A training of the small head, to compare what several kinds of servers make of it.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_
#define LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "tests/server/service/small_head.h"

namespace lossd::app::testing {

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
  std::vector<std::vector<float>> grads;    // of the hidden states, by microbatch, of the last step
  std::vector<double> losses;               // of all microbatches
  std::vector<double> norms;                // of the gradient, by step
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

// Steps [first, end) with all of the microbatches, sent in the order and the slices that `rng` says.
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

// Three steps of a new head.
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

// Relative to the largest of the values: sums of thousands of rows in another order.
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

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SMALL_TRAINING_H_
