// SPDX-License-Identifier: Apache-2.0
// Numbers of bytes in errors and other text for people: in a unit that can be read, and exactly where
// somebody may have to calculate with them. Units are binary. FieldError (field_error.h) shows the value of a field
// "..._bytes" as ExactBytes in its message: "got 8388608 bytes (8.00 MiB)".
//
// All functions are stateless and thread-safe.
#ifndef LOSSD_KERNELS_ERRORS_BYTES_H_
#define LOSSD_KERNELS_ERRORS_BYTES_H_

#include <cstdint>
#include <string>

namespace lossd::errors {

// Below this, the number itself says as much as one in a larger unit.
inline constexpr int64_t kManyBytes = 10'000;

// "17 B", "1.50 GiB": three significant digits.
std::string HumanBytes(double bytes);

// "4096 bytes", "1610612736 bytes (1.50 GiB)": the second from kManyBytes on.
std::string ExactBytes(int64_t bytes);
std::string ExactBytes(uint64_t bytes);

}  // namespace lossd::errors

#endif  // LOSSD_KERNELS_ERRORS_BYTES_H_
