// SPDX-License-Identifier: Apache-2.0
// Tests of proto/wire: the codec of payloads, the packets of the region socket, statuses, shared memory, and
// calls within a process.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <google/protobuf/message.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "proto/wire/direct_call.h"
#include "proto/wire/payload_codec.h"
#include "proto/wire/region_packets.h"
#include "proto/wire/shared_memory.h"
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

// ---- Shared memory ----

namespace lossd::wire::shared_memory_test {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;

TEST(SharedMemoryTest, NobodyCanChangeItsSize) {
  const auto memory = SharedMemory::Create(3 * kMebibyte + 1);
  ASSERT_TRUE(memory.ok()) << memory.status();
  const size_t size = (*memory)->bytes().size();
  EXPECT_GE(size, static_cast<size_t>(3 * kMebibyte + 1));
  EXPECT_EQ(size % static_cast<size_t>(sysconf(_SC_PAGESIZE)), 0u);
  const int descriptor = (*memory)->descriptor();
  EXPECT_NE(ftruncate(descriptor, 0), 0);
  EXPECT_NE(ftruncate(descriptor, static_cast<off_t>(2 * size)), 0);
  EXPECT_NE(fcntl(descriptor, F_ADD_SEALS, F_SEAL_WRITE), 0);
  // Holes read as zeros.
  (*memory)->bytes().front() = 7;
  EXPECT_EQ(fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, 4096), 0);
  EXPECT_EQ((*memory)->bytes().front(), 0);
}

// Whoever keeps a mapping keeps no memory of the server's.
TEST(SharedMemoryTest, TakesItsPagesWithIt) {
  auto memory = SharedMemory::Create(kMebibyte);
  ASSERT_TRUE(memory.ok());
  const int copy = dup((*memory)->descriptor());
  auto* const mapped = static_cast<uint8_t*>(mmap(nullptr, kMebibyte, PROT_READ, MAP_SHARED, copy, 0));
  (*memory)->bytes()[100] = 42;
  EXPECT_EQ(mapped[100], 42);
  memory->reset();
  struct stat status = {};
  ASSERT_EQ(fstat(copy, &status), 0);
  EXPECT_EQ(status.st_blocks, 0);
  EXPECT_EQ(mapped[100], 0);
  munmap(mapped, kMebibyte);
  close(copy);
}

int64_t PagesOf(int descriptor) {
  struct stat status = {};
  EXPECT_EQ(fstat(descriptor, &status), 0);
  return status.st_blocks;
}

TEST(SharedMemoryTest, TakesNoPagesUntilItIsFilled) {
  const auto memory = SharedMemory::Reserve(kMebibyte);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(PagesOf((*memory)->descriptor()), 0);
  EXPECT_NE(ftruncate((*memory)->descriptor(), 0), 0);
  ASSERT_TRUE((*memory)->Fill().ok());
  EXPECT_EQ(PagesOf((*memory)->descriptor()) * 512, kMebibyte);
  EXPECT_EQ((*memory)->bytes().back(), 0);
}

TEST(SharedMemoryTest, MoreThanThereIsIsRefused) {
  const auto memory = SharedMemory::Create(int64_t{1} << 61);
  EXPECT_EQ(memory.status().code(), absl::StatusCode::kResourceExhausted) << memory.status();
}

}  // namespace
}  // namespace lossd::wire::shared_memory_test

// ---- Direct calls ----
// Calls within a process keep the order, the flow control and the ends that reactors know from gRPC, whatever
// either side does and when.

namespace lossd::wire::direct_call_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr absl::Duration kPatience = absl::Minutes(1);

grpc::ByteBuffer MessageOf(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

std::string TextOf(const grpc::ByteBuffer& message) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(message.Dump(&slices).ok());
  std::string text;
  for (const grpc::Slice& slice : slices) {
    text.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return text;
}

// Checks that a side gets a reaction for each operation it has started, and OnDone when nothing else runs.
class OfOneSide {
 public:
  class Reaction {
   public:
    Reaction(OfOneSide* side, std::atomic<int>* under_way) : side_(side) {
      EXPECT_EQ(under_way->fetch_sub(1), 1);
      EXPECT_FALSE(side_->done_) << "a reaction after OnDone";
      ++side_->running_;
    }
    ~Reaction() { --side_->running_; }

   private:
    OfOneSide* const side_;
  };
  void StartsRead() { ++reads_; }
  void StartsWrite() { ++writes_; }
  Reaction Read() { return Reaction(this, &reads_); }
  Reaction Write() { return Reaction(this, &writes_); }
  void Done() {
    EXPECT_EQ(running_, 0) << "OnDone beside another reaction";
    EXPECT_EQ(reads_ + writes_, 0) << "OnDone before the reaction of an operation";
    EXPECT_FALSE(done_.exchange(true)) << "OnDone twice";
  }

 private:
  std::atomic<int> reads_{0};
  std::atomic<int> writes_{0};
  std::atomic<int> running_{0};
  std::atomic<bool> done_{false};
};

// What the server of a test does with a call.
struct Behaviour {
  int answers_before_end = 1 << 20;  // then it finishes with `end`
  grpc::Status end = grpc::Status::OK;
  bool reads = true;
  bool last_with_end = false;  // WriteAndFinish
};

// Answers each message with "re:" and the message, in order, and finishes when the client has no more.
class Echo final : public DirectServer::ServerReactor {
 public:
  Echo(CallContext* context, Behaviour behaviour, std::atomic<int>* open)
      : context_(context), behaviour_(std::move(behaviour)), open_(open) {
    ++*open_;
    absl::MutexLock lock(&mutex_);
    if (behaviour_.answers_before_end == 0) {
      End();
    } else if (behaviour_.reads) {
      Receive();
    }
  }

 private:
  void OnReadDone(bool ok) override {
    const auto reaction = side_.Read();
    absl::MutexLock lock(&mutex_);
    if (!ok) {
      no_more_ = true;
      if (!writing_) End();
      return;
    }
    queue_.push_back(absl::StrCat("re:", TextOf(received_)));
    if (!writing_) Write();
    if (!ended_) Receive();
  }
  void OnWriteDone(bool ok) override {
    const auto reaction = side_.Write();
    absl::MutexLock lock(&mutex_);
    writing_ = false;
    if (!ok || (queue_.empty() && no_more_) || ++answered_ >= behaviour_.answers_before_end) return End();
    if (!queue_.empty()) Write();
  }
  void OnCancel() override {
    EXPECT_TRUE(context_->IsCancelled());
    absl::MutexLock lock(&mutex_);
    if (!writing_) End();
  }
  void OnDone() override {
    side_.Done();
    --*open_;
    delete this;
  }

  void Receive() {
    side_.StartsRead();
    StartRead(&received_);
  }
  void Write() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (ended_) return;
    answer_ = MessageOf(queue_.front());
    queue_.pop_front();
    writing_ = true;
    if (behaviour_.last_with_end && answered_ + 1 == behaviour_.answers_before_end) {
      ended_ = true;
      StartWriteAndFinish(&answer_, {}, behaviour_.end);
    } else {
      side_.StartsWrite();
      StartWrite(&answer_);
    }
  }
  void End() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!std::exchange(ended_, true)) Finish(behaviour_.end);
  }

  CallContext* const context_;
  const Behaviour behaviour_;
  std::atomic<int>* const open_;
  OfOneSide side_;
  grpc::ByteBuffer received_;
  absl::Mutex mutex_;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer answer_ ABSL_GUARDED_BY(mutex_);
  int answered_ ABSL_GUARDED_BY(mutex_) = 0;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool no_more_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
};

// Sends its messages and reads until the end.
class Sender final : public DirectServer::ClientReactor {
 public:
  explicit Sender(std::vector<std::string> messages, bool half_closes = true)
      : messages_(std::move(messages)), half_closes_(half_closes) {}

  // False: the server takes no calls.
  bool Start(DirectServer* server, const DirectCallOptions& options = {}) {
    call_ = server->Open(this, options);
    if (call_ == nullptr) return false;
    {
      absl::MutexLock lock(&mutex_);
      WriteNext();
      ReadNext();
    }
    StartCall();
    return true;
  }
  void Cancel() { call_->Cancel(); }
  DirectCall* call() { return call_.get(); }
  grpc::Status Await() {
    EXPECT_TRUE(over_.AwaitFor(kPatience));
    return status_;
  }
  std::vector<std::string> answers() {
    absl::MutexLock lock(&mutex_);
    return answers_;
  }
  int sent() {
    absl::MutexLock lock(&mutex_);
    return sent_;
  }

 private:
  void OnWriteDone(bool ok) override {
    const auto reaction = side_.Write();
    absl::MutexLock lock(&mutex_);
    if (!ok) return;
    ++sent_;
    WriteNext();
  }
  void OnReadDone(bool ok) override {
    const auto reaction = side_.Read();
    if (!ok) return;
    absl::MutexLock lock(&mutex_);
    answers_.push_back(TextOf(answer_));
    ReadNext();
  }
  void OnDone(const grpc::Status& status) override {
    side_.Done();
    status_ = status;
    over_.Notify();
  }
  void ReadNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    side_.StartsRead();
    StartRead(&answer_);
  }
  void WriteNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (next_ == messages_.size()) return;
    message_ = MessageOf(messages_[next_++]);
    side_.StartsWrite();
    if (next_ == messages_.size() && half_closes_) return StartWriteLast(&message_, {});
    StartWrite(&message_);
  }

  const std::vector<std::string> messages_;
  const bool half_closes_;
  std::shared_ptr<DirectCall> call_;
  OfOneSide side_;
  clocks::Event over_;
  grpc::Status status_;
  absl::Mutex mutex_;
  size_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  int sent_ ABSL_GUARDED_BY(mutex_) = 0;
  grpc::ByteBuffer message_ ABSL_GUARDED_BY(mutex_);
  grpc::ByteBuffer answer_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> answers_ ABSL_GUARDED_BY(mutex_);
};

class DirectCallTest : public ::testing::Test {
 protected:
  explicit DirectCallTest(size_t max_message_bytes = 1 << 20)
      : server_(DirectServer::Create(max_message_bytes, [this](CallContext* context, uint64_t) {
          return new Echo(context, behaviour_, &open_);
        })) {}
  ~DirectCallTest() override {
    server_->Shutdown();
    EXPECT_EQ(open_, 0);
  }

  std::atomic<int> open_{0};  // server's reactors that have not had OnDone
  Behaviour behaviour_;
  std::shared_ptr<DirectServer> server_;
};

std::vector<std::string> Numbers(int count, size_t bytes = 0) {
  std::vector<std::string> numbers;
  for (int i = 0; i < count; ++i) numbers.push_back(absl::StrCat(i, std::string(bytes, 'x')));
  return numbers;
}

std::vector<std::string> AnswersTo(std::vector<std::string> messages) {
  for (std::string& message : messages) message.insert(0, "re:");
  return messages;
}

TEST_F(DirectCallTest, AnswersEachMessageInOrder) {
  for (const size_t bytes : {0, 1, 100, 300'000}) {
    Sender sender(Numbers(20, bytes));
    ASSERT_TRUE(sender.Start(server_.get()));
    EXPECT_TRUE(sender.Await().ok());
    EXPECT_EQ(sender.answers(), AnswersTo(Numbers(20, bytes)));
  }
}

TEST_F(DirectCallTest, EndsWithTheServersStatus) {
  for (const bool with_end : {false, true}) {
    behaviour_ = {.answers_before_end = 3,
                  .end = grpc::Status(grpc::StatusCode::ABORTED, "enough", "detail"),
                  .last_with_end = with_end};
    Sender sender(Numbers(10));
    ASSERT_TRUE(sender.Start(server_.get()));
    const grpc::Status status = sender.Await();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::ABORTED);
    EXPECT_EQ(status.error_message(), "enough");
    EXPECT_EQ(status.error_details(), "detail");
    EXPECT_EQ(sender.answers(), AnswersTo(Numbers(3)));
  }
}

TEST_F(DirectCallTest, ARefusalComesWithoutAMessage) {
  behaviour_ = {.answers_before_end = 0, .end = grpc::Status(grpc::StatusCode::UNAVAILABLE, "draining")};
  Sender sender(Numbers(2));
  ASSERT_TRUE(sender.Start(server_.get()));
  EXPECT_EQ(sender.Await().error_message(), "draining");
  EXPECT_THAT(sender.answers(), IsEmpty());
}

TEST_F(DirectCallTest, AWriteIsDoneWhenTheServerHasReadIt) {
  behaviour_.reads = false;
  Sender sender(Numbers(3));
  ASSERT_TRUE(sender.Start(server_.get()));
  absl::SleepFor(absl::Milliseconds(20));
  EXPECT_EQ(sender.sent(), 0);
  sender.Cancel();
  EXPECT_EQ(sender.Await().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(DirectCallTest, EndsAtItsDeadlineWhateverTheOrderOfCalls) {
  std::vector<std::unique_ptr<Sender>> senders;
  const absl::Time now = clocks::SteadyNow();
  for (const int milliseconds : {400, 50, 200}) {
    senders.push_back(std::make_unique<Sender>(Numbers(1), /*half_closes=*/false));
    ASSERT_TRUE(senders.back()->Start(server_.get(), {.deadline = now + absl::Milliseconds(milliseconds)}));
  }
  Sender without(Numbers(1), /*half_closes=*/false);
  ASSERT_TRUE(without.Start(server_.get()));
  for (const int first : {1, 2, 0}) {
    EXPECT_EQ(senders[first]->Await().error_code(), grpc::StatusCode::DEADLINE_EXCEEDED);
    EXPECT_TRUE(senders[first]->call()->DeadlineHasPassed());
  }
  EXPECT_GE(clocks::SteadyNow(), now + absl::Milliseconds(400));
  EXPECT_FALSE(without.call()->IsCancelled());
  without.Cancel();
  without.Await();
}

TEST_F(DirectCallTest, ALargerMessageThanEitherSideTakesEndsTheCall) {
  Sender sends(Numbers(2, 1 << 20));
  ASSERT_TRUE(sends.Start(server_.get()));
  grpc::Status status = sends.Await();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("1048577 bytes; the server takes at most 1048576"));
  Sender takes({"12345"});
  ASSERT_TRUE(takes.Start(server_.get(), {.max_message_bytes = 7}));  // "re:" makes it 8
  status = takes.Await();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_THAT(status.error_message(), HasSubstr("8 bytes; the client takes at most 7"));
}

// The memory of a message is the client's again when its write is done, even if the server keeps the message.
TEST_F(DirectCallTest, TheServerDoesNotReferToTheClientsMemory) {
  class Keeper final : public DirectServer::ServerReactor {
   public:
    explicit Keeper(grpc::ByteBuffer* kept, clocks::Event* has_read) : kept_(kept), has_read_(has_read) {
      StartRead(kept_);
    }
    void OnReadDone(bool) override {
      has_read_->Notify();
      Finish(grpc::Status::OK);
    }
    void OnDone() override { delete this; }

   private:
    grpc::ByteBuffer* const kept_;
    clocks::Event* const has_read_;
  };
  class Writer final : public DirectServer::ClientReactor {
   public:
    void OnDone(const grpc::Status&) override { over.Notify(); }
    clocks::Event over;
  };
  grpc::ByteBuffer kept;
  clocks::Event has_read;
  const auto server =
      DirectServer::Create(1 << 20, [&](CallContext*, uint64_t) { return new Keeper(&kept, &has_read); });
  std::string memory(1000, 'a');
  std::atomic<bool> released{false};
  Writer writer;
  {
    const grpc::Slice slice(
        memory.data(), memory.size(), [](void* flag) { *static_cast<std::atomic<bool>*>(flag) = true; },
        &released);
    grpc::ByteBuffer message(&slice, 1);
    const auto call = server->Open(&writer, {});
    writer.StartWriteLast(&message, {});
    writer.StartCall();
    EXPECT_TRUE(writer.over.AwaitFor(kPatience));
    EXPECT_TRUE(has_read.happened());
  }
  EXPECT_TRUE(released);
  memory.assign(1000, 'b');
  EXPECT_EQ(TextOf(kept), std::string(1000, 'a'));
  server->Shutdown();
}

TEST_F(DirectCallTest, ACallWithAHoldIsNotDone) {
  class Holder final : public DirectServer::ClientReactor {
   public:
    void OnReadDone(bool ok) override {
      if (!ok) read_failed.Notify();
    }
    void OnDone(const grpc::Status&) override { over.Notify(); }
    clocks::Event read_failed, over;
    grpc::ByteBuffer answer;
  };
  behaviour_ = {.answers_before_end = 0};
  Holder holder;
  const auto call = server_->Open(&holder, {});
  holder.AddHold();
  holder.StartRead(&holder.answer);
  holder.StartCall();
  EXPECT_TRUE(holder.read_failed.AwaitFor(kPatience));
  EXPECT_FALSE(holder.over.AwaitFor(absl::Milliseconds(20)));
  holder.RemoveHold();
  EXPECT_TRUE(holder.over.AwaitFor(kPatience));
}

// The thread that begins a call runs reactions of the server, and those of a client that take little time.
TEST_F(DirectCallTest, AClientThatSendsMuchDoesSoOnAnotherThread) {
  class Writer final : public DirectServer::ClientReactor {
   public:
    void OnWriteDone(bool) override { wrote_on = std::this_thread::get_id(); }
    void OnDone(const grpc::Status&) override { over.Notify(); }
    std::thread::id wrote_on;
    clocks::Event over;
  };
  behaviour_.answers_before_end = 1;
  for (const ClientWork work : {ClientWork::kLittle, ClientWork::kWaitForDevice, ClientWork::kCopyMuch}) {
    Writer writer;
    const grpc::ByteBuffer message = MessageOf("a");
    grpc::ByteBuffer answer;
    const auto call = server_->Open(&writer, {.sending = work});
    writer.StartWriteLast(&message, {});
    writer.StartRead(&answer);
    writer.StartCall();
    ASSERT_TRUE(writer.over.AwaitFor(kPatience));
    EXPECT_EQ(writer.wrote_on == std::this_thread::get_id(), work == ClientWork::kLittle);
  }
}

// A thread of the server that answers by RunHere runs the reactions of a client that does not copy much.
TEST_F(DirectCallTest, RunHereRunsReactionsOnItsThread) {
  struct Answering final : DirectServer::ServerReactor {
    void OnDone() override { over.Notify(); }
    const grpc::ByteBuffer answer = MessageOf("a");
    clocks::Event over;
  };
  struct Reader final : DirectServer::ClientReactor {
    void OnReadDone(bool) override { read_on = std::this_thread::get_id(); }
    void OnDone(const grpc::Status&) override { over.Notify(); }
    grpc::ByteBuffer answer;
    std::thread::id read_on;
    clocks::Event over;
  };
  for (const ClientWork work : {ClientWork::kLittle, ClientWork::kWaitForDevice, ClientWork::kCopyMuch}) {
    Answering answering;
    Reader reader;
    CallContext* context = nullptr;
    const auto server = DirectServer::Create(1 << 20, [&](CallContext* of_call, uint64_t) {
      context = of_call;
      return &answering;
    });
    const auto call = server->Open(&reader, {.receiving = work});
    reader.StartRead(&reader.answer);
    reader.StartCall();
    ASSERT_NE(context, nullptr);
    context->RunHere([&] { answering.StartWriteAndFinish(&answering.answer, {}, grpc::Status::OK); });
    EXPECT_TRUE(work == ClientWork::kCopyMuch || reader.over.happened());
    ASSERT_TRUE(reader.over.AwaitFor(kPatience));
    ASSERT_TRUE(answering.over.AwaitFor(kPatience));
    EXPECT_EQ(reader.read_on == std::this_thread::get_id(), work != ClientWork::kCopyMuch);
    EXPECT_EQ(TextOf(reader.answer), "a");
    server->Shutdown();
  }
}

TEST_F(DirectCallTest, ShutdownEndsOpenCallsAndTakesNoMore) {
  std::vector<std::unique_ptr<Sender>> senders;
  for (int i = 0; i < 20; ++i) {
    senders.push_back(std::make_unique<Sender>(Numbers(3), /*half_closes=*/false));
    ASSERT_TRUE(senders.back()->Start(server_.get()));
  }
  server_->Shutdown();
  EXPECT_EQ(open_, 0);
  for (const auto& sender : senders) {
    EXPECT_EQ(sender->Await().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
  Sender late(Numbers(1));
  EXPECT_FALSE(late.Start(server_.get()));
  server_->Shutdown();  // does nothing
}

TEST_F(DirectCallTest, IsFoundByItsNamesUntilShutdown) {
  server_->Publish("unix:/a");
  server_->Publish("127.0.0.1:1");
  EXPECT_EQ(DirectServer::Find("unix:/a"), server_);
  EXPECT_EQ(DirectServer::Find("127.0.0.1:1"), server_);
  EXPECT_EQ(DirectServer::Find("unix:/b"), nullptr);
  const auto other = DirectServer::Create(1, [](CallContext*, uint64_t) { return nullptr; });
  other->Publish("unix:/a");
  EXPECT_EQ(DirectServer::Find("unix:/a"), other);
  server_->Shutdown();
  EXPECT_EQ(DirectServer::Find("127.0.0.1:1"), nullptr);
  EXPECT_EQ(DirectServer::Find("unix:/a"), other);
  other->Shutdown();
  EXPECT_EQ(DirectServer::Find("unix:/a"), nullptr);
  EXPECT_NE(DirectServer::NextClient(), DirectServer::NextClient());
}

// Many calls at once, each of which ends in its own way: by itself, cancelled by its client at any time, at a
// deadline, by the server's Finish, or at Shutdown. Answers are a beginning of what a whole call would have.
TEST_F(DirectCallTest, AnyEndAtAnyTime) {
  std::random_device seed_source;
  const unsigned seed = seed_source();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 draw(seed);
  const auto upto = [&draw](int most) { return std::uniform_int_distribution<int>(0, most)(draw); };
  constexpr int kCalls = 600;
  std::vector<std::unique_ptr<Sender>> senders;
  std::vector<std::vector<std::string>> sent;
  std::vector<std::thread> cancellers;
  for (int i = 0; i < kCalls; ++i) {
    sent.push_back(Numbers(1 + upto(8), upto(9) == 0 ? 100'000 : 10));
    senders.push_back(std::make_unique<Sender>(sent.back(), upto(3) > 0));
    DirectCallOptions options;
    if (upto(3) == 0) options.deadline = clocks::SteadyNow() + absl::Microseconds(upto(3000));
    ASSERT_TRUE(senders.back()->Start(server_.get(), options));
    if (upto(2) != 0) continue;
    cancellers.emplace_back([sender = senders.back().get(), wait = absl::Microseconds(upto(500))] {
      absl::SleepFor(wait);
      sender->Cancel();
    });
  }
  for (std::thread& canceller : cancellers) canceller.join();
  server_->Shutdown();
  for (int i = 0; i < kCalls; ++i) {
    const grpc::Status status = senders[i]->Await();
    const std::vector<std::string> whole = AnswersTo(sent[i]);
    const std::vector<std::string> got = senders[i]->answers();
    ASSERT_LE(got.size(), whole.size());
    EXPECT_TRUE(std::equal(got.begin(), got.end(), whole.begin())) << i;
    if (status.ok()) {
      EXPECT_EQ(got, whole) << i;
    }
  }
}

}  // namespace
}  // namespace lossd::wire::direct_call_test
