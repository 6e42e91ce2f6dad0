// SPDX-License-Identifier: Apache-2.0
// Numbers out of the server's metrics that watch shows. Pure functions, thread-safe.
#ifndef LOSSD_CLIENT_CLI_WATCH_SAMPLES_H_
#define LOSSD_CLIENT_CLI_WATCH_SAMPLES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "client/cli/metrics_text.h"
#include "client/cli/watch_view.h"

namespace lossd::cli {

inline constexpr char kMicrobatchSeconds[] = "lossd_microbatch_seconds";
inline constexpr char kPayloadBytes[] = "lossd_payload_bytes_total";
inline constexpr char kChunks[] = "lossd_chunks_total";
inline constexpr char kGradientErrorSum[] = "lossd_gradient_error_ratio_sum";
inline constexpr char kGradientErrorCount[] = "lossd_gradient_error_ratio_count";
inline constexpr char kBusySeconds[] = "lossd_device_busy_seconds_total";
inline constexpr char kHeadDeviceSeconds[] = "lossd_head_device_seconds_total";
inline constexpr char kHeadLoss[] = "lossd_head_loss";
inline constexpr char kHeadStep[] = "lossd_head_step";
inline constexpr char kDeviceLost[] = "lossd_device_lost";
inline constexpr char kStagingBytes[] = "lossd_staging_bytes";
inline constexpr char kStagingUsedBytes[] = "lossd_staging_used_bytes";

// The sum of the samples of this name, and with this label if one is given; nullopt if there are none.
std::optional<double> ValueOf(const std::vector<MetricSample>& metrics, const std::string& name,
                              const std::string& label = "", const std::string& value = "");

uint64_t QueuedSlices(const WatchSample& sample);

}  // namespace lossd::cli

#endif  // LOSSD_CLIENT_CLI_WATCH_SAMPLES_H_
