// SPDX-License-Identifier: Apache-2.0
#include "server/app/check_options.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/errors/field_error.h"
#include "server/app/rank_parts.h"

namespace lossd::app {
namespace {

constexpr int64_t kMebibyte = int64_t{1} << 20;
constexpr int kMostCheckpointThreads = 64;

absl::Status CheckAtLeast(absl::string_view option, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return errors::FieldError(option, absl::StrCat("be at least ", least), value);
}

absl::Status CheckClientLimits(const ServerOptions& options) {
  absl::Status status = CheckAtLeast("ledger_bytes", options.ledger_bytes, 0);
  if (!(options.peer_share > 0.0 && options.peer_share <= 1.0))
    status.Update(errors::FieldError("peer_share", "be in (0, 1]", options.peer_share));
  status.Update(CheckAtLeast("transport_bytes", TransportBytes(options), 4 * MaxMessageBytes(options)));
  status.Update(CheckAtLeast("max_calls_per_connection", options.transport.max_calls_per_connection, 1));
  status.Update(CheckAtLeast("max_connections", options.max_connections, 1));
  status.Update(CheckAtLeast("max_connections_per_address", options.max_connections_per_address, 1));
  status.Update(CheckAtLeast("max_tensor_calls", options.max_tensor_calls, 1));
  status.Update(CheckAtLeast("max_saves", options.max_saves, 1));
  status.Update(CheckAtLeast("max_waiting_calls", options.max_waiting_calls, 1));
  status.Update(CheckPositive("handshake_timeout", options.transport.handshake_timeout));
  status.Update(CheckPositive("idle_connection_timeout", options.transport.idle_connection_timeout));
  status.Update(CheckPositive("connection_age", options.transport.connection_age));
  status.Update(CheckPositive("open_timeout", options.timeouts.open));
  status.Update(CheckPositive("idle_timeout", options.timeouts.idle));
  status.Update(CheckPositive("turn_timeout", options.timeouts.turn));
  status.Update(CheckPositive("send_timeout", options.timeouts.send));
  return status;
}

}  // namespace

absl::Status CheckPositive(absl::string_view option, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return errors::FieldError(option, "be positive", absl::FormatDuration(value));
}

kernels::BackendChoice BackendOf(const ServerOptions& options) {
  return {.backend = options.backend,
          .device = options.device,
          .devices = options.devices,
          .stream_priority = options.stream_priority,
          .threads = options.threads,
          .cpu_devices = options.cpu_devices,
          .split = options.split,
          .replicas = options.replicas,
          .workspace_bytes = options.workspace_bytes,
          .memory_limit_bytes = options.memory_limit_bytes,
          .memory_reserve_bytes = options.memory_reserve_bytes,
          .deterministic = options.deterministic,
          .replica = {options.ranks.launch.rank, options.ranks.launch.ranks},
          .local_rank = options.ranks.launch.local_rank,
          .collectives = options.ranks.collectives,
          .link_timeout = options.ranks.collective_timeout};
}

int64_t MaxMessageBytes(const ServerOptions& options) {
  return std::max(options.slice_bytes, 4 * kMebibyte) + kMebibyte;
}

int64_t TransportBytes(const ServerOptions& options) {
  if (options.transport.bytes != 0) return options.transport.bytes;
  return std::max(256 * kMebibyte, 16 * MaxMessageBytes(options));
}

int64_t LedgerBytes(const ServerOptions& options) {
  if (options.ledger_bytes > 0) return options.ledger_bytes;
  constexpr int64_t kDefault = 256 * kMebibyte;
  return options.memory_limit_bytes > 0 ? std::min(kDefault, options.memory_limit_bytes / 8) : kDefault;
}

int CheckpointThreads(const ServerOptions& options, const kernels::BackendInfo& backend) {
  if (options.checkpoint_threads > 0) return options.checkpoint_threads;
  constexpr int kDefault = 4;
  const int devices = std::max(options.cpu_devices, static_cast<int>(backend.uuids.size()));
  return std::clamp(devices, kDefault, kMostCheckpointThreads);
}

absl::Status CheckOptions(const ServerOptions& options) {
  absl::Status status = CheckAtLeast("threads", options.threads, 0);
  if (!options.restore.empty() && options.restore != "latest")
    status.Update(errors::FieldError("restore", "be latest, or empty", options.restore));
  const std::string& priority = options.stream_priority;
  if (priority != "dx" && priority != "all" && priority != "none")
    status.Update(errors::FieldError("stream_priority", "be dx, all or none", priority));
  status.Update(CheckAtLeast("cpu_devices", options.cpu_devices, 1));
  status.Update(CheckAtLeast("workspace_bytes", options.workspace_bytes, 0));
  status.Update(CheckAtLeast("memory_limit_bytes", options.memory_limit_bytes, 0));
  status.Update(CheckAtLeast("memory_reserve_bytes", options.memory_reserve_bytes, 0));
  status.Update(CheckAtLeast("slice_bytes", options.slice_bytes, 64));
  status.Update(CheckAtLeast("staging_bytes", options.staging_bytes, 2 * options.slice_bytes));
  status.Update(CheckAtLeast("retained_bytes", options.retained_bytes, 0));
  status.Update(CheckAtLeast("shared_memory_bytes", options.shared_memory_bytes, 0));
  status.Update(CheckAtLeast("shared_device_memory_bytes", options.shared_device_memory_bytes, 0));
  status.Update(CheckAtLeast("checkpoint_buffer_bytes", options.checkpoint_buffer_bytes, 0));
  status.Update(CheckAtLeast("checkpoint_shard_bytes", options.checkpoint_shard_bytes, 1));
  status.Update(CheckAtLeast("checkpoint_threads", options.checkpoint_threads, 0));
  if (options.checkpoint_threads > kMostCheckpointThreads) {
    status.Update(errors::FieldError("checkpoint_threads",
                                     absl::StrCat("be at most ", kMostCheckpointThreads),
                                     options.checkpoint_threads));
  }
  status.Update(CheckAtLeast("keep_checkpoints", options.keep_checkpoints, 0));
  status.Update(CheckAtLeast("checkpoint_limit_bytes", options.checkpoint_limit_bytes, 0));
  status.Update(CheckAtLeast("max_streams", options.max_streams, 1));
  status.Update(CheckAtLeast("max_heads", options.max_heads, 1));
  if (options.slice_bytes > 1024 * kMebibyte) {
    status.Update(errors::FieldError("slice_bytes", "be at most 1 GiB", options.slice_bytes));
  }
  status.Update(CheckClientLimits(options));
  status.Update(CheckRanks(options));
  status.Update(CheckPositive("retained_timeout", options.retained_timeout));
  if (options.liveness_timeout < 2 * engine::kDeviceBeat) {
    status.Update(errors::FieldError("liveness_timeout", "be at least 2s",
                                     absl::FormatDuration(options.liveness_timeout)));
  }
  if (options.drain_timeout < absl::ZeroDuration()) {
    status.Update(
        errors::FieldError("drain_timeout", "not be negative", absl::FormatDuration(options.drain_timeout)));
  }
  return status;
}

}  // namespace lossd::app
