// SPDX-License-Identifier: Apache-2.0
// Sampled gradients through the network: a microbatch that is computed again is sampled alike, over whatever
// connections, in whatever slices, by a server that was restarted, and in deterministic mode to the bit; on
// one device, and by several that share the classes of a head.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/small_head.h"
#include "tests/server/service/test_server.h"

namespace lossd::app::testing::sampled_test {
namespace {

constexpr size_t kRows = 700;

// How a client sends.
struct Way {
  int channels = 1;
  int streams = 1;
  uint64_t slice_bytes = 1 << 20;
};

struct Mode {
  bool deterministic;
  int devices;  // that each have some of the classes
};

class SampledServiceTest : public ::testing::TestWithParam<Mode> {
 protected:
  ServerOptions Options() const { return OptionsOn(GetParam().devices); }
  static ServerOptions OptionsOn(int devices) {
    ServerOptions options = SmallServer();
    options.deterministic = GetParam().deterministic;
    options.backend = "cpu";
    options.cpu_devices = devices;
    options.split = devices == 1 ? "any" : "vocabulary";
    return options;
  }

  static void CreateHead(const TestServer& server) {
    ASSERT_TRUE(Connect(server, 1)->CreateHead(SmallHead()).ok());
  }
  static std::unique_ptr<client::Client> Connect(const TestServer& server, int channels) {
    client::ClientOptions options;
    options.target = server.target();
    options.channels = channels;
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  // dx of the data as microbatch `id`, and what else is known.
  client::LossResult Compute(const TestServer& server, const Way& way, uint64_t id, std::vector<float>& dx,
                             v1::Gradients gradients = v1::GRADIENTS_SAMPLED) {
    dx.assign(data_.hidden.size(), NAN);
    client::ComputeOptions compute;
    compute.accumulate_gradients = true;
    compute.streams = way.streams;
    compute.slice_bytes = way.slice_bytes;
    compute.loss.set_gradients(gradients);
    compute.loss.set_max_gradient_error(1.0f);
    compute.loss.set_filter_epsilon(0.003f);
    compute.loss.set_sample_threshold(0.05f);
    const auto result = Connect(server, way.channels)
                            ->ComputeLoss(SmallMicrobatch(data_, 0, id), {.grad_hidden = dx.data()}, compute);
    EXPECT_TRUE(result.ok()) << result.status();
    return result.ok() ? *result : client::LossResult();
  }

  // In deterministic mode to the bit. Otherwise rows are rounded as their chunk has it, which may, very
  // rarely, move a decision.
  void ExpectAlike(const std::vector<float>& got, const std::vector<float>& want) const {
    ASSERT_EQ(got.size(), want.size());
    if (GetParam().deterministic) {
      EXPECT_EQ(got, want);
      return;
    }
    EXPECT_LE(DifferentRows(got, want), 2u);
  }
  static size_t DifferentRows(const std::vector<float>& a, const std::vector<float>& b) {
    float largest = 0.0f;
    for (const float x : b) largest = std::max(largest, std::fabs(x));
    size_t rows = 0;
    for (size_t row = 0; row < kRows; ++row) {
      bool different = false;
      for (size_t i = row * kSmallHidden; i < (row + 1) * kSmallHidden; ++i)
        different |= !(std::fabs(a[i] - b[i]) < 1e-3f * largest);
      rows += different ? 1 : 0;
    }
    return rows;
  }

  std::mt19937_64 rng_{std::random_device{}()};
  SmallRows data_ = MakeSmallRows(kRows, rng_);
};

INSTANTIATE_TEST_SUITE_P(Modes, SampledServiceTest,
                         ::testing::Values(Mode{false, 1}, Mode{true, 1}, Mode{false, 2}, Mode{true, 2},
                                           Mode{true, 3}),
                         [](const auto& mode) {
                           return absl::StrCat(mode.param.deterministic ? "deterministic" : "arrival", "On",
                                               mode.param.devices);
                         });

TEST_P(SampledServiceTest, RepeatsAreSampledAlike) {
  std::vector<float> first, again, other;
  {
    TestServer server(Options());
    CreateHead(server);
    const client::LossResult result = Compute(server, {}, 0, first);
    EXPECT_GT(result.gradient_error(), 0.01);
    EXPECT_LT(result.gradient_error(), 1.0);
    const client::LossResult repeat =
        Compute(server, {.channels = 2, .streams = 5, .slice_bytes = 1000}, 0, again);
    EXPECT_EQ(repeat.repeated_rows, result.valid_rows);
    EXPECT_NEAR(repeat.gradient_error(), result.gradient_error(), 1e-6);
    ExpectAlike(again, first);
    Compute(server, {}, 1, other);
    EXPECT_GT(DifferentRows(other, first), kRows / 2) << "another microbatch has other random numbers";
  }
  TestServer restarted(Options());
  CreateHead(restarted);
  Compute(restarted, {.channels = 3, .streams = 3, .slice_bytes = 7777}, 0, again);
  ExpectAlike(again, first);
}

// What devices that share the classes say of the error and of what was dropped is what one device says.
TEST_P(SampledServiceTest, TheErrorIsThatOfAllClasses) {
  TestServer one(OptionsOn(1)), server(Options());
  CreateHead(one);
  CreateHead(server);
  std::vector<float> dx;
  uint64_t id = 0;
  for (const v1::Gradients gradients : {v1::GRADIENTS_SAMPLED, v1::GRADIENTS_AUTO, v1::GRADIENTS_FILTERED}) {
    const client::LossResult want = Compute(one, {}, id, dx, gradients);
    const client::LossResult got = Compute(server, {}, id, dx, gradients);
    ++id;
    EXPECT_EQ(got.gradient_error() > 0.0, gradients != v1::GRADIENTS_FILTERED);
    EXPECT_NEAR(got.gradient_error(), want.gradient_error(), 1e-5);
    EXPECT_EQ(got.dropped_mass > 0.0, gradients == v1::GRADIENTS_FILTERED);
    EXPECT_NEAR(got.dropped_mass, want.dropped_mass, 1e-4 * want.dropped_mass);
  }
}

}  // namespace
}  // namespace lossd::app::testing::sampled_test
