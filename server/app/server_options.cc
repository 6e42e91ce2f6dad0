// SPDX-License-Identifier: Apache-2.0
#include "server/app/server_options.h"

#include <unistd.h>

#include <cmath>
#include <optional>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "kernels/errors/status_macros.h"

using lossd::app::RankOptions;
using lossd::ranks::LaunchFlags;

ABSL_FLAG(
    std::string, launcher, LaunchFlags().launcher,
    "Several processes are one server (docs/scaling.md), started by torchrun, slurm, lws (LeaderWorkerSet) "
    "or "
    "jobset, whose environment says which of them this one is; auto: by whichever of these; none: --rank and "
    "--ranks say it, or there is one process");
ABSL_FLAG(int, ranks, 0,
          "How many processes are one server; 0: as the launcher says, or one. Each may have several devices "
          "(--devices, --cpu_devices), all as many");
ABSL_FLAG(
    int, rank, -1,
    "Which of them this one is; 0 serves clients, and the others compute for it. -1: as the launcher says");
ABSL_FLAG(std::string, leader, "",
          "Where the other ranks reach rank 0, host:port or host; empty: as the launcher says");
ABSL_FLAG(int, rank_port, LaunchFlags().port,
          "The port of rank 0 where --leader and the launcher give a host only");
ABSL_FLAG(
    std::string, rank_listen, RankOptions().listen,
    "Address where rank 0 waits for the others, host:port; empty: the port of --leader on all interfaces, "
    "or on the loopback if --leader is there");
ABSL_FLAG(
    std::string, collectives, RankOptions().collectives,
    "What carries sums and exchanges between ranks: nccl (GPUs, of which each rank has one of its own), "
    "gloo (through the memory of the hosts) or auto: nccl where it is there and the GPUs differ, else gloo");
ABSL_FLAG(std::string, rank_host, RankOptions().host,
          "Collectives gloo: an address of this host that the other ranks reach; empty: that of the way to "
          "--leader");
ABSL_FLAG(
    bool, rank_shared_memory, RankOptions().shared_memory,
    "Rows lie in memory that rank 0 shares with the ranks of its host; off, or where that cannot be, they "
    "travel over the ranks' connections");
ABSL_FLAG(
    std::string, rank_secret_file, RankOptions().secret_file,
    "A secret that all ranks have, and that admits them: a file of one line that only its owner can read");
ABSL_FLAG(std::string, rank_ca, RankOptions().ca,
          "Certificate authorities of rank 0's --tls_cert, a PEM file; the ranks' connections to it then are "
          "encrypted");
ABSL_FLAG(std::string, worker_http, RankOptions().worker_http,
          "Address for /livez and /readyz of the ranks that serve no clients; empty: none");
ABSL_FLAG(absl::Duration, rank_timeout, RankOptions().timeout,
          "End with an error if not all ranks have come together within this time");
ABSL_FLAG(absl::Duration, rank_silence_timeout, RankOptions().silence_timeout,
          "A rank that answers no ping for so long is lost, and all ranks end");
ABSL_FLAG(
    absl::Duration, collective_timeout, RankOptions().collective_timeout,
    "How long one rank or GPU may wait for another while gradients are added up, values are spread or a "
    "chunk of a head that is split by vocabulary is computed; then the device is lost");

namespace lossd::app {
namespace {

ranks::Environment ReadEnvironment() {
  ranks::Environment environment;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    environment.insert(std::pair<std::string, std::string>(absl::StrSplit(*entry, absl::MaxSplits('=', 1))));
  }
  return environment;
}

}  // namespace

absl::StatusOr<RankOptions> RankOptionsFromFlags() {
  LaunchFlags flags;
  flags.launcher = absl::GetFlag(FLAGS_launcher);
  if (const int ranks = absl::GetFlag(FLAGS_ranks); ranks != 0) flags.ranks = ranks;
  if (const int rank = absl::GetFlag(FLAGS_rank); rank != -1) flags.rank = rank;
  flags.leader = absl::GetFlag(FLAGS_leader);
  flags.port = absl::GetFlag(FLAGS_rank_port);
  LOSSD_TRY(ranks::Launch launch, ranks::ReadLaunch(flags, ReadEnvironment()));
  RankOptions options;
  options.launch = std::move(launch);
  options.listen = absl::GetFlag(FLAGS_rank_listen);
  options.collectives = absl::GetFlag(FLAGS_collectives);
  options.host = absl::GetFlag(FLAGS_rank_host);
  options.shared_memory = absl::GetFlag(FLAGS_rank_shared_memory);
  options.secret_file = absl::GetFlag(FLAGS_rank_secret_file);
  options.ca = absl::GetFlag(FLAGS_rank_ca);
  options.worker_http = absl::GetFlag(FLAGS_worker_http);
  options.timeout = absl::GetFlag(FLAGS_rank_timeout);
  options.silence_timeout = absl::GetFlag(FLAGS_rank_silence_timeout);
  options.collective_timeout = absl::GetFlag(FLAGS_collective_timeout);
  return options;
}

}  // namespace lossd::app

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

namespace {

struct Unit {
  absl::string_view name;
  double bytes;
};

constexpr Unit kUnits[] = {{"TiB", 1024.0 * 1024 * 1024 * 1024},
                           {"GiB", 1024.0 * 1024 * 1024},
                           {"MiB", 1024.0 * 1024},
                           {"KiB", 1024.0},
                           {"TB", 1e12},
                           {"GB", 1e9},
                           {"MB", 1e6},
                           {"KB", 1e3},
                           {"B", 1.0},
                           {"", 1.0}};

}  // namespace

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const size_t digits = text.find_last_of("0123456789.") + 1;
  const absl::string_view name = absl::StripAsciiWhitespace(text.substr(digits));
  double number = 0.0;
  const bool is_number =
      absl::SimpleAtod(text.substr(0, digits), &number) && text.find_first_of("eExX+-") > digits;
  for (const Unit& unit : kUnits) {
    if (!is_number || !absl::EqualsIgnoreCase(name, unit.name)) continue;
    const double bytes = std::round(number * unit.bytes);
    if (!(bytes >= 0.0 && bytes < 4.6e18)) break;
    size->bytes = static_cast<int64_t>(bytes);
    return true;
  }
  *error = "must be a number of bytes such as 4096, 64KiB or 2GiB";
  return false;
}

std::string AbslUnparseFlag(const ByteSize& size) {
  for (const Unit& unit : kUnits) {
    const auto bytes = static_cast<int64_t>(unit.bytes);
    const bool binary = absl::EndsWith(unit.name, "iB");
    if (binary && size.bytes != 0 && size.bytes % bytes == 0)
      return absl::StrCat(size.bytes / bytes, unit.name);
  }
  return absl::StrCat(size.bytes);
}

}  // namespace lossd::app
