// SPDX-License-Identifier: Apache-2.0
// The exchange between ranks over transfers in memory: the bits of threads of one process, whatever goes into
// one message, and an end when a rank cannot be reached.
#include <gtest/gtest.h>

#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "kernels/cpu/row_loss.h"
#include "tests/kernels/problem.h"

namespace lossd::kernels::testing::rank_exchange_test {
namespace {

// What ranks send to each other, in order. Thread-safe.
class Post {
 public:
  void Put(int from, int to, std::vector<uint8_t> bytes) {
    absl::MutexLock lock(&mutex_);
    under_way_[{from, to}].push_back(std::move(bytes));
  }
  std::vector<uint8_t> Take(int from, int to) {
    absl::MutexLock lock(&mutex_);
    std::deque<std::vector<uint8_t>>& queue = under_way_[{from, to}];
    const auto is_there = [&] {
      mutex_.AssertHeld();
      return !queue.empty();
    };
    mutex_.Await(absl::Condition(&is_there));
    std::vector<uint8_t> bytes = std::move(queue.front());
    queue.pop_front();
    return bytes;
  }

 private:
  absl::Mutex mutex_;
  std::map<std::pair<int, int>, std::deque<std::vector<uint8_t>>> under_way_ ABSL_GUARDED_BY(mutex_);
};

class PostTransfers final : public RankTransfers {
 public:
  PostTransfers(Replica replica, size_t room_bytes, Post* post)
      : replica_(replica), room_bytes_(room_bytes), post_(post) {
    rooms_.resize(static_cast<size_t>(replica.count), std::vector<double>(room_bytes / sizeof(double)));
  }

  Replica replica() const override { return replica_; }
  absl::Span<uint8_t> Room(int rank) override {
    return {reinterpret_cast<uint8_t*>(rooms_[static_cast<size_t>(rank)].data()), room_bytes_};
  }
  absl::Status Exchange(ExchangeKind, absl::Span<const RankTransfer> send,
                        absl::Span<const RankTransfer> receive) override {
    if (fails_) return absl::UnavailableError("rank 7 is away");
    for (const RankTransfer& transfer : send) {
      EXPECT_GT(transfer.bytes, 0u);
      const auto* const bytes = static_cast<const uint8_t*>(transfer.data);
      post_->Put(replica_.index, transfer.rank, {bytes, bytes + transfer.bytes});
    }
    for (const RankTransfer& transfer : receive) {
      const std::vector<uint8_t> bytes = post_->Take(transfer.rank, replica_.index);
      EXPECT_EQ(bytes.size(), transfer.bytes);
      std::memcpy(transfer.data, bytes.data(), std::min(bytes.size(), transfer.bytes));
    }
    return absl::OkStatus();
  }
  void Fail() { fails_ = true; }

 private:
  const Replica replica_;
  const size_t room_bytes_;
  Post* const post_;
  std::vector<std::vector<double>> rooms_;
  bool fails_ = false;
};

// What one part brings to a chunk, and gets.
struct Part {
  std::vector<RowStatistics> own, merged;
  std::vector<GradientSums> gradients;
  std::vector<RowResult> results;
  std::vector<float> rows;          // [.., cols]
  std::vector<float> sums, totals;  // [cols]
};

struct Shape {
  int parts = 1;
  int64_t rows = 0;
  int64_t cols = 1;
  RowRange summed;  // of the rows
  RowRange wanted;  // within those
};

std::vector<Part> RandomParts(const Shape& shape, Rng& rng) {
  std::vector<Part> parts(static_cast<size_t>(shape.parts));
  const auto rows = static_cast<size_t>(shape.rows);
  const auto cols = static_cast<size_t>(shape.cols);
  for (size_t i = 0; i < parts.size(); ++i) {
    Part& part = parts[i];
    part.own.resize(rows);
    part.merged.resize(rows);
    part.gradients.resize(rows);
    part.results.resize(rows);
    for (size_t row = 0; row < rows; ++row) {
      RowStatistics& own = part.own[row];
      own.max = Chance(rng, 0.1) ? -std::numeric_limits<float>::infinity() : Uniform(rng, -90.0f, 90.0f);
      own.argmax = static_cast<int32_t>(10 * i + row % 10);
      own.finite = !Chance(rng, 0.05);
      own.has_target = row % parts.size() == i;
      own.target_logit = Uniform(rng, -90.0f, own.max > -90.0f ? own.max : -89.0f);
      own.reference = own.max < -100.0f ? 0.0f : own.max;
      own.other_exp = Uniform(rng, 0.0f, 9.0f);
      own.moment = Uniform(rng, -3.0f, 0.0f);
      own.centred = Uniform(rng, -99.0f, 0.0f);
      own.weight_sum = 10.0;
      part.gradients[row] = {Uniform(rng, 0.0f, 1.0f), Uniform(rng, 0.0f, 1.0f), Uniform(rng, 0.0f, 1.0f)};
    }
    for (size_t at = 0; at < rows * cols; ++at) part.rows.push_back(Uniform(rng, -1.0f, 1.0f));
    for (size_t at = 0; at < cols; ++at) part.sums.push_back(Uniform(rng, -1.0f, 1.0f));
    part.totals.assign(cols, 0.125f);
  }
  return parts;
}

// All steps of a chunk, of one part. Returns the rows that it delivers.
RowRange Run(PartExchange& exchange, int index, const Shape& shape, Part& part) {
  EXPECT_TRUE(exchange.MergeStatistics(index, part.own, absl::MakeSpan(part.merged)).ok());
  EXPECT_TRUE(exchange.MergeGradients(index, part.gradients, absl::MakeSpan(part.results)).ok());
  const auto here = exchange.SumRows(index, part.rows.data(), shape.summed, shape.cols);
  EXPECT_TRUE(here.ok() && *here == RowsOfPart(shape.summed, index, shape.parts));
  EXPECT_TRUE(exchange.AddSums(index, part.sums.data(), part.totals.data(), shape.cols).ok());
  return exchange.CollectRows(index, part.rows.data(), shape.summed, shape.wanted, shape.cols).value();
}

void InThreads(int parts, const std::function<void(int)>& run) {
  std::vector<std::thread> threads;
  for (int i = 0; i < parts; ++i) threads.emplace_back([&run, i] { run(i); });
  for (std::thread& thread : threads) thread.join();
}

void ExpectSame(const RowStatistics& got, const RowStatistics& want) {
  EXPECT_EQ(got.max, want.max);
  EXPECT_EQ(got.argmax, want.argmax);
  EXPECT_EQ(got.finite, want.finite);
  EXPECT_EQ(got.has_target, want.has_target);
  EXPECT_EQ(got.target_logit, want.target_logit);
  EXPECT_EQ(got.reference, want.reference);
  EXPECT_EQ(got.other_exp, want.other_exp);
  EXPECT_EQ(got.moment, want.moment);
  EXPECT_EQ(got.centred, want.centred);
  EXPECT_EQ(got.weight_sum, want.weight_sum);
}

void ExpectSame(const GradientSums& got, const GradientSums& want) {
  EXPECT_EQ(got.dropped_mass, want.dropped_mass);
  EXPECT_EQ(got.sampling_variance, want.sampling_variance);
  EXPECT_EQ(got.squared_gradient, want.squared_gradient);
}

void CompareWithThreads(const Shape& shape, size_t room_bytes, Rng& rng) {
  SCOPED_TRACE(::testing::Message() << shape.parts << " parts, " << shape.rows << " x " << shape.cols
                                    << ", rooms of " << room_bytes);
  const std::vector<Part> parts = RandomParts(shape, rng);
  std::vector<Part> of_threads = parts, of_ranks = parts;
  std::vector<RowRange> by_threads(parts.size()), by_ranks(parts.size());
  ThreadExchange threads(shape.parts);
  InThreads(shape.parts, [&](int i) {
    const auto at = static_cast<size_t>(i);
    by_threads[at] = Run(threads, i, shape, of_threads[at]);
  });
  Post post;
  InThreads(shape.parts, [&](int i) {
    const auto at = static_cast<size_t>(i);
    PostTransfers transfers({i, shape.parts}, room_bytes, &post);
    RankExchange exchange(&transfers);
    by_ranks[at] = Run(exchange, i, shape, of_ranks[at]);
  });
  for (size_t i = 0; i < parts.size(); ++i) {
    SCOPED_TRACE(i);
    for (size_t row = 0; row < parts[i].own.size(); ++row) {
      ExpectSame(of_ranks[i].merged[row], of_threads[i].merged[row]);
      ExpectSame(of_ranks[i].results[row].gradient, of_threads[i].results[row].gradient);
    }
    EXPECT_EQ(of_ranks[i].totals, of_threads[i].totals);
    // Rank 0 delivers what all threads together do.
    EXPECT_TRUE(i == 0 || by_ranks[i].begin == by_ranks[i].end);
    for (int64_t row = by_threads[i].begin; row < by_threads[i].end; ++row) {
      ASSERT_TRUE(row >= by_ranks[0].begin && row < by_ranks[0].end) << row;
      for (int64_t at = row * shape.cols; at < (row + 1) * shape.cols; ++at) {
        const auto place = static_cast<size_t>(at);
        ASSERT_EQ(of_ranks[0].rows[place], of_threads[i].rows[place]) << row;
      }
    }
  }
  EXPECT_EQ(by_ranks[0].begin, shape.wanted.begin);
  EXPECT_EQ(by_ranks[0].end, shape.wanted.end);
}

TEST(RankExchangeTest, BitsAreThoseOfThreadsWhateverGoesIntoOneMessage) {
  Rng rng = FreshRng();
  for (const int parts : {2, 3, 5}) {
    for (const size_t room_bytes : {96, 1 << 10, 1 << 20}) {  // the first for one RowStatistics
      CompareWithThreads({parts, 40, 7, {0, 40}, {0, 40}}, room_bytes, rng);
      CompareWithThreads({parts, 33, 17, {5, 31}, {9, 20}}, room_bytes, rng);
      CompareWithThreads({parts, 3, 1, {0, 1}, {0, 1}}, room_bytes, rng);
      CompareWithThreads({parts, 2, 90, {0, 2}, {1, 1}}, room_bytes, rng);
      CompareWithThreads({parts, 0, 4, {0, 0}, {0, 0}}, room_bytes, rng);
    }
  }
}

// Else a rank could still be reading a chunk whose memory another one writes to.
TEST(RankExchangeTest, RanksWaitForEachOtherInAChunkWithoutRowsToo) {
  Post post;
  PostTransfers transfers({0, 2}, 96, &post);
  RankExchange exchange(&transfers);
  std::thread other([&post] { post.Put(1, 0, std::vector<uint8_t>(sizeof(RowStatistics))); });
  EXPECT_TRUE(exchange.MergeStatistics(0, {}, {}).ok());
  other.join();
  EXPECT_EQ(post.Take(0, 1).size(), sizeof(RowStatistics));
}

TEST(RankExchangeTest, WhatCannotBeTransferredIsAnErrorOfEachStep) {
  Rng rng = FreshRng();
  Post post;
  PostTransfers transfers({1, 2}, 96, &post);
  RankExchange exchange(&transfers);
  transfers.Fail();
  const Shape shape = {2, 4, 3, {0, 4}, {0, 4}};
  Part part = RandomParts(shape, rng)[1];
  for (const absl::Status& status :
       {exchange.MergeStatistics(1, part.own, absl::MakeSpan(part.merged)),
        exchange.MergeGradients(1, part.gradients, absl::MakeSpan(part.results)),
        exchange.SumRows(1, part.rows.data(), shape.summed, shape.cols).status(),
        exchange.AddSums(1, part.sums.data(), part.totals.data(), shape.cols),
        exchange.CollectRows(1, part.rows.data(), shape.summed, shape.wanted, shape.cols).status()}) {
    EXPECT_EQ(status, absl::UnavailableError("rank 7 is away"));
  }
}

}  // namespace
}  // namespace lossd::kernels::testing::rank_exchange_test
