// SPDX-License-Identifier: Apache-2.0
#include "server/admin/head_source.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"
#include "server/head/disk.h"
#include "server/head/head.h"
#include "server/head/manifest.h"

namespace lossd::admin {

// ---- Values that are refused ----

namespace {

constexpr size_t kBlock = 4096;  // elements that are checked together

// The bits of an element type: the sign, and the exponent, whose bits are all 1 in NaNs and infinities.
struct Float32 {
  using Bits = uint32_t;
  static constexpr Bits kSign = 0x8000'0000, kExponent = 0x7f80'0000;
  static float Value(Bits bits) { return std::bit_cast<float>(bits); }
};
struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Bits kSign = 0x8000, kExponent = 0x7f80;
  static float Value(Bits bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};
struct Float16 {
  using Bits = uint16_t;
  static constexpr Bits kSign = 0x8000, kExponent = 0x7c00;
  static float Value(Bits bits) {
    const int exponent = (bits & kExponent) >> 10;
    const int fraction = bits & 0x3ff;
    float size = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 0x400),
                            std::max(exponent, 1) - 25);
    if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
    return (bits & kSign) != 0 ? -size : size;
  }
};

template <typename Type>
bool BreaksRules(const ValueRules& rules, typename Type::Bits bits) {
  const bool is_negative = (bits & Type::kSign) != 0 && (bits & ~Type::kSign) != 0;
  if ((bits & Type::kExponent) == Type::kExponent) {
    const float value = Type::Value(bits);
    if (std::isnan(value)) return !rules.non_finite;
    const bool taken = rules.non_finite || (rules.minus_infinity && value < 0);
    return !taken || (is_negative && !rules.negative);
  }
  return is_negative && !rules.negative;
}

// Whether a block may have an element that breaks the rules. Compilers turn the loop into vector code.
template <typename Type>
bool LooksBad(const ValueRules& rules, const typename Type::Bits* bits, size_t count) {
  bool special = false, negative = false;
  for (size_t i = 0; i < count; ++i) {
    special |= (bits[i] & Type::kExponent) == Type::kExponent;
    negative |= (bits[i] & Type::kSign) != 0;
  }
  return (special && !rules.non_finite) || (negative && !rules.negative);
}

template <typename Type>
std::optional<RefusedValue> Search(const ValueRules& rules, absl::Span<const uint8_t> bytes) {
  using Bits = typename Type::Bits;
  const size_t elements = bytes.size() / sizeof(Bits);
  Bits block[kBlock];
  for (size_t begin = 0; begin < elements; begin += kBlock) {
    const size_t count = std::min(kBlock, elements - begin);
    std::memcpy(block, bytes.data() + begin * sizeof(Bits), count * sizeof(Bits));
    if (!LooksBad<Type>(rules, block, count)) continue;
    for (size_t i = 0; i < count; ++i) {
      if (BreaksRules<Type>(rules, block[i])) {
        return RefusedValue{static_cast<int64_t>(begin + i), Type::Value(block[i])};
      }
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<RefusedValue> FirstRefused(const ValueRules& rules, kernels::DType dtype,
                                         absl::Span<const uint8_t> bytes) {
  if (rules.non_finite && rules.negative) return std::nullopt;
  switch (dtype) {
    case kernels::DType::kFloat32:
      return Search<Float32>(rules, bytes);
    case kernels::DType::kFloat16:
      return Search<Float16>(rules, bytes);
    case kernels::DType::kBFloat16:
      return Search<BFloat16>(rules, bytes);
  }
  return std::nullopt;
}

// ---- Tensors of files ----

namespace {

// A parameter, with the field of the request that has the name of its tensor.
struct Wanted {
  kernels::Param param;
  absl::string_view field;
  const std::string& name;
  bool required;
};

absl::StatusOr<kernels::DType> ElementType(const formats::SafetensorsInfo& info, absl::string_view field,
                                           absl::string_view file) {
  if (info.dtype_name == "F32") return kernels::DType::kFloat32;
  if (info.dtype_name == "F16") return kernels::DType::kFloat16;
  if (info.dtype_name == "BF16") return kernels::DType::kBFloat16;
  return errors::FieldError(field, "name a tensor of type F32, F16 or BF16",
                            absl::StrCat("'", info.name, "' of type ", info.dtype_name, " in ", file));
}

std::vector<int64_t> WantedShape(const kernels::HeadConfig& config, kernels::Param param) {
  const kernels::TensorShape shape = kernels::ShapeOf(config, param);
  if (param == kernels::Param::kWeight) return {shape.rows, shape.cols};
  return {shape.rows};
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

constexpr char kPathField[] = "tensor_file.path";
constexpr char kIndexName[] = "model.safetensors.index.json";
constexpr char kFileName[] = "model.safetensors";
using head::kManifestFile;

// Turns an error of a file into an error of the field that named the file or the tensor.
absl::Status InField(absl::string_view field, const std::string& value, const absl::Status& status) {
  return errors::WithViolation(absl::Status(status.code(), absl::StrCat(field, ": ", status.message())),
                               {std::string(field), std::string(status.message()), value});
}

// The path of `name` in the folder that `path` is in: "folder/b" for "folder/a" and "b"; "b" for "a" and "b".
std::string Beside(absl::string_view path, absl::string_view name) {
  const size_t slash = path.rfind('/');
  if (slash == absl::string_view::npos) return std::string(name);
  return absl::StrCat(path.substr(0, slash + 1), name);
}

// Whether a folder has a file or a link of this name. Does not follow the link.
bool HasEntry(const std::string& folder, const std::string& name) {
  std::error_code error;
  return std::filesystem::exists(std::filesystem::symlink_status(absl::StrCat(folder, "/", name), error));
}

// Finds the files that hold tensors, and opens each once. Paths are relative to `directory`.
class Files {
 public:
  using Readers = std::map<std::string, std::unique_ptr<formats::SafetensorsReader>>;

  // `tensors`: the names of all tensors that will be looked for.
  Files(const std::string& directory, std::vector<std::string> tensors, Readers* readers,
        head::ReadLocks* locks)
      : directory_(directory), tensors_(std::move(tensors)), readers_(readers), locks_(locks) {}

  // Finds the files. `path` is the path in the request.
  absl::Status Find(const std::string& path) {
    LOSSD_TRY(const std::string real, head::ResolveBelow(directory_, path));
    std::error_code error;
    path_ = path;
    if (std::filesystem::is_directory(real, error)) {
      if (HasEntry(real, kIndexName)) {
        path_ = absl::StrCat(path, "/", kIndexName);
      } else if (HasEntry(real, kFileName)) {
        path_ = absl::StrCat(path, "/", kFileName);
      } else if (HasEntry(real, kManifestFile)) {
        return OpenCheckpoint(path, real);
      } else {
        return absl::NotFoundError(absl::StrCat(path, ": the folder has neither ", kIndexName, " nor ",
                                                kFileName, ", and no ", kManifestFile, " of a checkpoint"));
      }
    }
    return absl::EndsWith(path_, ".json") ? OpenIndex() : Reader(path_).status();
  }

  // The parts of this tensor, each with its file. At least one.
  absl::StatusOr<std::vector<HeadSource::Part>> With(const std::string& tensor) {
    std::vector<HeadSource::Part> parts;
    for (const std::string& path : shards_) {
      LOSSD_TRY(const auto reader, Reader(path));
      if (const auto info = reader->Find(tensor); info.ok()) parts.push_back({reader, *info});
    }
    if (!parts.empty()) return parts;
    LOSSD_TRY(const auto reader, OneWith(tensor));
    LOSSD_TRY(const auto info, reader->Find(tensor));
    parts.push_back({reader, info});
    return parts;
  }

 private:
  absl::StatusOr<const formats::SafetensorsReader*> OneWith(const std::string& tensor) {
    if (!shards_.empty()) return Reader(shards_[0]);
    if (!index_.has_value()) return Reader(path_);
    LOSSD_TRY(const absl::string_view shard, index_->ShardOf(tensor));
    absl::StatusOr<const formats::SafetensorsReader*> reader = Reader(Beside(path_, shard));
    if (reader.ok()) return reader;
    return absl::Status(reader.status().code(), absl::StrCat(path_, ": the shard of tensor '", tensor,
                                                             "': ", reader.status().message()));
  }

  // Opens the files of a checkpoint, in the order of their classes. A lock keeps them from being removed
  // while they are read.
  absl::Status OpenCheckpoint(const std::string& path, const std::string& folder) {
    absl::StatusOr<head::ReadLocks> locks = head::LockForReading(folder);
    if (absl::IsNotFound(locks.status())) {
      return absl::NotFoundError(absl::StrCat(path, ": was removed just now"));
    }
    if (!locks.ok()) return locks.status();
    *locks_ = *std::move(locks);
    LOSSD_TRY(const head::Manifest manifest, head::ReadManifest(directory_, path));
    for (const head::ManifestShard& shard : manifest.shards) {
      shards_.push_back(absl::StrCat(path, "/", shard.file));
      LOSSD_RETURN_IF_ERROR(Reader(shards_.back()).status());
    }
    locks_->name = head::FolderLock();
    return absl::OkStatus();
  }

  absl::Status OpenIndex() {
    LOSSD_TRY(const std::unique_ptr<formats::InputFile> file, head::OpenBelow(directory_, path_));
    LOSSD_TRY(index_, formats::SafetensorsIndex::Read(*file, tensors_));
    return absl::OkStatus();
  }

  absl::StatusOr<const formats::SafetensorsReader*> Reader(const std::string& path) {
    std::unique_ptr<formats::SafetensorsReader>& reader = (*readers_)[path];
    if (reader != nullptr) return reader.get();
    LOSSD_TRY(std::unique_ptr<formats::InputFile> file, head::OpenBelow(directory_, path));
    LOSSD_TRY(reader, formats::SafetensorsReader::Open(std::move(file)));
    return reader.get();
  }

  const std::string& directory_;
  const std::vector<std::string> tensors_;
  Readers* const readers_;
  head::ReadLocks* const locks_;
  std::string path_;                 // the path of the index, or of the only file
  std::vector<std::string> shards_;  // the files of a checkpoint
  std::optional<formats::SafetensorsIndex> index_;
};

// The shape of the tensor that the parts form together: the rows of each part follow those of the part
// before. INVALID_ARGUMENT if a part has another type or other columns than the first part.
absl::StatusOr<std::vector<int64_t>> ShapeOf(const Wanted& wanted, absl::Span<const HeadSource::Part> parts) {
  const auto text = [](const HeadSource::Part& part) {
    return absl::StrCat("type ", part.info->dtype_name, " and shape ", ShapeText(part.info->shape), " in ",
                        part.file->name());
  };
  const HeadSource::Part& first = parts[0];
  std::vector<int64_t> shape = first.info->shape;
  for (const HeadSource::Part& part : parts.subspan(1)) {
    std::vector<int64_t> of_part = part.info->shape;
    const int64_t rows = of_part.empty() ? 0 : std::exchange(of_part[0], shape.empty() ? 0 : shape[0]);
    if (of_part.empty() || of_part != shape || part.info->dtype_name != first.info->dtype_name ||
        __builtin_add_overflow(shape[0], rows, &shape[0])) {
      return errors::FieldError(
          wanted.field, "name a tensor whose parts have one type and the same columns",
          absl::StrCat("'", wanted.name, "' of ", text(first), ", and of ", text(part)));
    }
  }
  return shape;
}

// Checks one tensor against the head.
absl::StatusOr<HeadSource::Tensor> Match(const Wanted& wanted, const kernels::HeadConfig& config,
                                         Files& files, bool allow_non_finite) {
  auto parts = files.With(wanted.name);
  if (!parts.ok()) return InField(wanted.field, wanted.name, parts.status());
  const formats::SafetensorsReader& file = *parts->front().file;
  const std::vector<int64_t> shape = WantedShape(config, wanted.param);
  LOSSD_TRY(const std::vector<int64_t> actual, ShapeOf(wanted, *parts));
  if (actual != shape) {
    return errors::FieldError(
        wanted.field, absl::StrCat("name a tensor of shape ", ShapeText(shape)),
        absl::StrCat("'", wanted.name, "' of shape ", ShapeText(actual), " in ", file.name()));
  }
  LOSSD_TRY(const kernels::DType dtype, ElementType(*parts->front().info, wanted.field, file.name()));
  return HeadSource::Tensor{.param = wanted.param,
                            .dtype = dtype,
                            .parts = *std::move(parts),
                            .name = wanted.name,
                            .field = wanted.field,
                            .cols = kernels::ShapeOf(config, wanted.param).cols,
                            .rules = {.non_finite = allow_non_finite,
                                      .minus_infinity = wanted.param == kernels::Param::kBias,
                                      .negative = wanted.param != kernels::Param::kClassWeights}};
}

}  // namespace

absl::StatusOr<HeadSource> HeadSource::Open(const std::string& directory, const v1::TensorFile& file,
                                            const kernels::HeadConfig& config) {
  HeadSource source;
  Files files(directory,
              {file.weight(), file.bias(), file.norm_gain(), file.norm_shift(), file.class_weights()},
              &source.files_, &source.locks_);
  if (absl::Status status = files.Find(file.path()); !status.ok())
    return InField(kPathField, file.path(), status);
  const Wanted all[] = {
      {kernels::Param::kWeight, "tensor_file.weight", file.weight(), true},
      {kernels::Param::kBias, "tensor_file.bias", file.bias(), true},
      {kernels::Param::kNormGain, "tensor_file.norm_gain", file.norm_gain(), true},
      {kernels::Param::kNormShift, "tensor_file.norm_shift", file.norm_shift(), true},
      {kernels::Param::kClassWeights, "tensor_file.class_weights", file.class_weights(), false}};
  for (const Wanted& wanted : all) {
    const bool stored = kernels::HasTensor(config, {wanted.param, kernels::Role::kValue});
    if (!stored && !wanted.name.empty()) {
      return errors::FieldError(wanted.field, "be empty for a head without this tensor", wanted.name);
    }
    if (!stored || (wanted.name.empty() && !wanted.required)) continue;
    if (wanted.name.empty())
      return errors::FieldError(wanted.field, "name a tensor for this head", "nothing");
    LOSSD_TRY(Tensor tensor, Match(wanted, config, files, file.allow_non_finite()));
    source.tensors_.push_back(tensor);
  }
  return source;
}

absl::Status HeadSource::ReadRows(const Tensor& tensor, engine::RowRange rows,
                                  absl::Span<uint8_t> out) const {
  const size_t row_bytes = rows.size() == 0 ? 0 : out.size() / static_cast<size_t>(rows.size());
  int64_t first = 0;  // the tensor's row with which the part begins
  for (const Part& part : tensor.parts) {
    const int64_t begin = std::max(rows.begin, first);
    const int64_t end = std::min(rows.end, first + part.info->rows());
    if (begin < end) {
      const auto bytes = out.subspan(static_cast<size_t>(begin - rows.begin) * row_bytes,
                                     static_cast<size_t>(end - begin) * row_bytes);
      LOSSD_RETURN_IF_ERROR(part.file->ReadRows(*part.info, begin - first, end - begin, bytes));
    }
    first += part.info->rows();
  }
  return CheckValues(tensor, rows.begin, out);
}

absl::Status HeadSource::CheckValues(const Tensor& tensor, int64_t first_row,
                                     absl::Span<const uint8_t> bytes) {
  const std::optional<RefusedValue> refused = FirstRefused(tensor.rules, tensor.dtype, bytes);
  if (!refused.has_value()) return absl::OkStatus();
  int64_t row = first_row + refused->index / tensor.cols;
  const bool is_matrix = tensor.param == kernels::Param::kWeight;
  const std::string place = is_matrix ? absl::StrCat("[", row, ", ", refused->index % tensor.cols, "]")
                                      : absl::StrCat("[", row, "]");
  for (const Part& part : tensor.parts) {
    if (row >= part.info->rows()) {
      row -= part.info->rows();
      continue;
    }
    const bool is_finite = std::isfinite(refused->value);
    return errors::FieldError(
        tensor.field,
        is_finite ? "name a tensor without numbers below 0"
                  : "name a tensor of finite values, unless tensor_file.allow_non_finite is set",
        absl::StrCat(std::isnan(refused->value) ? "nan" : absl::StrCat(refused->value), " at ", place,
                     " of '", tensor.name, "' in ", part.file->name()));
  }
  return absl::InternalError(absl::StrCat("row ", row, " of ", tensor.name, " is in no file"));
}

// ---- Initial values ----

template <typename Request>
absl::StatusOr<InitialValues> InitialValues::OpenAny(const std::string& directory, const Request& request,
                                                     const kernels::HeadConfig& config) {
  InitialValues values(config);
  if (request.has_tensor_file()) {
    LOSSD_TRY(values.source_, HeadSource::Open(directory, request.tensor_file(), config));
  } else if (!request.has_zeros()) {
    values.seed_ = request.kaiming_uniform().seed();
  }
  return values;
}

absl::StatusOr<InitialValues> InitialValues::Open(const std::string& directory,
                                                  const v1::CreateHeadRequest& request,
                                                  const kernels::HeadConfig& config) {
  return OpenAny(directory, request, config);
}

absl::StatusOr<InitialValues> InitialValues::Open(const std::string& directory,
                                                  const v1::ResetHeadRequest& request,
                                                  const kernels::HeadConfig& config) {
  return OpenAny(directory, request, config);
}

absl::Status InitialValues::CheckReadable(int64_t slice_bytes) const {
  if (!source_.has_value()) return absl::OkStatus();
  return FillFromFile(slice_bytes, [](kernels::TensorId, engine::RowRange, kernels::DType,
                                      absl::Span<const uint8_t>) { return absl::OkStatus(); });
}

bool InitialValues::Sets(kernels::Param param) const {
  if (seed_.has_value()) return param == kernels::Param::kWeight || param == kernels::Param::kBias;
  if (!source_.has_value()) return false;
  return std::any_of(source_->tensors().begin(), source_->tensors().end(),
                     [&](const HeadSource::Tensor& tensor) { return tensor.param == param; });
}

absl::Status InitialValues::Fill(bool used, int64_t slice_bytes, Sink sink) const {
  for (const kernels::Param param : kernels::kAllParams) {
    if (!used || Sets(param) || !kernels::HasTensor(config_, {param, kernels::Role::kValue})) continue;
    const bool ones = param == kernels::Param::kNormGain || param == kernels::Param::kClassWeights;
    absl::Status filled = FillTensor(
        param, kernels::DType::kFloat32, slice_bytes,
        [&](engine::RowRange, absl::Span<uint8_t> out) {
          // The buffer comes from operator new, so it is aligned for floats.
          std::fill_n(reinterpret_cast<float*>(out.data()), out.size() / sizeof(float), ones ? 1.0f : 0.0f);
          return absl::OkStatus();
        },
        sink);
    if (!filled.ok()) return filled;
  }
  if (seed_.has_value()) return FillUniform(slice_bytes, sink);
  return source_.has_value() ? FillFromFile(slice_bytes, sink) : absl::OkStatus();
}

absl::Status InitialValues::FillUniform(int64_t slice_bytes, Sink sink) const {
  const float bound = head::KaimingBound(config_.hidden_size);
  for (const kernels::Param param : {kernels::Param::kWeight, kernels::Param::kBias}) {
    if (!kernels::HasTensor(config_, {param, kernels::Role::kValue})) continue;
    const int64_t cols = kernels::ShapeOf(config_, param).cols;
    absl::Status filled = FillTensor(
        param, kernels::DType::kFloat32, slice_bytes,
        [&](engine::RowRange rows, absl::Span<uint8_t> out) {
          const absl::Span<float> values(reinterpret_cast<float*>(out.data()), out.size() / sizeof(float));
          head::FillUniform(*seed_, param, rows.begin * cols, bound, values);
          return absl::OkStatus();
        },
        sink);
    if (!filled.ok()) return filled;
  }
  return absl::OkStatus();
}

absl::Status InitialValues::FillFromFile(int64_t slice_bytes, Sink sink) const {
  for (const HeadSource::Tensor& tensor : source_->tensors()) {
    absl::Status filled = FillTensor(
        tensor.param, tensor.dtype, slice_bytes,
        [&](engine::RowRange rows, absl::Span<uint8_t> out) { return source_->ReadRows(tensor, rows, out); },
        sink);
    if (!filled.ok()) return filled;
  }
  return absl::OkStatus();
}

absl::Status InitialValues::FillTensor(kernels::Param param, kernels::DType dtype, int64_t slice_bytes,
                                       RowSource source, Sink sink) const {
  const kernels::TensorShape shape = kernels::ShapeOf(config_, param);
  const int64_t row_bytes = shape.cols * static_cast<int64_t>(kernels::SizeOf(dtype));
  const int64_t rows_at_once = std::max<int64_t>(1, slice_bytes / row_bytes);
  std::vector<uint8_t> buffer(static_cast<size_t>(std::min(rows_at_once, shape.rows) * row_bytes));
  for (int64_t begin = 0; begin < shape.rows; begin += rows_at_once) {
    const engine::RowRange rows{begin, std::min(begin + rows_at_once, shape.rows)};
    const auto bytes = absl::MakeSpan(buffer).first(static_cast<size_t>(rows.size() * row_bytes));
    LOSSD_RETURN_IF_ERROR(source(rows, bytes));
    LOSSD_RETURN_IF_ERROR(sink({param, kernels::Role::kValue}, rows, dtype, bytes));
  }
  return absl::OkStatus();
}

}  // namespace lossd::admin
