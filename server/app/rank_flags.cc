// SPDX-License-Identifier: Apache-2.0
#include "server/app/rank_flags.h"

#include <unistd.h>

#include <optional>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_split.h"

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
  absl::StatusOr<ranks::Launch> launch = ranks::ReadLaunch(flags, ReadEnvironment());
  if (!launch.ok()) return launch.status();
  RankOptions options;
  options.launch = *std::move(launch);
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
