// SPDX-License-Identifier: Apache-2.0
// Tests of proto/wire: the codec of payloads, the packets of the region socket, and statuses.
#include <gmock/gmock.h>
#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/payload_codec.h"
#include "proto/wire/region_packets.h"
#include "proto/wire/status_details.h"

// ---- Payload codec ----
// The codec against protobuf's own encoding and parser, for every message that has a payload.

namespace lossd::wire::payload_codec_test {
namespace {

using google::protobuf::Message;
using google::protobuf::util::MessageDifferencer;

std::string Flatten(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string flat;
  for (const grpc::Slice& slice : slices) {
    flat.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return flat;
}

grpc::ByteBuffer OneSlice(absl::string_view bytes) {
  const grpc::Slice slice(bytes.data(), bytes.size());
  return grpc::ByteBuffer(&slice, 1);
}

absl::Span<const uint8_t> AsBytes(absl::string_view text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

std::string Copied(const PayloadView& view) {
  std::string bytes(view.size(), '?');
  view.CopyTo(reinterpret_cast<uint8_t*>(bytes.data()));
  return bytes;
}

void SetPayload(Message* message, const std::string& payload) {
  message->GetReflection()->SetString(message, message->GetDescriptor()->FindFieldByNumber(kPayloadField),
                                      payload);
}

std::string GetPayload(const Message& message) {
  return message.GetReflection()->GetString(message,
                                            message.GetDescriptor()->FindFieldByNumber(kPayloadField));
}

class PayloadCodecTest : public testing::Test {
 protected:
  PayloadCodecTest() { RecordProperty("seed", static_cast<int>(seed_)); }

  uint64_t Below(uint64_t limit) { return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random_); }

  std::string RandomBytes(size_t size) {
    std::string bytes(size, 0);
    for (char& byte : bytes) byte = static_cast<char>(random_());
    return bytes;
  }

  // Cut at random places, with some empty slices.
  grpc::ByteBuffer RandomSlices(absl::string_view bytes) {
    std::vector<grpc::Slice> slices;
    const uint64_t longest = 1 + Below(bytes.size() / 2 + 4);
    while (!bytes.empty()) {
      const size_t length = std::min<size_t>(bytes.size(), Below(longest + 1));
      slices.emplace_back(bytes.data(), length);
      bytes.remove_prefix(length);
    }
    return grpc::ByteBuffer(slices.data(), slices.size());
  }

  v1::ComputeLossRequest OpenRequest(int rows) {
    v1::ComputeLossRequest request;
    v1::OpenMicrobatch* open = request.mutable_open();
    open->set_head("lm");
    open->set_step(random_());
    open->set_microbatch_id(random_());
    open->mutable_rows()->set_end(static_cast<uint64_t>(rows));
    open->mutable_options()->set_softcap(30.0f);
    for (int i = 0; i < rows; ++i) open->add_targets(static_cast<int32_t>(random_()));
    return request;
  }

  // One header of each message with a payload, with random contents.
  std::vector<std::unique_ptr<Message>> Headers() {
    std::vector<std::unique_ptr<Message>> headers;
    headers.push_back(std::make_unique<v1::ComputeLossRequest>(OpenRequest(static_cast<int>(Below(300)))));
    v1::ComputeLossRequest slice_request;
    slice_request.mutable_slice()->mutable_rows()->set_begin(random_());
    headers.push_back(std::make_unique<v1::ComputeLossRequest>(slice_request));
    v1::ComputeLossResponse response;
    response.mutable_slice()->mutable_rows()->set_end(random_());
    for (uint64_t i = Below(200); i > 0; --i)
      response.mutable_slice()->add_row_loss(static_cast<float>(random_()));
    headers.push_back(std::make_unique<v1::ComputeLossResponse>(response));
    v1::TensorSlice tensor;
    tensor.mutable_state()->set_incarnation(random_());
    tensor.set_tensor_rows(random_());
    tensor.set_dtype(v1::DTYPE_BF16);
    headers.push_back(std::make_unique<v1::TensorSlice>(tensor));
    v1::WriteTensorRequest write;
    write.mutable_open()->set_head("a head");
    headers.push_back(std::make_unique<v1::WriteTensorRequest>(write));
    headers.push_back(std::make_unique<v1::WriteTensorRequest>());
    return headers;
  }

  // Checks that Decode and protobuf's parser agree on `bytes`: both refuse, or both yield the same.
  void ExpectAsProtobuf(const Message& prototype, absl::string_view bytes, const grpc::ByteBuffer& buffer) {
    std::unique_ptr<Message> expected(prototype.New());
    const bool valid = expected->ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
    std::unique_ptr<Message> header(prototype.New());
    const absl::StatusOr<PayloadView> view = Decode(buffer, header.get());
    ASSERT_EQ(view.ok(), valid) << view.status();
    if (!valid) {
      EXPECT_EQ(view.status().code(), absl::StatusCode::kInvalidArgument);
      return;
    }
    EXPECT_EQ(Copied(*view), GetPayload(*expected));
    EXPECT_EQ(GetPayload(*header), "");
    SetPayload(header.get(), Copied(*view));
    EXPECT_EQ(header->SerializeAsString(), expected->SerializeAsString());
  }

  google::protobuf::LogSilencer silencer_;  // broken messages are meant here
  const uint32_t seed_ = std::random_device{}();
  testing::ScopedTrace trace_{__FILE__, __LINE__, "seed " + std::to_string(seed_)};
  std::mt19937_64 random_{seed_};
};

TEST_F(PayloadCodecTest, EncodesTheBytesOfProtobuf) {
  for (const size_t size : {0, 1, 23, 127, 128, 1000, 70000}) {
    for (const std::unique_ptr<Message>& header : Headers()) {
      const std::string payload = RandomBytes(size);
      const std::string encoded = Flatten(Encode(*header, grpc::Slice(payload)));
      const std::string held = Flatten(Encode(*header, AsBytes(payload), [] {}));
      SetPayload(header.get(), payload);
      EXPECT_EQ(encoded, header->SerializeAsString()) << header->GetTypeName() << " " << size;
      EXPECT_EQ(held, encoded);
    }
  }
}

TEST_F(PayloadCodecTest, EncodesWithoutPayload) {
  for (const std::unique_ptr<Message>& header : Headers()) {
    EXPECT_EQ(Flatten(Encode(*header)), header->SerializeAsString());
  }
}

TEST_F(PayloadCodecTest, DecodesWhatProtobufEncoded) {
  for (const size_t size : {0, 1, 127, 128, 5000}) {
    for (const std::unique_ptr<Message>& message : Headers()) {
      const std::string payload = RandomBytes(size);
      std::unique_ptr<Message> decoded(message->New());
      SetPayload(decoded.get(), "left over");
      std::unique_ptr<Message> full(message->New());
      full->CopyFrom(*message);
      SetPayload(full.get(), payload);
      const absl::StatusOr<PayloadView> view = Decode(RandomSlices(full->SerializeAsString()), decoded.get());
      ASSERT_TRUE(view.ok()) << view.status();
      EXPECT_EQ(Copied(*view), payload);
      EXPECT_TRUE(MessageDifferencer::Equals(*decoded, *message)) << decoded->ShortDebugString();
    }
  }
}

TEST_F(PayloadCodecTest, EncodingDoesNotCopy) {
  const std::string payload = RandomBytes(1 << 20);
  const grpc::ByteBuffer buffer = Encode(OpenRequest(5), AsBytes(payload), [] {});
  std::vector<grpc::Slice> slices;
  ASSERT_TRUE(buffer.Dump(&slices).ok());
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(static_cast<const void*>(slices[1].begin()), static_cast<const void*>(payload.data()));
  EXPECT_EQ(slices[1].size(), payload.size());
}

TEST_F(PayloadCodecTest, ReleasesOnceAfterTheLastReference) {
  for (const size_t size : {0, 1, 100000}) {
    const std::string payload = RandomBytes(size);
    int released = 0;
    {
      grpc::ByteBuffer copy;
      {
        const grpc::ByteBuffer buffer =
            Encode(v1::TensorSlice(), AsBytes(payload), [&released] { ++released; });
        EXPECT_EQ(released, size == 0 ? 1 : 0);
        copy = buffer;
      }
      EXPECT_EQ(released, size == 0 ? 1 : 0);
    }
    EXPECT_EQ(released, 1);
  }
}

TEST_F(PayloadCodecTest, ViewOutlivesTheBuffer) {
  const std::string payload = RandomBytes(200000);
  v1::TensorSlice message;
  PayloadView view;
  {
    const std::string encoded = Flatten(Encode(v1::TensorSlice(), grpc::Slice(payload)));
    const grpc::ByteBuffer buffer = RandomSlices(encoded);
    view = *Decode(buffer, &message);
  }
  EXPECT_EQ(Copied(view), payload);
}

// Any order of fields, any number of payloads, unknown fields and groups that hold a field 1000.
TEST_F(PayloadCodecTest, TakesFieldsInAnyOrder) {
  for (int round = 0; round < 300; ++round) {
    for (const std::unique_ptr<Message>& header : Headers()) {
      std::vector<std::string> parts = {header->SerializeAsString()};
      for (uint64_t i = Below(4); i > 0; --i) {
        std::unique_ptr<Message> only_payload(header->New());
        SetPayload(only_payload.get(), RandomBytes(Below(300)));
        parts.push_back(only_payload->SerializeAsString());
      }
      parts.push_back(std::string("\xc2\x3e\x00", 3));                   // an empty payload
      parts.push_back(std::string("\xc2\xbe\x00\x02hi", 6));             // a tag longer than needed
      parts.push_back(std::string("\xc2\x3e\x82\x00hi", 6));             // a length longer than needed
      parts.push_back(std::string("\xc3\x3f\xc2\x3e\x01x\xc4\x3f", 8));  // in group 1016: not our field
      parts.push_back(std::string("\xc0\x3e\x05", 3));                   // field 1000 as a varint: unknown
      std::shuffle(parts.begin(), parts.end(), random_);
      parts.resize(Below(parts.size()) + 1);
      std::string bytes;
      for (const std::string& part : parts) bytes += part;
      ExpectAsProtobuf(*header, bytes, RandomSlices(bytes));
    }
  }
}

TEST_F(PayloadCodecTest, TheLastPayloadCountsEvenIfEmpty) {
  v1::TensorSlice message;
  const absl::StatusOr<PayloadView> view =
      Decode(OneSlice(absl::string_view("\xc2\x3e\x02hi\xc2\x3e\x00", 8)), &message);
  ASSERT_TRUE(view.ok());
  EXPECT_TRUE(view->empty());
}

TEST_F(PayloadCodecTest, TruncatedAnywhere) {
  for (const std::unique_ptr<Message>& header : Headers()) {
    const std::string encoded = Flatten(Encode(*header, grpc::Slice(RandomBytes(150))));
    for (size_t length = 0; length < encoded.size(); ++length) {
      const std::string cut = encoded.substr(0, length);
      ExpectAsProtobuf(*header, cut, RandomSlices(cut));
    }
  }
}

TEST_F(PayloadCodecTest, RandomBytesAreRefusedAsByProtobuf) {
  for (int round = 0; round < 20000; ++round) {
    const std::string bytes = RandomBytes(Below(60));
    ExpectAsProtobuf(v1::ComputeLossRequest(), bytes, RandomSlices(bytes));
  }
}

TEST_F(PayloadCodecTest, FlippedBitsAreTreatedAsByProtobuf) {
  for (int round = 0; round < 500; ++round) {
    for (const std::unique_ptr<Message>& header : Headers()) {
      std::string bytes = Flatten(Encode(*header, grpc::Slice(RandomBytes(Below(40)))));
      if (bytes.empty()) continue;
      for (uint64_t i = 1 + Below(3); i > 0; --i)
        bytes[Below(bytes.size())] ^= static_cast<char>(1 << Below(8));
      ExpectAsProtobuf(*header, bytes, RandomSlices(bytes));
    }
  }
}

TEST_F(PayloadCodecTest, LengthsBeyondTheMessageAreRefused) {
  const std::string lengths[] = {"\x03", "\xff\x7f", "\xff\xff\xff\xff\x07", "\xff\xff\xff\xff\x0f",
                                 "\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"};
  for (const std::string& length : lengths) {
    v1::TensorSlice message;
    for (const char* tag : {"\xc2\x3e", "\xc2\x3f", "\x0a"}) {
      EXPECT_EQ(Decode(OneSlice(tag + length + "hi"), &message).status().code(),
                absl::StatusCode::kInvalidArgument);
    }
  }
}

TEST_F(PayloadCodecTest, AnUnsetBufferIsRefused) {
  v1::TensorSlice message;
  EXPECT_EQ(Decode(grpc::ByteBuffer(), &message).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(PayloadCodecTest, LargePayloads) {
  const std::string payload = RandomBytes((5 << 20) + 17);
  const v1::ComputeLossRequest header = OpenRequest(100000);
  const std::string encoded = Flatten(Encode(header, AsBytes(payload), [] {}));
  std::vector<grpc::Slice> slices;
  for (size_t at = 0; at < encoded.size(); at += 65536) {
    slices.emplace_back(encoded.data() + at, std::min<size_t>(65536, encoded.size() - at));
  }
  v1::ComputeLossRequest decoded;
  const absl::StatusOr<PayloadView> view = Decode(grpc::ByteBuffer(slices.data(), slices.size()), &decoded);
  ASSERT_TRUE(view.ok()) << view.status();
  EXPECT_TRUE(Copied(*view) == payload);
  EXPECT_TRUE(MessageDifferencer::Equals(decoded, header));
}

}  // namespace
}  // namespace lossd::wire::payload_codec_test

// ---- Region packets ----
// Packets of the region socket: what was sent before a side closed arrives, whatever was still unread.

namespace lossd::wire::region_packets_test {
namespace {

std::pair<OwnedDescriptor, OwnedDescriptor> Connected() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends), 0);
  return {OwnedDescriptor(ends[0]), OwnedDescriptor(ends[1])};
}

TEST(RegionPacketsTest, SayWhenTheOtherSideHasClosed) {
  auto [client, server] = Connected();
  EXPECT_EQ(ReceiveRegionPacket(client.get()).status().code(), absl::StatusCode::kUnavailable) << "none yet";
  ASSERT_TRUE(SendRegionPacket(server.get(), "answer", -1).ok());
  server = OwnedDescriptor();
  const auto packet = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(packet.ok()) << packet.status();
  EXPECT_EQ(packet->bytes, "answer");
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

// A server that refuses a connection closes it without reading the request. The kernel then reports a reset,
// once, ahead of the refusal.
TEST(RegionPacketsTest, AnAnswerArrivesAlthoughTheRequestWasNotRead) {
  auto [client, server] = Connected();
  ASSERT_TRUE(SendRegionPacket(client.get(), "request", -1).ok());
  ASSERT_TRUE(SendRegionPacket(server.get(), "refused", -1).ok());
  server = OwnedDescriptor();
  const auto packet = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(packet.ok()) << packet.status();
  EXPECT_EQ(packet->bytes, "refused");
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

TEST(RegionPacketsTest, AResetWithoutAnAnswerIsAnEnd) {
  auto [client, server] = Connected();
  ASSERT_TRUE(SendRegionPacket(client.get(), "request", -1).ok());
  server = OwnedDescriptor();
  const auto end = ReceiveRegionPacket(client.get());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_TRUE(end->closed);
}

TEST(RegionPacketsTest, PollWaitsForADeadline) {
  EXPECT_EQ(PollMilliseconds(absl::InfiniteFuture()), -1);
  EXPECT_EQ(PollMilliseconds(clocks::SteadyNow() + absl::Hours(1)), 60'000);
  EXPECT_EQ(PollMilliseconds(clocks::SteadyNow() - absl::Hours(1)), 0);
  EXPECT_EQ(PollMilliseconds(absl::InfinitePast()), 0);
  const int soon = PollMilliseconds(clocks::SteadyNow() + absl::Seconds(10));
  EXPECT_TRUE(soon > 0 && soon <= 10'001) << soon;
}

}  // namespace
}  // namespace lossd::wire::region_packets_test

// ---- Status details ----

namespace lossd::wire::status_details_test {
namespace {

using google::protobuf::util::MessageDifferencer;

v1::ErrorDetail SomeDetail() {
  v1::ErrorDetail detail;
  detail.set_field("open.targets[17]");
  detail.set_value("50304");
  detail.set_incarnation(0x123456789abcdef0u);
  detail.set_current_step(0);
  detail.add_missing("microbatch 7: rows [128, 256)");
  return detail;
}

TEST(StatusDetailsTest, CarriesTheDetail) {
  const grpc::Status status =
      MakeGrpcStatus(grpc::StatusCode::INVALID_ARGUMENT, "target too large", SomeDetail());
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "target too large");
  ASSERT_TRUE(GetErrorDetail(status).has_value());
  EXPECT_TRUE(MessageDifferencer::Equals(*GetErrorDetail(status), SomeDetail()));
  v1::StatusDetails details;
  ASSERT_TRUE(details.ParseFromString(status.error_details()));
  EXPECT_EQ(details.code(), 3);
  EXPECT_EQ(details.message(), "target too large");
}

TEST(StatusDetailsTest, ThereAndBackForEveryCode) {
  for (int code = 1; code <= 16; ++code) {
    absl::Status status(static_cast<absl::StatusCode>(code), absl::StrCat("code ", code));
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
    SetErrorDetail(SomeDetail(), &status);
    EXPECT_EQ(static_cast<int>(ToGrpcStatus(status).error_code()), code);
    EXPECT_EQ(FromGrpcStatus(ToGrpcStatus(status)), status);
    EXPECT_TRUE(MessageDifferencer::Equals(*GetErrorDetail(status), SomeDetail()));
  }
  EXPECT_TRUE(ToGrpcStatus(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpcStatus(grpc::Status::OK).ok());
}

TEST(StatusDetailsTest, UnknownCodesAndForeignDetails) {
  EXPECT_EQ(ToGrpcStatus(absl::Status(static_cast<absl::StatusCode>(77), "x")).error_code(), grpc::UNKNOWN);
  EXPECT_FALSE(GetErrorDetail(grpc::Status(grpc::INTERNAL, "x")).has_value());
  EXPECT_FALSE(GetErrorDetail(grpc::Status(grpc::INTERNAL, "x", "\x0f no protobuf")).has_value());
  EXPECT_EQ(FromGrpcStatus(grpc::Status(grpc::INTERNAL, "x", "\x0f no protobuf")), absl::InternalError("x"));
  EXPECT_FALSE(GetErrorDetail(absl::InternalError("x")).has_value());
}

TEST(StatusDetailsTest, FitsIntoTrailers) {
  v1::ErrorDetail detail = SomeDetail();
  detail.clear_missing();
  for (int i = 0; i < 5000; ++i) detail.add_missing(absl::StrCat("microbatch ", i, ": rows [0, 4096)"));
  std::string long_text = "ab";
  for (int i = 0; i < 4000; ++i) long_text += "\xe2\x82\xac";  // a character of three bytes
  detail.set_value(long_text);
  detail.set_field(long_text);
  absl::Status status = absl::FailedPreconditionError(long_text);
  SetErrorDetail(detail, &status);
  const grpc::Status sent = ToGrpcStatus(status);
  EXPECT_LE(sent.error_message().size(), kMaxMessageBytes);
  EXPECT_LE(sent.error_details().size(), kMaxMessageBytes + kMaxDetailBytes + 100);
  EXPECT_TRUE(absl::EndsWith(sent.error_message(), "\xe2\x82\xac..."));
  const v1::ErrorDetail received = GetErrorDetail(sent).value();
  EXPECT_EQ(received.incarnation(), detail.incarnation());
  EXPECT_LE(received.field().size(), ::lossd::errors::kMaxFieldBytes);
  EXPECT_TRUE(absl::EndsWith(received.field(), "\xe2\x82\xac..."));
  EXPECT_LE(received.value().size(), ::lossd::errors::kMaxValueBytes);
  EXPECT_EQ(received.missing(0), "microbatch 0: rows [0, 4096)");
  const int whole = received.missing_size() - 1;
  EXPECT_GT(whole, 20);
  EXPECT_EQ(received.missing(whole), absl::StrCat("and ", 5000 - whole, " more"));
}

// Protobuf refuses to read a message whose strings are not UTF-8, so the detail would be lost.
TEST(StatusDetailsTest, BytesThatAreNotUtf8DoNotCostTheDetail) {
  v1::ErrorDetail detail = SomeDetail();
  detail.set_field("open.\xff");
  detail.set_value("caf\xc3");
  detail.add_missing("\x80 rows");
  absl::Status status = absl::InvalidArgumentError("no file caf\xc3");
  SetErrorDetail(detail, &status);
  const grpc::Status sent = ToGrpcStatus(status);
  EXPECT_EQ(sent.error_message(), "no file caf\xef\xbf\xbd");
  const std::optional<v1::ErrorDetail> received = GetErrorDetail(sent);
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->field(), "open.\xef\xbf\xbd");
  EXPECT_EQ(received->value(), "caf\xef\xbf\xbd");
  EXPECT_EQ(received->missing(1), "\xef\xbf\xbd rows");
  v1::StatusDetails details;
  EXPECT_TRUE(details.ParseFromString(sent.error_details()));
}

}  // namespace
}  // namespace lossd::wire::status_details_test
