// SPDX-License-Identifier: Apache-2.0
// Golden cases of calls against a server whose faults are scripted: what is sent again, and what the caller
// gets.
#include <gtest/gtest.h>

#include <stdexcept>

#include "tests/client/cpp/golden.h"
#include "tests/client/scripted_server.h"

namespace lossd::client::golden {
namespace {

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

}  // namespace

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

}  // namespace lossd::client::golden
