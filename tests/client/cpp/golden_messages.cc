// SPDX-License-Identifier: Apache-2.0
// Golden cases of what the client sends: plans and bytes; and of bytes that it reads.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <optional>

#include "client/cpp/loss_call.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/tensor_transfer.h"
#include "proto/wire/payload_codec.h"
#include "tests/client/cpp/golden.h"

namespace lossd::client::golden {
namespace {

using internal::Rows;
using internal::SliceRule;
using internal::StreamWork;

json CallOfPlan(const json& c) {
  json call{{"head", "lm"},
            {"step", nullptr},
            {"id", 0},
            {"accumulate", false},
            {"hidden_size", c["hidden_size"]},
            {"dtype", c["dtype"]},
            {"grad_hidden", false}};
  if (c.contains("backward_rows")) {
    call["grad_loss"] = std::vector<float>(c["backward_rows"], 1.0f);
    call["grad_lse"] = call["grad_entropy"] = nullptr;
    return call;
  }
  const bool retain = c.value("retain", false);
  std::vector<int32_t> targets;
  for (const json& run : c.at("targets")) targets.insert(targets.end(), run[0], run[1]);
  call["targets"] = targets;
  call["options"] = {{"ignore_index", c.value("ignore_index", -100)}};
  call["reduction"] = retain ? "none" : "sum";
  call["retain"] = retain;
  call["grad_output"] = 1.0;
  call["row_results"] = json::array();
  call["row_weights"] = call["normalizer"] = nullptr;
  return call;
}

json ToJson(const std::vector<Rows>& slices, uint64_t row_bytes) {
  json written = json::array();
  for (const Rows& rows : slices) written.push_back({rows.begin, rows.end, rows.size() * row_bytes});
  return written;
}

json ToJson(const StreamWork& stream) {
  return {{"rows", {stream.rows.begin, stream.rows.end}},
          {"slices", stream.server_cuts ? json(nullptr) : ToJson(stream.slices, stream.row_bytes)}};
}

void RunOpening(const json& c) {
  CheckMembers(c, {"message", "call", "rows", "incarnation", "hex"}, {"generation"});
  const Call call(c["call"]);
  std::optional<internal::GradientsId> meant;
  if (!c["incarnation"].is_null()) meant = {c["incarnation"], c.value("generation", uint64_t{0})};
  const StreamWork stream = call.work().Prepare({c["rows"][0], c["rows"][1]}, SliceRule{1000}, meant).value();
  EXPECT_EQ(json(ToHex(ToString(wire::Encode(stream.first)))), c["hex"]);
}

void RunSlice(const json& c) {
  CheckMembers(c, {"message", "rows", "row_bytes", "hex", "payload"});
  const Rows rows{c["rows"][0], c["rows"][1]};
  const std::string hidden = Payload(0, rows.end * c["row_bytes"].get<uint64_t>());
  StreamWork stream;
  stream.hidden = hidden.data();
  stream.row_bytes = c["row_bytes"];
  EXPECT_EQ(ToString(internal::EncodeSlice(stream, rows, [] {}).value()),
            FromHex(c["hex"]) + Payload(c["payload"][0], c["payload"][1]));
}

template <typename Request, typename Open>
void RunTensor(const json& c) {
  CheckMembers(c, {"message", "open", "row_bytes", "payload_bytes", "messages"});
  Open open;
  Parse(c["open"], &open);
  const uint64_t row_bytes = c["row_bytes"];
  const std::string payload = Payload(0, c["payload_bytes"]);
  uint64_t sent = 0;
  size_t count = 0;
  do {
    ASSERT_LT(count, c["messages"].size());
    const json& expected = c["messages"][count++];
    EXPECT_TRUE(ToString(internal::EncodeRows<Request>(open, payload, row_bytes, sent, [] {})) ==
                FromHex(expected["hex"]) + Payload(expected["payload"][0], expected["payload"][1]))
        << "message " << count;
    sent += internal::TensorMessageBytes(row_bytes);
  } while (sent < payload.size());
  EXPECT_EQ(count, c["messages"].size());
}

std::unique_ptr<google::protobuf::Message> MessageNamed(const std::string& name) {
  const auto* type =
      google::protobuf::DescriptorPool::generated_pool()->FindMessageTypeByName("lossd.v1." + name);
  if (type == nullptr) throw std::invalid_argument("there is no message " + name);
  return std::unique_ptr<google::protobuf::Message>(
      google::protobuf::MessageFactory::generated_factory()->GetPrototype(type)->New());
}

}  // namespace

void RunPlan(const json& c) {
  CheckMembers(c, {"hidden_size", "dtype", "limits", "slice_bytes", "streams", "max_message_bytes"},
               {"targets", "backward_rows", "ignore_index", "retain", "streams_planned", "fails"});
  const Call call(CallOfPlan(c));
  v1::SliceLimits limits;
  Parse(c["limits"], &limits);
  ASSERT_TRUE(call.work().Validate().ok() || call.rows() == 0) << call.work().Validate();
  const auto rule =
      internal::MakeSliceRule(call.work().row_bytes(), c["slice_bytes"].get<uint64_t>(), limits);
  CheckStatus(c, rule.status());
  if (!rule.ok()) return;
  json planned = json::array();
  for (const Rows& rows : call.work().Split(c["streams"], c["max_message_bytes"])) {
    planned.push_back(ToJson(call.work().Prepare(rows, *rule, std::nullopt).value()));
  }
  EXPECT_EQ(planned, c["streams_planned"]);
}

void RunRegionPlan(const json& c) {
  CheckMembers(c, {"targets", "rows", "hidden_size", "dtype", "limits", "slice_bytes", "region", "slices",
                   "in_messages"});
  CheckMembers(c["region"], {"bytes", "of_gpu"});
  const Call call(CallOfPlan(c));
  const uint64_t row_bytes = call.work().row_bytes();
  v1::SliceLimits limits;
  Parse(c["limits"], &limits);
  std::optional<uint64_t> slice_bytes;
  if (!c["slice_bytes"].is_null()) slice_bytes = c["slice_bytes"].get<uint64_t>();
  const SliceRule rule = internal::MakeSliceRule(row_bytes, slice_bytes, limits).value();
  const Rows rows{c["rows"][0], c["rows"][1]};
  const uint64_t wanted = internal::WantedRows(c["region"]["bytes"], c["region"]["of_gpu"], row_bytes);
  const SliceRule in_region = internal::InRegion(rule, rows.size(), wanted);
  const std::vector<Rows> slices = call.work().Prepare(rows, in_region, std::nullopt).value().slices;
  EXPECT_EQ(ToJson(slices, row_bytes), c["slices"]);
  std::vector<Rows> parts;
  for (const Rows& slice : slices) {
    const std::vector<Rows> cut = internal::CutForMessages(slice, rule);
    parts.insert(parts.end(), cut.begin(), cut.end());
  }
  EXPECT_EQ(ToJson(parts, row_bytes), c["in_messages"]);
}

void RunRegionSizes(const json& c) {
  CheckMembers(c, {"call_bytes", "least", "most", "region"});
  EXPECT_EQ(internal::WantedRegion(c["call_bytes"], {.least = c["least"], .most = c["most"]}),
            c["region"].get<uint64_t>());
}

void RunWire(const json& c) {
  const std::string message = c.at("message");
  if (message == "open" || message == "backward") return RunOpening(c);
  if (message == "slice") return RunSlice(c);
  if (message == "write_tensor") return RunTensor<v1::WriteTensorRequest, v1::OpenTensor>(c);
  if (message == "add_gradient") return RunTensor<v1::AddGradientRequest, v1::OpenGradient>(c);
  FAIL() << "unknown message " << message;
}

void RunDecode(const json& c) {
  CheckMembers(c, {"type", "hex"}, {"fields", "payload", "fails"});
  const auto message = MessageNamed(c["type"]);
  const auto payload = wire::Decode(ToBuffer(FromHex(c["hex"])), message.get());
  if (c.contains("fails")) {  // the callers of Decode put "server sent an unreadable message" in front
    EXPECT_EQ(payload.status().code(), absl::StatusCode::kInvalidArgument) << payload.status();
    return;
  }
  ASSERT_TRUE(payload.ok()) << payload.status();
  message->DiscardUnknownFields();
  const auto expected = MessageNamed(c["type"]);
  Parse(c["fields"], expected.get());
  EXPECT_TRUE(google::protobuf::util::MessageDifferencer::Equals(*message, *expected))
      << message->ShortDebugString();
  std::string bytes(payload->size(), '\0');
  payload->CopyTo(reinterpret_cast<uint8_t*>(bytes.data()));
  EXPECT_EQ(json(ToHex(bytes)), c["payload"]);
}

}  // namespace lossd::client::golden
