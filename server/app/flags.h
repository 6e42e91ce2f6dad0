// SPDX-License-Identifier: Apache-2.0
// The flags that main.cc does not define, and the types of flags (FileMode, ByteSize). RankOptionsFromFlags
// reads the flags of several processes that are one server. SetListenOptions reads the flags of the server's
// addresses.
//
// All functions are thread-safe once the flags are parsed.
#ifndef LOSSD_SERVER_APP_FLAGS_H_
#define LOSSD_SERVER_APP_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/app/server_options.h"

namespace lossd::app {

// The options of several processes that are one server, from the flags and the environment. INVALID_ARGUMENT
// as ranks::ReadLaunch.
absl::StatusOr<RankOptions> RankOptionsFromFlags();

// Permissions of a file, as a flag takes them: octal, "0660".
struct FileMode {
  uint32_t bits = 0;
};
bool AbslParseFlag(absl::string_view text, FileMode* mode, std::string* error);
std::string AbslUnparseFlag(FileMode mode);

// Sets the options that say how clients reach a server (its addresses), from the flags.
void SetListenOptions(ServerOptions* options);

// A number of bytes as people write it on a command line: "4096", "64KiB", "256MiB", "1.5GiB".
struct ByteSize {
  int64_t bytes = 0;
  friend bool operator==(const ByteSize&, const ByteSize&) = default;
};

// Parses a flag: a number, possibly with a fraction, and one of the units B, KiB, MiB, GiB, TiB (1024
// each) or KB, MB, GB, TB (1000 each), in any case; without a unit: bytes. Refuses negative numbers and
// numbers from 2^62 on.
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
// The largest unit that divides the size: "256MiB".
std::string AbslUnparseFlag(const ByteSize& size);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_FLAGS_H_
