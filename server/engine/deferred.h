// SPDX-License-Identifier: Apache-2.0
// The deferred microbatches of one head: rows whose losses were computed without gradients (reduction none)
// and whose hidden states are kept until Backward brings the gradient of each row.
//
// A microbatch consists of parts, one for each stream that carried it. Parts never overlap.
// Thread-compatible: guarded by the engine's lock.
#ifndef LOSSD_SERVER_ENGINE_DEFERRED_H_
#define LOSSD_SERVER_ENGINE_DEFERRED_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/engine/ledger.h"
#include "server/engine/range_allocator.h"
#include "server/engine/stream.h"
#include "server/engine/versions.h"

namespace lossd::engine {

// Rows of a microbatch in retained memory, [rows, D] in the microbatch's dtype.
struct RetainedRows {
  RowRange rows;
  std::shared_ptr<const RangeAllocator::Block> block;
};

// Rows that are retained, or are going to be, and what all rows of their microbatch have to agree on.
struct RetainedTerms {
  const MicrobatchTerms& terms;
  RowRange rows;
};
// FAILED_PRECONDITION if the terms differ, ALREADY_EXISTS if the rows overlap without being the same. `how`
// the first ones are kept, e.g. "retained".
absl::Status CheckRetained(uint64_t id, const RetainedTerms& kept, const RetainedTerms& other,
                           absl::string_view how);

class DeferredMicrobatches {
 public:
  struct Part {
    RetainedRows retained;
    std::vector<int32_t> targets;    // [rows], classes or kernels::kIgnoredTarget
    std::vector<float> row_weights;  // empty or [rows]
    // Who retained it: StreamSpec::identity and run.
    std::string identity;
    std::string run;
  };
  struct Microbatch {
    MicrobatchTerms terms;
    Binding binding;                // the versions that its losses were computed with
    std::map<int64_t, Part> parts;  // by first row
    absl::Time last_used;
  };

  // FAILED_PRECONDITION if the id is kept with other terms, ALREADY_EXISTS if it has rows that overlap
  // `rows` other than exactly those.
  // PERMISSION_DENIED if somebody else, whom the server knows, retains exactly those.
  absl::Status CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                        absl::string_view identity) const;
  // Keeps a part that CheckAdd allowed, unless it has no rows; replaces one with the same rows.
  void Add(uint64_t id, const MicrobatchTerms& terms, const Binding& binding, Part part, absl::Time now);

  // A microbatch whose parts cover `rows`, marked as used. NOT_FOUND names the first row that is not there.
  absl::StatusOr<const Microbatch*> Find(uint64_t id, RowRange rows, absl::Time now);

  // True if there was one. It belongs to the identities that retained rows of it, where the server asks, and
  // else to their runs. PERMISSION_DENIED for another identity, FAILED_PRECONDITION for another run.
  absl::StatusOr<bool> Release(uint64_t id, const Asker& asker);
  // Releases those whose binding is past.
  void ReleaseIf(absl::FunctionRef<bool(const Binding&)> past);
  // Releases what was last used before `limit`; returns how many microbatches.
  int64_t Expire(absl::Time limit);

  int64_t size() const { return static_cast<int64_t>(microbatches_.size()); }

 private:
  std::map<uint64_t, Microbatch> microbatches_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_DEFERRED_H_
