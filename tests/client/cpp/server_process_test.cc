// SPDX-License-Identifier: Apache-2.0
// The client against the real server as a process of its own: results against the reference, cut connections,
// a killed and a stopped server; and slices that find no room in a region, whose other calls have all of it.
#include "tests/support/server_process.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "client/cpp/core.h"
#include "client/cpp/loss_call.h"
#include "client/cpp/regions.h"
#include "kernels/backend.h"
#include "kernels/reference/reference.h"
#include "tests/faults/fault_proxy.h"

namespace lossd::client::internal::server_process_test {
namespace {

namespace reference = kernels::reference;

constexpr uint64_t kD = 24;
constexpr uint64_t kV = 101;

struct Batch {
  Batch(std::mt19937& random, uint64_t rows) : hidden(rows * kD), targets(rows), dx(rows * kD) {
    for (float& x : hidden) x = std::normal_distribution<float>()(random);
    for (int32_t& y : targets) y = random() % 5 == 0 ? -100 : static_cast<int32_t>(random() % kV);
  }
  Microbatch AsMicrobatch(uint64_t id) const {
    return {.head = "head",
            .step = 0,
            .id = id,
            .hidden_size = kD,
            .hidden_dtype = v1::DTYPE_FP32,
            .hidden = hidden.data(),
            .targets = targets};
  }
  reference::Rows AsRows(double scale) const {
    reference::Rows rows;
    rows.hidden.assign(hidden.begin(), hidden.end());
    for (int32_t y : targets) rows.targets.push_back(y == -100 ? kernels::kIgnoredTarget : y);
    rows.grad_scale = scale;
    return rows;
  }

  std::vector<float> hidden;
  std::vector<int32_t> targets;
  std::vector<float> dx;
};

// |got - want| / |want|, in the 2-norm.
double RelativeError(absl::Span<const float> got, absl::Span<const double> want) {
  EXPECT_EQ(got.size(), want.size());
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(error / norm);
}

class ServerProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    client_ = Client::Connect({.target = server_.target()}).value();
    CreateHead(*client_);
  }

  void CreateHead(Client& client) {
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("head");
    request.mutable_spec()->set_hidden_size(kD);
    request.mutable_spec()->set_vocab_size(kV);
    request.mutable_spec()->set_bias(true);
    request.mutable_kaiming_uniform()->set_seed(seed_);
    const auto created = client.CreateHead(request);
    ASSERT_TRUE(created.ok()) << created.status();
    head_.config.hidden_size = kD;
    head_.config.vocab_size = kV;
    head_.config.has_bias = true;
    const auto weight = client.ReadTensor("head", v1::PARAM_WEIGHT),
               bias = client.ReadTensor("head", v1::PARAM_BIAS);
    ASSERT_TRUE(weight.ok() && bias.ok());
    head_.weight.assign(weight->values.begin(), weight->values.end());
    head_.bias.assign(bias->values.begin(), bias->values.end());
  }

  const unsigned seed_ = std::random_device()();
  const ::testing::ScopedTrace trace_{__FILE__, __LINE__, ::testing::Message() << "seed " << seed_};
  std::mt19937 random_{seed_};
  test::ServerProcess server_{LOSSD_BINARY};
  std::unique_ptr<Client> client_;
  reference::Head head_;
};

// fp32 arithmetic with sums of a few hundred terms: relative errors of a few 1e-7; 1e-5 leaves room.
constexpr double kTolerance = 1e-5;

TEST_F(ServerProcessTest, LossAndGradientsMatchTheReference) {
  ComputeOptions options{.accumulate_gradients = true, .slice_bytes = 3000};
  options.loss.set_label_smoothing(0.1f);
  options.loss.set_z_loss(1e-3f);
  options.loss.set_softcap(5);
  options.loss.set_logit_scale(0.7f);
  kernels::LossOptions reference_options;
  reference_options.label_smoothing = 0.1f;
  reference_options.z_loss = 1e-3f;
  reference_options.softcap = 5;
  reference_options.logit_scale = 0.7f;
  reference::ParamGradients gradients = reference::ZeroGradients(head_.config);
  uint64_t id = 0;
  for (uint64_t rows : {1, 65, 500}) {
    for (int streams : {1, 3}) {
      Batch batch(random_, rows);
      batch.targets[0] = 3;
      std::vector<float> lse(rows), entropy(rows);
      options.streams = streams;
      const auto result = client_->ComputeLoss(batch.AsMicrobatch(id++),
                                               {.grad_hidden = batch.dx.data(),
                                                .row_lse = absl::MakeSpan(lse),
                                                .row_entropy = absl::MakeSpan(entropy)},
                                               options);
      ASSERT_TRUE(result.ok()) << result.status();
      const auto want = reference::Compute(
          head_, reference_options, batch.AsRows(1.0 / static_cast<double>(result->valid_rows)), &gradients);
      ASSERT_EQ(result->valid_rows, static_cast<uint64_t>(want.sums.valid_rows));
      EXPECT_NEAR(result->loss, want.sums.loss / static_cast<double>(want.sums.valid_rows), 1e-5);
      EXPECT_LT(RelativeError(lse, want.lse), kTolerance);
      EXPECT_LT(RelativeError(entropy, want.entropy), kTolerance);
      EXPECT_LT(RelativeError(batch.dx, want.grad_hidden.value), kTolerance);
    }
  }
  EXPECT_LT(RelativeError(client_->ReadTensor("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT)->values,
                          gradients.weight.value),
            kTolerance);
  EXPECT_LT(RelativeError(client_->ReadTensor("head", v1::PARAM_BIAS, v1::ROLE_GRADIENT)->values,
                          gradients.bias.value),
            kTolerance);
}

TEST_F(ServerProcessTest, DeferredGradientsMatchTheReference) {
  Batch batch(random_, 400);
  std::vector<float> loss(400);
  const auto forward =
      client_->ComputeLoss(batch.AsMicrobatch(5), {.row_loss = absl::MakeSpan(loss)},
                           {.reduction = v1::REDUCTION_NONE, .retain = true, .slice_bytes = 5000});
  ASSERT_TRUE(forward.ok()) << forward.status();
  std::vector<float> grad_loss(400), grad_lse(400), grad_entropy(400);
  for (size_t i = 0; i < 400; ++i) {
    grad_loss[i] = std::normal_distribution<float>()(random_);
    grad_lse[i] = std::normal_distribution<float>()(random_);
    grad_entropy[i] = std::normal_distribution<float>()(random_);
  }
  const auto backward = client_->Backward({.head = "head",
                                           .step = 0,
                                           .id = 5,
                                           .hidden_size = kD,
                                           .hidden_dtype = v1::DTYPE_FP32,
                                           .grad_loss = grad_loss,
                                           .grad_lse = grad_lse,
                                           .grad_entropy = grad_entropy},
                                          batch.dx.data(), {.accumulate_gradients = true});
  ASSERT_TRUE(backward.ok()) << backward.status();
  reference::Rows rows = batch.AsRows(1);
  rows.grad_loss.assign(grad_loss.begin(), grad_loss.end());
  rows.grad_lse.assign(grad_lse.begin(), grad_lse.end());
  rows.grad_entropy.assign(grad_entropy.begin(), grad_entropy.end());
  reference::ParamGradients gradients = reference::ZeroGradients(head_.config);
  const auto want = reference::Compute(head_, {}, rows, &gradients);
  EXPECT_LT(RelativeError(loss, want.loss), kTolerance);
  EXPECT_LT(RelativeError(batch.dx, want.grad_hidden.value), kTolerance);
  EXPECT_LT(RelativeError(client_->ReadTensor("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT)->values,
                          gradients.weight.value),
            kTolerance);
  EXPECT_TRUE(client_->ReleaseMicrobatch("head", 5).value());
}

TEST_F(ServerProcessTest, CutConnectionsNeitherLoseNorRepeatGradients) {
  test::FaultProxy proxy(server_.target(), seed_);
  std::mt19937 bytes(seed_);
  int connections = 0;
  proxy.ArmEach([&bytes, &connections] {
    // However slow the server is, connections stand at last.
    const int64_t most = ++connections <= 200 ? 60'000 : int64_t{1} << 40;
    return test::Fault{
        .direction = bytes() % 2 == 0 ? test::Direction::kToServer : test::Direction::kToClient,
        .unit = test::Fault::Unit::kBytes,
        .after = most - static_cast<int64_t>(bytes() % 60'000)};
  });
  auto client = Client::Connect({.target = proxy.target(),
                                 .channels = 3,
                                 .wait_for_server = true,
                                 .retry = {.max_attempts = 1000,
                                           .initial_backoff = absl::Milliseconds(5),
                                           .max_backoff = absl::Milliseconds(50)},
                                 .transport = "grpc"});  // what the proxy can cut
  ASSERT_TRUE(client.ok()) << client.status();
  reference::ParamGradients gradients = reference::ZeroGradients(head_.config);
  std::vector<std::unique_ptr<Batch>> batches;
  std::vector<PendingLoss> pending;
  for (uint64_t id = 0; id < 12; ++id) {
    Batch& batch = *batches.emplace_back(std::make_unique<Batch>(random_, 300));
    pending.push_back((*client)->ComputeLossAsync(
        batch.AsMicrobatch(id), {.grad_hidden = batch.dx.data()},
        {.reduction = v1::REDUCTION_SUM, .accumulate_gradients = true, .streams = 3, .slice_bytes = 2000}));
  }
  int repeats = 0;
  uint64_t repeated_rows = 0;
  for (size_t i = 0; i < pending.size(); ++i) {
    const auto result = pending[i].Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    repeats += result->repeats;
    repeated_rows += result->repeated_rows;
    const auto want = reference::Compute(head_, {}, batches[i]->AsRows(1), &gradients);
    EXPECT_NEAR(result->loss, want.sums.loss, 1e-5 * want.sums.loss);
    EXPECT_LT(RelativeError(batches[i]->dx, want.grad_hidden.value), kTolerance);
  }
  EXPECT_GT(proxy.cuts(), 0);
  EXPECT_GT(repeats, 0);
  std::cout << proxy.cuts() << " cuts, " << repeats << " streams repeated, " << repeated_rows << " rows\n";
  EXPECT_LT(RelativeError(client_->ReadTensor("head", v1::PARAM_WEIGHT, v1::ROLE_GRADIENT)->values,
                          gradients.weight.value),
            kTolerance);
}

// One of several has broken and is not to be had again, as where a limit has been reached meanwhile.
TEST_F(ServerProcessTest, CallsGoOnOverTheConnectionsThatStand) {
  test::FaultProxy proxy(server_.target(), seed_);
  auto client = Client::Connect({.target = proxy.target(),
                                 .channels = 2,
                                 .retry = {.initial_backoff = absl::Milliseconds(10)},
                                 .transport = "grpc"})
                    .value();
  Batch batch(random_, 600);
  const ComputeOptions options{.streams = 2};
  ASSERT_TRUE(client->ComputeLoss(batch.AsMicrobatch(1), {}, options).ok());
  proxy.SetServer(absl::StartsWith(server_.target(), "unix:") ? "unix:/nowhere" : "127.0.0.1:1");
  proxy.Arm({.action = test::Fault::Action::kReset});
  for (uint64_t id = 2; id < 7; ++id) {
    const auto result =
        client->ComputeLoss(batch.AsMicrobatch(id), {.grad_hidden = batch.dx.data()}, options);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->streams, 2);
  }
  EXPECT_EQ(proxy.cuts(), 1);
}

TEST_F(ServerProcessTest, KilledServerIsNoticedUntilTheHeadIsBack) {
  Batch batch(random_, 300);
  const ComputeOptions options{.accumulate_gradients = true, .max_attempts = 20};
  ASSERT_TRUE(client_->ComputeLoss(batch.AsMicrobatch(1), {}, options).ok());
  const std::string target = server_.target();
  server_.Kill();
  server_.Start(target);
  ASSERT_EQ(server_.target(), target);
  EXPECT_EQ(client_->ComputeLoss(batch.AsMicrobatch(2), {}, options).status().code(),
            absl::StatusCode::kAborted)
      << "the new server has no such head";
  CreateHead(*Client::Connect({.target = target}).value());
  const auto status = client_->ComputeLoss(batch.AsMicrobatch(2), {}, options).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
  EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("gradients of step 0 are lost"));
  v1::ApplyStepRequest apply;
  apply.set_head("head");
  apply.mutable_optimizer()->mutable_adamw()->set_learning_rate(1e-3);
  apply.add_expected_microbatches(1);
  EXPECT_EQ(client_->ApplyStep(apply).status().code(), absl::StatusCode::kAborted);
  client_->AcknowledgeRestart("head");
  EXPECT_TRUE(client_->ZeroGradients("head", 0).ok());
  EXPECT_TRUE(client_->ComputeLoss(batch.AsMicrobatch(1), {}, options).ok());
  EXPECT_TRUE(client_->ApplyStep(apply).ok());
}

// A stopped process takes nothing from its sockets: the call has to end all the same, and to let go of the
// caller's memory.
TEST_F(ServerProcessTest, StoppedServerDoesNotHoldMemory) {
  auto client = Client::Connect({.target = server_.target(), .dead_peer_timeout = absl::Seconds(2)}).value();
  auto batch = std::make_unique<Batch>(random_, 400000);  // 38 MB: more than the sockets take
  server_.Signal(SIGSTOP);
  const absl::Time start = absl::Now();
  const auto result = client->ComputeLoss(batch->AsMicrobatch(1), {.grad_hidden = batch->dx.data()},
                                          {.accumulate_gradients = true, .timeout = absl::Seconds(1)});
  const absl::Duration took = absl::Now() - start;
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded) << result.status();
  EXPECT_GE(took, absl::Seconds(1));
  EXPECT_LT(took, absl::Seconds(20));
  std::cout << "ended after " << took << "\n";
  batch = nullptr;  // a sanitizer sees who still reads it
  absl::SleepFor(absl::Milliseconds(200));
  server_.Signal(SIGCONT);
  Batch small(random_, 100);
  const auto after =
      client->ComputeLoss(small.AsMicrobatch(2), {}, {.accumulate_gradients = true, .max_attempts = 20});
  EXPECT_TRUE(after.ok()) << after.status();
}

// ---- Places of slices ----
// Slices that find no room in a region, whose other calls have all of it: played by the test, which takes it.

using Kind = SlicePlaces::Place::Kind;

constexpr uint64_t kRegionBytes = 64 << 10;
constexpr uint64_t kRows = 300, kHidden = 24, kClasses = 97;
constexpr uint64_t kRowBytes = kHidden * sizeof(float);
constexpr uint64_t kSlice = 7 * kRowBytes;
constexpr absl::Duration kLong = absl::Hours(1);  // longer than a test may take

class SlicePlacesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    Connect(server_.target());
    region_ = core_->connections().regions().Get();
    ASSERT_NE(region_, nullptr) << core_->connections().transport().reason;
    ASSERT_EQ(region_->size(), kRegionBytes);
    v1::CreateHeadRequest request;
    request.mutable_spec()->set_name("lm");
    request.mutable_spec()->set_hidden_size(kHidden);
    request.mutable_spec()->set_vocab_size(kClasses);
    request.mutable_kaiming_uniform()->set_seed(7);
    const auto client = Client::Connect({.target = server_.target(), .transport = "grpc"});
    ASSERT_TRUE(client.ok()) << client.status();
    ASSERT_TRUE((*client)->CreateHead(request).ok());
    std::mt19937 random(5);
    for (float& value : hidden_) value = std::normal_distribution<float>()(random);
    for (int32_t& target : targets_) target = static_cast<int32_t>(random() % kClasses);
    const auto wanted =
        (*client)->ComputeLoss(MakeMicrobatch(), {.grad_hidden = wanted_.data()}, {.slice_bytes = kSlice});
    ASSERT_TRUE(wanted.ok()) << wanted.status();
  }

  void Connect(const std::string& target) {
    const ClientOptions options{.target = target,
                                .channels = 1,
                                .retry = {.max_attempts = 1},
                                .transport = "shared_memory",
                                .shared_memory_bytes = kRegionBytes};
    auto connections = Connections::Open(options);
    ASSERT_TRUE(connections.ok()) << connections.status();
    core_ = std::make_unique<Core>(options, *std::move(connections));
  }

  Microbatch MakeMicrobatch() const {
    return {.head = "lm",
            .hidden_size = kHidden,
            .hidden_dtype = v1::DTYPE_FP32,
            .hidden = hidden_.data(),
            .targets = targets_};
  }

  std::shared_ptr<LossCall> StartCall(std::vector<float>& gradient, absl::Duration patience) {
    auto call = std::make_shared<LossCall>(
        core_.get(), LossWork::Forward(MakeMicrobatch(), {.grad_hidden = gradient.data()}, {}),
        CallOptions{.streams = 1, .slice_bytes = kSlice, .patience = patience}, nullptr);
    call->Start();
    return call;
  }

  void AwaitWaiting(int calls) const {
    while (region_->waiting() != calls) absl::SleepFor(absl::Milliseconds(1));
  }

  void ExpectWanted(const std::vector<float>& gradient) const {
    for (size_t i = 0; i < gradient.size(); ++i) ASSERT_NEAR(gradient[i], wanted_[i], 1e-5) << i;
  }

  uint64_t moved_in_messages() const { return *core_->connections().moved(); }

  test::ServerProcess server_{LOSSD_BINARY};
  std::unique_ptr<Core> core_;
  std::shared_ptr<SharedRegion> region_;
  std::vector<float> hidden_ = std::vector<float>(kRows * kHidden);
  std::vector<int32_t> targets_ = std::vector<int32_t>(kRows);
  std::vector<float> wanted_ = std::vector<float>(kRows * kHidden);
  std::vector<float> gradient_ = std::vector<float>(kRows * kHidden, NAN);
};

TEST_F(SlicePlacesTest, ACallWaitsForWhatOthersGiveBack) {
  const uint64_t taken = region_->Take(kRegionBytes).value();
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  EXPECT_FALSE(call->Done());
  region_->Give(taken);
  const auto result = call->Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectWanted(gradient_);
  EXPECT_EQ(moved_in_messages(), 0u) << "all rows lay in the region";
  EXPECT_EQ(region_->waiting(), 0);
  EXPECT_EQ(region_->Take(kRegionBytes), uint64_t{0}) << "the call has given back what it took";
}

TEST_F(SlicePlacesTest, ManyCallsWaitAtOnce) {
  constexpr int kCalls = 8;
  const uint64_t taken = region_->Take(kRegionBytes).value();
  std::vector<std::vector<float>> gradients(kCalls, gradient_);
  std::vector<std::shared_ptr<LossCall>> calls;
  for (auto& gradient : gradients) calls.push_back(StartCall(gradient, kLong));
  AwaitWaiting(kCalls);
  region_->Give(taken);
  for (int i = 0; i < kCalls; ++i) {
    const auto result = calls[i]->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectWanted(gradients[i]);
  }
  EXPECT_EQ(moved_in_messages(), 0u);
}

TEST_F(SlicePlacesTest, ACallThatWaitsInVainGoesOnInMessages) {
  const uint64_t taken = region_->Take(kRegionBytes).value();
  for (const absl::Duration patience : {absl::ZeroDuration(), absl::Milliseconds(10)}) {
    std::fill(gradient_.begin(), gradient_.end(), NAN);
    const uint64_t before = moved_in_messages();
    const auto result = StartCall(gradient_, patience)->Wait();
    ASSERT_TRUE(result.ok()) << result.status();
    ExpectWanted(gradient_);
    EXPECT_EQ(moved_in_messages() - before, 2 * kRows * kRowBytes);
    EXPECT_EQ(region_->waiting(), 0);
  }
  region_->Give(taken);
}

TEST_F(SlicePlacesTest, ACallThatWaitsCanBeCancelled) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  call->Cancel();
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(region_->waiting(), 0);
}

TEST_F(SlicePlacesTest, ACallThatWaitsEndsWithItsServer) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  server_.Kill();
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(region_->waiting(), 0);
}

TEST_F(SlicePlacesTest, AClientThatGoesEndsCallsThatWait) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  core_ = nullptr;
  EXPECT_EQ(call->Wait().status().code(), absl::StatusCode::kCancelled);
}

TEST_F(SlicePlacesTest, ARegionThatIsRetiredIsNotWaitedFor) {
  ASSERT_TRUE(region_->Take(kRegionBytes).has_value());
  const auto call = StartCall(gradient_, kLong);
  AwaitWaiting(1);
  region_->Retire();
  const auto result = call->Wait();
  ASSERT_TRUE(result.ok()) << result.status();
  ExpectWanted(gradient_);
  EXPECT_EQ(moved_in_messages(), 2 * kRows * kRowBytes);
}

TEST_F(SlicePlacesTest, WaitsOnlyWhereOthersAreInTheWay) {
  const std::vector<uint8_t> large(kRegionBytes + 1), small(100);
  int freed = 0;
  SlicePlaces places(region_, /*may_wait=*/true, std::nullopt);
  EXPECT_TRUE(places.WaitForOthers([&freed] { ++freed; }));
  EXPECT_EQ(places.Put(0, large.size(), large)->kind, Kind::kMessage) << "the region is smaller";
  const uint64_t taken = region_->Take(kRegionBytes).value();
  EXPECT_EQ(places.Put(0, small.size(), small)->kind, Kind::kWaitForOthers);
  EXPECT_EQ(places.Put(0, small.size(), small)->kind, Kind::kWaitForOthers);
  EXPECT_EQ(region_->waiting(), 1);
  EXPECT_EQ(freed, 0);
  region_->Give(taken);
  EXPECT_EQ(freed, 1);
  EXPECT_EQ(places.Put(0, small.size(), small)->kind, Kind::kRegion);
  // From here on it can wait for itself.
  ASSERT_TRUE(region_->Take(kRegionBytes - SharedRegion::kAlignment).has_value());
  EXPECT_EQ(places.Put(1, small.size(), small)->kind, Kind::kWait);
  places.Free(0);
  const uint64_t rest = region_->Take(small.size()).value();
  EXPECT_EQ(places.Put(1, small.size(), small)->kind, Kind::kWaitForOthers);
  places.StopWaitingForOthers();
  region_->Give(rest);
  EXPECT_EQ(freed, 1) << "it does not wait any more";
  ASSERT_TRUE(region_->Take(small.size()).has_value());
  EXPECT_EQ(places.Put(1, small.size(), small)->kind, Kind::kMessage) << "once in vain is enough";
  places.End(absl::OkStatus());

  SlicePlaces in_order(region_, /*may_wait=*/false, std::nullopt);
  EXPECT_FALSE(in_order.WaitForOthers([] {}));
  EXPECT_EQ(in_order.Put(0, small.size(), small)->kind, Kind::kMessage);
  in_order.End(absl::OkStatus());
  SlicePlaces in_messages(nullptr, /*may_wait=*/true, std::nullopt);
  EXPECT_FALSE(in_messages.WaitForOthers([] {}));
}

TEST_F(SlicePlacesTest, WaitersOfARegion) {
  int first = 0, second = 0;
  EXPECT_FALSE(region_->Await(kRegionBytes + 1, &first, [] {}));
  EXPECT_TRUE(region_->Await(1, &first, [&first] { ++first; }));
  EXPECT_EQ(first, 1) << "there is room already";
  const uint64_t half = region_->Take(kRegionBytes / 2).value();
  const uint64_t little = region_->Take(1).value();
  ASSERT_TRUE(region_->Take(kRegionBytes / 2 - SharedRegion::kAlignment).has_value());
  EXPECT_TRUE(region_->Await(kRegionBytes / 2, &first, [&first] { ++first; }));
  EXPECT_TRUE(region_->Await(1, &second, [&second] { ++second; }));
  region_->Give(little);
  EXPECT_EQ(first, 1) << "what is free is too small for it";
  EXPECT_EQ(second, 1);
  region_->Give(half);
  EXPECT_EQ(first, 2);
  EXPECT_EQ(region_->waiting(), 0);
  EXPECT_TRUE(region_->Await(kRegionBytes, &first, [&first] { ++first; }));
  region_->StopWaiting(&first);
  EXPECT_TRUE(region_->Await(kRegionBytes, &second, [&second] { ++second; }));
  region_->Retire();
  EXPECT_EQ(first, 2);
  EXPECT_EQ(second, 2);
  EXPECT_FALSE(region_->Await(kRegionBytes, &first, [] {}));
}

TEST_F(SlicePlacesTest, RangesOfARegion) {
  constexpr uint64_t kUnit = SharedRegion::kAlignment;
  EXPECT_EQ(region_->Take(kUnit), uint64_t{0});
  EXPECT_EQ(region_->Take(1), kUnit);
  EXPECT_EQ(region_->Take(kUnit + 1), 2 * kUnit);
  region_->Give(kUnit);
  EXPECT_EQ(region_->Take(kUnit + 1), 4 * kUnit) << "what is free in between is too small";
  EXPECT_EQ(region_->Take(kUnit), kUnit);
  EXPECT_EQ(region_->Take(kRegionBytes), std::nullopt);
}

// The server may still write to what the call has taken, or may have lost the region.
TEST_F(SlicePlacesTest, ACallThatFailsRetiresItsRegion) {
  struct {
    absl::Status status;
    bool put, retired;
  } const cases[] = {{absl::OkStatus(), false, false},
                     {absl::InvalidArgumentError("x"), false, false},
                     {absl::InvalidArgumentError("x"), true, true},
                     {absl::UnavailableError("x"), false, true}};
  const std::vector<uint8_t> small(100);
  for (const auto& one : cases) {
    const auto region = core_->connections().regions().Get();
    ASSERT_NE(region, nullptr);
    SlicePlaces places(region, /*may_wait=*/true, std::nullopt);
    if (one.put) {
      ASSERT_EQ(places.Put(0, small.size(), small)->kind, Kind::kRegion);
    }
    places.End(one.status);
    EXPECT_EQ(region->usable(), !one.retired) << one.status;
  }
}

}  // namespace
}  // namespace lossd::client::internal::server_process_test
