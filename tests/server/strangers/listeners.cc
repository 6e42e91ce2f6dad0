// SPDX-License-Identifier: Apache-2.0
#include "tests/server/strangers/listeners.h"

#include <arpa/inet.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace lossd::app::testing {
namespace {

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

}  // namespace

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

}  // namespace lossd::app::testing
