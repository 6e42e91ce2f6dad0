// SPDX-License-Identifier: Apache-2.0
// Golden cases of what answers mean: those of loss computations, of tensor transfers, and the statuses of
// calls.
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <functional>

#include "absl/strings/str_replace.h"
#include "client/cpp/connections.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/tensor_transfer.h"
#include "tests/client/cpp/golden.h"
#include "tests/client/scripted_server.h"

namespace lossd::client::golden {
namespace {

using google::protobuf::util::MessageDifferencer;

// The bytes of an answer: given in hex, or fields and a payload as protobuf encodes them.
template <typename Message>
grpc::ByteBuffer Answer(const json& answer) {
  if (answer.contains("hex")) {
    CheckMembers(answer, {"hex"});
    return ToBuffer(FromHex(answer["hex"]));
  }
  CheckMembers(answer, {"fields"}, {"payload"});
  Message message;
  Parse(answer["fields"], &message);
  std::string bytes = message.SerializeAsString();
  const std::string payload = FromHex(answer.value("payload", ""));
  if (payload.empty()) return ToBuffer(bytes);
  return wire::Encode(message, grpc::Slice(payload));
}

// Handles the answers, then the end; the error must come at the one that the case names. True if there was
// none.
template <typename Message>
bool Feed(const json& c, const std::function<absl::Status(const grpc::ByteBuffer&)>& handle,
          const std::function<absl::Status()>& end) {
  size_t index = 0;
  for (; index <= c["answers"].size(); ++index) {
    const bool last = index == c["answers"].size();
    const absl::Status status = last ? end() : handle(Answer<Message>(c["answers"][index]));
    if (c.contains("fails") && c["fails"]["at"] == index) {
      CheckStatus(c, status);
      return false;
    }
    EXPECT_TRUE(status.ok()) << "answer " << index << ": " << status;
  }
  EXPECT_FALSE(c.contains("fails"));
  return true;
}

void RunReadTensor(const json& c) {
  CheckMembers(c, {"call", "rows", "cols", "dtype", "answers"}, {"role", "gives", "fails"});
  v1::ReadTensorRequest request;
  request.set_head("lm");
  request.set_role(RoleNamed(c.value("role", "value")));
  request.mutable_rows()->set_begin(c["rows"][0]);
  request.mutable_rows()->set_end(c["rows"][1]);
  request.set_dtype(DTypeNamed(c["dtype"]));
  const uint64_t rows = request.rows().end() - request.rows().begin();
  std::string out(rows * c["cols"].get<uint64_t>() * internal::WireElementSize(request.dtype()), '\xff');
  internal::TensorReader reader(request, absl::MakeSpan(out.data(), out.size()));
  const bool read = Feed<v1::TensorSlice>(
      c, [&](const grpc::ByteBuffer& buffer) { return reader.Handle(buffer); },
      [&] { return reader.End().status(); });
  if (read) {
    EXPECT_EQ(json(ToHex(out)), c["gives"]);
  }
}

template <typename Response>
void RunOneAnswer(const json& c) {
  CheckMembers(c, {"call", "answers"}, {"gives", "fails"});
  std::vector<grpc::ByteBuffer> answers;
  for (const json& answer : c["answers"]) answers.push_back(Answer<Response>(answer));
  const auto answer = internal::OneAnswer<Response>(answers);
  CheckStatus(c, answer.status());
  if (!answer.ok()) return;
  Response expected;
  Parse(c["gives"], &expected);
  EXPECT_TRUE(MessageDifferencer::Equals(*answer, expected)) << answer->ShortDebugString();
}

}  // namespace

void RunStreamAnswers(const json& c) {
  CheckMembers(c, {"call", "slice_rows", "answers"}, {"gives", "fails"});
  const Call call(c["call"]);
  const internal::StreamWork work =
      call.work().Prepare({0, call.rows()}, internal::SliceRule{c["slice_rows"]}, std::nullopt).value();
  internal::StreamAnswers answers(work, [](const v1::HeadState&) { return absl::OkStatus(); });
  const bool complete = Feed<v1::ComputeLossResponse>(
      c, [&](const grpc::ByteBuffer& buffer) { return answers.Handle(buffer); },
      [&] { return answers.CheckEnd(); });
  if (!complete) return;
  ASSERT_TRUE(answers.summary().has_value());
  const json given{
      {"valid_rows", answers.summary()->valid_rows()},
      {"received_bytes", answers.received_bytes()},
      {"grad_hidden", call.grad_hidden().empty() ? json(nullptr) : json(ToHex(call.grad_hidden()))},
      {"row_results", call.RowResults()}};
  EXPECT_EQ(given, c["gives"]);
}

void RunTensorAnswers(const json& c) {
  const std::string call = c.at("call");
  if (call == "read_tensor") return RunReadTensor(c);
  if (call == "write_tensor") return RunOneAnswer<v1::WriteTensorResponse>(c);
  if (call == "add_gradient") return RunOneAnswer<v1::AddGradientResponse>(c);
  FAIL() << "unknown call " << call;
}

void RunStatuses(const json& c) {
  CheckMembers(c, {"code", "message", "target", "gives"}, {"details", "server_version"});
  const grpc::Status sent(static_cast<grpc::StatusCode>(fake::StatusCodeNamed(c["code"])), c["message"],
                          FromHex(c.value("details", "")));
  const auto filled_in = [](const std::string& text) {
    return absl::StrReplaceAll(text, {{"CLIENT", internal::ClientVersion()}});
  };
  const absl::Status status =
      internal::CallStatus(sent, {c["target"], filled_in(c.value("server_version", ""))});
  const json& gives = c["gives"];
  EXPECT_EQ(json(ErrorName(status)), gives["error"]);
  EXPECT_EQ(std::string(status.message()), filled_in(gives["message"]));
  const auto detail = ErrorDetailOf(status);
  ASSERT_EQ(detail.has_value(), !gives["detail"].is_null());
  if (!detail.has_value()) return;
  v1::ErrorDetail expected;
  Parse(gives["detail"], &expected);
  EXPECT_TRUE(MessageDifferencer::Equals(*detail, expected)) << detail->ShortDebugString();
}

}  // namespace lossd::client::golden
