// SPDX-License-Identifier: Apache-2.0
#include "tests/client/cpp/golden.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/support/slice.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <stdexcept>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "client/cpp/client_options.h"
#include "tests/client/scripted_server.h"

namespace lossd::client::golden {
namespace {

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
  v1::LossOptions message;
  Parse(fields, &message);
  return message;
}

}  // namespace

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
        call, {"head", "step", "id", "accumulate", "hidden_size", "dtype", "targets", "row_weights",
               "options", "reduction", "normalizer", "grad_output", "retain", "grad_hidden", "row_results"});
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
  }
  return results;
}

}  // namespace lossd::client::golden
