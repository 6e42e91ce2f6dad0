// SPDX-License-Identifier: Apache-2.0
// Tests of access_control.h, call_registry.h and status.h: which role each method needs, who the peer of a
// call is, the registry of open calls, their timeouts, and statuses.
#include "server/rpc/access_control.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "lossd/v1/head.pb.h"
#include "lossd/v1/loss.pb.h"
#include "lossd/v1/region.pb.h"
#include "lossd/v1/server.pb.h"
#include "lossd/v1/types.pb.h"
#include "proto/wire/status_details.h"
#include "server/rpc/request_call.h"
#include "tests/support/temp_folder.h"

namespace lossd::rpc::access_control_test {
namespace {

using access::Role;

// ---- Access to methods ----

// All methods of the services in proto/lossd/v1, by the files that are there.
std::multiset<std::string> MethodsOfTheProtocol() {
  // Registers the files.
  (void)v1::ListHeadsRequest::descriptor();
  (void)v1::OpenMicrobatch::descriptor();
  (void)v1::RegionRequest::descriptor();
  (void)v1::GetServerRequest::descriptor();
  std::multiset<std::string> methods;
  for (const auto& entry : std::filesystem::directory_iterator(LOSSD_PROTO_FOLDER "/lossd/v1")) {
    const std::string name = absl::StrCat("lossd/v1/", entry.path().filename().string());
    const auto* file = google::protobuf::DescriptorPool::generated_pool()->FindFileByName(name);
    EXPECT_NE(file, nullptr) << name << " is not in this test: include what is made from it";
    for (int i = 0; file != nullptr && i < file->service_count(); ++i) {
      for (int k = 0; k < file->service(i)->method_count(); ++k) {
        methods.insert(absl::StrCat(file->service(i)->full_name(), "/", file->service(i)->method(k)->name()));
      }
    }
  }
  return methods;
}

TEST(MethodAccessTest, EveryMethodOfTheProtocolHasOneLineAndNoOther) {
  std::multiset<std::string> lines;
  for (const MethodAccess& line : MethodAccessTable())
    lines.insert(absl::StrCat(line.service, "/", line.method));
  EXPECT_EQ(lines, MethodsOfTheProtocol());
  EXPECT_GE(lines.size(), 16u);
}

TEST(MethodAccessTest, NoTwoServicesHaveAMethodOfOneName) {
  std::set<std::string> names;
  for (const MethodAccess& line : MethodAccessTable()) {
    EXPECT_TRUE(names.emplace(line.method).second) << line.method;
    EXPECT_EQ(FindMethodAccess(line.method), &line);
  }
}

TEST(MethodAccessTest, ChangesOfHeadsAreAudited) {
  for (const char* method : {"CreateHead", "DeleteHead", "WriteTensor", "LoadCheckpoint"}) {
    EXPECT_EQ(FindMethodAccess(method)->role, access::Role::kAdmin) << method;
  }
  // Whoever saves may remove: a trainer keeps so many of its checkpoints.
  for (const char* method : {"SaveCheckpoint", "DeleteCheckpoint"}) {
    EXPECT_EQ(FindMethodAccess(method)->role, access::Role::kTrainer) << method;
    EXPECT_TRUE(FindMethodAccess(method)->audited) << method;
  }
  for (const MethodAccess& line : MethodAccessTable()) {
    if (line.role == access::Role::kAdmin) {
      EXPECT_TRUE(line.audited) << line.method;
    }
    if (line.role == access::Role::kReader) {
      EXPECT_FALSE(line.audited) << line.method;
    }
  }
  EXPECT_EQ(FindMethodAccess("NoSuchMethod"), nullptr);
}

// A line for each call of these that ended well would fill a disk; all others take the device's or the disk's
// time.
TEST(MethodAccessTest, CallsThatLeaveNothingBehind) {
  for (const MethodAccess& line : MethodAccessTable()) {
    EXPECT_EQ(line.leaves_nothing, line.method == "ZeroGradients" || line.method == "PlanHead")
        << line.method;
  }
}

// ---- docs/security.md ----

using Methods = std::set<std::string>;

// The methods of the protocol that a text names.
Methods MethodsIn(absl::string_view text) {
  Methods methods;
  for (const absl::string_view word :
       absl::StrSplit(text, absl::ByAnyChar(" \n,.;`|()"), absl::SkipEmpty())) {
    if (FindMethodAccess(word) != nullptr) methods.emplace(word);
  }
  return methods;
}

Methods MethodsWith(const std::function<bool(const MethodAccess&)>& property) {
  Methods methods;
  for (const MethodAccess& line : MethodAccessTable()) {
    if (property(line)) methods.emplace(line.method);
  }
  return methods;
}

class SecurityPageTest : public testing::Test {
 protected:
  // What the page has between `begin` and `end`.
  std::string Between(const std::string& begin, const std::string& end) {
    const size_t at = page_.find(begin);
    EXPECT_NE(at, std::string::npos) << begin;
    if (at == std::string::npos) return "";
    const size_t from = at + begin.size();
    const size_t to = page_.find(end, from);
    EXPECT_NE(to, std::string::npos) << end;
    return page_.substr(from, to - from);
  }

  const std::string page_ = test::ReadWholeFile(LOSSD_DOCS_FOLDER "/security.md");
};

TEST_F(SecurityPageTest, NamesTheAuditedCalls) {
  EXPECT_EQ(MethodsIn(Between("are one line of the log each when they end:", ". A call that is refused")),
            MethodsWith([](const MethodAccess& line) { return line.audited; }));
}

// The first cells of the table: "| reader | GetServer, ListStreams, ... |".
TEST_F(SecurityPageTest, SaysWhatEachRoleMayCall) {
  for (const Role role : {Role::kReader, Role::kTrainer, Role::kAdmin}) {
    EXPECT_EQ(MethodsIn(Between(absl::StrCat("\n| ", access::RoleName(role), " | "), " | ")),
              MethodsWith([role](const MethodAccess& line) { return line.role == role; }))
        << access::RoleName(role);
  }
}

// ---- The peer of a call ----

TEST(PeerTest, IsTheAddressWithoutThePort) {
  EXPECT_EQ(PeerOf("ipv4:10.0.0.7:41234", 1), "10.0.0.7");
  EXPECT_EQ(PeerOf("ipv6:%5B2001:db8::7%5D:41234", 1), "[2001:db8::7]");
  EXPECT_EQ(PeerOf("ipv6:[2001:db8::7]:41234", 1), "[2001:db8::7]");
}

TEST(PeerTest, IsAConnectionOnTheServersOwnMachine) {
  EXPECT_EQ(PeerOf("ipv4:127.0.0.1:41234", 1), "127.0.0.1:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::1%5D:41234", 1), "[::1]:41234");
  EXPECT_EQ(PeerOf("ipv6:%5B::ffff:127.0.0.1%5D:41234", 1), "[::ffff:127.0.0.1]:41234");
}

TEST(PeerTest, IsNobodyInTheServersOwnProcess) {
  EXPECT_EQ(PeerOf("inproc", 1), "");
  EXPECT_EQ(PeerOf("inproc:server", 1), "");
}

TEST(PeerTest, IsAConnectionOverAUnixSocket) {
  EXPECT_EQ(PeerOf("unix:", 0x1a), "unix#1a");
  EXPECT_NE(PeerOf("unix:", 1), PeerOf("unix:", 2));
}

// Whose log lines are counted together. A program may open connections without end.
TEST(HolderTest, IsTheUserOnTheServersOwnMachine) {
  const auto authority = access::Authority::Create({"role_file", ""}, {"token_file", ""});
  ASSERT_TRUE(authority.ok());
  access::AuditLog audit;
  const AccessControl access(authority->get(), &audit, [](absl::string_view address) {
    return absl::StartsWith(address, "127.0.0.1:4") || address == "[::1]:40" ? "uid 1000" : "";
  });
  EXPECT_EQ(access.HolderOf("127.0.0.1:41234"), "uid 1000");
  EXPECT_EQ(access.HolderOf("127.0.0.1:41235"), "uid 1000");
  EXPECT_EQ(access.HolderOf("[::1]:40"), "uid 1000");
  EXPECT_EQ(access.HolderOf("127.0.0.9:51234"), "loopback") << "of a connection that has gone";
  EXPECT_EQ(access.HolderOf("unix#1a"), "unix");
  EXPECT_EQ(access.HolderOf("unix#2b"), "unix");
  EXPECT_EQ(access.HolderOf("10.0.0.7"), "10.0.0.7");
  EXPECT_EQ(access.HolderOf("dns:trainer-1"), "dns:trainer-1");
  const AccessControl knows_nobody(authority->get(), &audit);
  EXPECT_EQ(knows_nobody.HolderOf("127.0.0.1:41234"), "loopback");
}

// ---- Call registry ----

class FakeCall final : public WatchedCall {
 public:
  absl::string_view EndIfLate(absl::Time, const CallTimeouts&) override {
    ++checks;
    return late ? "idle_timeout" : "";
  }
  void GiveUpPlace(absl::Status why) override { given_up = std::move(why); }
  absl::Status given_up;
  std::atomic<int> checks{0};
  std::atomic<bool> late{false};
};

TEST(CallRegistryTest, BoundsTheNumberOfCalls) {
  std::vector<std::string> limits;
  CallRegistry registry({.max_calls = 2,
                         .flag = "max_tensor_calls",
                         .on_limit = [&](absl::string_view limit) { limits.emplace_back(limit); }});
  FakeCall a, b, c;
  EXPECT_TRUE(registry.Add(&a, "x").ok());
  EXPECT_TRUE(registry.Add(&b, "y").ok());
  const absl::Status refused = registry.Add(&c, "z");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("--max_tensor_calls"), absl::string_view::npos) << refused;
  registry.Remove(&c);
  registry.Remove(&a);
  EXPECT_TRUE(registry.Add(&c, "z").ok());
  registry.Remove(&b);
  registry.Remove(&c);
  EXPECT_EQ(limits, std::vector<std::string>{"max_tensor_calls"});
}

// A call that has ended gives its place back while gRPC still has it.
TEST(CallRegistryTest, APlaceIsGivenBackOnce) {
  CallRegistry registry({.max_calls = 1, .peer_share = 1.0});
  FakeCall a, b, c;
  ASSERT_TRUE(registry.Add(&a, "x").ok());
  EXPECT_FALSE(registry.Add(&b, "x").ok());
  registry.GiveBack(&b);  // it has none
  EXPECT_FALSE(registry.Add(&b, "x").ok());
  registry.GiveBack(&a);
  ASSERT_TRUE(registry.Add(&b, "x").ok());
  registry.GiveBack(&a);
  registry.Remove(&a);
  EXPECT_FALSE(registry.Add(&c, "x").ok()) << "the place of a is given back twice";
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::InfinitePast()));
  registry.GiveBack(&b);
  EXPECT_FALSE(registry.WaitUntilEmpty(absl::InfinitePast())) << "gRPC still has the call";
  registry.Remove(&b);
  EXPECT_TRUE(registry.WaitUntilEmpty(absl::InfinitePast()));
}

// A call that only waits for gRPC has no place that another peer could get.
TEST(CallRegistryTest, TheOldestCallWithAPlaceMakesRoom) {
  CallRegistry registry({.max_calls = 1, .peer_share = 1.0, .end_oldest = true});
  FakeCall a, b, c;
  ASSERT_TRUE(registry.Add(&a, "x").ok());
  registry.GiveBack(&a);
  ASSERT_TRUE(registry.Add(&b, "x").ok());
  ASSERT_TRUE(registry.Add(&c, "y").ok());
  EXPECT_TRUE(a.given_up.ok());
  EXPECT_EQ(b.given_up.code(), absl::StatusCode::kResourceExhausted);
  for (FakeCall* call : {&a, &b, &c}) registry.Remove(call);
}

TEST(CallRegistryTest, APeerLeavesPlacesToOthers) {
  CallRegistry registry({.max_calls = 8, .peer_share = 0.5});
  FakeCall calls[6];
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(registry.Add(&calls[i], "greedy").ok()) << i;
  const absl::Status refused = registry.Add(&calls[4], "greedy");
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(refused.message().find("greedy has 4"), absl::string_view::npos) << refused;
  EXPECT_NE(refused.message().find("--peer_share"), absl::string_view::npos) << refused;
  EXPECT_TRUE(registry.Add(&calls[5], "other").ok());
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, WhoHasNoPlaceGetsTheOldestCallsPlace) {
  CallRegistry registry({.max_calls = 3, .flag = "max_waiting_calls", .peer_share = 0.5, .end_oldest = true});
  FakeCall calls[6];
  ASSERT_TRUE(registry.Add(&calls[0], "a").ok());
  ASSERT_TRUE(registry.Add(&calls[1], "b").ok());
  ASSERT_TRUE(registry.Add(&calls[2], "c").ok());
  EXPECT_EQ(registry.Add(&calls[3], "b").code(), absl::StatusCode::kResourceExhausted);  // it has one
  EXPECT_TRUE(calls[0].given_up.ok());
  EXPECT_TRUE(registry.Add(&calls[4], "d").ok());
  EXPECT_EQ(calls[0].given_up.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(calls[0].given_up.message().find("--max_waiting_calls"), absl::string_view::npos)
      << calls[0].given_up;
  EXPECT_TRUE(registry.Add(&calls[5], "e").ok());
  EXPECT_FALSE(calls[1].given_up.ok());
  EXPECT_TRUE(calls[2].given_up.ok());
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, LooksAtCallsSeveralTimesPerTimeout) {
  std::atomic<int> ended{0};
  CallRegistry registry({.max_calls = 2,
                         .timeouts = {.idle = absl::Milliseconds(100)},
                         .on_limit = [&](absl::string_view) { ++ended; }});
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2);
  while (call.checks < 3 && clocks::SteadyNow() < limit) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(ended, 0);
  call.late = true;
  while (ended == 0 && clocks::SteadyNow() < limit) absl::SleepFor(absl::Milliseconds(5));
  registry.Remove(&call);
  const int checks = call.checks;
  EXPECT_GE(checks, 3);
  EXPECT_GE(ended, 1);
  absl::SleepFor(absl::Milliseconds(60));
  EXPECT_EQ(call.checks, checks) << "a removed call was used";
}

TEST(CallRegistryTest, LooksAtEachOpenCallFromTheOldestToTheYoungest) {
  CallRegistry registry({.max_calls = 64, .peer_share = 1.0});
  std::vector<FakeCall> calls(20);
  for (size_t i = 0; i < calls.size(); ++i) {
    ASSERT_TRUE(registry.Add(&calls[i], i % 2 == 0 ? "even" : "odd").ok());
  }
  for (size_t i = 0; i < calls.size(); i += 3) registry.Remove(&calls[i]);
  std::vector<size_t> seen;
  registry.ForEach([&](WatchedCall& call, const std::string& peer, uint64_t number) {
    const auto index = static_cast<size_t>(number);
    ASSERT_LT(index, calls.size());
    EXPECT_EQ(&call, &calls[index]);
    EXPECT_EQ(peer, index % 2 == 0 ? "even" : "odd");
    seen.push_back(index);
  });
  std::vector<size_t> open;
  for (size_t i = 0; i < calls.size(); ++i) {
    if (i % 3 != 0) open.push_back(i);
  }
  EXPECT_EQ(seen, open);
  for (FakeCall& call : calls) registry.Remove(&call);
}

TEST(CallRegistryTest, WaitsUntilEmpty) {
  CallRegistry registry({.max_calls = 2});
  EXPECT_TRUE(registry.WaitUntilEmpty(clocks::SteadyNow()));
  FakeCall call;
  ASSERT_TRUE(registry.Add(&call, "x").ok());
  EXPECT_FALSE(registry.WaitUntilEmpty(clocks::SteadyNow() + absl::Milliseconds(20)));
  std::thread remover([&] {
    absl::SleepFor(absl::Milliseconds(20));
    registry.Remove(&call);
  });
  EXPECT_TRUE(registry.WaitUntilEmpty(clocks::SteadyNow() + absl::Minutes(2)));
  remover.join();
}

// ---- Call timeouts ----

using Waits = CallClock::Waits;

constexpr CallTimeouts kTimeouts = {
    .open = absl::Seconds(1), .idle = absl::Seconds(2), .turn = absl::Seconds(3), .send = absl::Seconds(4)};

TEST(CallClockTest, SaysWhichLimitWasReached) {
  struct Case {
    Waits what;
    absl::Duration most;
    std::string flag;
  };
  for (const Case& c : {Case{Waits::kOpen, absl::Seconds(1), "open_timeout"},
                        Case{Waits::kMessage, absl::Seconds(2), "idle_timeout"},
                        Case{Waits::kTurn, absl::Seconds(3), "turn_timeout"},
                        Case{Waits::kSend, absl::Seconds(4), "send_timeout"}}) {
    const absl::Time start = absl::UnixEpoch();
    CallClock clock;
    clock.Set(c.what, start);
    absl::string_view limit;
    EXPECT_TRUE(clock.Check(start + c.most - absl::Milliseconds(1), kTimeouts, &limit).ok());
    EXPECT_EQ(limit, "");
    const absl::Status late = clock.Check(start + c.most, kTimeouts, &limit);
    EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_EQ(limit, c.flag);
    EXPECT_NE(late.message().find("--" + c.flag), absl::string_view::npos) << late;
  }
}

TEST(CallClockTest, NothingToWaitForTakesAnyTime) {
  CallClock clock;
  absl::string_view limit;
  EXPECT_TRUE(clock.Check(clocks::SteadyNow() + absl::Hours(100), kTimeouts, &limit).ok());
  clock.Set(Waits::kTurn);
  clock.Set(Waits::kNothing);
  EXPECT_TRUE(clock.Check(clocks::SteadyNow() + absl::Hours(100), kTimeouts, &limit).ok());
}

TEST(CallClockTest, StopsOnceItIsLate) {
  const absl::Time start = absl::UnixEpoch();
  CallClock clock;
  clock.Set(Waits::kSend, start);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(3), kTimeouts), "");
  EXPECT_EQ(clock.what(), Waits::kSend);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(4), kTimeouts), "send_timeout");
  EXPECT_EQ(clock.what(), Waits::kNothing);
  EXPECT_EQ(clock.StopIfLate(start + absl::Seconds(5), kTimeouts), "");
}

// ---- Status ----

TEST(StatusTest, TheDetailTravelsWithTheStatus) {
  const grpc::Status status = ToGrpc(errors::FieldError("open.x", "be small", 12), 9);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "open.x must be small, got 12");
  const v1::ErrorDetail detail = wire::GetErrorDetail(status).value_or(v1::ErrorDetail());
  EXPECT_EQ(detail.field(), "open.x");
  EXPECT_EQ(detail.incarnation(), 9u);
  EXPECT_TRUE(ToGrpc(absl::OkStatus(), 9).ok());
}

TEST(StatusTest, CodesHaveTheirNames) {
  EXPECT_EQ(CodeName(ToGrpc(absl::OutOfRangeError("x"), 1)), "OUT_OF_RANGE");
  EXPECT_EQ(CodeName(grpc::Status::OK), "OK");
}

}  // namespace
}  // namespace lossd::rpc::access_control_test
