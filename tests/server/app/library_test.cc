// SPDX-License-Identifier: Apache-2.0
// The server as a library, loaded as another language loads liblossd.so: what a process gets with it, and
// what it finds as it was when a server has stopped. This one has a GPU backend that is played and can be
// lost (losable_device.cc).
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "server/app/lossd.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::library_test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// The functions of a library, as dlsym finds them.
struct Library {
  explicit Library(const char* file) : handle(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (handle == nullptr) {
      ADD_FAILURE() << dlerror();
      std::abort();
    }
    Find("lossd_version", &version);
    Find("lossd_start", &start);
    Find("lossd_address", &address);
    Find("lossd_http_address", &http_address);
    Find("lossd_wait", &wait);
    Find("lossd_live", &live);
    Find("lossd_drain", &drain);
    Find("lossd_stop", &stop);
    Find("lossd_free", &free);
  }
  template <typename Function>
  void Find(const char* name, Function** function) const {
    *function = reinterpret_cast<Function*>(dlsym(handle, name));
    EXPECT_NE(*function, nullptr) << name;
  }

  void* handle;
  decltype(lossd_version)* version;
  decltype(lossd_start)* start;
  decltype(lossd_address)* address;
  decltype(lossd_http_address)* http_address;
  decltype(lossd_wait)* wait;
  decltype(lossd_live)* live;
  decltype(lossd_drain)* drain;
  decltype(lossd_stop)* stop;
  decltype(lossd_free)* free;
};

const Library& TheLibrary() {
  static const auto& library = *new Library(LOSSD_LIBRARY);
  return library;
}

class LibraryTest : public testing::Test {
 protected:
  LibraryTest() { setenv("TMPDIR", folder_.path().c_str(), 1); }
  ~LibraryTest() override { unsetenv("TMPDIR"); }

  lossd_server* Start(const std::vector<std::string>& more = {}) { return Start(more, &code_, &error_); }
  lossd_server* Start(const std::vector<std::string>& more, int* code, std::string* error) const {
    std::vector<std::string> texts = {"backend=cpu", "threads=1",
                                      absl::StrCat("checkpoint_dir=", folder_.path(), "/checkpoints")};
    texts.insert(texts.end(), more.begin(), more.end());
    std::vector<const char*> options;
    for (const std::string& text : texts) options.push_back(text.c_str());
    options.push_back(nullptr);
    *code = 0;
    char* text = nullptr;
    lossd_server* const server = TheLibrary().start(options.data(), code, &text);
    *error = text == nullptr ? "" : text;
    TheLibrary().free(text);
    return server;
  }

  // What lossctl prints of the server, and its exit status.
  static std::pair<int, std::string> Lossctl(const std::string& words, const lossd_server* server) {
    const std::string command =
        absl::StrCat(LOSSD_LOSSCTL, " --server=", TheLibrary().address(server), " ", words, " 2>&1");
    FILE* const output = popen(command.c_str(), "r");
    std::string text;
    for (int c = 0; (c = fgetc(output)) != EOF;) text.push_back(static_cast<char>(c));
    return {pclose(output), text};
  }
  // Makes a head and a step with it.
  static void Train(const lossd_server* server) {
    for (const char* words :
         {"create lm --hidden=8 --vocab=50", "loss lm --random=16 --accumulate", "step lm --lr=0.1"}) {
      const auto [status, text] = Lossctl(words, server);
      EXPECT_EQ(status, 0) << words << ": " << text;
    }
  }

  std::vector<std::string> LeftInTheFolder() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      names.push_back(entry.path().filename());
    return names;
  }

  const test::TempFolder folder_;
  int code_ = 0;
  std::string error_;
};

TEST_F(LibraryTest, ServesInAFolderOfItsOwn) {
  EXPECT_STREQ(TheLibrary().version(), LOSSD_VERSION);
  lossd_server* const server = Start();
  ASSERT_NE(server, nullptr) << error_;
  const std::string address = TheLibrary().address(server);
  ASSERT_TRUE(absl::StartsWith(address, absl::StrCat("unix:", folder_.path(), "/lossd-"))) << address;
  EXPECT_STREQ(TheLibrary().http_address(server), "");
  struct stat of_folder = {};
  ASSERT_EQ(stat(std::filesystem::path(address.substr(5)).parent_path().c_str(), &of_folder), 0);
  EXPECT_EQ(of_folder.st_mode & 0777U, 0700U);
  Train(server);
  char* why = nullptr;
  EXPECT_EQ(TheLibrary().live(server, &why), 1);
  EXPECT_EQ(why, nullptr);
  EXPECT_EQ(TheLibrary().wait(server, 0.01), LOSSD_SERVES);
  EXPECT_EQ(TheLibrary().drain(server, 10), 1);
  EXPECT_EQ(TheLibrary().wait(server, -1), LOSSD_DRAINED);
  EXPECT_NE(Lossctl("heads", server).first, 0);
  TheLibrary().stop(server);
  TheLibrary().stop(nullptr);
  EXPECT_THAT(LeftInTheFolder(), ::testing::Each("checkpoints"));
}

TEST_F(LibraryTest, SeveralAtOnceKnowNothingOfEachOther) {
  lossd_server* const one = Start({"http=127.0.0.1:0"});
  lossd_server* const other = Start({"http=127.0.0.1:0", "listen=127.0.0.1:0", "cpu_devices=2"});
  ASSERT_NE(one, nullptr);
  ASSERT_NE(other, nullptr);
  EXPECT_THAT(std::string(TheLibrary().address(other)), HasSubstr("127.0.0.1:"));
  Train(one);
  EXPECT_THAT(Lossctl("heads -o json", other).second, Not(HasSubstr("lm")));
  Train(other);
  TheLibrary().stop(one);
  EXPECT_THAT(Lossctl("heads -o json", other).second, HasSubstr("lm"));
  EXPECT_EQ(test::HttpStatus(test::HttpGet(TheLibrary().http_address(other), "/livez")), 200);
  TheLibrary().stop(other);
}

TEST_F(LibraryTest, AWrongOptionIsNamedAndNothingIsLeft) {
  const struct {
    std::string option;
    int code;
    std::string words;
  } cases[] = {
      {"threads", 3, "option \"threads\" is not name=text"},
      {"thread=1", 3, "there is no option thread"},
      {"ranks=2", 3, "rank"},
      {"ranks=two", 3, "ranks is \"two\"; it must be a number"},
      {"worker_http=127.0.0.1:0", 3, "worker_http is an option of the program alone"},
      {"local_rank=x", 3, "local_rank is \"x\"; it must be a number"},
      {"rank_timeout=soon", 3, "rank_timeout is \"soon\""},
      {"threads=many", 3, "threads is \"many\""},
      {"staging_bytes=1XB", 3, "staging_bytes is \"1XB\"; it must be a number of bytes"},
      {"unix_socket_mode=9", 3, "unix_socket_mode is \"9\"; it must be octal"},
      {"peer_share=2", 3, "peer_share"},
      {"drain_timeout=soon", 3, "drain_timeout is \"soon\""},
      {"log_level=loud", 3, "log_level is \"loud\"; it must be"},
      {"restore=newest", 3, "restore"},
      {"listen=unix:/no/such/folder/grpc", 14, "/no/such/folder/grpc"},
  };
  for (const auto& [option, code, words] : cases) {
    EXPECT_EQ(Start({option}), nullptr) << option;
    EXPECT_EQ(code_, code) << option;
    EXPECT_THAT(error_, HasSubstr(words));
  }
  EXPECT_THAT(LeftInTheFolder(), ::testing::Each("checkpoints"));
  const char* const options[] = {"threads=many", nullptr};
  EXPECT_EQ(TheLibrary().start(options, nullptr, nullptr), nullptr);  // who does not ask is not told
}

TEST_F(LibraryTest, NoFolderForTheSocket) {
  setenv("TMPDIR", "/no/such/folder", 1);
  EXPECT_EQ(Start(), nullptr);
  EXPECT_EQ(code_, 14);
  EXPECT_THAT(error_, HasSubstr("/no/such/folder"));
}

// ---- What it does to the process ----

std::vector<std::string> Environment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

// What becomes of each signal that the process may handle, and the mask of this thread.
std::map<int, const void*> Signals() {
  std::map<int, const void*> handlers;
  for (int signal = 1; signal < SIGRTMIN; ++signal) {
    struct sigaction action = {};
    if (signal != SIGURG && sigaction(signal, nullptr, &action) == 0)
      handlers[signal] = reinterpret_cast<const void*>(action.sa_handler);
  }
  sigset_t blocked;
  pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
  for (int signal = 1; signal < SIGRTMIN; ++signal)
    handlers[-signal] = sigismember(&blocked, signal) != 0 ? environ : nullptr;
  return handlers;
}

int64_t Entries(const std::string& folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}

TEST_F(LibraryTest, LeavesTheProcessAsItWas) {
  const auto environment = Environment();
  const auto signals = Signals();
  const auto folder = std::filesystem::current_path();
  for (int i = 0; i < 3; ++i) TheLibrary().stop(Start({"http=127.0.0.1:0"}));  // gRPC keeps some threads
  const int64_t threads = Entries("/proc/self/task");
  const int64_t descriptors = Entries("/proc/self/fd");
  for (int i = 0; i < 20; ++i) {
    lossd_server* const server = Start({"http=127.0.0.1:0"});
    ASSERT_NE(server, nullptr) << error_;
    if (i % 10 == 0) Train(server);
    TheLibrary().stop(server);
  }
  // Some threads end a moment later.
  const absl::Time limit = absl::Now() + absl::Seconds(60);
  while (Entries("/proc/self/task") > threads + 8 && absl::Now() < limit)
    absl::SleepFor(absl::Milliseconds(10));
  EXPECT_LE(Entries("/proc/self/task"), threads + 8);
  EXPECT_LE(Entries("/proc/self/fd"), descriptors + 8);
  EXPECT_EQ(Environment(), environment);
  EXPECT_EQ(Signals(), signals);
  EXPECT_EQ(std::filesystem::current_path(), folder);
}

TEST_F(LibraryTest, AHandlerOfTheProcessStays) {
  struct sigaction mine = {};
  mine.sa_handler = [](int) {};
  struct sigaction before = {};
  ASSERT_EQ(sigaction(SIGURG, &mine, &before), 0);
  lossd_server* const server = Start();
  ASSERT_NE(server, nullptr) << error_;
  Train(server);
  TheLibrary().stop(server);
  struct sigaction after = {};
  sigaction(SIGURG, &before, &after);
  EXPECT_EQ(reinterpret_cast<const void*>(after.sa_handler), reinterpret_cast<const void*>(mine.sa_handler));
}

TEST_F(LibraryTest, AForkGoesItsWay) {
  lossd_server* const server = Start();
  ASSERT_NE(server, nullptr) << error_;
  Train(server);
  const pid_t child = fork();
  if (child == 0) _exit(std::string(TheLibrary().address(server)).empty() ? 1 : 0);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_THAT(Lossctl("heads -o json", server).second, HasSubstr("lm"));
  TheLibrary().stop(server);
}

// ---- Several processes, or here threads, that are one server ----

class RanksTest : public LibraryTest {
 protected:
  // The options of one of two ranks.
  std::vector<std::string> Rank(int rank, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> options = {absl::StrCat("rank=", rank), "ranks=2", leader_, "split=vocabulary",
                                        "collectives=gloo"};
    options.insert(options.end(), more.begin(), more.end());
    return options;
  }
  // Starts both.
  void StartBoth() {
    int code = 0;
    std::string error;
    std::thread other([&] { ranks_[1] = Start(Rank(1), &code, &error); });
    ranks_[0] = Start(Rank(0));
    other.join();
    ASSERT_NE(ranks_[0], nullptr) << error_;
    ASSERT_NE(ranks_[1], nullptr) << error;
  }

  // Another program hardly takes the port of an address that nobody else has.
  const std::string leader_ = absl::StrCat("leader=127.", getpid() % 250 + 1, ".77.",
                                           getpid() / 250 % 250 + 1, ":", test::FreePort());
  lossd_server* ranks_[2] = {};
};

TEST_F(RanksTest, AreOneServer) {
  StartBoth();
  EXPECT_STREQ(TheLibrary().address(ranks_[1]), "");
  Train(ranks_[0]);
  EXPECT_THAT(Lossctl("server -o json", ranks_[0]).second, HasSubstr("\"rank\": 1"));
  EXPECT_EQ(TheLibrary().live(ranks_[1], nullptr), 1);
  TheLibrary().stop(ranks_[0]);
  EXPECT_EQ(TheLibrary().wait(ranks_[1], 60), LOSSD_DRAINED);
  TheLibrary().stop(ranks_[1]);
}

TEST_F(RanksTest, OneThatLeavesEndsTheServer) {
  StartBoth();
  Train(ranks_[0]);
  TheLibrary().stop(ranks_[1]);
  EXPECT_EQ(TheLibrary().wait(ranks_[0], 60), LOSSD_DRAINED);
  EXPECT_NE(Lossctl("heads", ranks_[0]).first, 0);
  TheLibrary().stop(ranks_[0]);
}

TEST_F(RanksTest, OneThatDoesNotComeIsNamed) {
  EXPECT_EQ(Start(Rank(0, {"rank_timeout=300ms"})), nullptr);
  EXPECT_EQ(code_, 4);
  EXPECT_THAT(error_, HasSubstr("rank 1"));
  EXPECT_EQ(Start(Rank(1, {"rank_timeout=300ms"})), nullptr);
  EXPECT_THAT(error_, HasSubstr("rank 1 was not taken"));
}

TEST_F(LibraryTest, ALostDeviceIsSaidAndDoesNotEndTheProcess) {
  const std::string lost = folder_.File("lost");
  setenv("LOSSD_LOSE_DEVICE", lost.c_str(), 1);
  lossd_server* const server = Start({"backend=cuda", "log_level=off", "workspace_bytes=1MiB"});
  ASSERT_NE(server, nullptr) << error_;
  Train(server);
  EXPECT_EQ(TheLibrary().wait(server, 0), LOSSD_SERVES);
  test::WriteWholeFile(lost, "");
  EXPECT_NE(Lossctl("loss lm --random=16", server).first, 0);
  EXPECT_EQ(TheLibrary().wait(server, 60), LOSSD_DEVICE_LOST);
  char* why = nullptr;
  ASSERT_EQ(TheLibrary().live(server, &why), 0);
  EXPECT_THAT(std::string(why), HasSubstr("device"));
  TheLibrary().free(why);
  TheLibrary().drain(server, 1);
  EXPECT_EQ(TheLibrary().wait(server, 0), LOSSD_DEVICE_LOST);
  TheLibrary().stop(server);  // returns, although giving the device's memory back would not
  unsetenv("LOSSD_LOSE_DEVICE");
}

}  // namespace
}  // namespace lossd::library_test
