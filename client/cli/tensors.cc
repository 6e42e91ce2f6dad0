// SPDX-License-Identifier: Apache-2.0
// Reads and writes tensors in files, and makes the rows of a benchmark (tensors.h).
#include "client/cli/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "client/cpp/cuda_driver.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "kernels/host_memory.h"
#include "proto/tensorfile/npy.h"
#include "proto/tensorfile/safetensors.h"

namespace lossd::cli {
namespace {

constexpr char kSafetensors[] = ".safetensors";
constexpr char kNpy[] = ".npy";

absl::StatusOr<TensorData> LoadNpy(const std::string& path) {
  LOSSD_TRY(std::unique_ptr<formats::NpyReader> reader, formats::NpyReader::Open(path));
  TensorData tensor{reader->dtype(), reader->shape(), {}};
  tensor.bytes.resize(reader->elements() * formats::SizeOf(tensor.dtype));
  LOSSD_RETURN_IF_ERROR(reader->Read(0, reader->elements(), absl::MakeSpan(tensor.bytes)));
  return tensor;
}

// The tensor with this name. Without a name: the only tensor of the file.
absl::StatusOr<const formats::SafetensorsInfo*> Choose(const formats::SafetensorsReader& reader,
                                                       const std::string& name) {
  if (!name.empty()) return reader.Find(name);
  if (reader.tensors().size() == 1) return &reader.tensors()[0];
  const std::string names = absl::StrJoin(reader.tensors(), ", ",
                                          [](std::string* out, const auto& info) { out->append(info.name); });
  return absl::InvalidArgumentError(absl::StrCat(reader.name(), " has ", reader.tensors().size(),
                                                 " tensors (", names, "); name one: ", reader.name(),
                                                 ":NAME"));
}

absl::StatusOr<TensorData> LoadSafetensors(const std::string& path, const std::string& name) {
  LOSSD_TRY(std::unique_ptr<formats::SafetensorsReader> reader, formats::SafetensorsReader::Open(path));
  LOSSD_TRY(const formats::SafetensorsInfo* info, Choose(*reader, name));
  TensorData tensor{info->dtype, info->shape, std::vector<uint8_t>(info->bytes)};
  LOSSD_RETURN_IF_ERROR(reader->ReadBytes(*info, 0, absl::MakeSpan(tensor.bytes)));
  return tensor;
}

template <typename T>
absl::StatusOr<std::vector<int32_t>> Narrow(const TensorData& tensor) {
  std::vector<int32_t> result(tensor.elements());
  for (size_t i = 0; i < result.size(); ++i) {
    T value;
    std::memcpy(&value, tensor.bytes.data() + i * sizeof(T), sizeof(T));
    if (!std::in_range<int32_t>(value)) {
      return absl::OutOfRangeError(absl::StrCat("element ", i, " is ", value, "; it must fit into 32 bits"));
    }
    result[i] = static_cast<int32_t>(value);
  }
  return result;
}

absl::Status SaveNpy(const std::string& path, const TensorData& tensor) {
  if (tensor.dtype == formats::DType::kBFloat16) {
    LOSSD_TRY(std::vector<uint8_t> wide, ConvertTo(v1::DTYPE_FP32, tensor));
    return SaveNpy(path, {formats::DType::kFloat32, tensor.shape, std::move(wide)});
  }
  LOSSD_TRY(std::unique_ptr<formats::DataWriter> writer,
            formats::CreateNpy(path, tensor.dtype, tensor.shape));
  LOSSD_RETURN_IF_ERROR(writer->Append(tensor.bytes));
  return writer->Finish();
}

}  // namespace

int64_t TensorData::elements() const {
  int64_t count = 1;
  for (int64_t size : shape) count *= size;
  return count;
}

absl::StatusOr<TensorData> LoadTensor(const std::string& spec) {
  if (absl::EndsWith(spec, kNpy)) return LoadNpy(spec);
  if (absl::EndsWith(spec, kSafetensors)) return LoadSafetensors(spec, "");
  const size_t colon = spec.find(absl::StrCat(kSafetensors, ":"));
  if (colon != std::string::npos) {
    const size_t end = colon + sizeof(kSafetensors) - 1;
    return LoadSafetensors(spec.substr(0, end), spec.substr(end + 1));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("\"", spec, "\" is neither FILE.npy nor FILE.safetensors nor FILE.safetensors:TENSOR"));
}

v1::DType WireDType(formats::DType dtype) {
  switch (dtype) {
    case formats::DType::kFloat32:
      return v1::DTYPE_FP32;
    case formats::DType::kFloat16:
      return v1::DTYPE_FP16;
    case formats::DType::kBFloat16:
      return v1::DTYPE_BF16;
    default:
      return v1::DTYPE_UNSPECIFIED;
  }
}

formats::DType FileDType(v1::DType dtype) {
  switch (dtype) {
    case v1::DTYPE_FP16:
      return formats::DType::kFloat16;
    case v1::DTYPE_BF16:
      return formats::DType::kBFloat16;
    default:
      return formats::DType::kFloat32;
  }
}

absl::StatusOr<std::vector<uint8_t>> ConvertTo(v1::DType dtype, const TensorData& tensor) {
  if (!formats::IsConvertible(tensor.dtype)) {
    return absl::InvalidArgumentError("its elements are not floating point");
  }
  const formats::DType to = FileDType(dtype);
  std::vector<uint8_t> bytes(tensor.elements() * formats::SizeOf(to));
  LOSSD_RETURN_IF_ERROR(formats::Convert(tensor.dtype, tensor.bytes, to, absl::MakeSpan(bytes)));
  return bytes;
}

absl::StatusOr<std::vector<int32_t>> ToInt32(const TensorData& tensor) {
  switch (tensor.dtype) {
    case formats::DType::kInt64:
      return Narrow<int64_t>(tensor);
    case formats::DType::kInt32:
      return Narrow<int32_t>(tensor);
    case formats::DType::kInt16:
      return Narrow<int16_t>(tensor);
    case formats::DType::kInt8:
      return Narrow<int8_t>(tensor);
    case formats::DType::kUInt64:
      return Narrow<uint64_t>(tensor);
    case formats::DType::kUInt32:
      return Narrow<uint32_t>(tensor);
    case formats::DType::kUInt16:
      return Narrow<uint16_t>(tensor);
    case formats::DType::kUInt8:
      return Narrow<uint8_t>(tensor);
    default:
      return absl::InvalidArgumentError("its elements are not integers");
  }
}

absl::Status CheckOutputPath(const std::string& path, size_t tensors) {
  if (absl::EndsWith(path, kNpy)) {
    if (tensors > 1) {
      return absl::InvalidArgumentError(absl::StrCat(path, ": an .npy file holds one tensor, not ", tensors));
    }
  } else if (!absl::EndsWith(path, kSafetensors)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ends neither in .npy nor in .safetensors"));
  }
  std::error_code error;
  if (std::filesystem::exists(path, error)) return absl::AlreadyExistsError(absl::StrCat(path, " exists"));
  return absl::OkStatus();
}

absl::Status SaveTensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  LOSSD_RETURN_IF_ERROR(CheckOutputPath(path, tensors.size()));
  if (absl::EndsWith(path, kNpy)) return SaveNpy(path, tensors[0].data);
  std::vector<formats::SafetensorsSpec> specs;
  specs.reserve(tensors.size());
  for (const NamedTensor& tensor : tensors)
    specs.push_back({tensor.name, tensor.data.dtype, tensor.data.shape});
  LOSSD_TRY(std::unique_ptr<formats::DataWriter> writer, formats::CreateSafetensors(path, specs));
  for (const NamedTensor& tensor : tensors) {
    LOSSD_RETURN_IF_ERROR(writer->Append(tensor.data.bytes));
  }
  return writer->Finish();
}

// ---- Random rows ----

absl::StatusOr<HiddenRows> RandomRows(uint64_t rows, uint64_t hidden_size, uint64_t vocab_size,
                                      v1::DType dtype, uint64_t seed) {
  std::mt19937_64 random(seed);
  // Uniform numbers from the generator's bits by plain arithmetic. The distributions of the standard library
  // differ between machines.
  const auto uniform = [&random] { return static_cast<double>(random() >> 11) * 0x1p-53; };
  TensorData hidden{
      formats::DType::kFloat32, {static_cast<int64_t>(rows), static_cast<int64_t>(hidden_size)}, {}};
  hidden.bytes.resize(rows * hidden_size * sizeof(float));
  auto* values = reinterpret_cast<float*>(hidden.bytes.data());
  for (uint64_t i = 0; i < rows * hidden_size; ++i) {
    values[i] = static_cast<float>((2 * uniform() - 1) * std::sqrt(3.0));
  }
  LOSSD_TRY(std::vector<uint8_t> converted, ConvertTo(dtype, hidden));
  HiddenRows result{rows, hidden_size, dtype, std::move(converted), std::vector<int32_t>(rows)};
  for (int32_t& target : result.targets) target = static_cast<int32_t>(random() % vocab_size);
  return result;
}

absl::Status CheckRoom(absl::string_view option, uint64_t rows, uint64_t hidden_size, v1::DType dtype,
                       int copies) {
  const std::optional<kernels::HostMemory::Bound> bound = kernels::HostMemory().Available();
  if (!bound.has_value()) return absl::OkStatus();
  const double of_value = dtype == v1::DTYPE_FP32 ? 4 : 2;
  // The rows are made in fp32 and then converted. Their targets are made at the same time.
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
  LOSSD_TRY(std::vector<uint8_t> converted, ConvertTo(dtype, hidden));
  return HiddenRows{static_cast<uint64_t>(rows.rows()), static_cast<uint64_t>(rows.hidden_size()), dtype,
                    std::move(converted), std::move(targets)};
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
    LOSSD_TRY(const auto written,
              client.WriteTensor(open, absl::MakeSpan(bytes, block.size() * sizeof(float))));
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
  LOSSD_TRY(CudaDriver* const driver, CudaDriver::Get());
  LOSSD_TRY(buffer.on_gpu_, driver->Allocate(bytes, *gpu));
  return buffer;
}

absl::StatusOr<RowBuffer> RowBuffer::Copy(absl::Span<const uint8_t> bytes, std::optional<int> gpu) {
  LOSSD_TRY(RowBuffer buffer, Create(bytes.size(), gpu));
  LOSSD_RETURN_IF_ERROR(client::internal::CopyBytes(buffer.data(), bytes.data(), bytes.size(), gpu));
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
  LOSSD_TRY(CudaDriver* const driver, CudaDriver::Get());
  LOSSD_TRY(const std::optional<int> gpu, driver->Find(uuid));
  if (!gpu.has_value())
    return absl::UnavailableError(absl::StrCat("this process does not see the server's GPU ", uuid));
  return *gpu;
}

absl::Status CheckGpu(const std::string& option, int gpu) {
  LOSSD_TRY(CudaDriver* const driver, CudaDriver::Get());
  LOSSD_TRY(const int count, driver->Count());
  if (gpu >= 0 && gpu < count) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be below the number of GPUs that are visible, ", count),
                            gpu);
}

}  // namespace lossd::cli
