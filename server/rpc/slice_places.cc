// SPDX-License-Identifier: Apache-2.0
#include "server/rpc/slice_places.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"
#include "kernels/errors/field_error.h"
#include "server/messages/convert.h"
#include "server/rpc/region_ranges.h"

namespace lossd::rpc {

absl::Status SlicePlaces::UseForGradients(std::shared_ptr<regions::Region> region,
                                          const v1::RegionRange& range, int64_t first_row) {
  const absl::StatusOr<absl::Span<uint8_t>> bytes = BytesOf(*region, "backward.in_region", range);
  if (!bytes.ok()) return bytes.status();
  region_ = std::move(region);
  gradients_ = *bytes;
  first_row_ = first_row;
  return absl::OkStatus();
}

absl::StatusOr<engine::IncomingSlice> SlicePlaces::Take(const v1::SliceHeader& header,
                                                        const engine::RowRange& rows,
                                                        wire::PayloadView payload) {
  engine::IncomingSlice slice{.rows = rows};
  if (!header.has_in_region()) {
    slice.bytes = static_cast<int64_t>(payload.size());
    slice.copy = [payload = std::move(payload)](uint8_t* to) { payload.CopyTo(to); };
    return slice;
  }
  if (!payload.empty()) {
    return errors::FieldError("payload", "be empty for a slice in a region",
                              errors::ExactBytes(payload.size()));
  }
  if (region_ == nullptr)
    return errors::FieldError("slice.in_region", "come with open.region", "a slice without a region");
  const absl::StatusOr<absl::Span<uint8_t>> bytes = BytesOf(*region_, "slice.in_region", header.in_region());
  if (!bytes.ok()) return bytes.status();
  slice.bytes = static_cast<int64_t>(bytes->size());
  slice.in_place = engine::StagingBuffer(bytes->data(), slice.bytes, [region = region_] {});
  slice.copy = [region = region_, from = *bytes](uint8_t* to) {
    // A device that fails has failed for good, and the chunk with it.
    if (to != from.data()) region->memory().CopyToHost(from, to).IgnoreError();
  };
  absl::MutexLock lock(&mutex_);
  // A slice that repeats rows is refused later, maybe while the first one's gradients are on their way.
  in_region_.try_emplace(rows.begin, *bytes);
  return slice;
}

uint8_t* SlicePlaces::Place(const engine::SliceOutput& output) {
  if (!gradients_.empty()) {
    const int64_t row_bytes = output.grad_bytes / output.rows.size();
    const int64_t fitting = static_cast<int64_t>(gradients_.size()) / row_bytes;  // rows
    if (output.rows.end - first_row_ > fitting) return nullptr;
    return gradients_.data() + (output.rows.begin - first_row_) * row_bytes;
  }
  absl::MutexLock lock(&mutex_);
  const auto place = in_region_.find(output.rows.begin);
  if (place == in_region_.end() || static_cast<int64_t>(place->second.size()) < output.grad_bytes)
    return nullptr;
  return place->second.data();
}

bool SlicePlaces::AnswerCopies(const engine::SliceOutput& output) {
  if (!output.grad_hidden) return false;
  const uint8_t* const in_region = Place(output);
  return in_region != nullptr && in_region != output.grad_hidden.data();
}

grpc::ByteBuffer SlicePlaces::Answer(engine::SliceOutput output) {
  v1::ComputeLossResponse response;
  *response.mutable_slice() = messages::ToProto(output);
  if (!output.grad_hidden) return wire::Encode(response);
  uint8_t* const in_region = Place(output);
  const uint8_t* const data = output.grad_hidden.data();
  const auto bytes = static_cast<size_t>(output.grad_bytes);
  if (in_region != nullptr &&
      (data == in_region || region_->memory().CopyFromHost(data, {in_region, bytes}).ok())) {
    response.mutable_slice()->set_in_region(true);
    return wire::Encode(response);
  }
  return wire::Encode(response, {data, bytes},
                      [buffer = std::move(output.grad_hidden)]() mutable { buffer.Release(); });
}

}  // namespace lossd::rpc
