// SPDX-License-Identifier: Apache-2.0
// The flags that say how clients reach a server: its addresses.
#ifndef LOSSD_SERVER_APP_LISTEN_FLAGS_H_
#define LOSSD_SERVER_APP_LISTEN_FLAGS_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"
#include "server/app/server.h"

namespace lossd::app {

// Permissions of a file, as a flag takes them: octal, "0660".
struct FileMode {
  uint32_t bits = 0;
};
bool AbslParseFlag(absl::string_view text, FileMode* mode, std::string* error);
std::string AbslUnparseFlag(FileMode mode);

void SetListenOptions(ServerOptions* options);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_LISTEN_FLAGS_H_
