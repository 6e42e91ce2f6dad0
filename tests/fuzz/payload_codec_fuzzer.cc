// SPDX-License-Identifier: Apache-2.0
// Messages with a payload, as they come from the network: the codec must read just what protobuf reads,
// however the bytes are cut into slices, and what it writes must be what protobuf would write.
//
// Input: one byte for the kind of message, one for the length of slices, the message.
#include <google/protobuf/message_lite.h>
#include <google/protobuf/stubs/logging.h>

#include <algorithm>
#include <string>
#include <vector>

#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "tests/fuzz/fuzz.h"

namespace lossd::fuzz {
namespace {

grpc::ByteBuffer InSlices(absl::string_view bytes, size_t slice_bytes) {
  std::vector<grpc::Slice> slices;
  while (!bytes.empty()) {
    const absl::string_view piece = bytes.substr(0, slice_bytes);
    slices.emplace_back(piece.data(), piece.size());
    bytes.remove_prefix(piece.size());
  }
  if (slices.empty()) slices.emplace_back("", 0);
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::string Flat(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  FUZZ_CHECK(buffer.Dump(&slices).ok(), "an encoded buffer");
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return bytes;
}

std::string Bytes(const wire::PayloadView& view) {
  std::string bytes(view.size(), '\0');
  view.CopyTo(reinterpret_cast<uint8_t*>(bytes.data()));
  return bytes;
}

template <typename Message>
void CheckEncoding(Message header, const std::string& payload, size_t slice_bytes) {
  header.DiscardUnknownFields();
  Message whole = header;
  whole.set_payload(payload);
  const std::string encoded = Flat(wire::Encode(header, grpc::Slice(payload.data(), payload.size())));
  FUZZ_CHECK(encoded == whole.SerializeAsString(), "Encode differs from protobuf");
  Message again;
  const absl::StatusOr<wire::PayloadView> view = wire::Decode(InSlices(encoded, slice_bytes), &again);
  FUZZ_CHECK(view.ok(), view.status().ToString());
  FUZZ_CHECK(Bytes(*view) == payload, "another payload comes back");
  FUZZ_CHECK(again.SerializeAsString() == header.SerializeAsString(), "other fields come back");
}

template <typename Message>
void CheckMessage(absl::string_view bytes, size_t slice_bytes) {
  Message message;
  const absl::StatusOr<wire::PayloadView> view = wire::Decode(InSlices(bytes, slice_bytes), &message);
  Message expected;
  const bool readable = expected.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  FUZZ_CHECK(view.ok() == readable,
             absl::StrCat("protobuf reads it: ", readable, "; Decode: ", view.status().ToString()));
  if (!view.ok()) return;
  const std::string payload = Bytes(*view);
  FUZZ_CHECK(payload == expected.payload(), "another payload than protobuf's");
  expected.clear_payload();
  FUZZ_CHECK(message.SerializeAsString() == expected.SerializeAsString(), "other fields than protobuf's");
  CheckEncoding(message, payload, slice_bytes);
}

}  // namespace
}  // namespace lossd::fuzz

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // it would write a line for every string that is not UTF-8
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace lossd;
  if (size < 2) return 0;
  const size_t slice_bytes = std::max<size_t>(1, data[1]);
  const absl::string_view bytes = fuzz::AsText(data + 2, size - 2);
  switch (data[0] % 5) {
    case 0:
      fuzz::CheckMessage<v1::ComputeLossRequest>(bytes, slice_bytes);
      break;
    case 1:
      fuzz::CheckMessage<v1::ComputeLossResponse>(bytes, slice_bytes);
      break;
    case 2:
      fuzz::CheckMessage<v1::TensorSlice>(bytes, slice_bytes);
      break;
    case 3:
      fuzz::CheckMessage<v1::WriteTensorRequest>(bytes, slice_bytes);
      break;
    default:
      fuzz::CheckMessage<v1::AddGradientRequest>(bytes, slice_bytes);
  }
  return 0;
}
