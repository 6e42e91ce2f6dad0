// SPDX-License-Identifier: Apache-2.0
// What the ranks of one server have to have in common. Pure functions; thread-safe.
#ifndef LOSSD_SERVER_RANKS_AGREEMENT_H_
#define LOSSD_SERVER_RANKS_AGREEMENT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/backend.h"
#include "kernels/rank_link.h"
#include "lossd/ranks/v1/ranks.pb.h"

namespace lossd::ranks {

// Names and values of what every rank has to have the same: flags, version and so on.
using Settings = std::vector<std::pair<std::string, std::string>>;

// `flags`, and what the backend adds to the settings of its rank: which it is, and the kind of its device.
Settings SettingsOf(Settings flags, const kernels::BackendInfo& backend);

// The name of the setting that says how many devices each process has, which are ranks of their own.
inline constexpr char kDevices[] = "number of devices";

// INVALID_ARGUMENT unless a worker's rank is in [1, ranks).
absl::Status CheckRank(const v1::Hello& worker, int ranks);

// Of the messages between ranks: two processes with the same value read each other's messages alike. 16
// hexadecimal digits.
std::string ProtocolHash();

// INVALID_ARGUMENT naming rank (or process, where processes have several devices), setting and both values if
// a worker's settings are not the leader's, or the memory of its GPU is not that of the leader's: a product
// may be sold with several sizes, and what is planned for one has to fit the other. Memories may differ by a
// hundredth, which drivers keep for themselves. `listener`: whoever says that it is a worker hears its own
// value alone.
enum class Listener : uint8_t { kLog, kWorker };
absl::Status CheckAgreement(const Settings& leader, const kernels::RankTraits& traits,
                            const v1::Hello& worker, Listener listener = Listener::kLog);

// DEADLINE_EXCEEDED naming the ranks that are `missing` of `ranks` after `timeout`, and the last refusal
// unless it is OK.
absl::Status NotCome(absl::Span<const int> missing, int ranks, absl::Duration timeout,
                     const absl::Status& refusal = absl::OkStatus());

}  // namespace lossd::ranks

#endif  // LOSSD_SERVER_RANKS_AGREEMENT_H_
