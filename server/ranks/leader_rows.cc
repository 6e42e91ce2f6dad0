// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/leader_rows.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/log/log.h"

namespace lossd::ranks {

void LeaderRows::Prepare(const Workers& workers, const std::string& collectives, bool share) {
  if (share) {
    absl::StatusOr<std::unique_ptr<SharedRows>> shared =
        SharedRows::Listen(static_cast<int>(workers.size()) + 1);
    if (shared.ok()) {
      shared_ = *std::move(shared);
    } else {
      log::Log(log::LogLevel::kWarning, "ranks share no memory", {{"error", shared.status().message()}});
    }
  }
  for (const auto& [rank, worker] : workers) {
    v1::Prepare prepare;
    prepare.set_collectives(collectives);
    if (shared_ != nullptr) {
      prepare.set_rows_socket(shared_->socket());
      prepare.set_rows_token(shared_->TokenOf(rank));
    }
    worker->Prepare(std::move(prepare));
  }
}

void LeaderRows::OnPrepared(WorkerStream& worker, const v1::Prepared& prepared) {
  if (shared_ != nullptr) worker.ShareRows(&shared_->regions());
  log::Log(log::LogLevel::kInfo, "rows of a rank",
           {{"rank", worker.rank()},
            {"in", prepared.rows_refused().empty() ? "shared memory" : prepared.rows_refused()}});
}

kernels::GroupOptions LeaderRows::Complete(kernels::GroupOptions group, const Workers& workers) {
  group.staging = shared_.get();
  group.check_members = [workers] {
    for (const auto& [rank, worker] : workers) {
      if (worker->lost()) return absl::UnavailableError(absl::StrCat("rank ", rank, " is lost"));
    }
    return absl::OkStatus();
  };
  return group;
}

}  // namespace lossd::ranks
