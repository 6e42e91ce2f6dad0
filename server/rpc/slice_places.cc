#include "server/rpc/slice_places.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/messages/convert.h"

namespace lossd::rpc {

absl::StatusOr<uint8_t*> SlicePlaces::Check(const v1::RegionRange& range) const {
  if (region_ == nullptr)
    return errors::FieldError("slice.in_region", "come with open.region", "a slice without a region");
  const absl::Span<uint8_t> memory = region_->bytes();
  if (range.offset() % kAlignment != 0) {
    return errors::FieldError("slice.in_region.offset", absl::StrCat("be a multiple of ", kAlignment),
                              range.offset());
  }
  if (range.offset() >= memory.size()) {
    return errors::FieldError("slice.in_region.offset",
                              absl::StrCat("be below ", memory.size(), ", the size of the region"),
                              range.offset());
  }
  const uint64_t most = memory.size() - range.offset();
  if (range.bytes() == 0 || range.bytes() > most) {
    return errors::FieldError("slice.in_region.bytes",
                              absl::StrCat("be in [1, ", most, "] at offset ", range.offset()),
                              range.bytes());
  }
  return memory.data() + range.offset();
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
                              absl::StrCat(payload.size(), " bytes"));
  }
  const absl::StatusOr<uint8_t*> data = Check(header.in_region());
  if (!data.ok()) return data.status();
  slice.bytes = static_cast<int64_t>(header.in_region().bytes());
  slice.in_place = engine::StagingBuffer(*data, slice.bytes, [region = region_] {});
  slice.copy = [region = region_, from = *data, bytes = header.in_region().bytes()](uint8_t* to) {
    if (to != from) std::memcpy(to, from, bytes);
  };
  absl::MutexLock lock(&mutex_);
  in_region_[rows.begin] = *data;
  return slice;
}

grpc::ByteBuffer SlicePlaces::Answer(engine::SliceOutput output) {
  v1::ComputeLossResponse response;
  *response.mutable_slice() = messages::ToProto(output);
  if (!output.grad_hidden) return wire::Encode(response);
  uint8_t* in_region = nullptr;
  {
    absl::MutexLock lock(&mutex_);
    const auto place = in_region_.find(output.rows.begin);
    if (place != in_region_.end()) in_region = place->second;
  }
  const uint8_t* const data = output.grad_hidden.data();
  const auto bytes = static_cast<size_t>(output.grad_bytes);
  if (in_region != nullptr) {
    if (data != in_region) std::memcpy(in_region, data, bytes);
    response.mutable_slice()->set_in_region(true);
    return wire::Encode(response);
  }
  return wire::Encode(response, {data, bytes},
                      [buffer = std::move(output.grad_hidden)]() mutable { buffer.Release(); });
}

}  // namespace lossd::rpc
