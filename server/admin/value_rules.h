// SPDX-License-Identifier: Apache-2.0
// Which values a tensor that comes out of a file may hold.
//
// Pure functions, thread-safe.
#ifndef LOSSD_SERVER_ADMIN_VALUE_RULES_H_
#define LOSSD_SERVER_ADMIN_VALUE_RULES_H_

#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "kernels/dtype.h"

namespace lossd::admin {

struct ValueRules {
  bool non_finite = false;      // NaN and infinities may be there
  bool minus_infinity = false;  // this one may be there all the same
  bool negative = true;         // numbers below 0 may be there
};

struct RefusedValue {
  int64_t index = 0;  // among the elements
  float value = 0;
};

// The first element of `bytes`, which hold elements of this dtype, that breaks a rule; nullopt: none does.
std::optional<RefusedValue> FirstRefused(const ValueRules& rules, kernels::DType dtype,
                                         absl::Span<const uint8_t> bytes);

}  // namespace lossd::admin

#endif  // LOSSD_SERVER_ADMIN_VALUE_RULES_H_
