// SPDX-License-Identifier: Apache-2.0
// A problem's chunk run by a backend: its head, what comes back, and the tensors afterwards. What goes wrong
// fails the running test. Not thread-safe.
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

// A head with the problem's tensors written to it. Fails the test and returns null if that fails.
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

// Every result of a row has the same bits.
void ExpectSameRows(const SliceOutputs& got, const SliceOutputs& want);

struct ChunkRun {
  absl::Status results;  // what on_results said
  absl::Status done;     // what on_done said
  std::vector<SliceOutputs> slices;
  std::vector<Choice> choices;
  Gradients gradients = Gradients::kExact;
  float sample_threshold = 0.0f;
};

// Of a slice, in retained memory.
struct RetainedPlace {
  int64_t offset = -1;  // Slice::retained_offset
  bool take = false;    // its hidden states are there; else they are kept there
};

struct RunOptions {
  bool grad_hidden_in_place = false;  // grad_hidden == hidden
  bool want_row_outputs = true;
  // Keep the slices' hidden states here, one after the other; with take_retained, take them from here.
  RetainedMemory* retained = nullptr;
  bool take_retained = false;
  std::vector<RetainedPlace> places = {};  // instead, one a slice
  bool independent = false;                // Chunk::independent
  HeadKernels* teacher = nullptr;          // Chunk::teacher
};

// Bytes of retained memory that a problem's slices take.
int64_t RetainedBytes(const Problem& problem);

// The rows of chunks lie in this memory from now on, one chunk after the other; empty, as at first, and where
// it is too small: in memory of the chunk's own.
void SetRowMemory(absl::Span<uint8_t> memory);

// Submits the problem's slices as one chunk and waits until it is done. Checks that each callback ran once
// and in order. The chunk's inputs are spoilt as soon as there are results, from when on no backend may look
// at them.
ChunkRun RunChunk(HeadKernels& head, const Problem& problem, const RunOptions& options = {});

// One of several chunks; head and problem outlive the run.
struct ChunkToRun {
  HeadKernels* head = nullptr;
  const Problem* problem = nullptr;
  RunOptions options = {};
};
// The same for several chunks, of which at most `most` are in flight at a time.
std::vector<ChunkRun> RunInFlight(absl::Span<const ChunkToRun> chunks, int most);

// The whole gradient tensor of each parameter, read as fp32.
std::vector<float> ReadAll(HeadKernels& head, TensorId id);
std::vector<float> ReadGradient(HeadKernels& head, Param param);

// A head whose rows come directly and deferred, in random mixtures, compared with the reference. Hidden
// states are retained in a few places, as an engine has them: of a microbatch that is released, or expires,
// the place is another one's next. What goes wrong fails the running test. Not thread-safe.
class DeferredRows {
 public:
  static constexpr int64_t kMostRows = 40;  // of a slice

  // The backend and `rng` outlive it.
  DeferredRows(Backend& backend, const ProblemSpec& spec, Rng& rng);

  // Chunks are expected to be computed; or else to fail, and then they leave nothing behind but what the
  // backend says of the gradients, which are then set to zero.
  void ExpectFailures(bool expect) { expect_failures_ = expect; }
  int failures() const { return failures_; }

  // Losses of a few slices, as many as there are places for, which are kept, and perhaps of one that is not.
  void Forward();
  // Gradients of some slices that are kept, in any order, and of others that come directly. Kept slices stay.
  void Backward();
  // Of some places.
  void Release();
  void ZeroGradients();
  // What all chunks since then have added up.
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
  Problem problem_;  // without slices
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
