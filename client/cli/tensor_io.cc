// SPDX-License-Identifier: Apache-2.0
#include "client/cli/tensor_io.h"

#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/tensorfile/dtype.h"
#include "proto/tensorfile/npy.h"
#include "proto/tensorfile/safetensors.h"

namespace lossd::cli {
namespace {

constexpr char kSafetensors[] = ".safetensors";
constexpr char kNpy[] = ".npy";

absl::StatusOr<TensorData> LoadNpy(const std::string& path) {
  absl::StatusOr<std::unique_ptr<formats::NpyReader>> reader = formats::NpyReader::Open(path);
  if (!reader.ok()) return reader.status();
  TensorData tensor{(*reader)->dtype(), (*reader)->shape(), {}};
  tensor.bytes.resize((*reader)->elements() * formats::SizeOf(tensor.dtype));
  absl::Status status = (*reader)->Read(0, (*reader)->elements(), absl::MakeSpan(tensor.bytes));
  if (!status.ok()) return status;
  return tensor;
}

// The tensor of that name; without a name the only one.
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
  absl::StatusOr<std::unique_ptr<formats::SafetensorsReader>> reader = formats::SafetensorsReader::Open(path);
  if (!reader.ok()) return reader.status();
  absl::StatusOr<const formats::SafetensorsInfo*> info = Choose(**reader, name);
  if (!info.ok()) return info.status();
  TensorData tensor{(*info)->dtype, (*info)->shape, std::vector<uint8_t>((*info)->bytes)};
  absl::Status status = (*reader)->ReadBytes(**info, 0, absl::MakeSpan(tensor.bytes));
  if (!status.ok()) return status;
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
    absl::StatusOr<std::vector<uint8_t>> wide = ConvertTo(v1::DTYPE_FP32, tensor);
    if (!wide.ok()) return wide.status();
    return SaveNpy(path, {formats::DType::kFloat32, tensor.shape, *std::move(wide)});
  }
  absl::StatusOr<std::unique_ptr<formats::DataWriter>> writer =
      formats::CreateNpy(path, tensor.dtype, tensor.shape);
  if (!writer.ok()) return writer.status();
  absl::Status status = (*writer)->Append(tensor.bytes);
  if (!status.ok()) return status;
  return (*writer)->Finish();
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
  absl::Status status = formats::Convert(tensor.dtype, tensor.bytes, to, absl::MakeSpan(bytes));
  if (!status.ok()) return status;
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
  absl::Status status = CheckOutputPath(path, tensors.size());
  if (!status.ok()) return status;
  if (absl::EndsWith(path, kNpy)) return SaveNpy(path, tensors[0].data);
  std::vector<formats::SafetensorsSpec> specs;
  specs.reserve(tensors.size());
  for (const NamedTensor& tensor : tensors)
    specs.push_back({tensor.name, tensor.data.dtype, tensor.data.shape});
  absl::StatusOr<std::unique_ptr<formats::DataWriter>> writer = formats::CreateSafetensors(path, specs);
  if (!writer.ok()) return writer.status();
  for (const NamedTensor& tensor : tensors) {
    status = (*writer)->Append(tensor.data.bytes);
    if (!status.ok()) return status;
  }
  return (*writer)->Finish();
}

}  // namespace lossd::cli
