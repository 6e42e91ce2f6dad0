// SPDX-License-Identifier: Apache-2.0
#include "server/app/listen_flags.h"

#include "absl/flags/flag.h"
#include "absl/strings/str_format.h"
#include "server/app/byte_size.h"

using lossd::app::FileMode;
using lossd::app::ServerOptions;

ABSL_FLAG(
    std::string, listen, ServerOptions().listen,
    "Addresses for gRPC, host:port or unix:PATH, several with commas between them; port 0: any free one");
ABSL_FLAG(FileMode, unix_socket_mode, FileMode{ServerOptions().unix_socket_mode},
          "Permissions of the files of Unix sockets, octal: who may connect besides the server's own user");

ABSL_FLAG(lossd::app::ByteSize, shared_memory_bytes, {ServerOptions().shared_memory_bytes},
          "Memory that clients of this host may share with the server, so that slices need no copy through a "
          "socket; "
          "taken as they open it; 0: none");
ABSL_FLAG(lossd::app::ByteSize, shared_device_memory_bytes, {ServerOptions().shared_device_memory_bytes},
          "Memory of the GPU that clients of this host may share with the server, so that their CUDA tensors "
          "need no copy through memory of the host; taken as they open it; 0: none");
ABSL_FLAG(std::string, region_socket, "",
          "Where clients of this host open shared memory: a path, or @ and a name in the abstract namespace; "
          "empty: "
          "beside a Unix socket of --listen, else a random name");

ABSL_FLAG(absl::Duration, connection_age, ServerOptions().transport.connection_age,
          "With --tls_client_ca: a gRPC connection takes new calls for so long, and then clients connect "
          "again by themselves, with "
          "the certificate that they have then");

namespace lossd::app {

bool AbslParseFlag(absl::string_view text, FileMode* mode, std::string* error) {
  mode->bits = 0;
  bool right = !text.empty() && text.size() <= 4;
  for (const char digit : text) {
    right = right && digit >= '0' && digit <= '7';
    mode->bits = mode->bits * 8 + static_cast<uint32_t>(digit - '0');
  }
  if (right && mode->bits <= 0777) return true;
  *error = "must be octal digits, at most 0777, as in 0660";
  return false;
}

std::string AbslUnparseFlag(FileMode mode) { return absl::StrFormat("0%o", mode.bits); }

void SetListenOptions(ServerOptions* options) {
  options->listen = absl::GetFlag(FLAGS_listen);
  options->unix_socket_mode = absl::GetFlag(FLAGS_unix_socket_mode).bits;
  options->shared_memory_bytes = absl::GetFlag(FLAGS_shared_memory_bytes).bytes;
  options->shared_device_memory_bytes = absl::GetFlag(FLAGS_shared_device_memory_bytes).bytes;
  options->region_socket = absl::GetFlag(FLAGS_region_socket);
  options->transport.connection_age = absl::GetFlag(FLAGS_connection_age);
}

}  // namespace lossd::app
