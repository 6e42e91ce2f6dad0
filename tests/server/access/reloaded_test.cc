// SPDX-License-Identifier: Apache-2.0
#include "server/access/reloaded.h"

#include <gtest/gtest.h>

#include "kernels/clocks/clock.h"
#include "tests/support/temp_folder.h"

namespace lossd::access::reloaded_test {
namespace {

class ReloadedTest : public testing::Test {
 protected:
  ReloadedTest() {
    log::Configure(log::LogLevel::kOff, log::LogFormat::kText);
    test::WriteWholeFile(path_, "one");
  }
  std::unique_ptr<Reloaded<std::string>> Make() {
    auto made = Reloaded<std::string>::Create("text", {path_}, [this] { return Load(); });
    EXPECT_TRUE(made.ok());
    return *std::move(made);
  }
  absl::StatusOr<std::shared_ptr<const std::string>> Load() {
    if (!std::filesystem::exists(path_)) return absl::NotFoundError("gone");
    std::string text = test::ReadWholeFile(path_);
    if (text == "bad") return absl::InvalidArgumentError("bad");
    return std::make_shared<const std::string>(std::move(text));
  }
  static bool Becomes(Reloaded<std::string>& value, const std::string& text) {
    for (const absl::Time limit = clocks::SteadyNow() + absl::Minutes(2); clocks::SteadyNow() < limit;) {
      if (*value.Get() == text) return true;
      absl::SleepFor(absl::Milliseconds(20));
    }
    return false;
  }

  test::TempFolder folder_;
  const std::string path_ = folder_.File("file");
};

TEST_F(ReloadedTest, TakesTheNewContent) {
  const auto value = Make();
  const std::shared_ptr<const std::string> first = value->Get();
  EXPECT_EQ(*first, "one");
  test::WriteWholeFile(path_, "two");
  EXPECT_TRUE(Becomes(*value, "two"));
  EXPECT_EQ(*first, "one");
}

TEST_F(ReloadedTest, KeepsTheOldWhileTheNewIsNotValid) {
  const auto value = Make();
  test::WriteWholeFile(path_, "bad");
  absl::SleepFor(2 * kLookAtFilesEvery);
  EXPECT_EQ(*value->Get(), "one");
  std::filesystem::remove(path_);
  absl::SleepFor(2 * kLookAtFilesEvery);
  EXPECT_EQ(*value->Get(), "one");
  test::WriteWholeFile(path_, "three");
  EXPECT_TRUE(Becomes(*value, "three"));
}

TEST_F(ReloadedTest, TheFirstHasToBeValid) {
  test::WriteWholeFile(path_, "bad");
  EXPECT_EQ(Reloaded<std::string>::Create("text", {path_}, [this] { return Load(); }).status().message(),
            "bad");
}

}  // namespace
}  // namespace lossd::access::reloaded_test
