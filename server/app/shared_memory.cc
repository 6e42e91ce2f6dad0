// SPDX-License-Identifier: Apache-2.0
#include "server/app/shared_memory.h"

#include <sys/socket.h>

#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "kernels/staging_adopter.h"
#include "server/log/log.h"

namespace lossd::app {
namespace {

// Beside the first Unix socket of gRPC, for then the file system says who may connect; else an abstract name.
std::string ChooseName(const std::vector<Address>& addresses) {
  for (const Address& address : addresses) {
    if (address.port == Address::kUnixSocket) return absl::StrCat(address.socket_path(), ".regions");
  }
  absl::BitGen generator;
  return absl::StrFormat("@lossd-%016x", absl::Uniform<uint64_t>(generator));
}

// The GPUs whose memory clients may have; empty: none.
std::vector<std::string> SharingDevices(const ServerOptions& options, kernels::Backend* backend) {
  if (options.shared_device_memory_bytes == 0) return {};
  return regions::SharingDevices(backend);
}

bool IsAbstract(absl::string_view name) { return !name.empty() && name.front() == '@'; }

absl::StatusOr<connections::ListeningSocket> Listen(const std::string& name, uint32_t mode) {
  if (IsAbstract(name)) return connections::ListeningSocket::OpenAbstract(name.substr(1), SOCK_SEQPACKET);
  return connections::ListeningSocket::OpenUnix(name, mode, SOCK_SEQPACKET);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedMemory>> SharedMemory::Start(const ServerOptions& options,
                                                                  const std::vector<Address>& addresses,
                                                                  kernels::Backend* backend) {
  const bool of_host =
      dynamic_cast<kernels::StagingAdopter*>(backend) != nullptr && options.shared_memory_bytes > 0;
  if (!of_host && SharingDevices(options, backend).empty()) return nullptr;
  const std::string name = options.region_socket.empty() ? ChooseName(addresses) : options.region_socket;
  absl::StatusOr<connections::ListeningSocket> listener = Listen(name, options.unix_socket_mode);
  if (listener.ok())
    return std::unique_ptr<SharedMemory>(new SharedMemory(name, *std::move(listener), options, backend));
  if (!options.region_socket.empty())
    return absl::UnavailableError(absl::StrCat("region_socket: ", listener.status().message()));
  log::Log(log::LogLevel::kWarning, "no shared memory for clients of this host",
           {{"error", listener.status().message()}});
  return nullptr;
}

SharedMemory::SharedMemory(std::string name, connections::ListeningSocket listener,
                           const ServerOptions& options, kernels::Backend* backend)
    : name_(std::move(name)),
      devices_(SharingDevices(options, backend)),
      device_bytes_(options.shared_device_memory_bytes),
      regions_(backend, {options.shared_memory_bytes, options.shared_device_memory_bytes},
               options.peer_share),
      sessions_(std::move(listener), &regions_, {.in_all = options.max_connections}) {}

std::vector<metrics::SharedMemoryUse> SharedMemory::UsesOf(const SharedMemory* shared) {
  std::vector<metrics::SharedMemoryUse> uses;
  if (shared == nullptr) return uses;
  for (const regions::RegionUse& use : shared->regions_.Uses()) {
    uses.push_back({use.device.empty() ? "host" : use.device, use.used_bytes, use.limit_bytes});
  }
  return uses;
}

}  // namespace lossd::app
