// SPDX-License-Identifier: Apache-2.0
#include "server/engine/deferred.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace lossd::engine {

absl::Status CheckRetained(uint64_t id, const RetainedTerms& kept, const RetainedTerms& other,
                           absl::string_view how) {
  if (!(kept.terms == other.terms)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "open.microbatch_id",
                      absl::StrCat("is ", how, " with other options; release it first"), absl::StrCat(id));
  }
  const RowRange a = kept.rows;
  const RowRange b = other.rows;
  if (a == b || a.end <= b.begin || b.end <= a.begin) return absl::OkStatus();
  return FieldError(absl::StatusCode::kAlreadyExists, "open.rows",
                    absl::StrCat("overlaps rows ", Text(a), " of microbatch ", id, ", which are ", how,
                                 "; release it first"),
                    Text(b));
}

absl::Status DeferredMicrobatches::CheckAdd(uint64_t id, const MicrobatchTerms& terms, RowRange rows,
                                            absl::string_view identity) const {
  const auto it = microbatches_.find(id);
  if (it == microbatches_.end()) return absl::OkStatus();
  for (const auto& [begin, part] : it->second.parts) {
    auto agrees = CheckRetained(id, {it->second.terms, part.retained.rows}, {terms, rows}, "retained");
    if (!agrees.ok()) return agrees;
    if (part.retained.rows == rows && part.identity != identity) {
      return FieldError(absl::StatusCode::kPermissionDenied, "open.rows",
                        absl::StrCat("of microbatch ", id, " are retained by ", part.identity), Text(rows));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DeferredMicrobatches::Release(uint64_t id, const Asker& asker) {
  const auto found = microbatches_.find(id);
  if (found == microbatches_.end()) return false;
  const auto owns = [&asker](const auto& entry) {
    const Part& part = entry.second;
    if (!asker.identity.empty()) return part.identity == asker.identity;
    return asker.run.empty() || part.run.empty() || part.run == asker.run;
  };
  const auto& parts = found->second.parts;
  if (!asker.may_all && std::none_of(parts.begin(), parts.end(), owns)) {
    const Part& part = parts.begin()->second;
    return FieldError(
        asker.identity.empty() ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kPermissionDenied,
        "microbatch_id",
        absl::StrCat("is retained by ", part.identity, part.identity.empty() ? "run " : " (run ", part.run,
                     part.identity.empty() ? "" : ")", ", which may release it, as may an admin"),
        absl::StrCat(id));
  }
  microbatches_.erase(found);
  return true;
}

void DeferredMicrobatches::Add(uint64_t id, const MicrobatchTerms& terms, const Binding& binding, Part part,
                               absl::Time now) {
  if (part.retained.rows.size() == 0) return;
  Microbatch& microbatch = microbatches_[id];
  microbatch.terms = terms;
  microbatch.binding = binding;
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

void DeferredMicrobatches::ReleaseIf(absl::FunctionRef<bool(const Binding&)> past) {
  std::erase_if(microbatches_, [past](const auto& entry) { return past(entry.second.binding); });
}

int64_t DeferredMicrobatches::Expire(absl::Time limit) {
  return static_cast<int64_t>(
      std::erase_if(microbatches_, [limit](const auto& entry) { return entry.second.last_used < limit; }));
}

}  // namespace lossd::engine
