// SPDX-License-Identifier: Apache-2.0
// The .npy format: the parser of its header, reading and writing (npy.h).
#include "proto/tensorfile/npy.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "kernels/errors/field_error.h"
#include "kernels/errors/status_macros.h"

namespace lossd::formats {
namespace {

constexpr absl::string_view kMagic("\x93NUMPY", 6);
constexpr int64_t kPrefixBytes = 8;  // magic and version
constexpr int64_t kMaxHeaderBytes = int64_t{1} << 16;
constexpr size_t kDataAlignment = 64;

constexpr NamedDType kNpyDTypes[] = {{"<f2", DType::kFloat16},
                                     {"<f4", DType::kFloat32},
                                     {"<f8", DType::kFloat64},
                                     {"<i4", DType::kInt32},
                                     {"<i8", DType::kInt64}};

struct Header {
  DType dtype = DType::kOther;
  std::vector<int64_t> shape;
};

// Removes `token`, and blanks around it, from the front of `text`. False if `text` begins with something
// else.
bool Take(absl::string_view* text, absl::string_view token) {
  *text = absl::StripLeadingAsciiWhitespace(*text);
  if (!absl::ConsumePrefix(text, token)) return false;
  *text = absl::StripLeadingAsciiWhitespace(*text);
  return true;
}

// Removes a string in single or double quotes, without escapes, from the front of `text` and returns it.
std::optional<absl::string_view> TakeString(absl::string_view* text) {
  if (text->empty() || ((*text)[0] != '\'' && (*text)[0] != '"')) return std::nullopt;
  const size_t end = text->find((*text)[0], 1);
  if (end == absl::string_view::npos) return std::nullopt;
  const absl::string_view value = text->substr(1, end - 1);
  text->remove_prefix(end + 1);
  return value;
}

// Removes a tuple of integers, such as "()", "(3,)" or "(3, 4)", from the front of `text` and returns it.
std::optional<std::vector<int64_t>> TakeShape(absl::string_view* text) {
  if (!Take(text, "(")) return std::nullopt;
  const size_t end = text->find(')');
  if (end == absl::string_view::npos) return std::nullopt;
  absl::string_view list = absl::StripAsciiWhitespace(text->substr(0, end));
  text->remove_prefix(end + 1);
  std::vector<int64_t> shape;
  if (list.empty()) return shape;
  const bool trailing_comma = absl::ConsumeSuffix(&list, ",");
  for (const absl::string_view part : absl::StrSplit(list, ',')) {
    int64_t dimension = 0;
    if (!absl::SimpleAtoi(part, &dimension) || dimension < 0) return std::nullopt;
    shape.push_back(dimension);
  }
  // "(3)" is a number in parentheses, not a tuple.
  if (shape.size() == 1 && !trailing_comma) return std::nullopt;
  return shape;
}

// Parses a header such as {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), } with its keys in any
// order. The error says what is wrong.
absl::StatusOr<Header> ParseHeader(absl::string_view text) {
  Header header;
  bool saw_type = false, saw_order = false, saw_shape = false;
  if (!Take(&text, "{")) return absl::InvalidArgumentError("the header is no dictionary");
  while (!Take(&text, "}")) {
    const std::optional<absl::string_view> key = TakeString(&text);
    if (!key.has_value() || !Take(&text, ":"))
      return absl::InvalidArgumentError("the header is no dictionary");
    if (*key == "descr" && !std::exchange(saw_type, true)) {
      const std::optional<absl::string_view> type = TakeString(&text);
      header.dtype = DTypeNamed(kNpyDTypes, type.value_or(""));
      if (header.dtype == DType::kOther) {
        return absl::InvalidArgumentError(absl::StrCat("element type '", type.value_or("(structured)"),
                                                       "' is none of <f2, <f4, <f8, <i4, <i8"));
      }
    } else if (*key == "fortran_order" && !std::exchange(saw_order, true)) {
      if (!Take(&text, "False")) return absl::InvalidArgumentError("the array is not in C order");
    } else if (*key == "shape" && !std::exchange(saw_shape, true)) {
      std::optional<std::vector<int64_t>> shape = TakeShape(&text);
      if (!shape.has_value()) return absl::InvalidArgumentError("bad shape");
      header.shape = *std::move(shape);
    } else {
      return absl::InvalidArgumentError(absl::StrCat("unexpected key '", *key, "'"));
    }
    if (!Take(&text, ",") && !absl::StartsWith(absl::StripLeadingAsciiWhitespace(text), "}")) {
      return absl::InvalidArgumentError("the header is no dictionary");
    }
  }
  if (!text.empty()) return absl::InvalidArgumentError("bytes follow the header's dictionary");
  if (!saw_type || !saw_order || !saw_shape) return absl::InvalidArgumentError("a key is missing");
  return header;
}

// The number of elements; nullopt if the size of the array in bytes overflows 63 bits.
std::optional<int64_t> CountElements(const Header& header) {
  int64_t bytes = SizeOf(header.dtype);
  for (const int64_t dimension : header.shape) {
    if (dimension < 0 || __builtin_mul_overflow(bytes, dimension, &bytes)) return std::nullopt;
  }
  return bytes / SizeOf(header.dtype);
}

absl::Status NpyInvalid(absl::string_view path, absl::string_view what) {
  return absl::InvalidArgumentError(absl::StrCat(path, ": not a readable .npy file: ", what));
}

// Reads the text of the header, and sets where the data begin.
absl::StatusOr<std::string> ReadHeaderText(const InputFile& file, int64_t* data_begin) {
  uint8_t start[12];
  const int64_t available = std::min<int64_t>(file.size(), sizeof(start));
  const auto read = absl::MakeSpan(start, static_cast<size_t>(available));
  LOSSD_RETURN_IF_ERROR(file.ReadAt(0, read));
  const absl::string_view start_text(reinterpret_cast<const char*>(start), static_cast<size_t>(available));
  if (!absl::StartsWith(start_text, kMagic) || available < kPrefixBytes + 2)
    return NpyInvalid(file.name(), "no magic");
  const int version = start[6];
  if ((version != 1 && version != 2) || start[7] != 0) {
    return NpyInvalid(file.name(), absl::StrCat("version ", version, ".", int{start[7]}));
  }
  const int length_bytes = version == 1 ? 2 : 4;
  if (available < kPrefixBytes + length_bytes) return NpyInvalid(file.name(), "truncated");
  int64_t length = 0;
  for (int i = length_bytes - 1; i >= 0; --i) length = length << 8 | start[kPrefixBytes + i];
  *data_begin = kPrefixBytes + length_bytes + length;
  if (length > kMaxHeaderBytes || *data_begin > file.size()) {
    return NpyInvalid(file.name(), absl::StrCat("header length ", length));
  }
  std::string text(static_cast<size_t>(length), '\0');
  const auto text_bytes = absl::MakeSpan(reinterpret_cast<uint8_t*>(text.data()), text.size());
  LOSSD_RETURN_IF_ERROR(file.ReadAt(kPrefixBytes + length_bytes, text_bytes));
  return text;
}

std::string HeaderText(absl::string_view type, absl::Span<const int64_t> shape) {
  std::string text = absl::StrCat("{'descr': '", type, "', 'fortran_order': False, 'shape': (",
                                  absl::StrJoin(shape, ", "), shape.size() == 1 ? ",), }" : "), }");
  constexpr size_t kBefore = kPrefixBytes + 2;
  text.append((kDataAlignment - (kBefore + text.size() + 1) % kDataAlignment) % kDataAlignment, ' ');
  return text + '\n';
}

}  // namespace

absl::StatusOr<std::unique_ptr<NpyReader>> NpyReader::Open(const std::string& path) {
  LOSSD_TRY(std::unique_ptr<InputFile> file, InputFile::Open(path));
  std::unique_ptr<NpyReader> reader(new NpyReader());
  LOSSD_TRY(const std::string text, ReadHeaderText(*file, &reader->data_begin_));
  absl::StatusOr<Header> header = ParseHeader(text);
  if (!header.ok()) return NpyInvalid(path, header.status().message());
  const std::optional<int64_t> elements = CountElements(*header);
  const int64_t data_bytes = file->size() - reader->data_begin_;
  if (!elements.has_value() || *elements * SizeOf(header->dtype) != data_bytes) {
    return NpyInvalid(path, absl::StrCat("shape (", absl::StrJoin(header->shape, ", "), ") does not take ",
                                         errors::ExactBytes(data_bytes)));
  }
  reader->file_ = std::move(file);
  reader->dtype_ = header->dtype;
  reader->shape_ = std::move(header->shape);
  reader->elements_ = *elements;
  return reader;
}

absl::Status NpyReader::Read(int64_t begin, int64_t count, absl::Span<uint8_t> out) const {
  if (begin < 0 || count < 0 || begin > elements_ || count > elements_ - begin) {
    return absl::OutOfRangeError(absl::StrCat(file_->name(), ": ", count, " elements at ", begin,
                                              " leave its ", elements_, " elements"));
  }
  if (static_cast<int64_t>(out.size()) != count * SizeOf(dtype_)) {
    return absl::InvalidArgumentError(absl::StrCat(file_->name(), ": ", count, " elements take ",
                                                   errors::ExactBytes(count * SizeOf(dtype_)), ", not ",
                                                   errors::ExactBytes(out.size())));
  }
  return file_->ReadAt(data_begin_ + begin * SizeOf(dtype_), out);
}

absl::StatusOr<std::unique_ptr<DataWriter>> CreateNpy(const std::string& path, DType dtype,
                                                      absl::Span<const int64_t> shape,
                                                      const OutputFileFactory& create_file) {
  const absl::string_view type = NameOf(kNpyDTypes, dtype);
  if (type.empty())
    return absl::InvalidArgumentError(absl::StrCat(path, ": element type cannot be stored as .npy"));
  const std::optional<int64_t> elements = CountElements({dtype, {shape.begin(), shape.end()}});
  const std::string header = HeaderText(type, shape);
  if (!elements.has_value() || header.size() > 0xffff) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": shape (", absl::StrJoin(shape, ", "), ") is too large"));
  }
  LOSSD_TRY(std::unique_ptr<OutputFile> file, create_file(path));
  const char version_and_length[] = {1, 0, static_cast<char>(header.size()),
                                     static_cast<char>(header.size() >> 8)};
  const std::string start = absl::StrCat(kMagic, absl::string_view(version_and_length, 4), header);
  LOSSD_RETURN_IF_ERROR(
      file->Append(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(start.data()), start.size())));
  return std::make_unique<DataWriter>(path, std::move(file), *elements * SizeOf(dtype));
}

}  // namespace lossd::formats
