// SPDX-License-Identifier: Apache-2.0
#include "server/app/rank_parts.h"

#include <string>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kernels/errors/field_error.h"
#include "server/access/access_file.h"
#include "server/app/addresses.h"
#include "server/app/check_options.h"
#include "server/app/security.h"
#include "server/log/log.h"
#include "server/ranks/local_address.h"

namespace lossd::app {
namespace {

constexpr size_t kLeastSecretBytes = 16;
constexpr size_t kMostSecretBytes = 1024;
// So that a slice with all that belongs to its rows fits into a message.
constexpr int64_t kMostSliceBytes = int64_t{128} << 20;

// Where rank 0 listens for the others.
absl::StatusOr<Address> RankAddress(const RankOptions& options) {
  if (!options.listen.empty()) return ParseAddress("rank_listen", options.listen);
  absl::StatusOr<Address> leader = ParseAddress("leader", options.launch.leader);
  // A name may mean another address here than on the other hosts.
  if (leader.ok() && !IsLoopback(*leader)) leader->host = "[::]";
  return leader;
}

absl::Status CheckReach(const ServerOptions& options) {
  const absl::StatusOr<Address> leader = ParseAddress("leader", options.ranks.launch.leader);
  if (!leader.ok()) return leader.status();
  if (leader->port == Address::kUnixSocket) {
    return errors::FieldError("leader", "be host:port", options.ranks.launch.leader);
  }
  const absl::StatusOr<Address> listen = RankAddress(options.ranks);
  if (!listen.ok()) return listen.status();
  if (Asks(options.security) && options.ranks.secret_file.empty()) {
    return errors::FieldError(
        "rank_secret_file",
        "be given where clients are asked who they are (--token_file, --tls_client_ca), for a "
        "program that joins as a rank gets the weights of every head",
        "nothing");
  }
  const bool guarded = !options.ranks.ca.empty() && !options.ranks.secret_file.empty();
  if (guarded || options.security.insecure || (IsLoopback(*leader) && IsLoopback(*listen)))
    return absl::OkStatus();
  return errors::FieldError(
      "leader",
      "be a loopback address unless the ranks' connections are encrypted and ranks are admitted by a secret: "
      "give "
      "--tls_cert, --tls_key, --rank_ca and --rank_secret_file, or allow it with --insecure",
      options.ranks.launch.leader);
}

absl::StatusOr<std::string> ReadSecret(const RankOptions& options) {
  if (options.secret_file.empty()) return "";
  const access::AccessFile file = {"rank_secret_file", options.secret_file};
  absl::StatusOr<std::string> text = access::ReadAccessFile(file, access::Secrecy::kSecret);
  if (!text.ok()) return text.status();
  const std::string secret(absl::StripAsciiWhitespace(*text));
  for (const char c : secret) {
    if (!absl::ascii_isgraph(static_cast<unsigned char>(c))) {
      return access::AccessFileError(file, "hold one line of printable characters without spaces");
    }
  }
  if (secret.size() < kLeastSecretBytes || secret.size() > kMostSecretBytes) {
    return access::AccessFileError(
        file, absl::StrCat("hold ", kLeastSecretBytes, " to ", kMostSecretBytes, " characters"));
  }
  return secret;
}

std::string Text(bool value) { return value ? "true" : "false"; }

ranks::Settings SettingsOf(const ServerOptions& options, int devices) {
  return {{"version", options.version},
          {"messages between ranks", ranks::ProtocolHash()},
          {ranks::kDevices, absl::StrCat(devices)},
          {"ranks", absl::StrCat(options.ranks.launch.ranks)},
          {"deterministic", Text(options.deterministic)},
          {"split", options.split},
          {"collectives", options.ranks.collectives},
          {"collective_timeout", absl::FormatDuration(options.ranks.collective_timeout)},
          {"rank_silence_timeout", absl::FormatDuration(options.ranks.silence_timeout)},
          {"workspace_bytes", absl::StrCat(options.workspace_bytes)},
          {"memory_limit_bytes", absl::StrCat(options.memory_limit_bytes)},
          {"slice_bytes", absl::StrCat(options.slice_bytes)}};
}

ranks::ChannelLimits LimitsOf(const ServerOptions& options) {
  return {.slice_bytes = options.slice_bytes, .silence = options.ranks.silence_timeout};
}

}  // namespace

absl::Status CheckRanks(const ServerOptions& options) {
  const RankOptions& ranks = options.ranks;
  if (!ranks.several()) return absl::OkStatus();
  absl::Status status = CheckReach(options);
  if (options.replicas > 1) {
    status.Update(errors::FieldError("replicas", "be 1 with several ranks", options.replicas));
  }
  status.Update(CheckPositive("rank_timeout", ranks.timeout));
  status.Update(CheckPositive("rank_silence_timeout", ranks.silence_timeout));
  status.Update(CheckPositive("collective_timeout", ranks.collective_timeout));
  if (options.security.tls_cert.empty() != ranks.ca.empty()) {
    status.Update(errors::FieldError("rank_ca",
                                     "be given together with tls_cert where there are several ranks",
                                     ranks.ca.empty() ? "nothing" : ranks.ca));
  }
  if (options.slice_bytes > kMostSliceBytes) {
    status.Update(
        errors::FieldError("slice_bytes", "be at most 128 MiB with several ranks", options.slice_bytes));
  }
  return status;
}

absl::StatusOr<std::string> RankHost(const ServerOptions& options) {
  if (!options.ranks.host.empty()) return options.ranks.host;
  const absl::StatusOr<Address> leader = ParseAddress("leader", options.ranks.launch.leader);
  if (!leader.ok()) return leader.status();
  return ranks::LocalAddressFor(leader->host);
}

absl::Status CheckRankCount(const ServerOptions& options, int devices) {
  const int processes = options.ranks.launch.ranks;
  if (devices <= ranks::kMostRanks / processes) return absl::OkStatus();
  return errors::FieldError(
      "ranks", absl::StrCat("be at most ", ranks::kMostRanks / devices, " with ", devices, " devices each"),
      processes);
}

absl::StatusOr<std::unique_ptr<ranks::Leader>> StartLeader(
    const ServerOptions& options, int devices, const std::shared_ptr<grpc::ServerCredentials>& credentials) {
  const absl::StatusOr<Address> listen = RankAddress(options.ranks);
  if (!listen.ok()) return listen.status();
  const absl::StatusOr<kernels::Split> split = kernels::SplitOf(BackendOf(options));
  if (!split.ok()) return split.status();
  absl::StatusOr<std::string> secret = ReadSecret(options.ranks);
  if (!secret.ok()) return secret.status();
  const int ranks = options.ranks.launch.ranks * devices;
  absl::StatusOr<std::unique_ptr<ranks::Leader>> leader =
      ranks::Leader::Start({.ranks = ranks,
                            .devices = devices,
                            .host = listen->host,
                            .port = listen->port,
                            .credentials = credentials,
                            .secret = *std::move(secret),
                            .limits = LimitsOf(options),
                            .settings = SettingsOf(options, devices),
                            .group = {.split = *split},
                            .share_rows = options.ranks.shared_memory,
                            .timeout = options.ranks.timeout,
                            .collective_timeout = options.ranks.collective_timeout,
                            .stop = options.ranks.stop_requested});
  if (!leader.ok()) return leader.status();
  log::Log(log::LogLevel::kInfo, "waiting for the other ranks",
           {{"ranks", ranks}, {"port", (*leader)->port()}});
  return leader;
}

absl::StatusOr<std::unique_ptr<ranks::Worker>> CreateWorker(const ServerOptions& options, WorkerSpec spec,
                                                            kernels::CreatedBackend own) {
  absl::StatusOr<std::string> secret = ReadSecret(options.ranks);
  if (!secret.ok()) return secret.status();
  const bool local = !spec.local_address.empty();
  std::shared_ptr<grpc::ChannelCredentials> credentials = grpc::InsecureChannelCredentials();
  if (!local && !options.ranks.ca.empty()) {
    const absl::StatusOr<std::string> ca =
        access::ReadAccessFile({"rank_ca", options.ranks.ca}, access::Secrecy::kPublic);
    if (!ca.ok()) return ca.status();
    credentials = grpc::SslCredentials({.pem_root_certs = *ca, .pem_private_key = "", .pem_cert_chain = ""});
  }
  const int threads = CheckpointThreads(options, own.backend->info());
  return ranks::Worker::Create({.rank = spec.rank,
                                .leader = local ? spec.local_address : options.ranks.launch.leader,
                                .credentials = std::move(credentials),
                                .secret = *std::move(secret),
                                .limits = LimitsOf(options),
                                .settings = SettingsOf(options, spec.devices),
                                .files = {.directory = options.checkpoint_directory,
                                          .buffer_bytes = options.checkpoint_buffer_bytes,
                                          .reserve_bytes = options.memory_reserve_bytes,
                                          .threads = threads},
                                .timeout = options.ranks.timeout,
                                .on_joined = std::move(spec.on_joined),
                                .metrics = std::move(spec.metrics)},
                               std::move(own));
}

}  // namespace lossd::app
