// SPDX-License-Identifier: Apache-2.0
// BackendConformance: the tests that every backend must pass. They are written against the contract
// (kernels/backend.h) alone.
//
// Tests of losses and of exact gradients are in backend_conformance.cc, the others in conformance_*.cc. A
// backend's test binary links lossd_backend_conformance and instantiates the suite:
// binary links lossd_backend_conformance and instantiates the suite:
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, ::testing::ValuesIn(cases), ConformanceName);
//   INSTANTIATE_TEST_SUITE_P(Cpu, GradientsConformance, ::testing::ValuesIn(cases), ConformanceName);
#ifndef LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_
#define LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/chunk_run.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

struct ConformanceCase {
  std::string name;                   // the name of the backend, [A-Za-z0-9]+
  std::function<Backend&()> backend;  // may be the same backend every time; it must allow 64 MiB heads
  DType compute = DType::kFloat32;    // HeadConfig::compute_dtype of all heads
  DType hidden = DType::kFloat32;     // Chunk::hidden_dtype of all chunks
  Logits logits = Logits::kStored;    // HeadConfig::logits of all heads; chunks ask for all gradients
  // Whether kAuto also samples the uniform part of label smoothing without a softcap (docs/math.md).
  bool auto_samples_uniform = false;
  int devices = 1;  // the devices that share the work; each has a workspace of its own
  // HeadConfig::split of all heads. Heads with fewer classes than places() are split by rows.
  Split split = Split::kAny;
  std::vector<int32_t> shares;  // HeadConfig::shares of heads that are split by vocabulary
  int replicas = 1;             // HeadConfig::replicas of heads that are split by vocabulary
  bool distils = false;         // whether heads take teachers (HeadKernels::CheckTeacher)
  // Whether chunks with a teacher have exact gradients although sampled ones were asked for.
  bool exact_distilled = false;

  // The number of devices that divide the classes of a head that is split by vocabulary.
  int places() const { return devices / replicas; }
};

// "Cpu_fp32_bf16": backend, compute dtype, hidden dtype.
std::string ConformanceName(const ::testing::TestParamInfo<ConformanceCase>& info);
// The text of a case in a failure message.
void PrintTo(const ConformanceCase& c, std::ostream* out);

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// Shapes that no tile divides, and a few that some do: rows, D, V.
inline constexpr int64_t kOddShapes[][3] = {{1, 1, 1},       {3, 1, 7},      {8, 8, 8},     {1, 33, 65},
                                            {252, 123, 507}, {188, 31, 123}, {80, 64, 125}, {257, 127, 513},
                                            {5, 200, 1},     {130, 2, 1031}, {64, 256, 256}};

absl::Span<const uint8_t> AsBytes(const std::vector<float>& values);
bool AllZero(const std::vector<float>& values);
bool AllFinite(const std::vector<float>& values);
double NormOf(absl::Span<const float> values);
// The gradients of all parameters that have one.
std::vector<std::vector<float>> AllGradients(HeadKernels& head);
void ExpectZeroGradients(HeadKernels& head);
// Checks the kind of gradients that the chunk and its first choice name.
void ExpectGradients(const ChunkRun& run, Gradients gradients);

class BackendConformance : public ::testing::TestWithParam<ConformanceCase> {
 protected:
  Backend& backend() { return GetParam().backend(); }
  Rng& rng() { return rng_; }

  // A spec without options, with this case's dtypes and kind of logits.
  ProblemSpec Plain(std::vector<int64_t> slice_rows, int64_t hidden_size, int64_t vocab_size) const;
  // Runs filtered gradients with all kOddShapes.
  void RunFilteredOddShapes(float epsilon);
  ProblemSpec FlatSpec(std::vector<int64_t> slice_rows) const;
  ProblemSpec Random(int64_t rows, int64_t hidden_size, int64_t vocab_size);
  bool recomputes_logits() const { return GetParam().logits == Logits::kRecomputed; }
  // Sets the split of a head. Its number of classes is in `config`.
  void SplitHead(HeadConfig& config) const;
  // A problem with one row for each target: x = (1, noise), and the first column of W is `logits`
  // (representable in 16 bits), so that z is `logits` except for the noise.
  Problem WithLogits(const std::vector<float>& logits, const std::vector<int32_t>& targets);

 private:
  Rng rng_ = FreshRng();
};

// The same for filtered, sampled and auto gradients.
class GradientsConformance : public BackendConformance {};

inline constexpr Divergence kDivergences[] = {Divergence::kForwardKl, Divergence::kReverseKl,
                                              Divergence::kJensenShannon, Divergence::kTotalVariation};

// Tests of rows with a teacher: conformance_distilled.cc, and with sampled gradients conformance_sampled.cc.
class DistillationConformance : public BackendConformance {
 protected:
  // A student like Plain's, with a frozen teacher of this hidden size.
  ProblemSpec Distilled(std::vector<int64_t> slice_rows, int64_t hidden_size, int64_t vocab_size,
                        int64_t teacher_hidden_size, const Distillation& distillation);
  // Whether heads of this case take teachers. If not, checks that they say so and refuse the chunk.
  bool Distils();
  // Whether the gradient does not depend on rounding. The gradient of the total variation jumps where a class
  // has the same probability for the student and the teacher.
  static bool IsDecided(const Problem& problem);
  // Runs a problem of this kind for which IsDecided is true.
  void Run(const ProblemSpec& spec);
};

// Tests of heads that are stored in host memory: conformance_pool.cc.
class PoolConformance : public DistillationConformance {
 protected:
  // The same problem with its head in host memory.
  static Problem InHostMemory(Problem problem);
  // One problem for each teacher, for a student like Distilled's. The teachers' hidden sizes are
  // `hidden_size` and slightly above. All problems have the same student's tensors.
  std::vector<Problem> Lessons(int teachers, int64_t hidden_size, int64_t vocab_size);
};

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_
