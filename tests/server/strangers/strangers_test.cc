// SPDX-License-Identifier: Apache-2.0
// A user of the server's host who has no certificate, no token and no secret, and does what
// stranger_process.cc says to every socket at which processes of a server listen: found in the kernel's
// tables, so that none is left out. After each act, while the stranger is still there, trainers of the
// server's user train, also over a new connection, a client opens a region of shared memory, /livez says that
// the server lives, and SIGTERM ends all processes in time, with status 0.
//
// Needs root, which becomes the stranger. Without root the tests are skipped, unless LOSSD_STRANGERS=require.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "client/cpp/client.h"
#include "tests/server/ranks/small_steps.h"
#include "tests/support/effort.h"
#include "tests/support/process_holdings.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"
#include "tests/support/temp_folder.h"

namespace lossd::app::testing::strangers_test {
namespace {

// ---- The sockets at which a process listens, as the kernel has them ----

std::set<std::string> SocketsOf(int process) {
  std::set<std::string> inodes;
  std::error_code error;
  for (const auto& entry :
       std::filesystem::directory_iterator(absl::StrCat("/proc/", process, "/fd"), error)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), error);
    if (absl::StartsWith(target, "socket:[")) inodes.insert(target.substr(8, target.size() - 9));
  }
  return inodes;
}

std::vector<std::vector<std::string>> Lines(const std::string& file) {
  std::vector<std::vector<std::string>> lines;
  std::ifstream stream(file);
  std::string line;
  std::getline(stream, line);  // the names of the columns
  while (std::getline(stream, line)) lines.push_back(absl::StrSplit(line, ' ', absl::SkipEmpty()));
  return lines;
}

// Of a column "0100007F:1F90": four bytes at a time in the machine's order.
std::string AddressOf(const std::string& column) {
  const std::vector<std::string> parts = absl::StrSplit(column, ':');
  const std::string& hex = parts[0];
  uint32_t words[4] = {};
  for (size_t i = 0; i < hex.size() / 8; ++i)
    words[i] = static_cast<uint32_t>(std::strtoul(hex.substr(8 * i, 8).c_str(), nullptr, 16));
  const int port = static_cast<int>(std::strtol(parts[1].c_str(), nullptr, 16));
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(hex.size() == 8 ? AF_INET : AF_INET6, words, text, sizeof(text));
  const std::string host = text;
  if (host == "0.0.0.0") return absl::StrCat("127.0.0.1:", port);
  return absl::StrCat(host == "::" ? "::1" : host, ":", port);
}

// As stranger_process takes them: "tcp:127.0.0.1:7070", "stream:/run/lossd/grpc", "packets:@lossd-0123".
std::vector<std::string> ListenersOf(int process) {
  const std::set<std::string> own = SocketsOf(process);
  std::vector<std::string> listeners;
  for (const char* const file : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    for (const auto& line : Lines(file)) {
      if (line.size() > 9 && line[3] == "0A" && own.count(line[9]) > 0)
        listeners.push_back(absl::StrCat("tcp:", AddressOf(line[1])));
    }
  }
  for (const auto& line : Lines("/proc/net/unix")) {
    if (line.size() < 8 || line[3] != "00010000" || own.count(line[6]) == 0) continue;
    listeners.push_back(absl::StrCat(line[4] == "0005" ? "packets:" : "stream:", line[7]));
  }
  return listeners;
}

// ---- The tests ----

constexpr uid_t kStranger = 65534;
constexpr absl::Duration kActLimit = absl::Seconds(60);
constexpr absl::Duration kEndLimit = absl::Seconds(30);  // of which 2 seconds are --drain_timeout

struct Configuration {
  const char* name;
  int processes = 1;
  bool unix_for_all = false;  // a Unix socket that everybody may connect to
  bool tls = false;           // client certificates, or with tokens those
  bool tokens = false;
  std::vector<std::string> flags = {};
  bool nightly = false;  // only
};

const Configuration kConfigurations[] = {
    {.name = "Loopback"},
    {.name = "UnixForAll", .unix_for_all = true, .tls = true, .tokens = true},
    {.name = "Certificates", .tls = true, .nightly = true},
    {.name = "Ranks", .processes = 2, .flags = {"--cpu_devices=2"}},
    {.name = "GuardedRanks",
     .processes = 2,
     .unix_for_all = true,
     .tls = true,
     .flags = {"--cpu_devices=2"},
     .nightly = true}};

struct Act {
  const char* name;
  int count;  // of connections to each socket
  int more;   // in the nightly suite
};

const Act kActs[] = {{"nothing", 8, 64},      {"half", 150, 400},   {"much", 8, 64},
                     {"descriptors", 8, 128}, {"lingering", 9, 24}, {"thousands", 300, 1100}};

// The kernel that the server sees.
enum class Kernel : uint8_t { kThis, kOld };

class Stranger {
 public:
  Stranger(const Act& act, const std::vector<std::string>& sockets) : done_(folder_.File("done")) {
    const auto count = static_cast<int>(test::Attempts(act.count, act.more));
    std::vector<std::string> command = {LOSSD_STRANGER_PROCESS, act.name, absl::StrCat(count), done_,
                                        absl::StrCat(kStranger)};
    command.insert(command.end(), sockets.begin(), sockets.end());
    process_ = std::make_unique<test::ChildProcess>(command);
  }
  bool AwaitDone() const {
    const absl::Time deadline = absl::Now() + kActLimit;
    while (absl::Now() < deadline && process_->Running()) {
      if (std::filesystem::exists(done_) && absl::StartsWith(test::ReadWholeFile(done_), "done")) return true;
      absl::SleepFor(absl::Milliseconds(10));
    }
    return false;
  }

 private:
  const test::TempFolder folder_;
  const std::string done_;
  std::unique_ptr<test::ChildProcess> process_;
};

class StrangersTest : public ::testing::TestWithParam<std::tuple<Configuration, Act, Kernel>> {
 protected:
  void SetUp() override {
    const char* const wish = std::getenv("LOSSD_STRANGERS");
    const bool required = wish != nullptr && absl::string_view(wish) == "require";
    if (geteuid() == 0) return;
    ASSERT_FALSE(required) << "only root can become another user";
    GTEST_SKIP() << "only root can become another user: nothing was tried";
  }

  static std::vector<std::string> Flags(const Configuration& configuration, const test::TestPki& pki,
                                        const std::string& socket) {
    std::vector<std::string> flags = configuration.flags;
    flags.push_back("--http=127.0.0.1:0");
    flags.push_back("--drain_timeout=2s");
    flags.push_back("--log_level=info");
    if (configuration.unix_for_all) {
      flags.push_back(absl::StrCat("--listen=unix:", socket, ",127.0.0.1:0"));
      flags.push_back("--unix_socket_mode=0666");
    }
    if (!configuration.tls) return flags;
    flags.push_back(absl::StrCat("--tls_cert=", pki.Certificate("server")));
    flags.push_back(absl::StrCat("--tls_key=", pki.Key("server")));
    if (configuration.tokens) {
      flags.push_back(
          absl::StrCat("--token_file=", pki.Secret("tokens", "admin:ops:a-token-of-an-admin-1\n")));
    } else {
      test::WriteWholeFile(pki.File("roles"), "admin dns:operator\n");
      flags.push_back(absl::StrCat("--tls_client_ca=", pki.Certificate("ca")));
      flags.push_back(absl::StrCat("--role_file=", pki.File("roles")));
    }
    if (configuration.processes > 1) {
      flags.push_back(absl::StrCat("--rank_ca=", pki.Certificate("ca")));
      flags.push_back(absl::StrCat("--rank_secret_file=", pki.Secret("secret", "the-secret-of-all-ranks\n")));
    }
    return flags;
  }

  std::unique_ptr<client::Client> Connect(const std::string& target) const {
    const auto& configuration = std::get<0>(GetParam());
    client::ClientOptions options{.target = target, .retry = {.max_attempts = 3}};
    if (configuration.tls) {
      client::CredentialOptions credentials;
      credentials.ca = pki_.Certificate("ca");
      if (configuration.tokens) {
        credentials.token = "a-token-of-an-admin-1";
      } else {
        credentials.cert = pki_.Certificate("operator");
        credentials.key = pki_.Key("operator");
      }
      options.credentials = client::Credentials::Create(credentials).value();
    }
    auto client = client::Client::Connect(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  void ExpectTrains(client::Client* client) {
    if (client == nullptr) return;
    const absl::Status status = DoStep(*client, data_, step_);
    EXPECT_TRUE(status.ok()) << status;
    if (status.ok()) ++step_;
  }

  test::TestPki pki_;
  std::mt19937_64 rng_{1};
  const std::vector<SmallRows> data_ = {MakeSmallRows(90, rng_), MakeSmallRows(40, rng_)};
  uint64_t step_ = 0;
};

TEST_P(StrangersTest, TrainersTrainTheServerLivesAndEnds) {
  const auto& [configuration, act, kernel] = GetParam();
  if (configuration.nightly && !test::Nightly()) GTEST_SKIP() << "in the nightly suite";
  pki_.Issue("operator", "DNS:operator");
  const test::TempFolder folder;
  std::filesystem::permissions(folder.path(), std::filesystem::perms::all);  // the stranger finds the socket
  if (kernel == Kernel::kOld) setenv("LD_PRELOAD", LOSSD_OLD_KERNEL, 1);
  test::RankServer server(LOSSD_BINARY, {.ranks = configuration.processes,
                                         .flags = Flags(configuration, pki_, folder.File("grpc"))});
  unsetenv("LD_PRELOAD");
  std::vector<std::string> sockets;
  for (int rank = 0; rank < configuration.processes; ++rank) {
    for (std::string& socket : ListenersOf(server.rank(rank).pid())) sockets.push_back(std::move(socket));
  }
  ASSERT_FALSE(sockets.empty());
  for (const std::string& socket : sockets) std::cout << "  " << socket << "\n";

  const std::vector<std::string> targets = absl::StrSplit(server.target(), ',');
  const std::unique_ptr<client::Client> trainer = Connect(targets.back());
  ASSERT_NE(trainer, nullptr);
  ASSERT_TRUE(trainer->CreateHead(SmallHead()).ok());
  ExpectTrains(trainer.get());
  const auto description = trainer->GetServer();
  ASSERT_TRUE(description.ok()) << description.status();

  const Stranger stranger(act, sockets);
  EXPECT_TRUE(stranger.AwaitDone());
  ExpectTrains(trainer.get());
  ExpectTrains(Connect(targets.back()).get());
  if (targets.size() > 1) ExpectTrains(Connect(targets.front()).get());
  if (!description->region_socket().empty()) {
    const test::RawRegion region(description->region_socket(), 4096, /*of_device=*/false);
    EXPECT_NE(region.data(), nullptr);
  }
  EXPECT_EQ(test::HttpStatus(test::HttpGet(server.http(), "/livez")), 200);
  for (int rank = 0; rank < configuration.processes; ++rank) server.rank(rank).Signal(SIGTERM);
  for (int rank = 0; rank < configuration.processes; ++rank)
    EXPECT_EQ(server.rank(rank).WaitFor(kEndLimit), 0) << "rank " << rank << ":\n" << server.log(rank);
}

std::string NameOf(const ::testing::TestParamInfo<StrangersTest::ParamType>& info) {
  return absl::StrCat(std::get<0>(info.param).name, "_", std::get<1>(info.param).name,
                      std::get<2>(info.param) == Kernel::kOld ? "_old_kernel" : "");
}

INSTANTIATE_TEST_SUITE_P(All, StrangersTest,
                         ::testing::Combine(::testing::ValuesIn(kConfigurations), ::testing::ValuesIn(kActs),
                                            ::testing::Values(Kernel::kThis, Kernel::kOld)),
                         NameOf);

}  // namespace
}  // namespace lossd::app::testing::strangers_test
