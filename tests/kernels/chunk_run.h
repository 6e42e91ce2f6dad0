// SPDX-License-Identifier: Apache-2.0
// RunChunk: lets a backend compute a problem as one chunk, and returns its results; the head's tensors can be
// read afterwards. Errors fail the running test. Not thread-safe.
#ifndef LOSSD_TESTS_KERNELS_CHUNK_RUN_H_
#define LOSSD_TESTS_KERNELS_CHUNK_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing {

// Creates a head and writes the problem's tensors to it. If that fails, fails the test and returns null.
std::unique_ptr<HeadKernels> MakeHead(Backend& backend, const Problem& problem);

struct SliceOutputs {
  std::vector<float> loss, lse, entropy, target_logprob;  // [rows]
  std::vector<int32_t> argmax;                            // [rows]
  std::vector<float> class_logprobs;                      // [rows, class_count]
  std::vector<float> top_logprobs;                        // [rows, top_k]
  std::vector<int32_t> top_classes;                       // [rows, top_k]
  std::vector<float> grad_hidden;                         // [rows, D], or empty
  LossSums sums;
  int64_t first_nonfinite_row = -1;
};

// Expects all results of each row to have the same bits.
void ExpectSameRows(const SliceOutputs& got, const SliceOutputs& want);

struct ChunkRun {
  absl::Status results;  // the status of on_results
  absl::Status done;     // the status of on_done
  std::vector<SliceOutputs> slices;
  std::vector<Choice> choices;
  Gradients gradients = Gradients::kExact;
  float sample_threshold = 0.0f;
};

// Where a slice's hidden states are in retained memory.
struct RetainedPlace {
  int64_t offset = -1;  // Slice::retained_offset
  bool take = false;    // true: they are read from there; false: they are stored there
};

struct RunOptions {
  bool grad_hidden_in_place = false;  // grad_hidden == hidden
  bool want_row_outputs = true;
  // Store the slices' hidden states here, one after the other; with take_retained, read them from here.
  RetainedMemory* retained = nullptr;
  bool take_retained = false;
  std::vector<RetainedPlace> places = {};  // in place of that: one for each slice
  bool independent = false;                // Chunk::independent
  HeadKernels* teacher = nullptr;          // Chunk::teacher
};

// The bytes of retained memory that a problem's slices need.
int64_t RetainedBytes(const Problem& problem);

// Sets memory in which the rows of later chunks lie, one chunk after the other. If it is too small, or empty
// (the initial value), a chunk's rows lie in memory of their own.
void SetRowMemory(absl::Span<uint8_t> memory);

// Submits the problem's slices as one chunk and waits until it is done. Checks that each callback ran once
// and in order. The chunk's inputs are overwritten as soon as there are results, because a backend must not
// read them after that.
ChunkRun RunChunk(HeadKernels& head, const Problem& problem, const RunOptions& options = {});

// One of several chunks. Head and problem must outlive the run.
struct ChunkToRun {
  HeadKernels* head = nullptr;
  const Problem* problem = nullptr;
  RunOptions options = {};
};
// The same for several chunks, at most `most` of which are in flight at the same time.
std::vector<ChunkRun> RunInFlight(absl::Span<const ChunkToRun> chunks, int most);

// The whole tensor, or the whole gradient of a parameter, as fp32.
std::vector<float> ReadAll(HeadKernels& head, TensorId id);
std::vector<float> ReadGradient(HeadKernels& head, Param param);

// A head that gets random mixtures of direct and deferred rows, whose results are compared with the
// reference. Hidden states are retained in a few places, as in an engine: the place of a microbatch that is
// released or expires is used by another microbatch. Errors fail the running test. Not thread-safe.
class DeferredRows {
 public:
  static constexpr int64_t kMostRows = 40;  // of one slice

  // The backend and `rng` must outlive it.
  DeferredRows(Backend& backend, const ProblemSpec& spec, Rng& rng);

  // False: all chunks are expected to succeed. True: chunks may fail. A failed chunk must change nothing,
  // except the gradients if the backend says so; these are then set to zero.
  void ExpectFailures(bool expect) { expect_failures_ = expect; }
  int failures() const { return failures_; }

  // Computes losses of a few slices, for which there are free places and whose hidden states are retained,
  // and perhaps of one slice that is not retained.
  void Forward();
  // Computes gradients of some retained slices, in any order, and of other slices directly. Retained slices
  // stay.
  void Backward();
  // Releases some places.
  void Release();
  void ZeroGradients();
  // Compares the gradients with the sum of all chunks since ZeroGradients.
  void ExpectGradients();

 private:
  static constexpr size_t kPlaces = 6;

  SliceData NewSlice();
  void AddDirect(Problem& chunk, std::vector<RetainedPlace>& places, bool want_grad_hidden);
  // False if the chunk failed.
  bool Compute(const Problem& chunk, const std::vector<RetainedPlace>& places);
  void OnFailure(const Problem& chunk, const ChunkRun& run);
  RetainedPlace PlaceOf(size_t place, bool take) const {
    return {.offset = static_cast<int64_t>(place) * place_bytes_, .take = take};
  }

  const ProblemSpec spec_;
  Rng* const rng_;
  Problem problem_;  // has no slices
  int64_t place_bytes_ = 0;
  std::unique_ptr<RetainedMemory> retained_;
  std::unique_ptr<HeadKernels> head_;
  std::optional<SliceData> kept_[kPlaces];
  reference::ParamGradients gradients_;
  double max_abs_logit_ = 0.0;
  bool expect_failures_ = false;
  int failures_ = 0;
};

}  // namespace lossd::kernels::testing

#endif  // LOSSD_TESTS_KERNELS_CHUNK_RUN_H_
