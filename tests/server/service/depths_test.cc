// SPDX-License-Identifier: Apache-2.0
// Tests of microbatches that are divided into depths, through the service: they are what separate calls are,
// their sums are counted once, and what is wrong about them is refused.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "tests/server/service/service_client.h"
#include "tests/server/service/service_fixture.h"

namespace lossd::app::testing::depths_test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kHidden = 16;
constexpr int32_t kClasses = 61;
constexpr double kTolerance = 2e-5;  // of the largest value: chunks are cut otherwise, and round otherwise

// The rows of one depth, some of them ignored, in memory of their own.
struct DepthRows {
  std::vector<float> hidden;
  std::vector<int32_t> targets;
  std::vector<float> row_weights;
  float weight = 1.0f;

  uint64_t rows() const { return targets.size(); }
};

DepthRows RandomRows(uint64_t rows, float weight, std::mt19937_64& rng) {
  DepthRows depth{.hidden = std::vector<float>(rows * kHidden), .weight = weight};
  std::normal_distribution<float> normal;
  for (float& x : depth.hidden) x = normal(rng);
  for (uint64_t i = 0; i < rows; ++i) {
    depth.targets.push_back(rng() % 5 == 0 ? -100 : static_cast<int32_t>(rng() % kClasses));
    depth.row_weights.push_back(static_cast<float>(rng() % 8) / 4.0f);
  }
  return depth;
}

void ExpectClose(const std::vector<float>& got, const std::vector<float>& want, const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  float largest = 0.0f;
  for (const float x : want) largest = std::max(largest, std::fabs(x));
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], kTolerance * largest) << what << i;
}

struct Mode {
  bool deterministic = false;
  int devices = 1;
  bool by_vocabulary = false;
};

class DepthsTest : public ::testing::TestWithParam<Mode> {
 protected:
  DepthsTest() {
    client::ClientOptions options;
    options.target = server_.target();
    options.channels = 2;
    client_ = *client::Client::Connect(options);
    for (const char* name : {"together", "apart"}) {
      v1::CreateHeadRequest request;
      request.mutable_spec()->set_name(name);
      request.mutable_spec()->set_hidden_size(kHidden);
      request.mutable_spec()->set_vocab_size(kClasses);
      request.mutable_spec()->set_bias(true);
      request.mutable_spec()->set_class_weights(true);
      EXPECT_TRUE(client_->CreateHead(request).ok());
    }
    // 600 rows are more than a slice has.
    for (const auto& [rows, weight] :
         {std::pair{230, 1.0f}, {0, 0.5f}, {600, 0.3f}, {41, 0.0f}, {129, 2.0f}}) {
      data_.push_back(RandomRows(static_cast<uint64_t>(rows), weight, rng_));
    }
  }

  static ServerOptions Options() {
    return SmallCpuServer(GetParam().deterministic, GetParam().devices, GetParam().by_vocabulary);
  }

  // All depths in one call, from where they lie.
  struct Together {
    client::Microbatch microbatch{
        .head = "together", .step = 0, .hidden_size = kHidden, .hidden_dtype = v1::DTYPE_FP32};
    std::vector<int32_t> targets;
    std::vector<float> row_weights, losses;
    std::vector<std::vector<float>> gradients;
  };
  void Divide(Together& call) {
    for (DepthRows& depth : data_) {
      call.targets.insert(call.targets.end(), depth.targets.begin(), depth.targets.end());
      call.row_weights.insert(call.row_weights.end(), depth.row_weights.begin(), depth.row_weights.end());
      call.gradients.emplace_back(depth.hidden.size(), NAN);
      call.microbatch.depths.push_back({.rows = depth.rows(),
                                        .weight = depth.weight,
                                        .hidden = depth.hidden.data(),
                                        .grad_hidden = call.gradients.back().data()});
    }
    call.losses.resize(call.targets.size());
    call.microbatch.targets = call.targets;
    call.microbatch.row_weights = call.row_weights;
  }
  static client::ComputeOptions Accumulating() {
    client::ComputeOptions options;
    options.accumulate_gradients = true;
    options.loss.set_z_loss(0.01f);
    options.slice_bytes = 6000;
    return options;
  }

  std::vector<float> GradientOf(const std::string& head, v1::Param param) {
    const auto tensor = client_->ReadTensor(head, param, v1::ROLE_GRADIENT);
    EXPECT_TRUE(tensor.ok()) << tensor.status();
    return tensor.ok() ? tensor->values : std::vector<float>();
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::vector<DepthRows> data_;
  TestServer server_{Options()};
  std::unique_ptr<client::Client> client_;
};

INSTANTIATE_TEST_SUITE_P(Modes, DepthsTest,
                         ::testing::Values(Mode{}, Mode{.deterministic = true}, Mode{.devices = 2},
                                           Mode{.deterministic = true, .devices = 2, .by_vocabulary = true}),
                         [](const auto& mode) {
                           return absl::StrCat(mode.param.deterministic ? "deterministic" : "arrival", "On",
                                               mode.param.devices);
                         });

TEST_P(DepthsTest, AreWhatSeparateCallsAre) {
  for (const int streams : {1, 3}) {
    for (const v1::Reduction reduction : {v1::REDUCTION_MEAN, v1::REDUCTION_SUM}) {
      SCOPED_TRACE(absl::StrCat(streams, " streams, reduction ", reduction));
      ASSERT_TRUE(client_->ZeroGradients("together", 0).ok());
      ASSERT_TRUE(client_->ZeroGradients("apart", 0).ok());
      client::ComputeOptions options = Accumulating();
      options.reduction = reduction;
      options.streams = streams;
      options.grad_output = 0.5f;
      Together call;
      Divide(call);
      const auto together =
          client_->ComputeLoss(call.microbatch, {.row_loss = absl::MakeSpan(call.losses)}, options);
      ASSERT_TRUE(together.ok()) << together.status();
      ASSERT_EQ(together->depths.size(), data_.size());
      double loss = 0;
      uint64_t row = 0;
      for (size_t i = 0; i < data_.size(); ++i) {
        SCOPED_TRACE(absl::StrCat("depth ", i));
        const DepthRows& depth = data_[i];
        std::vector<float> gradient(depth.hidden.size(), NAN), losses(depth.rows());
        client::Microbatch microbatch{.head = "apart",
                                      .step = 0,
                                      .id = i,
                                      .hidden_size = kHidden,
                                      .hidden_dtype = v1::DTYPE_FP32,
                                      .hidden = depth.hidden.data(),
                                      .targets = depth.targets,
                                      .row_weights = depth.row_weights};
        client::ComputeOptions alone = options;
        alone.grad_output = 0.5f * depth.weight;
        const auto apart = client_->ComputeLoss(
            microbatch, {.grad_hidden = gradient.data(), .row_loss = absl::MakeSpan(losses)}, alone);
        ASSERT_TRUE(apart.ok()) << apart.status();
        const client::DepthResult& got = together->depths[i];
        EXPECT_NEAR(got.loss, apart->loss, kTolerance * std::fabs(apart->loss));
        EXPECT_NEAR(got.z_loss_sum, apart->z_loss_sum, kTolerance * apart->z_loss_sum);
        EXPECT_EQ(got.normalizer, apart->normalizer);
        EXPECT_EQ(got.valid_rows, apart->valid_rows);
        EXPECT_EQ(got.correct_rows, apart->correct_rows);
        EXPECT_EQ(got.accumulated_rows, apart->valid_rows);
        EXPECT_EQ(got.repeated_rows, 0u);
        ExpectClose(call.gradients[i], gradient, "dL/dx ");
        ExpectClose({call.losses.begin() + row, call.losses.begin() + row + depth.rows()}, losses, "loss ");
        loss += double{depth.weight} * apart->loss;
        row += depth.rows();
      }
      EXPECT_NEAR(together->loss, loss, kTolerance * std::fabs(loss));
      EXPECT_EQ(together->normalizer, 1.0);
      for (const v1::Param param : {v1::PARAM_WEIGHT, v1::PARAM_BIAS})
        ExpectClose(GradientOf("together", param), GradientOf("apart", param), "gradient ");
    }
  }
}

TEST_P(DepthsTest, AreCountedOnce) {
  Together call;
  Divide(call);
  const auto first = client_->ComputeLoss(call.microbatch, {}, Accumulating());
  ASSERT_TRUE(first.ok()) << first.status();
  const std::vector<float> gradient = GradientOf("together", v1::PARAM_WEIGHT);
  Together again;
  Divide(again);
  const auto repeat = client_->ComputeLoss(again.microbatch, {}, Accumulating());
  ASSERT_TRUE(repeat.ok()) << repeat.status();
  EXPECT_EQ(GradientOf("together", v1::PARAM_WEIGHT), gradient);
  for (size_t i = 0; i < data_.size(); ++i) {
    EXPECT_EQ(repeat->depths[i].repeated_rows, first->depths[i].accumulated_rows) << i;
    EXPECT_EQ(repeat->depths[i].accumulated_rows, 0u) << i;
    ExpectClose(again.gradients[i], call.gradients[i], "dL/dx ");
  }
  // Other depths are another request.
  const auto expect_refused = [&](const std::function<void(std::vector<client::Depth>&)>& change) {
    Together other;
    Divide(other);
    change(other.microbatch.depths);
    const absl::Status status = client_->ComputeLoss(other.microbatch, {}, Accumulating()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("depths"));
  };
  expect_refused([](auto& depths) { depths[2].weight = 0.5f; });
  expect_refused([](auto& depths) { depths[2].normalizer = 77.0; });
  expect_refused([](auto& depths) { std::swap(depths[0], depths[1]); });
  EXPECT_EQ(GradientOf("together", v1::PARAM_WEIGHT), gradient);
}

TEST_P(DepthsTest, NormalizersOfTheirOwn) {
  Together call;
  Divide(call);
  client::ComputeOptions options = Accumulating();
  options.loss.set_use_class_weights(true);
  const absl::Status without = client_->ComputeLoss(call.microbatch, {}, options).status();
  EXPECT_THAT(std::string(without.message()), HasSubstr("microbatch.depths[0].normalizer"));
  for (client::Depth& depth : call.microbatch.depths) depth.normalizer = 100.0;
  const auto result = client_->ComputeLoss(call.microbatch, {}, options);
  ASSERT_TRUE(result.ok()) << result.status();
  double loss = 0;
  for (size_t i = 0; i < data_.size(); ++i) {
    EXPECT_EQ(result->depths[i].normalizer, 100.0);
    loss += double{data_[i].weight} * result->depths[i].loss_sum / 100.0;
  }
  EXPECT_DOUBLE_EQ(result->loss, loss);
}

// ---- What clients can get wrong ----

class DepthsInputTest : public BadInputTest {
 protected:
  // Two depths of six rows each.
  absl::Status RunDivided(const std::function<void(v1::OpenMicrobatch&)>& spoil, int64_t slice_end = 6) {
    v1::OpenMicrobatch open = GoodOpen();
    for (int i = 0; i < 2; ++i) open.add_depths()->set_rows(kRows / 2);
    spoil(open);
    const auto stream = client_->OpenLoss();
    stream->SendOpen(open);
    stream->SendSlice(0, slice_end, Payload(0, slice_end));
    if (slice_end < kRows) stream->SendSlice(slice_end, kRows, Payload(slice_end, kRows));
    stream->HalfClose();
    return stream->Finish().status;
  }
};

TEST_F(DepthsInputTest, RowsOfTheDepths) {
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(1)->set_rows(7); }), "open.depths[1].rows",
                "7");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(1)->set_rows(5); }), "open.depths", "11");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(0)->set_rows(uint64_t{1} << 63); }),
                "open.depths[0].rows", "9223372036854775808");
  ExpectInvalid(RunDivided([](auto& open) {
                  for (int i = 0; i < 63; ++i) open.add_depths();
                }),
                "open.depths.size", "65");
}

TEST_F(DepthsInputTest, WeightsAndNormalizers) {
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(1)->set_weight(-1.0f); }),
                "open.depths[1].weight", "-1");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(0)->set_weight(NAN); }),
                "open.depths[0].weight", "nan");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(0)->set_normalizer(-2.0); }),
                "open.depths[0].normalizer", "-2");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(1)->set_normalizer(0.0); }),
                "open.depths[1].normalizer", "0");
  ExpectInvalid(RunDivided([](auto& open) { open.mutable_depths(1)->set_normalizer(1e-40); }),
                "open.depths[1].normalizer", "1e-40");
  ExpectInvalid(RunDivided([](auto& open) {
                  open.set_reduction(v1::REDUCTION_SUM);
                  open.mutable_depths(1)->set_normalizer(2.0);
                }),
                "open.depths[1].normalizer", "2");
  ExpectInvalid(RunDivided([](auto& open) { open.set_normalizer(3.0); }), "open.normalizer", "3");
  // A call that carries a part of the microbatch does not know the others' targets.
  ExpectInvalid(RunDivided([](auto& open) {
                  open.mutable_rows()->set_end(kRows / 2);
                  open.mutable_targets()->Truncate(kRows / 2);
                }),
                "open.depths[0].normalizer", "nothing");
}

TEST_F(DepthsInputTest, WithoutGradientsYet) {
  ExpectInvalid(RunDivided([](auto& open) {
                  open.set_reduction(v1::REDUCTION_NONE);
                  open.set_accumulate_gradients(false);
                  open.set_want_grad_hidden(false);
                }),
                "open.depths", "2");
}

TEST_F(DepthsInputTest, SlicesOfTwoDepths) {
  ExpectInvalid(RunDivided([](auto&) {}, 7), "slice.rows", "[0, 7)");
}

}  // namespace
}  // namespace lossd::app::testing::depths_test
