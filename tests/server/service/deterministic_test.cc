// SPDX-License-Identifier: Apache-2.0
// A deterministic server, through the network: waiting calls do not stand in each other's way, and training
// gives the same bits whatever order the client sends in.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::deterministic_test {
namespace {

ServerOptions Deterministic() {
  ServerOptions options = SmallServer();
  options.deterministic = true;
  return options;
}

// Two steps of training with the C++ client, microbatches in a random order. Returns the weights, and the
// gradients of the hidden states of each microbatch.
std::pair<std::string, std::vector<std::vector<float>>> Train(const std::vector<SmallRows>& data,
                                                              uint64_t seed) {
  TestServer server(Deterministic());
  std::mt19937_64 rng(seed);
  client::ClientOptions options;
  options.target = server.target();
  options.channels = 1 + static_cast<int>(rng() % 3);
  auto client = client::Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  EXPECT_TRUE((*client)->CreateHead(SmallHead()).ok());
  EXPECT_GT((*client)->DescribeHead("head")->slice_limits().row_grid(), 0u);
  std::vector<std::vector<float>> grads(data.size());
  for (uint64_t step = 0; step < 2; ++step) {
    std::vector<size_t> order(data.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), rng);
    std::vector<client::PendingLoss> pending;
    v1::ApplyStepRequest apply;
    apply.set_head("head");
    apply.set_step(step);
    apply.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
    for (size_t i : order) {
      grads[i].assign(data[i].hidden.size(), 0.0f);
      client::ComputeOptions compute;
      compute.accumulate_gradients = true;
      compute.streams = 1 + static_cast<int>(rng() % 5);
      compute.slice_bytes = 1 + rng() % (64 << 10);
      pending.push_back((*client)->ComputeLossAsync(SmallMicrobatch(data[i], step, i),
                                                    {.grad_hidden = grads[i].data()}, compute));
      apply.add_expected_microbatches(i);
    }
    for (client::PendingLoss& loss : pending) {
      const auto result = loss.Wait();
      EXPECT_TRUE(result.ok()) << result.status();
    }
    const auto applied = (*client)->ApplyStep(apply);
    EXPECT_TRUE(applied.ok()) << applied.status();
  }
  const auto weights = (*client)->ReadTensor("head", v1::PARAM_WEIGHT);
  EXPECT_TRUE(weights.ok()) << weights.status();
  return {Bytes(weights->values), std::move(grads)};
}

TEST(DeterministicServiceTest, TrainingHasTheSameBitsInWhateverOrder) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 rng(seed);
  std::vector<SmallRows> data;
  for (int i = 0; i < 6; ++i) data.push_back(MakeSmallRows(1 + rng() % 3000, rng));
  const auto first = Train(data, seed);
  for (uint64_t run = 1; run < 4; ++run) {
    const auto other = Train(data, seed + run);
    EXPECT_EQ(other.first, first.first) << "weights";
    EXPECT_EQ(other.second, first.second) << "gradients of hidden states";
  }
}

v1::OpenMicrobatch OpenFor(uint64_t id, uint64_t rows) {
  v1::OpenMicrobatch open;
  open.set_head("head");
  open.set_step(0);
  open.set_microbatch_id(id);
  open.set_microbatch_rows(rows);
  open.mutable_rows()->set_end(rows);
  open.set_hidden_dtype(v1::DTYPE_FP32);
  open.set_reduction(v1::REDUCTION_SUM);
  open.set_want_grad_hidden(true);
  open.set_accumulate_gradients(true);
  for (uint64_t i = 0; i < rows; ++i) open.add_targets(static_cast<int32_t>(i % kSmallVocab));
  return open;
}

// All calls share one connection, and those that wait have more to send than its windows hold: the one whose
// turn it is must get through.
TEST(DeterministicServiceTest, WaitingCallsLeaveTheConnectionToTheOneInTurn) {
  ServerOptions options = Deterministic();
  options.slice_bytes = 1 << 20;
  options.staging_bytes = 3 << 20;
  TestServer server(options);
  client::ClientOptions client_options;
  client_options.target = server.target();
  client_options.channels = 1;
  auto client = client::Client::Connect(client_options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->CreateHead(SmallHead()).ok());
  constexpr uint64_t kRows = (6 << 20) / (kSmallHidden * 4);
  constexpr uint64_t kCalls = 16;
  const SmallRows data = {std::vector<float>(kRows * kSmallHidden, 0.25f), std::vector<int32_t>(kRows, 1)};
  std::vector<client::PendingLoss> pending;
  for (uint64_t i = 0; i < kCalls; ++i) {
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    pending.push_back((*client)->ComputeLossAsync(SmallMicrobatch(data, 0, kCalls - 1 - i), {}, compute));
    if (i + 1 < kCalls) {
      EXPECT_FALSE(pending.back().WaitFor(absl::Milliseconds(50)));
    }
  }
  for (client::PendingLoss& loss : pending) {
    const auto result = loss.Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->accumulated_rows, kRows);
  }
}

TEST(DeterministicServiceTest, SaysWhatIsWaitedForAndCleansUp) {
  TestServer server(Deterministic());
  const auto client = server.Connect();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const std::string payload(4 * kSmallHidden * 4, '\0');
  auto early = client->OpenLoss(absl::Milliseconds(300));
  ASSERT_TRUE(early->SendOpen(OpenFor(1, 4)));
  ASSERT_TRUE(early->SendSlice(0, 4, payload));
  while (client->DescribeHead("head")->waiting_slices() == 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(client->DescribeHead("head")->waits_for(), "microbatch 0");
  EXPECT_EQ(early->Finish().status.code(), absl::StatusCode::kDeadlineExceeded);
  while (client->DescribeHead("head")->open_streams() > 0) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(client->DescribeHead("head")->waiting_slices(), 0u);
  for (uint64_t id : {0, 1}) {
    auto call = client->OpenLoss();
    ASSERT_TRUE(call->SendOpen(OpenFor(id, 4)));
    ASSERT_TRUE(call->SendSlice(0, 4, payload));
    const LossAnswers answers = call->Finish();
    EXPECT_TRUE(answers.status.ok()) << answers.status;
  }
}

TEST(DeterministicServiceTest, StopsWhileCallsWait) {
  TestServer server(Deterministic());
  const auto client = server.Connect();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::vector<std::unique_ptr<LossStream>> calls;
  for (uint64_t id : {1, 0, 2}) {
    calls.push_back(client->OpenLoss());
    ASSERT_TRUE(calls.back()->SendOpen(OpenFor(id, 8)));
    ASSERT_TRUE(calls.back()->SendSlice(0, 4, std::string(4 * kSmallHidden * 4, '\0')));
  }
  while (client->DescribeHead("head")->waiting_slices() < 2) absl::SleepFor(absl::Milliseconds(5));
  server.Stop();
  for (auto& call : calls) EXPECT_FALSE(call->Finish().status.ok());
}

TEST(DeterministicServiceTest, DeferredGradientsTakeTheirTurn) {
  ServerOptions server_options = Deterministic();
  server_options.peer_share = 1;  // both microbatches are one peer's
  TestServer server(server_options);
  client::ClientOptions options;
  options.target = server.target();
  auto client = client::Client::Connect(options);
  ASSERT_TRUE(client.ok());
  ASSERT_TRUE((*client)->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(3);
  const SmallRows data = MakeSmallRows(700, rng);
  for (uint64_t id : {0, 1}) {
    const auto kept = (*client)->ComputeLoss(SmallMicrobatch(data, 0, id), {},
                                             {.reduction = v1::REDUCTION_NONE, .retain = true});
    ASSERT_TRUE(kept.ok()) << kept.status();
  }
  const std::vector<float> upstream(700, 0.5f);
  std::vector<std::vector<float>> grads(2, std::vector<float>(data.hidden.size()));
  const auto start = [&](uint64_t id) {
    client::RetainedGradients gradients;
    gradients.head = "head";
    gradients.step = 0;
    gradients.id = id;
    gradients.hidden_size = kSmallHidden;
    gradients.hidden_dtype = v1::DTYPE_FP32;
    gradients.grad_loss = upstream;
    return (*client)->BackwardAsync(gradients, grads[id].data(), {.accumulate_gradients = true});
  };
  client::PendingLoss second = start(1);
  EXPECT_FALSE(second.WaitFor(absl::Milliseconds(100)));
  client::PendingLoss first = start(0);
  EXPECT_TRUE(first.Wait().ok()) << first.Wait().status();
  EXPECT_TRUE(second.Wait().ok()) << second.Wait().status();
  EXPECT_EQ(grads[0], grads[1]);
}

}  // namespace
}  // namespace lossd::app::testing::deterministic_test
