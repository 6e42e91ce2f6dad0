// The tests that every backend must pass, written against the contract (kernels/backend.h) alone.
//
// A backend's test binary compiles backend_conformance.cc and instantiates the suite:
//
//   INSTANTIATE_TEST_SUITE_P(Cpu, BackendConformance, ::testing::ValuesIn(cases), ConformanceName);
#ifndef LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_
#define LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_

#include <functional>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/backend.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

struct ConformanceCase {
  std::string name;                   // of the backend, [A-Za-z0-9]+
  std::function<Backend&()> backend;  // may be the same backend every time; it must allow 64 MiB heads
  DType compute = DType::kFloat32;    // HeadConfig::compute_dtype of all heads
  DType hidden = DType::kFloat32;     // Chunk::hidden_dtype of all chunks
  // kExact: chunks choose. kCut: heads are for that, and chunks that would be filtered leave out as much.
  Algorithm algorithm = Algorithm::kExact;
};

// "Cpu_fp32_bf16": backend, compute dtype, hidden dtype.
std::string ConformanceName(const ::testing::TestParamInfo<ConformanceCase>& info);

class BackendConformance : public ::testing::TestWithParam<ConformanceCase> {
 protected:
  Backend& backend() { return GetParam().backend(); }
  Rng& rng() { return rng_; }

  // A spec with no option set, in this case's dtypes.
  ProblemSpec Plain(std::vector<int64_t> slice_rows, int64_t hidden_size, int64_t vocab_size) const;
  ProblemSpec Random(int64_t rows, int64_t hidden_size, int64_t vocab_size);
  // As testing::MakeProblem, with this case's algorithm.
  Problem MakeProblem(ProblemSpec spec, Rng& rng) const;
  bool is_cut() const { return GetParam().algorithm == Algorithm::kCut; }
  // One row a target: x = (1, noise), the first column of W holding `logits` (representable in 16 bits), so
  // that z is `logits` but for the noise.
  Problem WithLogits(const std::vector<float>& logits, const std::vector<int32_t>& targets);

 private:
  Rng rng_ = FreshRng();
};

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_BACKEND_CONFORMANCE_H_
