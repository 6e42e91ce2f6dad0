// SPDX-License-Identifier: Apache-2.0
// Every golden case of tests/client/golden: one function for each kind of file, and what they share. A case
// that is not as it should be fails the current test.
#include <gmock/gmock.h>
#include <google/protobuf/message.h>
#include <google/protobuf/util/json_util.h>
#include <google/protobuf/util/message_differencer.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/client_options.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/probe.h"
#include "client/cpp/tensor_transfer.h"
#include "kernels/clocks/clock.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/payload_codec.h"
#include "proto/wire/status_details.h"
#include "tests/client/cpp/listener.h"
#include "tests/client/scripted_server.h"
#include "tests/support/temp_folder.h"

namespace lossd::client::golden_test {
namespace {

using google::protobuf::util::MessageDifferencer;
using internal::Rows;
using internal::SliceRule;
using internal::StreamWork;
using nlohmann::json;

// Throws std::invalid_argument for a case with a member that is not looked at, or without one that is.
void CheckMembers(const json& c, std::initializer_list<const char*> required,
                  std::initializer_list<const char*> optional = {});

// The status must be the error in member `fails` if the case has it, else OK.
void CheckStatus(const json& c, const absl::Status& status);
// The name of its code, RESTARTED or DISCARDED.
std::string ErrorName(const absl::Status& status);
absl::Status ErrorNamed(const std::string& code, const std::string& message);

v1::DType DTypeNamed(const std::string& name);
v1::Role RoleNamed(const std::string& name);
v1::Reduction ReductionNamed(const std::string& name);

std::string FromHex(const std::string& hex);
std::string ToHex(const std::string& bytes);
// Bytes [begin, end) of the payload of every case: the i-th is i modulo 251.
std::string Payload(uint64_t begin, uint64_t end);
grpc::ByteBuffer ToBuffer(const std::string& bytes);
std::string ToString(const grpc::ByteBuffer& buffer);
// `message` from protobuf's JSON.
void Parse(const json& fields, google::protobuf::Message* message);

// A call as "wire" and "stream answers" write it, with memory for its outputs that is not zero.
class Call {
 public:
  explicit Call(const json& call);

  const internal::LossWork& work() const { return *work_; }
  uint64_t rows() const { return rows_; }
  const std::string& grad_hidden() const { return grad_hidden_; }  // empty if not wanted
  json RowResults() const;

 private:
  void MakeForward(const json& call);
  void MakeBackward(const json& call);

  uint64_t rows_ = 0;
  std::string hidden_;
  std::string grad_hidden_;
  std::vector<std::string> names_;  // of the row results wanted
  std::vector<float> loss_, lse_, entropy_, logprob_;
  std::vector<int32_t> argmax_;
  std::vector<float> class_logprobs_, top_logprobs_;
  std::vector<int32_t> top_classes_;
  std::unique_ptr<const internal::LossWork> work_;
};

std::vector<float> Floats(const json& values) {
  return values.is_null() ? std::vector<float>() : values.get<std::vector<float>>();
}

template <typename Enum>
Enum EnumNamed(const std::string& prefix, const std::string& name) {
  const auto* value =
      google::protobuf::GetEnumDescriptor<Enum>()->FindValueByName(prefix + absl::AsciiStrToUpper(name));
  if (value == nullptr) throw std::invalid_argument("there is no " + prefix + name);
  return static_cast<Enum>(value->number());
}

v1::LossOptions Options(const json& options) {
  json fields = options;
  if (fields.contains("gradients")) {
    fields["gradients"] = EnumNamed<v1::Gradients>("GRADIENTS_", fields["gradients"]);
  }
  if (fields.contains("rest")) fields["rest"] = EnumNamed<v1::Rest>("REST_", fields["rest"]);
  v1::LossOptions message;
  Parse(fields, &message);
  return message;
}

void CheckMembers(const json& c, std::initializer_list<const char*> required,
                  std::initializer_list<const char*> optional) {
  std::set<std::string> known(optional.begin(), optional.end());
  known.insert("name");
  for (const char* name : required) {
    if (!c.contains(name)) throw std::invalid_argument(std::string("a case lacks its member ") + name);
    known.insert(name);
  }
  for (const auto& [name, value] : c.items()) {
    if (known.count(name) == 0) throw std::invalid_argument("a case has an unknown member " + name);
  }
}

std::string ErrorName(const absl::Status& status) {
  if (RestartOf(status).has_value()) return "RESTARTED";
  return IsStepDiscarded(status) ? "DISCARDED" : absl::StatusCodeToString(status.code());
}

absl::Status ErrorNamed(const std::string& code, const std::string& message) {
  if (code == "RESTARTED") return internal::RestartedError(1, 2);
  if (code == "DISCARDED") return internal::DiscardedError("lm", 0, 1, 2);
  return absl::Status(static_cast<absl::StatusCode>(fake::StatusCodeNamed(code)), message);
}

void CheckStatus(const json& c, const absl::Status& status) {
  if (!c.contains("fails")) {
    EXPECT_TRUE(status.ok()) << status;
    return;
  }
  const json& fails = c["fails"];
  CheckMembers(fails, {"error", "says"}, {"at", "before", "now"});
  EXPECT_EQ(json(ErrorName(status)), fails["error"]) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(fails["says"].get<std::string>()));
  if (!fails.contains("now")) return;
  const auto restart = RestartOf(status);
  ASSERT_TRUE(restart.has_value());
  EXPECT_EQ(restart->before, fails["before"]);
  EXPECT_EQ(restart->now, fails["now"]);
}

v1::DType DTypeNamed(const std::string& name) { return EnumNamed<v1::DType>("DTYPE_", name); }
v1::Role RoleNamed(const std::string& name) { return EnumNamed<v1::Role>("ROLE_", name); }
v1::Reduction ReductionNamed(const std::string& name) { return EnumNamed<v1::Reduction>("REDUCTION_", name); }

std::string FromHex(const std::string& hex) { return absl::HexStringToBytes(hex); }
std::string ToHex(const std::string& bytes) { return absl::BytesToHexString(bytes); }

std::string Payload(uint64_t begin, uint64_t end) {
  std::string bytes(end - begin, '\0');
  for (uint64_t i = begin; i < end; ++i) bytes[i - begin] = static_cast<char>(i % 251);
  return bytes;
}

grpc::ByteBuffer ToBuffer(const std::string& bytes) {
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  EXPECT_TRUE(buffer.Dump(&slices).ok());
  std::string bytes;
  for (const grpc::Slice& slice : slices) bytes.append(slice.begin(), slice.end());
  return bytes;
}

void Parse(const json& fields, google::protobuf::Message* message) {
  const auto status = google::protobuf::util::JsonStringToMessage(fields.dump(), message);
  if (!status.ok()) throw std::invalid_argument(status.ToString());
}

Call::Call(const json& call) {
  const bool backward = call.contains("grad_loss");
  if (backward) {
    CheckMembers(call, {"head", "step", "id", "accumulate", "hidden_size", "dtype", "grad_loss", "grad_lse",
                        "grad_entropy", "grad_hidden"});
  } else {
    CheckMembers(
        call,
        {"head", "step", "id", "accumulate", "hidden_size", "dtype", "targets", "row_weights", "options",
         "reduction", "normalizer", "grad_output", "retain", "grad_hidden", "row_results"},
        {"classes", "top_k", "target_classes", "target_weights", "depths", "embedding"});
  }
  rows_ = call[backward ? "grad_loss" : "targets"].size();
  const uint64_t bytes = rows_ * call["hidden_size"].get<uint64_t>() * ElementSize(DTypeNamed(call["dtype"]));
  hidden_ = std::string(bytes, '\0');
  if (call["grad_hidden"]) grad_hidden_ = std::string(bytes, '\xff');
  backward ? MakeBackward(call) : MakeForward(call);
}

void Call::MakeForward(const json& call) {
  const std::vector<int32_t> targets = call["targets"];
  const std::vector<float> row_weights = Floats(call["row_weights"]);
  Microbatch microbatch{.head = call["head"],
                        .id = call["id"],
                        .hidden_size = call["hidden_size"],
                        .hidden_dtype = DTypeNamed(call["dtype"]),
                        .hidden = hidden_.data(),
                        .targets = targets,
                        .row_weights = row_weights};
  if (!call["step"].is_null()) microbatch.step = call["step"].get<uint64_t>();
  ComputeOptions options{.loss = Options(call["options"]),
                         .reduction = ReductionNamed(call["reduction"]),
                         .grad_output = call["grad_output"].get<float>(),
                         .accumulate_gradients = call["accumulate"],
                         .retain = call["retain"]};
  if (!call["normalizer"].is_null()) options.normalizer = call["normalizer"].get<double>();
  if (call.contains("embedding")) {
    const bool rows = call["embedding"] == "rows";
    microbatch.embedding = rows ? v1::EMBEDDING_ROWS : v1::EMBEDDING_GRADIENTS;
    if (rows) {
      microbatch.hidden = nullptr;
      options.grad_output.reset();
    }
  }
  for (const json& depth : call.value("depths", json::array())) {
    CheckMembers(depth, {"rows", "weight", "normalizer"});
    microbatch.depths.push_back({.rows = depth["rows"], .weight = depth["weight"]});
    if (!depth["normalizer"].is_null())
      microbatch.depths.back().normalizer = depth["normalizer"].get<double>();
  }
  names_ = call["row_results"];
  LossOutputs outputs;
  if (!grad_hidden_.empty()) outputs.grad_hidden = grad_hidden_.data();
  const auto wanted = [this](const std::string& name, auto* values) {
    const bool found = std::find(names_.begin(), names_.end(), name) != names_.end();
    if (found) values->assign(rows_, 77);
    return absl::MakeSpan(*values);
  };
  outputs.row_loss = wanted("loss", &loss_);
  outputs.row_lse = wanted("lse", &lse_);
  outputs.row_entropy = wanted("entropy", &entropy_);
  outputs.row_logprob = wanted("logprob", &logprob_);
  outputs.row_argmax = wanted("argmax", &argmax_);
  std::vector<int32_t> classes;
  if (call.contains("classes")) {
    const json& lists = call["classes"];
    const bool shared = lists[0].is_number();
    outputs.class_count = static_cast<uint32_t>((shared ? lists : lists[0]).size());
    for (const json& list : lists) {
      const std::vector<int32_t> more =
          shared ? std::vector<int32_t>{list} : list.get<std::vector<int32_t>>();
      classes.insert(classes.end(), more.begin(), more.end());
    }
  }
  microbatch.classes = classes;
  std::vector<int32_t> target_classes;
  std::vector<float> target_weights;
  if (call.contains("target_classes")) {
    for (const std::vector<int32_t> row : call["target_classes"]) {
      microbatch.target_count = static_cast<uint32_t>(row.size());
      target_classes.insert(target_classes.end(), row.begin(), row.end());
    }
    for (const std::vector<float> row : call["target_weights"]) {
      target_weights.insert(target_weights.end(), row.begin(), row.end());
    }
  }
  microbatch.target_classes = target_classes;
  microbatch.target_weights = target_weights;
  outputs.top_k = call.value("top_k", 0u);
  const auto several = [this](auto* values, uint64_t each) {
    values->assign(rows_ * each, 77);
    return absl::MakeSpan(*values);
  };
  outputs.class_logprobs = several(&class_logprobs_, outputs.class_count);
  outputs.top_logprobs = several(&top_logprobs_, outputs.top_k);
  outputs.top_classes = several(&top_classes_, outputs.top_k);
  work_ = internal::LossWork::Forward(microbatch, outputs, options);
}

void Call::MakeBackward(const json& call) {
  const std::vector<float> grad_loss = Floats(call["grad_loss"]), grad_lse = Floats(call["grad_lse"]),
                           grad_entropy = Floats(call["grad_entropy"]);
  RetainedGradients gradients{.head = call["head"],
                              .id = call["id"],
                              .hidden_size = call["hidden_size"],
                              .hidden_dtype = DTypeNamed(call["dtype"]),
                              .grad_loss = grad_loss,
                              .grad_lse = grad_lse,
                              .grad_entropy = grad_entropy};
  if (!call["step"].is_null()) gradients.step = call["step"].get<uint64_t>();
  work_ = internal::LossWork::Backward(gradients, grad_hidden_.empty() ? nullptr : grad_hidden_.data(),
                                       {.accumulate_gradients = call["accumulate"]});
}

json Call::RowResults() const {
  json results = json::object();
  for (const std::string& name : names_) {
    if (name == "loss") results[name] = loss_;
    if (name == "lse") results[name] = lse_;
    if (name == "entropy") results[name] = entropy_;
    if (name == "logprob") results[name] = logprob_;
    if (name == "argmax") results[name] = argmax_;
    if (name == "class_logprobs") results[name] = class_logprobs_;
    if (name == "top_logprobs") results[name] = top_logprobs_;
    if (name == "top_classes") results[name] = top_classes_;
  }
  return results;
}

// ---- Messages ----
// Golden cases of what the client sends: plans and bytes.

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
  if (c.contains("depths")) call["depths"] = c["depths"];
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
  stream.hidden = internal::RowPieces(hidden.data());
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

void RunPlan(const json& c) {
  CheckMembers(c, {"hidden_size", "dtype", "limits", "slice_bytes", "streams", "max_message_bytes"},
               {"targets", "backward_rows", "ignore_index", "retain", "depths", "streams_planned", "fails"});
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

// ---- Answers ----
// Golden cases of what answers mean: those of loss computations, of tensor transfers, and the statuses of
// calls.

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

// ---- Decisions ----
// Golden cases of what the client decides: which server process it takes answers from, and when it repeats a
// call.

class Incarnations {
 public:
  explicit Incarnations(uint64_t expected) : head_cache_(expected) {}

  void Do(const json& at) { CheckStatus(at, StatusOf(at)); }

 private:
  absl::Status StatusOf(const json& at) {
    const std::string event = at.at("event");
    if (event == "call") return Begin(at);
    if (event == "accepted") return Accepted(at);
    if (event == "error") return Error(at);
    if (event == "names") return Names(at);
    if (event == "acknowledged") return Acknowledged(at);
    if (event == "connected") return Connected(at);
    if (event == "begins_again") return BeginsAgain(at);
    CheckMembers(at, {"event", "head", "step", "incarnation"}, {"generation", "fails"});
    const internal::TrainerStep step = head_cache_.StepOf(Head(at), at["step"]);
    const internal::GradientsId gradients{at["incarnation"], at.value("generation", uint64_t{0})};
    if (event == "contribution") return head_cache_.NoteAccumulation(step, gradients);
    if (event == "seen") return head_cache_.Check(step, gradients);
    if (event != "applied") throw std::invalid_argument("unknown event " + event);
    absl::Status status = head_cache_.Check(step, gradients);
    if (status.ok()) head_cache_.CloseStep(Head(at), at["step"]);
    return status;
  }

  static std::string Head(const json& at) { return at["head"]; }
  internal::AnswerCheck& CallOf(const json& at) { return *calls_.at(at["call"]); }

  absl::Status Begin(const json& at) {
    CheckMembers(at, {"event", "call", "head", "step", "accumulate"}, {"in_step"});
    std::optional<uint64_t> step;
    if (!at["step"].is_null()) step = at["step"].get<uint64_t>();
    const bool accumulates = at["accumulate"];
    calls_[at["call"]] = std::make_unique<internal::AnswerCheck>(&head_cache_, Head(at), step, accumulates,
                                                                 at.value("in_step", accumulates));
    return absl::OkStatus();
  }
  absl::Status Accepted(const json& at) {
    CheckMembers(at, {"event", "call", "incarnation", "step"}, {"generation", "weights_version", "fails"});
    v1::HeadState state;
    state.set_generation(at.value("generation", uint64_t{0}));
    state.set_weights_version(at.value("weights_version", uint64_t{0}));
    state.set_incarnation(at["incarnation"]);
    state.set_step(at["step"]);
    return CallOf(at).Accept(state);
  }
  absl::Status Error(const json& at) {
    CheckMembers(at, {"event", "call", "code", "incarnation"}, {"field", "fails"});
    absl::Status status = ErrorNamed(at["code"], "what happened");
    v1::ErrorDetail detail;
    detail.set_incarnation(at["incarnation"]);
    detail.set_field(at.value("field", ""));
    wire::SetErrorDetail(detail, &status);
    return CallOf(at).Interpret(status);
  }
  absl::Status Names(const json& at) {
    CheckMembers(at, {"event", "call", "incarnation"}, {"generation", "fails"});
    const absl::StatusOr<std::optional<internal::GradientsId>> meant = CallOf(at).Meant();
    if (!meant.ok()) return meant.status();
    EXPECT_EQ(meant->has_value() ? json((*meant)->incarnation) : json(nullptr), at["incarnation"]);
    EXPECT_EQ(meant->value_or(internal::GradientsId()).generation, at.value("generation", uint64_t{0}));
    return absl::OkStatus();
  }
  absl::Status Acknowledged(const json& at) {
    CheckMembers(at, {"event", "head"});
    head_cache_.ForgetAccumulation(Head(at));
    return absl::OkStatus();
  }
  absl::Status BeginsAgain(const json& at) {
    CheckMembers(at, {"event", "call"});
    CallOf(at).BeginAgain();
    return absl::OkStatus();
  }
  static absl::Status Connected(const json& at) {
    CheckMembers(at, {"event", "expected", "incarnation"}, {"fails"});
    return internal::RestartedError(at["expected"], at["incarnation"]);
  }

  internal::HeadCache head_cache_;
  std::map<std::string, std::unique_ptr<internal::AnswerCheck>> calls_;
};

void RunIncarnations(const json& c) {
  CheckMembers(c, {"expected_incarnation", "events"});
  Incarnations run(c["expected_incarnation"]);
  for (const json& event : c["events"]) {
    SCOPED_TRACE(event.dump());
    run.Do(event);
  }
}

void RunWaits(const json& c) {
  CheckMembers(c, {"error", "attempt", "retry", "left", "wait"}, {"restartable", "detail", "message"});
  CheckMembers(c["retry"], {"max_attempts", "initial_backoff", "max_backoff"});
  const RetryOptions retry{.max_attempts = c["retry"]["max_attempts"],
                           .initial_backoff = absl::Seconds(c["retry"]["initial_backoff"].get<double>()),
                           .max_backoff = absl::Seconds(c["retry"]["max_backoff"].get<double>())};
  absl::Status error = ErrorNamed(c["error"], c.value("message", "what happened"));
  if (c.value("detail", false)) wire::SetErrorDetail({}, &error);
  const internal::Repeat repeat = c.value("restartable", false) ? internal::Repeat::kIfTransientOrAborted
                                                                : internal::Repeat::kIfTransient;
  const absl::Duration left = absl::Seconds(c["left"].get<double>());
  const double factors[] = {0.8, 1.2};
  for (int i = 0; i < 2; ++i) {
    const auto wait = internal::WaitBeforeRepeat(retry, error, c["attempt"], left, factors[i], repeat);
    ASSERT_EQ(wait.has_value(), !c["wait"].is_null());
    if (!wait.has_value()) continue;
    const double expected = c["wait"][i];
    EXPECT_NEAR(absl::ToDoubleSeconds(*wait), expected, 1e-6 * expected);
  }
  for (int i = 0; i < 100; ++i) {
    const double jitter = internal::Jitter();
    EXPECT_GE(jitter, 0.8);
    EXPECT_LE(jitter, 1.2);
  }
}

void RunConnections(const json& c) {
  using internal::ConnectionChooser;
  const std::map<ConnectionChooser::Advice, std::string> names = {{ConnectionChooser::Advice::kStay, "stay"},
                                                                  {ConnectionChooser::Advice::kAdd, "add"},
                                                                  {ConnectionChooser::Advice::kDrop, "drop"}};
  CheckMembers(c, {"name", "rounds", "says"});
  ConnectionChooser chooser;
  absl::Time now = absl::UnixEpoch();
  uint64_t moved = 0;
  for (const json& round : c["rounds"]) {
    CheckMembers(round, {"streams", "megabytes", "seconds", "advice", "connections"}, {"times", "opens"});
    for (int i = 0; i < round.value("times", 1); ++i) {
      const int streams = round["streams"];
      for (int k = 0; k < streams; ++k) chooser.Begin(now);
      now += absl::Seconds(round["seconds"].get<double>());
      moved += round["megabytes"].get<uint64_t>() * 1000000;
      auto advice = ConnectionChooser::Advice::kStay;  // of the stream that ends the round
      for (int k = 0; k < streams; ++k) {
        const auto next = chooser.End(moved, now);
        if (next != ConnectionChooser::Advice::kStay) advice = next;
      }
      EXPECT_EQ(json(names.at(advice)), round["advice"]) << round << " " << i;
      if (round.contains("opens")) round["opens"] ? chooser.Added(moved) : chooser.Refused("full", moved);
      EXPECT_EQ(chooser.count(), round["connections"]) << round << " " << i;
    }
  }
  EXPECT_NE(chooser.reason().find(c["says"]), std::string::npos) << chooser.reason();
}

// ---- Connecting ----
// Golden cases of addresses, and of what is found there.

// The certificate "server" of the authority "ca", and an authority "other" that has signed nothing.
const test::TestPki& Pki() {
  static const auto* const pki = [] {
    auto* made = new test::TestPki();
    made->MakeAuthority("other");
    return made;
  }();
  return *pki;
}

std::shared_ptr<const Credentials> CredentialsNamed(const std::string& client) {
  if (client == "plain") return Credentials::Insecure();
  const std::string ca = Pki().Certificate(client == "trusts" ? "ca" : "other");
  return Credentials::Create({.ca = ca, .cert = "", .key = "", .token = ""}).value();
}

absl::Status Connect(const std::string& target, const std::string& client, absl::Duration patience) {
  return Client::Connect({.target = target,
                          .credentials = CredentialsNamed(client),
                          .channels = 1,
                          .connect_timeout = patience})
      .status();
}

void RunTargets(const json& c) {
  const std::string target = c.at("target");
  if (c.contains("fails")) {
    CheckMembers(c, {"target", "fails"});
    return CheckStatus(c, Client::Connect({.target = target}).status());
  }
  CheckMembers(c, {"target", "host", "port", "socket", "local"});
  EXPECT_EQ(internal::TargetProblem(target), "");
  EXPECT_EQ(json(internal::HostAndPortOf(target).host), c["host"]);
  EXPECT_EQ(json(internal::HostAndPortOf(target).port), c["port"]);
  EXPECT_EQ(json(internal::SocketPathOf(target)), c["socket"]);
  EXPECT_EQ(IsLocalTarget(target), c["local"]);
}

void RunListeners(const json& c) {
  std::signal(SIGPIPE, SIG_IGN);  // of the listener's TLS
  const bool silent = absl::StrContains(c.at("fails").at("says").get<std::string>(), "has not answered");
  const absl::Duration patience = silent ? absl::Seconds(2) : absl::Minutes(4);
  const absl::Time start = clocks::SteadyNow();
  if (c.contains("listens")) {
    CheckMembers(c, {"listens", "client", "fails"});
    std::string target;
    {
      const Listener gone("");
      target = gone.target();
    }
    CheckStatus(c, Connect(target, c["client"], patience));
  } else {
    CheckMembers(c, {"words", "tls", "client", "fails"});
    std::optional<std::string> words;
    if (!c["words"].is_null()) words = FromHex(c["words"]);
    std::pair<std::string, std::string> certificate;
    if (c["tls"]) certificate = {Pki().Certificate("server"), Pki().Key("server")};
    const Listener listener(words, certificate);
    CheckStatus(c, Connect(listener.target(), c["client"], patience));
  }
  EXPECT_LT(clocks::SteadyNow() - start, absl::Minutes(2)) << "it waited for its timeout";
}

// ---- Repeats ----
// Golden cases of calls against a server whose faults are scripted: what is sent again, and what the caller
// gets.

constexpr uint64_t kD = 8, kV = 10;  // of the scripted server's head

// What the caller gets: a status, and numbers by name.
struct Outcome {
  absl::Status status;
  json numbers;
};

Outcome OutcomeOf(const absl::StatusOr<LossResult>& result) {
  if (!result.ok()) return {result.status(), {}};
  return {absl::OkStatus(),
          {{"valid_rows", result->valid_rows},
           {"accumulated_rows", result->accumulated_rows},
           {"repeated_rows", result->repeated_rows},
           {"repeats", result->repeats}}};
}

Outcome ComputeLoss(Client& client, const json& call) {
  CheckMembers(call, {"do", "id", "step", "accumulate", "rows", "slice_rows"}, {"retain", "gives", "fails"});
  const uint64_t rows = call["rows"];
  const std::vector<float> hidden(rows * kD, 1.0f);
  std::vector<int32_t> targets(rows);
  for (uint64_t row = 0; row < rows; ++row) targets[row] = static_cast<int32_t>(row % kV);
  const bool retain = call.value("retain", false);
  return OutcomeOf(
      client.ComputeLoss({.head = "head",
                          .step = call["step"].get<uint64_t>(),
                          .id = call["id"],
                          .hidden_size = kD,
                          .hidden_dtype = v1::DTYPE_FP32,
                          .hidden = hidden.data(),
                          .targets = targets},
                         {},
                         {.reduction = retain ? v1::REDUCTION_NONE : v1::REDUCTION_MEAN,
                          .accumulate_gradients = call["accumulate"],
                          .retain = retain,
                          .streams = 1,
                          .slice_bytes = call["slice_rows"].get<uint64_t>() * kD * sizeof(float)}));
}

Outcome Backward(Client& client, const json& call) {
  CheckMembers(call, {"do", "id", "step", "accumulate", "rows"}, {"gives", "fails"});
  const std::vector<float> ones(call["rows"], 1.0f);
  return OutcomeOf(client.Backward({.head = "head",
                                    .step = call["step"].get<uint64_t>(),
                                    .id = call["id"],
                                    .hidden_size = kD,
                                    .hidden_dtype = v1::DTYPE_FP32,
                                    .grad_loss = ones},
                                   nullptr, {.accumulate_gradients = call["accumulate"], .streams = 1}));
}

Outcome AddGradient(Client& client, const json& call) {
  CheckMembers(call, {"do", "id", "step"}, {"gives", "fails"});
  v1::OpenGradient open;
  open.set_head("head");
  open.set_step(call["step"]);
  open.set_contribution_id(call["id"]);
  open.set_param(v1::PARAM_WEIGHT);
  open.set_dtype(v1::DTYPE_FP32);
  open.mutable_contribution_rows()->set_end(kV);
  const std::vector<float> ones(kV * kD, 1.0f);
  const auto added =
      client.AddGradient(open, {reinterpret_cast<const char*>(ones.data()), ones.size() * sizeof(float)});
  if (!added.ok()) return {added.status(), {}};
  return {absl::OkStatus(), {{"added_rows", added->added_rows()}, {"repeated_rows", added->repeated_rows()}}};
}

Outcome ApplyStep(Client& client, const json& call) {
  CheckMembers(call, {"do", "step"}, {"gives", "fails"});
  v1::ApplyStepRequest request;
  request.set_head("head");
  request.set_step(call["step"]);
  request.mutable_optimizer()->mutable_sgd()->set_learning_rate(1.0);
  const auto applied = client.ApplyStep(request);
  if (!applied.ok()) return {applied.status(), {}};
  return {absl::OkStatus(), {{"rows", applied->rows()}, {"repeated_call", applied->repeated_call()}}};
}

Outcome ReadTensor(Client& client, const json& call) {
  CheckMembers(call, {"do", "role"}, {"fails"});
  return {client.ReadTensor("head", v1::PARAM_WEIGHT, RoleNamed(call["role"])).status(), {}};
}

Outcome ZeroGradients(Client& client, const json& call) {
  CheckMembers(call, {"do", "step"}, {"fails"});
  return {client.ZeroGradients("head", call["step"]).status(), {}};
}

Outcome LoadCheckpoint(Client& client, const json& call) {
  CheckMembers(call, {"do"}, {"fails"});
  return {client.LoadCheckpoint("head/any").status(), {}};
}

Outcome GradNorm(Client& client, const json& call) {
  CheckMembers(call, {"do", "step"}, {"fails"});
  return {client.GradNorm("head", call["step"].get<uint64_t>()).status(), {}};
}

Outcome Do(Client& client, const json& call) {
  const std::string what = call.at("do");
  if (what == "compute_loss") return ComputeLoss(client, call);
  if (what == "backward") return Backward(client, call);
  if (what == "add_gradient") return AddGradient(client, call);
  if (what == "apply_step") return ApplyStep(client, call);
  if (what == "read_tensor") return ReadTensor(client, call);
  if (what == "zero_gradients") return ZeroGradients(client, call);
  if (what == "load_checkpoint") return LoadCheckpoint(client, call);
  if (what == "grad_norm") return GradNorm(client, call);
  if (what != "acknowledge_restart") throw std::invalid_argument("unknown call " + what);
  CheckMembers(call, {"do"});
  client.AcknowledgeRestart("head");
  return {};
}

void RunRepeats(const json& c) {
  CheckMembers(c, {"limits", "max_attempts", "faults", "calls"}, {"versions", "log"});
  const fake::ScriptedServer server(c);
  const auto client = Client::Connect(
      {.target = server.target(),
       .channels = 1,
       .retry = {.max_attempts = c["max_attempts"], .initial_backoff = absl::Milliseconds(2)}});
  ASSERT_TRUE(client.ok()) << client.status();
  for (const json& call : c["calls"]) {
    SCOPED_TRACE(call.dump());
    const Outcome outcome = Do(**client, call);
    CheckStatus(call, outcome.status);
    if (!call.contains("gives")) continue;
    for (const auto& [name, value] : call["gives"].items())
      EXPECT_EQ(outcome.numbers.at(name), value) << name;
  }
  if (c.contains("log")) {
    EXPECT_EQ(server.Log(), c["log"]);
  }
}

using Run = void (*)(const json&);

const std::map<std::string, Run>& Runs() {
  static const std::map<std::string, Run> runs{
      {"plan", RunPlan},
      {"sizes of regions", RunRegionSizes},
      {"wire", RunWire},
      {"stream answers", RunStreamAnswers},
      {"tensor answers", RunTensorAnswers},
      {"statuses", RunStatuses},
      {"incarnations", RunIncarnations},
      {"waits", RunWaits},
      {"connections", RunConnections},
      {"repeats", RunRepeats},
      {"targets", RunTargets},
      {"listeners", RunListeners},
  };
  return runs;
}

// A kind with its cases, by file; of all files of the folder but its README.
std::multimap<std::string, json> Files() {
  std::multimap<std::string, json> files;
  for (const auto& entry : std::filesystem::directory_iterator(LOSSD_GOLDEN_FOLDER)) {
    const std::string name = entry.path().filename();
    if (name == "README.md") continue;
    const json file = json::parse(std::ifstream(entry.path()));
    for (const json& kind : file.is_array() ? file : json::array({file})) files.emplace(name, kind);
  }
  return files;
}

struct Case {
  std::string kind;
  json content;

  // What a failing case shows of itself.
  friend void PrintTo(const Case& c, std::ostream* out) { *out << c.kind << ": " << c.content.dump(); }
};

std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (const auto& [name, file] : Files()) {
    for (const json& c : file.at("cases")) cases.push_back({file.at("kind"), c});
  }
  return cases;
}

std::string TestName(const ::testing::TestParamInfo<Case>& info) {
  std::string name = absl::StrCat(info.param.kind, "_", info.param.content.at("name").get<std::string>());
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  }
  return absl::StrCat(name, "_", info.index);
}

TEST(GoldenFilesTest, EveryKindIsKnownAndStandsOnce) {
  std::multiset<std::string> found, known;
  for (const auto& [kind, run] : Runs()) known.insert(kind);
  for (const auto& [name, file] : Files()) {
    found.insert(file.at("kind").get<std::string>());
    EXPECT_EQ(file.size(), 2u) << name << ": members besides kind and cases";
    EXPECT_FALSE(file.at("cases").empty()) << name;
    std::set<std::string> names;
    for (const json& c : file.at("cases")) {
      EXPECT_TRUE(names.insert(c.at("name").get<std::string>()).second)
          << name << ": two cases " << c["name"];
    }
  }
  EXPECT_EQ(found, known);
}

class GoldenTest : public ::testing::TestWithParam<Case> {};

TEST_P(GoldenTest, Case) {
  const auto run = Runs().find(GetParam().kind);
  ASSERT_NE(run, Runs().end()) << "no test knows how to run cases of kind " << GetParam().kind;
  SCOPED_TRACE(GetParam().content.at("name"));
  try {
    run->second(GetParam().content);
  } catch (const std::exception& error) {
    FAIL() << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Golden, GoldenTest, ::testing::ValuesIn(Cases()), TestName);

}  // namespace
}  // namespace lossd::client::golden_test
