// SPDX-License-Identifier: Apache-2.0
// Slices in memory that client and server share: the same results as in messages, whatever the client does
// with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "kernels/clocks/clock.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::shared_memory_test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kRowBytes = kSmallHidden * sizeof(float);

std::unique_ptr<client::Client> Connect(const std::string& target, const std::string& transport,
                                        int64_t bytes = 1 << 20) {
  client::ClientOptions options;
  options.target = target;
  options.channels = 2;
  options.transport = transport;
  options.shared_memory_bytes = bytes;
  auto client = client::Client::Connect(options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

struct Trained {
  std::vector<std::vector<float>> grads;
  std::vector<std::vector<float>> losses;
  std::vector<float> weight;
};

// Two steps, one microbatch at a time, each in slices of another size.
Trained Train(const ServerOptions& options, const std::string& transport, int64_t bytes) {
  const TestServer server(options);
  const auto client = Connect(server.target(), transport, bytes);
  EXPECT_TRUE(client->CreateHead(SmallHead()).ok());
  Trained trained;
  std::mt19937_64 rng(3);
  for (uint64_t step = 0; step < 2; ++step) {
    for (uint64_t id = 0; id < 4; ++id) {
      const SmallRows rows = MakeSmallRows(200 + 50 * id, rng);
      trained.grads.emplace_back(rows.hidden.size());
      trained.losses.emplace_back(rows.targets.size());
      client::ComputeOptions compute;
      compute.accumulate_gradients = true;
      compute.streams = 1;
      compute.slice_bytes = kRowBytes * (7 + 20 * id);
      const auto result = client->ComputeLoss(
          SmallMicrobatch(rows, step, id),
          {.grad_hidden = trained.grads.back().data(), .row_loss = absl::MakeSpan(trained.losses.back())},
          compute);
      EXPECT_TRUE(result.ok()) << result.status();
    }
    v1::ApplyStepRequest apply;
    apply.set_head("head");
    apply.set_step(step);
    apply.mutable_optimizer()->mutable_sgd()->set_learning_rate(0.5);
    EXPECT_TRUE(client->ApplyStep(apply).ok());
  }
  trained.weight = client->ReadTensor("head", v1::PARAM_WEIGHT)->values;
  EXPECT_EQ(client->transport().transport, transport) << client->transport().reason;
  return trained;
}

class EveryOrderTest : public ::testing::TestWithParam<bool> {
 protected:
  ServerOptions Options() const {
    ServerOptions options = SmallServer();
    options.deterministic = GetParam();
    return options;
  }
};

// A deterministic server gives the same bits; else rows are computed together as they come.
TEST_P(EveryOrderTest, TrainsAsInMessages) {
  const Trained in_messages = Train(Options(), "grpc", 1 << 20);
  for (const int64_t bytes : {1 << 20, 16 << 10, 4 << 10}) {
    const Trained shared = Train(Options(), "shared_memory", bytes);
    ASSERT_EQ(shared.grads.size(), in_messages.grads.size());
    const auto compare = [](const std::vector<float>& a, const std::vector<float>& b) {
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], GetParam() ? 0.0 : 1e-4) << i;
    };
    for (size_t i = 0; i < shared.grads.size(); ++i) {
      compare(shared.grads[i], in_messages.grads[i]);
      compare(shared.losses[i], in_messages.losses[i]);
    }
    compare(shared.weight, in_messages.weight);
  }
}

// Many microbatches under way in a region that has room for a few slices.
TEST_P(EveryOrderTest, ManyCallsShareALittleRegion) {
  const TestServer server(Options());
  const auto client = Connect(server.target(), "shared_memory", 16 << 10);
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(4);
  const SmallRows rows = MakeSmallRows(600, rng);
  std::vector<std::vector<float>> grads(8, std::vector<float>(rows.hidden.size()));
  std::vector<client::PendingLoss> pending;
  for (uint64_t id = 0; id < grads.size(); ++id) {
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    compute.streams = 2;
    compute.slice_bytes = kRowBytes * 10;
    pending.push_back(
        client->ComputeLossAsync(SmallMicrobatch(rows, 0, id), {.grad_hidden = grads[id].data()}, compute));
  }
  for (client::PendingLoss& one : pending) {
    const auto result = one.Wait();
    ASSERT_TRUE(result.ok()) << result.status();
  }
  for (const auto& one : grads) {
    for (size_t i = 0; i < one.size(); ++i) ASSERT_NEAR(one[i], grads[0][i], 1e-4);
  }
}

// A slice in the region may be larger than a message; one that finds no room there is cut.
TEST_P(EveryOrderTest, SlicesAreLargerThanMessagesWhereThereIsRoom) {
  ServerOptions options = Options();
  options.slice_bytes = 10 * kRowBytes;
  const TestServer server(options);
  const auto in_messages = Connect(server.target(), "grpc");
  ASSERT_TRUE(in_messages->CreateHead(SmallHead()).ok());
  EXPECT_GT((*in_messages->DescribeHead("head")).slice_limits().max_bytes_in_region(), 600 * kRowBytes);
  std::mt19937_64 rng(9);
  const SmallRows rows = MakeSmallRows(600, rng);
  std::vector<float> want(rows.hidden.size());
  ASSERT_TRUE(in_messages->ComputeLoss(SmallMicrobatch(rows, 0, 0), {.grad_hidden = want.data()}, {}).ok());
  uint64_t id = 0;
  for (const int64_t bytes : {1 << 20, 128 << 10, 32 << 10}) {
    const auto client = Connect(server.target(), "shared_memory", bytes);
    std::vector<std::vector<float>> grads(6, std::vector<float>(want.size(), -1.0f));
    std::vector<client::PendingLoss> pending;
    for (auto& one : grads) {
      client::ComputeOptions compute;
      compute.accumulate_gradients = true;
      compute.streams = 2;
      pending.push_back(
          client->ComputeLossAsync(SmallMicrobatch(rows, 0, id++), {.grad_hidden = one.data()}, compute));
    }
    for (client::PendingLoss& one : pending) {
      const auto result = one.Wait();
      ASSERT_TRUE(result.ok()) << result.status();
    }
    for (const auto& one : grads) {
      for (size_t i = 0; i < one.size(); ++i) ASSERT_NEAR(one[i], want[i], 1e-4) << bytes << " " << i;
    }
  }
}

// Calls that are cancelled leave ranges that the server still writes to; nothing of that reaches later calls.
TEST_P(EveryOrderTest, CancelledCallsSpoilNothing) {
  const TestServer server(Options());
  const auto client = Connect(server.target(), "shared_memory", 64 << 10);
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  std::mt19937_64 rng(6);
  const SmallRows rows = MakeSmallRows(400, rng), others = MakeSmallRows(400, rng);
  std::vector<float> want(rows.hidden.size()), got(rows.hidden.size()), unused(rows.hidden.size());
  client::ComputeOptions compute;
  compute.slice_bytes = kRowBytes * 5;
  client::Microbatch microbatch = SmallMicrobatch(rows, 0, 1);
  ASSERT_TRUE(client->ComputeLoss(microbatch, {.grad_hidden = want.data()}, compute).ok());
  for (int i = 0; i < 30; ++i) {
    client::PendingLoss given_up =
        client->ComputeLossAsync(SmallMicrobatch(others, 0, 2), {.grad_hidden = unused.data()}, compute);
    absl::SleepFor(absl::Microseconds(rng() % 2000));
    given_up.Cancel();
    const auto result = client->ComputeLoss(microbatch, {.grad_hidden = got.data()}, compute);
    ASSERT_TRUE(result.ok()) << result.status();
    for (size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], want[k], 1e-4) << i;
    (void)given_up.Wait();
  }
}

INSTANTIATE_TEST_SUITE_P(Order, EveryOrderTest, ::testing::Bool(), [](const auto& parameter) {
  return parameter.param ? "Deterministic" : "ByArrival";
});

// Retained rows, and the gradients that a client gets for them with ones as upstream gradients.
struct Retained {
  explicit Retained(client::Client& client) {
    std::mt19937_64 rng(7);
    rows = MakeSmallRows(400, rng);
    want.resize(rows.hidden.size());
    client::ComputeOptions sum;
    sum.reduction = v1::REDUCTION_SUM;
    EXPECT_TRUE(client.ComputeLoss(SmallMicrobatch(rows, 0, 1), {.grad_hidden = want.data()}, sum).ok());
    client::ComputeOptions retain;
    retain.reduction = v1::REDUCTION_NONE;
    retain.retain = true;
    EXPECT_TRUE(client.ComputeLoss(SmallMicrobatch(rows, 0, 2), {}, retain).ok());
  }
  absl::StatusOr<client::LossResult> Backward(client::Client& client, std::vector<float>* got,
                                              const client::BackwardOptions& options = {}) {
    const std::vector<float> upstream(rows.targets.size(), 1.0f);
    got->assign(rows.hidden.size(), -1.0f);
    client::RetainedGradients gradients;
    gradients.head = "head";
    gradients.step = 0;
    gradients.id = 2;
    gradients.hidden_size = kSmallHidden;
    gradients.hidden_dtype = v1::DTYPE_FP32;
    gradients.grad_loss = upstream;
    return client.Backward(gradients, got->data(), options);
  }
  void ExpectWanted(const std::vector<float>& got) const {
    for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-4) << i;
  }

  SmallRows rows;
  std::vector<float> want;
};

// A client that takes no message with more than a few rows gets what lies in the region alone.
std::unique_ptr<client::Client> ConnectForSmallMessages(const std::string& target) {
  client::ClientOptions options;
  options.target = target;
  options.channels = 1;
  options.transport = "shared_memory";
  options.max_message_bytes = 4 << 10;
  options.retry.max_attempts = 1;
  return client::Client::Connect(options).value();
}

TEST_P(EveryOrderTest, GradientsOfRetainedRowsComeInTheRegion) {
  const TestServer server(Options());
  const auto client = Connect(server.target(), "grpc");
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  Retained retained(*client);
  std::vector<float> got;
  const auto shared = ConnectForSmallMessages(server.target());
  for (const bool accumulate : {false, !GetParam()}) {  // a deterministic server waits for ids before it
    const auto result = retained.Backward(*shared, &got, {.accumulate_gradients = accumulate, .streams = 1});
    ASSERT_TRUE(result.ok()) << result.status();
    retained.ExpectWanted(got);
  }
  // So it does not come in messages.
  client::ClientOptions options = shared->options();
  options.transport = "grpc";
  EXPECT_FALSE(retained.Backward(*client::Client::Connect(options).value(), &got, {.streams = 1}).ok());
}

// What the part of the region has no room for comes in messages.
TEST_P(EveryOrderTest, GradientsOfRetainedRowsFillALittleRegion) {
  const TestServer server(Options());
  const auto client = Connect(server.target(), "grpc");
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  Retained retained(*client);
  for (const int64_t bytes : {64 << 10, 16 << 10, 4 << 10, 1 << 10, 256}) {
    const auto shared = Connect(server.target(), "shared_memory", bytes);
    std::vector<float> got;
    for (int repeat = 0; repeat < 8; ++repeat) {  // the room is given back each time
      const auto result = retained.Backward(*shared, &got, {.streams = 1 + repeat % 3});
      ASSERT_TRUE(result.ok()) << result.status();
      retained.ExpectWanted(got);
    }
    EXPECT_EQ(shared->transport().transport, "shared_memory") << shared->transport().reason;
  }
}

TEST(SharedMemoryClientTest, TensorsAreReadThroughTheRegion) {
  const TestServer server;
  const auto client = Connect(server.target(), "grpc");
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_vocab_size(20001);  // 1.9 MB
  ASSERT_TRUE(client->CreateHead(head).ok());
  const auto want = client->ReadTensor("head", v1::PARAM_WEIGHT);
  ASSERT_TRUE(want.ok()) << want.status();
  const auto in_region = ConnectForSmallMessages(server.target())->ReadTensor("head", v1::PARAM_WEIGHT);
  ASSERT_TRUE(in_region.ok()) << in_region.status();
  EXPECT_TRUE(in_region->values == want->values);
  for (const int64_t bytes : {4 << 20, 1 << 20, 100 << 10, 256}) {  // one call, several, and messages
    const auto shared = Connect(server.target(), "shared_memory", bytes);
    for (int repeat = 0; repeat < 3; ++repeat) {
      const auto read = shared->ReadTensor("head", v1::PARAM_WEIGHT);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_TRUE(read->values == want->values);
    }
    v1::ReadTensorRequest some;
    some.set_head("head");
    some.set_param(v1::PARAM_WEIGHT);
    some.set_dtype(v1::DTYPE_FP16);
    some.mutable_rows()->set_begin(17);
    some.mutable_rows()->set_end(20001);
    std::vector<char> wanted(2 * kSmallHidden * (20001 - 17)), got(wanted.size());
    ASSERT_TRUE(client->ReadTensor(some, absl::MakeSpan(wanted)).ok());
    ASSERT_TRUE(shared->ReadTensor(some, absl::MakeSpan(got)).ok());
    EXPECT_TRUE(got == wanted);
    // A size that is not the rows' is told as it is without a region.
    got.resize(4 << 20);
    const absl::Status refused = shared->ReadTensor(some, absl::MakeSpan(got)).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_EQ(client::ErrorDetailOf(refused)->field(), "out") << refused;
  }
}

// Pieces of several versions are not taken for one.
TEST(SharedMemoryClientTest, TensorsThatChangeAreOfOneVersion) {
  const TestServer server;
  const auto client = Connect(server.target(), "grpc");
  v1::CreateHeadRequest head = SmallHead();
  head.mutable_spec()->set_vocab_size(20001);
  ASSERT_TRUE(client->CreateHead(head).ok());
  const std::vector<float> values[] = {std::vector<float>(20001 * kSmallHidden, 1.0f),
                                       std::vector<float>(20001 * kSmallHidden, 2.0f)};
  ASSERT_TRUE(client->WriteTensor("head", v1::PARAM_WEIGHT, values[0]).ok());
  client::ClientOptions options;
  options.target = server.target();
  options.transport = "shared_memory";
  options.shared_memory_bytes = 256 << 10;
  options.retry.max_attempts = 1;
  const auto shared = client::Client::Connect(options).value();
  std::atomic<bool> done{false};
  std::thread writer([&] {
    for (int i = 0; i < 40; ++i) {
      EXPECT_TRUE(client->WriteTensor("head", v1::PARAM_WEIGHT, values[i % 2]).ok());
      absl::SleepFor(absl::Milliseconds(i));
    }
    done = true;
  });
  int read_whole = 0;
  for (bool last = false; !last;) {
    last = done;  // then nothing changes any more
    const auto read = shared->ReadTensor("head", v1::PARAM_WEIGHT);
    if (!read.ok()) {
      const absl::Status& status = read.status();
      EXPECT_TRUE(!last && (absl::IsAborted(status) || absl::IsUnavailable(status))) << status;
      continue;
    }
    ++read_whole;
    const float first = read->values[0];
    EXPECT_TRUE(
        std::all_of(read->values.begin(), read->values.end(), [first](float x) { return x == first; }));
  }
  EXPECT_GE(read_whole, 1);
  writer.join();
}

TEST(SharedMemoryClientTest, SaysWhatItTookAndWhy) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 0;
  const TestServer without(options);
  EXPECT_FALSE(client::Client::Connect({.target = without.target(), .transport = "shared_memory"}).ok());
  std::mt19937_64 rng(8);
  const SmallRows rows = MakeSmallRows(10, rng);
  const auto automatic = Connect(without.target(), "auto");
  EXPECT_EQ(automatic->transport().reason, "nothing was sent yet");
  ASSERT_TRUE(automatic->CreateHead(SmallHead()).ok());
  ASSERT_TRUE(automatic->ComputeLoss(SmallMicrobatch(rows, 0, 1), {}).ok());
  EXPECT_EQ(automatic->transport().transport, "grpc");
  EXPECT_THAT(automatic->transport().reason, HasSubstr("offers none"));
  EXPECT_THAT(std::string(client::Client::Connect({.transport = "pigeon"}).status().message()),
              HasSubstr("auto, grpc, shared_memory or cuda_ipc"));
}

// The new process has another socket, and none of the old regions.
TEST(SharedMemoryClientTest, GoesOnAfterARestart) {
  test::TempFolder folder;
  ServerOptions options = SmallServer();
  options.listen = absl::StrCat("unix:", folder.File("grpc"));
  std::mt19937_64 rng(9);
  const SmallRows rows = MakeSmallRows(50, rng);
  auto first = std::make_unique<TestServer>(options);
  const auto client = Connect(options.listen, "auto");
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  ASSERT_TRUE(client->ComputeLoss(SmallMicrobatch(rows, 0, 1), {}).ok());
  EXPECT_EQ(client->transport().transport, "shared_memory") << client->transport().reason;
  first.reset();
  const TestServer second(options);
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  ASSERT_TRUE(Connect(options.listen, "grpc")->CreateHead(SmallHead()).ok());
  bool again = false;
  while (!again && clocks::SteadyNow() < end) {
    client::Microbatch microbatch = SmallMicrobatch(rows, 0, 1);
    microbatch.step.reset();
    const auto result = client->ComputeLoss(microbatch, {});
    ASSERT_TRUE(result.ok()) << result.status();
    again = client->transport().transport == "shared_memory";
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_TRUE(again) << client->transport().reason;
}

}  // namespace
}  // namespace lossd::app::testing::shared_memory_test
