// SPDX-License-Identifier: Apache-2.0
#include "server/app/port_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"

namespace lossd::app {

absl::Status WritePortFile(const std::string& path, const std::string& grpc, const std::string& http) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  const nlohmann::json addresses = {{"grpc", grpc}, {"http", http}};
  const std::string text = addresses.dump() + "\n";
  FILE* const file = std::fopen(temporary.c_str(), "w");
  if (file == nullptr)
    return absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot create ", temporary));
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const bool closed = std::fclose(file) == 0;
  if (written && closed && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("port_file: cannot write ", path));
  std::remove(temporary.c_str());
  return status;
}

}  // namespace lossd::app
