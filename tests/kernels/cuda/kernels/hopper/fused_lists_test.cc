// SPDX-License-Identifier: Apache-2.0
#include "kernels/cuda/kernels/hopper/fused_lists.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/kernels/hopper/fused_loss.h"
#include "tests/kernels/cuda/cuda_test_device.h"
#include "tests/kernels/cuda/kernels/hopper/device_values.h"

namespace lossd::kernels::cuda::hopper::fused_lists_test {
namespace {

constexpr int64_t kRows = 300;  // two panels
constexpr int64_t kVocab = 2 * kVocabTile;
constexpr int64_t kInner = 8;
constexpr float kEpsilon = 0x1p-10f;

// Rows with the same logits, listed with room for `capacity` classes each.
class Lists {
 public:
  Lists(const std::vector<float>& logits, int32_t target, int32_t capacity)
      : hidden_(Hidden()),
        weight_(Weight(logits)),
        targets_(std::vector<int32_t>(kRows, target)),
        target_dots_(std::vector<float>(
            kRows, static_cast<float>(Decode(DType::kBFloat16, Encode(DType::kBFloat16, logits[target]))))),
        ones_(std::vector<float>(kRows, 1.0f)),
        outputs_(std::vector<float>(5 * kRows, 0.0f)),
        argmax_(std::vector<int32_t>(kRows, 0)),
        memory_(std::vector<uint8_t>(int64_t{8} << 20, 0xff)) {
    Carver carver(memory_.get());
    rows_ = FusedRows::Carve(carver, kRows);
    rows_.partials = TilePartials::Carve(carver, kRows, kVocab);
    lists_ = CandidateLists::Carve(carver, kRows, kVocab, capacity);
    lists_.log2_epsilon = std::log2(kEpsilon);
    EXPECT_LE(carver.used(), int64_t{8} << 20);
  }

  void Run() const {
    FusedLossParams p;
    p.operands = {hidden_.get(), weight_.get(), DType::kBFloat16, kInner, kVocab};
    p.terms.vocab = kVocab;
    p.terms.class_weight_sum = static_cast<float>(kVocab);
    p.in.rows = p.in.padded_rows = kRows;
    p.in.targets = targets_.get();
    p.in.target_dots = target_dots_.get();
    p.in.weights = p.in.coef_loss = p.in.coef_lse = p.in.coef_entropy = ones_.get();
    float** const outputs[] = {&p.out.loss, &p.out.z_loss_part, &p.out.lse, &p.out.entropy,
                               &p.out.target_logprob};
    for (int i = 0; i < 5; ++i) *outputs[i] = outputs_.get() + i * kRows;
    p.out.argmax = argmax_.get();
    p.rows = rows_;
    ASSERT_EQ(LaunchFusedCandidates(p, lists_, 2, nullptr), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }

  std::vector<int32_t> Counts() const { return Read(lists_.counts, kRows); }
  std::set<int32_t> Columns(int64_t row, int32_t count) const {
    std::set<int32_t> columns;
    for (const Candidate& c : Read(lists_.entries + row * lists_.capacity, count)) columns.insert(c.column);
    return columns;
  }

 private:
  template <typename T>
  static std::vector<T> Read(const T* from, int64_t count) {
    std::vector<T> values(static_cast<size_t>(count));
    EXPECT_EQ(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDefault), cudaSuccess);
    return values;
  }
  // x = (1, 0, ...), so that the logits are the first column of W.
  static std::vector<uint16_t> Hidden() {
    std::vector<uint16_t> hidden(kRows * kInner, 0);
    for (int64_t r = 0; r < kRows; ++r) hidden[r * kInner] = Encode(DType::kBFloat16, 1.0f);
    return hidden;
  }
  static std::vector<uint16_t> Weight(const std::vector<float>& logits) {
    std::vector<uint16_t> weight(kVocab * kInner, 0);
    for (int64_t v = 0; v < kVocab; ++v) weight[v * kInner] = Encode(DType::kBFloat16, logits[v]);
    return weight;
  }

  OnDevice<uint16_t> hidden_, weight_;
  OnDevice<int32_t> targets_;
  OnDevice<float> target_dots_, ones_, outputs_;
  OnDevice<int32_t> argmax_;
  OnDevice<uint8_t> memory_;
  FusedRows rows_;
  CandidateLists lists_;
};

// Of two tiles the first is listed when the sums are known, and the second as the pass goes by, when the
// other half of the sum may be missing: with what does not reach epsilon in the end its list has no room for
// the first tile's.
class FusedLists : public ::testing::Test {
 protected:
  static constexpr int32_t kTarget = 3;
  static constexpr int32_t kCandidates = 61;  // in both tiles together

  void SetUp() override {
    LOSSD_SKIP_WITHOUT_HOPPER_GPU();
    logits_.assign(kVocab, -30.0f);
    logits_[kTarget] = std::log(0.4f);
    for (int i = 0; i < 30; ++i) AddCandidate(8 * i, 0.1f / 30.0f);
    AddCandidate(kVocabTile, 0.3f);
    for (int i = 1; i <= 30; ++i) AddCandidate(kVocabTile + 8 * i, 0.2f / 30.0f);
    for (int i = 1; i <= 20; ++i) logits_[kVocabTile + 8 * i + 1] = std::log(0.7f * kEpsilon);
  }

  void AddCandidate(int64_t column, float p) {
    candidates_.insert(static_cast<int32_t>(column));
    logits_[column] = std::log(p);
  }

  std::vector<float> logits_;
  std::set<int32_t> candidates_;
};

TEST_F(FusedLists, AreCompleteIfThereIsRoomForWhatReachesEpsilon) {
  ASSERT_EQ(candidates_.size(), kCandidates);
  for (const int32_t capacity : {kCandidates, kCandidates + 10, kCandidates + 100}) {
    const Lists lists(logits_, kTarget, capacity);
    lists.Run();
    const std::vector<int32_t> counts = lists.Counts();
    for (int64_t r = 0; r < kRows; ++r) {
      ASSERT_LE(counts[r], capacity) << "row " << r;
      const std::set<int32_t> columns = lists.Columns(r, counts[r]);
      ASSERT_EQ(static_cast<int32_t>(columns.size()), counts[r]) << "row " << r;
      ASSERT_TRUE(std::includes(columns.begin(), columns.end(), candidates_.begin(), candidates_.end()))
          << "row " << r;
    }
  }
}

TEST_F(FusedLists, SayThatThereIsNot) {
  const Lists lists(logits_, kTarget, kCandidates - 1);
  lists.Run();
  for (const int32_t count : lists.Counts()) ASSERT_EQ(count, kCandidates);
}

}  // namespace
}  // namespace lossd::kernels::cuda::hopper::fused_lists_test
