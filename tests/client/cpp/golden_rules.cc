// SPDX-License-Identifier: Apache-2.0
// Golden cases of what the client decides: which server process it takes answers from, and when it repeats a
// call.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <stdexcept>

#include "client/cpp/client_options.h"
#include "client/cpp/connections.h"
#include "client/cpp/core.h"
#include "proto/wire/status_details.h"
#include "tests/client/cpp/golden.h"

namespace lossd::client::golden {
namespace {

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

}  // namespace

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

}  // namespace lossd::client::golden
