// SPDX-License-Identifier: Apache-2.0
// Readers of untrusted JSON, the safetensors format, and the index of a model (safetensors.h).
#include "proto/tensorfile/safetensors.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::formats {

// ---- Short JSON texts ----

namespace {

using nlohmann::json;

// Checks a text while nlohmann's parser reads it. A member that returns false ends the parsing.
class StrictSax final : public nlohmann::json_sax<json> {
 public:
  explicit StrictSax(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Count(); }
  bool boolean(bool) override { return Count(); }
  bool number_integer(number_integer_t) override { return Count(); }
  bool number_unsigned(number_unsigned_t) override { return Count(); }
  bool number_float(number_float_t, const string_t&) override { return Count(); }
  bool string(string_t&) override { return Count(); }
  bool binary(binary_t&) override { return false; }
  bool start_object(size_t) override { return Open(); }
  bool end_object() override { return Close(); }
  bool start_array(size_t) override { return Open(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override { return Count() && open_.back().insert(std::move(name)).second; }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool Count() { return ++values_ <= limits_.values; }
  bool Open() {
    open_.emplace_back();
    return Count() && static_cast<int>(open_.size()) <= limits_.depth + 1;
  }
  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  // Open objects and arrays, each with its names so far (an array has none)
  std::vector<std::set<std::string>> open_;
  int64_t values_ = 0;
};

}  // namespace

bool IsStrictJson(absl::string_view text, const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.bytes) return false;
  StrictSax sax(limits);
  // The parser treats a zero byte as the end of the text.
  const bool has_nul = text.find('\0') != absl::string_view::npos;
  return !has_nul && json::sax_parse(text.begin(), text.end(), &sax);
}

// ---- JSON entry by entry ----

namespace {

using nlohmann::json;

constexpr int64_t kBlockBytes = int64_t{64} << 10;

// A range of a file's bytes, read block by block. It ends early after an error, and after kMaxJsonTokenBytes
// bytes without a quotation mark, because a token that long is malformed.
class Bytes {
 public:
  Bytes(const InputFile& file, int64_t begin, int64_t bytes) : file_(file), at_(begin), end_(begin + bytes) {
    Fill();
  }

  const absl::Status& status() const { return status_; }
  bool at_end() const { return next_ == block_.size(); }
  char front() const { return static_cast<char>(block_[next_]); }
  // Whether a zero byte was among the bytes so far. The parser treats it as the end of the text.
  bool has_nul() const { return has_nul_; }
  void Advance() {
    has_nul_ |= block_[next_] == 0;
    since_quote_ = block_[next_] == '"' ? 0 : since_quote_ + 1;
    ++next_;
    if (since_quote_ > kMaxJsonTokenBytes) {
      block_.clear();
      next_ = 0;
    } else if (next_ == block_.size()) {
      Fill();
    }
  }

 private:
  void Fill() {
    block_.resize(static_cast<size_t>(std::min(kBlockBytes, end_ - at_)));
    next_ = 0;
    status_ = file_.ReadAt(at_, absl::MakeSpan(block_));
    if (!status_.ok()) block_.clear();
    at_ += static_cast<int64_t>(block_.size());
  }

  const InputFile& file_;
  int64_t at_;  // offset of the next block
  const int64_t end_;
  std::vector<uint8_t> block_;
  size_t next_ = 0;
  int64_t since_quote_ = 0;
  bool has_nul_ = false;
  absl::Status status_;
};

// An input iterator over Bytes. The end iterator has a null pointer.
class ByteIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = char;

  explicit ByteIterator(Bytes* bytes = nullptr) : bytes_(bytes) {}
  char operator*() const { return bytes_->front(); }
  ByteIterator& operator++() {
    bytes_->Advance();
    return *this;
  }
  ByteIterator operator++(int) { return ++*this; }
  friend bool operator==(const ByteIterator& a, const ByteIterator& b) { return a.ends() == b.ends(); }
  friend bool operator!=(const ByteIterator& a, const ByteIterator& b) { return !(a == b); }

 private:
  bool ends() const { return bytes_ == nullptr || bytes_->at_end(); }
  Bytes* bytes_;
};

// Builds the value of one entry at a time. A member that returns false ends the parsing.
class EntrySax final : public nlohmann::json_sax<json> {
 public:
  EntrySax(const JsonEntryRules& rules, absl::FunctionRef<absl::Status(JsonEntry entry)> take)
      : rules_(rules), take_(take) {}

  const absl::Status& status() const { return status_; }

  bool null() override { return Put(nullptr); }
  bool boolean(bool value) override { return Put(value); }
  bool number_integer(number_integer_t value) override { return Put(value); }
  bool number_unsigned(number_unsigned_t value) override { return Put(value); }
  bool number_float(number_float_t value, const string_t&) override { return Put(value); }
  bool string(string_t& value) override { return Put(std::move(value)); }
  bool binary(binary_t&) override { return false; }

  bool start_object(size_t) override {
    if (!began_) return began_ = true;
    if (open_.empty() && !entry_.spread && entry_.name == rules_.spread && !rules_.spread.empty()) {
      entry_.value = json::object();
      if (!Take()) return false;
      return entry_.spread = true;
    }
    return Open(json::object());
  }
  bool end_object() override {
    if (!open_.empty()) return Close();
    entry_.spread = false;  // the object of the rules has ended, or the outermost one
    return true;
  }
  bool start_array(size_t) override { return began_ && Open(json::array()); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    if (open_.empty()) {
      entry_.name = std::move(name);
      return true;
    }
    if (!Count() || open_.back()->contains(name)) return false;
    slot_ = &(*open_.back())[name];
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  bool Count() { return ++values_ <= rules_.max_values; }

  // Where the next value is stored.
  json* Place() {
    if (open_.empty()) return &entry_.value;
    if (open_.back()->is_object()) return slot_;
    open_.back()->push_back(nullptr);
    return &open_.back()->back();
  }

  bool Put(json value) {
    if (!began_ || !Count()) return false;
    *Place() = std::move(value);
    return !open_.empty() || Take();
  }

  bool Open(json value) {
    const int depth = static_cast<int>(open_.size()) + 1 + (entry_.spread ? 1 : 0);
    if (depth > rules_.max_depth || !Count()) return false;
    json* const place = Place();
    *place = std::move(value);
    open_.push_back(place);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return !open_.empty() || Take();
  }

  bool Take() {
    JsonEntry next{.spread = entry_.spread};
    std::swap(next, entry_);
    values_ = 0;
    status_ = take_(std::move(next));
    return status_.ok();
  }

  const JsonEntryRules& rules_;
  const absl::FunctionRef<absl::Status(JsonEntry entry)> take_;
  absl::Status status_;
  bool began_ = false;  // the outermost object has begun
  JsonEntry entry_;
  std::vector<json*> open_;  // open objects and arrays of the entry, outermost first
  json* slot_ = nullptr;     // place of the next value in the innermost one, if it is an object
  int64_t values_ = 0;       // number of values in the entry so far
};

}  // namespace

absl::Status ReadJsonEntries(const InputFile& file, int64_t begin, int64_t bytes, const JsonEntryRules& rules,
                             absl::FunctionRef<absl::Status(JsonEntry entry)> take) {
  Bytes text(file, begin, bytes);
  EntrySax sax(rules, take);
  const bool whole = json::sax_parse(ByteIterator(&text), ByteIterator(), &sax);
  if (!text.status().ok()) return text.status();
  if (!sax.status().ok()) return sax.status();
  return whole && !text.has_nul() ? absl::OkStatus() : rules.malformed;
}

// ---- Safetensors ----

namespace {

using nlohmann::json;

constexpr absl::string_view kMetadataKey = "__metadata__";
constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMaxEntryValues = 10'000;  // names and values of __metadata__; a tensor's entry has fewer

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

// The bytes of a tensor; nullopt if a dimension is negative or the product overflows 63 bits.
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

// The value of an integer in [0, 2^63); nullopt for anything else.
std::optional<int64_t> AsSize(const json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >> 63 != 0) return std::nullopt;
  return static_cast<int64_t>(value.get<uint64_t>());
}

// The values of an array of such integers; nullopt for anything else.
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

// The length of the header; checks only how the header begins.
absl::StatusOr<int64_t> HeaderBytes(const InputFile& file) {
  uint8_t length_bytes[kLengthBytes];
  if (file.size() < kLengthBytes) return FileInvalid(file.name(), "shorter than 8 bytes");
  LOSSD_RETURN_IF_ERROR(file.ReadAt(0, absl::MakeSpan(length_bytes)));
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) length = length << 8 | length_bytes[i];
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes) ||
      static_cast<int64_t>(length) > file.size() - kLengthBytes) {
    return FileInvalid(file.name(), absl::StrCat("header length ", length, " in a file of ",
                                                 errors::ExactBytes(file.size())));
  }
  uint8_t first[1] = {};
  if (length > 0) LOSSD_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, absl::MakeSpan(first)));
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

// Parses and checks the entry of one tensor. `data_bytes` bytes of data follow the header.
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
  LOSSD_TRY(std::unique_ptr<InputFile> file, InputFile::Open(path, std::move(name)));
  return Open(std::move(file));
}

absl::StatusOr<std::unique_ptr<SafetensorsReader>> SafetensorsReader::Open(std::unique_ptr<InputFile> file) {
  std::unique_ptr<SafetensorsReader> reader(new SafetensorsReader(std::move(file)));
  LOSSD_RETURN_IF_ERROR(reader->ReadHeader());
  return reader;
}

absl::Status SafetensorsReader::ReadHeader() {
  LOSSD_TRY(const int64_t header_bytes, HeaderBytes(*file_));
  const int64_t data_begin = kLengthBytes + header_bytes;
  const JsonEntryRules rules = {
      .max_values = kMaxEntryValues,
      .malformed = FileInvalid(name(), "the header is no JSON object with unique keys")};
  bool has_metadata = false;
  absl::Status status =
      ReadJsonEntries(*file_, kLengthBytes, header_bytes, rules, [&](JsonEntry entry) -> absl::Status {
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
  LOSSD_TRY(std::string header, EncodeHeader(path, tensors, metadata, data_alignment, &data_bytes));
  LOSSD_TRY(std::unique_ptr<OutputFile> file, create_file(path));
  std::string start(kLengthBytes, '\0');
  for (int i = 0; i < kLengthBytes; ++i)
    start[static_cast<size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  start += header;
  LOSSD_RETURN_IF_ERROR(
      file->Append(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(start.data()), start.size())));
  return std::make_unique<DataWriter>(path, std::move(file), data_bytes);
}

// ---- The index of a model ----

namespace {

constexpr absl::string_view kWeightMap = "weight_map";
constexpr int kMaxDepth = 8;         // metadata may be nested
constexpr size_t kMostOthers = 100;  // most entries besides the weight map
constexpr size_t kMostShown = 200;   // most characters of a value in an error message

absl::Status IndexInvalid(absl::string_view name, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(name, ": not an index of safetensors files: ", what));
}

// True if the path leads from a folder to a file in it or below it.
bool IsPathBelow(absl::string_view path) {
  if (path.find('\0') != absl::string_view::npos) return false;
  const std::vector<absl::string_view> names = absl::StrSplit(path, '/');
  return std::none_of(names.begin(), names.end(),
                      [](absl::string_view name) { return name.empty() || name == "." || name == ".."; });
}

// The value as text for an error message, shortened.
std::string Shortened(const nlohmann::json& value) {
  return absl::CHexEscape(value.dump(-1, ' ', true).substr(0, kMostShown));
}

}  // namespace

absl::StatusOr<SafetensorsIndex> SafetensorsIndex::Read(const InputFile& file,
                                                        absl::Span<const std::string> tensors) {
  if (file.size() > kMaxSafetensorsIndexBytes) {
    return IndexInvalid(file.name(),
                        absl::StrCat("its ", errors::ExactBytes(file.size()), " are more than the ",
                                     errors::ExactBytes(kMaxSafetensorsIndexBytes), " allowed"));
  }
  SafetensorsIndex index(file.name());
  const JsonEntryRules rules = {
      .max_depth = kMaxDepth,
      .spread = std::string(kWeightMap),
      .malformed = IndexInvalid(file.name(), "it is no JSON object with unique keys")};
  const std::set<std::string> wanted(tensors.begin(), tensors.end());
  const absl::Status no_map = IndexInvalid(file.name(), "it has no weight_map");
  std::set<std::string> others;  // the names in the outermost object
  absl::Status status = ReadJsonEntries(file, 0, file.size(), rules, [&](JsonEntry entry) -> absl::Status {
    if (!entry.spread) {
      if (entry.name == kWeightMap && !entry.value.is_object()) return no_map;
      const bool first = others.size() < kMostOthers && others.insert(std::move(entry.name)).second;
      return first ? absl::OkStatus() : rules.malformed;
    }
    if (!entry.value.is_string() || !IsPathBelow(entry.value.get_ref<const std::string&>())) {
      return IndexInvalid(file.name(),
                          absl::StrCat("tensor '", absl::CHexEscape(entry.name.substr(0, kMostShown)),
                                       "' is in ", Shortened(entry.value),
                                       ", which is no path of a file in the index's folder or below it"));
    }
    ++index.tensors_;
    if (!wanted.contains(entry.name)) return absl::OkStatus();
    const auto [it, first] = index.shards_.emplace(std::move(entry.name), entry.value.get<std::string>());
    return first ? absl::OkStatus() : rules.malformed;
  });
  if (!status.ok()) return status;
  if (!others.contains(std::string(kWeightMap))) return no_map;
  return index;
}

absl::StatusOr<absl::string_view> SafetensorsIndex::ShardOf(absl::string_view tensor) const {
  const auto it = shards_.find(tensor);
  if (it != shards_.end()) return it->second;
  return absl::NotFoundError(
      absl::StrCat(name_, ": no tensor '", absl::CHexEscape(tensor), "' among its ", tensors_));
}

}  // namespace lossd::formats
