#include "server/head/paths.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "tests/support/temp_folder.h"

namespace lossd::head {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;
using testing::Not;

TEST(ValidateNameTest, TakesTheAllowedOnly) {
  for (const std::string& good : {std::string("a"), std::string("Llama-3.1_8B"), std::string(64, 'x'),
                                  std::string("-"), std::string("a..b")}) {
    EXPECT_TRUE(ValidateName("name", good).ok()) << good;
  }
  for (const std::string& bad :
       {std::string(), std::string("."), std::string(".."), std::string(".a"), std::string(65, 'x'),
        std::string("a/b"), std::string("a b"), std::string("a\0b", 3), std::string("\xc3\xa9"),
        std::string("a\n"), std::string("/")}) {
    const absl::Status status = ValidateName("spec.name", bad);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("spec.name"));
  }
}

class ResolveBelowTest : public testing::Test {
 protected:
  ResolveBelowTest() {
    fs::create_directories(root_ + "/models/a");
    fs::create_directories(folder_.File("root-sibling"));
    test::WriteWholeFile(root_ + "/models/a/w", "x");
    test::WriteWholeFile(folder_.File("root-sibling/secret"), "x");
    fs::create_symlink("models/a/w", root_ + "/inside");
    fs::create_symlink("../root-sibling/secret", root_ + "/outside");
    fs::create_symlink("../../root-sibling", root_ + "/models/escape");
    fs::create_symlink("/etc", root_ + "/etc");
    fs::create_symlink("loop", root_ + "/loop");
  }

  absl::StatusCode Code(absl::string_view path) {
    const absl::StatusOr<std::string> resolved = ResolveBelow(root_, path);
    EXPECT_THAT(std::string(resolved.status().message()), Not(HasSubstr(folder_.path())));
    return resolved.status().code();
  }

  test::TempFolder folder_;
  const std::string root_ = folder_.File("root");
};

TEST_F(ResolveBelowTest, FollowsWhatStaysInside) {
  const std::string file = fs::canonical(root_ + "/models/a/w");
  for (const char* path : {"models/a/w", "./models//a/./w", "inside"}) {
    const absl::StatusOr<std::string> resolved = ResolveBelow(root_, path);
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(*resolved, file);
  }
  EXPECT_EQ(ResolveBelow(root_ + "/", "inside").value(), file);
}

TEST_F(ResolveBelowTest, RefusesWhatLeadsOutside) {
  const std::string absolute = root_ + "/models/a/w";
  for (const std::string& path :
       {std::string(""), absolute, std::string("/etc/passwd"), std::string(".."),
        std::string("../root-sibling/secret"), std::string("models/../models/a/w"),
        std::string("models/a/.."), std::string("outside"), std::string("models/escape"),
        std::string("etc/passwd"), std::string("models/a/w\0.x", 14), std::string(".")}) {
    EXPECT_EQ(ResolveBelow(root_, path).status().code(), absl::StatusCode::kInvalidArgument) << path;
  }
  EXPECT_EQ(Code("models/escape/secret"), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Code("none"), absl::StatusCode::kNotFound);
  EXPECT_EQ(Code("loop"), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace lossd::head
