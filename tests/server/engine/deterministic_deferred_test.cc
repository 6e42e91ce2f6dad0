// SPDX-License-Identifier: Apache-2.0
// Deferred microbatches in deterministic mode, on a scripted device.
#include <algorithm>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/engine/deterministic_fixture.h"

namespace lossd::engine::deterministic_deferred_test {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;

class DeterministicDeferredTest : public DeterministicTest {
 protected:
  // The forward pass of a whole microbatch whose rows are kept.
  void Forward(uint64_t id, int64_t rows) {
    StreamSpec spec = Spec(id, rows, {0, rows});
    spec.reduction = Reduction::kNone;
    spec.retain = true;
    spec.want_grad_hidden = spec.accumulate_gradients = false;
    Call call = Open(spec);
    for (int64_t row = 0; row < rows; row += 10) ASSERT_TRUE(Send(call, id, {row, std::min(rows, row + 10)}));
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
  }
  static BackwardSpec Backward(uint64_t id, RowRange rows) {
    BackwardSpec spec{.head = "head", .step = 0, .microbatch_id = id, .rows = rows};
    spec.want_grad_hidden = spec.accumulate_gradients = true;
    spec.grad_loss.assign(static_cast<size_t>(rows.size()), 2.0f);
    return spec;
  }
  Call Open(const BackwardSpec& spec) {
    Call call;
    auto stream = engine_->OpenBackward(spec, call.results);
    EXPECT_TRUE(stream.ok()) << stream.status();
    (*stream)->Start();
    call.stream = *std::move(stream);
    return call;
  }
  using DeterministicTest::Open;
  // Sends all of the call's slices, one after the other.
  static void SendRetained(const Call& call) {
    for (RowRange rows : call.stream->RetainedSlices()) ASSERT_TRUE(SentSlice(*call.stream, rows).Wait());
  }
};

TEST_F(DeterministicDeferredTest, RetainedRowsTakeTheirTurn) {
  Start({.retained_bytes = 4096});
  for (uint64_t id : {1, 0}) Forward(id, 20);
  Call second = Open(Backward(1, {0, 20}));
  EXPECT_THAT(second.stream->RetainedSlices(), ElementsAre(RowRange{0, 16}, RowRange{16, 20}));
  const SentSlice waits(*second.stream, {0, 16});
  EXPECT_FALSE(waits.queued());
  Call first = Open(Backward(0, {0, 20}));
  SendRetained(first);
  ASSERT_TRUE(first.results->Wait().ok()) << first.results->Wait();
  EXPECT_TRUE(waits.Wait());
  EXPECT_TRUE(SentSlice(*second.stream, {16, 20}).Wait());
  ASSERT_TRUE(second.results->Wait().ok());
  EXPECT_THAT(second.results->grads()[18], ElementsAre(2 * RowName(1, 18), 1.0f, 1.0f));
  std::vector<float> expected = Names(0, {0, 20});
  for (float name : Names(1, {0, 20})) expected.push_back(name);
  EXPECT_THAT(device_.accumulated(), ElementsAreArray(expected));
}

// The largest factor of a group's gradients may decide about the bits of them all.
TEST_F(DeterministicDeferredTest, RowsThatAreNotSentAgainKeepTheirGradients) {
  Start({.retained_bytes = 4096});
  Forward(0, 8);
  std::vector<float> lse, entropy;
  device_.inspect = [&](const kernels::Slice& slice) {
    ASSERT_TRUE(slice.grad_loss != nullptr && slice.grad_lse != nullptr && slice.grad_entropy != nullptr);
    lse.insert(lse.end(), slice.grad_lse, slice.grad_lse + slice.rows);
    entropy.insert(entropy.end(), slice.grad_entropy, slice.grad_entropy + slice.rows);
  };
  for (RowRange rows : {RowRange{0, 8}, {0, 8}, {3, 5}}) {  // once, and twice again
    BackwardSpec spec = Backward(0, rows);
    for (int64_t row = rows.begin; row < rows.end; ++row) {
      spec.grad_lse.push_back(static_cast<float>(row));
      spec.grad_entropy.push_back(static_cast<float>(10 * row));
    }
    lse.clear();
    entropy.clear();
    Call call = Open(spec);
    SendRetained(call);
    ASSERT_TRUE(call.results->Wait().ok()) << call.results->Wait();
    EXPECT_THAT(lse, ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
    EXPECT_THAT(entropy, ElementsAre(0, 10, 20, 30, 40, 50, 60, 70));
  }
}

}  // namespace
}  // namespace lossd::engine::deterministic_deferred_test
