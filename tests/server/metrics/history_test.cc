// SPDX-License-Identifier: Apache-2.0
#include "server/metrics/history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>

namespace lossd::metrics::history_test {
namespace {

using ::testing::SizeIs;

Values ValuesWith(float rows) {
  Values values;
  values.fill(std::numeric_limits<float>::quiet_NaN());
  values[0] = rows;
  return values;
}

HeadValues HeadWith(float loss) { return {1.0f, loss, 0.5f, 1e-4f}; }

class HistoryTest : public testing::Test {
 protected:
  void Add(float rows, const std::map<std::string, HeadValues>& heads = {}) {
    history_.Add(absl::FromUnixSeconds(1'000'000'000 + 2 * added_++), ValuesWith(rows), heads);
  }
  nlohmann::json Json(uint64_t after = 0, absl::string_view head = "") const {
    return nlohmann::json::parse(history_.Json(42, after, head));
  }

  History history_;
  int64_t added_ = 0;
};

TEST_F(HistoryTest, BeginsEmpty) {
  EXPECT_FALSE(history_.Last().has_value());
  const nlohmann::json json = Json();
  EXPECT_EQ(json["incarnation"], "000000000000002a");
  EXPECT_EQ(json["interval_seconds"], 2);
  EXPECT_EQ(json["last"], 0);
  EXPECT_THAT(json["times"], SizeIs(0));
  EXPECT_THAT(json["server"], SizeIs(kSeries));
  EXPECT_THAT(json["heads"], SizeIs(0));
}

TEST_F(HistoryTest, AReaderGoesOnFromTheLastSampleItHas) {
  for (int i = 0; i < 5; ++i) Add(static_cast<float>(i));
  EXPECT_EQ(Json()["server"]["rows_per_second"], nlohmann::json({0, 1, 2, 3, 4}));
  EXPECT_EQ(Json()["server"]["queued_rows"], nlohmann::json({nullptr, nullptr, nullptr, nullptr, nullptr}));
  const nlohmann::json later = Json(3);
  EXPECT_EQ(later["last"], 5);
  EXPECT_EQ(later["times"], nlohmann::json({1'000'000'006.0, 1'000'000'008.0}));
  EXPECT_EQ(later["server"]["rows_per_second"], nlohmann::json({3, 4}));
  EXPECT_THAT(Json(5)["times"], SizeIs(0));
  EXPECT_THAT(Json(std::numeric_limits<uint64_t>::max())["times"], SizeIs(0));
  EXPECT_EQ((*history_.Last())[0], 4.0f);
}

TEST_F(HistoryTest, KeepsSoManySamples) {
  const auto samples = static_cast<int>(History::kSamples);
  for (int i = 0; i < samples + 7; ++i) Add(static_cast<float>(i), {{"lm", HeadWith(static_cast<float>(i))}});
  const nlohmann::json json = Json();
  EXPECT_THAT(json["times"], SizeIs(samples));
  EXPECT_EQ(json["server"]["rows_per_second"].front(), 7);
  EXPECT_EQ(json["server"]["rows_per_second"].back(), samples + 6);
  EXPECT_EQ(json["heads"]["lm"]["loss"].front(), 7);
  EXPECT_EQ(json["heads"]["lm"]["loss"].back(), samples + 6);
  EXPECT_LT(history_.Json(42, 0, "").size(), 100'000);
}

TEST_F(HistoryTest, HeadsComeAndGo) {
  Add(0);
  Add(0, {{"a", HeadWith(3)}, {"b", HeadWith(std::numeric_limits<float>::quiet_NaN())}});
  nlohmann::json heads = Json()["heads"];
  EXPECT_EQ(heads["a"]["loss"], nlohmann::json({nullptr, 3}));
  EXPECT_EQ(heads["b"]["loss"], nlohmann::json({nullptr, nullptr}));
  EXPECT_EQ(heads["b"]["gradient_norm"], nlohmann::json({nullptr, 0.5}));
  EXPECT_THAT(Json(0, "a")["heads"], SizeIs(1));
  EXPECT_THAT(Json(0, "c")["heads"], SizeIs(0));
  Add(0, {{"b", HeadWith(1)}});
  EXPECT_FALSE(Json()["heads"].contains("a"));
  Add(0, {{"a", HeadWith(9)}});  // another one of this name
  EXPECT_EQ(Json()["heads"]["a"]["loss"], nlohmann::json({nullptr, nullptr, nullptr, 9}));
}

TEST_F(HistoryTest, SoManyHeadsHaveSeries) {
  std::map<std::string, HeadValues> heads;
  for (size_t i = 0; i < History::kMostHeads + 5; ++i)
    heads["head-" + std::to_string(1000 + i)] = HeadWith(1);
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
  heads.erase("head-1000");
  Add(0, heads);
  EXPECT_THAT(Json()["heads"], SizeIs(History::kMostHeads));
}

}  // namespace
}  // namespace lossd::metrics::history_test
