// SPDX-License-Identifier: Apache-2.0
#include "proto/tensorfile/safetensors.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"
#include "proto/tensorfile/json_entries.h"

namespace lossd::formats {
namespace {

using nlohmann::json;

constexpr absl::string_view kMetadataKey = "__metadata__";
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxEntryValues = 10'000;  // names and values of the metadata; a tensor has fewer

constexpr NamedDType kSafetensorsDTypes[] = {
    {"F64", DType::kFloat64},        {"F32", DType::kFloat32},
    {"F16", DType::kFloat16},        {"BF16", DType::kBFloat16},
    {"I64", DType::kInt64},          {"I32", DType::kInt32},
    {"I16", DType::kInt16},          {"I8", DType::kInt8},
    {"U64", DType::kUInt64},         {"U32", DType::kUInt32},
    {"U16", DType::kUInt16},         {"U8", DType::kUInt8},
    {"BOOL", DType::kBool},          {"F8_E5M2", DType::kFloat8E5M2},
    {"F8_E4M3", DType::kFloat8E4M3},
};

// The bytes of a tensor; nullopt if a dimension is negative or the product leaves 63 bits.
std::optional<int64_t> TensorBytes(absl::Span<const int64_t> shape, int64_t element_bytes) {
  int64_t bytes = element_bytes;
  for (const int64_t dimension : shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  }
  return bytes;
}

absl::Status FileInvalid(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": not a safetensors file: ", what));
}

absl::Status TensorInvalid(absl::string_view path, absl::string_view tensor, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": tensor '", tensor, "': ", what));
}

// A whole number in [0, 2^63).
std::optional<int64_t> AsSize(const json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >> 63 != 0) return std::nullopt;
  return static_cast<int64_t>(value.get<uint64_t>());
}

// An array of whole numbers; nullopt for anything else.
std::optional<std::vector<int64_t>> AsSizes(const json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<int64_t> sizes;
  for (const json& entry : value) {
    const std::optional<int64_t> size = AsSize(entry);
    if (!size.has_value()) return std::nullopt;
    sizes.push_back(*size);
  }
  return sizes;
}

// Where the header ends; checks no more of it than how it starts.
absl::StatusOr<int64_t> HeaderBytes(const InputFile& file) {
  uint8_t length_bytes[kLengthBytes];
  if (file.size() < kLengthBytes) return FileInvalid(file.name(), "shorter than 8 bytes");
  if (absl::Status status = file.ReadAt(0, absl::MakeSpan(length_bytes)); !status.ok()) return status;
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes) ||
      static_cast<int64_t>(length) > file.size() - kLengthBytes) {
    return FileInvalid(file.name(), absl::StrCat("header length ", length, " in a file of ",
                                                 errors::ExactBytes(file.size())));
  }
  uint8_t first[1] = {};
  if (length > 0) {
    if (absl::Status status = file.ReadAt(kLengthBytes, absl::MakeSpan(first)); !status.ok()) return status;
  }
  if (first[0] != '{') return FileInvalid(file.name(), "the header does not start with '{'");
  return static_cast<int64_t>(length);
}

absl::StatusOr<std::map<std::string, std::string>> ParseMetadata(absl::string_view path, const json& value) {
  std::map<std::string, std::string> metadata;
  if (!value.is_object()) return FileInvalid(path, "__metadata__ is no object");
  for (const auto& [key, text] : value.items()) {
    if (!text.is_string()) return FileInvalid(path, absl::StrCat("__metadata__ '", key, "' is no string"));
    metadata[key] = text.get<std::string>();
  }
  return metadata;
}

// Checks an entry on its own; `data_bytes` follow the header.
absl::StatusOr<SafetensorsInfo> ParseTensor(absl::string_view path, const std::string& name,
                                            const json& entry, int64_t data_begin, int64_t data_bytes) {
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") ||
      !entry.contains("data_offsets") || !entry["dtype"].is_string()) {
    return TensorInvalid(path, name, "needs dtype, shape and data_offsets");
  }
  const std::optional<std::vector<int64_t>> shape = AsSizes(entry["shape"]);
  if (!shape.has_value()) return TensorInvalid(path, name, absl::StrCat("bad shape ", entry["shape"].dump()));
  const std::optional<std::vector<int64_t>> offsets = AsSizes(entry["data_offsets"]);
  if (!offsets.has_value() || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] ||
      (*offsets)[1] > data_bytes) {
    return TensorInvalid(path, name,
                         absl::StrCat("bad data_offsets ", entry["data_offsets"].dump(), " in ",
                                      errors::ExactBytes(data_bytes), " of data"));
  }
  SafetensorsInfo info;
  info.name = name;
  info.dtype_name = entry["dtype"].get<std::string>();
  info.dtype = DTypeNamed(kSafetensorsDTypes, info.dtype_name);
  info.shape = *shape;
  info.begin = data_begin + (*offsets)[0];
  info.bytes = (*offsets)[1] - (*offsets)[0];
  if (info.dtype != DType::kOther && TensorBytes(*shape, SizeOf(info.dtype)) != info.bytes) {
    return TensorInvalid(path, name,
                         absl::StrCat("shape ", entry["shape"].dump(), " of ", info.dtype_name,
                                      " does not take ", errors::ExactBytes(info.bytes)));
  }
  return info;
}

bool HasRepeatedName(const std::vector<SafetensorsInfo>& tensors) {
  std::vector<absl::string_view> names;
  names.reserve(tensors.size());
  for (const SafetensorsInfo& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  return std::adjacent_find(names.begin(), names.end()) != names.end();
}

// Checks that the tensors, sorted by position, fill [data_begin, file_bytes) exactly.
absl::Status CheckCoverage(absl::string_view path, const std::vector<SafetensorsInfo>& tensors,
                           int64_t data_begin, int64_t file_bytes) {
  int64_t end = data_begin;
  for (const SafetensorsInfo& tensor : tensors) {
    if (tensor.begin != end) {
      return TensorInvalid(
          path, tensor.name,
          absl::StrCat(tensor.begin < end ? "overlaps" : "leaves a gap after",
                       " the tensor before it: starts at byte ", tensor.begin, ", not ", end));
    }
    end += tensor.bytes;
  }
  if (end == file_bytes) return absl::OkStatus();
  return FileInvalid(path, absl::StrCat(errors::ExactBytes(file_bytes - end), " belong to no tensor"));
}

absl::StatusOr<std::string> EncodeHeader(absl::string_view path, absl::Span<const SafetensorsSpec> tensors,
                                         const std::map<std::string, std::string>& metadata,
                                         int64_t data_alignment, int64_t* data_bytes) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  std::set<absl::string_view> names = {kMetadataKey};
  *data_bytes = 0;
  for (const SafetensorsSpec& tensor : tensors) {
    if (!names.insert(tensor.name).second) return TensorInvalid(path, tensor.name, "name is taken");
    const std::optional<int64_t> bytes = TensorBytes(tensor.shape, SizeOf(tensor.dtype));
    int64_t end = 0;
    if (tensor.dtype == DType::kOther || !bytes.has_value() ||
        __builtin_add_overflow(*data_bytes, *bytes, &end)) {
      return TensorInvalid(path, tensor.name, "has no storable type or shape");
    }
    header[tensor.name] = {{"dtype", std::string(NameOf(kSafetensorsDTypes, tensor.dtype))},
                           {"shape", tensor.shape},
                           {"data_offsets", {*data_bytes, end}}};
    *data_bytes = end;
  }
  using Handling = nlohmann::ordered_json::error_handler_t;
  std::string text = header.dump(-1, ' ', false, Handling::replace);
  if (text != header.dump(-1, ' ', false, Handling::ignore)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": a name or the metadata is no UTF-8"));
  }
  const auto alignment = static_cast<size_t>(data_alignment);
  text.append((alignment - (kLengthBytes + text.size()) % alignment) % alignment, ' ');
  if (static_cast<int64_t>(text.size()) > kMaxSafetensorsHeaderBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": a header of ", errors::ExactBytes(text.size()), " is too long"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(const std::string& path,
                                                                           std::string name) {
  absl::StatusOr<std::unique_ptr<InputFile>> file = InputFile::Open(path, std::move(name));
  if (!file.ok()) return file.status();
  return Open(*std::move(file));
}

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(std::unique_ptr<InputFile> file) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader(std::move(file)));
  if (absl::Status status = reader->ReadHeader(); !status.ok()) return status;
  return reader;
}

absl::Status SafetensorsReader::ReadHeader() {
  const absl::StatusOr<int64_t> header_bytes = HeaderBytes(*file_);
  if (!header_bytes.ok()) return header_bytes.status();
  const int64_t data_begin = kLengthBytes + *header_bytes;
  const JsonEntryRules rules = {
      .max_values = kMaxEntryValues,
      .malformed = FileInvalid(name(), "the header is no JSON object with unique keys")};
  bool has_metadata = false;
  absl::Status status =
      ReadJsonEntries(*file_, kLengthBytes, *header_bytes, rules, [&](JsonEntry entry) -> absl::Status {
        if (entry.name == kMetadataKey) {
          if (std::exchange(has_metadata, true)) return rules.malformed;
          absl::StatusOr<std::map<std::string, std::string>> metadata = ParseMetadata(name(), entry.value);
          if (metadata.ok()) metadata_ = *std::move(metadata);
          return metadata.status();
        }
        absl::StatusOr<SafetensorsInfo> tensor =
            ParseTensor(name(), entry.name, entry.value, data_begin, file_->size() - data_begin);
        if (tensor.ok()) tensors_.push_back(*std::move(tensor));
        return tensor.status();
      });
  if (!status.ok()) return status;
  if (HasRepeatedName(tensors_)) return rules.malformed;
  std::sort(tensors_.begin(), tensors_.end(), [](const SafetensorsInfo& a, const SafetensorsInfo& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  return CheckCoverage(name(), tensors_, data_begin, file_->size());
}

absl::StatusOr<const SafetensorsInfo*> SafetensorsReader::Find(absl::string_view tensor_name) const {
  for (const SafetensorsInfo& tensor : tensors_) {
    if (tensor.name == tensor_name) return &tensor;
  }
  return absl::NotFoundError(absl::StrCat(name(), ": no tensor '", tensor_name, "'"));
}

absl::Status SafetensorsReader::ReadBytes(const SafetensorsInfo& tensor, int64_t offset,
                                          absl::Span<uint8_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  if (offset < 0 || offset > tensor.bytes || count > tensor.bytes - offset) {
    return absl::OutOfRangeError(absl::StrCat(name(), ": tensor '", tensor.name,
                                              "': ", errors::ExactBytes(count), " at ", offset, " leave its ",
                                              errors::ExactBytes(tensor.bytes)));
  }
  return file_->ReadAt(tensor.begin + offset, out);
}

absl::Status SafetensorsReader::ReadRows(const SafetensorsInfo& tensor, int64_t row_begin, int64_t rows,
                                         absl::Span<uint8_t> out) const {
  if (row_begin < 0 || rows < 0 || row_begin > tensor.rows() || rows > tensor.rows() - row_begin) {
    return absl::OutOfRangeError(absl::StrCat(name(), ": tensor '", tensor.name, "': ", rows, " rows at ",
                                              row_begin, " leave its ", tensor.rows(), " rows"));
  }
  if (tensor.dtype == DType::kOther) {
    return absl::InvalidArgumentError(absl::StrCat(name(), ": tensor '", tensor.name, "': rows of ",
                                                   tensor.dtype_name, " have no known size"));
  }
  const int64_t row_bytes = tensor.rows() == 0 ? 0 : tensor.bytes / tensor.rows();
  if (static_cast<int64_t>(out.size()) != rows * row_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(name(), ": tensor '", tensor.name, "': ", rows,
                                                   " rows take ", errors::ExactBytes(rows * row_bytes),
                                                   ", not ", errors::ExactBytes(out.size())));
  }
  return ReadBytes(tensor, row_begin * row_bytes, out);
}

absl::StatusOr<std::unique_ptr<DataWriter>> CreateSafetensors(
    const std::string& path, absl::Span<const SafetensorsSpec> tensors,
    const std::map<std::string, std::string>& metadata, const OutputFileFactory& create_file,
    int64_t data_alignment) {
  int64_t data_bytes = 0;
  absl::StatusOr<std::string> header = EncodeHeader(path, tensors, metadata, data_alignment, &data_bytes);
  if (!header.ok()) return header.status();
  absl::StatusOr<std::unique_ptr<OutputFile>> file = create_file(path);
  if (!file.ok()) return file.status();
  std::string start(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i)
    start[static_cast<size_t>(i)] = static_cast<char>(header->size() >> (8 * i));
  start += *header;
  const absl::Status status =
      (*file)->Append(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(start.data()), start.size()));
  if (!status.ok()) return status;
  return std::make_unique<DataWriter>(path, *std::move(file), data_bytes);
}

}  // namespace lossd::formats
