// What a caller hands to the engine to have rows computed, and what it gets back: one stream is one
// contiguous row range of one microbatch. The rpc layer turns messages into these; tests drive them
// directly.
#ifndef LOSSD_SERVER_ENGINE_STREAM_H_
#define LOSSD_SERVER_ENGINE_STREAM_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/dtype.h"
#include "kernels/loss_options.h"
#include "server/engine/staging_pool.h"

namespace lossd::engine {

// Half-open range of rows of a microbatch.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

enum class Reduction : uint8_t { kSum, kMean, kNone };

struct RowWants {
  bool loss = false;
  bool lse = false;
  bool entropy = false;
  bool logprob = false;
  bool argmax = false;
};

// Opens a stream. Field names equal those of lossd.v1.OpenMicrobatch, and errors name them so.
struct StreamSpec {
  std::string head;
  std::optional<uint64_t> step;  // required with accumulate_gradients
  uint64_t microbatch_id = 0;
  int64_t microbatch_rows = 0;  // N of the whole microbatch
  RowRange rows;                // carried by this stream
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  kernels::LossOptions options;
  bool algorithm_of_head = false;     // options.algorithm is to be as the head's config says,
  bool epsilon_of_algorithm = false;  // and options.filter_epsilon as that algorithm has it
  int32_t ignore_index = -100;
  Reduction reduction = Reduction::kSum;
  std::optional<double> normalizer;  // kMean only; see the protocol for when it may be absent
  float grad_output = 1.0f;
  bool want_grad_hidden = false;
  bool accumulate_gradients = false;
  // Reduction kNone only: keep the hidden states for Engine::OpenBackward.
  bool retain = false;
  RowWants want_rows;
  std::vector<int32_t> targets;    // [rows.size()], raw: a class or ignore_index
  std::vector<float> row_weights;  // empty or [rows.size()]
};

// Opens the backward pass of rows of a retained microbatch. Field names equal those of
// lossd.v1.BackwardRequest.
struct BackwardSpec {
  std::string head;
  std::optional<uint64_t> step;  // must be open; required with accumulate_gradients
  uint64_t microbatch_id = 0;
  RowRange rows;
  bool want_grad_hidden = false;
  bool accumulate_gradients = false;
  std::vector<float> grad_loss;     // [rows.size()]: dL/d(row loss)
  std::vector<float> grad_lse;      // empty (0) or [rows.size()]: dL/dlse
  std::vector<float> grad_entropy;  // empty (0) or [rows.size()]: dL/dentropy
};

// Limits on one slice of a head.
struct SliceLimits {
  int64_t max_rows = 0;
  int64_t max_bytes = 0;
  // Deterministic mode, streams that accumulate: slices come in ascending order, and none holds rows on both
  // sides of a multiple of this. 0: no such rule.
  int64_t row_grid = 0;
};

// Upstream gradients of the rows of a backward stream; see BackwardSpec.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};

// Takes the place where the hidden states of a slice go. Called once, on the asking thread or on one of the
// engine's; must not block. Destroyed without a call if the stream ends first.
using RoomWaiter = StagingPool::Waiter;

// Identifies the head's state in every answer.
struct HeadState {
  uint64_t incarnation = 0;
  uint64_t step = 0;
};

struct SliceOutput {
  RowRange rows;
  // dL/dx [rows, D] in hidden_dtype at the front of the buffer, if wanted; else an empty buffer.
  StagingBuffer grad_hidden;
  int64_t grad_bytes = 0;
  int64_t room_bytes = 0;  // of the buffer that the slice was submitted in
  // [rows] if wanted, else empty.
  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
  double queue_seconds = 0.0;    // from submission until its chunk was formed
  double compute_seconds = 0.0;  // of its chunk, until results were ready
};

// Sums over the rows of one stream; see lossd.v1.MicrobatchSummary.
struct StreamSummary {
  HeadState state;
  double loss_sum = 0.0;
  double z_loss_sum = 0.0;
  double entropy_sum = 0.0;
  double dropped_mass = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
  double queue_seconds = 0.0;
  double compute_seconds = 0.0;
};

// Receives a stream's results. Called on the engine's threads, one call at a time per stream; must not
// block and must not call back into the engine.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  // The results of one slice, in order of completion.
  virtual void OnSlice(SliceOutput output) = 0;
  // The last call, exactly once: OK with the summary when every valid row of the range is computed and
  // accumulated, else why the stream ended. No memory of the stream is in use any more.
  virtual void OnFinished(absl::Status status, const StreamSummary& summary) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_H_
