// SPDX-License-Identifier: Apache-2.0
// What the calculations of plans have in common. Pure functions; thread-safe.
#ifndef LOSSD_CLIENT_PLAN_ARITHMETIC_H_
#define LOSSD_CLIENT_PLAN_ARITHMETIC_H_

#include <cstdint>

namespace lossd::plan {

// Bytes of a 16-bit number: hidden states, logits and their gradients are bf16.
inline constexpr int64_t kHalf = 2;

// Into how many parts of size b, the last of which may be smaller, a is divided. a >= 0, b > 0.
constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace lossd::plan

#endif  // LOSSD_CLIENT_PLAN_ARITHMETIC_H_
