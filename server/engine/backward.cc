// SPDX-License-Identifier: Apache-2.0
#include "server/engine/backward.h"

#include <algorithm>

#include "server/engine/errors.h"
#include "server/engine/stream_rows.h"

namespace lossd::engine {
namespace {

// Appends the rows [begin, end) of a part. Parts with and without weights may stand side by side: no weight
// is 1.
void AppendPart(const DeferredMicrobatches::Part& part, int64_t begin, int64_t end, StreamSpec& stream) {
  const int64_t first = part.retained.rows.begin;
  const auto targets = part.targets.begin() + (begin - first);
  stream.targets.insert(stream.targets.end(), targets, targets + (end - begin));
  if (!part.row_weights.empty()) {
    stream.row_weights.resize(static_cast<size_t>(begin - stream.rows.begin), 1.0f);
    const auto weights = part.row_weights.begin() + (begin - first);
    stream.row_weights.insert(stream.row_weights.end(), weights, weights + (end - begin));
  } else if (!stream.row_weights.empty()) {
    stream.row_weights.resize(static_cast<size_t>(end - stream.rows.begin), 1.0f);
  }
}

}  // namespace

absl::Status CheckBackward(const BackwardSpec& spec) {
  if (spec.rows.begin < 0 || spec.rows.begin >= spec.rows.end) {
    return InvalidField("backward.rows", "must be a non-empty range", Text(spec.rows));
  }
  if (spec.accumulate_gradients && !spec.step.has_value()) {
    return InvalidField("backward.step", "is required with accumulate_gradients", "nothing");
  }
  const int64_t rows = spec.rows.size();
  absl::Status status = CheckRowValues("backward.grad_loss", spec.grad_loss, rows, /*optional=*/false);
  status.Update(CheckRowValues("backward.grad_lse", spec.grad_lse, rows, /*optional=*/true));
  status.Update(CheckRowValues("backward.grad_entropy", spec.grad_entropy, rows, /*optional=*/true));
  return status;
}

BackwardRows RowsOf(const BackwardSpec& spec, const DeferredMicrobatches::Microbatch& kept) {
  BackwardRows backward;
  StreamSpec& stream = backward.stream;
  stream.head = spec.head;
  stream.peer = spec.peer;
  stream.step = spec.step;
  stream.run = spec.run;
  stream.microbatch_id = spec.microbatch_id;
  stream.microbatch_rows = kept.terms.microbatch_rows;
  stream.rows = spec.rows;
  stream.hidden_dtype = kept.terms.hidden_dtype;
  stream.options = kept.terms.options;
  stream.ignore_index = kernels::kIgnoredTarget;
  stream.want_grad_hidden = spec.want_grad_hidden;
  stream.accumulate_gradients = spec.accumulate_gradients;
  for (const auto& [first, part] : kept.parts) {
    const int64_t begin = std::max(first, spec.rows.begin);
    const int64_t end = std::min(part.retained.rows.end, spec.rows.end);
    if (begin >= end) continue;
    backward.retained.push_back(part.retained);
    AppendPart(part, begin, end, stream);
  }
  return backward;
}

}  // namespace lossd::engine
