// SPDX-License-Identifier: Apache-2.0
// What lossctl says of command lines that are wrong, of numbers that are too large, and of output that goes
// nowhere.
#include <gmock/gmock.h>
#include <sys/wait.h>

#include <cstdlib>
#include <cstring>

#include "tests/client/cli/lossctl_fixture.h"

namespace lossd::cli::lossctl_usage_test {
namespace {

using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::StartsWith;

using LossctlUsageTest = LossctlTest;

// What is wrong, and with which value; then where to read on.
TEST_F(LossctlUsageTest, WrongCommandLinesAreSaidInWords) {
  const auto first_line = [this](const std::string& arguments) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 2) << arguments;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_THAT(outcome.err, StartsWith("lossctl: ")) << arguments;
    EXPECT_THAT(outcome.err, HasSubstr("\n`lossctl ")) << arguments;
    return outcome.err.substr(std::strlen("lossctl: "), outcome.err.find('\n') - std::strlen("lossctl: "));
  };
  EXPECT_EQ(first_line(""), "a command is missing, such as `lossctl heads`");
  EXPECT_EQ(first_line("context"), "context wants a command of its own");
  EXPECT_EQ(first_line("helth"), "there is no command \"helth\". Did you mean health?");
  EXPECT_EQ(first_line("context remvoe x"), "context has no command \"remvoe\". Did you mean remove?");
  EXPECT_EQ(first_line("create --hiden 8 x --vocab 8"),
            "create has no option --hiden. Did you mean --hidden?");
  EXPECT_EQ(first_line("--verbose heads"), "lossctl has no option --verbose");
  EXPECT_EQ(first_line("heads head"), "heads takes no further argument, got \"head\"");
  EXPECT_EQ(first_line("step head --lr"), "--lr wants a value: FLOAT");
  EXPECT_EQ(first_line("create x --hidden 8"), "--vocab is required");
  EXPECT_EQ(first_line("--context a --server b:1 heads"), "--server cannot be given together with --context");
  EXPECT_EQ(first_line("read head weigth"),
            "PARAM must be one of bias|class-weights|norm-gain|norm-shift|weight, got \"weigth\"");
  for (const char* number : {"-8", "8.5", "8k", "99999999999999999999", "nan", "\"\"", "\" 8\""}) {
    const std::string got = number[0] == '"' ? number : absl::StrCat("\"", number, "\"");
    EXPECT_EQ(first_line(absl::StrCat("create x --vocab 8 --hidden ", number)),
              absl::StrCat("--hidden must be a whole number from 0 to 2^64 - 1, got ", got));
    EXPECT_EQ(first_line(absl::StrCat("loss head --random ", number)),
              absl::StrCat("--random must be a whole number from 1 to 2^64 - 1, got ", got));
  }
  EXPECT_EQ(first_line("save head --keep 5000000000"), "--keep cannot be \"5000000000\"");
  for (const char* seconds : {"-1", "0", "abc", "1e400", "inf", "nan"}) {
    EXPECT_EQ(first_line(absl::StrCat("heads --timeout ", seconds)),
              absl::StrCat("--timeout must be a number above 0, got \"", seconds, "\""));
  }
  EXPECT_EQ(first_line("step head --lr fast"), "--lr must be a number, got \"fast\"");
  EXPECT_EQ(first_line("watch --count -1"), "--count must be a whole number from 0 to 2^64 - 1, got \"-1\"");
  EXPECT_EQ(first_line("watch --interval 0"), "--interval must be a number from 0.05 to 3600, got \"0\"");
  EXPECT_EQ(first_line("bench head --in-flight 0"),
            "--in-flight must be a whole number from 1 to 1024, got \"0\"");
  EXPECT_EQ(first_line("bench head --transport smoke"),
            "--transport must be one of auto|cuda_ipc|grpc|shared_memory, got \"smoke\"");
  EXPECT_EQ(first_line("bench head --slice-bytes 3X"),
            "--slice-bytes must be a number of bytes such as 4096, 64KiB or 2GiB, got \"3X\"");
  EXPECT_EQ(first_line("read head weight --rows -1:3"),
            "--rows must be BEGIN:END, such as 0:16 or 16:, got \"-1:3\"");
  EXPECT_THAT(first_line("--incarnation zz heads"), HasSubstr("hexadecimal digits"));
  EXPECT_EQ(first_line("load head"),
            "CHECKPOINT must be HEAD/NAME, as `lossctl checkpoints` prints it, got \"head\"");
  EXPECT_EQ(first_line("save head --name ''"), "--name must not be empty");
  for (const char* address :
       {"7", "host", "host:0", "host:99999", "ftp://host:1", "http://", "a b:1", "unix:/x"}) {
    EXPECT_THAT(first_line(absl::StrCat("metrics --http '", address, "'")),
                StartsWith("--http must be HOST:PORT, http://HOST:PORT or https://HOST:PORT, got"))
        << address;
  }
  EXPECT_THAT(Run("step head --lr fast").err, ::testing::EndsWith("\n`lossctl step --help` describes it.\n"));
}

TEST_F(LossctlUsageTest, WrongCommandLinesAreDocumentsForThoseWhoAsk) {
  for (const char* arguments :
       {"--json helth", "create x --json --hidden 8.5 --vocab 8", "-o yaml heads --bogus", "--json"}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 2);
    const auto error = nlohmann::json::parse(outcome.err, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(error.is_object()) << arguments << ": " << outcome.err;
    EXPECT_EQ(error["error"]["code"], "INVALID_ARGUMENT");
    EXPECT_EQ(error["error"]["exit_code"], 2);
  }
}

TEST_F(LossctlUsageTest, RowsThatNoMachineHasMemoryForAreRefused) {
  for (const char* arguments :
       {"loss head --random 1000000000000000", "loss head --random 18446744073709551615",
        "bench head --rows 1000000000000000"}) {
    const Outcome outcome = Run(arguments);
    EXPECT_EQ(outcome.exit_code, 4) << arguments << outcome.err;
    EXPECT_THAT(outcome.err,
                ContainsRegex("^lossctl: --r[a-z]+ must be at most [0-9,]+ with 4 values a row"));
  }
}

TEST_F(LossctlUsageTest, WhatCannotBePrintedIsAnError) {
  const auto with_stdout = [this](const std::string& redirection, const std::string& arguments) {
    const std::string err = folder_.File("err");
    const int status = std::system(absl::StrCat("LOSSD_SERVER=", server_.target(), " " LOSSCTL_PATH " ",
                                                arguments, " ", redirection, " 2>", err)
                                       .c_str());
    return Outcome{WIFEXITED(status) ? WEXITSTATUS(status) : -1, "", Read(err)};
  };
  for (const char* command :
       {"heads", "--json heads", "completion bash", "watch --count 1 --interval 0.05"}) {
    const Outcome full = with_stdout(">/dev/full", command);
    EXPECT_EQ(full.exit_code, 1) << command;
    EXPECT_THAT(full.err, HasSubstr("cannot write to the standard output: No space left on device"));
    EXPECT_EQ(with_stdout(">&-", command).exit_code, 1) << command;
  }
  EXPECT_EQ(with_stdout(">/dev/null <&-", "heads").exit_code, 0);
}

}  // namespace
}  // namespace lossd::cli::lossctl_usage_test
