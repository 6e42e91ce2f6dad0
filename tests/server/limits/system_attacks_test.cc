// SPDX-License-Identifier: Apache-2.0
// Attacks on what is beside the calls of attacks_test.cc: the HTTP port, files below the checkpoint folder,
// heads larger than the machine, and a deterministic server. Each must leave the process alive and its memory
// bounded, and an honest client training. And a trainer that has more under way than the transport's memory
// holds.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "client/cpp/client.h"
#include "server/app/server.h"
#include "tests/server/limits/attacks_fixture.h"
#include "tests/support/raw_http.h"

namespace lossd::app::testing::system_attacks_test {
namespace {

using test::HttpGet;
using test::HttpStatus;
using test::RawHttp;

class SystemAttacksTest : public AttacksTest {
 protected:
  static std::vector<std::string> Patient(const std::string& flag) {
    std::vector<std::string> flags = {kPatient, kPatient + 4};
    flags.push_back(flag);
    return flags;
  }
  std::string Path(const std::string& name) const { return server_->checkpoint_folder() + "/" + name; }
  void Write(const std::string& name, absl::string_view text) const {
    std::filesystem::create_directories(std::filesystem::path(Path(name)).parent_path());
    test::WriteWholeFile(Path(name), std::string(text));
  }
  absl::StatusCode CreateFrom(const std::string& path) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("other");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(100);
    request.mutable_tensor_file()->set_path(path);
    request.mutable_tensor_file()->set_weight("w");
    return client_->CreateHead(request).status().code();
  }
};

// A file of the form safetensors with this header.
std::string Safetensors(absl::string_view header) {
  const uint64_t length = header.size();
  return absl::StrCat(absl::string_view(reinterpret_cast<const char*>(&length), sizeof(length)), header,
                      std::string(64, '\0'));
}

std::string Nested(absl::string_view opening, int depth) {
  std::string text;
  for (int i = 0; i < depth; ++i) absl::StrAppend(&text, opening);
  return text;
}

TEST_F(SystemAttacksTest, AThousandHalfOpenHttpConnections) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit more = {std::min<rlim_t>(4096, limit.rlim_max), limit.rlim_max};
  Start(Patient("--http=127.0.0.1:0"));
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &more), 0);
  std::vector<RawHttp> connections;
  for (int i = 0; i < 1000; ++i) {
    connections.emplace_back(server_->http(), absl::Seconds(60), absl::StrCat("127.0.2.", 1 + i % 100));
    ASSERT_TRUE(connections.back().connected()) << i;
    connections.back().Send("GET /metrics HTTP/1.1\r\nHost: local");
    if (i % 250 == 249) Train();
  }
  EXPECT_EQ(HttpStatus(HttpGet(server_->http(), "/metrics")), 200);
  Train();
  ExpectBounded(/*planned=*/0);
}

TEST_F(SystemAttacksTest, ManifestsThatNestDeeply) {
  Start();
  const std::vector<std::string> texts = {
      Nested("[", 60'000), Nested("{\"a\":", 60'000), Nested("[", 60'000) + Nested("]", 60'000),
      absl::StrCat("{\"version\":3,\"x\":", Nested("[", 60'000), Nested("]", 60'000), "}"),
      Nested("[", 5'000'000)};
  for (size_t i = 0; i < texts.size(); ++i)
    Write(absl::StrCat("head/hostile", i, "/manifest.json"), texts[i]);
  for (int round = 0; round < 3; ++round) {
    EXPECT_TRUE(client_->ListCheckpoints("").ok());
    EXPECT_TRUE(client_->ListCheckpoints("head").ok());
    for (size_t i = 0; i < texts.size(); ++i)
      EXPECT_FALSE(client_->LoadCheckpoint(absl::StrCat("head/hostile", i), "head").ok()) << i;
  }
  ExpectBounded(/*planned=*/0);
  Train();
  server_->Kill();
  server_->Start();  // they are still there
  client_ = TestClient::Connect(server_->target());
  EXPECT_TRUE(client_->ListCheckpoints("").ok());
}

// Headers of safetensors files, with their metadata, and indexes of models: deep, long, or of many entries.
// A reader lists thousands of checkpoints, many times at once. Whoever looks at a head does not wait for
// that.
TEST_F(SystemAttacksTest, ListsOfManyCheckpointsLeaveLooksAlone) {
  constexpr int kLists = 129, kCheckpoints = 3400;
  Start();
  for (int i = 0; i < kCheckpoints; ++i)
    std::filesystem::copy(Path("head/step1"), Path(absl::StrCat("head/copy", i)));
  std::atomic<int> ended = 0, listed = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < kLists; ++i) {
    readers.emplace_back([&] {
      const auto list = client_->ListCheckpoints("head");
      if (list.ok() && list->checkpoints_size() > 0) ++listed;  // an answer has the newest ones
      ++ended;
    });
  }
  while (ended == 0) absl::SleepFor(absl::Milliseconds(1));
  const auto other = TestClient::Connect(server_->target());
  const absl::Time begin = absl::Now();
  const absl::Status looked = other->DescribeHead("head").status();
  const absl::Duration took = absl::Now() - begin;
  const int ended_before = ended;
  for (std::thread& reader : readers) reader.join();
  std::cout << "DescribeHead took " << took << ", " << ended_before << " of " << kLists
            << " lists had ended; all took " << absl::Now() - begin << " more\n";
  EXPECT_TRUE(looked.ok()) << looked;
  EXPECT_GT(listed, 1);
  EXPECT_LT(ended_before, kLists) << "it waited for all of them";
  Train();
}

TEST_F(SystemAttacksTest, HostileMetadataOfTensorFiles) {
  Start();
  const std::string deep = Nested("[", 60'000) + Nested("]", 60'000);
  std::string many = "{\"__metadata__\":{\"k\":\"v\"";
  for (int i = 0; i < 500'000; ++i) absl::StrAppend(&many, ",\"k", i, "\":\"v\"");
  many += "}}";
  std::string entries = "{\"weight_map\":{\"a\":\"b\"";
  while (entries.size() < (size_t{60} << 20))
    absl::StrAppend(&entries, ",\"layer", entries.size(), "\":\"model-00001-of-00002.safetensors\"");
  entries += "}}";
  const std::vector<std::pair<std::string, std::string>> files = {
      {"deep.safetensors", Safetensors(deep)},
      {"unclosed.safetensors", Safetensors(Nested("{\"a\":", 60'000))},
      {"metadata.safetensors", Safetensors(absl::StrCat("{\"__metadata__\":", deep, "}"))},
      {"value.safetensors", Safetensors(absl::StrCat("{\"__metadata__\":{\"a\":", deep, "}}"))},
      {"many.safetensors", Safetensors(many)},
      {"long.safetensors", Safetensors(absl::StrCat("{\"", std::string(20 << 20, 'n'), "\":1}"))},
      {"deep.json", deep},
      {"map.json", absl::StrCat("{\"metadata\":", deep, ",\"weight_map\":{\"w\":\"many.safetensors\"}}")},
      {"nested.json", absl::StrCat("{\"weight_map\":", deep, "}")},
      {"entries.json", entries},
      {"long.json", absl::StrCat("{\"metadata\":\"", std::string(20 << 20, 'n'), "\"}")}};
  for (const auto& [name, text] : files) Write(name, text);
  for (int round = 0; round < 3; ++round) {
    for (const auto& [name, text] : files) EXPECT_NE(CreateFrom(name), absl::StatusCode::kOk) << name;
  }
  ExpectBounded(/*planned=*/0);
  Train();
}

// 16 bytes an element: no machine has so much.
TEST_F(SystemAttacksTest, HeadsLargerThanTheMachine) {
  Start();
  for (uint64_t i = 0; i < 100; ++i) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name(absl::StrCat("large", i % 10));
    request.mutable_spec()->set_hidden_size(16'384);
    request.mutable_spec()->set_vocab_size(100'000'000 + i);
    const absl::Status refused = client_->CreateHead(request).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
  }
  EXPECT_EQ(client_->ListHeads()->heads_size(), 1);
  ExpectBounded(/*planned=*/0);
  Train();
}

// Calls that wait for their turn with filtered gradients and millions of targets each: of the larger ones,
// one is already too much of the ledger.
TEST_F(SystemAttacksTest, OpenDeterministicCallsWithManyTargets) {
  first_id_ = 0;
  Start(Patient("--deterministic"));
  std::vector<std::unique_ptr<RawHttp2>> connections;
  for (uint64_t i = 0; i < 40; ++i) {
    if (i % 10 == 0) connections.push_back(std::make_unique<RawHttp2>(server_->target()));
    v1::ComputeLossRequest request;
    *request.mutable_open() = Open(100 + i, i % 2 == 0 ? 3'900'000 : 1'000'000, step_);
    request.mutable_open()->mutable_options()->set_gradients(v1::GRADIENTS_FILTERED);
    request.mutable_open()->mutable_options()->set_filter_epsilon(0.001f);
    const uint32_t call = connections.back()->Call("/lossd.v1.LossService/ComputeLoss");
    connections.back()->Message(call, request.SerializeAsString());
  }
  Pump(connections, absl::Seconds(10));
  ExpectBounded();
  Train();
  connections.clear();
  Train();
  ExpectBounded();
}

// ---- Bytes under way ----
// A trainer that has more bytes under way than the transport's memory holds is slowed down, and nothing else.

constexpr uint64_t kHiddenSize = 4096, kVocabSize = 64;
constexpr size_t kRows = 2048;  // 16 MiB of hidden states
constexpr int kInFlight = 12, kChannels = 4, kMicrobatches = 64;

TEST(InFlightTest, MoreThanTheTransportHolds) {
  ServerOptions options = {.listen = "127.0.0.1:0", .http = "", .backend = "cpu"};
  options.transport.bytes = int64_t{64} << 20;  // a third of what is under way
  auto server = Server::Start(options);
  ASSERT_TRUE(server.ok()) << server.status();
  auto client = client::Client::Connect({.target = (*server)->grpc_address(), .channels = kChannels});
  ASSERT_TRUE(client.ok()) << client.status();
  v1::CreateHeadRequest request;
  request.mutable_spec()->set_name("lm");
  request.mutable_spec()->set_hidden_size(kHiddenSize);
  request.mutable_spec()->set_vocab_size(kVocabSize);
  ASSERT_TRUE((*client)->CreateHead(request).ok());

  const std::vector<uint16_t> hidden(kRows * kHiddenSize, 0x3c00);
  const std::vector<int32_t> targets(kRows, 7);
  std::vector<std::vector<uint16_t>> gradients(kInFlight, std::vector<uint16_t>(hidden.size()));
  std::deque<client::PendingLoss> under_way;
  const auto finish_one = [&] {
    const auto result = under_way.front().Wait();
    EXPECT_TRUE(result.ok()) << result.status();
    under_way.pop_front();
  };
  for (size_t id = 0; id < kMicrobatches; ++id) {
    if (under_way.size() == kInFlight) finish_one();
    const client::Microbatch microbatch{.head = "lm",
                                        .step = 0,
                                        .id = id,
                                        .hidden_size = kHiddenSize,
                                        .hidden_dtype = v1::DTYPE_BF16,
                                        .hidden = hidden.data(),
                                        .targets = targets};
    under_way.push_back((*client)->ComputeLossAsync(
        microbatch, {.grad_hidden = gradients[id % kInFlight].data()},
        {.accumulate_gradients = true, .slice_bytes = 1 << 20, .max_attempts = 1}));
  }
  while (!under_way.empty()) finish_one();
}

}  // namespace
}  // namespace lossd::app::testing::system_attacks_test
