// SPDX-License-Identifier: Apache-2.0
// A trainer that has more bytes under way than the transport's memory holds is slowed down, and nothing else.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <vector>

#include "client/cpp/client.h"
#include "server/app/server.h"

namespace lossd::app::testing::in_flight_test {
namespace {

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
}  // namespace lossd::app::testing::in_flight_test
