// SPDX-License-Identifier: Apache-2.0
// Encoding and decoding of messages with a payload (payload_codec.h). Decode first finds the payload fields
// in the bytes, and lets protobuf parse the bytes outside of them.
#include "proto/wire/payload_codec.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "lossd/v1/head.pb.h"

namespace lossd::wire {
namespace {

using google::protobuf::MessageLite;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedOutputStream;

static_assert(v1::ComputeLossResponse::kPayloadFieldNumber == kPayloadField);
static_assert(v1::TensorSlice::kPayloadFieldNumber == kPayloadField);
static_assert(v1::WriteTensorRequest::kPayloadFieldNumber == kPayloadField);
static_assert(v1::AddGradientRequest::kPayloadFieldNumber == kPayloadField);

constexpr uint32_t kPayloadTag =
    WireFormatLite::MakeTag(kPayloadField, WireFormatLite::WIRETYPE_LENGTH_DELIMITED);
constexpr int kMaxTagBytes = 5;
constexpr int kMaxLengthBytes = 5;
constexpr int kMaxVarintBytes = 10;

// Encodes the header's fields and, if there is a payload, its tag and length.
grpc::Slice EncodeHeader(const MessageLite& header, size_t payload_size) {
  const size_t header_size = header.ByteSizeLong();
  size_t total = header_size;
  if (payload_size > 0) {
    total += CodedOutputStream::VarintSize32(kPayloadTag) + CodedOutputStream::VarintSize64(payload_size);
  }
  grpc::Slice slice(total);
  auto* out = const_cast<uint8_t*>(slice.begin());  // a new slice, which no other code uses yet
  out = header.SerializeWithCachedSizesToArray(out);
  if (payload_size > 0) {
    out = CodedOutputStream::WriteVarint32ToArray(kPayloadTag, out);
    CodedOutputStream::WriteVarint64ToArray(payload_size, out);
  }
  return slice;
}

// The function to run when a buffer's memory is no longer used. gRPC ensures that it is created before it
// runs; the flag makes that order visible to a thread sanitizer.
struct Release {
  explicit Release(absl::AnyInvocable<void()> function) : run(std::move(function)) { made.store(true); }

  absl::AnyInvocable<void()> run;
  std::atomic<bool> made{false};
};

void RunRelease(void* user_data) {
  const std::unique_ptr<Release> release(static_cast<Release*>(user_data));
  if (release->made.load()) release->run();
}

// The bytes [begin, end) of a message.
struct Extent {
  size_t begin = 0;
  size_t end = 0;
};

// Reads the top-level fields of an encoded message that is in several slices.
class Cursor {
 public:
  explicit Cursor(const std::vector<grpc::Slice>& slices) : slices_(slices) {
    for (const grpc::Slice& slice : slices) remaining_ += slice.size();
    Skip(0);
  }

  size_t position() const { return position_; }
  size_t remaining() const { return remaining_; }

  // Skips `count` bytes; false if fewer remain. Afterwards the cursor is on a byte, unless none remains.
  bool Skip(size_t count) {
    if (count > remaining_) return false;
    position_ += count;
    remaining_ -= count;
    within_ += count;
    while (index_ < slices_.size() && within_ >= slices_[index_].size()) within_ -= slices_[index_++].size();
    return true;
  }

  // Reads a varint of at most `max_bytes` bytes. Bits above 64 are dropped, as in protobuf.
  std::optional<uint64_t> ReadVarint(int max_bytes) {
    uint64_t value = 0;
    for (int i = 0; i < max_bytes && remaining_ > 0; ++i) {
      const uint8_t byte = slices_[index_].begin()[within_];
      Skip(1);
      value |= uint64_t{byte & 0x7fu} << (7 * i);
      if (byte < 0x80) return value;
    }
    return std::nullopt;
  }

 private:
  const std::vector<grpc::Slice>& slices_;
  size_t index_ = 0;
  size_t within_ = 0;
  size_t position_ = 0;
  size_t remaining_ = 0;
};

// The payload fields of a message: the bytes of each field with its tag and length, and the bytes of the last
// field's value.
struct Payloads {
  std::vector<Extent> fields;
  Extent last_value;
};

// Skips the value of a field with this tag. Counts open groups, because a field in a group that looks like a
// payload is not one. False if the bytes end early or are not a field.
bool SkipValue(uint32_t tag, Cursor* cursor, int64_t* open_groups) {
  switch (WireFormatLite::GetTagWireType(tag)) {
    case WireFormatLite::WIRETYPE_VARINT:
      return cursor->ReadVarint(kMaxVarintBytes).has_value();
    case WireFormatLite::WIRETYPE_FIXED64:
      return cursor->Skip(8);
    case WireFormatLite::WIRETYPE_FIXED32:
      return cursor->Skip(4);
    case WireFormatLite::WIRETYPE_LENGTH_DELIMITED: {
      const std::optional<uint64_t> length = cursor->ReadVarint(kMaxLengthBytes);
      return length.has_value() && cursor->Skip(*length);
    }
    case WireFormatLite::WIRETYPE_START_GROUP:
      ++*open_groups;
      return true;
    case WireFormatLite::WIRETYPE_END_GROUP:
      return --*open_groups >= 0;
    default:
      return false;
  }
}

// Finds the payload fields. Nullopt if the bytes are not a sequence of fields; the cursor is then near the
// fault.
std::optional<Payloads> FindPayloads(Cursor* cursor) {
  Payloads found;
  int64_t open_groups = 0;
  while (cursor->remaining() > 0) {
    const size_t field_begin = cursor->position();
    const std::optional<uint64_t> wide_tag = cursor->ReadVarint(kMaxTagBytes);
    if (!wide_tag.has_value()) return std::nullopt;
    const auto tag = static_cast<uint32_t>(*wide_tag);
    if (WireFormatLite::GetTagFieldNumber(tag) == 0) return std::nullopt;
    if (tag != kPayloadTag || open_groups > 0) {
      if (!SkipValue(tag, cursor, &open_groups)) return std::nullopt;
      continue;
    }
    const std::optional<uint64_t> length = cursor->ReadVarint(kMaxLengthBytes);
    const size_t value_begin = cursor->position();
    if (!length.has_value() || !cursor->Skip(*length)) return std::nullopt;
    found.last_value = {value_begin, cursor->position()};
    found.fields.push_back({field_begin, cursor->position()});
  }
  if (open_groups != 0) return std::nullopt;
  return found;
}

// The bytes of `slices` outside `holes`, which are in ascending order.
std::vector<absl::Span<const uint8_t>> Remainder(const std::vector<grpc::Slice>& slices,
                                                 const std::vector<Extent>& holes) {
  std::vector<absl::Span<const uint8_t>> pieces;
  size_t hole = 0;
  size_t slice_begin = 0;
  for (const grpc::Slice& slice : slices) {
    const size_t slice_end = slice_begin + slice.size();
    size_t position = slice_begin;
    while (position < slice_end) {
      while (hole < holes.size() && holes[hole].end <= position) ++hole;
      const bool none_left = hole == holes.size();
      if (!none_left && holes[hole].begin <= position) {
        position = std::min(holes[hole].end, slice_end);
        continue;
      }
      const size_t piece_end = none_left ? slice_end : std::min(holes[hole].begin, slice_end);
      pieces.emplace_back(slice.begin() + (position - slice_begin), piece_end - position);
      position = piece_end;
    }
    slice_begin = slice_end;
  }
  return pieces;
}

// A stream of the pieces, which are not empty, one after the other.
class PieceStream final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  explicit PieceStream(const std::vector<absl::Span<const uint8_t>>& pieces) : pieces_(pieces) {}

  bool Next(const void** data, int* size) override {
    if (index_ == pieces_.size()) return false;
    const absl::Span<const uint8_t> rest = pieces_[index_].subspan(within_);
    // The interface counts in int; a longer piece is handed out in parts.
    const size_t length = std::min(rest.size(), size_t{1} << 30);
    *data = rest.data();
    *size = static_cast<int>(length);
    Advance(length);
    return true;
  }

  void BackUp(int count) override {
    byte_count_ -= count;
    if (within_ == 0) within_ = pieces_[--index_].size();
    within_ -= static_cast<size_t>(count);
  }

  bool Skip(int count) override {
    auto left = static_cast<size_t>(count);
    while (left > 0 && index_ < pieces_.size()) {
      const size_t length = std::min(left, pieces_[index_].size() - within_);
      Advance(length);
      left -= length;
    }
    return left == 0;
  }

  int64_t ByteCount() const override { return byte_count_; }

 private:
  void Advance(size_t length) {
    byte_count_ += static_cast<int64_t>(length);
    within_ += length;
    if (within_ < pieces_[index_].size()) return;
    ++index_;
    within_ = 0;
  }

  const std::vector<absl::Span<const uint8_t>>& pieces_;
  size_t index_ = 0;
  size_t within_ = 0;
  int64_t byte_count_ = 0;
};

// References to the slices that `extent` touches.
PayloadView ViewOf(const std::vector<grpc::Slice>& slices, Extent extent) {
  if (extent.begin == extent.end) return PayloadView();
  std::vector<grpc::Slice> touched;
  size_t offset = 0;
  size_t slice_begin = 0;
  for (const grpc::Slice& slice : slices) {
    const size_t slice_end = slice_begin + slice.size();
    if (slice_end > extent.begin && slice_begin < extent.end) {
      if (touched.empty()) offset = extent.begin - slice_begin;
      touched.push_back(slice);
    }
    slice_begin = slice_end;
  }
  return PayloadView(std::move(touched), offset, extent.end - extent.begin);
}

}  // namespace

grpc::ByteBuffer Encode(const MessageLite& header, const grpc::Slice& payload) {
  const grpc::Slice slices[] = {EncodeHeader(header, payload.size()), payload};
  return grpc::ByteBuffer(slices, payload.size() > 0 ? 2 : 1);
}

grpc::ByteBuffer Encode(const MessageLite& header, absl::Span<const uint8_t> payload,
                        absl::AnyInvocable<void()> release) {
  if (payload.empty()) {
    release();
    return Encode(header);
  }
  auto* user_data = new Release(std::move(release));
  // gRPC takes a mutable pointer but never writes through it.
  return Encode(header,
                grpc::Slice(const_cast<uint8_t*>(payload.data()), payload.size(), &RunRelease, user_data));
}

grpc::ByteBuffer Encode(const MessageLite& header) {
  const grpc::Slice slice = EncodeHeader(header, 0);
  return grpc::ByteBuffer(&slice, 1);
}

PayloadView::PayloadView(std::vector<grpc::Slice> slices, size_t offset, size_t size)
    : slices_(std::move(slices)), offset_(offset), size_(size) {}

void PayloadView::CopyTo(uint8_t* destination) const {
  size_t left = size_;
  size_t offset = offset_;
  for (const grpc::Slice& slice : slices_) {
    const size_t length = std::min(left, slice.size() - offset);
    if (length > 0) std::memcpy(destination, slice.begin() + offset, length);
    destination += length;
    left -= length;
    offset = 0;
  }
}

absl::StatusOr<PayloadView> Decode(const grpc::ByteBuffer& buffer, MessageLite* message) {
  std::vector<grpc::Slice> slices;
  if (!buffer.Valid() || !buffer.Dump(&slices).ok()) {
    return absl::InvalidArgumentError(absl::StrCat("no ", message->GetTypeName(), " message in the buffer"));
  }
  Cursor cursor(slices);
  const std::optional<Payloads> payloads = FindPayloads(&cursor);
  if (!payloads.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed ", message->GetTypeName(), " message at byte ", cursor.position()));
  }
  const std::vector<absl::Span<const uint8_t>> pieces = Remainder(slices, payloads->fields);
  PieceStream stream(pieces);
  if (!message->ParseFromZeroCopyStream(&stream)) {
    return absl::InvalidArgumentError(
        absl::StrCat("malformed fields in ", message->GetTypeName(), " message"));
  }
  return ViewOf(slices, payloads->last_value);
}

}  // namespace lossd::wire
