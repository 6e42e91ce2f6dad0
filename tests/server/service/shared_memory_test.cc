// SPDX-License-Identifier: Apache-2.0
// Tests of slices in shared memory through the service, of honest clients and of clients that lie; and of
// where a client gets its regions from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/loss_plan.h"
#include "client/cpp/regions.h"
#include "kernels/clocks/clock.h"
#include "kernels/errors/field_error.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"
#include "tests/server/service/small_training.h"

namespace lossd::app::testing::shared_memory_test {
namespace {

using client::internal::RegionPauses;
using client::internal::RegionSource;
using client::internal::SharedRegion;
using ::testing::HasSubstr;

// ---- Honest clients ----
// Slices in memory that client and server share: the same results as in messages, whatever the client does
// with it.

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

// ---- Clients that lie ----
// Clients that lie about shared memory: places, sizes, ids, and what they write while it is read.

// A client that says whatever it likes.
class LiesTest : public ::testing::Test {
 protected:
  LiesTest() : client_(server_.Connect()) {
    EXPECT_TRUE(client_->CreateHead(SmallHead()).ok());
    region_ = OpenRegion();
  }
  std::shared_ptr<SharedRegion> OpenRegion() {
    auto region = SharedRegion::Open(client_->GetServer()->region_socket(), 64 << 10, absl::Seconds(60));
    EXPECT_TRUE(region.ok()) << region.status();
    return *std::move(region);
  }
  v1::OpenMicrobatch Open(const std::string& region) const {
    v1::OpenMicrobatch open = OpenSum(std::vector<int32_t>(kRows, 1));
    open.set_region(region);
    return open;
  }
  static v1::ComputeLossRequest Slice(uint64_t offset, uint64_t bytes, const std::string& payload = "") {
    v1::ComputeLossRequest request;
    request.mutable_slice()->mutable_rows()->set_end(kRows);
    request.mutable_slice()->mutable_in_region()->set_offset(offset);
    request.mutable_slice()->mutable_in_region()->set_bytes(bytes);
    request.set_payload(payload);
    return request;
  }
  LossAnswers Send(const std::string& region, const v1::ComputeLossRequest& slice) {
    const auto stream = client_->OpenLoss();
    stream->SendOpen(Open(region));
    stream->Send(slice);
    stream->HalfClose();
    return stream->Finish();
  }

  static constexpr int kRows = 8;
  static constexpr uint64_t kBytes = kRows * kRowBytes;
  TestServer server_;
  std::unique_ptr<TestClient> client_;
  std::shared_ptr<SharedRegion> region_;
};

TEST_F(LiesTest, AnHonestSliceIsAnsweredInItsPlace) {
  std::fill_n(reinterpret_cast<float*>(region_->At(512)), kRows * kSmallHidden, 0.25f);
  const LossAnswers answers = Send(region_->id(), Slice(512, kBytes));
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  ASSERT_EQ(answers.slices.size(), 1u);
  EXPECT_TRUE(answers.slices[0].result.in_region());
  EXPECT_EQ(answers.slices[0].payload, "");
  std::vector<float> in_region(kRows * kSmallHidden);
  std::memcpy(in_region.data(), region_->At(512), kBytes);

  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(""));
  stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kSmallHidden, 0.25f)));
  stream->HalfClose();
  const LossAnswers in_message = stream->Finish();
  ASSERT_TRUE(in_message.status.ok()) << in_message.status;
  EXPECT_EQ(Bytes(in_region), in_message.slices[0].payload);
}

TEST_F(LiesTest, PlacesOutsideTheRegionAreRefused) {
  const uint64_t size = region_->size(), most = ~uint64_t{0};
  const std::vector<std::pair<uint64_t, uint64_t>> places = {
      {size, kBytes},    {size - 256, kBytes},
      {most, kBytes},    {most - 255, kBytes},
      {most - 255, 256}, {0, most},
      {256, most - 255}, {0, 0},
      {0, size + 1},     {1, kBytes},
      {255, kBytes},     {uint64_t{1} << 63, uint64_t{1} << 63}};
  for (const auto& [offset, bytes] : places) {
    const LossAnswers answers = Send(region_->id(), Slice(offset, bytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << offset << " " << bytes;
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("slice.in_region"))
        << offset << " " << bytes;
  }
  EXPECT_TRUE(Send(region_->id(), Slice(size / 256 * 256 - 1024, kBytes)).status.ok())
      << "the end of the region";
}

TEST_F(LiesTest, BytesHaveToFitTheRows) {
  for (const uint64_t bytes : {kBytes - 1, kBytes + 1, uint64_t{1}, uint64_t{16} << 10}) {
    EXPECT_EQ(Send(region_->id(), Slice(0, bytes)).status.code(), absl::StatusCode::kInvalidArgument)
        << bytes;
  }
  EXPECT_EQ(Send(region_->id(), Slice(0, kBytes, "x")).status.code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(LiesTest, ASliceInARegionNeedsOne) {
  const LossAnswers answers = Send("", Slice(0, kBytes));
  EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(answers.status.message()), HasSubstr("open.region"));
}

TEST_F(LiesTest, ARegionIsFoundByItsIdAlone) {
  std::string near = region_->id();
  near.back() = static_cast<char>(near.back() ^ 1);
  std::vector<std::string> messages;
  for (const std::string& id : {near, std::string(16, '\0'), std::string("x"), std::string(1000, 'a'),
                                region_->id().substr(0, 15), region_->id() + "x"}) {
    const LossAnswers answers = Send(id, Slice(0, kBytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kUnavailable);
    messages.emplace_back(answers.status.message());
  }
  for (const std::string& message : messages)
    EXPECT_EQ(message, messages[0]) << "it tells something of a region";
  const std::string gone = OpenRegion()->id();  // and closed again
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (Send(gone, Slice(0, kBytes)).status.ok() && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
  EXPECT_EQ(std::string(Send(gone, Slice(0, kBytes)).status.message()), messages[0]);
}

// Whatever one client sends, nothing comes to another's memory, and nothing of another's comes back.
// ---- Gradients of retained rows, and tensors ----

class RetainedLiesTest : public LiesTest {
 protected:
  RetainedLiesTest() {
    v1::OpenMicrobatch open = Open("");
    open.set_microbatch_id(3);
    open.set_reduction(v1::REDUCTION_NONE);
    open.set_want_grad_hidden(false);
    open.set_retain(true);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, kRows, Bytes(std::vector<float>(kRows * kSmallHidden, 0.5f)));
    stream->HalfClose();
    EXPECT_TRUE(stream->Finish().status.ok());
  }
  v1::ComputeLossRequest Backward(uint64_t offset, uint64_t bytes) const {
    v1::ComputeLossRequest request;
    v1::OpenBackward* const open = request.mutable_backward();
    open->set_head("head");
    open->set_microbatch_id(3);
    open->mutable_rows()->set_end(kRows);
    open->set_want_grad_hidden(true);
    open->mutable_grad_loss()->Resize(kRows, 1);
    open->set_region(region_->id());
    open->mutable_in_region()->set_offset(offset);
    open->mutable_in_region()->set_bytes(bytes);
    return request;
  }
  LossAnswers Send(const v1::ComputeLossRequest& request) const {
    const auto stream = client_->OpenLoss();
    stream->Send(request);
    stream->HalfClose();
    return stream->Finish();
  }
  v1::ReadTensorRequest Read(uint64_t offset, uint64_t bytes) const {
    v1::ReadTensorRequest request;
    request.set_head("head");
    request.set_param(v1::PARAM_WEIGHT);
    request.set_region(region_->id());
    request.mutable_in_region()->set_offset(offset);
    request.mutable_in_region()->set_bytes(bytes);
    return request;
  }
};

TEST_F(RetainedLiesTest, HonestGradientsLieWhereTheyAreWanted) {
  const LossAnswers answers = Send(Backward(512, kBytes));
  ASSERT_TRUE(answers.status.ok()) << answers.status;
  ASSERT_EQ(answers.slices.size(), 1u);
  EXPECT_TRUE(answers.slices[0].result.in_region());
  EXPECT_EQ(answers.slices[0].payload, "");
  v1::ComputeLossRequest request = Backward(0, kBytes);
  request.mutable_backward()->clear_region();
  request.mutable_backward()->clear_in_region();
  const LossAnswers in_message = Send(request);
  ASSERT_TRUE(in_message.status.ok()) << in_message.status;
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(region_->At(512)), kBytes),
            in_message.slices[0].payload);
}

// Not a byte behind the part is written, and the slice comes in a message.
TEST_F(RetainedLiesTest, APartThatIsTooSmallIsNotWrittenBehind) {
  std::fill_n(region_->At(0), region_->size(), uint8_t{0xa5});
  for (const uint64_t bytes : {kBytes - 1, uint64_t{1}}) {
    const LossAnswers answers = Send(Backward(256, bytes));
    ASSERT_TRUE(answers.status.ok()) << answers.status;
    EXPECT_FALSE(answers.slices[0].result.in_region());
    EXPECT_EQ(answers.slices[0].payload.size(), kBytes);
  }
  EXPECT_EQ(std::count(region_->At(0), region_->At(0) + region_->size(), 0xa5),
            static_cast<std::ptrdiff_t>(region_->size()));
}

TEST_F(RetainedLiesTest, PartsOutsideTheRegionAreRefused) {
  const uint64_t size = region_->size(), most = ~uint64_t{0};
  const uint64_t tensor = kSmallVocab * kRowBytes;
  for (const uint64_t offset :
       {size, size - 256, most, most - 255, uint64_t{1}, uint64_t{255}, uint64_t{1} << 63}) {
    const LossAnswers answers = Send(Backward(offset, kBytes));
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << offset;
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("backward.in_region")) << offset;
    const absl::Status read = client_->ReadTensor(Read(offset, tensor)).status();
    EXPECT_EQ(read.code(), absl::StatusCode::kInvalidArgument) << offset;
    EXPECT_THAT(std::string(read.message()), HasSubstr("in_region")) << offset;
  }
  for (const uint64_t bytes : {uint64_t{0}, size + 1, most}) {
    EXPECT_EQ(Send(Backward(0, bytes)).status.code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
  for (const uint64_t bytes : {uint64_t{0}, tensor - 1, tensor + 1, most}) {
    EXPECT_EQ(client_->ReadTensor(Read(0, bytes)).status().code(), absl::StatusCode::kInvalidArgument)
        << bytes;
  }
}

TEST_F(RetainedLiesTest, ARangeAndItsRegionComeTogether) {
  v1::ComputeLossRequest without_region = Backward(0, kBytes), without_range = without_region,
                         unwanted = without_region;
  without_region.mutable_backward()->clear_region();
  without_range.mutable_backward()->clear_in_region();
  unwanted.mutable_backward()->set_want_grad_hidden(false);
  for (const auto& request : {without_region, without_range, unwanted}) {
    const LossAnswers answers = Send(request);
    EXPECT_EQ(answers.status.code(), absl::StatusCode::kInvalidArgument) << request.DebugString();
    EXPECT_THAT(std::string(answers.status.message()), HasSubstr("backward.in_region"));
  }
  v1::ReadTensorRequest read = Read(0, kSmallVocab * kRowBytes);
  read.clear_region();
  EXPECT_EQ(client_->ReadTensor(read).status().code(), absl::StatusCode::kInvalidArgument);
  v1::ComputeLossRequest unknown = Backward(0, kBytes);
  unknown.mutable_backward()->set_region(std::string(16, 'x'));
  EXPECT_EQ(Send(unknown).status.code(), absl::StatusCode::kUnavailable);
  read = Read(0, kSmallVocab * kRowBytes);
  read.set_region(std::string(16, 'x'));
  EXPECT_EQ(client_->ReadTensor(read).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Send(Backward(0, kBytes)).status.ok()) << "nothing of that was used";
}

TEST_F(RetainedLiesTest, RowsOfATensorLieWhereTheyAreWanted) {
  const auto want = client_->Read("head", v1::PARAM_WEIGHT, v1::ROLE_VALUE);
  ASSERT_TRUE(want.ok());
  const uint64_t bytes = kSmallVocab * kRowBytes;
  std::fill_n(region_->At(0), region_->size(), uint8_t{0xa5});
  const auto read = client_->ReadTensor(Read(512, bytes));
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(*read, "") << "nothing of it comes in messages";
  EXPECT_EQ(std::memcmp(region_->At(512), want->data(), bytes), 0);
  EXPECT_EQ(*region_->At(511), 0xa5);
  EXPECT_EQ(*region_->At(512 + bytes), 0xa5);
}

TEST_F(LiesTest, SessionsDoNotSeeEachOther) {
  const auto victim = OpenRegion();
  const std::vector<uint8_t> secret(victim->size(), 0xa5);
  std::memcpy(victim->At(0), secret.data(), secret.size());
  std::mt19937_64 rng(10);
  for (int i = 0; i < 200; ++i) {
    const uint64_t offset = rng() % 4 == 0 ? rng() : (rng() % 512) * 256;
    std::fill_n(region_->At(0), region_->size(), uint8_t{0});
    Send(region_->id(), Slice(offset, kBytes));
    ASSERT_EQ(std::memcmp(victim->At(0), secret.data(), secret.size()), 0);
    for (uint64_t k = 0; k < region_->size(); ++k) ASSERT_NE(region_->At(0)[k], 0xa5) << "at " << k;
  }
}

// Hidden states that change while they are computed spoil the results of their own slice at most.
TEST_F(LiesTest, MemoryThatChangesAllTheTimeHurtsNobodyElse) {
  std::atomic<bool> over = false;
  std::thread writer([&] {
    std::mt19937_64 rng(11);
    while (!over) {
      const uint64_t word = rng() % 3 == 0 ? 0x7fc000007f800000u : rng();  // NaN and infinity among them
      std::memcpy(region_->At(rng() % (kBytes / 8) * 8), &word, sizeof(word));
    }
  });
  std::mt19937_64 rng(12);
  const SmallRows rows = MakeSmallRows(64, rng);
  const auto honest =
      client::Client::Connect({.target = server_.target(), .transport = "shared_memory"}).value();
  std::vector<float> want(rows.hidden.size()), got(rows.hidden.size());
  ASSERT_TRUE(honest->ComputeLoss(SmallMicrobatch(rows, 0, 1), {.grad_hidden = want.data()}).ok());
  for (int i = 0; i < 100; ++i) {
    const absl::StatusCode code = Send(region_->id(), Slice(0, kBytes)).status.code();
    EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kOutOfRange)
        << static_cast<int>(code);
    ASSERT_TRUE(honest->ComputeLoss(SmallMicrobatch(rows, 0, 1), {.grad_hidden = got.data()}).ok());
    for (size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], want[k], 1e-4);
  }
  over = true;
  writer.join();
}

// Without its session a region is no more; a call that began before goes on with the memory.
TEST_F(LiesTest, ACallOutlivesItsSession) {
  std::fill_n(reinterpret_cast<float*>(region_->At(0)), kRows * kSmallHidden, 0.5f);
  const std::string id = region_->id();
  const auto stream = client_->OpenLoss();
  stream->SendOpen(Open(id));
  ASSERT_TRUE(stream->ReadOne());
  region_.reset();
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (Send(id, Slice(0, kBytes)).status.code() != absl::StatusCode::kUnavailable &&
         clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
  stream->Send(Slice(0, kBytes));
  stream->HalfClose();
  EXPECT_TRUE(stream->Finish().status.ok());
  while (server_.server().stats().open_streams > 0 && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(2));
}

// ---- Sources of regions ----
// Where a client gets its regions of shared memory from, and when they go back.

std::string RegionSocketOf(const TestServer& server) {
  return client::Client::Connect({.target = server.target()}).value()->GetServer()->region_socket();
}

// A server that could not give memory, or was not reached, the first time may do so later.
TEST(RegionSourceTest, TriesAgainAfterAFailedAttempt) {
  const TestServer server;
  RegionSource source("auto", {4096, 4096}, "/nowhere", [&server] { return RegionSocketOf(server); },
                      {.first = absl::Milliseconds(1), .most = absl::Milliseconds(2)});
  EXPECT_EQ(source.Get(), nullptr);
  EXPECT_EQ(source.choice().transport, "grpc");
  EXPECT_THAT(source.choice().reason, HasSubstr("/nowhere"));
  EXPECT_THAT(source.choice().reason, HasSubstr("tried again"));
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (source.Get() == nullptr && clocks::SteadyNow() < end) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(source.choice().transport, "shared_memory") << source.choice().reason;
}

TEST(RegionSourceTest, PausesGrowBetweenAttempts) {
  int attempts = 0;
  RegionSource source("auto", {4096, 4096}, "/nowhere",
                      [&attempts] {
                        ++attempts;
                        return std::string("/nowhere");
                      },
                      {.first = absl::Milliseconds(1), .most = absl::Hours(1)});
  const absl::Time start = clocks::SteadyNow();
  for (int i = 0; i < 200; ++i) {
    EXPECT_EQ(source.Get(), nullptr);
    absl::SleepFor(absl::Microseconds(200));
  }
  // The pauses before attempt n are 2^n - 1 ms together.
  const double elapsed = absl::ToDoubleMilliseconds(clocks::SteadyNow() - start);
  EXPECT_GE(attempts, 2);
  EXPECT_LE(std::exp2(attempts) - 1, elapsed);
}

TEST(RegionSourceTest, ASocketOfAnotherServerIsTriedLessAndLess) {
  const TestServer server;
  RegionSource source("auto", {4096, 4096}, RegionSocketOf(server),
                      [&server] { return RegionSocketOf(server); },
                      {.first = absl::Hours(1), .most = absl::Hours(1)});
  auto region = source.Get();
  ASSERT_NE(region, nullptr);
  const auto refuse = [](client::internal::SharedRegion& one) {
    one.AfterFailure(errors::FieldError("open.region", "be open", "another", absl::StatusCode::kUnavailable),
                     /*holds=*/false);
  };
  refuse(*region);
  const auto next = source.Get();  // the server may have been restarted
  ASSERT_NE(next, nullptr);
  EXPECT_NE(next, region);
  refuse(*next);
  EXPECT_EQ(source.Get(), nullptr);
  EXPECT_THAT(source.choice().reason, HasSubstr("does not know the regions of its socket"));
}

constexpr uint64_t kMiB = uint64_t{1} << 20;

TEST(RegionSourceTest, GrowsWithTheCalls) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  const auto first = source.Get();
  ASSERT_NE(first, nullptr);
  EXPECT_EQ(first->size(), kMiB);
  EXPECT_EQ(source.Get(kMiB / 4), first);
  const auto second = source.Get(kMiB);
  EXPECT_EQ(second->size(), 4 * kMiB);
  EXPECT_EQ(source.Get(1), second) << "smaller calls use what is there";
  EXPECT_EQ(source.Get(100 * kMiB)->size(), 32 * kMiB);
  EXPECT_TRUE(first->usable()) << "for calls that have it";
}

TEST(RegionSourceTest, GrowsWhenCallsFindNoRoom) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  const auto first = source.Get();
  ASSERT_NE(first, nullptr);
  ASSERT_TRUE(first->Take(kMiB).has_value());
  EXPECT_EQ(source.Get(), first) << "nobody needs more yet";
  EXPECT_FALSE(first->Take(1).has_value());
  const auto second = source.Get();
  EXPECT_EQ(second->size(), 4 * kMiB);
  EXPECT_EQ(source.Get(), second);
}

// One that no call uses goes back first, so that there may be room.
TEST(RegionSourceTest, ARegionThatNoCallUsesMakesRoomForALargerOne) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource source("auto", {kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  ASSERT_NE(source.Get(), nullptr);
  EXPECT_EQ(source.Get(2 * kMiB)->size(), 8 * kMiB);
}

// What there is beside the region of calls under way; later, when nothing is under way, the whole.
TEST(RegionSourceTest, AsksAgainForWhatItDidNotGet) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource source("auto", {kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); },
                      {.first = absl::Milliseconds(1), .most = absl::Milliseconds(1)});
  {
    const auto used = source.Get();
    ASSERT_NE(used, nullptr);
    const auto second = source.Get(2 * kMiB);
    EXPECT_GT(second->size(), kMiB);
    EXPECT_LT(second->size(), 8 * kMiB);
  }
  std::shared_ptr<client::internal::SharedRegion> region;
  for (int i = 0; i < 500 && (region == nullptr || region->size() < 8 * kMiB); ++i) {
    region = nullptr;
    absl::SleepFor(absl::Milliseconds(2));
    region = source.Get(2 * kMiB);
  }
  EXPECT_EQ(region->size(), 8 * kMiB);
}

// And does not ask with each call, even where there would be room again.
TEST(RegionSourceTest, KeepsItsRegionWhereTheServerGivesNoLargerOne) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  options.peer_share = 1;
  const TestServer server(options);
  RegionSource other("auto", {4 * kMiB, 4 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  RegionSource source("auto", {2 * kMiB, 32 * kMiB}, RegionSocketOf(server), [] { return std::string(); },
                      {.first = absl::Milliseconds(1), .most = absl::Hours(1)});
  ASSERT_NE(other.Get(), nullptr);
  const auto region = source.Get();
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(source.Get(20 * kMiB), region);
  other.Get()->Retire();
  other.DropUnusable();
  for (int i = 0; i < 3; ++i) EXPECT_EQ(source.Get(20 * kMiB), region);
  EXPECT_EQ(source.choice().transport, "shared_memory");
}

TEST(RegionSourceTest, ARestartedServerIsAskedForWhatCallsNeed) {
  const std::string socket = absl::StrCat(::testing::TempDir(), "/lossd-region-source-", getpid());
  ServerOptions options = SmallServer();
  options.region_socket = socket;
  auto server = std::make_unique<TestServer>(options);
  RegionSource source("auto", {kMiB, 32 * kMiB}, socket, [&] { return socket; });
  auto region = source.Get(2 * kMiB);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->size(), 8 * kMiB);
  server = nullptr;
  server = std::make_unique<TestServer>(options);
  ASSERT_FALSE(region->usable());
  region = source.Get(4 * kMiB);
  ASSERT_NE(region, nullptr);
  EXPECT_EQ(region->size(), 16 * kMiB);
}

TEST(RegionSourceTest, GrowsWhileOtherThreadsBeginAndEndCalls) {
  const TestServer server;
  RegionSource source("auto", {kMiB, 64 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  std::vector<std::thread> threads;
  for (uint64_t thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&source, thread] {
      for (uint64_t i = 0; i < 60; ++i) {
        const auto region = source.Get(((i * 37 + thread * 11) % 64) * kMiB / 8);
        if (region == nullptr) continue;  // another thread is opening one
        const auto offset = region->Take(1 + i * 4096);
        if (!offset.has_value()) continue;
        region->At(*offset)[0] = 1;
        region->Give(*offset);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GE(source.Get()->size(), 16 * kMiB);
}

// They had a quarter of what the server gives each, whatever they sent.
TEST(RegionSourceTest, ManyClientsOfSmallMicrobatchesShareWhatThereIs) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 256 * kMiB;
  const TestServer server(options);
  std::mt19937_64 rng(12);
  const SmallRows rows = MakeSmallRows(50, rng);
  std::vector<std::unique_ptr<client::Client>> clients;
  for (int i = 0; i < 12; ++i) {
    clients.push_back(
        client::Client::Connect({.target = server.target(), .transport = "shared_memory"}).value());
    if (i == 0) {
      ASSERT_TRUE(clients[0]->CreateHead(SmallHead()).ok());
    }
    ASSERT_TRUE(clients[i]->ComputeLoss(SmallMicrobatch(rows, 0, i), {}).ok());
    EXPECT_EQ(clients[i]->transport().transport, "shared_memory") << clients[i]->transport().reason;
  }
}

TEST(RegionSourceTest, ARegionGoesBackAlthoughAChildHasInheritedIt) {
  ServerOptions options = SmallServer();
  options.shared_memory_bytes = 8 * kMiB;
  const TestServer server(options);
  RegionSource source("auto", {8 * kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  ASSERT_NE(source.Get(), nullptr);
  const pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  source.Get()->Retire();
  source.DropUnusable();
  RegionSource other("auto", {8 * kMiB, 8 * kMiB}, RegionSocketOf(server), [] { return std::string(); });
  EXPECT_NE(other.Get(), nullptr) << other.choice().reason;
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
}

// The server does not wait for the client's next call.
TEST(RegionSourceTest, ARegionThatWasGivenUpGoesBackAtOnce) {
  const TestServer server;
  const auto client =
      client::Client::Connect(
          {.target = server.target(), .transport = "shared_memory", .shared_memory_bytes = 1 << 20})
          .value();
  ASSERT_TRUE(client->CreateHead(SmallHead()).ok());
  const auto direct = client::Client::Connect({.target = server.target(), .transport = "grpc"}).value();
  const auto staging = [&direct] { return direct->GetServer()->memory().staging(); };
  std::mt19937_64 rng(10);
  SmallRows rows = MakeSmallRows(600, rng);
  ASSERT_TRUE(client->ComputeLoss(SmallMicrobatch(rows, 0, 1), {}).ok());
  const uint64_t with_region = staging();
  rows.hidden[300 * kSmallHidden] = std::numeric_limits<float>::infinity();
  rows.targets[300] = 1;
  EXPECT_FALSE(
      client->ComputeLoss(SmallMicrobatch(rows, 0, 2), {}, {.slice_bytes = 10 * kSmallHidden * sizeof(float)})
          .ok());
  const absl::Time end = clocks::SteadyNow() + absl::Seconds(60);
  while (staging() + (1 << 20) > with_region && clocks::SteadyNow() < end)
    absl::SleepFor(absl::Milliseconds(5));
  EXPECT_LE(staging() + (1 << 20), with_region);
}

// On a machine with fewer than four cores one stream is best in any case.
TEST(RegionStreamsTest, ALargeMicrobatchIsCopiedByAsManyStreamsAsHelp) {
  std::mt19937_64 rng(11);
  const SmallRows rows = MakeSmallRows((uint64_t{18} << 20) / kRowBytes, rng);
  const int several =
      client::internal::StreamsInRegion(rows.targets.size() * kRowBytes, std::thread::hardware_concurrency());
  for (const bool deterministic : {false, true}) {
    ServerOptions options = SmallServer();
    options.deterministic = deterministic;
    const TestServer server(options);
    const auto compute = [&](const std::string& transport, int streams) {
      const auto client =
          client::Client::Connect({.target = server.target(), .channels = 1, .transport = transport});
      EXPECT_TRUE(client.ok()) << client.status();
      client->get()->CreateHead(SmallHead()).status().IgnoreError();  // the second client finds it
      std::vector<float> grads(rows.hidden.size());
      const auto result =
          (*client)->ComputeLoss(SmallMicrobatch(rows, 0, 0), {.grad_hidden = grads.data()}, {});
      EXPECT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result.ok() ? result->streams : 0, streams)
          << transport << ", deterministic " << deterministic;
      return grads;
    };
    const std::vector<float> in_messages = compute("grpc", 1);
    const std::vector<float> shared = compute("shared_memory", deterministic ? 1 : several);
    for (size_t i = 0; i < shared.size(); ++i) ASSERT_NEAR(shared[i], in_messages[i], 1e-4) << i;
  }
}

}  // namespace
}  // namespace lossd::app::testing::shared_memory_test
