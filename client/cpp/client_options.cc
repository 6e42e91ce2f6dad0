// SPDX-License-Identifier: Apache-2.0
#include "client/cpp/client_options.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "client/cpp/call_errors.h"
#include "kernels/errors/field_error.h"

namespace lossd::client {
namespace {

constexpr size_t kMostCharacters = 128;
constexpr size_t kMostOfHost = 64;

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

// "<host>:<pid>-<8 hexadecimal digits>".
std::string OwnName() {
  char host[256] = {};
  if (gethostname(host, sizeof(host) - 1) != 0) host[0] = '\0';
  std::string name = errors::Shortened(errors::ValidUtf8(host), kMostOfHost);
  name.erase(std::remove_if(name.begin(), name.end(), IsControl), name.end());
  return absl::StrCat(name, ":", getpid(), "-", internal::RandomDigits(8));
}

}  // namespace

std::string RunFromEnvironment() {
  const char* const value = std::getenv("LOSSD_RUN");
  return value == nullptr || *value == '\0' ? OwnName() : value;
}

namespace internal {

absl::Status CheckRunName(absl::string_view run) {
  const auto is_first = [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  };  // of a character
  const auto characters = static_cast<size_t>(std::count_if(run.begin(), run.end(), is_first));
  const bool printable = errors::ValidUtf8(run) == run && std::none_of(run.begin(), run.end(), IsControl);
  if (printable && characters <= kMostCharacters) return absl::OkStatus();
  return ArgumentError("options.run", errors::ValidUtf8(run),
                       absl::StrCat(printable ? absl::StrCat("has ", characters, " characters")
                                              : "has a character that is not printable",
                                    "; it must be at most ", kMostCharacters, " printable characters"));
}

std::string RandomDigits(int digits) {
  std::random_device random;
  std::string text;
  for (int i = 0; i < digits; i += 8) absl::StrAppend(&text, absl::Hex(random(), absl::kZeroPad8));
  return text;
}

}  // namespace internal
}  // namespace lossd::client
