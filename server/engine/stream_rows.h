// SPDX-License-Identifier: Apache-2.0
// What a stream's rows are: its spec, checked and with everything resolved that the spec leaves open, and
// where its rows are retained. Fixed once the stream is open; how far it has come is StreamState's.
//
// Thread-compatible; the members that are not const are called before the first slice or at the stream's end.
#ifndef LOSSD_SERVER_ENGINE_STREAM_ROWS_H_
#define LOSSD_SERVER_ENGINE_STREAM_ROWS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "server/engine/deferred.h"
#include "server/engine/ledger.h"
#include "server/engine/stream.h"
#include "server/engine/versions.h"

namespace lossd::engine {

// INVALID_ARGUMENT unless `values` are finite, one for each of the rows, or absent where they are optional.
absl::Status CheckRowValues(absl::string_view field, absl::Span<const float> values, int64_t rows,
                            bool optional);

class StreamRows {
 public:
  // Checks everything about the spec that does not depend on the ledger, maps ignored targets to
  // kernels::kIgnoredTarget and resolves the normalizer. INVALID_ARGUMENT names the field of
  // lossd.v1.OpenMicrobatch; FAILED_PRECONDITION for accumulation on a frozen head.
  static absl::StatusOr<StreamRows> Create(StreamSpec spec, const kernels::HeadConfig& config,
                                           HeadState state, SliceLimits limits);

  // For a stream that retains its rows or computes retained ones: where they are. `gradients` goes with the
  // latter. Call once, before the first slice.
  void SetRetained(std::vector<RetainedRows> retained, RowGradients gradients);

  const StreamSpec& spec() const { return spec_; }
  const MicrobatchTerms& terms() const { return terms_; }
  HeadState head_state() const { return head_state_; }
  SliceLimits limits() const { return limits_; }
  int64_t hidden_size() const { return hidden_size_; }
  // g, the factor of every gradient: grad_output / normalizer.
  float grad_scale() const { return grad_scale_; }
  // Targets and weights of some rows of this stream.
  const int32_t* targets(RowRange rows) const {
    return spec_.targets.data() + (rows.begin - spec_.rows.begin);
  }
  const float* row_weights(RowRange rows) const;
  // All the ledger knows of the rows: sent again, they must have the same. SetRetained comes before.
  RowContents contents() const {
    return {.targets = spec_.targets,
            .row_weights = spec_.row_weights,
            .grad_loss = gradients_.loss,
            .grad_lse = gradients_.lse,
            .grad_entropy = gradients_.entropy};
  }

  const float* grad_loss(RowRange rows) const { return At(gradients_.loss, rows); }
  const float* grad_lse(RowRange rows) const { return At(gradients_.lse, rows); }
  const float* grad_entropy(RowRange rows) const { return At(gradients_.entropy, rows); }
  // The place of some rows of one slice in retained memory, in bytes; -1: none.
  int64_t RetainedOffset(RowRange rows) const;
  // The rows of this stream, in ascending order, cut so that each slice obeys the limits and lies in one
  // piece of retained memory.
  std::vector<RowRange> RetainedSlices() const;
  // Host memory of what is known of the rows.
  int64_t HostBytes() const;
  // At the end of the stream, after TakePart: what is known of the rows, which may be much to destroy.
  RowValues TakeValues();
  // What a stream that retained its rows leaves behind. Call once, at its end.
  DeferredMicrobatches::Part TakePart();
  // Whether it computes retained rows. Never changes after SetRetained, so it may be read without a lock.
  bool is_backward() const { return is_backward_; }
  // What it rests on from its opening to its end: one version of the weights; the step, if it names one; and
  // the gradients, if it accumulates, retains rows or uses retained ones.
  Binding binding() const;
  // Bytes of some rows' hidden states.
  int64_t RowBytes(int64_t rows) const;

  int64_t valid_rows() const { return valid_rows_; }  // with a target
  bool HasTarget(int64_t row) const { return *targets({row, row + 1}) != kernels::kIgnoredTarget; }

  // INVALID_ARGUMENT if no stream with these rows may send such a slice, whatever it has sent before. `bytes`
  // of its hidden states; `in_place` as in IncomingSlice.
  absl::Status CheckSlice(RowRange rows, int64_t bytes, bool in_place) const;

 private:
  StreamRows(StreamSpec spec, HeadState state, SliceLimits limits);
  absl::Status MapTargets(int64_t vocab_size);
  absl::Status ResolveNormalizer();
  const float* At(const std::vector<float>& values, RowRange rows) const;

  StreamSpec spec_;
  MicrobatchTerms terms_;
  HeadState head_state_;
  SliceLimits limits_;
  int64_t hidden_size_ = 0;
  int64_t valid_rows_ = 0;
  float grad_scale_ = 1.0f;
  bool is_backward_ = false;
  std::vector<RetainedRows> retained_;  // by first row
  RowGradients gradients_;
};

}  // namespace lossd::engine

#endif  // LOSSD_SERVER_ENGINE_STREAM_ROWS_H_
