// SPDX-License-Identifier: Apache-2.0
// Why no connection to a server comes about, in words that say what to do.
// tests/client/golden/listeners.json has cases that the Python client shares
// (client/python/src/lossd/_diagnosis.py).
//
// Stateless and thread-safe.
#ifndef LOSSD_CLIENT_CPP_DIAGNOSIS_H_
#define LOSSD_CLIENT_CPP_DIAGNOSIS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/cpp/credentials.h"
#include "client/cpp/probe.h"

namespace lossd::client::internal {

// The error that a finding at `target` means; OK for kUnknown. UNAVAILABLE if nobody is there, which may
// change; FAILED_PRECONDITION and UNAUTHENTICATED for what waiting cannot mend. `options`: what the client
// was given.
absl::Status Explain(const Finding& finding, const std::string& target, const CredentialOptions& options);

// UNAVAILABLE: there is no server at `target`, because of `why`, a sentence without its full stop, or "".
absl::Status NoServerError(const std::string& target, absl::string_view why);

}  // namespace lossd::client::internal

#endif  // LOSSD_CLIENT_CPP_DIAGNOSIS_H_
