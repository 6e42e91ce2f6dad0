// SPDX-License-Identifier: Apache-2.0
// Tests of proto/tensorfile: conversions, files with direct writes, .npy, safetensors, and the index of a
// model in several files.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/tensorfile/dtype.h"
#include "proto/tensorfile/file.h"
#include "proto/tensorfile/npy.h"
#include "proto/tensorfile/safetensors.h"
#include "tests/support/temp_folder.h"

namespace lossd::formats::tensorfile_test {
namespace {

using test::ReadWholeFile;
using test::WriteWholeFile;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Ne;

#if defined(__SANITIZE_ADDRESS__)
constexpr bool kFreedMemoryIsKept = true;
#elif defined(__has_feature)
constexpr bool kFreedMemoryIsKept = __has_feature(address_sanitizer);
#else
constexpr bool kFreedMemoryIsKept = false;
#endif

// A field of /proc/self/status in bytes; -1 without it.
int64_t StatusBytes(const std::string& field) {
  std::ifstream file("/proc/self/status");
  for (std::string name; file >> name; file.ignore(std::numeric_limits<std::streamsize>::max(), '\n')) {
    int64_t kib = 0;
    if (name == field + ":" && file >> kib) return kib << 10;
  }
  return -1;
}

// By how many bytes the process grows at most while `work` runs; -1 if the system does not tell, and under
// the address sanitizer, which keeps what was freed.
template <typename Work>
int64_t PeakGrowth(const Work& work) {
  if (kFreedMemoryIsKept) {
    work();
    return -1;
  }
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak starts from now
  const int64_t before = StatusBytes("VmRSS");
  if (before < 0 || StatusBytes("VmHWM") > before + (int64_t{4} << 20)) return -1;
  work();
  return StatusBytes("VmHWM") - before;
}

// ---- Conversions ----
// Conversions against the formats' definitions, computed here from sign, exponent and fraction.

template <typename To, typename From>
std::vector<To> Converted(DType from, const std::vector<From>& in, DType to) {
  std::vector<To> out(in.size());
  const absl::Status status =
      Convert(from, absl::MakeSpan(reinterpret_cast<const uint8_t*>(in.data()), in.size() * sizeof(From)), to,
              absl::MakeSpan(reinterpret_cast<uint8_t*>(out.data()), out.size() * sizeof(To)));
  EXPECT_TRUE(status.ok()) << status;
  return out;
}

// The value of a binary16 that is no NaN.
double HalfValue(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const double fraction = bits & 1023;
  const double magnitude = exponent == 31  ? std::numeric_limits<double>::infinity()
                           : exponent == 0 ? std::ldexp(fraction, -24)
                                           : std::ldexp(1024 + fraction, exponent - 25);
  return bits >> 15 ? -magnitude : magnitude;
}

double BrainValue(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

bool IsNan16(DType dtype, uint16_t bits) {
  return dtype == DType::kFloat16 ? (bits & 0x7fff) > 0x7c00 : (bits & 0x7fff) > 0x7f80;
}

class SixteenBits : public testing::TestWithParam<DType> {
 protected:
  double Value(uint16_t bits) const {
    return GetParam() == DType::kFloat16 ? HalfValue(bits) : BrainValue(bits);
  }
  uint16_t Infinity() const { return GetParam() == DType::kFloat16 ? 0x7c00 : 0x7f80; }
};

TEST_P(SixteenBits, EveryValueWidensExactlyAndComesBack) {
  std::vector<uint16_t> all(65536);
  for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
  const std::vector<float> wide = Converted<float>(GetParam(), all, DType::kFloat32);
  const std::vector<double> wider = Converted<double>(GetParam(), all, DType::kFloat64);
  const std::vector<uint16_t> back = Converted<uint16_t>(DType::kFloat32, wide, GetParam());
  for (size_t i = 0; i < all.size(); ++i) {
    if (IsNan16(GetParam(), all[i])) {
      EXPECT_TRUE(std::isnan(wide[i]) && std::isnan(wider[i]) && IsNan16(GetParam(), back[i])) << i;
    } else {
      EXPECT_EQ(wide[i], Value(all[i])) << i;
      EXPECT_EQ(wider[i], Value(all[i])) << i;
      EXPECT_EQ(back[i], all[i]);
    }
  }
}

// Midpoints between neighbours go to the even one, anything else to the nearer one.
TEST_P(SixteenBits, RoundsToNearestEven) {
  for (uint16_t bits = 0; bits + 1 < Infinity(); ++bits) {
    const double low = Value(bits), high = Value(static_cast<uint16_t>(bits + 1));
    const auto middle = static_cast<float>((low + high) / 2);
    const std::vector<float> in = {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, HUGE_VALF),
                                   -middle};
    const std::vector<uint16_t> out = Converted<uint16_t>(DType::kFloat32, in, GetParam());
    const auto even = static_cast<uint16_t>(bits + (bits & 1));
    ASSERT_EQ(out, (std::vector<uint16_t>{even, bits, static_cast<uint16_t>(bits + 1),
                                          static_cast<uint16_t>(even | 0x8000)}))
        << bits;
  }
  const std::vector<float> large = {std::numeric_limits<float>::max(), -HUGE_VALF};
  EXPECT_EQ(Converted<uint16_t>(DType::kFloat32, large, GetParam()),
            (std::vector<uint16_t>{Infinity(), static_cast<uint16_t>(Infinity() | 0x8000)}));
}

INSTANTIATE_TEST_SUITE_P(ConvertTest, SixteenBits, testing::Values(DType::kFloat16, DType::kBFloat16),
                         [](const auto& tested) {
                           return tested.param == DType::kFloat16 ? "fp16" : "bf16";
                         });

TEST(ConvertTest, WideTypes) {
  const std::vector<double> in = {0.1, -1e300, 1.0 / 3, 1e-320};
  EXPECT_EQ(Converted<float>(DType::kFloat64, in, DType::kFloat32),
            (std::vector<float>{0.1f, -HUGE_VALF, 1.0f / 3, 0.0f}));
  EXPECT_EQ(Converted<double>(DType::kFloat64, in, DType::kFloat64), in);
  EXPECT_EQ(Converted<uint16_t>(DType::kFloat64, std::vector<double>{1.0, -2.0}, DType::kBFloat16),
            (std::vector<uint16_t>{0x3f80, 0xc000}));
}

TEST(ConvertTest, UnalignedMemory) {
  std::vector<uint8_t> in(9), out(5);
  const float values[] = {1.5f, -2.0f};
  std::memcpy(in.data() + 1, values, 8);
  ASSERT_TRUE(Convert(DType::kFloat32, absl::MakeConstSpan(in).subspan(1), DType::kFloat16,
                      absl::MakeSpan(out).subspan(1))
                  .ok());
  EXPECT_EQ(out, (std::vector<uint8_t>{0, 0x00, 0x3e, 0x00, 0xc0}));
}

TEST(ConvertTest, RefusesOtherTypesAndSizes) {
  std::vector<uint8_t> in(8), out(8, 7);
  const auto code = [&](DType from, size_t in_bytes, DType to, size_t out_bytes) {
    return Convert(from, absl::MakeConstSpan(in).first(in_bytes), to, absl::MakeSpan(out).first(out_bytes))
        .code();
  };
  EXPECT_EQ(code(DType::kInt32, 8, DType::kFloat32, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 8, DType::kOther, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 8, DType::kFloat16, 8), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(DType::kFloat32, 7, DType::kFloat16, 2), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(out, std::vector<uint8_t>(8, 7));
  EXPECT_EQ(code(DType::kFloat32, 0, DType::kFloat16, 0), absl::StatusCode::kOk);
}

// ---- Direct file ----
// Whatever pieces are appended, and wherever they lie in memory, the file has their bytes, on file systems
// with direct writes and without.

class DirectFileTest : public testing::Test {
 protected:
  int64_t Below(int64_t limit) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(limit)); }

  // A piece that lies at any place, or at one that can be written directly.
  absl::Span<const uint8_t> Piece(const AlignedBuffer& memory, int64_t memory_bytes) {
    const int64_t offset = Below(2) == 0 ? 0 : Below(5000);
    int64_t bytes = Below(3) == 0 ? Below(100) : Below(memory_bytes - offset);
    if (Below(2) == 0) bytes = bytes / kDirectAlignment * kDirectAlignment;
    return {&memory[static_cast<size_t>(offset)], static_cast<size_t>(bytes)};
  }

  test::TempFolder folder_;
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

TEST_F(DirectFileTest, HasWhatWasAppended) {
  constexpr int64_t kBytes = int64_t{3} << 20;
  const AlignedBuffer memory = AllocateAligned(kBytes);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.get()) % kDirectAlignment, 0u);
  for (int64_t i = 0; i < kBytes; ++i) memory[static_cast<size_t>(i)] = static_cast<uint8_t>(random_());
  const std::string shared_memory = absl::StrCat("/dev/shm/lossd-direct-", seed_);  // without direct writes
  for (const std::string& path : {folder_.File("x"), shared_memory}) {
    for (int round = 0; round < 6; ++round) {
      auto file = CreateDirectFile(path);
      ASSERT_TRUE(file.ok()) << file.status();
      EXPECT_EQ(CreateDirectFile(path).status().code(), absl::StatusCode::kAlreadyExists);
      std::string expected;
      for (int64_t piece = Below(12); piece > 0; --piece) {
        const absl::Span<const uint8_t> bytes = Piece(memory, kBytes);
        ASSERT_TRUE((*file)->Append(bytes).ok());
        expected.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        if (Below(10) == 0) {
          ASSERT_TRUE((*file)->Sync().ok());
          EXPECT_EQ(test::ReadWholeFile(path), expected);
        }
      }
      if (Below(2) == 0) {
        ASSERT_TRUE((*file)->Sync().ok());
      }
      ASSERT_TRUE((*file)->Close().ok());
      EXPECT_TRUE(test::ReadWholeFile(path) == expected) << expected.size() << " bytes on " << path;
      std::filesystem::remove(path);
    }
  }
}

// The operating system refuses in the middle of a write, directly or not, at a place that is aligned or not.
TEST_F(DirectFileTest, RefusedWrites) {
  const int64_t bytes = int64_t{1} << 20;
  const AlignedBuffer memory = AllocateAligned(bytes);
  std::fill_n(memory.get(), bytes, uint8_t{7});
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = signal(SIGXFSZ, SIG_IGN);
  for (const rlim_t room : {rlim_t{0}, rlim_t{8192}, rlim_t{10'000}}) {
    const std::string path = folder_.File(absl::StrCat(room));
    const rlimit small{.rlim_cur = room, .rlim_max = before.rlim_max};
    auto file = CreateDirectFile(path);
    ASSERT_TRUE(file.ok()) << file.status();
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    absl::Status status = (*file)->Append({memory.get(), static_cast<size_t>(bytes)});
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr("File too large"));
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
  }
  signal(SIGXFSZ, handler);
}

TEST_F(DirectFileTest, NoSuchFolder) {
  EXPECT_EQ(CreateDirectFile(folder_.File("missing/x")).status().code(), absl::StatusCode::kNotFound);
}

// ---- .npy ----
// Round trips, headers as NumPy writes them, and headers that must be refused.

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

// ---- Safetensors ----
// Round trips, bytes written by hand after the format's description, and hostile headers.

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
    EXPECT_LE(PeakGrowth([&] { status = SafetensorsReader::Open(path_).status(); }), int64_t{16} << 20);
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

// ---- Safetensors index ----
// Indexes of sharded models: what is written is found, and nothing malformed is taken.

class SafetensorsIndexTest : public testing::Test {
 protected:
  absl::StatusOr<SafetensorsIndex> Open(absl::string_view text) {
    test::WriteWholeFile(path_, text);
    return Read({"a", "b", "c", "bad", "lm_head.weight"});
  }
  absl::StatusOr<SafetensorsIndex> Read(const std::vector<std::string>& tensors) {
    const auto file = InputFile::Open(path_, "the index");
    if (!file.ok()) return file.status();
    return SafetensorsIndex::Read(**file, tensors);
  }
  void ExpectRefused(absl::string_view text, const std::string& why) {
    const absl::Status status = Open(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text.substr(0, 100);
    EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr("the index"), HasSubstr(why)));
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("model.safetensors.index.json");
};

TEST_F(SafetensorsIndexTest, FindsShards) {
  const auto index = Open(R"({"metadata": {"total_size": 12, "x": {"y": [1]}},
      "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(index->tensors(), 2);
  EXPECT_EQ(*index->ShardOf("a"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(*index->ShardOf("b"), "model-00002-of-00002.safetensors");
  const absl::Status missing = index->ShardOf("c").status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(missing.message()), AllOf(HasSubstr("the index"), HasSubstr("'c'")));
}

TEST_F(SafetensorsIndexTest, FindsShardsInSubfolders) {
  const auto index =
      Open(R"({"weight_map": {"a": "shards/model-00001.safetensors", "b": "x/y/..z", "c": "plain"}})");
  ASSERT_TRUE(index.ok()) << index.status();
  EXPECT_EQ(*index->ShardOf("a"), "shards/model-00001.safetensors");
  EXPECT_EQ(*index->ShardOf("b"), "x/y/..z");
}

TEST_F(SafetensorsIndexTest, Refusals) {
  for (const char* text :
       {"", "[]", "{", "1", R"({"weight_map": {"a": "x", "a": "y"}})",
        R"({"weight_map": {}, "weight_map": {}})", "{\"weight_map\": {\"\xff\": \"x\"}}"}) {
    ExpectRefused(text, "unique keys");
  }
  // Nothing may hide behind a 0.
  for (const std::string behind : {"", " ", "]", "{\"weight_map\": {}}"}) {
    ExpectRefused(R"({"weight_map": {"a": "x"}})" + std::string(1, '\0') + behind, "no JSON object");
  }
  for (const char* text : {"{}", R"({"weight_map": []})", R"({"weight_map": null})"}) {
    ExpectRefused(text, "no weight_map");
  }
  for (const char* shard :
       {"\"\"", "\".\"", "\"..\"", "\"../x\"", "\"a/../../x\"", "\"a/..\"", "\"a//b\"", "\"a/\"", "\"./x\"",
        "\"/\"", "\"a/./b\"", "\"/etc/passwd\"", "\"x\\u0000y\"", "3", "null", "{}", "[\"x\"]"}) {
    ExpectRefused(absl::StrCat("{\"weight_map\": {\"fine\": \"x\", \"bad\": ", shard, "}}"), "'bad'");
  }
  ExpectRefused(absl::StrCat("{\"weight_map\": ", std::string(100'000, '[')), "unique keys");
  ExpectRefused(
      absl::StrCat("{\"metadata\": ", std::string(20, '['), std::string(20, ']'), ", \"weight_map\": {}}"),
      "unique keys");
}

TEST_F(SafetensorsIndexTest, LongerThanAllowed) {
  test::WriteWholeFile(path_, "{}");
  ASSERT_EQ(truncate(path_.c_str(), kMaxSafetensorsIndexBytes + 1), 0);
  const absl::Status status = Read({}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(kMaxSafetensorsIndexBytes)));
}

// What is read takes no more memory than what is asked for, however long the index is.
TEST_F(SafetensorsIndexTest, LongIndexesTakeLittleMemory) {
  constexpr int64_t kMost = int64_t{16} << 20;
  std::vector<std::string> texts(5);
  texts[0] = "{\"weight_map\": {";
  for (int i = 0; i < 1'500'000; ++i)
    absl::StrAppend(&texts[0], "\"", i, "\":\"model-00001-of-00002.safetensors\",");
  texts[0] += "\"a\": \"x\"}}";
  texts[1] = absl::StrCat("{\"metadata\": {\"x\": [", std::string(30 << 20, '1'));  // a long number
  texts[2] = absl::StrCat("{\"weight_map\": {\"", std::string(50 << 20, 'a'), "\": \"x\"}}");
  texts[3] = "{\"metadata\": [0";
  for (int i = 0; i < 15'000'000; ++i) texts[3] += ",0";
  texts[3] += "], \"weight_map\": {\"a\": \"x\"}}";
  texts[4] = "{";
  for (int i = 0; i < 3'000'000; ++i) absl::StrAppend(&texts[4], "\"", i, "\":{},");
  texts[4] += "\"weight_map\": {\"a\": \"x\"}}";
  for (size_t i = 0; i < texts.size(); ++i) {
    ASSERT_LE(static_cast<int64_t>(texts[i].size()), kMaxSafetensorsIndexBytes);
    test::WriteWholeFile(path_, texts[i]);
    std::string().swap(texts[i]);
    absl::Status status;
    const int64_t growth = PeakGrowth([&] { status = Read({"a"}).status(); });
    EXPECT_EQ(status.ok(), i == 0) << i << status;
    EXPECT_LE(growth, kMost) << i;
  }
}

// Whatever a few bytes are changed to: an error, or names that stay in the folder or below it.
TEST_F(SafetensorsIndexTest, DamagedTexts) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const std::string whole = R"({"weight_map": {"lm_head.weight": "a.safetensors", "b": "c.safetensors"}})";
  for (int round = 0; round < 2000; ++round) {
    std::string text = whole.substr(0, random() % 4 == 0 ? random() % whole.size() : whole.size());
    for (size_t i = random() % 4; i > 0 && !text.empty(); --i) {
      text[random() % text.size()] = static_cast<char>(random());
    }
    const auto index = Open(text);
    if (!index.ok()) {
      EXPECT_EQ(index.status().code(), absl::StatusCode::kInvalidArgument) << text;
      continue;
    }
    const auto shard = index->ShardOf("lm_head.weight");
    if (!shard.ok()) continue;
    for (const absl::string_view part : absl::StrSplit(*shard, '/')) {
      EXPECT_THAT(std::string(part), AllOf(Ne(""), Ne("."), Ne(".."))) << text;
    }
  }
}

}  // namespace
}  // namespace lossd::formats::tensorfile_test
