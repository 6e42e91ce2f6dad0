// SPDX-License-Identifier: Apache-2.0
// Round trips, headers as NumPy writes them, and headers that must be refused.
#include "proto/tensorfile/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "tests/support/temp_folder.h"

namespace lossd::formats::npy_test {
namespace {

using test::ReadWholeFile;
using test::WriteWholeFile;
using testing::ElementsAre;
using testing::IsEmpty;

std::string Version1(absl::string_view header, absl::string_view data) {
  const char length[] = {static_cast<char>(header.size()), static_cast<char>(header.size() >> 8)};
  return absl::StrCat(absl::string_view("\x93NUMPY\x01\x00", 8), absl::string_view(length, 2), header, data);
}

std::string Version2(absl::string_view header, absl::string_view data) {
  const char length[] = {static_cast<char>(header.size()), static_cast<char>(header.size() >> 8), 0, 0};
  return absl::StrCat(absl::string_view("\x93NUMPY\x02\x00", 8), absl::string_view(length, 4), header, data);
}

class NpyTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<NpyReader>> OpenBytes(absl::string_view bytes) {
    WriteWholeFile(path_, bytes);
    return NpyReader::Open(path_);
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("x.npy");
};

TEST_F(NpyTest, ReadsHeadersOfNumPy) {
  auto matrix = OpenBytes(Version1(
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }            \n", std::string(24, 'x')));
  ASSERT_TRUE(matrix.ok()) << matrix.status();
  EXPECT_EQ((*matrix)->dtype(), DType::kFloat32);
  EXPECT_THAT((*matrix)->shape(), ElementsAre(2, 3));
  auto vector =
      OpenBytes(Version2("{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }\n", "12345678abcdefgh"));
  ASSERT_TRUE(vector.ok()) << vector.status();
  EXPECT_EQ((*vector)->dtype(), DType::kInt64);
  EXPECT_THAT((*vector)->shape(), ElementsAre(2));
  std::string element(8, '?');
  ASSERT_TRUE((*vector)->Read(1, 1, absl::MakeSpan(reinterpret_cast<uint8_t*>(element.data()), 8)).ok());
  EXPECT_EQ(element, "abcdefgh");
  auto scalar = OpenBytes(Version1("{\"shape\":(),\"fortran_order\":False,\"descr\":\"<f2\"}", "12"));
  ASSERT_TRUE(scalar.ok()) << scalar.status();
  EXPECT_THAT((*scalar)->shape(), IsEmpty());
  EXPECT_EQ((*scalar)->elements(), 1);
  EXPECT_TRUE(OpenBytes(Version1("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 5)}", "")).ok());
}

TEST_F(NpyTest, RoundTrip) {
  const std::vector<std::vector<int64_t>> shapes = {{}, {5}, {0}, {3, 4}, {2, 3, 4}};
  for (const DType dtype :
       {DType::kFloat16, DType::kFloat32, DType::kFloat64, DType::kInt32, DType::kInt64}) {
    for (const std::vector<int64_t>& shape : shapes) {
      int64_t bytes = SizeOf(dtype);
      for (const int64_t dimension : shape) bytes *= dimension;
      std::vector<uint8_t> data(static_cast<size_t>(bytes));
      for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * 7 + shape.size());
      const std::string path =
          folder_.File(absl::StrCat(static_cast<int>(dtype), "-", bytes, "-", shape.size()));
      auto writer = CreateNpy(path, dtype, shape);
      ASSERT_TRUE(writer.ok()) << writer.status();
      ASSERT_TRUE((*writer)->Append(data).ok());
      ASSERT_TRUE((*writer)->Finish().ok());
      EXPECT_EQ((ReadWholeFile(path).size() - data.size()) % 64, 0u);
      auto reader = NpyReader::Open(path);
      ASSERT_TRUE(reader.ok()) << reader.status();
      EXPECT_EQ((*reader)->dtype(), dtype);
      EXPECT_EQ((*reader)->shape(), shape);
      std::vector<uint8_t> read(data.size());
      ASSERT_TRUE((*reader)->Read(0, (*reader)->elements(), absl::MakeSpan(read)).ok());
      EXPECT_EQ(read, data);
    }
  }
}

TEST_F(NpyTest, WritesWhatNumPyWrites) {
  auto writer = CreateNpy(path_, DType::kFloat32, {3});
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE((*writer)->Append(std::vector<uint8_t>(12, 'x')).ok());
  ASSERT_TRUE((*writer)->Finish().ok());
  const std::string dictionary = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
  const std::string header = dictionary + std::string(60, ' ') + "\n";  // data at byte 128
  EXPECT_EQ(ReadWholeFile(path_), Version1(header, std::string(12, 'x')));
}

TEST_F(NpyTest, RefusedHeaders) {
  const std::string bad[] = {
      "",
      "{}",
      "x",
      "{'descr': '<f4', 'fortran_order': False}",
      "{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}",
      "{'descr': '|b1', 'fortran_order': False, 'shape': (4,)}",
      "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
      "{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1.0,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (4611686018427387905,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (99999999999999999999,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}",
      "{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}",
      "{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} x",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1,)",
      "{'descr': '<f4', 'fortran_order': False, 'shape': (1,",
      "{'descr': '<f4",
  };
  ASSERT_TRUE(OpenBytes(Version1("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", "abcd")).ok());
  for (const std::string& header : bad) {
    EXPECT_EQ(OpenBytes(Version1(header, "abcd")).status().code(), absl::StatusCode::kInvalidArgument)
        << header;
  }
}

TEST_F(NpyTest, TruncatedAnywhere) {
  for (const std::string& whole :
       {Version1("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n", "12345678"),
        Version2("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }\n", "12345678")}) {
    ASSERT_TRUE(OpenBytes(whole).ok());
    for (size_t length = 0; length < whole.size(); ++length) {
      EXPECT_EQ(OpenBytes(whole.substr(0, length)).status().code(), absl::StatusCode::kInvalidArgument)
          << length;
    }
  }
  const std::string huge = absl::StrCat(absl::string_view("\x93NUMPY\x02\x00", 8), "\xff\xff\xff\xff", "{}");
  EXPECT_EQ(OpenBytes(huge).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(OpenBytes(absl::StrCat(absl::string_view("\x93NUMPY\x03\x00", 8), "xxxxxxxx")).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(NpyTest, RangesOutsideAndBadRequests) {
  auto reader = OpenBytes(Version1("{'descr': '<f2', 'fortran_order': False, 'shape': (3,)}", "abcdef"));
  ASSERT_TRUE(reader.ok());
  uint8_t buffer[6];
  EXPECT_EQ((*reader)->Read(2, 2, absl::MakeSpan(buffer, 4)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->Read(-1, 2, absl::MakeSpan(buffer, 4)).code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->Read(1, std::numeric_limits<int64_t>::max(), absl::MakeSpan(buffer)).code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ((*reader)->Read(0, 3, absl::MakeSpan(buffer, 5)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateNpy(folder_.File("y"), DType::kBFloat16, {1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateNpy(folder_.File("y"), DType::kFloat32, {-1}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateNpy(path_, DType::kFloat32, {1}).status().code(), absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace lossd::formats::npy_test
