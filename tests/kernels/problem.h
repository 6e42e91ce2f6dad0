// Random loss-head problems, run through any Backend and through the reference, and compared.
//
// A Problem is plain data: a head's tensors and the slices of one chunk. Values are rounded to the dtypes
// in which a backend receives them, so that reference and backend start from the same numbers.
// Not thread-safe where an Rng is passed.
#ifndef LOSSD_TESTS_KERNELS_PROBLEM_H_
#define LOSSD_TESTS_KERNELS_PROBLEM_H_

#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/reference/reference.h"

namespace lossd::kernels::testing {

using Rng = std::mt19937_64;

// A generator with a new seed, or with that of the environment variable LOSSD_TEST_SEED. Prints the seed.
Rng FreshRng();

float Uniform(Rng& rng, float low, float high);
int64_t UniformInt(Rng& rng, int64_t low, int64_t high);  // both ends included
bool Chance(Rng& rng, double probability);

// Round to nearest even, by Eigen's types.
float RoundTo(DType dtype, float value);
std::vector<uint8_t> Encode(DType dtype, absl::Span<const float> values);
std::vector<float> Decode(DType dtype, absl::Span<const uint8_t> bytes);

// The rows of one slice; empty optional vectors are passed as null.
struct SliceData {
  std::vector<float> hidden;       // [rows, D]
  std::vector<int32_t> targets;    // [rows]
  std::vector<float> row_weights;  // [rows] or empty, likewise below
  std::vector<uint8_t> accumulate;
  std::vector<float> grad_loss;
  std::vector<float> grad_lse;
  std::vector<float> grad_entropy;
  float grad_scale = 1.0f;
  bool want_grad_hidden = true;

  int64_t rows() const { return static_cast<int64_t>(targets.size()); }
};

struct Problem {
  HeadConfig config;
  LossOptions options;
  DType hidden_dtype = DType::kFloat32;
  bool accumulate_gradients = true;
  std::vector<float> weight, bias, norm_gain, norm_shift, class_weights;  // empty: not in the head
  std::vector<SliceData> slices;

  int64_t rows() const;
  std::vector<float>& Values(Param param);
  const std::vector<float>& Values(Param param) const;
};

// What MakeProblem draws.
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
};

Problem MakeProblem(const ProblemSpec& spec, Rng& rng);
SliceData MakeSlice(const ProblemSpec& spec, int64_t rows, Rng& rng);

// A spec with every option drawn at random; the shape as given.
ProblemSpec RandomSpec(int64_t rows, int64_t hidden_size, int64_t vocab_size, DType hidden_dtype,
                       DType compute, Rng& rng);
// One line for SCOPED_TRACE.
std::string Describe(const Problem& problem);

// A head with the problem's tensors written to it. Fails the test and returns null if that fails.
std::unique_ptr<HeadKernels> MakeHead(Backend& backend, const Problem& problem);

struct SliceOutputs {
  std::vector<float> loss, lse, entropy, target_logprob;  // [rows]
  std::vector<int32_t> argmax;                            // [rows]
  std::vector<float> grad_hidden;                         // [rows, D], or empty
  SliceSums sums;
  int64_t first_nonfinite_row = -1;
};

struct ChunkRun {
  absl::Status results;  // what on_results said
  absl::Status done;     // what on_done said
  std::vector<SliceOutputs> slices;
  std::vector<Choice> choices;
  Algorithm algorithm = Algorithm::kExact;
};

struct RunOptions {
  bool grad_hidden_in_place = false;  // grad_hidden == hidden
  bool want_row_outputs = true;
  // Keep the slices' hidden states here, one after the other; with take_retained, take them from here.
  RetainedMemory* retained = nullptr;
  bool take_retained = false;
  bool independent = false;  // Chunk::independent
};

// Bytes of retained memory that a problem's slices take.
int64_t RetainedBytes(const Problem& problem);

// Submits the problem's slices as one chunk and waits until it is done. Checks that each callback ran once
// and in order.
ChunkRun RunChunk(HeadKernels& head, const Problem& problem, const RunOptions& options = {});

// The whole gradient tensor of each parameter, read as fp32.
std::vector<float> ReadAll(HeadKernels& head, TensorId id);
std::vector<float> ReadGradient(HeadKernels& head, Param param);

reference::Head ReferenceHead(const Problem& problem);
reference::Rows ReferenceRows(const SliceData& slice);
// The problem with its epsilon, if it filters, in the widest gap between probabilities of its rows that there
// is near it, so that rounding moves none of them over it.
Problem WithClearEpsilon(Problem problem);
// Results of all slices in order; adds to *gradients unless null or the problem does not accumulate.
std::vector<reference::Result> ComputeReference(const Problem& problem, reference::ParamGradients* gradients);

// gtest expectations, with the tolerances of tolerances.h.
void ExpectSliceMatches(DType compute, const Problem& problem, const SliceData& slice,
                        const reference::Result& want, const SliceOutputs& got);
void ExpectGradientsMatch(HeadKernels& head, const reference::ParamGradients& want, double max_abs_logit);
double MaxAbsLogit(absl::Span<const reference::Result> results);

// Runs `problems` (chunks for the same head: the tensors are the first one's) and compares everything.
void RunAndCompare(Backend& backend, const std::vector<Problem>& chunks, const RunOptions& options = {});

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_PROBLEM_H_
