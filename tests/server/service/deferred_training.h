// SPDX-License-Identifier: Apache-2.0
// A training of the small head whose losses come before their gradients, or some of them.
#ifndef LOSSD_TESTS_SERVER_SERVICE_DEFERRED_TRAINING_H_
#define LOSSD_TESTS_SERVER_SERVICE_DEFERRED_TRAINING_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "client/cpp/client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/small_training.h"

namespace lossd::app::testing {

// The gradient of the objective with respect to each row's loss; the same each time.
inline std::vector<float> UpstreamGradients(size_t rows, bool ones) {
  std::vector<float> gradients(rows, 1.0f);
  for (size_t i = 0; i < rows && !ones; ++i) gradients[i] = static_cast<float>(i % 17) / 8.0f - 1.0f;
  return gradients;
}

class DeferredTraining {
 public:
  // Of microbatches that come directly the objective is the sum of the losses, and so it is of deferred ones
  // with `ones`.
  DeferredTraining(client::Client& client, const std::vector<SmallRows>& data, bool ones)
      : client_(client), data_(data), ones_(ones) {}

  // Steps [0, end). `defers` says which microbatches are deferred; the rest is as `rng` says, with
  // microbatches that are retained in vain, of which some are released.
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
    const uint64_t in_vain = data_.size();  // ids from here on
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

#endif  // LOSSD_TESTS_SERVER_SERVICE_DEFERRED_TRAINING_H_
