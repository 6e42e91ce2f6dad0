// SPDX-License-Identifier: Apache-2.0
// The memory that a server shares with programs of its host, and the socket where they open it.
#ifndef LOSSD_SERVER_APP_SHARED_MEMORY_H_
#define LOSSD_SERVER_APP_SHARED_MEMORY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "server/app/addresses.h"
#include "server/app/server.h"
#include "server/connections/listening_socket.h"
#include "server/metrics/shared_memory_metrics.h"
#include "server/regions/regions.h"
#include "server/regions/session_server.h"

namespace lossd::app {

// Thread-safe.
class SharedMemory {
 public:
  // Null if the options or the backend allow none; also, with a line in the log, if no socket was named and
  // none can be made. UNAVAILABLE naming the option region_socket.
  static absl::StatusOr<std::unique_ptr<SharedMemory>> Start(const ServerOptions& options,
                                                             const std::vector<Address>& addresses,
                                                             kernels::Backend* backend);

  regions::Regions* regions() { return &regions_; }
  // Of the thread that answers at the socket.
  absl::Duration Silence() const { return sessions_.Silence(); }
  // As ServerDescription.region_socket has it.
  const std::string& socket() const { return name_; }
  // As ServerDescription.region_devices has them.
  const std::vector<std::string>& devices() const { return devices_; }
  static std::vector<std::string> DevicesOf(const SharedMemory* shared) {
    return shared == nullptr ? std::vector<std::string>() : shared->devices();
  }
  // Of each of these devices, which clients may have; 0: none.
  int64_t device_bytes() const { return devices_.empty() ? 0 : device_bytes_; }
  // What clients have; nothing of null.
  static std::vector<metrics::SharedMemoryUse> UsesOf(const SharedMemory* shared);

 private:
  SharedMemory(std::string name, connections::ListeningSocket listener, const ServerOptions& options,
               kernels::Backend* backend);

  const std::string name_;
  const std::vector<std::string> devices_;
  const int64_t device_bytes_;
  regions::Regions regions_;
  regions::SessionServer sessions_;
};

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_SHARED_MEMORY_H_
