#include "server/engine/deferred.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

absl::Status DeferredMicrobatches::CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return absl::OkStatus();
  if (!(it->second.terms == terms)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                      "is retained with other options; release it first", absl::StrCat(id));
  }
  for (const auto& [begin, part] : it->second.parts) {
    const RowRange kept = part.retained.rows;
    if (kept == rows || kept.end <= rows.begin || rows.end <= kept.begin) continue;
    return FieldError(absl::StatusCode::kAlreadyExists, "open.rows",
                      absl::StrCat("overlaps retained rows [", kept.begin, ", ", kept.end, ") of microbatch ",
                                   id, "; release it first"),
                      Text(rows));
  }
  return absl::OkStatus();
}

void DeferredMicrobatches::Add(uint64_t id, const MicrobatchTerms& terms, Part part, absl::Time now) {
  if (part.retained.rows.size() == 0) return;
  Microbatch& microbatch = microbatches_[id];
  microbatch.terms = terms;
  microbatch.last_used = now;
  microbatch.parts.insert_or_assign(part.retained.rows.begin, std::move(part));
}

absl::StatusOr<const DeferredMicrobatches::Microbatch*> DeferredMicrobatches::Find(uint64_t id, RowRange rows,
                                                                                   absl::Time now) {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) {
    return FieldError(absl::StatusCode::kNotFound, "backward.microbatch_id",
                      "must be retained: forwarded with retain in the open step, not released, not expired",
                      absl::StrCat(id));
  }
  int64_t next = rows.begin;
  for (const auto& [begin, part] : it->second.parts) {
    if (begin <= next && next < part.retained.rows.end) next = part.retained.rows.end;
  }
  if (next < rows.end) {
    return FieldError(absl::StatusCode::kNotFound, "backward.rows",
                      absl::StrCat("must be retained; row ", next, " is not"), Text(rows));
  }
  it->second.last_used = now;
  return &it->second;
}

int64_t DeferredMicrobatches::Expire(absl::Time limit) {
  return static_cast<int64_t>(
      std::erase_if(microbatches_, [limit](const auto& entry) { return entry.second.last_used < limit; }));
}

}  // namespace lossd::engine
