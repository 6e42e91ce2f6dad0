// SPDX-License-Identifier: Apache-2.0
// What one loss call computes, the rows of a microbatch or the gradients of rows that the server retained,
// and where the slices of each of its streams lie (SlicePlaces): in messages or in shared memory.
//
// The work is thread-compatible, and its const methods may run concurrently; SlicePlaces is thread-safe.
#ifndef LOSSD_CLIENT_CPP_LOSS_WORK_H_
#define LOSSD_CLIENT_CPP_LOSS_WORK_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "client/cpp/client.h"
#include "client/cpp/cuda_driver.h"
#include "client/cpp/head_cache.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/shared_region.h"
#include "lossd/v1/loss.pb.h"

namespace lossd::client::internal {

// What one stream sends, and where its results go.
struct StreamWork {
  v1::ComputeLossRequest first;  // opens the call
  Rows rows;                     // the range it opens
  bool server_cuts = false;      // no slices are sent; the server answers any it likes
  std::vector<Rows> slices;      // else: to be sent; ascending, disjoint, inside `rows`
  const char* hidden = nullptr;  // hidden states of row 0 of the microbatch
  uint64_t row_bytes = 0;        // of a row of hidden states
  LossOutputs outputs;           // of the whole microbatch
  std::optional<int> gpu;        // whose memory `hidden` and outputs.grad_hidden are; nullopt: the host's
  std::shared_ptr<const StreamPoint> after;  // copies of that GPU's memory begin after it; null: at once
};

// Where the caller's rows are, and what comes before copies of them, as in StreamWork.
struct RowsPlace {
  std::optional<int> gpu;
  std::shared_ptr<const StreamPoint> after;
};

// What one loss call computes, whole; it makes the StreamWork of each stream.
class LossWork {
 public:
  // Copies everything but the hidden states and the outputs.
  static std::unique_ptr<LossWork> Forward(const Microbatch& microbatch, const LossOutputs& outputs,
                                           const ComputeOptions& options);
  static std::unique_ptr<LossWork> Backward(const RetainedGradients& gradients, void* grad_hidden,
                                            const BackwardOptions& options);
  virtual ~LossWork() = default;

  const std::string& head() const { return head_; }
  std::optional<uint64_t> step() const { return step_; }
  bool accumulates() const { return accumulates_; }
  // What the call does ends with the gradients of its step (AnswerCheck).
  bool in_step() const { return in_step_; }
  // Nothing of a call that fails stays, so it may begin again with what it finds.
  bool restartable() const { return !in_step_; }
  uint64_t hidden_size() const { return hidden_size_; }
  uint64_t row_bytes() const { return row_bytes_; }
  // The GPU whose memory the caller's rows are; nullopt: they are the host's. Known once Validate is OK.
  std::optional<int> gpu() const { return place_.ok() ? place_->gpu : std::nullopt; }

  // INVALID_ARGUMENT naming the field and its value; UNAVAILABLE if rows are said to be on a GPU and there is
  // no driver.
  virtual absl::Status Validate() const = 0;
  // How many rows' hidden states or gradients travel.
  virtual uint64_t MovedRows() const = 0;
  // Splits the rows into ranges for about `streams` streams, whose first messages stay below
  // `max_message_bytes` and below 4 MiB.
  virtual std::vector<Rows> Split(int streams, uint64_t max_message_bytes) const = 0;
  // What the stream of a range sends, cut by `rule`, meant for these gradients (nullopt: for any). Writes the
  // results of rows that nothing will be received for; UNAVAILABLE if the driver of their GPU cannot.
  virtual absl::StatusOr<StreamWork> Prepare(Rows rows, const SliceRule& rule,
                                             std::optional<GradientsId> meant) const = 0;
  // Sets what follows from the sums over all streams: loss and normalizer. INTERNAL if the sums cannot be
  // right.
  virtual absl::Status Conclude(LossResult* total) const = 0;

 protected:
  LossWork(const std::string& head, std::optional<uint64_t> step, bool accumulates, bool in_step,
           uint64_t hidden_size, v1::DType dtype, absl::StatusOr<RowsPlace> place)
      : head_(head),
        step_(step),
        accumulates_(accumulates),
        in_step_(in_step),
        hidden_size_(hidden_size),
        row_bytes_(hidden_size * ElementSize(dtype)),
        place_(std::move(place)) {}

  absl::Status located() const { return place_.status(); }
  std::shared_ptr<const StreamPoint> after() const { return place_.ok() ? place_->after : nullptr; }
  // Writes the results of ignored rows to the outputs of the rows in `rows` that are in no slice.
  absl::Status FillUnsent(const LossOutputs& outputs, Rows rows, absl::Span<const Rows> slices) const;

 private:
  const std::string head_;
  const std::optional<uint64_t> step_;
  const bool accumulates_;
  const bool in_step_;
  const uint64_t hidden_size_;
  const uint64_t row_bytes_;
  const absl::StatusOr<RowsPlace> place_;
};

// Where the slices of one ComputeLoss call lie: in messages, or in a region of shared memory, where their
// gradients come back to the same place. Gradients of rows that the server has retained come to a part of the
// region that is taken when the call begins, or in messages.
//
// Thread-safe.
class SlicePlaces {
 public:
  // Null: all slices go in messages. `may_wait`: answers come while further slices are not sent, so a slice
  // may wait for the place of one before it. `gpu`: whose memory the caller's rows are; nullopt: the host's.
  SlicePlaces(std::shared_ptr<SharedRegion> region, bool may_wait, std::optional<int> gpu);
  SlicePlaces(const SlicePlaces&) = delete;
  SlicePlaces& operator=(const SlicePlaces&) = delete;

  // How slices are cut that may find a place here: `rule` for rows in messages.
  SliceRule RuleFor(const SliceRule& rule, Rows rows, uint64_t row_bytes) const;

  // Names the region in the message that opens the call, if the call uses one. Call once, first.
  void Name(const StreamWork& work, v1::ComputeLossRequest* first) ABSL_LOCKS_EXCLUDED(mu_);

  struct Place {
    enum class Kind { kMessage, kRegion, kWait, kWaitForOthers } kind = Kind::kMessage;
    uint64_t offset = 0;  // kRegion
  };
  // Finds a place for the next slice, whose first row is `row`, and copies it there if that is in the region.
  // kWait: there is none before a slice of this call is answered; then Put is to be called again.
  // kWaitForOthers: there is none before another call gives some back; then `freed` of WaitForOthers runs,
  // and Put is to be called again. An error of the driver ends the call.
  absl::StatusOr<Place> Put(uint64_t row, absl::Span<const uint8_t> hidden) ABSL_LOCKS_EXCLUDED(mu_);
  // From now on a call that has nothing in the region waits for what others give back, if it may wait at all;
  // `freed` as in SharedRegion::Await. False: it may not.
  bool WaitForOthers(std::function<void()> freed) ABSL_LOCKS_EXCLUDED(mu_);
  // It has waited long enough: what finds no room travels in messages.
  void StopWaitingForOthers() ABSL_LOCKS_EXCLUDED(mu_);
  // Where the slice of this first row, of so many bytes, lies; null: in a message.
  const uint8_t* Find(uint64_t row, uint64_t bytes) const ABSL_LOCKS_EXCLUDED(mu_);
  // Copies what Find has found to the caller's memory.
  absl::Status Fetch(const uint8_t* from, uint64_t bytes, void* to) const;
  // The slice has been answered, and its gradients have been used.
  void Free(uint64_t row) ABSL_LOCKS_EXCLUDED(mu_);

  // The call has ended. After an error the region is retired if the server may still write to it, or may have
  // lost it.
  void End(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  struct Taken {
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  // What a slice of so many bytes does that finds no room.
  Place::Kind WithoutRoom(uint64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  // The part of the region for gradients of retained rows.
  struct Room {
    uint64_t offset = 0;
    uint64_t bytes = 0;
    uint64_t first_row = 0;
    uint64_t row_bytes = 1;
  };

  const std::shared_ptr<SharedRegion> region_;
  const bool may_wait_;
  // Which GPU copies to the region, and from it; nullopt: the host does.
  struct Copiers {
    std::optional<int> to_region, from_region;
  };
  static Copiers CopiersFor(const SharedRegion* region, std::optional<int> gpu);
  const Copiers copiers_;
  std::shared_ptr<const StreamPoint> after_;  // of the work that Name was given; not changed afterwards
  mutable absl::Mutex mu_;
  std::map<uint64_t, Taken> taken_ ABSL_GUARDED_BY(mu_);  // by first row
  uint64_t taken_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<Room> room_ ABSL_GUARDED_BY(mu_);
  std::function<void()> freed_ ABSL_GUARDED_BY(mu_);  // null: the call does not wait for others
};

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_LOSS_WORK_H_
