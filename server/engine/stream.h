// SPDX-License-Identifier: Apache-2.0
// A stream: one contiguous row range of one microbatch. What a caller hands to the engine to have its rows
// computed, and what it gets back. The rpc layer turns messages into these; tests drive them directly.
#ifndef LOSSD_SERVER_ENGINE_STREAM_H_
#define LOSSD_SERVER_ENGINE_STREAM_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
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
  // Whether this is a range, which may be empty, of rows of `outer`.
  bool IsWithin(RowRange outer) const { return begin >= outer.begin && begin <= end && end <= outer.end; }
  friend bool operator==(const RowRange&, const RowRange&) = default;
};

enum class Reduction : uint8_t { kSum, kMean, kNone };

struct RowWants {
  bool loss = false;
  bool lse = false;
  bool entropy = false;
  bool logprob = false;
  bool argmax = false;

  // From now on what `other` wants, too.
  void Add(const RowWants& other) {
    loss |= other.loss;
    lse |= other.lse;
    entropy |= other.entropy;
    logprob |= other.logprob;
    argmax |= other.argmax;
  }
};

// Opens a stream. Field names equal those of lossd.v1.OpenMicrobatch, and errors name them so.
struct StreamSpec {
  std::string head;
  std::string peer;                    // who has the stream, for shares of memory; "": without a share
  std::optional<uint64_t> step;        // required with accumulate_gradients
  std::optional<uint64_t> generation;  // HeadState::generation that it is meant for; ABORTED for another
  std::string run;                     // of the program that trains, for people
  std::string identity;                // that was asked for; "": the server does not ask
  uint64_t microbatch_id = 0;
  int64_t microbatch_rows = 0;  // N of the whole microbatch
  RowRange rows;                // carried by this stream
  kernels::DType hidden_dtype = kernels::DType::kBFloat16;
  kernels::LossOptions options;
  bool gradients_of_head = false;  // options.gradients is to be as the head's config says
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
  std::string peer;                    // as in StreamSpec
  std::optional<uint64_t> step;        // must be open; required with accumulate_gradients
  std::optional<uint64_t> generation;  // as in StreamSpec
  std::string run;                     // as in StreamSpec
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
  int64_t max_bytes_in_place = 0;  // of one that lies in staging memory already (IncomingSlice::in_place)
  // Deterministic mode, streams that accumulate: slices come in ascending order, and none holds rows on both
  // sides of a multiple of this. 0: no such rule.
  int64_t row_grid = 0;

  bool has_grid() const { return row_grid > 0; }
  // The first multiple of the grid behind `row`; without a grid the largest number.
  int64_t NextGridRow(int64_t row) const {
    return has_grid() ? (row / row_grid + 1) * row_grid : std::numeric_limits<int64_t>::max();
  }
};

// Upstream gradients of the rows of a backward stream; see BackwardSpec.
struct RowGradients {
  std::vector<float> loss, lse, entropy;
};

// A slice that a caller hands to Stream::Receive. Neither function is called with a lock of the engine's
// held.
struct IncomingSlice {
  RowRange rows;
  int64_t bytes = 0;  // of the hidden states
  // Where the hidden states lie, if that is staging memory of the backend already (kernels::StagingAdopter):
  // the slice is then computed there, in place, if its schedule can do so. Empty: nowhere.
  StagingBuffer in_place;
  // Writes the hidden states, [rows, D] in the stream's dtype, to `to`, which has `bytes` bytes, or does
  // nothing if `to` is where they lie. Called once, unless the stream ends first: by Receive, or by what
  // StreamObserver::OnMemory is given. Null for retained rows.
  absl::AnyInvocable<void(uint8_t* to)> copy;
  // The slice is queued, and the next one may be received. `staging_bytes` of its memory. Called after `copy`
  // on the same thread; destroyed without a call if the stream ends first.
  absl::AnyInvocable<void(int64_t staging_bytes)> on_queued;
};

// Identifies the head's state in every answer; as lossd.v1.HeadState.
struct HeadState {
  uint64_t incarnation = 0;
  uint64_t step = 0;
  uint64_t generation = 0;
  uint64_t weights_version = 0;
  friend bool operator==(const HeadState&, const HeadState&) = default;
};

// Who asks for something that belongs to somebody.
struct Asker {
  std::string identity;  // as in StreamSpec
  std::string run;       // as in StreamSpec
  bool may_all = false;  // an admin, on a server that asks
};

// What became of the release of a deferred microbatch.
struct ReleaseResult {
  HeadState state;
  bool released = false;  // false: there was nothing to release
};

struct SliceOutput {
  RowRange rows;
  // dL/dx [rows, D] in hidden_dtype at the front of the buffer, if wanted; else an empty buffer.
  StagingBuffer grad_hidden;
  int64_t grad_bytes = 0;
  int64_t staging_bytes = 0;  // as IncomingSlice::on_queued had it
  // [rows] if wanted, else empty.
  std::vector<float> loss, lse, entropy, logprob;
  std::vector<int32_t> argmax;
  double queue_seconds = 0.0;    // since it was queued until its chunk was formed
  double compute_seconds = 0.0;  // of its chunk, until results were ready
};

// Sums over the rows of one stream; see lossd.v1.MicrobatchSummary.
struct StreamSummary {
  HeadState state;
  double loss_sum = 0.0;
  double z_loss_sum = 0.0;
  double entropy_sum = 0.0;
  double dropped_mass = 0.0;
  double sampling_variance = 0.0;
  double squared_gradient = 0.0;
  int64_t valid_rows = 0;
  int64_t correct_rows = 0;
  int64_t accumulated_rows = 0;
  int64_t repeated_rows = 0;
  double normalizer = 1.0;
  double queue_seconds = 0.0;
  double compute_seconds = 0.0;
};

// Receives what a stream has to tell. Called on the engine's threads and those that give memory back, OnSlice
// and OnFinished one call at a time per stream; must not block and must not call back into the engine.
class StreamObserver {
 public:
  virtual ~StreamObserver() = default;
  // The memory that a slice has waited for is there. `receive` copies and queues the slice; it is to be run
  // soon, on a thread that may spend the time of a copy, or destroyed, before the engine is.
  virtual void OnMemory(absl::AnyInvocable<void()> receive) = 0;
  // The results of one slice, in order of completion.
  virtual void OnSlice(SliceOutput output) = 0;
  // The last call, exactly once: OK with the summary when every valid row of the range is computed and
  // booked (its weight gradient may be on its way), else why the stream ended. None of its memory is in use.
  virtual void OnFinished(absl::Status status, const StreamSummary& summary) = 0;
};

// An open stream. Thread-safe; destroying it cancels what is not finished (OnFinished still comes). Must
// be destroyed before the engine.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual absl::string_view head() const = 0;  // its name; valid as long as the stream
  virtual uint64_t microbatch_id() const = 0;
  virtual HeadState state() const = 0;     // when it was opened
  virtual SliceLimits limits() const = 0;  // for this stream's dtype
  virtual int64_t hidden_size() const = 0;

  // Lets results flow; nothing reaches the observer before. Call once.
  virtual void Start() = 0;
  // Takes one slice: checks it, finds memory for its rows, has them copied there and queues it. If there is
  // memory now, all of that happens in this call; otherwise the slice waits, and goes on with
  // StreamObserver::OnMemory. Memory is usually a buffer of the staging pool; on a deterministic engine, for
  // a stream that accumulates, it is the rows' place in their group, once it is their turn. A slice that
  // breaks a rule fails the stream through OnFinished. One slice at a time: the next one when
  // IncomingSlice::on_queued has been called.
  virtual void Receive(IncomingSlice slice) = 0;
  // Streams of OpenBackward: the slices to be received, in order. Their hidden states are in retained memory,
  // so only IncomingSlice::rows and on_queued are used.
  virtual std::vector<RowRange> RetainedSlices() const = 0;
  // No more slices will come; fails the stream if valid rows are missing.
  virtual void HalfClose() = 0;
  // Fails the stream with `why` (not OK): slices that wait or are queued are dropped, those on the device
  // finish.
  virtual void Cancel(absl::Status why) = 0;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_H_
