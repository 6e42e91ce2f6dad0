// SPDX-License-Identifier: Apache-2.0
// Runs the lossctl binary against the fake server, which has a head "head" of 4 x 10.
#ifndef LOSSD_TESTS_CLIENT_CLI_LOSSCTL_FIXTURE_H_
#define LOSSD_TESTS_CLIENT_CLI_LOSSCTL_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_server.h"
#include "tests/support/temp_folder.h"

namespace lossd::cli {

struct Outcome {
  int exit_code = -1;
  std::string out, err;
};

class LossctlTest : public testing::Test {
 protected:
  void SetUp() override { server_.AddHead("head", 4, 10); }

  // Runs `lossctl ARGUMENTS` in a shell, with the fake server as the default one.
  Outcome Run(const std::string& arguments) { return RunAt(server_.target(), arguments); }
  Outcome RunAt(const std::string& server, const std::string& arguments) {
    const std::string out = folder_.File("out"), err = folder_.File("err");
    const std::string command = absl::StrCat("cd ", folder_.path(), " && LOSSD_SERVER=", server,
                                             " " LOSSCTL_PATH " ", arguments, " >", out, " 2>", err);
    const int status = std::system(command.c_str());
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, Read(out), Read(err)};
  }
  nlohmann::json Json(const std::string& arguments) {
    const Outcome outcome = Run("--json " + arguments);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    nlohmann::json json = nlohmann::json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
    EXPECT_FALSE(json.is_discarded()) << outcome.out;
    return json;
  }
  static std::string Read(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  test::TempFolder folder_;
  fake::FakeServer server_;
};

}  // namespace lossd::cli

#endif  // LOSSD_TESTS_CLIENT_CLI_LOSSCTL_FIXTURE_H_
