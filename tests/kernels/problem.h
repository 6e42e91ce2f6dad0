// SPDX-License-Identifier: Apache-2.0
// Problem: a random problem for a loss head. chunk_run.h lets a backend compute it, and comparison.h compares
// the results with the reference.
//
// A Problem is plain data: a head's tensors and the slices of one chunk. Values are rounded to the dtypes
// in which a backend receives them, so that reference and backend start from the same numbers.
// Not thread-safe where an Rng is passed.
#ifndef LOSSD_TESTS_KERNELS_PROBLEM_H_
#define LOSSD_TESTS_KERNELS_PROBLEM_H_

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/head_config.h"

namespace lossd::kernels::testing {

using Rng = std::mt19937_64;

// A generator with a new seed, or with the seed in the environment variable LOSSD_TEST_SEED. Prints the seed.
Rng FreshRng();

float Uniform(Rng& rng, float low, float high);
int64_t UniformInt(Rng& rng, int64_t low, int64_t high);  // both ends included
bool Chance(Rng& rng, double probability);

// Rounds to nearest even, with Eigen's types.
float RoundTo(DType dtype, float value);
std::vector<uint8_t> Encode(DType dtype, absl::Span<const float> values);
std::vector<float> Decode(DType dtype, absl::Span<const uint8_t> bytes);

// The rows of one slice; empty optional vectors are passed as null.
struct SliceData {
  std::vector<float> hidden;       // [rows, D]
  std::vector<int32_t> targets;    // [rows]
  std::vector<float> row_weights;  // [rows] or empty, also the next four
  std::vector<uint8_t> accumulate;
  std::vector<float> grad_loss;
  std::vector<float> grad_lse;
  std::vector<float> grad_entropy;
  std::vector<float> advantages, old_logprobs, ref_logprobs;  // of LossOptions::objective
  float grad_scale = 1.0f;
  bool want_grad_hidden = true;
  uint64_t sample_seed = 0;
  int64_t first_row = 0;
  bool stands_in = false;             // comparisons ignore this slice
  std::vector<float> teacher_hidden;  // [rows, D of the teacher], with Problem::teacher
  std::vector<int32_t> classes;       // Slice::classes
  int32_t class_count = 0;
  bool shared_classes = false;
  int32_t top_k = 0;
  std::vector<int32_t> target_classes;  // [rows, target_count], with LossOptions::rest
  std::vector<float> target_weights;
  int32_t target_count = 0;

  int64_t rows() const { return static_cast<int64_t>(targets.size()); }
};

struct Problem {
  HeadConfig config;
  LossOptions options;
  DType hidden_dtype = DType::kFloat32;
  bool accumulate_gradients = true;
  bool auto_samples_uniform = false;  // as in ConformanceCase
  bool exact_distilled = false;       // as in ConformanceCase
  int class_parts = 1;  // the number of devices that divide the classes of a head that is split by vocabulary
  // AsComputed() sets it: the uniform part was sampled, whatever the options say.
  bool samples_uniform = false;
  std::vector<float> weight, bias, norm_gain, norm_shift, class_weights;  // empty: not in the head
  std::vector<SliceData> slices;
  std::vector<Problem> teacher;  // at most one, with options.distillation; only its tensors are used

  int64_t rows() const;
  std::vector<float>& Values(Param param);
  const std::vector<float>& Values(Param param) const;
};

// What MakeProblem draws at random.
struct ProblemSpec {
  HeadConfig config;
  LossOptions options;
  DType hidden_dtype = DType::kFloat32;
  std::vector<int64_t> slice_rows = {1};
  float logit_deviation = 3.0f;  // standard deviation of W x
  double ignored = 0.2;          // probability of a row without target
  bool row_weights = false;
  bool accumulate_mask = false;
  bool grad_loss = false;
  bool grad_lse = false;
  bool grad_entropy = false;
  float grad_scale = 1.0f;
  int32_t class_count = 0;  // drawn at random; some classes occur twice
  bool shared_classes = false;
  int32_t top_k = 0;  // or V, if that is less
  // With options.rest: K, or V if that is less. Drawn at random: some classes are named twice, some entries
  // are unused, some weights are 0.
  int32_t target_count = 0;
  bool auto_samples_uniform = false;
  bool exact_distilled = false;
  int class_parts = 1;
  std::vector<ProblemSpec> teacher;  // at most one, with options.distillation; its slices do not matter
};

Problem MakeProblem(const ProblemSpec& spec, Rng& rng);
SliceData MakeSlice(const ProblemSpec& spec, int64_t rows, Rng& rng);

// A spec of the given shape, with every option drawn at random.
ProblemSpec RandomSpec(int64_t rows, int64_t hidden_size, int64_t vocab_size, DType hidden_dtype,
                       DType compute, Rng& rng);
// `plain` itself, and for each option of losses and gradients a copy with that option set.
std::vector<ProblemSpec> EachOptionAlone(const ProblemSpec& plain);
// One line for SCOPED_TRACE.
std::string Describe(const Problem& problem);

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_PROBLEM_H_
