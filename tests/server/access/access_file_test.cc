// SPDX-License-Identifier: Apache-2.0
#include "server/access/access_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tests/support/temp_folder.h"

namespace lossd::access::access_file_test {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class AccessFileTest : public testing::Test {
 protected:
  void Write(mode_t mode, absl::string_view content = "content") {
    test::WriteWholeFile(file_.path, content);
    ASSERT_EQ(chmod(file_.path.c_str(), mode), 0);
  }
  std::string Error(Secrecy secrecy = Secrecy::kSecret) {
    const auto content = ReadAccessFile(file_, secrecy);
    EXPECT_EQ(content.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(content.status().message()),
                AllOf(HasSubstr("token_file"), HasSubstr(file_.path)));
    return std::string(content.status().message());
  }

  test::TempFolder folder_;
  const AccessFile file_ = {"token_file", folder_.File("file")};
};

TEST_F(AccessFileTest, ReadsWhatItsOwnerAloneCanRead) {
  Write(0600);
  EXPECT_EQ(*ReadAccessFile(file_, Secrecy::kSecret), "content");
  Write(0400);
  EXPECT_EQ(*ReadAccessFile(file_, Secrecy::kSecret), "content");
}

TEST_F(AccessFileTest, RefusesSecretsThatOthersCanRead) {
  for (const mode_t mode : {0644, 0604, 0602, 0660}) {
    Write(mode);
    EXPECT_THAT(Error(), HasSubstr("chmod 600")) << std::oct << mode;
    EXPECT_TRUE(ReadAccessFile(file_, Secrecy::kPublic).ok());
  }
}

TEST_F(AccessFileTest, TheGroupMayReadSecretsOfRoot) {
  if (geteuid() != 0) GTEST_SKIP() << "needs to be root";
  Write(0640);
  EXPECT_TRUE(ReadAccessFile(file_, Secrecy::kSecret).ok());
  ASSERT_EQ(chown(file_.path.c_str(), 12345, 12345), 0);
  EXPECT_THAT(Error(), HasSubstr("chmod 600"));
}

TEST_F(AccessFileTest, RefusesWhatIsNoFileWithContent) {
  EXPECT_THAT(Error(), HasSubstr("No such file"));
  Write(0600, "");
  EXPECT_THAT(Error(), HasSubstr("empty"));
  Write(0600, std::string(kMaxAccessFileBytes + 1, 'x'));
  EXPECT_THAT(Error(), HasSubstr("at most"));
  std::filesystem::remove(file_.path);
  std::filesystem::create_directory(file_.path);
  EXPECT_THAT(Error(), HasSubstr("regular file"));
  std::filesystem::remove(file_.path);
  ASSERT_EQ(mkfifo(file_.path.c_str(), 0600), 0);  // would make a plain open wait for ever
  EXPECT_THAT(Error(), HasSubstr("regular file"));
}

}  // namespace
}  // namespace lossd::access::access_file_test
