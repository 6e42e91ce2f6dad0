// SPDX-License-Identifier: Apache-2.0
#include "server/engine/row_memory.h"

#include "absl/strings/str_cat.h"
#include "kernels/errors/bytes.h"

namespace lossd::engine {

using errors::ExactBytes;

absl::Status RowMemory::Account::Take(int64_t bytes) {
  if (memory_ == nullptr) return absl::OkStatus();
  FairShare& shares = memory_->shares_;
  switch (shares.Take(holder_, bytes)) {
    case FairShare::Answer::kYes:
      return absl::OkStatus();
    case FairShare::Answer::kFull:
      return absl::ResourceExhaustedError(absl::StrCat(
          "the memory for targets, weights and ledgers of rows has ", ExactBytes(shares.used()), " of ",
          ExactBytes(shares.capacity()), " in use, and ", ExactBytes(bytes),
          " more are needed (apply the step or zero its gradients, or start the server with more "
          "--ledger_bytes)"));
    case FairShare::Answer::kOverShare:
      break;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat(holder_, " has ", ExactBytes(shares.held(holder_)),
                   " of the memory for targets, weights and ledgers of rows; ", ExactBytes(bytes),
                   " more would be beyond its share, ", ExactBytes(shares.used()), " of ",
                   ExactBytes(shares.capacity()), " being in use (--ledger_bytes, --peer_share)"));
}

void RowMemory::Account::Give(int64_t bytes) {
  if (memory_ != nullptr) memory_->shares_.Give(holder_, bytes);
}

}  // namespace lossd::engine
