// SPDX-License-Identifier: Apache-2.0
// The numbers that name the versions of one head, what a call under way is bound to, and which tensors are
// being written. docs/consistency.md has the rules; a call that keeps a Binding and asks Check follows them.
//
// Numbers are drawn from a counter of the engine. So none is used twice within an incarnation, even if a head
// is deleted and created again.
//
// Plain state; the engine's lock guards it.
#ifndef LOSSD_SERVER_ENGINE_VERSIONS_H_
#define LOSSD_SERVER_ENGINE_VERSIONS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace lossd::engine {

class VersionCounter {
 public:
  uint64_t Next() { return ++last_; }  // never 0

 private:
  uint64_t last_ = 0;
};

// The versions that a call under way rests on, or a deferred microbatch. What is absent may change.
struct Binding {
  std::optional<uint64_t> step;
  std::optional<uint64_t> generation;
  std::optional<uint64_t> weights;
  std::optional<uint64_t> moments;
  std::optional<uint64_t> accumulation;
};

// What a write replaces rows of.
enum class Written : uint8_t { kValue, kMoment };

class HeadVersions {
 public:
  // Step 0 of a new head. The counter outlives this.
  explicit HeadVersions(VersionCounter* counter);

  uint64_t step() const { return step_; }
  uint64_t generation() const { return generation_; }  // of the gradients: since they were last zero
  uint64_t weights() const { return weights_; }        // of the values of all parameters
  uint64_t moments() const { return moments_; }  // of the optimizer's state, beside those of the weights
  uint64_t accumulation() const { return accumulation_; }  // of the gradients' values

  // ABORTED, saying what has changed, if the head has another version than one of those in `binding`.
  absl::Status Check(const Binding& binding) const;

  // ---- Changes. `why` is what Check says of them, e.g. "the gradients were zeroed". ----
  void SetStep(uint64_t step, absl::string_view why);
  void NewGeneration(absl::string_view why);
  void NewWeights(absl::string_view why);
  void NewMoments(absl::string_view why);
  void NewAccumulation() { accumulation_ = counter_->Next(); }

  // ---- Writes: from the first row to the last, the tensor is no version of anything ----
  // Begins a write of some rows, which is a change by itself. Returns a token.
  uint64_t BeginWrite(Written what);
  // False if the write has ended, by EndWrite or EndWrites.
  bool IsWriting(uint64_t token) const { return writes_.contains(token); }
  // What the write leaves is a version of its own, if it took `several` operations. Nothing if it has ended.
  void EndWrite(uint64_t token, bool several);
  // The tensors are replaced as a whole.
  void EndWrites() { writes_.clear(); }
  bool being_written() const { return !writes_.empty(); }
  bool values_being_written() const;

 private:
  void Change(Written what, absl::string_view why);

  VersionCounter* const counter_;
  uint64_t step_ = 0;
  uint64_t generation_;
  uint64_t weights_;
  uint64_t moments_;
  uint64_t accumulation_;
  std::string step_change_, generation_change_, weights_change_, moments_change_;  // the last ones
  std::map<uint64_t, Written> writes_;                                             // by token
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_VERSIONS_H_
