// SPDX-License-Identifier: Apache-2.0
#include "server/ranks/collectives.h"

#include <algorithm>
#include <cstdint>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kernels/errors/field_error.h"
#include "server/log/log.h"

namespace lossd::ranks {
namespace {

absl::Status CheckOffer(const std::string& collectives, const std::string& nccl_version,
                        const v1::Hello& worker) {
  const auto& offered = worker.collectives();
  if (std::find(offered.begin(), offered.end(), collectives) == offered.end()) {
    return errors::FieldError(absl::StrCat("rank ", worker.rank(), ": collectives"),
                              absl::StrCat("have ", collectives, ", as rank 0 has"),
                              absl::StrJoin(offered, ", "));
  }
  // Libraries of two versions do not exchange with each other.
  if (collectives != kernels::kNccl || worker.nccl_version() == nccl_version) return absl::OkStatus();
  return errors::FieldError(absl::StrCat("rank ", worker.rank(), ": version of NCCL"),
                            absl::StrCat("be what rank 0 has, ", nccl_version), worker.nccl_version());
}

}  // namespace

absl::Status CheckGpus(const std::string& why, const std::string& leader_gpu,
                       absl::Span<const v1::Hello> workers) {
  if (leader_gpu.empty()) return absl::OkStatus();
  std::map<std::string, uint32_t> taken = {{leader_gpu, 0}};
  for (const v1::Hello& worker : workers) {
    const auto [other, is_new] = taken.emplace(worker.gpu_uuid(), worker.rank());
    if (is_new) continue;
    return errors::FieldError(
        absl::StrCat("rank ", worker.rank(), ": device"),
        absl::StrCat("be a GPU of its own for ", why, ", and rank ", other->second, " has this one"),
        worker.gpu_uuid());
  }
  return absl::OkStatus();
}

absl::StatusOr<CollectivesChoice> ChooseCollectives(absl::Span<const std::string> offered,
                                                    const std::string& leader_gpu,
                                                    const std::string& nccl_version,
                                                    absl::Span<const v1::Hello> workers) {
  absl::Status in_the_way;  // of the best
  for (const std::string& collectives : offered) {
    absl::Status status =
        collectives == kernels::kNccl ? CheckGpus("collectives nccl", leader_gpu, workers) : absl::OkStatus();
    for (const v1::Hello& worker : workers) {
      status.Update(CheckOffer(collectives, nccl_version, worker));
    }
    if (status.ok()) return CollectivesChoice{collectives, std::string(in_the_way.message())};
    in_the_way.Update(status);
  }
  if (in_the_way.ok()) return absl::InternalError("rank 0 has no collectives");
  return in_the_way;
}

absl::StatusOr<std::string> UseCollectives(kernels::RankLink* link, const std::string& leader_gpu,
                                           int devices, absl::Span<const v1::Hello> workers) {
  if (devices > 1) {
    absl::Status status = CheckGpus("processes of several devices", leader_gpu, workers);
    if (!status.ok()) return status;
  }
  const absl::StatusOr<CollectivesChoice> choice =
      ChooseCollectives(link->CollectivesOffered(), leader_gpu, link->Traits().nccl_version, workers);
  if (!choice.ok()) return choice.status();
  const std::string& collectives = choice->collectives;
  if (choice->reason.empty()) {
    log::Log(log::LogLevel::kInfo, "ranks exchange", {{"collectives", collectives}});
  } else {
    log::Log(log::LogLevel::kWarning, "ranks exchange, but not the fastest way",
             {{"collectives", collectives}, {"reason", choice->reason}});
  }
  if (absl::Status status = link->UseCollectives(collectives); !status.ok()) return status;
  return collectives;
}

}  // namespace lossd::ranks
