// SPDX-License-Identifier: Apache-2.0
// Shapes too large for the full reference: losses and gradients of sampled rows and classes against double
// precision, over one or several chunks. Also more logits than 2^31.
#include <algorithm>
#include <cmath>
#include <memory>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "gtest/gtest.h"
#include "kernels/cuda/cuda_backend.h"
#include "tests/kernels/comparison.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::cuda_large_test {
namespace {

constexpr int kSampledRows = 12;
constexpr int kSampledClasses = 24;
constexpr int32_t kTileEdges[] = {0, 79, 80, 127, 128, 159, 160, 239, 240, 255, 256, 319};

struct LargeCase {
  int64_t rows, hidden, vocab;
  int chunks;
  DType compute;
  float epsilon = -1.0f;    // >= 0: filtered
  bool falls_back = false;  // to exact
  Logits logits = Logits::kStored;
};

void PrintTo(const LargeCase& c, std::ostream* out) {
  *out << "N " << c.rows << " D " << c.hidden << " V " << c.vocab << " chunks " << c.chunks << " "
       << std::string(Name(c.compute)) << " epsilon " << c.epsilon << " logits "
       << std::string(Name(c.logits));
}

// Runs body(begin, end) over [0, count) in several threads.
template <typename Body>
void Parallel(int64_t count, Body body) {
  const int64_t threads = std::clamp<int64_t>(std::thread::hardware_concurrency(), 1, 16);
  std::vector<std::thread> pool;
  for (int64_t t = 0; t < threads; ++t) {
    pool.emplace_back([=] { body(count * t / threads, count * (t + 1) / threads); });
  }
  for (std::thread& thread : pool) thread.join();
}

// A head and rows with some confident ones: every second hidden state is a multiple of a weight row.
class LargeProblem {
 public:
  LargeProblem(const LargeCase& shape, Rng& rng) : shape_(shape) {
    const float deviation = 2.0f / std::sqrt(static_cast<float>(shape.hidden));
    weight_.resize(static_cast<size_t>(shape.vocab * shape.hidden));
    hidden_.resize(static_cast<size_t>(shape.rows * shape.hidden));
    Fill(weight_, deviation, rng());
    Fill(hidden_, 1.0f, rng());
    const float length = static_cast<float>(shape.hidden) * deviation * deviation;
    for (int64_t r = 0; r < shape.rows; ++r) {
      const int64_t target = r < static_cast<int64_t>(std::size(kTileEdges)) && kTileEdges[r] < shape.vocab
                                 ? kTileEdges[r]
                                 : UniformInt(rng, 0, shape.vocab - 1);
      targets_.push_back(static_cast<int32_t>(r == shape.rows - 1 ? shape.vocab - 1 : target));
      if (r % 2 == 0) continue;
      const float scale = Uniform(rng, 4.0f, 14.0f) / length;
      const int64_t source = Chance(rng, 0.7) ? targets_.back() : UniformInt(rng, 0, shape.vocab - 1);
      for (int64_t c = 0; c < shape.hidden; ++c) {
        hidden_[At(r, c)] = RoundTo(shape.compute, scale * weight_[At(source, c)]);
      }
    }
  }

  const LargeCase& shape() const { return shape_; }
  const std::vector<int32_t>& targets() const { return targets_; }
  const float* weight(int64_t v) const { return &weight_[At(v, 0)]; }
  const float* hidden(int64_t r) const { return &hidden_[At(r, 0)]; }

  // z of a row and a class in double.
  double Logit(int64_t row, int64_t v) const {
    double sum = 0.0;
    for (int64_t c = 0; c < shape_.hidden; ++c) sum += double{hidden(row)[c]} * double{weight(v)[c]};
    return sum;
  }

 private:
  size_t At(int64_t row, int64_t c) const { return static_cast<size_t>(row * shape_.hidden + c); }

  // Uniform noise of this standard deviation, rounded to the compute dtype.
  void Fill(std::vector<float>& values, float deviation, uint64_t seed) const {
    const float scale = deviation * std::sqrt(3.0f) * 0x1p-31f;
    Parallel(static_cast<int64_t>(values.size()), [&, scale, seed](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        uint64_t x = (seed + static_cast<uint64_t>(i)) * 0x9e3779b97f4a7c15ull;
        x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9ull;
        const auto bits = static_cast<int32_t>(static_cast<uint32_t>(x >> 32));
        values[static_cast<size_t>(i)] = RoundTo(shape_.compute, scale * static_cast<float>(bits));
      }
    });
  }

  const LargeCase shape_;
  std::vector<float> weight_, hidden_;
  std::vector<int32_t> targets_;
};

struct ErrorNorm {
  double difference = 0.0, reference = 0.0;
  void Add(double got, double want) {
    difference += (got - want) * (got - want);
    reference += want * want;
  }
  double Relative() const { return std::sqrt(difference / reference); }
};

// One microbatch through the backend.
struct LargeRun {
  std::vector<float> lse, loss, grad_hidden;
  std::unique_ptr<HeadKernels> head;
};

// dloss/dz of a class; 0 where it is filtered.
double Slope(const LargeCase& shape, double log_p, bool is_target) {
  if (is_target) return std::expm1(log_p);
  const double p = std::exp(log_p);
  return !shape.falls_back && p < double{shape.epsilon} ? 0.0 : p;
}

class CudaLarge : public ::testing::TestWithParam<LargeCase> {
 protected:
  void SetUp() override { LOSSD_SKIP_WITHOUT_GPU(); }

  static void WriteWeight(HeadKernels& head, const LargeProblem& problem) {
    constexpr int64_t kRows = 4096;
    const LargeCase& shape = problem.shape();
    for (int64_t row = 0; row < shape.vocab; row += kRows) {
      const int64_t rows = std::min(kRows, shape.vocab - row);
      const absl::Status status = head.WriteTensor({}, row, rows, DType::kFloat32,
                                                   {reinterpret_cast<const uint8_t*>(problem.weight(row)),
                                                    static_cast<size_t>(rows * shape.hidden * 4)});
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  static void RunRows(const LargeProblem& problem, int64_t begin, int64_t end, LargeRun& run) {
    const LargeCase& shape = problem.shape();
    const absl::Span<const float> rows(problem.hidden(begin),
                                       static_cast<size_t>((end - begin) * shape.hidden));
    std::vector<uint8_t> hidden = Encode(shape.compute, rows);
    Slice slice;
    slice.rows = end - begin;
    slice.hidden = slice.grad_hidden = hidden.data();
    slice.targets = problem.targets().data() + begin;
    slice.grad_scale = 1.0f / static_cast<float>(shape.rows);
    slice.out.lse = run.lse.data() + begin;
    slice.out.loss = run.loss.data() + begin;
    Chunk chunk;
    if (shape.epsilon >= 0.0f) {
      chunk.options = {.gradients = Gradients::kFiltered, .filter_epsilon = shape.epsilon};
    }
    chunk.hidden_dtype = shape.compute;
    chunk.slices = absl::MakeSpan(&slice, 1);
    absl::Notification done;
    absl::Status status;
    run.head->Submit(&chunk, {[](absl::Status) {},
                              [&](absl::Status s) {
                                status = std::move(s);
                                done.Notify();
                              }});
    done.WaitForNotification();
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(slice.sums.dropped_mass > 0.0, shape.epsilon > 0.0f && !shape.falls_back);
    const std::vector<float> gradient = Decode(shape.compute, hidden);
    std::copy(gradient.begin(), gradient.end(), run.grad_hidden.begin() + begin * shape.hidden);
  }
};

TEST_P(CudaLarge, MatchesDoublePrecisionWhereSampled) {
  Rng rng = FreshRng();
  const LargeCase& shape = GetParam();
  const LargeProblem problem(shape, rng);
  auto backend = CreateCudaBackend({.workspace_bytes = int64_t{6} << 30});
  ASSERT_TRUE(backend.ok()) << backend.status();
  LargeRun run;
  const auto n = static_cast<size_t>(shape.rows);
  run.lse.resize(n);
  run.loss.resize(n);
  run.grad_hidden.resize(n * static_cast<size_t>(shape.hidden));
  auto head = (*backend)->CreateHead({.hidden_size = shape.hidden,
                                      .vocab_size = shape.vocab,
                                      .compute_dtype = shape.compute,
                                      .optimizer_state = OptimizerState::kNone,
                                      .logits = shape.logits});
  ASSERT_TRUE(head.ok()) << head.status();
  run.head = *std::move(head);
  WriteWeight(*run.head, problem);
  for (int i = 0; i < shape.chunks; ++i) {
    const int64_t begin = shape.rows * i / shape.chunks;
    const int64_t end = shape.rows * (i + 1) / shape.chunks;
    ASSERT_LE(end - begin, run.head->chunk_rows());
    RunRows(problem, begin, end, run);
  }

  const double scale = 1.0 / static_cast<double>(shape.rows);
  const Tolerance tolerance = ToleranceFor(shape.compute, /*rounded=*/false);
  double lse_error = 0.0;
  double max_logit = 0.0;
  ErrorNorm hidden_error;
  for (int i = 0; i < kSampledRows; ++i) {
    const int64_t row = i == 0 ? shape.rows - 1 : UniformInt(rng, 0, shape.rows - 1);
    std::vector<double> z(static_cast<size_t>(shape.vocab));
    Parallel(shape.vocab, [&](int64_t begin, int64_t end) {
      for (int64_t v = begin; v < end; ++v) z[static_cast<size_t>(v)] = problem.Logit(row, v);
    });
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0.0;
    for (double logit : z) sum += std::exp(logit - top);
    const double lse = top + std::log(sum);
    const auto at = static_cast<size_t>(row);
    const auto target = static_cast<size_t>(problem.targets()[at]);
    const double allowed = RowTolerance(shape.hidden, std::fabs(top));
    EXPECT_NEAR(run.lse[at], lse, allowed) << "row " << row;
    EXPECT_NEAR(run.loss[at], lse - z[target], allowed) << "row " << row;
    lse_error = std::max(lse_error, std::fabs(double{run.lse[at]} - lse));
    max_logit = std::max(max_logit, std::fabs(top));
    for (size_t v = 0; v < z.size(); ++v) {
      z[v] = scale * Slope(shape, z[v] - lse, v == target);
    }
    std::vector<double> gradient(static_cast<size_t>(shape.hidden));
    Parallel(shape.hidden, [&](int64_t begin, int64_t end) {
      for (int64_t v = 0; v < shape.vocab; ++v) {
        const double g = z[static_cast<size_t>(v)];
        for (int64_t c = begin; c < end; ++c)
          gradient[static_cast<size_t>(c)] += g * double{problem.weight(v)[c]};
      }
    });
    for (size_t c = 0; c < gradient.size(); ++c) {
      hidden_error.Add(double{run.grad_hidden[at * gradient.size() + c]}, gradient[c]);
    }
  }
  EXPECT_LE(hidden_error.Relative(), tolerance.Gradient(max_logit) + UnitRoundoff(shape.compute));

  ErrorNorm weight_error;
  for (int i = 0; i < kSampledClasses; ++i) {
    const int64_t v = i == 0 ? shape.vocab - 1
                      : i % 2 == 0
                          ? problem.targets()[static_cast<size_t>(UniformInt(rng, 0, shape.rows - 1))]
                          : UniformInt(rng, 0, shape.vocab - 1);
    std::vector<double> gradient(static_cast<size_t>(shape.hidden));
    for (int64_t r = 0; r < shape.rows; ++r) {
      const double log_p = problem.Logit(r, v) - double{run.lse[static_cast<size_t>(r)]};
      const bool is_target = problem.targets()[static_cast<size_t>(r)] == v;
      const double g = scale * Slope(shape, log_p, is_target);
      for (int64_t c = 0; c < shape.hidden; ++c) {
        gradient[static_cast<size_t>(c)] += g * double{problem.hidden(r)[c]};
      }
    }
    std::vector<uint8_t> bytes(gradient.size() * 4);
    ASSERT_TRUE(
        run.head->ReadTensor({Param::kWeight, Role::kGradient}, v, 1, DType::kFloat32, absl::MakeSpan(bytes))
            .ok());
    const std::vector<float> got = Decode(DType::kFloat32, bytes);
    for (size_t c = 0; c < got.size(); ++c) weight_error.Add(double{got[c]}, gradient[c]);
  }
  EXPECT_LE(weight_error.Relative(), tolerance.Gradient(max_logit));
  std::cout << "relative errors: grad_hidden " << hidden_error.Relative() << ", weight "
            << weight_error.Relative() << "; lse off by " << lse_error << std::endl;
}

constexpr LargeCase kCases[] = {
    {8, 8, 8, 1, DType::kBFloat16},
    {1536, 2048, 2048, 1, DType::kBFloat16},
    {1536, 2048, 2048, 2, DType::kBFloat16},
    {1536, 2048, 2048, 4, DType::kBFloat16},
    {1536, 2048, 2048, 2, DType::kFloat32},
    {1536, 2048, 2048, 4, DType::kFloat16},
    {129, 512, 32000, 1, DType::kBFloat16},
    {129, 512, 32000, 1, DType::kFloat32},
    {40, 64, 100000, 1, DType::kBFloat16},  // a row over a cluster of blocks
    {1024, 520, 2049, 1, DType::kBFloat16},
    {1024, 520, 2049, 3, DType::kFloat32},
    {1024, 520, 2049, 1, DType::kFloat16},
    {1937, 3584, 152064, 1, DType::kBFloat16},
    {2169, 896, 151936, 2, DType::kBFloat16},
    {2169, 896, 151936, 1, DType::kFloat16},
    {300, 64, 500000, 1, DType::kBFloat16},  // a row no cluster holds
    {200, 64, 500000, 1, DType::kFloat32},
    {8448, 64, 256000, 1, DType::kBFloat16},  // 2.16e9 logits
    {129, 512, 32000, 1, DType::kBFloat16, 0x1p-12f},
    {129, 512, 32000, 1, DType::kFloat32, 0x1p-12f},
    {1024, 520, 2049, 3, DType::kFloat16, 0x1p-9f},
    {1937, 3584, 152064, 1, DType::kBFloat16, 0x1p-11f},
    {700, 5120, 100000, 2, DType::kBFloat16, 0x1p-11f},
    {300, 8200, 40000, 1, DType::kBFloat16, 0x1p-11f},  // more than two vectors of D a thread
    {300, 64, 500000, 1, DType::kBFloat16, 0x1p-12f},
    {60, 16392, 3000, 1, DType::kBFloat16, 0x1p-12f, true},   // hidden states longer than a block holds
    {2100, 64, 256000, 1, DType::kBFloat16, 0x1p-18f, true},  // more candidates than there is room for
    {2169, 896, 151936, 2, DType::kBFloat16, -1.0f, false, Logits::kRecomputed},
    {1937, 3584, 152064, 1, DType::kBFloat16, 0x1p-11f, false,
     Logits::kRecomputed},  // some 750 classes listed a row
    {3000, 64, 151936, 1, DType::kFloat16, 0x1p-11f, false, Logits::kRecomputed},
    {2100, 64, 256000, 1, DType::kBFloat16, 0x1p-18f, true,
     Logits::kRecomputed},  // lists too short, then the pool
};
INSTANTIATE_TEST_SUITE_P(Shapes, CudaLarge, ::testing::ValuesIn(kCases));

}  // namespace
}  // namespace lossd::kernels::testing::cuda_large_test
