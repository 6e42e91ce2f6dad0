// SPDX-License-Identifier: Apache-2.0
// The memory of a head in the trainer's own process, by implementation: what the last stage of a pipeline
// would need without a server. It is arithmetic of shapes, which tests/client/plan compares with
// measurements. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_LOCAL_HEAD_H_
#define LOSSD_CLIENT_PLAN_LOCAL_HEAD_H_

#include <array>
#include <cstdint>

#include "absl/strings/string_view.h"

namespace lossd::plan {

// Bytes of a 16-bit number: hidden states, logits and their gradients are bf16.
inline constexpr int64_t kHalf = 2;

// The number of parts of size b, the last of which may be smaller, that a is divided into. a >= 0, b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

enum class LocalMethod : uint8_t {
  kTorch,     // linear, then cross_entropy
  kCompiled,  // the same under torch.compile
  kLiger,     // Liger's fused linear cross-entropy: a block of rows at a time
  kCce,       // Cut Cross-Entropy: no logits in memory
};
inline constexpr std::array kLocalMethods = {LocalMethod::kTorch, LocalMethod::kCompiled, LocalMethod::kLiger,
                                             LocalMethod::kCce};
absl::string_view Name(
    LocalMethod method);  // "torch", "compiled", "liger", "cce": as LastStageTiming::method

// In bf16, of loss, dx and dW of one microbatch: bytes above hidden states, weight and targets at the peak.
int64_t PeakBytes(LocalMethod method, int64_t hidden, int64_t vocab, int64_t rows);

// What training keeps of the classifier between microbatches: weight, gradient and two moments, in fp32.
int64_t StateBytes(int64_t hidden, int64_t vocab);

// The most rows of a microbatch whose peak, state, hidden states and their gradients fit `bytes`; 0: not even
// one.
int64_t LargestMicrobatch(LocalMethod method, int64_t hidden, int64_t vocab, int64_t bytes);

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_LOCAL_HEAD_H_
