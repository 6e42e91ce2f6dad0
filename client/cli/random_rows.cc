// SPDX-License-Identifier: Apache-2.0
#include "client/cli/random_rows.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "client/cli/format.h"
#include "client/cli/tensor_io.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/data/real_rows.h"
#include "kernels/errors/field_error.h"
#include "kernels/host_memory.h"

namespace lossd::cli {

// ---- Random rows ----

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
  // Made in fp32 and then converted; the targets are made with them.
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

// ---- Rows of a real model ----

namespace {

constexpr int64_t kClassesAtOnce = 8192;

}  // namespace

absl::Status CheckTakesRealRows(const v1::HeadSpec& spec) {
  if ((spec.norm() == v1::NORM_UNSPECIFIED || spec.norm() == v1::NORM_NONE) && !spec.bias())
    return absl::OkStatus();
  return absl::FailedPreconditionError("--data real needs a head without norm and bias");
}

absl::StatusOr<HiddenRows> MakeRealRows(const data::RealRows& rows, v1::DType dtype) {
  TensorData hidden{formats::DType::kFloat32, {rows.rows(), rows.hidden_size()}, {}};
  hidden.bytes.resize(static_cast<size_t>(rows.rows() * rows.hidden_size()) * sizeof(float));
  auto* const values = reinterpret_cast<float*>(hidden.bytes.data());
  std::vector<int32_t> targets(static_cast<size_t>(rows.rows()));
  data::InParallel(0, rows.rows(), [&](int64_t begin, int64_t end) {
    data::FillHidden(rows, begin, end, values + begin * rows.hidden_size(), targets.data() + begin);
  });
  absl::StatusOr<std::vector<uint8_t>> converted = ConvertTo(dtype, hidden);
  if (!converted.ok()) return converted.status();
  return HiddenRows{static_cast<uint64_t>(rows.rows()), static_cast<uint64_t>(rows.hidden_size()), dtype,
                    *std::move(converted), std::move(targets)};
}

absl::Status WriteRealWeight(const data::RealRows& rows, const std::string& head, client::Client& client) {
  std::vector<float> block;
  for (int64_t begin = 0; begin < rows.vocab_size(); begin += kClassesAtOnce) {
    const int64_t end = std::min(begin + kClassesAtOnce, rows.vocab_size());
    block.resize(static_cast<size_t>((end - begin) * rows.hidden_size()));
    data::InParallel(begin, end, [&](int64_t from, int64_t to) {
      data::FillWeight(rows, from, to, block.data() + (from - begin) * rows.hidden_size());
    });
    v1::OpenTensor open;
    open.set_head(head);
    open.set_param(v1::PARAM_WEIGHT);
    open.mutable_rows()->set_begin(static_cast<uint64_t>(begin));
    open.mutable_rows()->set_end(static_cast<uint64_t>(end));
    const auto* const bytes = reinterpret_cast<const char*>(block.data());
    const auto written = client.WriteTensor(open, absl::MakeSpan(bytes, block.size() * sizeof(float)));
    if (!written.ok()) return written.status();
  }
  return absl::OkStatus();
}

// ---- RowBuffer ----

using client::internal::CudaDriver;

absl::StatusOr<RowBuffer> RowBuffer::Create(uint64_t bytes, std::optional<int> gpu) {
  RowBuffer buffer(gpu);
  if (bytes == 0) return buffer;
  if (!gpu.has_value()) {
    buffer.on_host_.resize(bytes);
    return buffer;
  }
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<uint8_t*> memory = (*driver)->Allocate(bytes, *gpu);
  if (!memory.ok()) return memory.status();
  buffer.on_gpu_ = *memory;
  return buffer;
}

absl::StatusOr<RowBuffer> RowBuffer::Copy(absl::Span<const uint8_t> bytes, std::optional<int> gpu) {
  absl::StatusOr<RowBuffer> buffer = Create(bytes.size(), gpu);
  if (!buffer.ok()) return buffer.status();
  absl::Status copied = client::internal::CopyBytes(buffer->data(), bytes.data(), bytes.size(), gpu);
  if (!copied.ok()) return copied;
  return buffer;
}

RowBuffer::RowBuffer(RowBuffer&& other) noexcept
    : gpu_(other.gpu_), on_gpu_(std::exchange(other.on_gpu_, nullptr)), on_host_(std::move(other.on_host_)) {}

RowBuffer::~RowBuffer() {
  if (on_gpu_ == nullptr) return;
  if (const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get(); driver.ok())
    (*driver)->Free(on_gpu_, *gpu_);
}

absl::StatusOr<int> FindGpu(const std::string& uuid) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<std::optional<int>> gpu = (*driver)->Find(uuid);
  if (!gpu.ok()) return gpu.status();
  if (!gpu->has_value())
    return absl::UnavailableError(absl::StrCat("this process does not see the server's GPU ", uuid));
  return **gpu;
}

absl::Status CheckGpu(const std::string& option, int gpu) {
  const absl::StatusOr<CudaDriver*> driver = CudaDriver::Get();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<int> count = (*driver)->Count();
  if (!count.ok()) return count.status();
  if (gpu >= 0 && gpu < *count) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be below the number of GPUs that are visible, ", *count),
                            gpu);
}

}  // namespace lossd::cli
