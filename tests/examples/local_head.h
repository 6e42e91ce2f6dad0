// SPDX-License-Identifier: Apache-2.0
// A head in this process, for tests of the demo trainer: linear + softmax cross-entropy with AdamW, plain
// loops in fp32. Start computes at once. Not thread-safe.
#ifndef LOSSD_TESTS_EXAMPLES_LOCAL_HEAD_H_
#define LOSSD_TESTS_EXAMPLES_LOCAL_HEAD_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "examples/ngram_lm/loss_head.h"
#include "examples/ngram_lm/model.h"

namespace lossd::ngram_lm {

class LocalHead : public LossHead {
 public:
  LocalHead(int64_t vocab_size, int64_t hidden_size, uint64_t seed)
      : v_(vocab_size),
        d_(hidden_size),
        weight_(v_ * d_),
        gradient_(v_ * d_),
        adam_(v_ * d_, Adam::Options{}) {
    std::mt19937_64 random(seed);
    const float bound = 1 / std::sqrt(static_cast<float>(d_));
    for (float& w : weight_) w = std::uniform_real_distribution<float>(-bound, bound)(random);
  }

  uint64_t step() const override { return step_; }

  Ticket Start(const LossRequest& request) override {
    ++under_way_;
    most_under_way_ = std::max(most_under_way_, under_way_);
    return [this, result = Compute(request)] {
      --under_way_;
      return result;
    };
  }

  absl::Status ApplyStep(int64_t microbatches, double learning_rate) override {
    for (int64_t i = 0; i < microbatches; ++i) {
      if (!seen_.contains(i))
        return absl::FailedPreconditionError(absl::StrCat("microbatch ", i, " is missing"));
    }
    adam_.Step(static_cast<float>(learning_rate), gradient_, absl::MakeSpan(weight_));
    std::fill(gradient_.begin(), gradient_.end(), 0.0f);
    seen_.clear();
    ++step_;
    return absl::OkStatus();
  }

  int most_under_way() const { return most_under_way_; }
  const std::vector<float>& gradient() const { return gradient_; }

  // Makes every request from now on fail.
  void Break() { broken_ = true; }

 private:
  absl::StatusOr<LossSums> Compute(const LossRequest& request) {
    if (broken_) return absl::UnavailableError("broken");
    const bool train = !request.grad_hidden.empty();
    if (train && request.step != step_) return absl::FailedPreconditionError("step is not open");
    if (train && !seen_.insert(request.microbatch).second)
      return absl::AlreadyExistsError("microbatch sent twice");
    LossSums sums;
    sums.rows = static_cast<int64_t>(request.targets.size());
    for (int64_t row = 0; row < sums.rows; ++row) AddRow(request, row, &sums);
    return sums;
  }

  void AddRow(const LossRequest& request, int64_t row, LossSums* sums) {
    const float* x = request.hidden.data() + row * d_;
    const int32_t target = request.targets[row];
    std::vector<double> z(v_);
    for (int64_t v = 0; v < v_; ++v) {
      for (int64_t d = 0; d < d_; ++d) z[v] += static_cast<double>(weight_[v * d_ + d]) * x[d];
    }
    const auto top = std::max_element(z.begin(), z.end());
    double total = 0;
    for (double logit : z) total += std::exp(logit - *top);
    const double lse = *top + std::log(total);
    sums->loss += lse - z[target];
    const auto argmax = static_cast<int32_t>(top - z.begin());
    if (argmax == target) ++sums->correct;
    if (!request.argmax.empty()) request.argmax[row] = argmax;
    if (request.grad_hidden.empty()) return;
    float* dx = request.grad_hidden.data() + row * d_;
    std::fill(dx, dx + d_, 0.0f);
    for (int64_t v = 0; v < v_; ++v) {
      const auto dz = static_cast<float>((std::exp(z[v] - lse) - (v == target ? 1 : 0)) / request.normalizer);
      for (int64_t d = 0; d < d_; ++d) {
        dx[d] += dz * weight_[v * d_ + d];
        gradient_[v * d_ + d] += dz * x[d];
      }
    }
  }

  const int64_t v_;
  const int64_t d_;
  std::vector<float> weight_;    // [V, D]
  std::vector<float> gradient_;  // [V, D]
  Adam adam_;
  uint64_t step_ = 0;
  std::set<uint64_t> seen_;  // microbatches of the step
  int under_way_ = 0;
  int most_under_way_ = 0;
  bool broken_ = false;
};

}  // namespace lossd::ngram_lm

#endif  // LOSSD_TESTS_EXAMPLES_LOCAL_HEAD_H_
