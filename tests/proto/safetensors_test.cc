// SPDX-License-Identifier: Apache-2.0
// Round trips, bytes written by hand after the format's description, and hostile headers.
#include "proto/tensorfile/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/peak_memory.h"
#include "tests/support/temp_folder.h"

namespace lossd::formats::safetensors_test {
namespace {

using test::ReadWholeFile;
using test::WriteWholeFile;
using testing::ElementsAre;
using testing::HasSubstr;

absl::Span<const uint8_t> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// A file with this header text and data.
std::string FileWith(absl::string_view header, absl::string_view data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return absl::StrCat(file, header, data);
}

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() { RecordProperty("seed", static_cast<int>(seed_)); }

  uint64_t Below(uint64_t limit) { return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_); }

  // Opens a file of these bytes.
  absl::StatusOr<std::unique_ptr<SafetensorsReader>> OpenBytes(absl::string_view bytes) {
    WriteWholeFile(path_, bytes);
    return SafetensorsReader::Open(path_);
  }

  void ExpectRefused(absl::string_view bytes, absl::string_view reason) {
    const absl::Status status = OpenBytes(bytes).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status << " for " << bytes;
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(reason)));
  }

  std::string Read(const SafetensorsReader& reader, const SafetensorsInfo& tensor) {
    std::string bytes(static_cast<size_t>(tensor.bytes), '?');
    const absl::Status status =
        reader.ReadBytes(tensor, 0, absl::MakeSpan(reinterpret_cast<uint8_t*>(bytes.data()), bytes.size()));
    EXPECT_TRUE(status.ok()) << status;
    return bytes;
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("x.safetensors");
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

TEST_F(SafetensorsTest, RoundTrip) {
  constexpr DType kTypes[] = {DType::kFloat64,  DType::kFloat32, DType::kFloat16,
                              DType::kBFloat16, DType::kInt8,    DType::kBool,
                              DType::kUInt16,   DType::kInt64,   DType::kFloat8E4M3};
  for (int round = 0; round < 50; ++round) {
    std::vector<SafetensorsSpec> specs;
    std::string data;
    std::vector<std::string> contents;
    for (uint64_t i = Below(6); i > 0; --i) {
      SafetensorsSpec spec{absl::StrCat("layer.", i, ".\"\xc3\xa9\\"), kTypes[Below(std::size(kTypes))], {}};
      int64_t bytes = SizeOf(spec.dtype);
      for (uint64_t d = Below(4); d > 0; --d) {
        spec.shape.push_back(static_cast<int64_t>(Below(7)));
        bytes *= spec.shape.back();
      }
      std::string content(static_cast<size_t>(bytes), 0);
      for (char& byte : content) byte = static_cast<char>(random_());
      data += content;
      contents.push_back(content);
      specs.push_back(spec);
    }
    const std::string path = folder_.File(absl::StrCat(round));
    const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"", "x\n"}};
    auto writer = CreateSafetensors(path, specs, metadata);
    ASSERT_TRUE(writer.ok()) << writer.status();
    for (size_t at = 0; at < data.size();) {
      const size_t length = std::min<size_t>(data.size() - at, 1 + Below(40));
      ASSERT_TRUE((*writer)->Append(AsBytes(data).subspan(at, length)).ok());
      at += length;
    }
    ASSERT_TRUE((*writer)->Finish().ok());

    auto reader = SafetensorsReader::Open(path);
    ASSERT_TRUE(reader.ok()) << reader.status();
    EXPECT_EQ((*reader)->metadata(), metadata);
    ASSERT_EQ((*reader)->tensors().size(), specs.size());
    for (size_t i = 0; i < specs.size(); ++i) {
      const auto tensor = (*reader)->Find(specs[i].name);
      ASSERT_TRUE(tensor.ok()) << tensor.status();
      EXPECT_EQ((*tensor)->dtype, specs[i].dtype);
      EXPECT_EQ((*tensor)->shape, specs[i].shape);
      EXPECT_EQ(Read(**reader, **tensor), contents[i]);
    }
  }
}

// The format as its description has it, not as the writer here makes it.
TEST_F(SafetensorsTest, ReadsBytesMadeByHand) {
  const std::string header =
      R"({"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},)"
      R"("__metadata__":{"who":"me"},"a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("empty":{"dtype":"I64","shape":[3,0],"data_offsets":[12,12]}}   )";
  auto reader = OpenBytes(FileWith(header, std::string("\0\0\x80\x3f"
                                                       "abcdefgh",
                                                       12)));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->metadata().at("who"), "me");
  ASSERT_EQ((*reader)->tensors().size(), 3u);
  const SafetensorsInfo& a = (*reader)->tensors()[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DType::kFloat32);
  EXPECT_EQ(a.rows(), 1);
  EXPECT_EQ(Read(**reader, a), std::string("\0\0\x80\x3f", 4));
  const SafetensorsInfo& b = (*reader)->tensors()[1];
  EXPECT_EQ(b.name, "b");
  EXPECT_EQ(b.dtype_name, "BF16");
  EXPECT_THAT(b.shape, ElementsAre(2, 2));
  uint8_t row[4];
  ASSERT_TRUE((*reader)->ReadRows(b, 1, 1, absl::MakeSpan(row)).ok());
  EXPECT_THAT(row, ElementsAre('e', 'f', 'g', 'h'));
  EXPECT_EQ((*reader)->tensors()[2].bytes, 0);
  EXPECT_EQ((*reader)->Find("c").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string((*reader)->Find("c").status().message()),
              testing::AllOf(HasSubstr("'c'"), HasSubstr(path_)));
}

TEST_F(SafetensorsTest, WritesTheDescribedBytes) {
  const SafetensorsSpec specs[] = {{"w", DType::kFloat16, {2, 3}}, {"b", DType::kFloat32, {1}}};
  auto writer = CreateSafetensors(path_, specs);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Append(AsBytes("0123456789abcdef")).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  const std::string text = ReadWholeFile(path_);
  const std::string header =
      R"({"w":{"dtype":"F16","shape":[2,3],"data_offsets":[0,12]},"b":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}})";
  EXPECT_EQ(text.substr(8, header.size()), header);
  EXPECT_TRUE(absl::EndsWith(text, " 0123456789abcdef"));
  EXPECT_EQ((text.size() - 16) % 64, 0u);
  EXPECT_EQ(static_cast<uint8_t>(text[0]) + 256u * static_cast<uint8_t>(text[1]), text.size() - 16 - 8);
}

TEST_F(SafetensorsTest, RowsOutsideAndWrongSizes) {
  auto reader = OpenBytes(
      FileWith(R"({"t":{"dtype":"F32","shape":[3,2],"data_offsets":[0,24]}})", std::string(24, 'x')));
  ASSERT_TRUE(reader.ok());
  const SafetensorsInfo& t = *(*reader)->Find("t").value();
  uint8_t buffer[24];
  const absl::Span<uint8_t> all(buffer);
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_TRUE((*reader)->ReadRows(t, 0, 3, all).ok());
  EXPECT_TRUE((*reader)->ReadRows(t, 3, 0, all.first(0)).ok());
  EXPECT_EQ((*reader)->ReadRows(t, 1, 3, all).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->ReadRows(t, -1, 2, all).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->ReadRows(t, 1, kMax, all).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->ReadRows(t, kMax, 1, all).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->ReadRows(t, 0, 2, all).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ((*reader)->ReadBytes(t, 20, all.first(5)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->ReadBytes(t, kMax, all).code(), absl::StatusCode::kOutOfRange);
}

TEST_F(SafetensorsTest, FileThatShrinksIsDataLoss) {
  const std::string bytes = FileWith(R"({"t":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", "123456789");
  auto reader = OpenBytes(bytes);
  ASSERT_TRUE(reader.ok());
  std::filesystem::resize_file(path_, bytes.size() - 3);
  uint8_t buffer[9];
  EXPECT_EQ((*reader)->ReadRows((*reader)->tensors()[0], 0, 9, absl::MakeSpan(buffer)).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, HostileHeaders) {
  ExpectRefused("", "shorter than 8");
  ExpectRefused(std::string(7, '\0'), "shorter than 8");
  ExpectRefused(std::string(8, '\0'), "does not start with '{'");
  ExpectRefused(std::string(8, '\xff') + "{}", "header length 18446744073709551615");
  ExpectRefused(std::string("\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10), "header length");
  ExpectRefused(std::string("\3\0\0\0\0\0\0\0{}", 10), "header length 3 in a file of 10 bytes");
  ExpectRefused(FileWith("not json", ""), "start");
  ExpectRefused(FileWith(" {}", ""), "start");
  ExpectRefused(FileWith("{", ""), "no JSON object");
  ExpectRefused(FileWith("{}{}", ""), "no JSON object");
  ExpectRefused(FileWith("{\"\xff\":1}", ""), "no JSON object");
  ExpectRefused(FileWith("{}", "x"), "1 bytes belong to no tensor");
  ExpectRefused(FileWith("{\"a\":1}", ""), "'a': needs");
  ExpectRefused(FileWith(R"({"a":{"dtype":"U8","shape":[1]}})", "x"), "'a': needs");
  ExpectRefused(FileWith(R"({"a":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", "x"), "'a': needs");
  ExpectRefused(FileWith(R"({"__metadata__":[]})", ""), "__metadata__");
  ExpectRefused(FileWith(R"({"__metadata__":{"a":1}})", ""), "'a' is no string");
  ExpectRefused(FileWith("{\"a\":" + std::string(1 << 20, '['), ""), "no JSON object");
}

TEST_F(SafetensorsTest, LongHeadersTakeLittleMemory) {
  std::string shape = "{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,0],\"shape\":[0";
  while (shape.size() < size_t{20} << 20) shape += ",0";
  std::string metadata = "{\"__metadata__\":{";
  for (int i = 0; i < 2'000'000; ++i) absl::StrAppend(&metadata, "\"", i, "\":\"\",");
  for (std::string text : {shape + "]}}", metadata + "\"\":\"\"}}"}) {
    WriteWholeFile(path_, FileWith(text, ""));
    std::string().swap(text);
    absl::Status status;
    EXPECT_LE(test::PeakGrowth([&] { status = SafetensorsReader::Open(path_).status(); }), int64_t{16} << 20);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

TEST_F(SafetensorsTest, HostileTensors) {
  struct Case {
    const char* dtype;
    const char* shape;
    const char* offsets;
    const char* reason;
  };
  const Case cases[] = {
      {"U8", "[4]", "[0,5]", "bad data_offsets"},
      {"U8", "[4]", "[-4,0]", "bad data_offsets"},
      {"U8", "[4]", "[4,0]", "bad data_offsets"},
      {"U8", "[4]", "[0.0,4.0]", "bad data_offsets"},
      {"U8", "[4]", "[0,4,4]", "bad data_offsets"},
      {"U8", "[4]", "[0]", "bad data_offsets"},
      {"U8", "[4]", "{}", "bad data_offsets"},
      {"U8", "[4]", "[18446744073709551612,18446744073709551615]", "bad data_offsets"},
      {"U8", "[4]", "[0,18446744073709551620]", "bad data_offsets"},
      {"U8", "[-4]", "[0,4]", "bad shape"},
      {"U8", "[4.0]", "[0,4]", "bad shape"},
      {"U8", "[9223372036854775808]", "[0,4]", "bad shape"},
      {"U8", "4", "[0,4]", "bad shape"},
      {"U8", "[\"4\"]", "[0,4]", "bad shape"},
      {"U8", "[3]", "[0,4]", "does not take 4 bytes"},
      {"F32", "[4]", "[0,4]", "does not take 4 bytes"},
      {"F32", "[4611686018427387905]", "[0,4]", "does not take 4 bytes"},   // 4 * it = 4 modulo 2^64
      {"U8", "[4294967296,4294967296]", "[0,0]", "does not take 0 bytes"},  // 0 modulo 2^64
      {"U8", "[2]", "[2,4]", "leaves a gap"},
      {"U8", "[2]", "[0,2]", "2 bytes belong to no tensor"},
  };
  for (const Case& c : cases) {
    const std::string header = absl::StrCat(R"({"a":{"dtype":")", c.dtype, R"(","shape":)", c.shape,
                                            R"(,"data_offsets":)", c.offsets, "}}");
    ExpectRefused(FileWith(header, "wxyz"), c.reason);
  }
}

TEST_F(SafetensorsTest, OverlapsGapsAndDuplicates) {
  const auto entry = [](const char* name, int begin, int end) {
    return absl::StrCat("\"", name, R"(":{"dtype":"U8","shape":[)", end - begin, R"(],"data_offsets":[)",
                        begin, ",", end, "]}");
  };
  EXPECT_TRUE(OpenBytes(FileWith("{" + entry("b", 2, 4) + "," + entry("a", 0, 2) + "}", "wxyz")).ok());
  ExpectRefused(FileWith("{" + entry("a", 0, 3) + "," + entry("b", 2, 4) + "}", "wxyz"), "'b': overlaps");
  ExpectRefused(FileWith("{" + entry("a", 0, 4) + "," + entry("b", 0, 4) + "}", "wxyz"), "overlaps");
  ExpectRefused(FileWith("{" + entry("a", 0, 4) + "," + entry("b", 1, 2) + "}", "wxyz"), "'b': overlaps");
  ExpectRefused(FileWith("{" + entry("a", 0, 1) + "," + entry("b", 2, 4) + "}", "wxyz"), "'b': leaves a gap");
  ExpectRefused(FileWith("{" + entry("a", 0, 2) + "," + entry("a", 2, 4) + "}", "wxyz"), "unique keys");
}

TEST_F(SafetensorsTest, UnknownTypesAreListedButNotReadByRows) {
  auto reader = OpenBytes(FileWith(R"({"q":{"dtype":"F4","shape":[7],"data_offsets":[0,4]}})", "wxyz"));
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ((*reader)->tensors()[0].dtype, DType::kOther);
  EXPECT_EQ((*reader)->tensors()[0].dtype_name, "F4");
  uint8_t buffer[4];
  EXPECT_EQ((*reader)->ReadRows((*reader)->tensors()[0], 0, 7, absl::MakeSpan(buffer)).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(SafetensorsTest, TruncatedAnywhere) {
  const std::string whole = FileWith(
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F16","shape":[2],"data_offsets":[3,7]}})",
      "1234567");
  ASSERT_TRUE(OpenBytes(whole).ok());
  for (size_t length = 0; length < whole.size(); ++length) ExpectRefused(whole.substr(0, length), "");
  ExpectRefused(whole + "8", "belong to no tensor");
}

// Whatever the bytes, opening ends in a reader whose tensors can all be read, or in an error.
TEST_F(SafetensorsTest, MutatedFilesNeverMislead) {
  const std::string whole = FileWith(
      R"({"a":{"dtype":"U8","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"F16","shape":[2],"data_offsets":[3,7]}})",
      "1234567");
  int opened = 0;
  for (int round = 0; round < 3000; ++round) {
    std::string bytes = whole;
    for (uint64_t i = 1 + Below(3); i > 0; --i) bytes[Below(bytes.size())] = static_cast<char>(random_());
    auto reader = OpenBytes(bytes);
    if (!reader.ok()) continue;
    ++opened;
    for (const SafetensorsInfo& tensor : (*reader)->tensors()) {
      EXPECT_EQ(Read(**reader, tensor).size(), static_cast<size_t>(tensor.bytes));
    }
  }
  EXPECT_GT(opened, 0);
}

TEST_F(SafetensorsTest, FilesThatCannotBeOpened) {
  EXPECT_EQ(SafetensorsReader::Open(folder_.File("none")).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(SafetensorsReader::Open(folder_.path()).status().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_EQ(mkfifo(folder_.File("pipe").c_str(), 0600), 0);
  EXPECT_EQ(SafetensorsReader::Open(folder_.File("pipe")).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(SafetensorsTest, WriterChecksWhatItIsGiven) {
  const SafetensorsSpec specs[] = {{"t", DType::kFloat32, {2}}};
  auto writer = CreateSafetensors(path_, specs);
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(CreateSafetensors(path_, specs).status().code(), absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE((*writer)->Append(AsBytes("1234567")).ok());
  EXPECT_EQ((*writer)->Finish().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ((*writer)->Append(AsBytes("89")).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*writer)->Finish().code(), absl::StatusCode::kOutOfRange);

  const std::string other = folder_.File("other");
  const std::vector<std::vector<SafetensorsSpec>> bad = {
      {{"t", DType::kFloat32, {2}}, {"t", DType::kFloat32, {2}}},
      {{"__metadata__", DType::kFloat32, {2}}},
      {{"t", DType::kOther, {2}}},
      {{"t", DType::kFloat32, {-1}}},
      {{"t", DType::kFloat32, {int64_t{1} << 61}}},
      {{"t", DType::kUInt8, {int64_t{1} << 62}}, {"u", DType::kUInt8, {int64_t{1} << 62}}},
      {{"\xff", DType::kFloat32, {2}}},
  };
  for (const std::vector<SafetensorsSpec>& tensors : bad) {
    EXPECT_EQ(CreateSafetensors(other, tensors).status().code(), absl::StatusCode::kInvalidArgument)
        << tensors.back().name;
  }
  EXPECT_FALSE(std::filesystem::exists(other));
}

}  // namespace
}  // namespace lossd::formats::safetensors_test
