// SPDX-License-Identifier: Apache-2.0
// A small head and random rows for it, as the C++ client sends them.
#ifndef LOSSD_TESTS_SERVER_SERVICE_SMALL_HEAD_H_
#define LOSSD_TESTS_SERVER_SERVICE_SMALL_HEAD_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

#include "client/cpp/client.h"

namespace lossd::app::testing {

inline constexpr uint64_t kSmallHidden = 24;
inline constexpr uint64_t kSmallVocab = 97;

// Creates head "head", always with the same weights.
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
  std::vector<int32_t> targets;  // about every tenth row has none
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

// The rows as microbatch `id` of a step. They outlive it.
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

// Opens a microbatch of head "head" with all of its rows, in fp32: the sum of their losses, and dL/dx.
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

}  // namespace lossd::app::testing

#endif  // LOSSD_TESTS_SERVER_SERVICE_SMALL_HEAD_H_
