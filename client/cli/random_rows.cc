// SPDX-License-Identifier: Apache-2.0
#include "client/cli/random_rows.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/cli/format.h"
#include "client/cli/tensor_io.h"
#include "kernels/errors/field_error.h"
#include "kernels/host_memory.h"

namespace lossd::cli {

absl::StatusOr<HiddenRows> RandomRows(uint64_t rows, uint64_t hidden_size, uint64_t vocab_size,
                                      v1::DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  // Plain arithmetic on the generator's bits: the distributions of the standard library differ between
  // machines.
  const auto uniform = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  TensorData hidden{
      formats::DType::kFloat32, {static_cast<int64_t>(rows), static_cast<int64_t>(hidden_size)}, {}};
  hidden.bytes.resize(rows * hidden_size * sizeof(float));
  auto* values = reinterpret_cast<float*>(hidden.bytes.data());
  for (uint64_t i = 0; i < rows * hidden_size; ++i) {
    values[i] = static_cast<float>((2 * uniform() - 1) * std::sqrt(3.0));
  }
  absl::StatusOr<std::vector<uint8_t>> converted = ConvertTo(dtype, hidden);
  if (!converted.ok()) return converted.status();
  HiddenRows result{rows, hidden_size, dtype, *std::move(converted), std::vector<int32_t>(rows)};
  for (int32_t& target : result.targets) target = static_cast<int32_t>(random() % vocab_size);
  return result;
}

absl::Status CheckRoom(absl::string_view option, uint64_t rows, uint64_t hidden_size, v1::DType dtype,
                       int copies) {
  const std::optional<kernels::HostMemory::Bound> bound = kernels::HostMemory().Available();
  if (!bound.has_value()) return absl::OkStatus();
  const double of_value = dtype == v1::DTYPE_FP32 ? 4 : 2;
  // Made in fp32 and then converted; the targets besides.
  const double of_row =
      (sizeof(float) + of_value * copies) * static_cast<double>(hidden_size) + sizeof(int32_t);
  const double most = std::max(0.0, std::floor(static_cast<double>(bound->bytes) / of_row));
  if (static_cast<double>(rows) <= most) return absl::OkStatus();
  return errors::FieldError(
      option,
      absl::StrCat("be at most ", HumanCount(static_cast<uint64_t>(most)), " with ", hidden_size,
                   " values a row: that is the memory which this machine has"),
      rows, absl::StatusCode::kResourceExhausted);
}

}  // namespace lossd::cli
