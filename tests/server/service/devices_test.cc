// SPDX-License-Identifier: Apache-2.0
// Tests of a server whose heads lie on several devices, here parts of the CPU's threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"
#include "tests/support/raw_http.h"

// ---- Deferred gradients ----
// Losses come first and gradients later: the server trains as one device does, and a deterministic one gives
// the bits of gradients that come directly.

namespace lossd::app::testing::deferred_devices_test {
namespace {

ServerOptions WithDevices(int devices, const std::string& split) {
  ServerOptions options = SmallServer();
  options.split = split;
  options.backend = "cpu";
  options.cpu_devices = devices;
  options.retained_bytes = 4 << 20;
  return options;
}

const std::vector<std::pair<int, std::string>> kLayouts = {
    {2, "rows"}, {3, "rows"}, {4, "rows"}, {2, "vocabulary"}, {3, "vocabulary"}};

using Defers = std::function<bool(size_t)>;
bool All(size_t) { return true; }
bool None(size_t) { return false; }
bool EverySecond(size_t i) { return i % 2 == 0; }

Trained TrainOn(const ServerOptions& options, const std::vector<SmallRows>& data, const Defers& defers,
                bool ones, uint64_t seed) {
  TestServer server(options);
  std::mt19937_64 rng(seed);
  const auto client = Connect(server.target(), 1 + static_cast<int>(rng() % 3));
  EXPECT_TRUE(client->CreateHead(SmallHead()).ok());
  const Trained trained = DeferredTraining(*client, data, ones).Run(3, defers, rng);
  const auto head = client->DescribeHead("head");
  EXPECT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->retained_microbatches(), 0u) << "they end with their step";
  return trained;
}

TEST(DeferredDevicesTest, SeveralDevicesTrainAsOneDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const Trained one = TrainOn(WithDevices(1, "any"), data, EverySecond, /*ones=*/false, seed);
  for (const auto& [devices, split] : kLayouts) {
    SCOPED_TRACE(::testing::Message() << devices << " by " << split);
    const Trained got = TrainOn(WithDevices(devices, split), data, EverySecond, /*ones=*/false, seed + 1);
    for (size_t i = 0; i < data.size(); ++i) ExpectNear(got.grads[i], one.grads[i], 1e-4);
    ASSERT_EQ(got.losses.size(), one.losses.size());
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], one.losses[i], 1e-4 * (1.0 + std::fabs(one.losses[i])));
    }
    for (size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(got.norms[i], one.norms[i], 1e-4 * one.norms[i]);
    for (size_t i = 0; i < one.tensors.size(); ++i) ExpectNear(got.tensors[i], one.tensors[i], 1e-3);
  }
}

TEST(DeferredDevicesTest, DeterministicDevicesGiveTheBitsOfGradientsThatComeDirectly) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  std::vector<std::pair<int, std::string>> layouts = kLayouts;
  layouts.emplace_back(1, "any");
  for (const auto& [devices, split] : layouts) {
    SCOPED_TRACE(::testing::Message() << devices << " by " << split);
    ServerOptions options = WithDevices(devices, split);
    options.deterministic = true;
    const Trained direct = TrainOn(options, data, None, /*ones=*/true, seed);
    for (const Defers& defers : {Defers(All), Defers(EverySecond)}) {
      const Trained other = TrainOn(options, data, defers, /*ones=*/true, rng());
      EXPECT_EQ(other.tensors, direct.tensors);
      EXPECT_EQ(other.grads, direct.grads);
      EXPECT_EQ(other.norms, direct.norms);
    }
  }
}

}  // namespace
}  // namespace lossd::app::testing::deferred_devices_test

// ---- Direct gradients ----
// A server with several devices trains as one device does, deterministically if it is to, and its checkpoints
// load into any number of devices.

namespace lossd::app::testing::devices_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

ServerOptions WithDevices(int devices, const std::string& split = "any") {
  ServerOptions options = SmallServer();
  options.split = split;
  options.backend = "cpu";
  options.cpu_devices = devices;
  return options;
}

// Several devices, and what they divide; by vocabulary those of each replica.
struct Layout {
  int devices = 1;
  std::string split;
  int replicas = 1;

  ServerOptions Options() const {
    ServerOptions options = WithDevices(devices, split);
    options.replicas = replicas;
    return options;
  }
  std::string Name() const { return absl::StrCat(replicas, " times ", devices / replicas, " by ", split); }
};

std::vector<Layout> Layouts() {
  return {{2, "rows"},       {3, "rows"},       {2, "vocabulary"},
          {3, "vocabulary"}, {4, "vocabulary"}, {4, "vocabulary", 2}};
}

Trained TrainOn(const ServerOptions& options, const std::vector<SmallRows>& data, uint64_t seed,
                int steps = 3) {
  TestServer server(options);
  std::mt19937_64 rng(seed);
  const auto client = Connect(server.target(), 1 + static_cast<int>(rng() % 3));
  EXPECT_TRUE(client->CreateHead(SmallHead()).ok());
  Trained trained;
  Train(*client, data, 0, steps, rng, trained);
  return trained;
}

// `gradients`: how far hidden gradients of the last step may be apart. AdamW's first updates have the size of
// the learning rate however small a gradient is, so that rounding of the smallest ones shows in the weights
// of the next step.
void ExpectSeveralDevicesTrainAsOne(int steps, double gradients) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const Trained one = TrainOn(WithDevices(1), data, seed, steps);
  for (const Layout& layout : Layouts()) {
    SCOPED_TRACE(layout.Name());
    const Trained got = TrainOn(layout.Options(), data, seed + 1, steps);
    for (size_t i = 0; i < data.size(); ++i) ExpectNear(got.grads[i], one.grads[i], gradients);
    for (size_t i = 0; i < one.losses.size(); ++i) {
      EXPECT_NEAR(got.losses[i], one.losses[i], 1e-5 * (1.0 + std::fabs(one.losses[i])));
    }
    for (size_t i = 0; i < one.norms.size(); ++i)
      EXPECT_NEAR(got.norms[i], one.norms[i], 1e-4 * one.norms[i]);
    for (size_t i = 0; i < one.tensors.size(); ++i) ExpectNear(got.tensors[i], one.tensors[i], 1e-3);
  }
}

TEST(DevicesServiceTest, SeveralDevicesTrainAsOneDoes) {
  ExpectSeveralDevicesTrainAsOne(1, 1e-4);
  ExpectSeveralDevicesTrainAsOne(3, 1e-3);
}

TEST(DevicesServiceTest, DeterministicDevicesGiveTheSameBitsInWhateverOrderAndSlices) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  for (const Layout& layout : Layouts()) {
    SCOPED_TRACE(layout.Name());
    ServerOptions options = layout.Options();
    options.deterministic = true;
    const Trained first = TrainOn(options, data, seed);
    for (uint64_t run = 1; run < 3; ++run) {
      const Trained other = TrainOn(options, data, seed + run);
      EXPECT_EQ(other.tensors, first.tensors);
      EXPECT_EQ(other.grads, first.grads);
      EXPECT_EQ(other.norms, first.norms);
    }
  }
}

TEST(DevicesServiceTest, CheckpointsLoadIntoAnyNumberOfDevices) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const std::vector<Layout> layouts = {
      {1, "any"}, {3, "rows"}, {2, "vocabulary"}, {3, "vocabulary"}, {4, "vocabulary", 2}};
  for (const Layout& from : layouts) {
    TestServer saved(from.Options());
    const auto client = Connect(saved.target());
    ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
    Trained before;
    Train(*client, data, 0, 2, rng, before);
    ASSERT_TRUE(client->SaveCheckpoint("head", "first").ok());
    Trained after;
    Train(*client, data, 2, 3, rng, after);
    for (const Layout& into : layouts) {
      SCOPED_TRACE(absl::StrCat("from ", from.Name(), " into ", into.Name()));
      TestServer loaded(into.Options());
      std::filesystem::copy(saved.checkpoint_directory(), loaded.checkpoint_directory(),
                            std::filesystem::copy_options::recursive);
      const auto other = Connect(loaded.target());
      const auto head = other->LoadCheckpoint("head/first", "head");
      ASSERT_TRUE(head.ok()) << head.status();
      EXPECT_EQ(Tensors(*other), before.tensors) << "bit for bit";
      Trained next;
      Train(*other, data, 2, 3, rng, next);
      for (size_t i = 0; i < after.tensors.size(); ++i) ExpectNear(next.tensors[i], after.tensors[i], 1e-3);
    }
  }
}

TEST(DevicesServiceTest, GetServerSaysWhatCarriesTheSums) {
  for (const auto& [devices, collectives] :
       std::vector<std::pair<int, std::string>>{{1, ""}, {2, "threads"}}) {
    TestServer server(WithDevices(devices));
    const auto description = Connect(server.target())->GetServer();
    ASSERT_TRUE(description.ok()) << description.status();
    EXPECT_EQ(description->collectives(), collectives);
  }
}

// Numbered as ranks, so that a page and a dashboard are the same for devices of one process and of several.
TEST(DevicesServiceTest, MetricsCountWhatEachDeviceDoes) {
  double rows_of_data = 0;  // the same both times
  for (const std::string split : {"rows", "vocabulary"}) {
    SCOPED_TRACE(split);
    ServerOptions options = WithDevices(2, split);
    options.http = "127.0.0.1:0";
    TestServer server(options);
    const auto client = Connect(server.target());
    ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
    std::mt19937_64 rng(1);
    Trained trained;
    Train(*client, {MakeSmallRows(1400, rng)}, 0, 1, rng, trained);
    const std::string metrics = test::HttpGet(server.server().http_address(), "/metrics");
    const bool by_rows = split == "rows";
    double rows = 0;
    for (int device = 0; device < 2; ++device) {
      SCOPED_TRACE(device);
      const std::string of_device = absl::StrCat("{rank=\"", device, "\"}");
      EXPECT_TRUE(absl::StrContains(metrics, absl::StrCat("\nlossd_rank_up{rank=\"", device, "\"")));
      EXPECT_GT(test::ValueOf(metrics, absl::StrCat("lossd_rank_busy_seconds_total", of_device)), 0);
      EXPECT_GT(test::ValueOf(metrics, absl::StrCat("lossd_rank_chunks_total", of_device)), 0);
      rows += test::ValueOf(metrics, absl::StrCat("lossd_rank_rows_total", of_device));
      for (const char* const of_step : {"sum_gradients", "spread_values"}) {
        EXPECT_EQ(test::ValueOf(metrics, test::CollectiveSeconds(device, of_step)) > 0, by_rows) << of_step;
      }
      for (const char* const of_chunk : {"row_statistics", "hidden_gradients"}) {
        EXPECT_EQ(test::ValueOf(metrics, test::CollectiveSeconds(device, of_chunk)) > 0, !by_rows)
            << of_chunk;
      }
    }
    if (by_rows) {
      rows_of_data = rows;
      EXPECT_GT(rows, 0);
    } else {
      EXPECT_EQ(rows, 2 * rows_of_data) << "each device computes all rows";
    }
  }
  ServerOptions one = WithDevices(1);
  one.http = "127.0.0.1:0";
  TestServer alone(one);
  EXPECT_FALSE(absl::StrContains(test::HttpGet(alone.server().http_address(), "/metrics"), "lossd_rank_"));
}

TEST(DevicesServiceTest, EachDeviceHasAllWeightsAndItsPartOfTheMoments) {
  TestServer one(WithDevices(1));
  TestServer three(WithDevices(3));
  const auto of_one = Connect(one.target())->CreateHead(SmallHead());
  const auto of_three = Connect(three.target())->CreateHead(SmallHead());
  ASSERT_TRUE(of_one.ok() && of_three.ok());
  EXPECT_EQ(of_three->memory().weights(), 3 * of_one->memory().weights());
  EXPECT_EQ(of_three->memory().gradients(), 3 * of_one->memory().gradients());
  EXPECT_LT(of_three->memory().optimizer(), of_one->memory().optimizer() + 1024);  // alignment
  EXPECT_EQ(of_three->chunk_rows(), 3 * of_one->chunk_rows());
  EXPECT_EQ(of_three->slice_limits().max_rows(), of_one->slice_limits().max_rows());
}

TEST(DevicesServiceTest, ByVocabularyTheDevicesTogetherHoldAHeadOnce) {
  TestServer one(WithDevices(1));
  TestServer three(WithDevices(3));
  v1::CreateHeadRequest request = SmallHead();
  request.mutable_spec()->set_split(v1::SPLIT_VOCABULARY);
  request.mutable_spec()->set_vocab_size(3000);  // logits take most of the workspace
  const auto of_one = Connect(one.target())->CreateHead(request);
  const auto of_three = Connect(three.target())->CreateHead(request);
  ASSERT_TRUE(of_one.ok() && of_three.ok()) << of_one.status() << of_three.status();
  EXPECT_EQ(of_three->spec().split(), v1::SPLIT_VOCABULARY);
  EXPECT_LE(of_three->memory().weights(), of_one->memory().weights() + 3 * 1024);  // alignment
  EXPECT_LE(of_three->memory().gradients(), of_one->memory().gradients() + 3 * 1024);
  EXPECT_LE(of_three->memory().optimizer(), of_one->memory().optimizer() + 3 * 1024);
  EXPECT_GE(of_three->chunk_rows(), of_one->chunk_rows());
  request.mutable_spec()->set_name("few");
  request.mutable_spec()->set_vocab_size(2);
  const auto few = Connect(three.target())->CreateHead(request);
  EXPECT_EQ(few.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(few.status().message()), HasSubstr("vocab_size must be at least 3"));
}

TEST(DevicesServiceTest, SharesDivideTheClasses) {
  TestServer three(WithDevices(3));
  const auto client = Connect(three.target());
  v1::CreateHeadRequest request = SmallHead();
  for (int i = 0; i < 3; ++i) request.mutable_spec()->add_shares(0);
  EXPECT_THAT(std::string(client->CreateHead(request).status().message()),
              HasSubstr("shares must have a sum"));
  request.mutable_spec()->set_shares(0, 5);
  request.mutable_spec()->set_shares(2, 2);
  const auto head = client->CreateHead(request);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_THAT(head->spec().shares(), ElementsAre(5, 0, 2));
  request.mutable_spec()->add_shares(1);
  request.mutable_spec()->set_name("other");
  const absl::Status refused = client->CreateHead(request).status();
  EXPECT_THAT(std::string(refused.message()), HasSubstr("spec.shares must have one entry for each"));
}

TEST(DevicesServiceTest, ReplicasDivideTheDevices) {
  TestServer four(WithDevices(4));
  const auto client = Connect(four.target());
  v1::CreateHeadRequest request = SmallHead();
  request.mutable_spec()->set_replicas(3);
  const auto refusal = [&] { return std::string(client->CreateHead(request).status().message()); };
  EXPECT_THAT(refusal(), HasSubstr("spec.replicas must divide the server's devices, 4"));
  request.mutable_spec()->set_replicas(2);
  request.mutable_spec()->add_shares(1);
  EXPECT_THAT(refusal(),
              HasSubstr("spec.shares must have one entry for each of the devices of a replica, 2"));
  request.mutable_spec()->add_shares(4);
  const auto head = client->CreateHead(request);
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->spec().replicas(), 2u);
  std::mt19937_64 rng(1);
  Trained trained;
  Train(*client, {MakeSmallRows(1400, rng)}, 0, 1, rng, trained);
  ASSERT_TRUE(client->SaveCheckpoint("head", "saved").ok());
  // The same devices, more of them, such as replicas do not divide, and one.
  for (const auto& [devices, replicas, shares] :
       std::vector<std::tuple<int, uint32_t, int>>{{4, 2, 2}, {6, 2, 0}, {2, 2, 0}, {3, 0, 0}, {1, 0, 0}}) {
    SCOPED_TRACE(devices);
    TestServer loaded(WithDevices(devices));
    std::filesystem::copy(four.checkpoint_directory(), loaded.checkpoint_directory(),
                          std::filesystem::copy_options::recursive);
    const auto again = Connect(loaded.target())->LoadCheckpoint("head/saved", "head");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(again->spec().replicas(), replicas);
    EXPECT_EQ(again->spec().shares_size(), shares);
    EXPECT_EQ(Tensors(*Connect(loaded.target())), trained.tensors);
  }
}

v1::SetSharesRequest SharesOf(const std::vector<uint32_t>& shares, const std::string& id = "") {
  v1::SetSharesRequest request;
  request.set_head("head");
  request.mutable_shares()->Add(shares.begin(), shares.end());
  request.set_change_id(id);
  return request;
}

TEST(DevicesServiceTest, SharesChangeBetweenSteps) {
  TestServer three(WithDevices(3, "vocabulary"));
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  const std::vector<SmallRows> data = RandomData(rng);
  const auto client = Connect(three.target(), 2);
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  Trained trained;
  Train(*client, data, 0, 2, rng, trained);
  const auto before = *client->DescribeHead("head");
  const auto changed = client->SetShares(SharesOf({5, 0, 2}));
  ASSERT_TRUE(changed.ok()) << changed.status();
  EXPECT_FALSE(changed->repeated_call());
  EXPECT_THAT(changed->head().spec().shares(), ElementsAre(5, 0, 2));
  EXPECT_EQ(Tensors(*client), trained.tensors);
  EXPECT_EQ(changed->head().state().step(), 2);
  EXPECT_EQ(changed->head().state().generation(), before.state().generation());
  EXPECT_EQ(changed->head().updates(), before.updates());
  ASSERT_EQ(changed->head().devices_size(), 3);
  uint64_t classes = 0;
  for (const v1::HeadDevice& device : changed->head().devices()) classes += device.classes();
  EXPECT_EQ(classes, before.spec().vocab_size());
  EXPECT_EQ(changed->head().devices(1).classes(), 0);
  EXPECT_EQ(changed->head().devices(0).share(), 5);
  EXPECT_GT(changed->head().devices(0).rows(), 0);
  EXPECT_GT(changed->head().devices(0).busy_seconds(), 0);
  EXPECT_GE(changed->head().devices(0).busy_seconds(), changed->head().devices(0).exchange_seconds());

  // The training goes on as on one device.
  Trained on;
  Train(*client, data, 2, 4, rng, on);
  TestServer one(WithDevices(1));
  const auto other = Connect(one.target());
  ASSERT_TRUE(other->CreateHead(SmallHead()).ok());
  Trained of_one;
  std::mt19937_64 again(seed);
  Train(*other, data, 0, 4, again, of_one);
  ExpectNear(on.tensors[0], of_one.tensors[0], 1e-3);
}

TEST(DevicesServiceTest, SharesDoNotChangeWithinAStep) {
  TestServer three(WithDevices(3, "vocabulary"));
  std::mt19937_64 rng(7);
  const auto client = Connect(three.target());
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const SmallRows rows = MakeSmallRows(40, rng);
  client::ComputeOptions accumulate;
  accumulate.accumulate_gradients = true;
  ASSERT_TRUE(client->ComputeLossAsync(SmallMicrobatch(rows, 0, 0), {}, accumulate).Wait().ok());
  const absl::Status refused = client->SetShares(SharesOf({5, 0, 2})).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("at step 0 head head has accumulated rows: "));
  EXPECT_TRUE(client->DescribeHead("head")->spec().shares().empty());
  ASSERT_TRUE(client->ApplyStep(AdamStep(0, 1)).ok());
  EXPECT_TRUE(client->SetShares(SharesOf({5, 0, 2})).ok());
}

TEST(DevicesServiceTest, AChangeOfSharesIsMadeOnce) {
  TestServer three(WithDevices(3, "vocabulary"));
  const auto client = Connect(three.target());
  const auto head = client->CreateHead(SmallHead());
  ASSERT_TRUE(head.ok()) << head.status();
  ASSERT_TRUE(client->SetShares(SharesOf({5, 0, 2}, "a")).ok());
  ASSERT_TRUE(client->SetShares(SharesOf({}, "b")).ok());
  const auto repeated = client->SetShares(SharesOf({5, 0, 2}, "a"));
  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->repeated_call());
  EXPECT_THAT(repeated->head().spec().shares(), ElementsAre(5, 0, 2)) << "the stored answer";
  EXPECT_TRUE(client->DescribeHead("head")->spec().shares().empty()) << "and nothing is done";
  const absl::Status other = client->SetShares(SharesOf({1, 1, 1}, "a")).status();
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(other.message()), HasSubstr("change_id"));
  v1::SetSharesRequest elsewhere = SharesOf({1, 1, 1}, "c");
  elsewhere.set_incarnation(head->state().incarnation() + 1);
  EXPECT_FALSE(client->SetShares(elsewhere).ok());
  EXPECT_THAT(std::string(client->SetShares(SharesOf({1, 1})).status().message()),
              HasSubstr("shares must have one entry for each"));
  EXPECT_THAT(std::string(client->SetShares(SharesOf({1, 1, 1u << 31})).status().message()),
              HasSubstr("shares[2]"));
}

TEST(DevicesServiceTest, OnlyHeadsThatAreDividedHaveDevicesAndShares) {
  TestServer three(WithDevices(3, "rows"));
  const auto client = Connect(three.target());
  const auto head = client->CreateHead(SmallHead());
  ASSERT_TRUE(head.ok()) << head.status();
  EXPECT_EQ(head->devices_size(), 0);
  EXPECT_EQ(client->SetShares(SharesOf({1, 1, 1})).status().code(), absl::StatusCode::kFailedPrecondition);
  v1::SetSharesRequest nowhere = SharesOf({1, 1, 1});
  nowhere.set_head("none");
  EXPECT_EQ(client->SetShares(nowhere).status().code(), absl::StatusCode::kNotFound);
}

TEST(DevicesServiceTest, ADeterministicServerKeepsItsGroupsOfRows) {
  ServerOptions options = WithDevices(3, "vocabulary");
  options.deterministic = true;
  TestServer three(options);
  const auto client = Connect(three.target());
  const auto head = client->CreateHead(SmallHead());
  ASSERT_TRUE(head.ok()) << head.status();
  const auto changed = client->SetShares(SharesOf({5, 0, 2}));
  if (changed.ok()) {
    EXPECT_EQ(changed->head().slice_limits().row_grid(), head->slice_limits().row_grid());
  } else {
    EXPECT_EQ(changed.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(changed.status().message()), HasSubstr("groups rows by"));
  }
}

TEST(DevicesServiceTest, BadNumbersAreRefusedAtTheStart) {
  const auto refusal = [](const ServerOptions& options) {
    const auto server = Server::Start(options);
    EXPECT_EQ(server.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(server.status().message());
  };
  EXPECT_THAT(refusal(WithDevices(0)), HasSubstr("cpu_devices must be at least 1, got 0"));
  EXPECT_THAT(refusal(WithDevices(100000)), HasSubstr("cpu_devices must be in [1, 1024], got 100000"));
  ServerOptions options = WithDevices(1);
  options.devices = "0,1";
  EXPECT_THAT(refusal(options),
              HasSubstr("devices must be empty with backend cpu, which has cpu_devices, got 0,1"));
  options.backend = "cuda";
  options.device = "1";
  EXPECT_THAT(refusal(options), HasSubstr("devices must be empty where device is given, 1, got 0,1"));
  options = WithDevices(2);
  options.backend = "cuda";
  EXPECT_THAT(refusal(options), HasSubstr("cpu_devices must be 1 with backend cuda"));
  options = WithDevices(2);
  options.split = "columns";
  EXPECT_THAT(refusal(options), HasSubstr("split must be any, rows or vocabulary, got columns"));
  options = WithDevices(4);
  options.replicas = 3;
  EXPECT_THAT(refusal(options), HasSubstr("replicas must be at least 1 and divide the devices, 4, got 3"));
  options = WithDevices(1);
  options.replicas = 2;
  EXPECT_THAT(refusal(options), HasSubstr("replicas must be at least 1, and 1 on one device, got 2"));
}

}  // namespace
}  // namespace lossd::app::testing::devices_test
