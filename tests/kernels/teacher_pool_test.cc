// SPDX-License-Identifier: Apache-2.0
#include "kernels/teacher_pool.h"

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace lossd::kernels::teacher_pool_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int64_t kUnit = TeacherPool::kAlignment;

TEST(TeacherPoolTest, TheHeadThatWasUsedLongestAgoLeavesFirst) {
  TeacherPool pool(2 * kUnit);
  const TeacherPool::Id a = pool.Add(kUnit), b = pool.Add(kUnit), c = pool.Add(kUnit);
  EXPECT_TRUE(pool.Use(a).copy);
  EXPECT_TRUE(pool.Use(b).copy);
  EXPECT_FALSE(pool.Use(a).copy);
  const TeacherPool::Place place = pool.Use(c);
  EXPECT_TRUE(place.copy);
  EXPECT_THAT(place.evicted, ElementsAre(b));
  EXPECT_TRUE(pool.on_device(a));
  EXPECT_FALSE(pool.on_device(b));
  EXPECT_EQ(pool.stats(b).evictions, 1);
  EXPECT_EQ(pool.stats(a).hits, 1);
  EXPECT_EQ(pool.stats(a).copies, 1);
}

TEST(TeacherPoolTest, AHeadLargerThanThePoolIsRefusedWithBothNumbers) {
  TeacherPool pool(4 * kUnit);
  EXPECT_EQ(*pool.SizeWith(4 * kUnit), 4 * kUnit);
  const absl::Status status = pool.SizeWith(4 * kUnit + 1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(5 * kUnit, " bytes")));
  EXPECT_THAT(std::string(status.message()), HasSubstr(absl::StrCat(4 * kUnit, " bytes")));
  EXPECT_THAT(std::string(status.message()), HasSubstr("--teacher_pool_bytes"));
  EXPECT_EQ(pool.size(), 0);
}

TEST(TeacherPoolTest, WithoutALimitItIsAsLargeAsItsLargestHead) {
  TeacherPool pool(0);
  EXPECT_EQ(pool.size(), 0);
  const TeacherPool::Id small = pool.Add(kUnit);
  EXPECT_EQ(pool.size(), kUnit);
  pool.Use(small);
  EXPECT_EQ(*pool.SizeWith(3 * kUnit - 1), 3 * kUnit);
  const TeacherPool::Id large = pool.Add(3 * kUnit - 1);
  EXPECT_EQ(pool.size(), 3 * kUnit);
  EXPECT_FALSE(pool.on_device(small));  // the memory is another one
  EXPECT_EQ(pool.stats(small).evictions, 0);
  pool.Use(small);
  EXPECT_THAT(pool.Use(large).evicted, ElementsAre(small));
  pool.Remove(large);
  EXPECT_EQ(pool.size(), 3 * kUnit);
  pool.Remove(small);
  EXPECT_EQ(pool.size(), 0);
}

TEST(TeacherPoolTest, ValuesThatHaveChangedAreCopiedAgain) {
  TeacherPool pool(0);
  const TeacherPool::Id head = pool.Add(10);
  EXPECT_TRUE(pool.Use(head).copy);
  EXPECT_FALSE(pool.Use(head).copy);
  pool.Invalidate(head);
  EXPECT_FALSE(pool.on_device(head));
  EXPECT_TRUE(pool.Use(head).copy);
  pool.AddCopying(head, absl::Seconds(2));
  pool.AddCopying(head + 1, absl::Seconds(2));  // of a head that is gone
  const PagingStats stats = pool.stats(head);
  EXPECT_EQ(stats.copies, 2);
  EXPECT_EQ(stats.copied_bytes, 20);
  EXPECT_EQ(stats.evictions, 0);
  EXPECT_EQ(stats.copying, absl::Seconds(2));
}

TEST(TeacherPoolTest, SumsOfSeveralDevices) {
  PagingStats sum = {.on_device = true, .value_bytes = 1, .hits = 2};
  sum += {.on_device = false, .value_bytes = 3, .hits = 4, .copies = 5, .evictions = 6, .copied_bytes = 7};
  EXPECT_FALSE(sum.on_device);
  EXPECT_EQ(sum.value_bytes, 4);
  EXPECT_EQ(sum.hits, 6);
  EXPECT_EQ(sum.copied_bytes, 7);
}

// A pool as somebody would write it who has all the time in the world: a byte map of units.
class Model {
 public:
  explicit Model(int64_t units) : units_(static_cast<size_t>(units), 0) {}

  void Add(uint64_t id, int64_t units) { sizes_[id] = units; }
  bool Has(uint64_t id) const { return std::find(units_.begin(), units_.end(), id) != units_.end(); }
  void Drop(uint64_t id) {
    std::replace(units_.begin(), units_.end(), id, uint64_t{0});
    order_.remove(id);
  }
  void Remove(uint64_t id) {
    Drop(id);
    sizes_.erase(id);
  }
  // Who has to leave.
  std::vector<uint64_t> Use(uint64_t id, int64_t* unit) {
    std::vector<uint64_t> left;
    if (!Has(id)) {
      while (!Place(id)) {
        left.push_back(order_.front());
        Drop(order_.front());
      }
    }
    order_.remove(id);
    order_.push_back(id);
    *unit = std::find(units_.begin(), units_.end(), id) - units_.begin();
    return left;
  }

 private:
  bool Place(uint64_t id) {
    const auto size = static_cast<size_t>(sizes_[id]);
    for (size_t begin = 0; begin + size <= units_.size(); ++begin) {
      const auto from = units_.begin() + static_cast<std::ptrdiff_t>(begin);
      const auto to = from + static_cast<std::ptrdiff_t>(size);
      if (!std::all_of(from, to, [](uint64_t owner) { return owner == 0; })) continue;
      std::fill(from, to, id);
      return true;
    }
    return false;
  }

  std::vector<uint64_t> units_;  // 0: free
  std::map<uint64_t, int64_t> sizes_;
  std::list<uint64_t> order_;  // those that are there, by their last use
};

// Random sequences of uses, changes, creations and deletions, compared with the model.
TEST(TeacherPoolTest, RandomUsesAgreeWithAModel) {
  for (uint32_t seed = 1; seed <= 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
    const int64_t units = 1 + below(24);
    TeacherPool pool(units * kUnit + below(kUnit));
    Model model(units);
    std::vector<TeacherPool::Id> ids;
    std::map<TeacherPool::Id, int64_t> sizes, hits, copies, evictions;
    for (int i = 0; i < 300; ++i) {
      const int64_t what = below(12);
      if (ids.empty() || (what == 0 && ids.size() < 12)) {
        const int64_t size = 1 + below(units);
        const TeacherPool::Id id = pool.Add(size * kUnit - below(kUnit));
        model.Add(id, size);
        sizes[id] = size;
        ids.push_back(id);
        continue;
      }
      const auto at = static_cast<size_t>(below(static_cast<int64_t>(ids.size())));
      const TeacherPool::Id id = ids[at];
      if (what == 1 && ids.size() > 1) {
        pool.Remove(id);
        model.Remove(id);
        ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at));
        continue;
      }
      if (what == 2) {
        pool.Invalidate(id);
        model.Drop(id);
        continue;
      }
      ++(model.Has(id) ? hits : copies)[id];
      const bool was_there = model.Has(id);
      int64_t unit = 0;
      const std::vector<uint64_t> left = model.Use(id, &unit);
      const TeacherPool::Place place = pool.Use(id);
      EXPECT_EQ(place.copy, !was_there);
      EXPECT_EQ(place.evicted, left);
      EXPECT_EQ(place.offset, unit * kUnit);
      EXPECT_LE(place.offset + sizes[id] * kUnit, pool.size());
      for (const TeacherPool::Id other : left) ++evictions[other];
      for (const TeacherPool::Id other : ids) {
        EXPECT_EQ(pool.on_device(other), model.Has(other));
        const PagingStats stats = pool.stats(other);
        EXPECT_EQ(stats.hits, hits[other]);
        EXPECT_EQ(stats.copies, copies[other]);
        EXPECT_EQ(stats.copied_bytes, copies[other] * stats.value_bytes);
        EXPECT_EQ(stats.evictions, evictions[other]);
      }
    }
  }
}

}  // namespace
}  // namespace lossd::kernels::teacher_pool_test
