// SPDX-License-Identifier: Apache-2.0
// The norm kernels against double precision, on rows that take each of their ways: several rows a warp's
// ring, one row a block, two, three or four vectors a thread, rows shared by two blocks, rows read again for
// each pass. On Hopper each case also runs as on other devices.
#include "kernels/cuda/kernels/norm.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::norm_test {
namespace {

using cuda::DeviceLimits;
using cuda::NormBackwardParams;
using cuda::NormParams;

constexpr float kScale = 0.37f;
constexpr float kEpsilon = 1e-5f;

struct NormCase {
  int64_t rows;
  int64_t cols;
  DType x;   // also of dx
  DType dy;  // also of y
  bool centred;
  bool sparse;  // compact rows are some of the raw ones, some are kept out of the parameter gradients
  bool outliers = false;  // the first eight columns are far from the others
};

std::string Describe(const NormCase& c) {
  return std::to_string(c.rows) + " x " + std::to_string(c.cols) + ", x " + std::string(Name(c.x)) + ", dy " +
         std::string(Name(c.dy)) + (c.centred ? ", centred" : "") + (c.sparse ? ", sparse" : "") +
         (c.outliers ? ", outliers" : "");
}

DeviceLimits Limits() {
  cudaDeviceProp properties = {};
  EXPECT_EQ(cudaGetDeviceProperties(&properties, 0), cudaSuccess);
  return {.multiprocessors = properties.multiProcessorCount,
          .shared_bytes_per_block = static_cast<int>(properties.sharedMemPerBlockOptin) - (2 << 10),
          .shared_bytes_per_sm = static_cast<int>(properties.sharedMemPerMultiprocessor),
          .has_clusters = properties.major >= 9,
          .is_hopper = properties.major == 9 && properties.minor == 0};
}

// Device memory with the contents of a vector.
template <typename T>
class OnDevice {
 public:
  explicit OnDevice(const std::vector<T>& from) : count_(from.size()) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, count_ * sizeof(T)), cudaSuccess);
    data_.reset(static_cast<T*>(data));
    EXPECT_EQ(cudaMemcpy(data, from.data(), count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
  }
  T* get() const { return data_.get(); }
  std::vector<T> Read() const {
    std::vector<T> to(count_);
    EXPECT_EQ(cudaMemcpy(to.data(), get(), count_ * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return to;
  }

 private:
  struct Free {
    void operator()(T* data) const { cudaFree(data); }
  };
  size_t count_;
  std::unique_ptr<T, Free> data_;
};

std::vector<float> RandomValues(int64_t count, float low, float high, DType dtype, Rng& rng) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = RoundTo(dtype, Uniform(rng, low, high));
  return values;
}

struct Inputs {
  std::vector<int32_t> source;                                    // [rows]
  std::vector<int32_t> keep;                                      // [rows]
  std::vector<float> x;                                           // [raw rows, cols]
  std::vector<float> dy;                                          // [rows, cols]
  std::vector<float> gain, shift, gain_gradient, shift_gradient;  // [cols]
};

Inputs MakeInputs(const NormCase& c, Rng& rng) {
  Inputs in;
  const int64_t raw_rows = c.sparse ? c.rows + c.rows / 3 + 2 : c.rows;
  std::vector<int32_t> raw(static_cast<size_t>(raw_rows));
  std::iota(raw.begin(), raw.end(), 0);
  if (c.sparse) std::shuffle(raw.begin(), raw.end(), rng);
  in.source.assign(raw.begin(), raw.begin() + c.rows);
  std::sort(in.source.begin(), in.source.end());
  for (int64_t r = 0; r < c.rows; ++r) in.keep.push_back(c.sparse && Chance(rng, 0.2) ? 0 : 1);
  const float offset = Uniform(rng, -3.0f, 3.0f);
  in.x = RandomValues(raw_rows * c.cols, offset - 2.0f, offset + 2.0f, c.x, rng);
  for (size_t i = 0; c.outliers && i < in.x.size(); ++i) {
    if (i % static_cast<size_t>(c.cols) < 8) in.x[i] = 1000.0f;
  }
  in.dy = RandomValues(c.rows * c.cols, -2.0f, 2.0f, c.dy, rng);
  in.gain = RandomValues(c.cols, 0.5f, 1.5f, DType::kFloat32, rng);
  for (std::vector<float>* values : {&in.shift, &in.gain_gradient, &in.shift_gradient}) {
    *values = RandomValues(c.cols, -1.0f, 1.0f, DType::kFloat32, rng);
  }
  return in;
}

struct Outputs {
  std::vector<double> y;   // [rows, cols]
  std::vector<double> dx;  // [raw rows, cols]; x in rows that are not compact
  std::vector<double> gain_gradient, shift_gradient;
};

Outputs Reference(const NormCase& c, const Inputs& in) {
  Outputs out;
  out.dx.assign(in.x.begin(), in.x.end());
  out.gain_gradient.assign(in.gain_gradient.begin(), in.gain_gradient.end());
  out.shift_gradient.assign(in.shift_gradient.begin(), in.shift_gradient.end());
  const auto cols = static_cast<size_t>(c.cols);
  const auto count = static_cast<double>(c.cols);
  std::vector<double> unit(cols);
  for (size_t row = 0; row < in.source.size(); ++row) {
    const float* x = in.x.data() + static_cast<size_t>(in.source[row]) * cols;
    const float* dy = in.dy.data() + row * cols;
    const double mean = c.centred ? std::accumulate(x, x + cols, 0.0) / count : 0.0;
    double squares = 0.0;
    for (size_t i = 0; i < cols; ++i) squares += (x[i] - mean) * (x[i] - mean);
    const double r = 1.0 / std::sqrt(squares / count + static_cast<double>(kEpsilon));
    double mean_g = 0.0, mean_g_unit = 0.0;
    for (size_t i = 0; i < cols; ++i) {
      unit[i] = (x[i] - mean) * r;
      out.y.push_back(unit[i] * in.gain[i] + (c.centred ? in.shift[i] : 0.0f));
      const double g = static_cast<double>(kScale) * dy[i];
      mean_g += c.centred ? in.gain[i] * g / count : 0.0;
      mean_g_unit += in.gain[i] * g * unit[i] / count;
      if (in.keep[row] == 0) continue;
      out.gain_gradient[i] += g * unit[i];
      if (c.centred) out.shift_gradient[i] += g;
    }
    double* dx = out.dx.data() + static_cast<size_t>(in.source[row]) * cols;
    for (size_t i = 0; i < cols; ++i) {
      dx[i] = r * (in.gain[i] * static_cast<double>(kScale) * dy[i] - mean_g - unit[i] * mean_g_unit);
    }
  }
  return out;
}

// ||got - want|| relative to `size` numbers of magnitude 1 or, if larger, to ||want||.
double Error(const std::vector<float>& got, const std::vector<double>& want) {
  double difference = 0.0, norm = 0.0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / std::max(norm, 1e-2 * static_cast<double>(want.size())));
}

double Tolerance(DType stored) {
  if (stored == DType::kFloat32) return 1e-5;
  return stored == DType::kFloat16 ? 5e-4 : 4e-3;
}

void CheckNorm(const NormCase& c, const DeviceLimits& limits, Rng& rng) {
  SCOPED_TRACE(Describe(c) + (limits.is_hopper ? ", Hopper" : ""));
  const Inputs in = MakeInputs(c, rng);
  const Outputs want = Reference(c, in);
  const OnDevice<uint8_t> x(Encode(c.x, in.x)), dy(Encode(c.dy, in.dy));
  const OnDevice<uint8_t> y(Encode(c.dy, std::vector<float>(in.dy.size(), NAN)));
  const OnDevice<float> gain(in.gain), shift(in.shift), gain_gradient(in.gain_gradient),
      shift_gradient(in.shift_gradient);
  const OnDevice<float> statistics(std::vector<float>(2 * in.source.size(), NAN));
  const auto partial_floats = static_cast<size_t>(cuda::NormPartialFloats(c.cols, limits.multiprocessors));
  const OnDevice<float> partials(std::vector<float>(partial_floats, NAN));
  const OnDevice<int32_t> source(in.source), keep(in.keep);

  NormParams p;
  p.centred = c.centred;
  p.epsilon = kEpsilon;
  p.gain = gain.get();
  p.shift = c.centred ? shift.get() : nullptr;
  p.rows = c.rows;
  p.source = c.sparse ? source.get() : nullptr;
  p.x = {x.get(), c.x, c.cols, c.cols};
  p.y = {y.get(), c.dy, c.cols, c.cols};
  p.mean = statistics.get();
  p.inverse_deviation = statistics.get() + c.rows;
  ASSERT_EQ(cuda::LaunchNormForward(p, limits, nullptr), cudaSuccess);
  EXPECT_LT(Error(Decode(c.dy, y.Read()), want.y), Tolerance(c.dy));

  p.y.data = dy.get();
  NormBackwardParams b;
  b.scale = kScale;
  b.keep = c.sparse ? keep.get() : nullptr;
  b.dx = p.x;
  b.gain_gradient = gain_gradient.get();
  b.shift_gradient = c.centred ? shift_gradient.get() : nullptr;
  b.partials = partials.get();
  ASSERT_EQ(cuda::LaunchNormBackward(p, b, limits, nullptr), cudaSuccess);
  // Of one column dx is a difference of equal numbers times up to 1 / sqrt(epsilon).
  const double slack = c.cols == 1 ? 1000.0 : 1.0;
  EXPECT_LT(Error(Decode(c.x, x.Read()), want.dx), slack * Tolerance(c.x));
  EXPECT_LT(Error(gain_gradient.Read(), want.gain_gradient), 1e-5);
  EXPECT_LT(Error(shift_gradient.Read(), want.shift_gradient), 1e-5);
}

void CheckNorm(const NormCase& c, Rng& rng) {
  DeviceLimits limits = Limits();
  if (limits.is_hopper) CheckNorm(c, limits, rng);
  limits.is_hopper = false;
  CheckNorm(c, limits, rng);
}

// Every pair of dtypes; centred and sparse by turns.
void CheckShape(int64_t rows, int64_t cols) {
  Rng rng = FreshRng();
  bool centred = true;
  for (DType x : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (DType dy : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
      CheckNorm({rows, cols, x, dy, centred, true}, rng);
      CheckNorm({rows, cols, x, dy, !centred, false}, rng);
      centred = !centred;
    }
  }
}

class Norm : public ::testing::Test {
 protected:
  void SetUp() override { LOSSD_SKIP_WITHOUT_GPU(); }
};

TEST_F(Norm, OneColumn) { CheckShape(5, 1); }
TEST_F(Norm, ColumnsThatNoVectorDivides) { CheckShape(70, 507); }
TEST_F(Norm, OneRow) { CheckShape(1, 1024); }
TEST_F(Norm, RowOfAWarp) { CheckShape(700, 264); }
TEST_F(Norm, SeveralRowsABlockWithIdleGroups) { CheckShape(300, 1032); }
TEST_F(Norm, TwoVectorsAThreadAndPairs) { CheckShape(151, 4096); }
TEST_F(Norm, SeveralRounds) { CheckShape(700, 4096); }
TEST_F(Norm, FourVectorsBecauseTwoLeaveThreadsIdle) { CheckShape(90, 5120); }
TEST_F(Norm, LastOfTwoVectors) { CheckShape(140, 8192); }
TEST_F(Norm, FirstOfFourVectors) { CheckShape(135, 8200); }
TEST_F(Norm, LongestFp32InTheRing) { CheckShape(3, 11264); }
TEST_F(Norm, LastOfThreeVectors) { CheckShape(134, 12288); }
TEST_F(Norm, LongRows) { CheckShape(3, 15872); }
TEST_F(Norm, LongestInRegisters) { CheckShape(2, 16384); }
TEST_F(Norm, LongerThanRegisters) { CheckShape(2, 16392); }
TEST_F(Norm, LongRowsOfAClusterInUnequalHalves) { CheckShape(70, 20488); }
TEST_F(Norm, LongestOfACluster) { CheckShape(3, 32768); }
TEST_F(Norm, LongerThanACluster) { CheckShape(2, 32776); }

TEST_F(Norm, FirstColumnsFarFromTheOthers) {
  Rng rng = FreshRng();
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (int64_t cols : {1024, 4096, 12288}) CheckNorm({5, cols, dtype, dtype, true, false, true}, rng);
  }
}

TEST_F(Norm, RepeatsBitForBit) {
  Rng rng = FreshRng();
  const int64_t rows = 500, cols = 2304;
  const DeviceLimits limits = Limits();
  const OnDevice<uint8_t> x(
      Encode(DType::kBFloat16, RandomValues(rows * cols, -2, 2, DType::kBFloat16, rng)));
  const OnDevice<uint8_t> dy(
      Encode(DType::kBFloat16, RandomValues(rows * cols, -2, 2, DType::kBFloat16, rng)));
  const OnDevice<float> gain(RandomValues(cols, 0.5f, 1.5f, DType::kFloat32, rng));
  const OnDevice<float> statistics(RandomValues(2 * rows, 0.5f, 1.5f, DType::kFloat32, rng));
  const auto partial_floats = static_cast<size_t>(cuda::NormPartialFloats(cols, limits.multiprocessors));
  const OnDevice<float> partials(std::vector<float>(partial_floats, NAN));
  std::vector<float> first;
  for (int run = 0; run < 5; ++run) {
    const OnDevice<float> gradients(std::vector<float>(static_cast<size_t>(2 * cols)));
    NormParams p;
    p.gain = gain.get();
    p.rows = rows;
    p.x = {x.get(), DType::kBFloat16, cols, cols};
    p.y = {dy.get(), DType::kBFloat16, cols, cols};
    p.mean = statistics.get();
    p.inverse_deviation = statistics.get() + rows;
    NormBackwardParams b;
    b.gain_gradient = gradients.get();
    b.shift_gradient = gradients.get() + cols;
    b.partials = partials.get();
    ASSERT_EQ(cuda::LaunchNormBackward(p, b, limits, nullptr), cudaSuccess);
    if (run == 0) first = gradients.Read();
    EXPECT_EQ(gradients.Read(), first);
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::norm_test
