// SPDX-License-Identifier: Apache-2.0
// Checks of ServerOptions, and what follows from them.
//
// Stateless; thread-safe.
#ifndef LOSSD_SERVER_APP_CHECK_OPTIONS_H_
#define LOSSD_SERVER_APP_CHECK_OPTIONS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "kernels/backend.h"
#include "kernels/backend_choice.h"
#include "server/app/server.h"

namespace lossd::app {

// INVALID_ARGUMENT naming the first option that is out of range.
absl::Status CheckOptions(const ServerOptions& options);

// INVALID_ARGUMENT naming the option unless its value is above 0.
absl::Status CheckPositive(absl::string_view option, absl::Duration value);

// What computes.
kernels::BackendChoice BackendOf(const ServerOptions& options);

// The largest message of a call: a slice with its header, or an opening message, which clients keep below 4
// MiB.
int64_t MaxMessageBytes(const ServerOptions& options);

// ServerOptions::transport.bytes, or its default.
int64_t TransportBytes(const ServerOptions& options);

// ServerOptions::ledger_bytes, or its default.
int64_t LedgerBytes(const ServerOptions& options);

// ServerOptions::checkpoint_threads, or its default: at least one for each device.
int CheckpointThreads(const ServerOptions& options, const kernels::BackendInfo& backend);

}  // namespace lossd::app

#endif  // LOSSD_SERVER_APP_CHECK_OPTIONS_H_
