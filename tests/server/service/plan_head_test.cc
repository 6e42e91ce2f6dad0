// SPDX-License-Identifier: Apache-2.0
// PlanHead through the service: it answers what CreateHead would, and leaves no trace.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/small_training.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::plan_head_test {
namespace {

using ::testing::HasSubstr;

v1::CreateHeadRequest Request(const std::string& name = "head") {
  v1::CreateHeadRequest request;
  v1::HeadSpec& spec = *request.mutable_spec();
  spec.set_name(name);
  spec.set_hidden_size(24);
  spec.set_vocab_size(101);
  spec.set_bias(true);
  spec.set_norm(v1::NORM_RMSNORM);
  return request;
}

// What a plan may leave behind.
std::string Traces(client::Client& client) {
  const auto server = client.GetServer();
  EXPECT_TRUE(server.ok()) << server.status();
  return absl::StrCat(client.ListHeads()->size(), " heads, ", server->memory().ShortDebugString());
}

// Also on several devices, whichever way they divide the head, and on a deterministic server.
TEST(PlanHead, AnswersWhatCreateHeadThenDoes) {
  for (const std::string split : {"", "rows", "vocabulary", "deterministic"}) {
    SCOPED_TRACE(split);
    ServerOptions options = SmallServer();
    options.deterministic = split == "deterministic";
    if (split == "rows" || split == "vocabulary") {
      options.backend = "cpu";
      options.cpu_devices = 2;
      options.split = split;
    }
    TestServer server(options);
    const auto client = Connect(server.target());
    const std::string before = Traces(*client);
    const auto planned = client->PlanHead(Request());
    ASSERT_TRUE(planned.ok()) << planned.status();
    EXPECT_EQ(Traces(*client), before);
    EXPECT_EQ(client->DescribeHead("head").status().code(), absl::StatusCode::kNotFound);

    const auto created = client->CreateHead(Request());  // the name is free
    ASSERT_TRUE(created.ok()) << created.status();
    EXPECT_EQ(planned->spec().ShortDebugString(), created->spec().ShortDebugString());
    EXPECT_EQ(planned->memory().ShortDebugString(), created->memory().ShortDebugString());
    EXPECT_EQ(planned->slice_limits().ShortDebugString(), created->slice_limits().ShortDebugString());
    EXPECT_EQ(planned->chunk_rows(), created->chunk_rows());
    EXPECT_EQ(planned->compute_dtype(), created->compute_dtype());
    EXPECT_EQ(planned->state().incarnation(), created->state().incarnation());
    ASSERT_EQ(planned->choices_size(), created->choices_size());
    for (int i = 0; i < planned->choices_size(); ++i) {
      EXPECT_EQ(planned->choices(i).ShortDebugString(), created->choices(i).ShortDebugString());
    }
    EXPECT_EQ(planned->state().generation(), 0u) << "there is none";
    EXPECT_NE(created->state().generation(), 0u);
  }
}

TEST(PlanHead, EndsWithTheErrorsOfCreateHead) {
  ServerOptions options = SmallServer();
  options.memory_limit_bytes = 8 << 20;
  TestServer server(options);
  const auto client = Connect(server.target());
  ASSERT_TRUE(client->CreateHead(Request("taken")).ok());
  const std::string before = Traces(*client);
  const std::pair<const char*, std::function<void(v1::CreateHeadRequest&)>> kBad[] = {
      {"no name", [](auto& r) { r.mutable_spec()->set_name(""); }},
      {"a name that is taken", [](auto& r) { r.mutable_spec()->set_name("taken"); }},
      {"no classes", [](auto& r) { r.mutable_spec()->set_vocab_size(0); }},
      {"an unknown norm", [](auto& r) { r.mutable_spec()->set_norm(static_cast<v1::Norm>(9)); }},
      {"rows that fit no slice", [](auto& r) { r.mutable_spec()->set_hidden_size(1 << 20); }},
      {"more than the limit", [](auto& r) { r.mutable_spec()->set_vocab_size(100'000); }},
      {"a file that is not there",
       [](auto& r) {
         r.mutable_tensor_file()->set_path("missing.safetensors");
         r.mutable_tensor_file()->set_weight("w");
       }},
      {"a file outside", [](auto& r) {
         r.mutable_tensor_file()->set_path("../../etc/passwd");
         r.mutable_tensor_file()->set_weight("w");
       }}};
  for (const auto& [what, spoil] : kBad) {
    SCOPED_TRACE(what);
    v1::CreateHeadRequest request = Request();
    spoil(request);
    const absl::Status planned = client->PlanHead(request).status();
    EXPECT_FALSE(planned.ok());
    EXPECT_EQ(planned, client->CreateHead(request).status());
    EXPECT_EQ(Traces(*client), before);
  }
}

// Members that share a limit: together they need more than it, and each alone does not.
TEST(PlanHead, AddsUpWhatDevicesOfOneMemoryNeed) {
  ServerOptions options = SmallServer();
  options.backend = "cpu";
  options.cpu_devices = 3;
  options.split = "rows";
  options.memory_limit_bytes = 16 << 20;
  TestServer server(options);
  const auto client = Connect(server.target());
  int refused = 0, fit = 0;
  for (uint64_t classes = 1'000; classes < 200'000; classes = classes * 3 / 2) {
    v1::CreateHeadRequest request = Request();
    request.mutable_spec()->set_vocab_size(classes);
    const absl::Status planned = client->PlanHead(request).status();
    const absl::Status created = client->CreateHead(request).status();
    EXPECT_EQ(planned.code(), created.code()) << classes << ": " << planned << "; " << created;
    ++(created.ok() ? fit : refused);
    if (created.ok()) {
      EXPECT_TRUE(client->DeleteHead("head").ok());
    }
  }
  EXPECT_GT(fit, 2);
  EXPECT_GT(refused, 2);
}

}  // namespace
}  // namespace lossd::app::testing::plan_head_test
